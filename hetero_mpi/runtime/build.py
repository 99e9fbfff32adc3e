"""A rank's trainer under a plan: its own layers built and filled, from its own files or with what rank 0 sends."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import return_freed_memory
from hetero_mpi.emulation.pace import Emulation
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.errors import UserError
from hetero_mpi.job.rules import ELSEWHERE, as_toml, leads_out
from hetero_mpi.model.adapter_files import check_adapter
from hetero_mpi.model.frozen_weight_cache import Kept
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.model.transformers.weights import SeededStart, Start
from hetero_mpi.planning.schedule import Schedule
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.runtime.setup.custom_model import start_values
from hetero_mpi.runtime.setup.material import model_directory
from hetero_mpi.runtime.setup.setup import Setting
from hetero_mpi.state.checkpointing import load_adapter
from hetero_mpi.state.file_supply import FileSupply, open_files
from hetero_mpi.state.redistribute import Parcel, distribute, parcels


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
        resuming: trained parameters are brought afterwards; what is frozen is there, as always. (Of own layers all are brought.)
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


def start_layers(setting: Setting, members: World, trainer: Trainer) -> None:
    """Bring rank 0's weights of a factory's model that is there already, each of which rank 0 lets go of when it is brought.
    Collective over the active ranks.
    """
    values: dict[str, torch.Tensor] = {}
    with members.led("reading the factory's weights"):
        if setting.world.rank == 0:
            values = start_values(setting.loaded)
    members.doing = "sending the factory's weights"
    item_of = setting.chain.item_of
    item = 0

    def given(parcel: Parcel) -> torch.Tensor:
        nonlocal item
        if item_of(parcel.name) != item:
            item = item_of(parcel.name)
            return_freed_memory()  # of the items before: the model would be there twice
        return values.pop(parcel.name).contiguous()

    listed = parcels(trainer.tuning, trainer.plan, ("parameters",))
    distribute(
        trainer.rank,
        trainer.transport,
        listed,
        given,
        lambda parcel, tensor: trainer.set_parameter(parcel.name, tensor),
    )


def _open_files(setting: Setting, members: World, plan: Plan, directory: Path, kept: Kept) -> FileSupply:
    cache = setting.job.model.shard_cache
    cache_root = setting.loaded.resolve(cache) if cache is not None else None
    if cache is not None and cache_root is not None and not Path(cache).expanduser().is_absolute():
        with members.together("looking for the shard cache"):
            if leads_out(cache_root, setting.loaded.directory):
                raise UserError(
                    f"[model] shard_cache = {as_toml(cache)}: a link in it leads out of the job file's directory, to "
                    f"{cache_root.resolve()}; {ELSEWHERE}"
                )
    rank = setting.world.rank
    chain = language(setting.chain)
    return open_files(members, rank, setting.transport, chain, plan, directory, cache_root, tuple(kept))
