"""The sub-command ``cache [--empty]``: what this machine keeps that can be made again. Standard library only."""

from __future__ import annotations

import shutil

from hetero_mpi import units
from hetero_mpi.disk import cache_folder, writing

_KINDS = {"tokens": "token ids of data", "profiles": "times of devices"}


def cache(empty: bool) -> list[str]:
    """A line for each kind: entries, bytes and folder. ``empty``: they are removed. Raises UserError: they cannot be."""
    lines = []
    for kind, what in _KINDS.items():
        folder = cache_folder(kind)
        entries = list(folder.iterdir()) if folder.is_dir() else []
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if empty and entries:
            with writing(folder, "remove it yourself"):
                shutil.rmtree(folder)
        lines.append(f"{what}: {len(entries):,}, {units.size(size)}{' removed' if empty else ''} ({folder})")
    return lines
