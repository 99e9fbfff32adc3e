"""Peer replicas: copies of the trained state on other ranks, so that a dead rank, or a machine lost with its disk, costs a few
steps.

    rank 0   step 20 | copy | step 21 | ...        own copy of step 20, and rank 1's
    rank 1   step 20 | copy | step 21 | ...        own copy of step 20, and rank 0's
    background        each sends its copy to its *peer*, on another host where there is one,
                      and writes what it then has to its own disk, where there is a supervisor (``LocalCheckpoint``)

A *version* is all ranks' trained parameters and moments after one step. Every rank keeps a copy of its own part, because its device
has moved on when somebody dies. A peer keeps what it receives. A new version replaces the one before the last only when all ranks
have agreed that the last one has arrived everywhere. So at any moment one version is whole, and survivors never go on from
different steps. (Checkpoints in memory with a peer: Zheng, Shi, Kale 2004, FTC-Charm++.)

Two versions in memory serve ranks that outlive others. Without such ranks one is enough, as it only passes through to the disk.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_mpi import units
from hetero_mpi.background import Background
from hetero_mpi.checkpoint import PIECE_BYTES
from hetero_mpi.checkpoint.directory import new_version_id
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.transport import send_in_order
from hetero_mpi.device.backend import Backend, host_bytes
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.state.background_save import MEMORY_SHARE, BesideTraining, Snapshot, lack_of_memory, size_bytes, views
from hetero_mpi.state.checkpointing import KINDS
from hetero_mpi.state.copies import (
    DISK_SHARE,
    VERSIONS,
    Copies,
    CopyCosts,
    LocalCheckpoint,
    StateVersion,
    peers,
    steps_between,
)
from hetero_mpi.state.redistribute import LiveState, Parcel, give_parts, parcels
from hetero_mpi.state.training_state import TrainingState

_TAG = 1
_FIRST_LOOK = 4
"""Steps before it is first decided how often copies are made, as the first few of a run are slower than the rest."""
_STEPS_ALONE = 3
"""Number of steps without a transfer that must have been timed before that."""


class _Slot:
    """Host memory for one version, allocated once: the own part in one block, and the parts received."""

    def __init__(self, own: Sequence[Parcel], received: dict[int, list[Parcel]], backend: Backend) -> None:
        self.own = Snapshot(own, backend)
        self.received = {rank: torch.empty(size_bytes(listed), dtype=torch.uint8) for rank, listed in received.items()}
        self.received_views = {
            key: view for rank, listed in received.items() for key, view in views(self.received[rank], listed).items()
        }


class PeerReplicas(BesideTraining):
    """Makes versions while one plan lasts. Every method is collective over the active ranks, between two steps.

    Args:
        copies: where versions are kept; older ones, of other plans too, stay until the first new one is whole.
        every: steps between versions; None: as few as ``COST_SHARE`` allows, by measured times.
        threaded: may MPI be called by several threads? If not, training stands still while copies are sent and written.
        local: writes versions to the hosts' disks; None: nothing is written.
    """

    def __init__(
        self, trainer: Trainer, copies: Copies, every: int | None, threaded: bool, local: LocalCheckpoint | None
    ) -> None:
        world = trainer.world
        self._threaded = threaded
        self._in_memory = ulfm.active()
        self._versions = VERSIONS if self._in_memory else 1
        self.world, self.trainer, self.copies, self._fixed = world, trainer, copies, every
        self.every: int | None = every
        active = list(world.numbers or range(world.size))
        self._listed = listed = [parcel.among(active) for parcel in parcels(trainer.tuning, trainer.plan, KINDS)]
        sizes = [size_bytes(p for p in listed if p.owner == rank) for rank in range(world.size)]
        self.peer_of = peers(sizes, world.hosts)
        self._own = [parcel for parcel in listed if parcel.owner == world.rank]
        self._received = {
            sender: [parcel for parcel in listed if parcel.owner == sender]
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
            room = _is_room(local.lack_of_disk(held_bytes), "on hosts' disks", "a lost machine", allowed)
            self._local = local if room else None
        self.enabled = self.enabled and (self._local is not None or (self._in_memory and world.size > 1))
        super().__init__(MpiTransport(world.comm, threaded=False) if self.enabled else None)
        self._slots = deque(
            _Slot(self._own, self._received, trainer.backend) for _ in range(self._versions * self.enabled)
        )
        self._costs = CopyCosts()
        self._said = math.inf
        """The number of steps that a person was told last."""
        self._taken = self._next = 0
        self._new: list[StateVersion] = []

    def begin(self, state: TrainingState) -> None:
        """Before the first step: make a version of this moment."""
        if self.enabled:
            self._take(state, time.perf_counter(), self.world.broadcast_json(new_version_id()))
            self._next = state.step + (self._fixed or _FIRST_LOOK)

    def after(self, state: TrainingState) -> None:
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

    def _meet(self, state: TrainingState) -> None:
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

    def _take(self, state: TrainingState, begin_s: float, number: str) -> None:
        """Copy this rank's part, and begin to send it.

        Args:
            begin_s: when training stopped for it.
            number: the version's id, the same on all ranks and never used before.
        """
        slot = self._slots[0]
        self._slots.rotate(-1)
        live = LiveState(self.trainer)
        slot.own.take(live)
        give_parts(self.world.rank, self._listed, live)
        version = StateVersion(state.step, state.to_dict(), dict(slot.own.views), _names(self._own))
        self._new.append(version)
        self.copies.versions.append(version)
        self._taken = version.step
        if not self._threaded:
            self._exchange(slot, version, number)
        self._costs.begin(time.perf_counter() - begin_s)
        if self._threaded:
            action = f"keeping copies of step {version.step} on other ranks and disks"
            self._work = Background(action, lambda: self._exchange(slot, version, number))

    def _forget(self) -> None:
        """Drop the older versions: the newest is whole on all ranks."""
        self.copies.versions[:] = self._new = self._new[-1:]

    def _exchange(self, slot: _Slot, version: StateVersion, number: str) -> None:
        """Send the own part, receive the others', and write the shard where that is asked for. Runs in the background."""
        begin_s = time.thread_time()
        self._transfer(slot)
        received = [parcel for listed in self._received.values() for parcel in listed]
        version.tensors.update(slot.received_views)
        version.names.update(_names(received))
        if self._local is not None:
            self._local.write(number, version.state, [*self._own, *received], version.tensors)
        if self._threaded:  # else it is a part of what training stood still
            self._costs.transferred(time.thread_time() - begin_s)

    def _transfer(self, slot: _Slot) -> None:
        assert self._transport is not None
        # All receives at once: no two ranks can wait for each other's, whoever keeps whose copies.
        coming = [
            self._transport.post_receive(sender, _TAG, piece)
            for sender, flat in slot.received.items()
            for piece in _cut(flat)
        ]
        peer = self.peer_of.get(self.world.rank)
        if peer is not None:
            pieces = self.world.marked(_cut(slot.own.flat))
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


def _names(listed: Sequence[Parcel]) -> set[str]:
    return {parcel.name for parcel in listed}


def _cut(flat: torch.Tensor) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor, in pieces of ``PIECE_BYTES``."""
    everything = host_bytes(flat)
    for first in range(0, everything.size, PIECE_BYTES):
        yield everything[first : first + PIECE_BYTES]
