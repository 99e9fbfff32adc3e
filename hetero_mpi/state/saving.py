"""Write checkpoints during training: each rank takes a snapshot, and background threads send it to rank 0, which writes the file.

    training     step 9 | copy | step 10 | step 11 | ...
    background               send piece by piece ......      on every rank that holds tensors
                             receive, write, fsync, rename   on rank 0

At the end of a step every rank copies its tensors into host buffers, which are allocated once and shared with peer replicas of
the same step (``Snapshots``). Training waits only for this copy, and the file holds exactly the state at that time. Pieces of at
most 8 MiB are sent through a separate transport that only the background thread uses, so they do not mix with other messages.
Rank 0 needs memory for four pieces, regardless of the model's size.

A thread suffices because h5py, CRC-32 and fsync release the interpreter lock: in measurements, other threads never waited
longer than the interpreter's switch interval of 5 ms (docs/checkpoint.md).
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
MAX_PIECES = 4
"""Maximum number of other ranks' pieces in rank 0's memory; enough to keep links busy while one of them is being written."""
_LONG_WAIT_S = 0.5
MAX_MEMORY_RATIO = 0.5
"""Maximum fraction of a host's free memory that its ranks may use for copies."""

Live = Callable[[TensorShard], torch.Tensor]
T = TypeVar("T")


class Snapshot:
    """A copy of this rank's tensors after one step, in one block of host memory.

    Attributes:
        flat: the bytes of the block.
        views: maps (kind, name) to a view of the tensor in the block.
    """

    def __init__(self, shards: Iterable[TensorShard], backend: Backend) -> None:
        self._shards, self._backend = list(shards), backend
        self.flat = backend.host_buffer((size_bytes(self._shards),), torch.uint8)
        self.views = views(self.flat, self._shards)

    @torch.no_grad()
    def copy_from(self, live: Live) -> None:
        """Copy all tensors into the block, overwriting the previous snapshot."""
        for shard in self._shards:
            self.views[shard.kind, shard.name].copy_(live(shard), non_blocking=True)
        self._backend.synchronize()

    def __call__(self, shard: TensorShard) -> torch.Tensor:
        return self.views[shard.kind, shard.name]


class Snapshots:
    """This rank's snapshots under one plan. Requests for the same step share a snapshot; released snapshots are reused.

    Args:
        listed: all tensors of a checkpoint in file order; the same list on every rank.
        live: returns tensors that this rank owns.
    """

    def __init__(self, rank: int, backend: Backend, listed: Iterable[TensorShard], live: LiveState) -> None:
        self.backend, self.listed, self.live = backend, list(listed), live
        self.owned = [shard for shard in self.listed if shard.owner == rank]
        self._rank = rank
        self._all: list[Snapshot] = []
        self._holders: list[deque[Snapshot]] = []
        self._newest: tuple[int, Snapshot] | None = None

    @classmethod
    def for_trainer(cls, trainer: Trainer) -> Snapshots:
        # Savers and replicas use transports of the active ranks only, which are renumbered there.
        active = list(trainer.world.numbers or range(trainer.world.size))
        listed = [shard.renumbered(active) for shard in tensor_shards(trainer.tuning, trainer.plan, KINDS)]
        return cls(trainer.world.rank, trainer.backend, listed, LiveState(trainer))

    def holder(self, most: int) -> deque[Snapshot]:
        """Return a queue for a user that needs up to ``most`` snapshots at a time; each further one releases the oldest."""
        self._holders.append(deque(maxlen=most))
        return self._holders[-1]

    def snapshot_after(self, step: int, holder: deque[Snapshot]) -> Snapshot:
        """Take a snapshot after ``step`` steps, or reuse the one of this step. Collective over the tensor-parallel group."""
        if self._newest is None or self._newest[0] != step:
            if len(holder) == holder.maxlen:
                holder.popleft()
            referenced = {id(snapshot) for queue in self._holders for snapshot in queue}
            free = next((snapshot for snapshot in self._all if id(snapshot) not in referenced), None)
            if free is None:
                free = Snapshot(self.owned, self.backend)
                self._all.append(free)
            free.copy_from(self.live)
            give_parts(self._rank, self.listed, self.live)
            self._newest = step, free
        holder.append(self._newest[1])
        return self._newest[1]


