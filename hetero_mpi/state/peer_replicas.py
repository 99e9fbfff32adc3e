"""Peer replicas: copies of the training state on other ranks, so that a lost rank or machine costs few steps.

    rank 0   step 20 | copy | step 21 | ...        own copy of step 20, and rank 1's
    rank 1   step 20 | copy | step 21 | ...        own copy of step 20, and rank 0's
    background        each rank sends its copy to its *peer*, on another host if there is one,
                      and writes both copies to its own disk if there is a supervisor (``state.ShardWriter``)

A *version* consists of all ranks' trained parameters and moments after one step. Every rank also keeps a copy of its own part,
because its device may have moved on by the time another rank dies. A new version is made only after all ranks have agreed that
the previous one is complete, and older versions are then dropped. So one version is always complete, and survivors always
continue from the same step. (In-memory checkpoints on a peer: Zheng, Shi, Kale 2004, FTC-Charm++.)

Two versions are kept in memory if ranks can survive the loss of others. Otherwise one suffices until it is on disk.
"""

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
    MAX_MEMORY_RATIO,
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
"""Number of versions in memory if ranks can survive the loss of others: the newest complete one and one in transfer."""
MAX_DISK_RATIO = 0.5
"""Maximum fraction of a host's free disk space at the start of training that copies may use."""
_VERSIONS_ON_DISK = 2
"""Number of versions on disk: a complete one and one being written."""
MAX_COST_RATIO = 0.02
"""Maximum fraction of the run time that may be spent on copies."""
_TAG = 1
_WARMUP_STEPS = 4
"""Steps before the interval between copies is first chosen, since the first steps of a run are slower than the rest."""
_MIN_QUIET_STEPS = 3
"""Minimum number of timed steps without a transfer that are required to choose the interval."""


def versions_in_memory(every: int | str) -> int:
    """Return the number of versions in each rank's memory. ``every``: ``[checkpoint] replicate_every``."""
    if every == 0:
        return 0
    return VERSIONS if ulfm.active() else int(supervised())


def peers(sizes: Sequence[int], hosts: Sequence[str]) -> dict[int, int]:
    """Choose the peer that keeps each rank's copy: the least loaded rank, on another host if there is one.

    ``sizes``: number of bytes to copy from each rank; ranks with nothing to copy get no peer.
    """
    loads, peer_by_rank = list(sizes), {}
    count = len(sizes)
    for rank in sorted(range(count), key=lambda rank: (-sizes[rank], rank)):
        candidates = [candidate for candidate in range(count) if candidate != rank]
        elsewhere = [candidate for candidate in candidates if hosts[candidate] != hosts[rank]] or candidates
        if sizes[rank] and elsewhere:
            peer_by_rank[rank] = min(elsewhere, key=lambda candidate: (loads[candidate], (candidate - rank) % count))
            loads[peer_by_rank[rank]] += sizes[rank]
    return dict(sorted(peer_by_rank.items()))


def steps_between(cost_s: float, step_s: float) -> int:
    """Return the minimum number of steps between copies that keeps the cost of copying within ``MAX_COST_RATIO``."""
    return max(1, math.ceil(cost_s / (MAX_COST_RATIO * step_s)))


