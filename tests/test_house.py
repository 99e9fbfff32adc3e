"""The house rules that a reader relies on: which room imports from which, and what the README says (more: test_docs.py)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hetero_mpi"
ROOMS = [
    "job",
    "comm",
    "planning",
    "data",
    "device",
    "checkpoint",
    "report",
    "launch",
    "model",
    "profiling",
    "training",
]
"""Bottom to top; a room may import from those before it, and from itself."""
FURNITURE = {"errors", "shipped", "text"}
JOB_FILES = {"job", "job_contradictions", "job_rules", "job_tables", "job_toml"}
BANS = {
    "planning": {"torch", "mpi4py", "pydantic", "h5py", "transformers"},
    "comm": {"torch", "transformers"},
    "device": {"mpi4py"},
    "model": {"mpi4py"},
    "data": {"mpi4py", "torch"},
    "checkpoint": {"mpi4py", "torch"},
}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "job" if part in JOB_FILES else part


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_import_downward_only(path: Path) -> None:
    room = room_of(path)
    if room not in ROOMS:
        return  # cli, reference and the like stand above all rooms
    allowed = set(ROOMS[: ROOMS.index(room) + 1]) | FURNITURE
    for name in imported(path):
        if name.startswith("hetero_mpi."):
            other = name.split(".")[1]
            other = "job" if other in JOB_FILES else other
            assert other in allowed, f"{path.name} ({room}) imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_room_imports_what_it_must_not(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported(path)}
    assert not tops & BANS.get(room_of(path), set())
    assert not tops & {"pickle", "dill", "cloudpickle"}


def test_readme_and_ci_run_the_same_tests() -> None:
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"<!-- test-command -->\n```sh\n(.*?)```", readme, re.DOTALL)
    assert block is not None and ".venv/bin/python -m pytest" in block[1]
    assert "<!-- test-command -->" in (ROOT / ".ci" / "run").read_text()


def test_families_in_the_readme_are_the_proven_ones() -> None:
    from hetero_mpi.model.transformers.families import PROVEN_FAMILIES

    found = re.search(r"of \[(\d+) proven families\]\(docs/models\.md\)", (ROOT / "README.md").read_text())
    assert found is not None and int(found[1]) == len(PROVEN_FAMILIES)
