"""Report: what a person sees (tables, progress, summary) and what a run leaves behind (metrics, logs).

No torch, no MPI.
"""
