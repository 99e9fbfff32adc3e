"""Checkpoints that tests write themselves."""

from pathlib import Path
from typing import Any

import numpy as np

from hetero_mpi.state.writer import CheckpointWriter


def told(step: int, **more: Any) -> dict[str, Any]:
    """The least that the metadata of a checkpoint after so many steps must hold, and ``more``."""
    losses = np.linspace(4.0, 3.0, step)
    job = {"train": {"steps": 200}, "data": {}}
    return {"step": step, "updates": step, "losses": losses, "loss_scale": [1.0, 0], "job": job, **more}


def write_checkpoint(path: Path, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    """Parameters of these names and shapes, all ones, and their moments."""
    with CheckpointWriter(path, metadata) as writer:
        for name, shape in shapes.items():
            for kind in ("parameters", "moments1", "moments2"):
                writer.write(kind, name, np.ones(shape, np.float32), "float32")
    return path
