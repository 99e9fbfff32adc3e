"""Names, docstrings and pages in the field's words: how many places are left that are not, by kind; the counts may only fall."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
VAGUE = {
    "found", "one", "own", "told", "kept", "held", "known", "begun", "chosen", "left", "some", "other", "others", "place", "whole",
    "said", "asked", "given", "seen", "beside", "apart", "here", "there", "taken", "dealt", "moved", "wanted", "needed", "lacking",
}  # fmt: skip
"""Words that say nothing of what a variable holds, nor of what a function returns."""
IDIOMS = re.compile(
    r"\b([Ss]o (many|much)|whoever|nobody|of which|by itself|made[- ]up|trained whole|held[- ]out loss|(is|are) (told|said)|beside"
    r"|goes? on|going on|without a word|broken off|set aside|mends?|put off|of its own|one alone|the way there)\b"
)
UNIT = re.compile(
    r"_?(MAX|MIN|DEFAULT)_|.*_(S|MS|BYTES|TOKENS|RATIO|FACTOR|COUNT|LIMIT|SIZE|PORT|VERSION|TAG|CODE|STEPS|RANKS|LINES|SEED)$"
)
LEFT = {"variables": 17, "functions": 10, "constants": 13, "docstrings": 3, "pages": 12}


def counts(sources: dict[str, str], pages: list[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for source in sources.values():
        tree = ast.parse(source)
        for node in ast.walk(tree):
            name = (
                node.id
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                else getattr(node, "arg", None)
            )
            found["variables"] += isinstance(node, ast.Name | ast.arg) and name in VAGUE
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found["functions"] += node.name in VAGUE
                found["docstrings"] += len(IDIOMS.findall(ast.get_docstring(node) or ""))
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.targets[0], ast.Name)
            ):
                name, is_number = node.targets[0].id, type(node.value.value) in (int, float)
                found["constants"] += is_number and name.isupper() and not UNIT.match(name)
    found["pages"] = sum(len(IDIOMS.findall(page)) for page in pages)
    return found


def test_vague_words_only_become_fewer() -> None:
    sources = {str(path): path.read_text() for path in (ROOT / "hetero_mpi").rglob("*.py")}
    pages = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    found = counts(sources, pages)
    assert {kind: count for kind, count in found.items() if count > LEFT[kind]} == {}


def test_every_kind_is_seen() -> None:
    source = "FAR = 3\ndef kept(one):\n    '''Nobody, so many.'''\n    found = FAR\n"
    source = source.replace("Nobody", "nobody")
    assert counts({"a": source}, ["It goes on."]) == dict.fromkeys(LEFT, 1) | {"variables": 2, "docstrings": 2}
