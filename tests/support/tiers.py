"""The three tiers of tests, and what holds the first one quick.

quick (unmarked): no launch of its own, one pool of ranks, seconds at most. ``slow``: real launches, deaths, hosts, SLURM,
stand-in GPUs, brute force. ``long``: minutes each. Quick tests that take longer than ``NAMED_S`` are named in the closing
lines; one that takes longer than ``LIMIT_S`` fails. Seconds are processor time of the test, its children and the pool's
ranks. A shared machine has been seen to take twice the processor time of a quiet one, so the two limits lie apart.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import rank_pool

NAMED_S, LIMIT_S = 4.0, 12.0
IMPORTED = 100
"""A test that is the first to import more modules than this is not judged: whoever came first would pay for them."""
TIERS = {"slow": '"slow and not long"', "long": "long"}
"""Tier -> the selection that runs it. What is marked both is long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seconds-to", metavar="FILE", help="append a line of JSON per test: its tier and processor seconds"
    )


class Tiers:
    """Plugin of the tiers: ``left_out`` counts tests not run by tier; ``too_slow`` has seconds of slow quick tests."""

    def __init__(self, seconds_to: str | None) -> None:
        self.left_out: Counter[str] = Counter()
        self.too_slow: dict[str, float] = {}
        self.seconds_to = seconds_to

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out.update(tier for item in items if (tier := tier_of(item)) != "quick")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[BEGUN] = processor_s(), len(sys.modules)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when != "call":  # what the last test of a module or of all takes down is not its own
            return report
        seconds, modules = processor_s() - item.stash[BEGUN][0], len(sys.modules) - item.stash[BEGUN][1]
        if self.seconds_to is not None:
            line = {"test": item.nodeid, "tier": tier_of(item), "seconds": round(seconds, 3), "modules": modules}
            with open(self.seconds_to, "a") as file:
                file.write(json.dumps(line) + "\n")
        if report.passed and tier_of(item) == "quick" and seconds > NAMED_S and modules <= IMPORTED:
            self.too_slow[item.nodeid] = seconds
        if item.nodeid in self.too_slow and seconds > LIMIT_S:
            report.outcome = "failed"
            rule = f"a quick test may take {LIMIT_S:g} s of processor time: mark it slow, or make it smaller"
            report.longrepr = f"{seconds:.1f} s: {rule}"
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["left_out"] = dict(self.left_out)
            output["too_slow"] = self.too_slow

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # Each process collects all tests: they count once.
        self.left_out |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))
        self.too_slow |= getattr(node, "workeroutput", {}).get("too_slow", {})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, seconds in sorted(self.too_slow.items()):
            terminalreporter.write_line(
                f"{seconds:.1f} s of processor time, {NAMED_S:g} s are meant for a quick test: {test}"
            )
        for tier, selection in TIERS.items():
            if self.left_out[tier]:
                command = f"python -m pytest -n 2 --dist loadfile -m {selection}"
                terminalreporter.write_line(f"left out: {self.left_out[tier]:,} {tier} tests; {command} runs them")


BEGUN = pytest.StashKey[tuple[float, int]]()


def slow_unless(quick: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of a case of which only some are quick tests."""
    return () if quick else (pytest.mark.slow,)


def tier_of(item: pytest.Item) -> str:
    if "stand_in_gpu" in item.nodeid:  # one slow test runs all of them
        return "slow"
    return next((tier for tier in ("long", "slow") if item.get_closest_marker(tier)), "quick")


def processor_s() -> float:
    """Processor time of this process, of children that ended, and of what ranks of the pool ran, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + rank_pool.spent_s()
