"""Local shards: parts of versions of the trained state that ranks write to their own hosts' disks.

While a supervisor may have to start the run again, a rank writes one shard of each version (``checkpoint.directory``): its own
part, and the parts it keeps as a peer. So if a machine is lost with its disk, checkpoints included, its ranks' parts are on the
disks of their peers.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_mpi.checkpoint import CheckpointWriter
from hetero_mpi.checkpoint.directory import keep_versions, shard_path
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.disk import free_bytes
from hetero_mpi.errors import UserError
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.run_directory import START_VARIABLE
from hetero_mpi.state.redistribute import Parcel
from hetero_mpi.state.saving import lack_of_space

_LOG = logging.getLogger(__name__)
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


def supervised() -> bool:
    """Was this run started by a supervisor (``launch --elastic``) that can start it again?"""
    return START_VARIABLE in os.environ


class ShardWriter:
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
