"""The watchdog: detects a run without progress, prints the position of every rank, and aborts the job.

A thread on every rank records twice a second its rank's position (step, action, message count) and for how long it is unchanged.
A hang means that no rank has made progress for the limit. Rank 0 decides; if rank 0 is silent, the other ranks do.

* Time in which a process was suspended (a closed laptop, SIGSTOP) does not count; the thread sees it as a gap between two polls.
* Long work of a single rank, such as closing a large checkpoint, is marked with ``World.busy`` and counts as progress.

Ranks exchange positions by non-blocking heartbeats: small JSON messages on a separate communicator, sent by a separate thread, so
they arrive even if the main threads hang. MPI must support calls from several threads (``THREAD_MULTIPLE``).

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
    """The newest report of each rank. The constructor and ``close`` are collective; in between one thread calls ``beat``.

    Attributes:
        words: rank -> its newest report, this rank's included; on other ranks than 0 as rank 0 has passed it on. Missing: none yet.
        heard_s: rank -> ``time.monotonic`` of its newest message: on rank 0 of every other rank, elsewhere of rank 0.
    """

    def __init__(self, world: World) -> None:
        self._comm = ulfm.duplicate(world.comm)
        self.rank, self.size = world.rank, world.size
        self.words: dict[int, Any] = {}
        peers = range(1, self.size) if self.rank == 0 else (0,)
        self.heard_s = {peer: time.monotonic() for peer in peers}
        self._sent, self._received = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
        self._sending: dict[int, tuple[Any, Any]] = {}
        """Peer -> (MPI request, the bytes it sends)."""

    def beat(self, report: Any) -> None:
        """Receive pending messages, and send ``report`` to rank 0 (rank 0: all reports to all ranks), except to
        peers with a pending send. Raises RankLost."""
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
        """Seconds since the newest message of ``peer``; 0 for this rank itself."""
        return time.monotonic() - self.heard_s[peer] if peer != self.rank else 0.0

    def forgive(self, pause_s: float) -> None:
        """Do not count ``pause_s`` seconds of suspension of this process as silence of its peers."""
        for peer in self.heard_s:
            self.heard_s[peer] += pause_s

    def close(self) -> None:
        """Complete or cancel all messages. No ``beat`` follows."""
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
"""Default limit in predicted steps; at least ``MIN_LIMIT_S``."""
_POLL_INTERVAL_S = 0.5
_MIN_SUSPENSION_S = 2.0
"""Delay of a poll above which the process or its machine was suspended."""
_LOG_GRACE_S = 1.0
"""Delay between detection and abort, in which every rank logs its stack."""
_LOG = logging.getLogger(__name__)


def limit_s(setting: float | str, predicted_step_s: float) -> float:
    """Seconds without progress that count as a hang; 0: never. ``setting``: [cluster] watchdog_s, "auto" or seconds."""
    return max(MIN_LIMIT_S, LIMIT_STEPS * predicted_step_s) if isinstance(setting, str) else float(setting)


def watched(context: RunContext, share: Share) -> contextlib.AbstractContextManager[Watchdog | None]:
    """The watchdog of steps under a plan; none if the job or the MPI library rules it out. On every active rank."""
    assert share.members is not None and share.trainer is not None
    cluster, world = context.job.cluster, share.members
    scale = cluster.time_scale if cluster.emulate is not None else 1.0
    limit = limit_s(cluster.watchdog_s, scale * share.report.expected_step_s)
    if limit == 0 or not cluster.communication_thread or world.thread_level != "multiple":
        return contextlib.nullcontext()
    assert isinstance(context.transport, MpiTransport)
    return Watchdog(world, limit, share.trainer, context.transport)


class StandingReader:
    """Reads this rank's standing from another thread, without slowing its main thread."""

    def __init__(self, world: World, trainer: Trainer, transport: MpiTransport) -> None:
        self._world, self._trainer, self._transport = world, trainer, transport
        self.sensors: dict[str, float] = {}
        """Readings of the rank's device, updated by the watchdog."""
        self._seen: Any = None
        self._since_s = time.monotonic()
        self._figures = BestEffort("looking at memory, messages and computing", StandingReader._read_figures)

    def read_standing(self) -> Standing:
        """Return the current standing; ``still_s`` counts from its first poll."""
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
        """Do not count ``pause_s``, for which this process was stopped."""
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
            return f"rank {request.peer} to {'send' if request.kind == 'receive' else 'take a message'}"
        if isinstance(request, Exchange):
            what = "the sums of gradients" if request.sums else "new values"
            return f"ranks {', '.join(str(rank) for rank in request.group.ranks)} for {what}"
        return None


class Watchdog:
    """Context manager that watches a block. Entry and exit (normal, or by a shared error) are collective over ``world``."""

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
        """The newest standings, by the ranks' numbers in the job; on rank 0. None after the block."""
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
                _LOG.warning("this process, or its machine, stood still for %.1f s", pause_s)
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
        """Seconds without progress of ``peer`` as known on this rank; on ranks other than 0: seconds of silence."""
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
    """Update ``figures`` on a separate thread, as a hanging driver may never answer."""
    while not stop.wait(_POLL_INTERVAL_S):
        figures.update(backend.sensors())


def report(world: World, limit: float, heartbeat: Heartbeat) -> str:
    """The message about a hang: every rank's position, and whom it waits for."""
    lines = []
    silent_ranks = []
    for rank in range(world.size):
        silent_s = heartbeat.silent_s(rank) if rank in (*heartbeat.heard_s, heartbeat.rank) else 0.0
        newest = heartbeat.words.get(rank)
        line = Standing(**newest).line() if newest is not None else "no word yet"
        if silent_s > min(limit, 2 * _POLL_INTERVAL_S + _MIN_SUSPENSION_S):
            silent_ranks.append(rank)
            line = f"not heard of for {units.seconds(silent_s)}; before that: {line}"
        lines.append(f"  {_name(world, rank)}: {line}")
    lines.append(_cause(world, silent_ranks))
    return "\n".join(
        [
            f"No rank has made progress for {units.seconds(limit)} ([cluster] watchdog_s): the watchdog ends the job with "
            f"exit code {ExitCode.HUNG}. Positions of the ranks:",
            *lines,
        ]
    )


def _cause(world: World, silent_ranks: Sequence[int]) -> str:
    if silent_ranks:
        names = ", ".join(_name(world, rank) for rank in silent_ranks)
        return f"Stopped, or cut off from the others: {names}. Look at it."
    return "All ranks answer: a device, a driver or a disk is stuck, or the program waits for itself. The ranks' logs show where."


def _name(world: World, rank: int) -> str:
    return f"rank {world.numbers[rank] if world.numbers else rank} on {world.hosts[rank]}"
