"""Experiment trackers that receive a run's metrics, one module each: ``[report] trackers`` lists file names of this folder.

The first line of a module's docstring names the tracker. A module defines

    open_tracker(run_dir, job) -> Tracker

``run_dir`` is the run directory. The tracker writes into a sub-directory of it and uses its name as the name of the run. ``job``
has the job's values, for trackers that show them. The function imports the tracker's package, which only rank 0 of a job that uses
the tracker therefore needs. A tracker that cannot be opened, or fails later, does not end the run.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hetero_mpi.util.plug_ins import plug_in_names

NAMES = plug_in_names(__name__)
PROJECT = "hetero_mpi"
"""Default name of the project in Weights & Biases and Trackio; ``WANDB_PROJECT`` and ``TRACKIO_PROJECT`` override it."""


class Tracker(Protocol):
    """An experiment tracker, which stores numbers by step. The run objects of wandb and Trackio satisfy this protocol."""

    def log(self, values: dict[str, float], *, step: int) -> None: ...

    def finish(self) -> None: ...


def run_keywords(variable: str, run_dir: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that identify a run in wandb and Trackio. A resumed run is a new run in the same group."""
    project = os.environ.get(variable, PROJECT)
    return {"project": project, "name": run_dir.name, "group": run_dir.name, "config": dict(job)}
