"""Versions of the trained state in host memory; which rank keeps whose copy; and how often copies are made."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero_mpi.state.redistribute import Parcel

COST_SHARE = 0.02
"""Largest share of the time that copies may take."""


@dataclass
class StateVersion:
    """What this process has of one version: the trained state after one step."""

    step: int
    state: dict[str, Any]
    """The training state, as ``TrainingState.to_dict`` returns it."""
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """(kind, name) -> host tensor."""
    names: set[str] = field(default_factory=set)
    """Parameters and constants of which every tensor is here."""

    def add(self, tensors: dict[tuple[str, str], torch.Tensor], names: set[str]) -> None:
        """Add what another rank has sent."""
        self.tensors |= tensors
        self.names |= names


class Copies:
    """The versions in this process's memory, oldest first. They outlive plans, transports and other ranks."""

    def __init__(self) -> None:
        self.versions: list[StateVersion] = []

    def inventory(self) -> list[tuple[int, list[str]]]:
        """(step, names of what is here) of every version, JSON-able."""
        return [(version.step, sorted(version.names)) for version in self.versions]

    def tensor(self, step: int, parcel: Parcel) -> torch.Tensor:
        """A parcel as it was after ``step`` steps."""
        key = parcel.kind, parcel.name
        return next(one.tensors[key] for one in self.versions if one.step == step and key in one.tensors)

    def state(self, step: int) -> dict[str, Any]:
        """The training state after ``step`` steps, as ``TrainingState.to_dict`` returns it."""
        return next(one.state for one in self.versions if one.step == step)


def newest_whole(
    inventories: Sequence[Sequence[tuple[int, Sequence[str]]]], needed: set[str]
) -> tuple[int, dict[str, tuple[int, ...]]] | None:
    """The newest step of which the ranks together have all ``needed`` names, and name -> the ranks that have it then.

    Args:
        inventories: every rank's.
    """
    steps = sorted({step for inventory in inventories for step, _ in inventory}, reverse=True)
    for step in steps:
        having: dict[str, tuple[int, ...]] = {}
        for rank, inventory in enumerate(inventories):
            for name in {name for at, names in inventory if at == step for name in names}:
                having[name] = (*having.get(name, ()), rank)
        if needed <= having.keys():
            return step, having
    return None


def peers(sizes: Sequence[int], hosts: Sequence[str]) -> dict[int, int]:
    """rank -> its peer, the rank that keeps its copy. It is on another host where there is one, and there the rank that holds
    least.

    Args:
        sizes: bytes that each rank has to give; ranks with none need no peer.
    """
    held, found = list(sizes), {}
    count = len(sizes)
    for rank in sorted(range(count), key=lambda rank: (-sizes[rank], rank)):
        others = [other for other in range(count) if other != rank]
        elsewhere = [other for other in others if hosts[other] != hosts[rank]] or others
        if sizes[rank] and elsewhere:
            found[rank] = min(elsewhere, key=lambda other: (held[other], (other - rank) % count))
            held[found[rank]] += sizes[rank]
    return dict(sorted(found.items()))


def steps_between(cost_s: float, step_s: float) -> int:
    """The smallest number of steps of ``step_s`` between two copies of ``cost_s`` each that keeps their cost within
    ``COST_SHARE``.
    """
    return max(1, math.ceil(cost_s / (COST_SHARE * step_s)))


class CopyCosts:
    """Measures what copies cost this rank: the time that training stands still, and the delay of the steps during a transfer."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        self.processor_s = 0.0
        """Of the thread that transfers: at worst it computes on a core that training needs."""
        self._alone: deque[float] = deque(maxlen=50)
        self._beside: list[float] = []
        self._earlier: deque[tuple[float, float, float]] = deque(maxlen=10)
        self._last_s = time.perf_counter()

    def begin(self, stall_s: float) -> None:
        """Record that a copy has been taken and its transfer begins. ``stall_s``: how long training stood still."""
        if self.stall_s:
            self._earlier.append(self._parts())
        self.stall_s, self.processor_s = stall_s, 0.0
        self._beside.clear()
        self._last_s = time.perf_counter()

    def transferred(self, processor_s: float) -> None:
        """Record the end of a transfer. ``processor_s``: processor time of its thread."""
        self.processor_s = processor_s

    def step(self, beside: bool) -> None:
        """Record a step. ``beside``: a transfer was under way during a part of it at least."""
        now = time.perf_counter()
        (self._beside if beside else self._alone).append(now - self._last_s)
        self._last_s = now

    def pause_ended(self) -> None:
        """Do not count the time since the last step as part of one."""
        self._last_s = time.perf_counter()

    @property
    def steps_alone(self) -> int:
        return len(self._alone)

    @property
    def step_s(self) -> float:
        """Median seconds of a step without any transfer; 0: none was timed."""
        return statistics.median(self._alone) if self._alone else 0.0

    @property
    def cost_s(self) -> float:
        """Cost of a version, seconds: the mean over the last ones, since steps also vary by chance."""
        stalls, processors, longer = zip(*self._earlier, self._parts(), strict=True)
        return float(statistics.mean(stalls) + max(statistics.mean(processors), statistics.mean(longer)))

    def _parts(self) -> tuple[float, float, float]:
        """Of the newest version: stall, processor time, and the additional time of the steps during its transfer (may be
        negative).
        """
        longer_s = 0.0
        if self._beside and self._alone:
            longer_s = len(self._beside) * (statistics.median(self._beside) - self.step_s)
        return self.stall_s, self.processor_s, longer_s
