"""Versions of the trained state in host memory; which rank keeps whose copy; and how often copies are made.

While a supervisor may have to start the run again, a rank also writes one shard of each version to its host's disk
(``checkpoint.directory``): its own part, and the parts it keeps as a peer. So if a machine is lost with its disk, checkpoints
included, its ranks' parts are on the disks of their peers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_mpi.checkpoint import CheckpointWriter
from hetero_mpi.checkpoint.directory import keep_versions, shard_path
from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.disk import free_bytes
from hetero_mpi.errors import UserError
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.run_directory import START_VARIABLE
from hetero_mpi.state.background_save import lack_of_space
from hetero_mpi.state.redistribute import Parcel

_LOG = logging.getLogger(__name__)
VERSIONS = 2
"""Versions in memory where ranks may outlive others: the newest whole one, and one under way. Otherwise one is enough."""
DISK_SHARE = 0.5
"""Largest share of a host's free disk, when training begins, that copies may take."""
VERSIONS_ON_DISK = 2
"""One that is whole everywhere, and one that is being written."""
SAID = (
    "job",
    "plan",
    "model_config",
    "generation_config",
    "base_model",
    "seed",
    "versions",
    "data_fingerprint",
    "run",
    "begun",
)
"""Keys of a checkpoint's metadata that a shard has too."""
COST_SHARE = 0.02
"""Largest share of the time that copies may take."""


@dataclass
class StateVersion:
    """What this process has of one version: the trained state after one step."""

    step: int
    state: dict[str, Any]
    """The training state, as ``TrainingState.to_dict`` returns it."""
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """(kind, name) -> host tensor."""
    names: set[str] = field(default_factory=set)
    """Parameters and constants of which every tensor is here."""


class Copies:
    """The versions in this process's memory, oldest first. They outlive plans, transports and other ranks."""

    def __init__(self) -> None:
        self.versions: list[StateVersion] = []

    def inventory(self) -> list[tuple[int, list[str]]]:
        """(step, names of what is here) of every version, JSON-able."""
        return [(version.step, sorted(version.names)) for version in self.versions]

    def tensor(self, step: int, parcel: Parcel) -> torch.Tensor:
        """A parcel as it was after ``step`` steps."""
        key = parcel.kind, parcel.name
        return next(one.tensors[key] for one in self.versions if one.step == step and key in one.tensors)

    def state(self, step: int) -> dict[str, Any]:
        """The training state after ``step`` steps, as ``TrainingState.to_dict`` returns it."""
        return next(one.state for one in self.versions if one.step == step)


def newest_whole(
    inventories: Sequence[Sequence[tuple[int, Sequence[str]]]], needed: set[str]
) -> tuple[int, dict[str, tuple[int, ...]]] | None:
    """The newest step of which the ranks together have all ``needed`` names, and name -> the ranks that have it then.
    ``inventories``: every rank's.
    """
    steps = sorted({step for inventory in inventories for step, _ in inventory}, reverse=True)
    for step in steps:
        having: dict[str, tuple[int, ...]] = {}
        for rank, inventory in enumerate(inventories):
            for name in {name for at, names in inventory if at == step for name in names}:
                having[name] = (*having.get(name, ()), rank)
        if needed <= having.keys():
            return step, having
    return None


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
        """Of the thread that transfers: at worst it computes on a core that training needs."""
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
        """Of the newest version: stall, processor time, and the additional time of the steps during its transfer (may be
        negative).
        """
        longer_s = 0.0
        if self._beside and self._alone:
            longer_s = len(self._beside) * (statistics.median(self._beside) - self.step_s)
        return self.stall_s, self.processor_s, longer_s


def supervised() -> bool:
    """Was this run started by a supervisor (``launch --elastic``) that can start it again?"""
    return START_VARIABLE in os.environ


def versions_in_memory(every: int | str) -> int:
    """Number of versions that a rank of this run holds in memory (``state.peer_replicas``). ``every``: ``[checkpoint]
    replicate_every``.
    """
    if every == 0:
        return 0
    return VERSIONS if ulfm.active() else int(supervised())


class LocalCheckpoint:
    """Writes this rank's shards.

    Args:
        run_dir: on this host's own disk, or on one that hosts share.
        described: metadata that all checkpoints of the run share (``SAID``), on every rank.
        kept: id of the version on disk that the run goes on from, if any: it stays until a new one is whole.
    """

    def __init__(self, world: World, run_dir: Path, described: Mapping[str, Any], kept: str | None) -> None:
        self._world, self._run_dir, self._described, self._kept = world, run_dir, described, kept
        self._newest: str | None = None
        self.trouble: str | None = None
        """Why this rank's newest shard could not be written; None: it could."""
        self._told = False

    def write(
        self,
        version_id: str,
        state: Mapping[str, Any],
        listed: Sequence[Parcel],
        tensors: Mapping[tuple[str, str], torch.Tensor],
    ) -> None:
        """Write this rank's shard of a version. An error is kept in ``trouble``, and training goes on. Runs in the background.

        Args:
            version_id: in all ranks' shards of this version.
            state: the training state, as ``TrainingState.to_dict`` returns it.
            listed: all tensors of the shard.
            tensors: (kind, name) -> host tensor.
        """
        self._newest, self.trouble = version_id, None
        keep_versions(self._run_dir, [one for one in (self._kept, version_id) if one is not None])
        if not listed:
            return
        said = dict(state)
        losses = np.array(said.pop("losses"), dtype=np.float64)
        metadata = {**self._described, "step": said["step"], "updates": said["updates"], "losses": losses}
        metadata |= {"loss_scale": said["loss_scale"], "training_state": said, "version_id": version_id}
        metadata |= {"rank": self._world.rank, "names": sorted({parcel.name for parcel in listed})}
        path = shard_path(self._run_dir, self._world.rank, said["step"], version_id)
        try:
            with contextlib.ExitStack() as alone, CheckpointWriter(path, metadata) as writer:
                for parcel in self._world.marked(listed):
                    array = tensors[parcel.kind, parcel.name].numpy()
                    writer.write(parcel.kind, parcel.name, array, parcel.dtype_name)
                alone.enter_context(self._world.busy())  # nobody sees how far a slow disk is
        except (UserError, OSError) as error:
            _LOG.warning("step %d: no copy on disk: %s", said["step"], error)
            self.trouble = str(error)

    def settle(self, troubles: Sequence[str | None]) -> None:
        """Called when all ranks have reported on the newest version: if it is whole, older ones are no longer kept. Local.
        ``troubles``: every rank's ``trouble``.
        """
        if self._newest is None:
            return
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text is not None]
        if not failed:
            self._kept = self._newest
        elif not self._told:
            say(f"Training goes on, but copies on disk are not renewed, and those of before stay: {failed[0]}")
        self._told = bool(failed)
        self._newest = None

    def lack_of_disk(self, own_bytes: int) -> str | None:
        """The hosts without room for their ranks' shards, in words; None: all have it. Collective. ``own_bytes``: this rank's."""
        free = 0
        with contextlib.suppress(OSError):
            free = free_bytes(self._run_dir)
        return lack_of_space(self._world, VERSIONS_ON_DISK * own_bytes, free, DISK_SHARE)