class BesideTraining:
    """Base of classes that work in a background thread during training, with a transport of their own.

    As a context manager, it waits for the work if the block ends without an error or with the same error on all ranks. If a rank
    is lost, it closes the transport. On any other error it does not wait, because the process is about to end the job.
    """

    def __init__(self, world: World, transport: MpiTransport | None) -> None:
        self.world, self._transport = world, transport
        self._work: Background[None] | None = None

    def finish(self) -> float:
        """Wait for active work and return the seconds waited. Raises the error of the work, if any."""
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
    """Writes the checkpoints of a run. Every method is collective over the active ranks and called at the end of a step.

    Args:
        snapshots: snapshots of this rank's trainer.
        directory: directory of the checkpoints, on rank 0's disk.
        threaded: whether several threads may call MPI; otherwise training stops while a checkpoint is written.
        newest: the newest checkpoint that an earlier start of the run wrote.

    Attributes:
        newest: the newest checkpoint on disk; only rank 0 updates it.
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
        """Start writing a checkpoint of the current state, after waiting for the previous one. Returns its path.

        ``metadata``: everything in the file except tensors; ranks other than 0 need only ``step``. If the checkpoint cannot be
        written, rank 0 reports it and training continues.
        """
        begin, step = time.perf_counter(), int(metadata["step"])
        busy_s = self.finish()
        if busy_s > _LONG_WAIT_S:
            say(
                f"step {step}: the previous checkpoint was still being written, and training waited "
                f"{units.seconds(busy_s)} for it; increase [checkpoint] every"
            )
        if not self._decided:
            self._decided = True  # at the first checkpoint, when everything else is allocated
            lacking_hosts = lack_of_memory(self.world, size_bytes(self._snapshots.owned))
            if lacking_hosts is not None:
                self._may_thread = False
                say(
                    "Training waits while checkpoints are written: snapshots may use "
                    f"{units.percent(MAX_MEMORY_RATIO)} of the free host memory; {lacking_hosts}"
                )
        path = checkpoint_path(self.directory, step)
        if not self._may_thread:
            give_parts(self.world.rank, self._listed, self._live)
            self._send_or_write(path, metadata, lambda shard: self._snapshots.backend.to_host(self._live(shard)), begin)
            return path
        copying = time.perf_counter()
        snapshot = self._snapshots.snapshot_after(step, self._held)
        copied_s = time.perf_counter() - copying
        work = partial(self._send_or_write, path, metadata, snapshot, begin)
        self._work = Background(f"writing the checkpoint of step {step}", work)
        _LOG.info("step %d: snapshot of %d bytes in %.6f s", step, snapshot.flat.nbytes, copied_s)
        return path

    def _send_or_write(self, path: Path, metadata: dict[str, Any], values: Live, began_s: float) -> None:
        """Write the file on rank 0, or send pieces to it from other ranks. ``values`` returns tensors of this rank on the host."""
        if self.world.rank == 0:
            self._write(path, metadata, values, began_s)
        else:
            chunks = (piece for shard in self._snapshots.owned for piece in _flat_pieces(shard, values))
            send_in_order(self._own_transport, ((0, _TAG, chunk.view(np.uint8)) for chunk in self.world.marked(chunks)))

    def _write(self, path: Path, metadata: dict[str, Any], values: Live, began_s: float) -> None:
        arriving = self._arriving()
        read_keys: set[tuple[str, str]] = set()

        def read_own(shard: TensorShard) -> torch.Tensor:
            read_keys.add((shard.kind, shard.name))
            return values(shard)

        try:
            with contextlib.ExitStack() as stack:
                with CheckpointWriter(path, metadata) as writer:
                    for shard in self._listed:
                        kind, name, shape, dtype = shard.kind, shard.name, shard.shape, shard.dtype_name
                        coming: Iterator[NDArray[Any]] = (
                            _flat_pieces(shard, read_own)
                            if shard.owner == 0
                            else (next(arriving).view(dtype) for _ in pieces(shape, shard.dtype.itemsize))
                        )
                        writer.write_pieces(kind, name, shape, dtype, self.world.marked(coming))
                    stack.enter_context(self.world.busy())  # a slow disk shows no progress
                self.newest = path
                if self.table.keep != "all":
                    prune(self.directory, self.table.keep, self.table.keep_best, path)
            seconds = time.perf_counter() - began_s
            _LOG.info("step %d: checkpoint %s, complete after %.1f s", metadata["step"], path, seconds)
        except (CheckpointError, OSError) as error:
            say(f"Training continues, but {error}")
            for shard in self._listed:  # other ranks are still sending, including this rank's group
                was_read = shard.owner != 0 or (shard.kind, shard.name) in read_keys
                if shard.group and not was_read and not self._may_thread:
                    read_own(shard)
            for _ in arriving:
                pass

    def _arriving(self) -> Iterator[NDArray[np.uint8]]:
        """Receive other ranks' pieces on rank 0, in list order. Each piece is valid until the next one is requested."""
        sizes = (
            (shard.owner, piece_count(piece) * shard.dtype.itemsize)
            for shard in self._listed
            if shard.owner != 0
            for piece in pieces(shard.shape, shard.dtype.itemsize)
        )
        if not self._buffers and self.world.size > 1:
            self._buffers = [np.empty(PIECE_BYTES, np.uint8) for _ in range(MAX_PIECES)]
        buffers = cycle(self._buffers)
        coming = ((owner, _TAG, next(buffers)[:size]) for owner, size in sizes)
        return receive_in_order(self._own_transport, coming, MAX_PIECES)


