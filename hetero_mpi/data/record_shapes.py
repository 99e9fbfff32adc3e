"""The shapes that records have, and broken records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hetero_mpi.util.errors import Problem, UserError

Shape = Literal["chat", "alpaca", "prompt/completion"]
SHAPES = """\
A file holds JSON lines, JSON, or the rows of a parquet file: records in these shapes (docs/data.md has their further keys):
  alpaca             {"instruction": "...", "input": "...", "output": "..."}; input may be left out
  chat               {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  chat (ShareGPT)    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
  prompt/completion  {"prompt": "...", "completion": "..."}
  preference         {"prompt": "...", "chosen": "...", "rejected": "..."}, for [train] preference; texts, or lists of messages
  labelled           any of those before with "label": true (desirable) or false, for [train] preference = "kto"; or preference"""
SPELLINGS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Key of a chat -> keys of its messages."""
PROMPTS = ("prompt", "question")
PAIRS: dict[Shape, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "alpaca": (("instruction",), ("output",)),
    "prompt/completion": (PROMPTS, ("completion", "response", "answer")),
}
"""Shape -> (keys of what is asked, keys of the answer); the first that a record has counts."""
PREFERENCE = ("chosen", "rejected")
Compared = Literal["pairs", "labels"]
"""How preferences are told: by two answers to a prompt, or by a label of one."""
SYSTEM = ("system", "system_prompt")
FURTHER = ("input", "history", "tools", "functions", "label", "weight", *SYSTEM, *PREFERENCE)
"""Keys that are used beside those."""


def unrecognised(value: Mapping[str, Any]) -> str:
    """Why a record with these keys has none of the shapes, in words."""
    if all(key in value for key in PREFERENCE):
        return "it is a pair of answers, which are compared: set [train] preference (docs/preferences.md)"
    for shape, pair in PAIRS.items():
        missing = [keys[0] for keys in pair if not any(key in value for key in keys)]
        if len(missing) == 1:
            return f"{missing[0]!r} is missing for the {shape} shape; the record has {keys_named(value)}"
    return f"no shape has these keys: {keys_named(value)}"


def without_text(value: Mapping[str, Any]) -> str:
    """Why a record with these keys has no text to learn, in words."""
    return f"'text' is missing; the record has {keys_named(value)} (data.keys names another key: text = \"...\")"


def keys_named(value: Mapping[str, Any]) -> str:
    """The first keys of a record, for messages to a person."""
    shown = ", ".join(repr(key) for key in list(value)[:6])
    return (shown + (", ..." if len(value) > 6 else "")) or "no keys"


_SHOWN = 5
"""Bad records that one error names; a wrong file would otherwise fill the terminal."""
_MOST_SHOWN = 100
"""The same where many may be skipped, all of which are named."""


class BadRecord(Exception):
    """A fault of one record, of a kind and in words.

    ``rest``: the rest of its file cannot be read, so it is never skipped."""

    def __init__(self, kind: str, problem: str, rest: bool = False) -> None:
        super().__init__(problem)
        self.kind, self.rest = kind, rest


@dataclass
class BadRecords:
    """The bad records of a job, in the order of the files; ``allowed`` of them are skipped (``data.skip_bad``)."""

    allowed: int = 0
    problems: list[Problem] = field(default_factory=list)
    """``data/a.jsonl, line 7: must be a JSON object; it is text``."""
    cut: list[str] = field(default_factory=list)
    """Places behind which the rest of a file cannot be read."""

    def add(self, source: str, problem: BadRecord) -> None:
        if self.problems and self.problems[-1].text.startswith(f"{source}: "):
            return  # the other record of a pair
        self.problems.append(Problem(problem.kind, f"{source}: {problem}"))
        self.cut.extend([source] if problem.rest else [])

    def check(self, key: str) -> None:
        """Raise UserError, naming the first ones and the job's ``key``, where there are more than may be skipped."""
        count = len(self.problems)
        if count <= self.allowed and not self.cut:
            return
        limit = f" (data.skip_bad = {self.allowed:,} are skipped at most)" if self.allowed else ""
        if self.cut and count <= self.allowed:
            limit = f" ({self.cut[0]}: what follows there cannot be read, and is never skipped)"
        shown = min(max(_SHOWN, self.allowed + 1), _MOST_SHOWN)
        title = f"{key} must hold records that can be learnt from; {count:,} cannot{limit}:"
        raise UserError("records.malformed", "\n".join([title, *self._named(shown), SHAPES]), problems=self.problems)

    def lines(self) -> list[str]:
        """The records that were skipped, for a person."""
        if not self.problems:
            return []
        count = f"{len(self.problems):,} bad record{'s' if len(self.problems) > 1 else ''}"
        return [f"{count} skipped (data.skip_bad = {self.allowed:,}):", *self._named(_MOST_SHOWN)]

    def _named(self, shown: int) -> list[str]:
        more = len(self.problems) - shown
        return [*(f"  {problem}" for problem in self.problems[:shown]), *([f"  and {more:,} more"] if more > 0 else [])]
