"""How much one has to load to understand a part of the core, and how many lines there are: both may only fall."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.test_house import imported

PACKAGE = Path(__file__).parents[1] / "hetero_mpi"
CLOSURES = {"model.stage": 3_500, "engine.executor": 6_800, "engine.trainer": 9_400}
"""Module -> lines of it and of all modules that it imports, over however many steps, inside functions and for types too."""
LOADED = {"training.loop": 16_000}
"""The same of what is loaded when the module is imported."""
MAX_PACKAGE_LINES, MAX_TEST_LINES = 62_330, 52_839
"""The bars are 52,000 and 40,000 lines; until they are reached, these numbers follow the lines that there are, downwards."""
MAX_FILE_LINES = 400


def module_of(file: Path) -> str:
    name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


FILES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def lines_of(module: str) -> int:
    return FILES[module].read_text().count("\n")


def at_import(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported, but those for types."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from at_import([*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With):
            yield from at_import(node.body)


def imports_of(module: str, all_of_it: bool) -> set[str]:
    """Modules of the package that a module imports."""
    tree = ast.parse(FILES[module].read_text())
    if not all_of_it:
        tree = ast.Module([node for node in at_import(tree.body) if isinstance(node, ast.Import | ast.ImportFrom)], [])
    return {known for name in imported(tree) if (known := known_part(name))} - {"hetero_mpi"}


def known_part(name: str) -> str:
    """The module in a dotted name, which may go on with what it holds; "" where it is not ours."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name


def closure(module: str, all_of_it: bool) -> dict[str, int]:
    """Module -> lines, of a module and of all that it imports."""
    seen, waiting = set[str](), [f"hetero_mpi.{module}"]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += imports_of(name, all_of_it)
    return {name: lines_of(name) for name in seen}


@pytest.mark.parametrize("module", [*CLOSURES, *LOADED])
def test_what_one_must_load_stays_small(module: str) -> None:
    most = (CLOSURES | LOADED)[module]
    found = closure(module, module in CLOSURES)
    assert sum(found.values()) <= most, f"{module}: {sorted(found, key=found.__getitem__, reverse=True)[:20]}"


def test_a_closure_follows_imports() -> None:
    assert "hetero_mpi.model.stage" in closure("engine.executor", True)
    assert "hetero_mpi.planning.types.sizes" in closure("model.stage", True), "over several steps"
    assert "hetero_mpi.engine.trainer" not in closure("training.setup.context", False), "it is named for types only"
    assert "hetero_mpi.engine.trainer" in closure("training.setup.context", True)


def test_lines_only_fall() -> None:
    assert sum(lines_of(module) for module in FILES) <= MAX_PACKAGE_LINES
    tests = Path(__file__).parent.rglob("*.py")
    assert sum(file.read_text().count("\n") for file in tests) <= MAX_TEST_LINES


def test_a_module_is_seen_whole() -> None:
    lines = {module.removeprefix("hetero_mpi."): lines_of(module) for module in FILES}
    assert {module: count for module, count in lines.items() if count > MAX_FILE_LINES} == {}
