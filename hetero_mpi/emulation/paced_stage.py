"""A stage whose forwards, backwards and optimizer steps take as long as on a profile's device.

Each action computes its real arithmetic, then waits until ``durations.duration`` times ``[cluster] time_scale`` has passed.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hetero_mpi.model.layer.gradients import Finished
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.planning.durations import Durations, finished_layers_s, sum_s, update_s, values_s
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile

_TRIAL_COUNT, _TRIAL_S = 9, 1e-3
_MAX_OVERSLEEP_S = 5e-4
"""Maximum value for the measured oversleep; longer ones, on a busy machine, are outliers."""


class Sleeper:
    """Waits until a given time of ``time.perf_counter``, more precisely than the operating system wakes a process.

    A sleeping process wakes about 0.1 ms late (timer slack and scheduling). This delay is nearly constant, so it is measured
    once and subtracted. With a ``spare_core``, the rest is spent polling the clock; ranks that share cores do not poll, as that
    would slow down a computing rank.
    """

    def __init__(self, spare_core: bool) -> None:
        self.spare_core = spare_core
        self.late_s = min(_MAX_OVERSLEEP_S, statistics.median(_oversleep_s() for _ in range(_TRIAL_COUNT)))
        """Measured oversleep in seconds."""

    def until(self, moment_s: float) -> None:
        """Return at ``moment_s``, or at once if it has passed."""
        # With a spare core polling begins early, to absorb an occasional late wake-up.
        early_s = self.late_s * (1.5 if self.spare_core else 1.0)
        left_s = moment_s - time.perf_counter() - early_s
        if left_s > 0:
            time.sleep(left_s)
        while self.spare_core and time.perf_counter() < moment_s:
            pass


def _oversleep_s() -> float:
    begin = time.perf_counter()
    time.sleep(_TRIAL_S)
    return time.perf_counter() - begin - _TRIAL_S


class ActionPacer:
    """Makes this rank's actions last as long as on the emulated cluster.

    Attributes:
        actions: Number of paced actions.
        late: Number of actions that took too long, because of real arithmetic or a late wake-up.
        late_s: Total wall-clock time by which these actions were late.

    Args:
        speeds: Changes of speed as (rank, first step, fraction of the profile's speed).
    """

    def __init__(
        self,
        plan: Plan,
        profile: ClusterProfile,
        time_scale: float,
        sleeper: Sleeper,
        speeds: Sequence[tuple[int, int, float]] = (),
    ) -> None:
        self._plan, self._scale, self._sleeper = plan, time_scale, sleeper
        self._speeds = sorted(speeds, key=lambda change: change[1])
        self._step = 0
        self._durations = Durations(plan, profile)
        self._profile = self._durations.profile
        self._finished_s: dict[Action, dict[int, float]] = {}
        self.actions, self.late, self.late_s = 0, 0, 0.0

    def duration_s_of(self, action: Action) -> float:
        """Wall-clock seconds of an action; STEP excludes the exchanges that it or the next forward waits for."""
        scale = self._scale_now(action)
        if action.op is Op.STEP:
            return scale * update_s(action.stage, self._plan, self._profile)
        return scale * self._durations.cost_of(action)[0]

    def _scale_now(self, action: Action) -> float:
        """Wall-clock seconds per second of the device of ``action``, at its speed in the current step."""
        rank, speed = self._durations.stages[action.stage].ranks[0], 1.0
        for changed_rank, first_step, new_speed in self._speeds:
            speed = new_speed if changed_rank == rank and first_step <= self._step else speed
        return self._scale / speed

    def begin_step(self, step: int) -> None:
        """Set the number of the current step, as devices may change speed between steps."""
        self._step = step

    def go_on_from(self, before: ActionPacer) -> None:
        """Continue the counters of ``before`` after a change of plans."""
        self.actions, self.late, self.late_s = before.actions, before.late, before.late_s

    def exchange_s(self, layer: int, sums: bool) -> float:
        """Seconds to sum a layer's gradients or distribute its new values, for the emulated model's parameters."""
        seconds = sum_s if sums else values_s
        return self._scale * seconds(self._plan, self._profile, layer)

    def pace_action(self, action: Action, start_s: float, finished: Finished | None = None) -> None:
        """Wait until an action that began at ``start_s`` (``time.perf_counter``) has lasted long enough.

        ``finished`` is called with each layer at the time when a last backward would have finished it.
        """
        end_s = start_s + self.duration_s_of(action)
        late_s = time.perf_counter() - end_s
        if finished is not None:
            for layer, after_s in self._layers_s(action).items():
                self._sleeper.until(start_s + after_s)
                finished(layer)
        self.actions += 1
        if late_s > 0:
            self.late, self.late_s = self.late + 1, self.late_s + late_s
        else:
            self._sleeper.until(end_s)

    def _layers_s(self, action: Action) -> dict[int, float]:
        if action not in self._finished_s:
            self._finished_s[action] = finished_layers_s(action, self._plan, self._profile)
        scale = self._scale_now(action)
        return {layer: scale * seconds for layer, seconds in self._finished_s[action].items()}


class PacedStage:
    """Paced version of the stage with this ``number`` in the plan; other attributes are those of ``stage``."""

    def __init__(self, stage: Stage, number: int, pace: ActionPacer) -> None:
        self.stage, self._number, self._pace = stage, number, pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)

    def forward(self, position: MicroBatch, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        self._pace.begin_step(position.step)
        with self._paced(Op.F, position.index):
            return self.stage.forward(position, x, targets)

    def backward(
        self, index: int, dy: torch.Tensor | None = None, finished: Finished | None = None
    ) -> torch.Tensor | None:
        with self._paced(Op.B, index, finished):
            return self.stage.backward(index, dy)

    def backward_input(self, index: int, dy: torch.Tensor | None = None) -> torch.Tensor | None:
        with self._paced(Op.I, index):
            return self.stage.backward_input(index, dy)

    def backward_weights(self, index: int, finished: Finished | None = None) -> None:
        with self._paced(Op.W, index, finished):
            self.stage.backward_weights(index)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        with self._paced(Op.STEP), self.stage.updating():
            yield

    @contextlib.contextmanager
    def _paced(self, op: Op, index: int | None = None, finished: Finished | None = None) -> Iterator[None]:
        """Make a block last as long as an action; ``finished`` is called when the device would have finished a layer."""
        begin = time.perf_counter()
        yield
        self._pace.pace_action(Action(op, self._number, index), begin, finished)
