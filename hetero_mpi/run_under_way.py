"""A run under way, as an iterator of a Python program: the run's generator, and whatever becomes of it when the program goes
another way before the last step.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from hetero_mpi.errors import UserError
from hetero_mpi.report.run_files.metrics import Evaluation, StepMetrics
from hetero_mpi.runtime.follower import Event, Followed, Reply

if TYPE_CHECKING:
    from hetero_mpi.runtime.result import TrainResult


class StopTraining(Exception):
    """Raised by a callback of ``train``: training is over after this step, and the result is written."""


@dataclass(frozen=True)
class Step(StepMetrics):
    """A step that has been taken, with the evaluations that came after it. The same on every rank."""

    evaluations: tuple[Evaluation, ...] = ()

    @property
    def held_out_loss(self) -> float | None:
        """The loss of the first of them; None: nothing was evaluated."""
        return self.evaluations[0].loss if self.evaluations else None


class Run:
    """Yields what happens in a run, in its order. The run begins with the first event that is asked for, and stands still between
    two of them.
    """

    def __init__(self, events: Followed[TrainResult | None]) -> None:
        self._events, self._reply, self._under_way = events, Reply.GO_ON, False
        self._evaluations: list[Evaluation] = []
        self._result: TrainResult | None = None
        _RUNS.add(self)

    @property
    def result(self) -> TrainResult | None:
        """The products of the run; None: it is under way, or was left before its end."""
        return self._result

    @property
    def under_way(self) -> bool:
        """Has it begun, and not come to its end?"""
        return self._under_way

    def __iter__(self) -> Iterator[Any]:
        """A loop over what is to come. Whoever leaves it leaves the run."""
        try:
            while True:
                try:
                    event = next(self)
                except StopIteration:
                    return
                yield event
        finally:
            self.close()

    def __next__(self) -> Event:
        return self._next()

    def _next(self) -> Event:
        reply, self._reply = self._reply, Reply.GO_ON
        begun, self._under_way = self._under_way, False
        try:
            event = self._events.send(reply) if begun else next(self._events)
        except StopIteration as ended:
            self._result = ended.value or self._result
            raise
        self._under_way = True
        if isinstance(event, Evaluation):
            self._evaluations.append(event)
        elif isinstance(event, StepMetrics):
            event = Step(**vars(event), evaluations=tuple(self._evaluations))
            self._evaluations.clear()
        return event

    def stop(self) -> None:
        """Training is over after this step: the iterator ends, and the result is written. One rank that says so is enough."""
        self._reply = Reply.END

    def sample(self) -> None:
        """Before the next step the model continues the job's ``[sample] prompt``; the text is printed, and in ``sample.txt``."""
        self._reply = max(self._reply, Reply.SAMPLE)

    def call(self, callback: Callable[[Any], object], event: Event) -> None:
        """Call ``callback`` with an event; an exception in it is one of the run."""
        try:
            callback(event)
        except StopTraining:
            self.stop()
        except BaseException as error:
            self._under_way = False
            self._events.throw(error)

    def close(self) -> None:
        """Leave the run, where it is under way: it ends with a checkpoint, on all ranks. Collective. Another thread, which must not
        exchange anything, leaves that to the main thread.
        """
        if self._under_way and threading.current_thread() is not threading.main_thread():
            _UNREACHED.append(self)
            return
        with contextlib.suppress(StopIteration):
            while self._under_way:
                self._reply = Reply.LEAVE
                self._next()

    def __del__(self) -> None:
        self.close()


class Steps(Run):
    """The steps of a run, which all ranks iterate over (``hetero_mpi.steps``)."""

    def __iter__(self) -> Iterator[Step]:
        return super().__iter__()

    def __next__(self) -> Step:
        while not isinstance(event := self._next(), Step):
            pass
        return event


_RUNS: weakref.WeakSet[Run] = weakref.WeakSet()
_UNREACHED: list[Run] = []
"""Runs that another thread was to leave."""


def check_alone() -> None:
    """Raise UserError: a run of this program is under way."""
    while _UNREACHED:
        _UNREACHED.pop().close()
    if any(run.under_way for run in _RUNS):
        raise UserError("a run of this program is under way: iterate to its end, or close() it, before the next call")


@cache
def close_at_exit() -> None:
    """Have what is under way end with a checkpoint when the program ends. To be called after MPI's start, whose end comes later."""

    def close() -> None:
        for run in [*_RUNS, *_UNREACHED]:
            run.close()

    atexit.register(close)
