"""Programs that get a run's metrics, too, a module each: ``[report] trackers`` takes the name of any file in this folder.

A module states in its docstring's first line which program it is, and holds

    open_tracker(run_dir, job) -> Tracker

``run_dir`` is the run's directory: what the program writes is in a directory of its own there, and the run's name is the
directory's. ``job``: the job's values, for programs that show them. The program's package is imported inside, on rank 0 of a job
that names it. A tracker that cannot be opened, or fails later, ends no run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hetero_mpi.util.plug_ins import plug_in_names

NAMES = plug_in_names(__name__)
PROJECT = "hetero_mpi"
"""In Weights & Biases and Trackio, unless ``WANDB_PROJECT`` or ``TRACKIO_PROJECT`` names another."""


class Tracker(Protocol):
    """Keeps numbers by step; runs of wandb and Trackio are such objects."""

    def log(self, values: dict[str, float], *, step: int) -> None: ...

    def finish(self) -> None: ...


def run_keywords(variable: str, run_dir: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords by which both services know a run. A resumed run is another one of its group."""
    project = os.environ.get(variable, PROJECT)
    return {"project": project, "name": run_dir.name, "group": run_dir.name, "config": dict(job)}
