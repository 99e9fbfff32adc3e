"""Each module of the package and the test files to run after a change of it: the table in tests/MODULES.md.

A module's tests are the files that import it, themselves or in a program that they run on ranks. Where none does, they are the
tests of the modules that import it, the nearest ones.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.support.mpi import ROOT

SHOWN = 4
"""Test files named of a module, those first that stand in the folder of its package and import the fewest modules."""


def modules() -> dict[str, Path]:
    """Name -> file of each module and package."""
    found = {}
    for file in sorted((ROOT / "hetero_mpi").rglob("*.py")):
        found[".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = file
    return found


def imported(file: Path, known: dict[str, Path]) -> set[str]:
    """Names of the ``known`` modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & known.keys()


def programs(test: Path) -> list[Path]:
    """Files of tests/programs that a test names."""
    words = {node.value for node in ast.walk(ast.parse(test.read_text())) if isinstance(node, ast.Constant)}
    return [
        file
        for file in sorted((ROOT / "tests" / "programs").glob("*.py"))
        if words & {file.stem, f"tests/programs/{file.name}"}
    ]


def tests_of_modules() -> dict[str, list[str]]:
    """Module -> its test files, relative to tests/. Empty: no test reaches it."""
    known = modules()
    importers = defaultdict(set)
    for name, file in known.items():
        for other in imported(file, known) - {name}:
            importers[other].add(name)
    for name in known.keys() - importers.keys():  # found by its place in a folder, or run as a program
        importers[name].add(name.rpartition(".")[0])
    direct = defaultdict(set)
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in set().union(*(imported(file, known) for file in [test, *programs(test)])):
            direct[name].add(str(test.relative_to(ROOT / "tests")))
    breadth = {test: sum(test in tests for tests in direct.values()) for tests in direct.values() for test in tests}
    found = {}
    for name, file in known.items():
        if file.name in ("__init__.py", "__main__.py"):
            continue
        near, seen = {name}, {name}
        while near and not any(direct[one] for one in near):
            near = set().union(*(importers[one] for one in near)) - seen
            seen |= near
        tests = set().union(*(direct[one] for one in near)) if near else set()
        folder = name.split(".")[1] + "/"
        found[name] = sorted(tests, key=lambda test: (not test.startswith(folder), breadth[test], test))[:SHOWN]
    return found


def table() -> str:
    rows = [
        f"| {name.removeprefix('hetero_mpi.')} | {', '.join(tests)} |" for name, tests in tests_of_modules().items()
    ]
    head = [
        "# Which tests to run after a change",
        "",
        "Written by `python -m tests.written_docs`.",
        "",
        "| module of hetero_mpi | test files in tests/ |",
        "| --- | --- |",
    ]
    return "\n".join([*head, *rows]) + "\n"
