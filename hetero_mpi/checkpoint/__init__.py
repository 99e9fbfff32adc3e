"""Checkpoints: one self-describing HDF5 file per step, keyed by Hugging Face parameter names (docs/checkpoint.md)."""

from hetero_mpi.checkpoint.directory import checkpoint_path, newest_good, prune, set_aside
from hetero_mpi.checkpoint.errors import CheckpointError
from hetero_mpi.checkpoint.reader import CheckpointReader, verify
from hetero_mpi.checkpoint.writer import CheckpointWriter

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "checkpoint_path",
    "newest_good",
    "prune",
    "set_aside",
    "verify",
]
