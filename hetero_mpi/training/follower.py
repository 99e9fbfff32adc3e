"""Callbacks of a Python program that follows a run: called on every rank between steps, they reply how to continue.

A run without callbacks needs no additional messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.toml_files import plan_to_dict, report_from_dict
from hetero_mpi.rundir.metrics import Evaluation, StepMetrics

if TYPE_CHECKING:
    from hetero_mpi.comm.ranks.world import World
    from hetero_mpi.training.signals import StopRequest

Event = PlanReport | Evaluation | Path | StepMetrics
"""A new plan, an evaluation, a completed checkpoint, or a step. A step is reported after its evaluation and checkpoint."""


class Reply(IntEnum):
    """How the run is to continue. The highest reply of all ranks applies."""

    GO_ON = 0
    SAMPLE = 1
    """Generate a sample before the next step."""
    END = 2
    """End the training and write the result."""
    LEAVE = 3
    """Stop the run with a checkpoint, as after a signal."""


OnEvent = Callable[[Event], Reply]


class Follower:
    """Calls the program's callback on every rank. All methods are collective over all ranks of the job.

    Attributes:
        has_left: whether the program has left the run on at least one rank.
    """

    def __init__(self, world: World, stop: StopRequest, on_event: OnEvent) -> None:
        self._world, self._stop, self._on_event = world, stop, on_event
        self.has_left = False

    def report(self, events: Sequence[Event], members: World, idle: Sequence[int]) -> Reply:
        """Broadcast rank 0's events to all callbacks, and return the combined reply. Called by the active ranks."""
        encoded_events = [_encoded(event) for event in events] if members.rank == 0 else None
        self._world.release(idle, None, {"told": encoded_events})
        return self.report_on_idle_rank(members.broadcast_json(encoded_events))

    def report_on_idle_rank(self, encoded_events: Sequence[Sequence[Any]]) -> Reply:
        """Counterpart of ``report`` on an idle rank that was woken with ``encoded_events``."""
        reply, previous_action = Reply.GO_ON, self._world.current_action
        self._world.current_action = "in the program that follows the run"
        for kind, value in encoded_events:
            # A program may take its time. Where it is alone, Ctrl-C is for it.
            with self._world.busy(), self._stop.aside(self._world.size == 1):
                reply = max(reply, self._on_event(_decoded(kind, value)))
        with self._world.waiting("the programs of all ranks"):
            reply = Reply(max(self._world.all_gather_json(reply)))
        self._world.current_action, self.has_left = previous_action, reply == Reply.LEAVE
        return reply


def _encoded(event: Event) -> tuple[str, Any]:
    if isinstance(event, PlanReport):
        return "plan", plan_to_dict(event)
    return ("checkpoint", str(event)) if isinstance(event, Path) else (type(event).__name__, asdict(event))


def _decoded(kind: str, value: Any) -> Event:
    if kind == "plan":
        return report_from_dict(value)
    if kind == "checkpoint":
        return Path(value)
    return StepMetrics(**value) if kind == "StepMetrics" else Evaluation(**value)
