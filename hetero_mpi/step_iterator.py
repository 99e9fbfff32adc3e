"""A run as an iterator over its steps (``hetero_mpi.steps``).

The run works on a thread of its own and stands still while the program has a step, so that only one of the two is active:

    program (main thread)      next() ....... body of the loop, next() ..........
    run (its own thread)           step 1 --> .................... step 2 --> ....
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from hetero_mpi.rundir.metrics import Evaluation, StepMetrics
from hetero_mpi.training.follower import Event, OnEvent, Reply
from hetero_mpi.training.signals import StopRequest
from hetero_mpi.util.background import Background

if TYPE_CHECKING:
    from hetero_mpi.training.result import TrainResult


class StopTraining(Exception):
    """Raised by a callback of ``train``: training is over after this step, and the result is written."""


@dataclass(frozen=True)
class Step(StepMetrics):
    """A step that has been taken, with the evaluations that came after it. The same on every rank."""

    evaluations: tuple[Evaluation, ...] = ()

    @property
    def held_out_loss(self) -> float | None:
        """Loss of the first evaluation; None: nothing was evaluated."""
        return self.evaluations[0].loss if self.evaluations else None


class StepEvents:
    """Passes the events of a run to ``receive``; a step carries the evaluations that came after it."""

    def __init__(self, receive: Callable[[Event], Reply]) -> None:
        self._receive = receive
        self._evaluations: list[Evaluation] = []

    def __call__(self, event: Event) -> Reply:
        if isinstance(event, Evaluation):
            self._evaluations.append(event)
        elif isinstance(event, StepMetrics):
            event = Step(**vars(event), evaluations=tuple(self._evaluations))
            self._evaluations.clear()
        return self._receive(event)


Work = Callable[[OnEvent, StopRequest], "TrainResult | None"]


class _Exchange:
    """The two queues between a run's thread and its program. The thread refers to nothing else of the iterator."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        """Steps, then None at the end of the run."""
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def work(self, run: Work, stop: StopRequest) -> TrainResult | None:
        try:
            return run(StepEvents(self._receive), stop)
        finally:
            self.steps.put(None)

    def _receive(self, event: Event) -> Reply:
        if not isinstance(event, Step):
            return Reply.GO_ON
        self.steps.put(event)
        return self.replies.get()


class Steps:
    """The steps of a run, which all ranks iterate over. The run begins with the first step that is asked for.

    Args:
        run: does the run; called on the run's thread.
        prepare: called on the main thread first.
    """

    def __init__(self, run: Work, prepare: Callable[[], object]) -> None:
        self._run, self._prepare = run, prepare
        self._exchange, self._stop = _Exchange(), StopRequest()
        self._work: Background[TrainResult | None] | None = None
        self._reply, self._ended = Reply.GO_ON, False
        self._result: TrainResult | None = None

    @property
    def result(self) -> TrainResult | None:
        """The products of the run; None: it is under way, or was left before its end."""
        return self._result

    @property
    def under_way(self) -> bool:
        """Whether the run has begun and not ended."""
        return self._work is not None and not self._ended

    def __iter__(self) -> Iterator[Step]:
        """A loop over the remaining steps. Leaving the loop leaves the run."""
        try:
            while (step := self._next()) is not None:
                yield step
        finally:
            self.close()

    def __next__(self) -> Step:
        if (step := self._next()) is None:
            raise StopIteration
        return step

    def _next(self) -> Step | None:
        """The next step; None: the run has ended."""
        if self._work is None:
            self._prepare()
            self._stop.__enter__()
            _RUNS.add(self)
            self._work = Background("training, step by step", partial(self._exchange.work, self._run, self._stop))
        elif not self._ended:
            reply, self._reply = self._reply, Reply.GO_ON
            self._exchange.replies.put(reply)
        return None if self._ended else self._received()

    def _received(self) -> Step | None:
        try:
            step = self._exchange.steps.get()
        except KeyboardInterrupt as error:
            from hetero_mpi.comm.ranks.leave import abort_job
            from hetero_mpi.comm.ranks.mpi_start import program_world

            if program_world().size > 1:
                abort_job(program_world(), error)
            self._exchange.replies.put(Reply.LEAVE)
            raise
        if step is None:
            self._ended = True
            self._stop.__exit__()
            assert self._work is not None
            self._result = self._work.finish()
        return step

    def stop(self) -> None:
        """End training after this step: the iterator ends, and the result is written. One rank that says so is enough."""
        self._reply = Reply.END

    def sample(self) -> None:
        """Before the next step the model continues the job's ``[sample] prompt``; the text is printed, and in ``sample.txt``."""
        self._reply = max(self._reply, Reply.SAMPLE)

    def close(self) -> None:
        """Leave the run, where it is under way: it ends with a checkpoint, on all ranks. Collective."""
        if self.under_way and threading.current_thread() is not threading.main_thread():
            self._exchange.replies.put(Reply.LEAVE)  # of the garbage collector: it may run on the run's own thread
            return
        while self.under_way:
            self._reply = Reply.LEAVE
            self._next()

    def __del__(self) -> None:
        self.close()


_RUNS: weakref.WeakSet[Steps] = weakref.WeakSet()


@cache
def close_at_exit() -> None:
    """Have a run that is under way end with a checkpoint when the program ends. Called after MPI's start, whose end comes later."""

    def close() -> None:
        for run in [*_RUNS]:
            run.close()

    atexit.register(close)
