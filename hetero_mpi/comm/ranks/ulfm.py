"""MPI's user-level failure mitigation (ULFM), by which ranks outlive the death of others, in a few calls.

Open MPI 5 has it where the launcher was given ``--with-ft ulfm`` (Bland et al. 2013; chapter "Process Fault Tolerance" of the
proposed MPI 5). Calls that involve a dead rank then fail instead of ending the job. A rank that learns of a death *revokes* every
communicator, so that all ranks learn of it, whatever they wait for. Then the survivors meet (``agree``), and go on with a
communicator of their own (``shrink``).

What every rank relies on:

* Any of its communicators may be revoked at any moment. ``translate_losses`` turns MPI's many ways to say so into one ``RankLost``.
* A new communicator may exist on some ranks only, if somebody dies while it is made; then nobody can revoke it on the others. So a
  rank that waits for long checks now and then whether *any* of its communicators has been revoked (``RevocationCheck``).
* Nothing uses a communicator after it has been revoked, except ``agree`` and ``shrink``.

Without ``--with-ft ulfm`` all of this does nothing, and MPI's errors stay as they are.

Also here: back-off for polling: how long to yield and to sleep between two looks, so that polling takes no core from a rank that
computes.

A polling rank may share its core with the very rank it waits for. So it first yields the core after every look, which costs nothing
where nobody else wants it. Later it sleeps between looks, longer and longer.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np

CHECK_INTERVAL_S = 0.05
"""Interval at which waiting ranks check whether a communicator has been revoked, seconds."""
_MAX_AGREE_SLEEP_S = 0.02
_LOST_CLASSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")

_COMMUNICATORS: list[tuple[Any, Any]] = []
"""The communicators that this process may wait on, oldest first, each with the one that it was made of. ``make_communicator`` adds one, ``free``
takes some away, ``shrink`` starts a new list."""
_REGISTRY = threading.RLock()
"""Held while the list is read or changed: other threads must not ask a communicator that is being freed."""


class RankLost(RuntimeError):
    """A rank has died. Raised on every rank that is left, once for each communicator it still uses."""

    def __init__(self, text: str = "a rank has died") -> None:
        super().__init__(text)


def prepare(environment: MutableMapping[str, str]) -> None:
    """Settings of an MPI that is to outlive ranks, before it starts.

    Between hosts Open MPI 5.0 moves long messages by its "put" protocol. When a survivor finds the socket to a dead rank broken in
    the middle of one, it tries to tell that rank so, under a lock that it holds already, and hangs. Ordinary sends do not.
    """
    if _requested():
        environment.setdefault("OMPI_MCA_btl_tcp_flags", "send,inplace")


def active() -> bool:
    """Was this job started with fault tolerance, and does this MPI library have it? False before MPI has been initialised."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and _requested() and bool(mpi.Is_initialized()) and _supported(mpi)


@functools.lru_cache(maxsize=1)
def _requested() -> bool:
    # As the launcher spells it.
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes")  # noqa: SIM112


@functools.lru_cache(maxsize=1)
def _supported(mpi: Any) -> bool:
    calls = all(hasattr(mpi.Comm, name) for name in ("Revoke", "Shrink", "Iagree", "Is_revoked", "Get_failed"))
    return calls and bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)


def make_communicator(comm: Any, make: Callable[[], Any]) -> Any:
    """The communicator that ``make`` returns; it is revoked when a rank dies, and freed with ``comm``, of which it is made.
    Collective over ``comm``.
    """
    with translate_losses():
        if active():
            # Open MPI 5.0 crashes on ranks that wait for others inside such a call while one of them dies; so they wait before it.
            finish(comm.Ibarrier(), Pause())
        return _register(make(), comm)


def _register(comm: Any, parent: Any) -> Any:
    if comm != sys.modules["mpi4py.MPI"].COMM_NULL:
        with _REGISTRY:
            _COMMUNICATORS.append((comm, parent))
    return comm


def free(comm: Any, itself: bool = True) -> None:
    """Free all communicators made of ``comm``, directly or not, the newest first, then ``comm`` ``itself``. Collective
    over each of them; no thread may use them any more.
    """
    with _REGISTRY:
        family = {id(comm)}
        family.update(id(communicator) for communicator, parent in _COMMUNICATORS if id(parent) in family)
        freed = [
            communicator
            for communicator, _ in _COMMUNICATORS
            if id(communicator) in family and (itself or communicator is not comm)
        ]
        _COMMUNICATORS[:] = [
            pair for pair in _COMMUNICATORS if not any(pair[0] is communicator for communicator in freed)
        ]
    with translate_losses():
        for communicator in reversed(freed):
            communicator.Free()


