"""MPI's user-level failure mitigation (ULFM), which lets ranks survive the loss of other ranks.

Open MPI 5 provides ULFM if its launcher is started with ``--with-ft ulfm`` (Bland et al. 2013; chapter "Process Fault Tolerance" of
the proposed MPI 5). Calls that involve a lost rank then fail instead of ending the job. A rank that detects a loss *revokes* every
communicator, so that all waiting ranks detect the loss. The survivors then agree on what to do (``agree``) and continue with a new
communicator (``shrink``).

Rules for every rank:

* Any of its communicators may be revoked at any moment. ``translate_losses`` converts MPI's various errors to ``RankLost``.
* If a rank is lost during the creation of a communicator, the communicator may exist on some ranks only, and the others cannot
  revoke it. A long wait therefore checks periodically whether *any* communicator of the rank is revoked (``RevocationCheck``).
* A revoked communicator is only used for ``agree`` and ``shrink``.

Without ``--with-ft ulfm``, this module does nothing, and MPI's errors stay unchanged.

``Pause`` implements the back-off in polling loops. A polling rank may share its core with the very rank that it waits for. It first
yields the core after every poll, which costs nothing on an idle core, and later sleeps longer and longer between polls.
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
"""Interval at which waiting ranks check whether a communicator has been revoked."""
_MAX_AGREE_SLEEP_S = 0.02
_LOST_CLASSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")

_COMMUNICATORS: list[tuple[Any, Any]] = []
"""The communicators on which this process may wait, oldest first, each with its parent. ``make_communicator`` adds a communicator,
``free`` removes one and its descendants, and ``shrink`` starts a new list."""
_REGISTRY = threading.RLock()
"""Held while ``_COMMUNICATORS`` is read or changed, because other threads must not query a communicator that is being freed."""


class RankLost(RuntimeError):
    """Raised on every surviving rank when a rank is lost, once for each communicator that it still uses."""

    def __init__(self, text: str = "a rank was lost") -> None:
        super().__init__(text)


def prepare(environment: MutableMapping[str, str]) -> None:
    """Configure MPI, before it starts, to survive lost ranks if the launcher requests fault tolerance.

    Between hosts, Open MPI 5.0 transfers long messages with its "put" protocol. If the socket to a lost rank breaks during such a
    message, a survivor tries to notify that rank under a lock that it already holds, and deadlocks. Ordinary sends do not.
    """
    if _requested():
        environment.setdefault("OMPI_MCA_btl_tcp_flags", "send,inplace")


def active() -> bool:
    """Return whether fault tolerance was requested and the MPI library supports it. False before MPI is initialised."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and _requested() and bool(mpi.Is_initialized()) and _supported(mpi)


@functools.lru_cache(maxsize=1)
def _requested() -> bool:
    # Spelled as by the launcher.
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes")  # noqa: SIM112


@functools.lru_cache(maxsize=1)
def _supported(mpi: Any) -> bool:
    calls = all(hasattr(mpi.Comm, name) for name in ("Revoke", "Shrink", "Iagree", "Is_revoked", "Get_failed"))
    return calls and bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)


def make_communicator(comm: Any, make: Callable[[], Any]) -> Any:
    """Create a communicator with ``make`` that is revoked after a loss and freed with its parent ``comm``. Collective over it."""
    with translate_losses():
        if active():
            # Open MPI 5.0 crashes ranks that wait inside such a call while another dies; so they wait before it.
            finish(comm.Ibarrier(), Pause())
        return _register(make(), comm)


def _register(comm: Any, parent: Any) -> Any:
    if comm != sys.modules["mpi4py.MPI"].COMM_NULL:
        with _REGISTRY:
            _COMMUNICATORS.append((comm, parent))
    return comm


def free(comm: Any, itself: bool = True) -> None:
    """Free the descendants of ``comm``, newest first, and with ``itself`` also ``comm``. Collective; no thread may use them."""
    with _REGISTRY:
        family = {id(comm)}
        family.update(id(child) for child, parent in _COMMUNICATORS if id(parent) in family)
        freed = [child for child, _ in _COMMUNICATORS if id(child) in family and (itself or child is not comm)]
        _COMMUNICATORS[:] = [pair for pair in _COMMUNICATORS if not any(pair[0] is child for child in freed)]
    with translate_losses():
        for child in reversed(freed):
            child.Free()