class CopyCosts:
    """Measures what copies cost on this rank: the time for which training stalls, and the slowdown of steps during a transfer."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        self.processor_s = 0.0
        """CPU time of the transfer thread, which at worst runs on a core that training needs."""
        self._quiet_steps: deque[float] = deque(maxlen=50)
        self._transfer_steps: list[float] = []
        self._earlier: deque[tuple[float, float, float]] = deque(maxlen=10)
        self._last_s = time.perf_counter()

    def start_transfer(self, stall_s: float) -> None:
        """Record a copy and the start of its transfer. ``stall_s``: time for which training was stopped."""
        if self.stall_s:
            self._earlier.append(self._parts())
        self.stall_s, self.processor_s = stall_s, 0.0
        self._transfer_steps.clear()
        self._last_s = time.perf_counter()

    def transferred(self, processor_s: float) -> None:
        """Record the end of a transfer. ``processor_s``: CPU time of the transfer thread."""
        self.processor_s = processor_s

    def step(self, during_transfer: bool) -> None:
        """Record a step. ``during_transfer``: whether a transfer was active at the end of the step."""
        now = time.perf_counter()
        (self._transfer_steps if during_transfer else self._quiet_steps).append(now - self._last_s)
        self._last_s = now

    def pause_ended(self) -> None:
        """Exclude the time since the last step from the next one."""
        self._last_s = time.perf_counter()

    @property
    def quiet_steps(self) -> int:
        return len(self._quiet_steps)

    @property
    def step_s(self) -> float:
        """Median duration of steps without a transfer; 0 if none has been timed."""
        return statistics.median(self._quiet_steps) if self._quiet_steps else 0.0

    @property
    def cost_s(self) -> float:
        """Cost per version in seconds, averaged over recent versions because step times vary."""
        stalls, processors, longer = zip(*self._earlier, self._parts(), strict=True)
        return float(statistics.mean(stalls) + max(statistics.mean(processors), statistics.mean(longer)))

    def _parts(self) -> tuple[float, float, float]:
        """Return the stall, CPU time, and additional step time (possibly negative) of the newest version, in seconds."""
        longer_s = 0.0
        if self._transfer_steps and self._quiet_steps:
            longer_s = len(self._transfer_steps) * (statistics.median(self._transfer_steps) - self.step_s)
        return self.stall_s, self.processor_s, longer_s


class PeerReplicas(BesideTraining):
    """Makes versions under one plan. Every method is collective over the active ranks and called between two steps.

    Args:
        versions: list of stored versions; older ones, even those of earlier plans, stay until the first new one is complete.
        every: steps between versions; None to choose the smallest interval that ``MAX_COST_RATIO`` allows by measurement.
        threaded: whether several threads may call MPI; otherwise training stops while copies are sent and written.
        local: writes versions to the hosts' disks; None to keep them in memory only.
    """

    def __init__(
        self,
        world: World,
        snapshots: Snapshots,
        versions: list[State],
        every: int | None,
        threaded: bool,
        local: ShardWriter | None,
    ) -> None:
        self._threaded = threaded
        self._in_memory = ulfm.active()
        self._versions = VERSIONS if self._in_memory else 1
        self.world, self.versions, self._fixed = world, versions, every
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
            lacking_hosts = lack_of_memory(world, self._versions * held_bytes)
            allowed = f"{units.percent(MAX_MEMORY_RATIO)} of the free host memory"
            self.enabled = _has_space(lacking_hosts, "by other ranks", "a lost rank", allowed)
        if self.enabled and local is not None:
            allowed = f"{units.percent(MAX_DISK_RATIO)} of the free space"
            free = 0
            with contextlib.suppress(OSError):
                free = free_bytes(local.run_dir)
            lacking_hosts = lack_of_space(world, _VERSIONS_ON_DISK * held_bytes, free, MAX_DISK_RATIO)
            self._local = local if _has_space(lacking_hosts, "on hosts' disks", "a lost machine", allowed) else None
        self.enabled = self.enabled and (self._local is not None or (self._in_memory and world.size > 1))
        super().__init__(world, MpiTransport(world.comm, threaded=False) if self.enabled else None)
        self._held = snapshots.holder(self._versions)
        self._buffers = deque(self._new_buffers() for _ in range(self._versions * self.enabled))
        self._costs = CopyCosts()
        self._reported_every = math.inf
        """The interval that was last reported to the user."""
        self._newest_step = self._next = 0
        self._new: list[State] = []

    def _new_buffers(self) -> dict[int, torch.Tensor]:
        """Allocate host memory for the part received from each rank, keyed by rank."""
        return {rank: torch.empty(size_bytes(shards), dtype=torch.uint8) for rank, shards in self._received.items()}

    def make_first_version(self, state: State) -> None:
        """Make a version before the first step."""
        if self.enabled:
            self._make_version(state, time.perf_counter(), self.world.broadcast_json(new_version_id()))
            self._next = state.step + (self._fixed or _WARMUP_STEPS)

    def after(self, state: State) -> None:
        """Make a version after a step if one is due."""
        if not self.enabled:
            return
        step = state.step
        self._costs.step(during_transfer=self._is_transferring())
        if step >= self._next:
            self._agree_on_next(state)
            self._costs.pause_ended()

    def _is_transferring(self) -> bool:
        return self._work is not None and self._work.running

    def _agree_on_next(self, state: State) -> None:
        """Agree on whether the last version has arrived everywhere and on its cost, and make the next version if it is due."""
        begin, step = time.perf_counter(), state.step
        if self._fixed is not None or not self._is_transferring():
            self.finish()  # the user fixed the interval, so wait at any cost
        costs = self._costs
        trouble = self._local.trouble if self._local is not None else None
        report = [self._work is None, costs.quiet_steps, costs.step_s, costs.cost_s, trouble, new_version_id()]
        reports = self.world.all_gather_json(report)
        if not all(row[0] for row in reports):
            self._next = step + max(1, (step - self._newest_step) // 2)
            return
        self.versions[:] = self._new = self._new[-1:]  # complete on all ranks: the older ones are not needed
        if self._local is not None:
            self._local.settle([row[4] for row in reports])
        if self._fixed is None:
            if min(row[1] for row in reports) < _MIN_QUIET_STEPS:
                self._next = step + _MIN_QUIET_STEPS
                return
            self._choose_interval(max(row[2] for row in reports), max(row[3] for row in reports))
        assert self.every is not None
        if step >= self._newest_step + self.every:
            self._make_version(state, begin, reports[0][5])
        self._next = self._newest_step + self.every

    def _choose_interval(self, step_s: float, cost_s: float) -> None:
        self.every = steps_between(cost_s, step_s)
        if not 0.5 < self.every / self._reported_every < 2.0:
            self._reported_every = self.every
            share = cost_s / (self.every * step_s)
            memory, disk = self._in_memory, self._local is not None
            where = ["in other ranks' memory"] * memory + ["on hosts' disks"] * disk
            say(
                f"Copies of the training state {' and '.join(where)}: every {self.every} "
                f"step{'s' if self.every > 1 else ''}; a copy costs {units.seconds(cost_s)}, a step takes "
                f"{units.seconds(step_s)} ({units.percent(share)} of the time)"
            )

    def _make_version(self, state: State, begin_s: float, version_id: str) -> None:
        """Copy this rank's part and start sending it.

        Args:
            begin_s: time at which training stopped for the copy.
            version_id: unique id, equal on all ranks.
        """
        buffers = self._buffers[0]
        self._buffers.rotate(-1)
        snapshot = self._snapshots.snapshot_after(state.step, self._held)
        version = state.copy(version_id, dict(snapshot.views))
        self._new.append(version)
        self.versions.append(version)
        self._newest_step = version.step
        if not self._threaded:
            self._exchange(snapshot.flat, buffers, version)
        self._costs.start_transfer(time.perf_counter() - begin_s)
        if self._threaded:
            action = f"keeping copies of step {version.step} on other ranks and disks"
            self._work = Background(action, lambda: self._exchange(snapshot.flat, buffers, version))

    def _exchange(self, own_bytes: torch.Tensor, buffers: dict[int, torch.Tensor], version: State) -> None:
        """Send this rank's part, receive other ranks' parts, and write the shard if requested. Usually runs in the background."""
        begin_s = time.thread_time()
        self._transfer(own_bytes, buffers)
        for rank, listed in self._received.items():
            version.tensors.update(views(buffers[rank], listed))
        if self._local is not None:
            self._local.write(version)
        if self._threaded:  # otherwise it is part of the stall
            self._costs.transferred(time.thread_time() - begin_s)

    def _transfer(self, own_bytes: torch.Tensor, buffers: dict[int, torch.Tensor]) -> None:
        assert self._transport is not None
        # Post all receives first, so that no two ranks wait for each other whatever the peers are.
        coming = [
            self._transport.post_receive(sender, _TAG, piece)
            for sender, flat in buffers.items()
            for piece in cut(host_bytes(flat), flat.shape)
        ]
        peer = self.peer_of.get(self.world.rank)
        if peer is not None:
            pieces = self.world.marked(cut(host_bytes(own_bytes), own_bytes.shape))
            send_in_order(self._transport, ((peer, _TAG, piece) for piece in pieces))
        for request in self.world.marked(coming):
            self._transport.wait(request)


def _has_space(lacking_hosts: str | None, where: str, loss: str, allowed: str) -> bool:
    """Whether all hosts have space for copies; otherwise tells the user which ones do not."""
    if lacking_hosts is not None:
        say(
            f"No copies of the training state are kept {where}, so {loss} costs the steps since the newest checkpoint: copies may "
            f"use {allowed}; {lacking_hosts}"
        )
    return lacking_hosts is None
