"""What a person sees (tables, progress, summary, pictures, the report page), and the files of a run (metrics, logs).

No torch, no MPI.
"""
