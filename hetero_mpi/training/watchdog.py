"""The watchdog: detects that a run makes no progress, prints the position of every rank, and aborts the job.

Twice a second, a thread on every rank records the rank's position (step, action, message count) and how long it has not changed.
The run hangs if no rank has made progress within the time limit. Rank 0 decides; if it is silent, the other ranks do.

* Time in which a process was suspended (a closed laptop, SIGSTOP) does not count; the thread sees it as a gap between two polls.
* Long work on a single rank, such as closing a large checkpoint, is marked with ``World.busy`` and counts as progress.

Ranks exchange positions by non-blocking heartbeats: small JSON messages that a separate thread sends on a separate communicator,
so that they arrive even if the main threads hang. MPI must support calls from several threads (``THREAD_MULTIPLE``).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.collectives import Collectives, decode, encode
from hetero_mpi.comm.ranks.leave import abort_with_text
from hetero_mpi.comm.ranks.ulfm import Pause, RankLost
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Exchange, Message
from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.planning.schedule import busy
from hetero_mpi.rundir.present import Standing
from hetero_mpi.training.setup.context import RunContext, Share
from hetero_mpi.util import units
from hetero_mpi.util.background import Background, BestEffort, start_unattended, warn_on_failure
from hetero_mpi.util.errors import ExitCode

_TAG = 1


class Heartbeat:
    """Exchanges the ranks' newest reports. The constructor and ``close`` are collective; in between, one thread calls ``beat``.

    Attributes:
        words: maps each rank that has reported, including this one, to its newest report; rank 0 forwards reports to the others.
        heard_s: maps peers (on rank 0 all other ranks, elsewhere rank 0) to the ``time.monotonic`` of their newest message.
    """

    def __init__(self, world: World) -> None:
        self._comm = ulfm.duplicate(world.comm)
        self.rank, self.size = world.rank, world.size
        self.words: dict[int, Any] = {}
        peers = range(1, self.size) if self.rank == 0 else (0,)
        self.heard_s = {peer: time.monotonic() for peer in peers}
        self._sent, self._received = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
        self._sending: dict[int, tuple[Any, Any]] = {}
        """Maps each peer to (MPI request, bytes being sent)."""

    def beat(self, report: Any) -> None:
        """Receive messages and send ``report`` to rank 0 (rank 0: all reports to all) if no send is pending. Raises RankLost."""
        with ulfm.translate_losses():
            self._take_all()
            self.words[self.rank] = report
            message = encode(sorted(self.words.items()) if self.rank == 0 else report)
            for peer in self.heard_s:
                sending = self._sending.get(peer)
                if sending is None or sending[0].Test():
                    self._sending[peer] = self._comm.Isend(message, dest=peer, tag=_TAG), message
                    self._sent[peer] += 1

    def silent_s(self, peer: int) -> float:
        """Return the seconds since the newest message from ``peer``; 0 for this rank itself."""
        return time.monotonic() - self.heard_s[peer] if peer != self.rank else 0.0

    def forgive(self, pause_s: float) -> None:
        """Do not count ``pause_s`` seconds, for which this process was suspended, as silence of its peers."""
        for peer in self.heard_s:
            self.heard_s[peer] += pause_s

    def close(self) -> None:
        """Complete all messages; ``beat`` must not be called afterwards. Collective."""
        sent = Collectives(self._comm, self.rank, self.size).all_gather_json(sorted(self._sent.items()))
        expected = {peer: dict(map(tuple, sent[peer])).get(self.rank, 0) for peer in self.heard_s}
        pause = Pause()
        while self._received != expected or not all(request.Test() for request, _ in self._sending.values()):
            self._take_all()
            pause.rest()

    def _take_all(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        for peer in self.heard_s:
            while self._comm.Iprobe(source=peer, tag=_TAG, status=status):
                payload = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                self._comm.Recv(payload, source=peer, tag=_TAG)
                self._received[peer] += 1
                self.heard_s[peer] = time.monotonic()
                report = decode(payload)
                self.words.update({int(rank): word for rank, word in report} if peer == 0 else {peer: report})


MIN_LIMIT_S = 60.0
LIMIT_STEPS = 20
"""Default time limit in multiples of the predicted step time, but at least ``MIN_LIMIT_S``."""
_POLL_INTERVAL_S = 0.5
_MIN_SUSPENSION_S = 2.0
"""Delay of a poll above which the process or its machine is assumed to have been suspended."""
_LOG_GRACE_S = 1.0
"""Time between detection and abort, in which every rank logs its stack."""
_LOG = logging.getLogger(__name__)


def limit_s(setting: float | str, predicted_step_s: float) -> float:
    """Return the seconds without progress that count as a hang; 0 for no limit. ``setting``: ``[cluster] watchdog_s``."""
    return max(MIN_LIMIT_S, LIMIT_STEPS * predicted_step_s) if isinstance(setting, str) else float(setting)


def watched(context: RunContext, share: Share) -> contextlib.AbstractContextManager[Watchdog | None]:
    """Return a watchdog for the steps under a plan, or a null context if the job or the MPI library rules it out."""
    assert share.members is not None and share.trainer is not None
    cluster, world = context.job.cluster, share.members
    scale = cluster.time_scale if cluster.emulate is not None else 1.0
    limit = limit_s(cluster.watchdog_s, scale * share.report.expected_step_s)
    if limit == 0 or not cluster.communication_thread or world.thread_level != "multiple":
        return contextlib.nullcontext()
    assert isinstance(context.transport, MpiTransport)
    return Watchdog(world, limit, share.trainer, context.transport)


class StandingReader:
    """Reads this rank's standing from another thread without slowing the main thread."""

    def __init__(self, world: World, trainer: Trainer, transport: MpiTransport) -> None:
        self._world, self._trainer, self._transport = world, trainer, transport
        self.sensors: dict[str, float] = {}
        """Sensor readings of the rank's device, which the watchdog updates."""
        self._seen: Any = None
        self._since_s = time.monotonic()
        self._figures = BestEffort("reading memory, messages and load", StandingReader._read_figures)

    def read_standing(self) -> Standing:
        """Return the current standing; ``still_s`` counts from the first poll that saw this position."""
        now, activity, executor = time.monotonic(), self._world.activity, self._trainer.executor
        current = executor.current if executor is not None else None
        action = str(current) if current is not None else None
        evaluated = executor.evaluated if executor is not None else 0
        progress = activity.text, activity.marks, activity.busy, action, evaluated, self._transport.progress_count
        if progress != self._seen:
            self._seen, self._since_s = progress, now
        text = f"{activity.text}, {action}" if action else activity.text
        figures = self._figures(self) or ()  # a bound function would keep the trainer's memory
        return Standing(text, round(now - self._since_s, 1), self._waits_for(), activity.busy > 0, *figures)

    def forgive(self, pause_s: float) -> None:
        """Do not count ``pause_s`` seconds, for which this process was suspended."""
        self._since_s += pause_s

    def _read_figures(self) -> tuple[float | None, int, Mapping[str, float], Mapping[str, Sequence[int]]]:
        events = self._trainer.latest.events if self._trainer.latest is not None else ()
        computed = None
        if events and events[-1].end_s > 0:
            computed = round(sum(busy(events).values()) / events[-1].end_s, 3)
        return computed, self._trainer.backend.used_bytes(), dict(self.sensors), self._transport.sending()

    def _waits_for(self) -> str | None:
        waiting = list(self._transport.waiting)
        if not waiting:
            return self._world.activity.waits_for
        request = waiting[0]
        if isinstance(request, Message):
            return f"rank {request.peer} to {'send' if request.kind == 'receive' else 'receive'}"
        if isinstance(request, Exchange):
            what = "the gradient all-reduce" if request.sums else "updated weights"
            return f"ranks {', '.join(str(rank) for rank in request.group.ranks)} for {what}"
        return None


