"""Record shapes and broken records."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hetero_mpi.util import units
from hetero_mpi.util.errors import Problem, UserError

Shape = Literal["chat", "alpaca", "prompt/completion", "tokens"]
SHAPES = """\
A file holds JSON lines, JSON, or the rows of a parquet file: records in these shapes (docs/data.md lists their other keys):
  alpaca             {"instruction": "...", "input": "...", "output": "..."}; input may be omitted
  chat               {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  chat (ShareGPT)    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
  prompt/completion  {"prompt": "...", "completion": "..."}
  preference         {"prompt": "...", "chosen": "...", "rejected": "..."}, for [train] preference; strings, or lists of messages
  tokens             {"input_ids": [...], "labels": [...]}; -100 excludes a token from the loss; without labels, all are targets
  labelled           any shape above with "label": true (desirable) or false, for [train] preference = "kto"; or preference"""
SPELLINGS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Maps the key of a chat to the keys of role and content in its messages."""
PROMPTS = ("prompt", "question")
PAIRS: dict[Shape, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "alpaca": (("instruction",), ("output",)),
    "prompt/completion": (PROMPTS, ("completion", "response", "answer")),
}
"""Maps each shape to (keys of the prompt, keys of the answer); the first key that a record has is used."""
PREFERENCE = ("chosen", "rejected")
Compared = Literal["pairs", "labels"]
"""Form of preference records: pairs of answers to the same prompt, or single answers with a label."""
SYSTEM = ("system", "system_prompt")
FURTHER = ("input_ids", "labels", "input", "history", "tools", "functions", "label", "weight", *SYSTEM, *PREFERENCE)
"""Other keys that are read."""


def unrecognised(value: Mapping[str, Any]) -> str:
    """Explain why a record with these keys matches no shape."""
    if all(key in value for key in PREFERENCE):
        return "it is a preference pair, which only training with [train] preference reads (docs/preferences.md)"
    for shape, pair in PAIRS.items():
        missing = [keys[0] for keys in pair if not any(key in value for key in keys)]
        if len(missing) == 1:
            return f"the {shape} shape needs {missing[0]!r}; the record has {keys_named(value)}"
    return f"no shape has these keys: {keys_named(value)}"


def without_text(value: Mapping[str, Any]) -> str:
    """Explain why a record with these keys has no text to train on."""
    return f"'text' is missing; the record has {keys_named(value)} (data.keys names another key: text = \"...\")"


def keys_named(value: Mapping[str, Any]) -> str:
    """List the first keys of a record for a message."""
    keys = ", ".join(repr(key) for key in list(value)[:6])
    return (keys + (", ..." if len(value) > 6 else "")) or "no keys"


_MAX_LISTED_RECORDS = 5
"""Number of bad records listed in an error, so that a wrong file does not flood the terminal."""
_MAX_LISTED_SKIPPED = 100
"""Maximum number of bad records listed if some may be skipped."""


class BadRecord(Exception):
    """A broken record, with an error code and a message. If ``rest`` is set, the rest of the file is unreadable as well."""

    def __init__(self, kind: str, problem: str, rest: bool = False) -> None:
        super().__init__(problem)
        self.kind, self.rest = kind, rest


@dataclass
class BadRecords:
    """Bad records of a job in file order. Up to ``allowed`` of them are skipped (``data.skip_bad``)."""

    allowed: int = 0
    problems: list[Problem] = field(default_factory=list)
    """Messages such as ``data/a.jsonl, line 7: must be a JSON object; it is text``."""
    cut: list[str] = field(default_factory=list)
    """Positions after which the rest of a file is unreadable."""

    def add(self, source: str, problem: BadRecord) -> None:
        if self.problems and self.problems[-1].text.startswith(f"{source}: "):
            return  # the other record of a pair
        self.problems.append(Problem(problem.kind, f"{source}: {problem}"))
        self.cut.extend([source] if problem.rest else [])

    def check(self, key: str) -> None:
        """Raise UserError, which lists the first bad records of the job's ``key``, if more are bad than may be skipped."""
        count = len(self.problems)
        if count <= self.allowed and not self.cut:
            return
        limit = f" (data.skip_bad = {self.allowed:,})" if self.allowed else ""
        if self.cut and count <= self.allowed:
            limit = f" ({self.cut[0]}: the rest of the file is unreadable and cannot be skipped)"
        max_listed = min(max(_MAX_LISTED_RECORDS, self.allowed + 1), _MAX_LISTED_SKIPPED)
        title = f"{key} must hold valid records; {units.plural(count, 'record')} {'is' if count == 1 else 'are'} malformed{limit}:"
        raise UserError(
            "records.malformed", "\n".join([title, *self._listed(max_listed), SHAPES]), problems=self.problems
        )

    def lines(self) -> list[str]:
        """List the skipped records for the user."""
        if not self.problems:
            return []
        count = f"{len(self.problems):,} bad record{'s' if len(self.problems) > 1 else ''}"
        return [f"{count} skipped (data.skip_bad = {self.allowed:,}):", *self._listed(_MAX_LISTED_SKIPPED)]

    def _listed(self, limit: int) -> list[str]:
        rest = len(self.problems) - limit
        return [*(f"  {problem}" for problem in self.problems[:limit]), *([f"  and {rest:,} more"] if rest > 0 else [])]
