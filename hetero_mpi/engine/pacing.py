"""What makes the actions of steps last otherwise than they would: an emulation of other devices gives it to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hetero_mpi.comm.transport import Transport
from hetero_mpi.planning.schedule import Action


class Pace(Protocol):
    """Makes a rank's actions last."""

    def begin_step(self, step: int) -> None:
        """The number of the step that runs."""

    def begin_exchange(self, layer: int) -> None:
        """Whose gradients this rank is about to sum, or whose values to exchange."""

    def hold(self, action: Action, start_s: float, finished: Callable[[int], None] | None = None) -> None:
        """Wait until an action that began at ``start_s`` (``time.perf_counter``) has lasted long enough. ``finished``: is told each
        layer when a last backward would have finished it."""


class Pacing(Protocol):
    """A rank's pace, and transports whose messages last as long as it says."""

    @property
    def pace(self) -> Pace: ...
    @property
    def transport(self) -> Transport:
        """Carries the messages between stages in steps, and those only."""

    @property
    def end_transport(self) -> Transport:
        """Carries the gradient and the values of a tied matrix between the two ends, and sums gradients."""

    @property
    def time_scale(self) -> float:
        """Seconds of wall clock per second that is told."""

    def step_s(self, wall_s: float) -> float:
        """Seconds that are told of a step that took ``wall_s``."""

    def tokens(self, own: int) -> float:
        """Tokens that are told of so many of a batch."""
