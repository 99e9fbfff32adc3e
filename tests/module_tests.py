"""Each module of the package and the test files to run after a change of it: the table in tests/MODULES.md.

A module's tests are the files that import it, themselves or in a program that they run on ranks. Where none does, they are the
tests of the modules that import it, the nearest ones.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.support.mpi import ROOT
from tests.test_house import imported
from tests.test_size import FILES

SHOWN = 4
"""Test files named of a module, those first that stand in the folder of its package and import the fewest modules."""


def imported_of(file: Path) -> set[str]:
    """Names of the package's modules that a file imports, anywhere in it."""
    return {*imported(ast.parse(file.read_text()))} & FILES.keys()


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
    importers = defaultdict(set)
    for name, file in FILES.items():
        for other in imported_of(file) - {name}:
            importers[other].add(name)
    for name in FILES.keys() - importers.keys():  # found by its place in a folder, or run as a program
        importers[name].add(name.rpartition(".")[0])
    direct = defaultdict(set)
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in set().union(*map(imported_of, [test, *programs(test)])):
            direct[name].add(str(test.relative_to(ROOT / "tests")))
    breadth = {test: sum(test in tests for tests in direct.values()) for tests in direct.values() for test in tests}
    found = {}
    for name, file in FILES.items():
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
