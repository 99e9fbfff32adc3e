"""Builds a rank's trainer under a plan: its own layers, with weights from its own files or sent by rank 0."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import torch

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import return_freed_memory
from hetero_mpi.engine.host_group import HostGroup, host_group, require_joinable
from hetero_mpi.engine.rank_setup import BuildStage, RankSetup
from hetero_mpi.engine.stage_builder import StageBuilder
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.rules import ELSEWHERE, as_toml, leads_out
from hetero_mpi.model.adapters.adapter_files import check_adapter
from hetero_mpi.model.adapters.adapter_start import ReducedStart
from hetero_mpi.model.group.refusals import require_divisible
from hetero_mpi.model.held_layers import Kept
from hetero_mpi.model.layer.interface import Start
from hetero_mpi.model.optimizer import LossScale
from hetero_mpi.model.tuning import MAGNITUDE
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.state.file_supply import open_start
from hetero_mpi.state.redistribute import Parcel, set_parameter
from hetero_mpi.state.results import load_adapter, send_parameters
from hetero_mpi.training.setup.context import RunContext, Share
from hetero_mpi.training.setup.custom_model import start_values
from hetero_mpi.training.setup.data_setup import model_directory
from hetero_mpi.training.setup.profile_and_plan import cache_root, stream_folder
from hetero_mpi.util.errors import UserError


def build(context: RunContext, share: Share, resuming: bool, loss_scale: LossScale, kept: Kept | None = None) -> Share:
    """A copy of ``share`` that has this rank's trainer. Collective over the active ranks. Raises CollectiveUserError: files are
    missing or do not fit the model, or the memory does not suffice.

    Args:
        resuming: the trained parameters are sent afterwards, so only frozen weights are loaded here. (A factory's model is sent
            whole.)
        loss_scale: the run's.
        kept: frozen weights that this rank already has in memory.
    """
    assert share.members is not None
    members, plan = share.members, share.own_plan
    group = group_of(context, members, plan)  # before files are sent: rank 0 then waits for the others only
    start: Start | None = None
    files: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if not (resuming and context.tuning.full):  # an adapter's checkpoint does not hold the model
        directory, seed = model_directory(context.loaded), context.job.train.seed
        cache = _checked_cache_root(context, members) if directory is not None else None
        given = members, context.world.rank, context.transport, context.chain, plan, directory, seed
        start, files = open_start(*given, cache, tuple(kept or ()))
        start = ReducedStart(start, context.tuning, seed) if context.job.adapter.start != "default" else start
    with members.together("loading weights"), files:
        trainer = trainer_of(context, share, start, loss_scale, group, kept)
    return replace(share, trainer=trainer)


def trainer_of(
    context: RunContext,
    share: Share,
    start: Start | None,
    loss_scale: LossScale,
    group: HostGroup | None,
    kept: Kept | None = None,
) -> Trainer:
    """This rank's trainer under the plan of ``share``. Local. Raises UserError: as ``Trainer``."""
    assert share.members is not None
    rank, emulation = context.world.rank, share.emulation
    transport = context.transport if emulation is None else emulation.transport
    memory = next((memory for memory in share.report.memory if memory.rank == rank), None)
    setup = RankSetup(rank, transport, context.chain, context.tuning, context.backend, context.job.train, group, memory)
    build: BuildStage = StageBuilder(setup, start, kept, stream_folder(context))
    build = build if emulation is None else emulation.paced(build)
    return Trainer(setup, share.members, share.own_plan, share.schedule, build, loss_scale)


def group_of(context: RunContext, members: World, plan: Plan) -> HostGroup | None:
    """The group that holds this rank's stage, if one does. Collective over the active ranks."""
    found: list[HostGroup | None] = [None]
    with members.together("joining the ranks that hold stages together"):
        require_joinable(members, plan, context.job.cluster.communication_thread)
        require_divisible(context.chain, context.tuning, plan)
    for _, _, stage in plan.numbered:
        if stage.grouped:
            found.append(host_group(members, stage.ranks, context.backend))
    return next(filter(None, found), None)


def start_adapter(context: RunContext, members: World, trainer: Trainer) -> None:
    """Load the adapter the job starts from; only rank 0 needs its files. Collective over the active ranks."""
    assert context.job.adapter.path is not None
    directory = context.loaded.resolve(context.job.adapter.path) if context.world.rank == 0 else None
    with members.led("reading the adapter"):
        if directory is not None:
            check_adapter(directory, context.tuning)
    load_adapter(trainer, directory)


def start_magnitudes(trainer: Trainer) -> None:
    """Begin DoRA's magnitudes of layers whose columns a group has cut with the lengths of whole rows. Collective over groups."""
    for stage in trainer.stages:
        values = stage.divided.start_magnitudes(stage.model) if stage.divided is not None else {}
        for path, value in values.items():
            set_parameter(trainer, f"{path}{MAGNITUDE}", value)


def start_layers(context: RunContext, members: World, trainer: Trainer) -> None:
    """Send the weights of a factory's existing model from rank 0 to the ranks that hold its layers. Collective over the active
    ranks.

    Rank 0 frees each tensor when it has been sent.
    """
    values: dict[str, torch.Tensor] = {}
    with members.led("reading the factory's weights"):
        if context.world.rank == 0:
            values = start_values(context.loaded)
    members.doing = "sending the factory's weights"
    layer_of = context.chain.layer_of
    layer = 0

    def given(parcel: Parcel) -> torch.Tensor:
        nonlocal layer
        if layer_of(parcel.name) != layer:
            layer = layer_of(parcel.name)
            return_freed_memory()  # of the layers before: the model would be there twice
        return values.pop(parcel.name).contiguous()

    send_parameters(trainer, given)


def _checked_cache_root(context: RunContext, members: World) -> Path | None:
    cache, root = context.job.model.shard_cache, cache_root(context)
    if cache is not None and root is not None and not Path(cache).expanduser().is_absolute():
        with members.together("looking for the shard cache"):
            if leads_out(root, context.loaded.directory):
                raise UserError(
                    "shard_cache.link",
                    f"[model] shard_cache = {as_toml(cache)}: a link in it leads out of the job file's directory, to "
                    f"{root.resolve()}; {ELSEWHERE}",
                )
    return root