class Watchdog:
    """Context manager that watches a block. Construction and exit (normal or by a shared error) are collective over ``world``."""

    def __init__(self, world: World, limit_s: float, trainer: Trainer, transport: MpiTransport) -> None:
        self.world, self.limit_s = world, limit_s
        self._standing_reader = StandingReader(world, trainer, transport)
        self._backend, self._heartbeat = trainer.backend, Heartbeat(world)
        self._stop = threading.Event()
        self._watching: Background[None] | None = None
        self._main = threading.main_thread().ident
        self._stack_logged = False

    def __enter__(self) -> Watchdog:
        self._watching = Background("watching for a hang", self._run)
        start_unattended(
            "reading the device's sensors", partial(_sense, self._backend, self._standing_reader.sensors, self._stop)
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._stop.set()
        together = self.world.leaves_together(error)
        if together or isinstance(error, RankLost):
            assert self._watching is not None
            self._watching.finish()
            del self._standing_reader  # it knows the trainer, whose memory is needed
        if together:
            self._heartbeat.close()

    def standings(self) -> dict[int, Standing]:
        """Map the ranks' numbers in the job to their newest standings; empty after the block. Called on rank 0."""
        if self._stop.is_set():
            return {}
        numbers = self.world.numbers or range(self.world.size)
        return {
            numbers[index]: Standing(**{**word, "silent_s": self._heartbeat.silent_s(index)})
            for index, word in list(self._heartbeat.words.items())
        }

    def _run(self) -> None:
        # The main thread detects a lost rank too, and recovery starts another watchdog.
        with warn_on_failure("watching for a hang"), contextlib.suppress(RankLost):
            self._watch()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_POLL_INTERVAL_S):
            now = time.monotonic()
            pause_s, last = now - last - _POLL_INTERVAL_S, now
            if pause_s > _MIN_SUSPENSION_S:
                self._standing_reader.forgive(pause_s)
                self._heartbeat.forgive(pause_s)
                _LOG.warning("this process, or its machine, was suspended for %.1f s", pause_s)
            standing = self._standing_reader.read_standing()
            self._heartbeat.beat(asdict(standing))
            if standing.still_s > self.limit_s and not self._stack_logged:
                self._stack_logged = True
                frame = sys._current_frames().get(self._main or 0)
                lines = "".join(traceback.format_stack(frame)) if frame is not None else "unknown"
                _LOG.error("no progress for %.0f s; the main thread is at:\n%s", self.limit_s, lines)
            if self._hangs(standing):
                self._end()

    def _hangs(self, standing: Standing) -> bool:
        if standing.busy or standing.still_s <= self.limit_s:
            return False
        return all(self._still_s(peer) > self.limit_s for peer in self._heartbeat.heard_s)

    def _still_s(self, peer: int) -> float:
        """Return for how many seconds ``peer`` has made no progress; on ranks other than 0, for how long it has been silent."""
        silent_s = self._heartbeat.silent_s(peer)
        report = self._heartbeat.words.get(peer)
        if self.world.rank != 0 or report is None or report["busy"]:
            return silent_s
        return silent_s + float(report["still_s"])

    def _end(self) -> None:
        time.sleep(_LOG_GRACE_S)
        if self._standing_reader.read_standing().still_s <= self.limit_s:
            return  # just in time
        text = report(self.world, self.limit_s, self._heartbeat)
        _LOG.error("%s", text)
        abort_with_text(self.world, text, ExitCode.HUNG)


