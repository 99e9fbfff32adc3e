"""What a person sees when a checkpoint cannot be written or read."""

from __future__ import annotations

from hetero_mpi.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be used or written; the message names the file, where known the dataset, and why."""