def duplicate(comm: Any) -> Any:
    """A duplicate of ``comm``, as ``make_communicator``. Collective."""
    return make_communicator(comm, comm.Dup)


def is_loss(error: BaseException | None) -> bool:
    """Whether ``error``, or an error that caused it, says that a rank has died."""
    if isinstance(error, RankLost):
        return True
    mpi = sys.modules.get("mpi4py.MPI")
    if error is None or mpi is None or not active():
        return False
    if isinstance(error, mpi.Exception):
        lost = {getattr(mpi, name) for name in _LOST_CLASSES}
        # Some calls say less than they know: "error in status", "internal error".
        return error.Get_error_class() in lost or any_rank_lost()
    return is_loss(error.__cause__)


def any_rank_lost() -> bool:
    """Has a communicator of this process been revoked, or does a rank of one count as dead?"""
    if not active():
        return False
    with _REGISTRY:
        return any(comm.Is_revoked() or comm.Get_failed().Get_size() > 0 for comm, _ in _COMMUNICATORS)


def revoke_on_loss(error: BaseException | None) -> bool:
    """As ``is_loss``; if so, all ranks are told. From any thread."""
    if not is_loss(error):
        return False
    revoke()
    return True


def revoke() -> None:
    """Make every rank's calls fail, on every communicator that this rank shares with it. From any thread."""
    if not active():
        return
    mpi = sys.modules["mpi4py.MPI"]
    with _REGISTRY:
        for comm, _ in _COMMUNICATORS:
            try:
                if not comm.Is_revoked():
                    comm.Revoke()
            except mpi.Exception:  # it is past use in another way
                pass


@contextmanager
def translate_losses() -> Iterator[None]:
    """A block whose MPI errors become ``RankLost`` where they say that a rank has died; then all ranks are told."""
    try:
        yield
    except RankLost:
        raise
    except Exception as error:
        if not revoke_on_loss(error):
            raise
        raise RankLost from error


class RevocationCheck:
    """For loops that wait: a call raises ``RankLost`` if some communicator of this process has been revoked."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + CHECK_INTERVAL_S

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + CHECK_INTERVAL_S
        with _REGISTRY:
            revoked = active() and any(comm.Is_revoked() for comm, _ in _COMMUNICATORS)
        if revoked:
            revoke()
            raise RankLost


def finish(request: Any, pause: Pause) -> None:
    """Poll until an MPI request is complete."""
    check = RevocationCheck()
    while not request.Test():
        check()
        pause.rest()


def agree(comm: Any, well: bool) -> bool:
    """Whether all ranks of ``comm`` that are alive say ``well``. The same answer on all of them, on a revoked communicator too."""
    mpi = sys.modules["mpi4py.MPI"]
    flag = np.array([int(well)], np.int32)
    pause = Pause(_MAX_AGREE_SLEEP_S)
    try:
        request = comm.Iagree(flag)
        while not request.Test():
            pause.rest()
    except mpi.Exception as error:
        # The answer counts all the same; the error merely says that somebody has died, which was known or will be noticed.
        if error.Get_error_class() not in {getattr(mpi, name) for name in _LOST_CLASSES}:
            raise
    return bool(flag[0])


def shrink(comm: Any) -> Any:
    """A communicator of the ranks of ``comm`` that are alive, in their order. Collective over them. From now on only it, and
    communicators made of it, are used.
    """
    smaller = comm.Shrink()
    with _REGISTRY:
        _COMMUNICATORS.clear()
    return _register(smaller, None)


YIELD_PERIOD_S = 200e-6
"""After an event the next looks follow at once, with a yield between them, for this long."""
SLEEP_RATIO = 0.1
MIN_SLEEP_S = 50e-6
MAX_SLEEP_S = 1e-3
"""After that it sleeps between looks for a share of the time since the event, within these limits. So an event is noticed a tenth
late at most, and long waits cost nothing. (Linux sleeps 50 us longer than asked.)
"""


class Pause:
    """The pause between two looks."""

    def __init__(self, longest_s: float = MAX_SLEEP_S, yield_s: float = YIELD_PERIOD_S) -> None:
        self._longest_s, self._yield_s = longest_s, yield_s
        self._last_event_s = time.perf_counter()

    def reset(self) -> None:
        self._last_event_s = time.perf_counter()

    def rest(self) -> None:
        """Yield, or sleep as long as is due."""
        quiet_s = time.perf_counter() - self._last_event_s
        if quiet_s < self._yield_s:
            os.sched_yield()
        else:
            time.sleep(min(max(SLEEP_RATIO * quiet_s, MIN_SLEEP_S), self._longest_s))
