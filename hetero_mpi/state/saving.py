"""Checkpoints written during training: a snapshot in host memory, a thread that sends it to rank 0, and rank 0's file.

    training     step 9 | copy | step 10 | step 11 | ...
    background               send piece by piece ......      on every rank that holds something
                             receive, write, fsync, rename   on rank 0

At the end of a step every rank copies what it holds into host buffers, which are allocated once, and which peer replicas of that
step share (``Snapshots``). Training waits for this copy only, and the file holds exactly that moment. Pieces of at most 8 MiB
travel through a transport of the saver's own, which only the background thread uses, so they do not mix with other messages. Rank 0
needs memory for four pieces, however large the model.

A thread does as well as a process would: h5py releases the interpreter's lock while it writes, and so do CRC-32 and fsync
(measured: another thread never waited longer than the interpreter's own turn of 5 ms; docs/internals/checkpoint.md).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.ulfm import RankLost
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import receive_in_order, send_in_order
from hetero_mpi.device.backend import Backend, host_memory
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.schema import CheckpointTable
from hetero_mpi.rundir.logs import say
from hetero_mpi.state.directory import checkpoint_path, prune
from hetero_mpi.state.hdf5 import KINDS, PIECE_BYTES, CheckpointError, cut, piece_count, pieces
from hetero_mpi.state.redistribute import LiveState, TensorShard, give_parts, tensor_shards
from hetero_mpi.state.writer import CheckpointWriter
from hetero_mpi.util import units
from hetero_mpi.util.background import Background

_LOG = logging.getLogger(__name__)
_TAG, _ALIGNED = 1, 4
PIECES_HELD = 4
"""Most pieces of other ranks in rank 0's memory at once: enough to keep links busy while one is being written."""
_LONG_WAIT_S = 0.5
MEMORY_SHARE = 0.5
"""Largest share of a host's free memory that its ranks may use beyond what training itself needs."""

Live = Callable[[TensorShard], torch.Tensor]
T = TypeVar("T")


class Snapshot:
    """This rank's tensors at one moment, in one block of host memory.

    Attributes:
        flat: the bytes of the block.
        views: (kind, name) -> a tensor in it.
    """

    def __init__(self, own: Iterable[TensorShard], backend: Backend) -> None:
        self._own, self._backend = list(own), backend
        self.flat = backend.host_buffer((size_bytes(self._own),), torch.uint8)
        self.views = views(self.flat, self._own)

    @torch.no_grad()
    def take(self, live: Live) -> None:
        """Copy all tensors into the buffers, which are used again each time."""
        for shard in self._own:
            self.views[shard.kind, shard.name].copy_(live(shard), non_blocking=True)
        self._backend.synchronize()

    def __call__(self, shard: TensorShard) -> torch.Tensor:
        return self.views[shard.kind, shard.name]


class Snapshots:
    """This rank's snapshots while one plan lasts. Who asks for one of the same step gets the same; the memory of one that nobody
    holds any more is used again.

    Args:
        listed: all tensors of a checkpoint, in the order of the file; the same list on every rank.
        live: returns a tensor that this rank owns, where it lies on the device.
    """

    def __init__(self, rank: int, backend: Backend, listed: Iterable[TensorShard], live: LiveState) -> None:
        self.backend, self.listed, self.live = backend, list(listed), live
        self.own = [shard for shard in self.listed if shard.owner == rank]
        self._rank = rank
        self._all: list[Snapshot] = []
        self._holders: list[deque[Snapshot]] = []
        self._newest: tuple[int, Snapshot] | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> Snapshots:
        # Savers and replicas have transports of the active ranks only, which are numbered anew there.
        active = list(trainer.world.numbers or range(trainer.world.size))
        listed = [shard.among(active) for shard in tensor_shards(trainer.tuning, trainer.plan, KINDS)]
        return cls(trainer.world.rank, trainer.backend, listed, LiveState(trainer))

    def holder(self, most: int) -> deque[Snapshot]:
        """The snapshots that somebody needs at once, at most so many: when it takes a further one, the oldest is free."""
        self._holders.append(deque(maxlen=most))
        return self._holders[-1]

    def take(self, step: int, holder: deque[Snapshot]) -> Snapshot:
        """The snapshot of this moment, after ``step`` steps. Ranks of a group come together."""
        if self._newest is None or self._newest[0] != step:
            if len(holder) == holder.maxlen:
                holder.popleft()
            held = {id(one) for own in self._holders for one in own}
            free = next((one for one in self._all if id(one) not in held), None)
            if free is None:
                free = Snapshot(self.own, self.backend)
                self._all.append(free)
            free.take(self.live)
            give_parts(self._rank, self.listed, self.live)
            self._newest = step, free
        holder.append(self._newest[1])
        return self._newest[1]


