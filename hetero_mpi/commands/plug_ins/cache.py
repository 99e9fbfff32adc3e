"""The command ``cache``: show and clear this machine's caches."""

import argparse
import shutil
from collections.abc import Callable

from hetero_mpi.util import units
from hetero_mpi.util.disk import cache_folder, write_errors

ABOUT = "show or clear this machine's caches; token ids, device measurements"
_KINDS = {"tokens": "token ids of data", "profiles": "device measurements", "datasets": "data of Python programs"}


def add_options(add: Callable[..., argparse.Action]) -> None:
    add("--empty", action="store_true", help="clear the caches; later runs rebuild them as needed")


def run(empty: bool) -> list[str]:
    """Report the entries, size and folder of each cache; clear the caches if ``empty``. Raises UserError if that fails."""
    lines = []
    for kind, description in _KINDS.items():
        folder = cache_folder(kind)
        entries = list(folder.iterdir()) if folder.is_dir() else []
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if empty and entries:
            with write_errors(folder, "remove it yourself"):
                shutil.rmtree(folder)
        lines.append(f"{description}: {len(entries):,}, {units.size(size)}{' removed' if empty else ''} ({folder})")
    return lines