def _sense(backend: Backend, figures: dict[str, float], stop: threading.Event) -> None:
    """Update ``figures`` periodically; runs in a separate thread because a hanging driver may never answer."""
    while not stop.wait(_POLL_INTERVAL_S):
        figures.update(backend.sensors())


def report(world: World, limit: float, heartbeat: Heartbeat) -> str:
    """Write the message about a hang: every rank's position, and the rank for which it waits."""
    lines = []
    silent_ranks = []
    for rank in range(world.size):
        silent_s = heartbeat.silent_s(rank) if rank in (*heartbeat.heard_s, heartbeat.rank) else 0.0
        newest = heartbeat.words.get(rank)
        line = Standing(**newest).line() if newest is not None else "no report yet"
        if silent_s > min(limit, 2 * _POLL_INTERVAL_S + _MIN_SUSPENSION_S):
            silent_ranks.append(rank)
            line = f"silent for {units.seconds(silent_s)}; last report: {line}"
        lines.append(f"  {_name(world, rank)}: {line}")
    lines.append(_cause(world, silent_ranks))
    text = (
        f"No rank has made progress for {units.seconds(limit)} ([cluster] watchdog_s): the watchdog ends the job with "
    )
    return "\n".join([f"{text}exit code {ExitCode.HUNG}. Positions of the ranks:", *lines])


def _cause(world: World, silent_ranks: Sequence[int]) -> str:
    if silent_ranks:
        names = ", ".join(_name(world, rank) for rank in silent_ranks)
        return f"Stopped, or disconnected from the other ranks: {names}. Check the process and its host."
    return "All ranks answer: a device, driver or disk is stuck, or the ranks wait for each other. The ranks' logs show where."


def _name(world: World, rank: int) -> str:
    return f"rank {world.numbers[rank] if world.numbers else rank} on {world.hosts[rank]}"