class BesideTraining:
    """Work that a thread does beside training, with a transport of its own.

    A context manager: a block that ends well, or with the same error on all ranks, waits for the work. After a death the survivors
    go on with another one. With any other error the other ranks may never come here, and this process is about to end all of them.
    """

    def __init__(self, world: World, transport: MpiTransport | None) -> None:
        self.world, self._transport = world, transport
        self._work: Background[None] | None = None

    def finish(self) -> float:
        """Wait for the work under way, if any; returns the seconds that took. Raises what went wrong with it."""
        begin = time.perf_counter()
        work, self._work = self._work, None
        if work is not None:
            work.finish()
        return time.perf_counter() - begin

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.world.leaves_together(error):
            self.finish()
        elif isinstance(error, RankLost) and self._transport is not None:
            self._transport.close()
            with contextlib.suppress(Exception):
                self.finish()


class Saver(BesideTraining):
    """Writes the checkpoints of a run. Every method is collective over the active ranks, at the end of a step.

    Args:
        snapshots: of this rank's trainer.
        directory: where checkpoints go (rank 0).
        threaded: may MPI be called by several threads? If not, training stands still while a checkpoint is written.
        newest: the newest checkpoint of an earlier start.

    Attributes:
        newest: the newest checkpoint that is on disk, on rank 0.
    """

    def __init__(
        self,
        world: World,
        snapshots: Snapshots,
        directory: Path,
        table: CheckpointTable,
        threaded: bool,
        newest: Path | None = None,
    ) -> None:
        self._own_transport = MpiTransport(world.comm, threaded=False)
        super().__init__(world, self._own_transport)
        self.directory, self.table, self.newest = directory, table, newest
        self._snapshots, self._listed, self._live = snapshots, snapshots.listed, snapshots.live
        self._held = snapshots.holder(1)
        self._buffers: list[NDArray[np.uint8]] = []
        self._may_thread = table.background and threaded and world.thread_level == "multiple"
        self._decided = not self._may_thread

    def save(self, metadata: dict[str, Any]) -> Path:
        """Begin a checkpoint of this moment. If the last one is still being written, wait for it first. ``metadata``: what the file
        holds besides tensors, ``step`` included. Used on rank 0 only. Returns the path of the checkpoint. (Where it cannot be
        written, rank 0 reports that, and training goes on.)
        """
        begin, step = time.perf_counter(), int(metadata["step"])
        busy_s = self.finish()
        if busy_s > _LONG_WAIT_S:
            say(
                f"step {step}: the previous checkpoint was still being written, and training waited "
                f"{units.seconds(busy_s)} for it; a larger [checkpoint] every takes less time"
            )
        if not self._decided:
            self._decide()
        path = checkpoint_path(self.directory, step)
        if not self._may_thread:
            give_parts(self.world.rank, self._listed, self._live)
            self._send_or_write(path, metadata, lambda one: self._snapshots.backend.to_host(self._live(one)), begin)
            return path
        copying = time.perf_counter()
        snapshot = self._snapshots.take(step, self._held)
        copied_s = time.perf_counter() - copying
        work = partial(self._send_or_write, path, metadata, snapshot, begin)
        self._work = Background(f"writing the checkpoint of step {step}", work)
        _LOG.info("step %d: snapshot of %d bytes in %.6f s", step, snapshot.flat.nbytes, copied_s)
        return path

    def _decide(self) -> None:
        """Decide whether there is memory for snapshots. Collective; called at the first checkpoint, when everything else is in
        memory.
        """
        self._decided = True
        lacking = lack_of_memory(self.world, size_bytes(self._snapshots.own))
        if lacking is not None:
            self._may_thread = False
            say(
                f"Checkpoints are written while training waits: snapshots may take {units.percent(MEMORY_SHARE)} of the free "
                f"host memory; {lacking}"
            )

    def _send_or_write(self, path: Path, metadata: dict[str, Any], values: Live, began_s: float) -> None:
        """Runs in the background, or in place. ``values``: returns a tensor of this rank, in host memory."""
        if self.world.rank == 0:
            self._write(path, metadata, values, began_s)
        else:
            own = (piece for shard in self._snapshots.own for piece in _flat_pieces(shard, values))
            send_in_order(self._own_transport, ((0, _TAG, piece.view(np.uint8)) for piece in self.world.marked(own)))

    def _write(self, path: Path, metadata: dict[str, Any], values: Live, began_s: float) -> None:
        arriving = self._arriving()
        taken: set[tuple[str, str]] = set()

        def own(shard: TensorShard) -> torch.Tensor:
            taken.add((shard.kind, shard.name))
            return values(shard)

        try:
            with contextlib.ExitStack() as alone:
                with CheckpointWriter(path, metadata) as writer:
                    for shard in self._listed:
                        kind, name, shape, dtype = shard.kind, shard.name, shard.shape, shard.dtype_name
                        coming: Iterator[NDArray[Any]] = (
                            _flat_pieces(shard, own)
                            if shard.owner == 0
                            else (next(arriving).view(dtype) for _ in pieces(shape, shard.dtype.itemsize))
                        )
                        writer.write_pieces(kind, name, shape, dtype, self.world.marked(coming))
                    alone.enter_context(self.world.busy())  # nobody sees how far a slow disk is
                self.newest = path
                prune(self.directory, self.table.keep, self.table.keep_best, path)
            seconds = time.perf_counter() - began_s
            _LOG.info("step %d: checkpoint %s, whole after %.1f s", metadata["step"], path, seconds)
        except (CheckpointError, OSError) as error:
            say(f"Training goes on, but {error}")
            for shard in self._listed:  # the others are still sending, and those of this rank's group giving
                asked = shard.owner != 0 or (shard.kind, shard.name) in taken
                if shard.group and not asked and not self._may_thread:
                    own(shard)
            for _ in arriving:
                pass

    def _arriving(self) -> Iterator[NDArray[np.uint8]]:
        """Rank 0: the pieces of other ranks, in the order of the list. Each is valid until the next one is taken."""
        sizes = (
            (shard.owner, piece_count(piece) * shard.dtype.itemsize)
            for shard in self._listed
            if shard.owner != 0
            for piece in pieces(shard.shape, shard.dtype.itemsize)
        )
        if not self._buffers and self.world.size > 1:
            self._buffers = [np.empty(PIECE_BYTES, np.uint8) for _ in range(PIECES_HELD)]
        buffers = cycle(self._buffers)
        coming = ((owner, _TAG, next(buffers)[:size]) for owner, size in sizes)
        return receive_in_order(self._own_transport, coming, PIECES_HELD)


