"""Report plans, profiles and runs as text, tables, figures and an HTML page. Imports neither torch nor MPI."""
