"""Findings of ``doctor``: a severity, what was seen, and the remedy; as lines for people and as JSON for scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from hetero_mpi import units
from hetero_mpi.terminal import wrapped

_INDENT = 20


class Severity(str, Enum):
    """How bad a finding is."""

    FINE = "ok"
    NOTE = "note"
    """Information; nothing to do."""
    SLOW = "warn"
    """A run would work, but slower, with less, or with a surprise later on."""
    RISKS = "RISK"
    """A run may fail, or may not."""
    FAILS = "FAIL"
    """A run would fail."""


@dataclass(frozen=True)
class Finding:
    """What a check has found: its name, severity, text and remedy."""

    subject: str
    severity: Severity
    text: str
    remedy: str = ""
    where: tuple[str, ...] = ()
    """The hosts or ranks it is about; empty: all."""


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """``findings``, those that differ only in ``where`` made one; order is kept."""
    seen: dict[Finding, list[str]] = {}
    for finding in findings:
        places = seen.setdefault(replace(finding, where=()), [])
        places += [place for place in finding.where if place not in places]
    return [replace(finding, where=tuple(places)) for finding, places in seen.items()]


def would_fail(findings: Iterable[Finding]) -> bool:
    """Would a run fail, by these findings, or may it?"""
    return any(finding.severity in (Severity.FAILS, Severity.RISKS) for finding in findings)


def lines_of(findings: Sequence[Finding]) -> list[str]:
    """Lines for a terminal: one per finding, its remedy below it after an arrow, and a count at the end."""
    lines = []
    for finding in findings:
        start = f"{finding.severity.value:<5} {finding.subject}"
        places = f"{', '.join(finding.where)}: " if finding.where else ""
        lines += wrapped(f"{start:<{_INDENT}}", places + finding.text)
        for remedy in finding.remedy.splitlines():
            lines += wrapped(" " * (_INDENT - 3) + "-> ", remedy)
    counts = Counter(finding.severity for finding in findings)
    if counts[Severity.FAILS]:
        return [*lines, f"A run would fail: {units.plural(counts[Severity.FAILS], 'finding')} marked FAIL."]
    if counts[Severity.RISKS]:
        return [*lines, f"A run may fail: {units.plural(counts[Severity.RISKS], 'finding')} marked RISK."]
    if counts[Severity.SLOW]:
        return [*lines, f"A run would work; {units.plural(counts[Severity.SLOW], 'warning')}."]
    return [*lines, "All is well."]


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The findings as JSON-able values."""
    return [{**asdict(finding), "severity": finding.severity.value} for finding in findings]