def lack_of_memory(world: World, needed_bytes: int) -> str | None:
    """The hosts without memory for what their ranks would keep, in words; None: all have it. Collective."""
    return lack_of_space(world, needed_bytes, host_memory().usable_bytes, MEMORY_SHARE)


def lack_of_space(world: World, needed_bytes: int, free_bytes: int, allowed: float) -> str | None:
    """The hosts whose ranks together need more than the share ``allowed`` of what is free there, in words; None: there are none.
    Collective.

    Ranks of a host need unlike amounts: a GPU's rank trains most of the model.
    """
    rows = world.all_gather_json([needed_bytes, free_bytes])
    lacking = []
    for host in dict.fromkeys(world.hosts):
        own = [row for row, name in zip(rows, world.hosts, strict=True) if name == host]
        needs, has = sum(needs for needs, _ in own), min(has for _, has in own)
        if needs > allowed * has:
            lacking.append(f"{host} would need {units.size(needs)} and has {units.size(has)} free")
    return ", ".join(lacking) or None


def size_bytes(listed: Iterable[TensorShard]) -> int:
    """Bytes of all tensors together, where each begins at a multiple of ``_ALIGNED``."""
    return sum(math.ceil(shard.bytes / _ALIGNED) * _ALIGNED for shard in listed)


def views(flat: torch.Tensor, listed: Iterable[TensorShard]) -> dict[tuple[str, str], torch.Tensor]:
    """(kind, name) -> a view of a tensor's elements in the bytes ``flat``, which hold the tensors one after the other."""
    found, begin = {}, 0
    for shard in listed:
        found[shard.kind, shard.name] = flat[begin : begin + shard.bytes].view(shard.dtype).view(shard.shape)
        begin += size_bytes([shard])
    return found


def _flat_pieces(shard: TensorShard, values: Live) -> Iterator[NDArray[Any]]:
    """A tensor of this rank in pieces, as views of host memory, in the order of a file."""
    return cut(values(shard).detach().reshape(-1).numpy(), shard.shape)
