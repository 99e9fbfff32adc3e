"""Peer replicas: copies of the trained state on other ranks, so that a dead rank, or a machine lost with its disk, costs a few
steps.

    rank 0   step 20 | copy | step 21 | ...        own copy of step 20, and rank 1's
    rank 1   step 20 | copy | step 21 | ...        own copy of step 20, and rank 0's
    background        each sends its copy to its *peer*, on another host where there is one,
                      and writes what it then has to its own disk, where there is a supervisor (``state.ShardWriter``)

A *version* is all ranks' trained parameters and moments after one step. Every rank keeps a copy of its own part, because its device
has moved on when somebody dies. A peer keeps what it receives. A new version replaces the one before the last only when all ranks
have agreed that the last one has arrived everywhere. So at any moment one version is whole, and survivors never go on from
different steps. (Checkpoints in memory with a peer: Zheng, Shi, Kale 2004, FTC-Charm++.)

Two versions in memory serve ranks that outlive others. Without such ranks one is enough, as it only passes through to the disk.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence

import torch

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import send_in_order
from hetero_mpi.device.backend import host_bytes
from hetero_mpi.rundir.logs import say
from hetero_mpi.state.directory import supervised
from hetero_mpi.state.hdf5 import cut
from hetero_mpi.state.saving import (
    MEMORY_SHARE,
    BesideTraining,
    Snapshots,
    lack_of_memory,
    lack_of_space,
    size_bytes,
    views,
)
from hetero_mpi.state.state import ShardWriter, State, new_version_id
from hetero_mpi.util import units
from hetero_mpi.util.background import Background
from hetero_mpi.util.disk import free_bytes

VERSIONS = 2
"""Versions in memory where ranks may outlive others: the newest whole one, and one under way. Otherwise one is enough."""
DISK_SHARE = 0.5
"""Largest share of a host's free disk, when training begins, that copies may take."""
_VERSIONS_ON_DISK = 2
"""One that is whole everywhere, and one that is being written."""
COST_SHARE = 0.02
"""Largest share of the time that copies may take."""
_TAG = 1
_FIRST_LOOK = 4
"""Steps before it is first decided how often copies are made, as the first few of a run are slower than the rest."""
_STEPS_ALONE = 3
"""Number of steps without a transfer that must have been timed before that."""


def versions_in_memory(every: int | str) -> int:
    """Number of versions that a rank of this run holds in memory (``state.peer_replicas``). ``every``: ``[checkpoint]
    replicate_every``.
    """
    if every == 0:
        return 0
    return VERSIONS if ulfm.active() else int(supervised())


def peers(sizes: Sequence[int], hosts: Sequence[str]) -> dict[int, int]:
    """rank -> its peer, the rank that keeps its copy. It is on another host where there is one, and there the rank that holds
    least. ``sizes``: bytes that each rank has to give; ranks with none need no peer.
    """
    held, found = list(sizes), {}
    count = len(sizes)
    for rank in sorted(range(count), key=lambda rank: (-sizes[rank], rank)):
        others = [other for other in range(count) if other != rank]
        elsewhere = [other for other in others if hosts[other] != hosts[rank]] or others
        if sizes[rank] and elsewhere:
            found[rank] = min(elsewhere, key=lambda other: (held[other], (other - rank) % count))
            held[found[rank]] += sizes[rank]
    return dict(sorted(found.items()))


def steps_between(cost_s: float, step_s: float) -> int:
    """The smallest number of steps of ``step_s`` between two copies of ``cost_s`` each that keeps their cost within
    ``COST_SHARE``.
    """
    return max(1, math.ceil(cost_s / (COST_SHARE * step_s)))


