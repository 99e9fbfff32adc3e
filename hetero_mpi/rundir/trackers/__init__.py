"""Experiment trackers that receive a run's metrics, one module each: ``[report] trackers`` lists file names of this folder.

The first line of a module's docstring names the tracker. A module defines

    open_tracker(run_dir, job) -> Tracker

``run_dir`` is the run's directory: the tracker writes into its own sub-directory, and the run's name is the directory's. ``job``
holds the job's values, for trackers that show them. The tracker's package is imported inside, on rank 0 of a job that requests
it. A tracker that cannot be opened, or fails later, does not end the run.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hetero_mpi.util.plug_ins import plug_in_names

NAMES = plug_in_names(__name__)
PROJECT = "hetero_mpi"
"""Project in Weights & Biases and Trackio, unless ``WANDB_PROJECT`` or ``TRACKIO_PROJECT`` is set."""


class Tracker(Protocol):
    """Stores numbers by step; runs of wandb and Trackio satisfy it."""

    def log(self, values: dict[str, float], *, step: int) -> None: ...

    def finish(self) -> None: ...


def run_keywords(variable: str, run_dir: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords that identify a run for both services. A resumed run is another run of the same group."""
    project = os.environ.get(variable, PROJECT)
    return {"project": project, "name": run_dir.name, "group": run_dir.name, "config": dict(job)}