def duplicate(comm: Any) -> Any:
    """Duplicate ``comm`` with ``make_communicator``. Collective."""
    return make_communicator(comm, comm.Dup)


def is_loss(error: BaseException | None) -> bool:
    """Return whether ``error`` or one of its causes reports a lost rank."""
    if isinstance(error, RankLost):
        return True
    mpi = sys.modules.get("mpi4py.MPI")
    if error is None or mpi is None or not active():
        return False
    if isinstance(error, mpi.Exception):
        lost = {getattr(mpi, name) for name in _LOST_CLASSES}
        # Some calls report only "error in status" or "internal error".
        return error.Get_error_class() in lost or any_rank_lost()
    return is_loss(error.__cause__)


def any_rank_lost() -> bool:
    """Return whether a communicator of this process has been revoked or contains a failed rank."""
    if not active():
        return False
    with _REGISTRY:
        return any(comm.Is_revoked() or comm.Get_failed().Get_size() > 0 for comm, _ in _COMMUNICATORS)


def revoke_on_loss(error: BaseException | None) -> bool:
    """Return ``is_loss(error)`` and, if it is true, notify all ranks of the loss. Callable from any thread."""
    if not is_loss(error):
        return False
    revoke()
    return True


def revoke() -> None:
    """Revoke all communicators of this process, so that calls on them fail on every rank. Callable from any thread."""
    if not active():
        return
    mpi = sys.modules["mpi4py.MPI"]
    with _REGISTRY:
        for comm, _ in _COMMUNICATORS:
            try:
                if not comm.Is_revoked():
                    comm.Revoke()
            except mpi.Exception:  # already unusable for another reason
                pass


@contextmanager
def translate_losses() -> Iterator[None]:
    """Convert MPI errors in the block that report a lost rank to ``RankLost``, and notify all ranks."""
    try:
        yield
    except RankLost:
        raise
    except Exception as error:
        if not revoke_on_loss(error):
            raise
        raise RankLost from error


class RevocationCheck:
    """A check for waiting loops. Calling it raises ``RankLost`` if a communicator of this process has been revoked."""

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
    """Poll until an MPI request completes."""
    check = RevocationCheck()
    while not request.Test():
        check()
        pause.rest()


def agree(comm: Any, well: bool) -> bool:
    """Return whether ``well`` is true on all living ranks of ``comm``. All get the same result, even if ``comm`` is revoked."""
    mpi = sys.modules["mpi4py.MPI"]
    flag = np.array([int(well)], np.int32)
    pause = Pause(_MAX_AGREE_SLEEP_S)
    try:
        request = comm.Iagree(flag)
        while not request.Test():
            pause.rest()
    except mpi.Exception as error:
        # The result is valid; the error merely reports a loss that is known already or will be noticed.
        if error.Get_error_class() not in {getattr(mpi, name) for name in _LOST_CLASSES}:
            raise
    return bool(flag[0])


def shrink(comm: Any) -> Any:
    """Create a communicator of the living ranks of ``comm``, in order, that replaces all earlier ones. Collective over them."""
    smaller = comm.Shrink()
    with _REGISTRY:
        _COMMUNICATORS.clear()
    return _register(smaller, None)


YIELD_PERIOD_S = 200e-6
"""For this long after an event, a waiting rank only yields its core between polls."""
SLEEP_RATIO = 0.1
MIN_SLEEP_S = 50e-6
MAX_SLEEP_S = 1e-3
"""Afterwards it sleeps between polls for ``SLEEP_RATIO`` of the time since the event, within these limits. Waits thus take at most
a tenth longer, and long waits cost nothing. (Linux sleeps 50 us longer than requested.)"""


class Pause:
    """The pause between two polls, which grows with the time since the last event."""

    def __init__(self, longest_s: float = MAX_SLEEP_S, yield_s: float = YIELD_PERIOD_S) -> None:
        self._longest_s, self._yield_s = longest_s, yield_s
        self._last_event_s = time.perf_counter()

    def reset(self) -> None:
        self._last_event_s = time.perf_counter()

    def rest(self) -> None:
        """Yield the core or, if the last event was a while ago, sleep."""
        quiet_s = time.perf_counter() - self._last_event_s
        if quiet_s < self._yield_s:
            os.sched_yield()
        else:
            time.sleep(min(max(SLEEP_RATIO * quiet_s, MIN_SLEEP_S), self._longest_s))
