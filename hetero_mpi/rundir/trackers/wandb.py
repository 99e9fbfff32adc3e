"""Weights & Biases, in the run's directory. Offline if ``WANDB_MODE`` says so or no API key is known, so it never prompts."""

import netrc
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.trackers import Tracker, run_keywords


def open_tracker(run_dir: Path, job: Mapping[str, Any]) -> Tracker:
    import wandb

    mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
    settings = wandb.Settings(silent=True, init_timeout=30)
    run: Any = wandb.init(dir=str(run_dir), mode=mode, settings=settings, **run_keywords("WANDB_PROJECT", run_dir, job))
    where = f"offline; to upload it later, run: wandb sync {Path(run.dir).parent}" if mode == "offline" else run.url
    say(f"wandb: {where}")
    return run


def _has_key() -> bool:
    """Return whether there is an API key for Weights & Biases, either in the environment or stored by ``wandb login``."""
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return "WANDB_API_KEY" in os.environ or netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
