"""``cache``: what this machine keeps for later starts."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable

from hetero_mpi.util import units
from hetero_mpi.util.disk import cache_folder, write_errors

ABOUT = "show what this machine keeps for later starts; token ids, times of devices"
_KINDS = {"tokens": "token ids of data", "profiles": "times of devices", "datasets": "data of Python programs"}


def add_options(add: Callable[..., argparse.Action]) -> None:
    add("--empty", action="store_true", help="remove it; whatever is needed is made again")


def run(empty: bool) -> list[str]:
    """A line for each kind: entries, bytes and folder. ``empty``: they are removed. Raises UserError: they cannot be."""
    lines = []
    for kind, what in _KINDS.items():
        folder = cache_folder(kind)
        entries = list(folder.iterdir()) if folder.is_dir() else []
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if empty and entries:
            with write_errors(folder, "remove it yourself"):
                shutil.rmtree(folder)
        lines.append(f"{what}: {len(entries):,}, {units.size(size)}{' removed' if empty else ''} ({folder})")
    return lines
