"""The iterator over the steps of a run that ``hetero_mpi.steps`` returns.

The run has its own thread and pauses while the program handles a step, so that only one of them is active at a time:

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
    """Raise this in a callback of ``train`` to end training after the current step and write the result."""


@dataclass(frozen=True)
class Step(StepMetrics):
    """A completed step and the evaluations that followed it. Its values are equal on all ranks."""

    evaluations: tuple[Evaluation, ...] = ()

    @property
    def held_out_loss(self) -> float | None:
        """Evaluation loss on the main evaluation set, or None if no evaluation followed the step."""
        return self.evaluations[0].loss if self.evaluations else None


class StepEvents:
    """Passes the events of a run to ``receive``, adding each step's evaluations to the step."""

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
    """Queues between the run's thread and the program. The thread has no reference to the iterator itself."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        """Completed steps, followed by None when the run ends."""
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
    """Iterator over the steps of a run, used by all ranks. Requesting the first step starts the run.

    Args:
        run: Executes the run on the run's own thread.
        prepare: Called on the main thread before the run starts.
    """

    def __init__(self, run: Work, prepare: Callable[[], object]) -> None:
        self._run, self._prepare = run, prepare
        self._exchange, self._stop = _Exchange(), StopRequest()
        self._background: Background[TrainResult | None] | None = None
        self._reply, self._ended = Reply.GO_ON, False
        self._result: TrainResult | None = None

    @property
    def result(self) -> TrainResult | None:
        """Result of the run. None until the run ends, or if the program leaves the loop early."""
        return self._result

    @property
    def under_way(self) -> bool:
        """Whether the run has started but not ended."""
        return self._background is not None and not self._ended

    def __iter__(self) -> Iterator[Step]:
        """Iterate over the remaining steps. Leaving the loop ends the run."""
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
        """Return the next step, or None at the end of the run."""
        if self._background is None:
            self._prepare()
            self._stop.__enter__()
            _RUNS.add(self)
            self._background = Background("training, step by step", partial(self._exchange.work, self._run, self._stop))
        elif not self._ended:
            reply, self._reply = self._reply, Reply.GO_ON
            self._exchange.replies.put(reply)
        return None if self._ended else self._received()

    def _received(self) -> Step | None:
        try:
            step = self._exchange.steps.get()
        except KeyboardInterrupt as error:
            from hetero_mpi.comm.ranks.leave import Interrupted, abort_job
            from hetero_mpi.comm.ranks.mpi_start import program_world

            if isinstance(error, Interrupted):  # the run's thread has the request: it stops after the first step
                return self._received()
            if program_world().size > 1:
                abort_job(program_world(), error)
            self._exchange.replies.put(Reply.LEAVE)
            raise
        if step is None:
            self._ended = True
            self._stop.__exit__()
            assert self._background is not None
            self._result = self._background.finish()
        return step

    def stop(self) -> None:
        """End training after this step and write the result, which ends the iteration. A call on one rank suffices."""
        self._reply = Reply.END

    def sample(self) -> None:
        """Generate text from the job's ``[sample] prompt`` before the next step, print it and write it to ``sample.txt``."""
        self._reply = max(self._reply, Reply.SAMPLE)

    def close(self) -> None:
        """End the run on all ranks with a checkpoint if it is active. Collective."""
        if self.under_way and threading.current_thread() is not threading.main_thread():
            self._exchange.replies.put(Reply.LEAVE)  # call by the garbage collector, perhaps on the run's thread
            return
        while self.under_way:
            self._reply = Reply.LEAVE
            self._next()

    def __del__(self) -> None:
        self.close()


_RUNS: weakref.WeakSet[Steps] = weakref.WeakSet()


@cache
def close_at_exit() -> None:
    """Register an exit handler that ends active runs with a checkpoint. Call it after MPI's start, so that MPI ends later."""

    def close() -> None:
        for run in [*_RUNS]:
            run.close()

    atexit.register(close)
