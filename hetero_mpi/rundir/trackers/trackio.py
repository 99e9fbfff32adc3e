"""Trackio, stored on this machine (``TRACKIO_DIR``); ``trackio show`` displays it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_mpi.rundir.trackers import Tracker, run_keywords


def open_tracker(run_dir: Path, job: Mapping[str, Any]) -> Tracker:
    import trackio

    run: Any = trackio.init(embed=False, **run_keywords("TRACKIO_PROJECT", run_dir, job))
    return run
