"""Text, tables, progress, pictures and the report page of plans, profiles and runs; and the files of a run (metrics, logs).

No torch, no MPI.
"""
