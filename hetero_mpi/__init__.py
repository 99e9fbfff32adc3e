"""hetero_mpi: train and fine-tune language models over unlike machines, in one MPI job.

Run it with ``mpirun -np 3 python -m hetero_mpi train jobs/quickstart.toml``. Importing the package is cheap: torch, mpi4py
and transformers are imported by the rooms that need them, when they need them.
"""

__version__ = "0.1.0"
