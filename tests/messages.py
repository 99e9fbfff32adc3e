"""All texts that a user can meet, as they stand in the sources: the kinds of errors, and other messages.

``python -m tests.written_docs`` writes them to ``tests/messages.txt``, which is read in review; no test pins a text elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hetero_mpi"
ERRORS = {"UserError", "CheckpointError", "CollectiveUserError", "BadRecord", "Problem"}
"""Classes whose first argument is the kind of an error, and the second its text."""
MIN_SPACES = 2
"""Spaces from which a text counts as one for a person."""


def messages() -> str:
    """``KIND  FILE`` and the text below it, for every error; then every other text of a module, in the order of the source."""
    errors: list[str] = []
    others: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        of_errors = list(error_texts(tree))
        errors += [f"{kind}  {name}\n    {text}" for kind, text, _ in of_errors]
        inside = {id(node) for _, _, call in of_errors for node in ast.walk(call)}
        texts = [source(node) for node in texts_of(tree) if id(node) not in inside]
        others += [f"{name}\n" + "\n".join(f"    {text}" for text in texts)] if texts else []
    return "\n".join(
        [
            "Errors, by kind",
            "===============",
            *sorted(errors),
            "",
            "Other texts, by module",
            "======================",
            *others,
            "",
        ]
    )


def error_texts(tree: ast.Module) -> Iterator[tuple[str, str, ast.Call]]:
    """(kind, text, call) of every error that is made in a module; a kind or text that is a variable stands there by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ERRORS and len(node.args) >= 2:
            yield source(node.args[0]), source(node.args[1]), node


def texts_of(tree: ast.Module) -> Iterator[ast.expr]:
    """The texts of some words in a module that are no docstrings (of modules, classes, functions, attributes)."""
    passed_over: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed_over.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            passed_over |= {id(part) for part in node.values}
        text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        if text and id(node) not in passed_over and source(node).count(" ") >= MIN_SPACES:
            yield node


def source(node: ast.expr) -> str:
    """A text on one line, with what is filled in between braces; other expressions as they are written."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("\n", "\\n")
    if not isinstance(node, ast.JoinedStr):
        return ast.unparse(node)
    parts = [
        part.value if isinstance(part, ast.Constant) else ast.unparse(ast.JoinedStr([part]))[2:-1]
        for part in node.values
    ]
    return "".join(map(str, parts)).replace("\n", "\\n")