class CopyCosts:
    """Measures what copies cost this rank: the time that training stands still, and the delay of the steps during a transfer."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        self.processor_s = 0.0
        """Seconds of the thread that transfers: at worst it computes on a core that training needs."""
        self._alone: deque[float] = deque(maxlen=50)
        self._beside: list[float] = []
        self._earlier: deque[tuple[float, float, float]] = deque(maxlen=10)
        self._last_s = time.perf_counter()

    def begin(self, stall_s: float) -> None:
        """Record that a copy has been taken and its transfer begins. ``stall_s``: how long training stood still."""
        if self.stall_s:
            self._earlier.append(self._parts())
        self.stall_s, self.processor_s = stall_s, 0.0
        self._beside.clear()
        self._last_s = time.perf_counter()

    def transferred(self, processor_s: float) -> None:
        """Record the end of a transfer. ``processor_s``: processor time of its thread."""
        self.processor_s = processor_s

    def step(self, beside: bool) -> None:
        """Record a step. ``beside``: a transfer was under way during a part of it at least."""
        now = time.perf_counter()
        (self._beside if beside else self._alone).append(now - self._last_s)
        self._last_s = now

    def pause_ended(self) -> None:
        """Do not count the time since the last step as part of one."""
        self._last_s = time.perf_counter()

    @property
    def steps_alone(self) -> int:
        return len(self._alone)

    @property
    def step_s(self) -> float:
        """Median seconds of a step without any transfer; 0: none was timed."""
        return statistics.median(self._alone) if self._alone else 0.0

    @property
    def cost_s(self) -> float:
        """Cost of a version, seconds: the mean over the last ones, since steps also vary by chance."""
        stalls, processors, longer = zip(*self._earlier, self._parts(), strict=True)
        return float(statistics.mean(stalls) + max(statistics.mean(processors), statistics.mean(longer)))

    def _parts(self) -> tuple[float, float, float]:
        """The newest version's stall, processor time, and the additional time of the steps during its transfer (may be
        negative).
        """
        longer_s = 0.0
        if self._beside and self._alone:
            longer_s = len(self._beside) * (statistics.median(self._beside) - self.step_s)
        return self.stall_s, self.processor_s, longer_s


class PeerReplicas(BesideTraining):
    """Makes versions while one plan lasts. Every method is collective over the active ranks, between two steps.

    Args:
        kept: where versions are kept; older ones, of other plans too, stay until the first new one is whole.
        every: steps between versions; None: as few as ``COST_SHARE`` allows, by measured times.
        threaded: may MPI be called by several threads? If not, training stands still while copies are sent and written.
        local: writes versions to the hosts' disks; None: nothing is written.
    """

    def __init__(
        self,
        world: World,
        snapshots: Snapshots,
        kept: list[State],
        every: int | None,
        threaded: bool,
        local: ShardWriter | None,
    ) -> None:
        self._threaded = threaded
        self._in_memory = ulfm.active()
        self._versions = VERSIONS if self._in_memory else 1
        self.world, self.kept, self._fixed = world, kept, every
        self.every: int | None = every
        self._snapshots, listed = snapshots, snapshots.listed
        sizes = [size_bytes(p for p in listed if p.owner == rank) for rank in range(world.size)]
        self.peer_of = peers(sizes, world.hosts)
        self._received = {
            sender: [shard for shard in listed if shard.owner == sender]
            for sender, peer in self.peer_of.items()
            if peer == world.rank
        }
        held_bytes = sizes[world.rank] + sum(sizes[sender] for sender in self._received)
        self.enabled, self._local = world.size > 1 or local is not None, local
        if self.enabled:
            lacking = lack_of_memory(world, self._versions * held_bytes)
            allowed = f"{units.percent(MEMORY_SHARE)} of the free host memory"
            self.enabled = _is_room(lacking, "by other ranks", "a death", allowed)
        if self.enabled and local is not None:
            allowed = f"{units.percent(DISK_SHARE)} of what is free"
            free = 0
            with contextlib.suppress(OSError):
                free = free_bytes(local.run_dir)
            lacking = lack_of_space(world, _VERSIONS_ON_DISK * held_bytes, free, DISK_SHARE)
            self._local = local if _is_room(lacking, "on hosts' disks", "a lost machine", allowed) else None
        self.enabled = self.enabled and (self._local is not None or (self._in_memory and world.size > 1))
        super().__init__(world, MpiTransport(world.comm, threaded=False) if self.enabled else None)
        self._held = snapshots.holder(self._versions)
        self._buffers = deque(self._new_buffers() for _ in range(self._versions * self.enabled))
        self._costs = CopyCosts()
        self._said = math.inf
        """The number of steps that a person was told last."""
        self._taken = self._next = 0
        self._new: list[State] = []

    def _new_buffers(self) -> dict[int, torch.Tensor]:
        """Rank -> host memory for the part that is received from it."""
        return {rank: torch.empty(size_bytes(own), dtype=torch.uint8) for rank, own in self._received.items()}

    def begin(self, state: State) -> None:
        """Before the first step: make a version of this moment."""
        if self.enabled:
            self._take(state, time.perf_counter(), self.world.broadcast_json(new_version_id()))
            self._next = state.step + (self._fixed or _FIRST_LOOK)

    def after(self, state: State) -> None:
        """After a step: make a version, if one is due."""
        if not self.enabled:
            return
        step = state.step
        self._costs.step(beside=self._under_way())
        if step >= self._next:
            self._meet(state)
            self._costs.pause_ended()

    def _under_way(self) -> bool:
        return self._work is not None and self._work.running

    def _meet(self, state: State) -> None:
        """Exchange whether the last version has arrived everywhere and what it cost; make the next one if it is due."""
        begin, step = time.perf_counter(), state.step
        if self._fixed is not None or not self._under_way():
            self.finish()  # with a number given by the user, whatever it costs
        costs = self._costs
        trouble = self._local.trouble if self._local is not None else None
        own = [self._work is None, costs.steps_alone, costs.step_s, costs.cost_s, trouble, new_version_id()]
        words = self.world.all_gather_json(own)
        if not all(word[0] for word in words):
            self._next = step + max(1, (step - self._taken) // 2)
            return
        self._forget()
        if self._local is not None:
            self._local.settle([word[4] for word in words])
        if self._fixed is None:
            if min(word[1] for word in words) < _STEPS_ALONE:
                self._next = step + _STEPS_ALONE
                return
            self._decide(max(word[2] for word in words), max(word[3] for word in words))
        assert self.every is not None
        if step >= self._taken + self.every:
            self._take(state, begin, words[0][5])
        self._next = self._taken + self.every

    def _decide(self, step_s: float, cost_s: float) -> None:
        self.every = steps_between(cost_s, step_s)
        if not 0.5 < self.every / self._said < 2.0:
            self._said = self.every
            share = cost_s / (self.every * step_s)
            memory, disk = self._in_memory, self._local is not None
            where = ["in other ranks' memory"] * memory + ["on hosts' disks"] * disk
            say(
                f"Copies of the trained state {' and '.join(where)}: every {self.every} "
                f"step{'s' if self.every > 1 else ''}, as each costs {units.seconds(cost_s)} and a step takes "
                f"{units.seconds(step_s)} ({units.percent(share)} of the time)"
            )

    def _take(self, state: State, begin_s: float, version_id: str) -> None:
        """Copy this rank's part, and begin to send it.

        Args:
            begin_s: when training stopped for it.
            version_id: the same on all ranks and never used before.
        """
        buffers = self._buffers[0]
        self._buffers.rotate(-1)
        own = self._snapshots.take(state.step, self._held)
        version = state.copy(version_id, dict(own.views))
        self._new.append(version)
        self.kept.append(version)
        self._taken = version.step
        if not self._threaded:
            self._exchange(own.flat, buffers, version)
        self._costs.begin(time.perf_counter() - begin_s)
        if self._threaded:
            action = f"keeping copies of step {version.step} on other ranks and disks"
            self._work = Background(action, lambda: self._exchange(own.flat, buffers, version))

    def _forget(self) -> None:
        """Drop the older versions: the newest is whole on all ranks."""
        self.kept[:] = self._new = self._new[-1:]

    def _exchange(self, own: torch.Tensor, buffers: dict[int, torch.Tensor], version: State) -> None:
        """Send the own part, receive the others', and write the shard where that is asked for. Runs in the background."""
        begin_s = time.thread_time()
        self._transfer(own, buffers)
        for rank, listed in self._received.items():
            version.tensors.update(views(buffers[rank], listed))
        if self._local is not None:
            self._local.write(version)
        if self._threaded:  # else it is a part of what training stood still
            self._costs.transferred(time.thread_time() - begin_s)

    def _transfer(self, own: torch.Tensor, buffers: dict[int, torch.Tensor]) -> None:
        assert self._transport is not None
        # All receives at once: no two ranks can wait for each other's, whoever keeps whose copies.
        coming = [
            self._transport.post_receive(sender, _TAG, piece)
            for sender, flat in buffers.items()
            for piece in cut(host_bytes(flat), flat.shape)
        ]
        peer = self.peer_of.get(self.world.rank)
        if peer is not None:
            pieces = self.world.marked(cut(host_bytes(own), own.shape))
            send_in_order(self._transport, ((peer, _TAG, piece) for piece in pieces))
        for request in self.world.marked(coming):
            self._transport.wait(request)


def _is_room(lacking: str | None, where: str, loss: str, allowed: str) -> bool:
    """Reports the hosts that lack room for copies, if any."""
    if lacking is not None:
        say(
            f"No copies of the trained state are kept {where}, so {loss} costs the steps since the newest checkpoint: they may "
            f"take {allowed}; {lacking}"
        )
    return lacking is None
