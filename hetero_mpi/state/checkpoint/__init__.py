"""Checkpoints: one self-describing HDF5 file per step, keyed by Hugging Face parameter names (docs/checkpoint.md)."""

from hetero_mpi.state.checkpoint.directory import checkpoint_path, lowest_held_out, newest_good, prune, set_aside
from hetero_mpi.state.checkpoint.format import KINDS, PIECE_BYTES, CheckpointError, cut, piece_count, pieces
from hetero_mpi.state.checkpoint.reader import CheckpointReader, verify
from hetero_mpi.state.checkpoint.writer import CheckpointWriter

__all__ = [
    "KINDS",
    "PIECE_BYTES",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "checkpoint_path",
    "cut",
    "lowest_held_out",
    "newest_good",
    "piece_count",
    "pieces",
    "prune",
    "set_aside",
    "verify",
]
