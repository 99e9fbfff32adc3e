"""Reports of plans, profiles and runs: text, tables, progress, figures and the report page. Imports neither torch nor MPI."""
