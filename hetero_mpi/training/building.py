"""A rank's trainer under a plan: its own layers built and filled, from its own files or with what rank 0 sends."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hetero_mpi.comm.world import World
from hetero_mpi.model.adapter_files import check_adapter
from hetero_mpi.model.keeping import Kept
from hetero_mpi.model.weights import SeededStart, Start
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.schedule import Schedule
from hetero_mpi.training.emulation import Emulation
from hetero_mpi.training.files import FileSupply, open_files
from hetero_mpi.training.material import model_directory
from hetero_mpi.training.saving import load_adapter
from hetero_mpi.training.setup import Setting
from hetero_mpi.training.trainer import Trainer


def build(
    setting: Setting,
    members: World,
    plan: Plan,
    schedule: Schedule,
    emulation: Emulation | None,
    resuming: bool,
    kept: Kept | None = None,
) -> Trainer:
    """This rank's trainer. Collective over the active ranks.

    Args:
        members: the active ranks.
        plan: of the job's own model and sequences.
        emulation: makes steps last as on other devices.
        resuming: trained parameters are brought afterwards; what is frozen is there, as always.
        kept: frozen weights that this rank has already.

    Raises:
        CollectiveUserError: files are missing or do not fit, or the memory does not suffice.
    """
    start: Start | None = None
    files: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    directory = model_directory(setting.loaded)
    needs_start = not (resuming and setting.tuning.full)  # an adapter's checkpoint does not hold the model
    if needs_start and directory is None:
        start = SeededStart(setting.job.train.seed)
    elif needs_start and directory is not None:
        files = supply = _open_files(setting, members, plan, directory, kept or {})
        start = supply.start
        members.doing = "sending the model's files to ranks without them"
        supply.serve()
    with members.together("loading weights"), files:
        return Trainer(
            setting.world.rank,
            members,
            setting.transport,
            setting.chain,
            setting.tuning,
            plan,
            schedule,
            setting.backend,
            setting.job.train,
            start,
            emulation,
            kept,
        )


def start_adapter(setting: Setting, members: World, trainer: Trainer) -> None:
    """Load the adapter the job starts from; only rank 0 needs its files. Collective over the active ranks."""
    assert setting.job.adapter.path is not None
    directory = setting.loaded.resolve(setting.job.adapter.path) if setting.world.rank == 0 else None
    with members.led("reading the adapter"):
        if directory is not None:
            check_adapter(directory, setting.tuning)
    load_adapter(trainer, directory)


def _open_files(setting: Setting, members: World, plan: Plan, directory: Path, kept: Kept) -> FileSupply:
    cache = setting.job.model.shard_cache
    cache_root = setting.loaded.resolve(cache) if cache is not None else None
    rank = setting.world.rank
    return open_files(members, rank, setting.transport, setting.chain, plan, directory, cache_root, tuple(kept))