def lack_of_memory(world: World, needed_bytes: int) -> str | None:
    """Describe the hosts that have too little memory for their ranks' copies; None if all have enough. Collective."""
    return lack_of_space(world, needed_bytes, host_memory().usable_bytes, MAX_MEMORY_RATIO)


def lack_of_space(world: World, needed_bytes: int, free_bytes: int, allowed: float) -> str | None:
    """Describe the hosts whose ranks need more than the fraction ``allowed`` of the free space; None if there are none. Collective.

    Needs are summed per host, since a host's ranks may need very different amounts (a GPU rank trains most of the model).
    """
    rows = world.all_gather_json([needed_bytes, free_bytes])
    lacking_hosts = []
    for host in dict.fromkeys(world.hosts):
        host_rows = [row for row, name in zip(rows, world.hosts, strict=True) if name == host]
        needs, has = sum(needs for needs, _ in host_rows), min(has for _, has in host_rows)
        if needs > allowed * has:
            lacking_hosts.append(f"{host} needs {units.size(needs)} and has {units.size(has)} free")
    return ", ".join(lacking_hosts) or None


def size_bytes(listed: Iterable[TensorShard]) -> int:
    """Return the total size of the tensors, each padded to a multiple of ``_ALIGNED`` bytes."""
    return sum(math.ceil(shard.bytes / _ALIGNED) * _ALIGNED for shard in listed)


def views(flat: torch.Tensor, listed: Iterable[TensorShard]) -> dict[tuple[str, str], torch.Tensor]:
    """Map (kind, name) to a view of the tensor in ``flat``, whose bytes hold the tensors one after the other."""
    view_by_key, begin = {}, 0
    for shard in listed:
        view_by_key[shard.kind, shard.name] = flat[begin : begin + shard.bytes].view(shard.dtype).view(shard.shape)
        begin += size_bytes([shard])
    return view_by_key


def _flat_pieces(shard: TensorShard, values: Live) -> Iterator[NDArray[Any]]:
    """Yield a tensor of this rank in pieces, as views of host memory in file order."""
    return cut(values(shard).detach().reshape(-1).numpy(), shard.shape)
