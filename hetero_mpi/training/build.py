"""Build a rank's stage under a plan, and change the plan between two steps in the running processes.

    before      rank 0: layers 0-3     rank 1: layers 4-8     rank 2: idle
    copy        trained state          trained state                           to host memory; stages are released
    build       layers 0-2             layers 3-5             layers 6-8       load missing frozen weights
    move                layer 3 -> 1   layers 6-8 -> 2                         parameters and optimizer state
    after       training continues with the next step, on the same data and with bitwise identical results

Recovery works in the same way, but reads the state from copies on other ranks. A rank never holds the stages of two plans.
"""

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.device.backend import return_freed_memory
from hetero_mpi.emulation.emulated_cluster import emulate
from hetero_mpi.engine.host_group import HostGroup, host_group, require_joinable
from hetero_mpi.engine.placement import BuildStage, RankSetup, active_ranks
from hetero_mpi.engine.sharded_update import Divided
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.rules import ABSOLUTE_PATH_HINT, as_toml, is_outside
from hetero_mpi.model.adapters.adapter_files import ReducedStart, check_adapter, read_adapter
from hetero_mpi.model.group.division import divisions
from hetero_mpi.model.group.exchanges import StageGroup
from hetero_mpi.model.group.layers import DividedLayers
from hetero_mpi.model.group.refusals import require_divisible
from hetero_mpi.model.held_layers import Kept, Shared
from hetero_mpi.model.layer.interface import LayerChain, Start
from hetero_mpi.model.optimizer import LossScale
from hetero_mpi.model.stage import Stage, StageSpec
from hetero_mpi.model.streamed_stage import StreamedStage
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.model.tuning import MAGNITUDE, Tuning
from hetero_mpi.planning.schedule import holders, schedule_of
from hetero_mpi.planning.types.plan import Plan, PlanReport, StagePlan
from hetero_mpi.state.file_supply import open_start
from hetero_mpi.state.hdf5 import KINDS
from hetero_mpi.state.redistribute import (
    LiveState,
    TensorShard,
    Transfer,
    held_under,
    move,
    set_parameter,
    take_over,
    tensor_shards,
    transfers,
)
from hetero_mpi.state.saving import Snapshot, lack_of_memory, size_bytes
from hetero_mpi.state.state import State
from hetero_mpi.training.setup.context import RunContext, Share
from hetero_mpi.training.setup.custom_model import start_values
from hetero_mpi.training.setup.data_setup import model_directory
from hetero_mpi.training.setup.profile_and_plan import cache_root, stream_folder
from hetero_mpi.util.errors import UserError

_LOG = logging.getLogger(__name__)
ReadTensor = Callable[[TensorShard], torch.Tensor]
"""Returns a tensor that this rank has, as a contiguous host tensor."""


@dataclass(frozen=True)
class StageBuilder:
    """A ``BuildStage`` that reads weights from files or reuses those in memory."""

    setup: RankSetup
    start: Start | None
    """Source of the weights; None if the trained state is moved in later."""
    frozen: Kept | None = None
    """Frozen weights that are already in this rank's memory."""
    stream_folder: Path | None = None
    """Folder for the frozen weights of an offloaded stage; None to keep them in host memory."""

    def __call__(
        self,
        stage_plan: StagePlan,
        split_backward: bool,
        shared: Shared,
        foreign: Collection[str],
        beginning: Stage | None,
    ) -> Stage:
        setup = self.setup
        spec = StageSpec(
            setup.chain,
            stage_plan.first,
            stage_plan.last,
            setup.backend,
            setup.train.dtype,
            setup.train.seed,
            setup.tuning,
            stage_plan.recompute and not stage_plan.streamed,  # it repeats each layer anyway, and its backward is one
            split_backward and not stage_plan.streamed,
            stage_plan.slice_sequences,
            stage_plan.kept_slices,
            stage_plan.disk_layers(setup.chain.layer_count),
            shared,
            foreign,
            setup.compiled and not stage_plan.streamed,
        )
        if stage_plan.streamed:
            return StreamedStage(spec, self.start, self.frozen, folder=self.stream_folder)
        divided = None
        if setup.group is not None:
            together = StageGroup(stage_plan.shares, setup.group, stage_plan.experts)
            divided = DividedLayers(language(setup.chain), setup.tuning, together)
        return Stage(spec, self.start, self.frozen, beginning, divided)


def join_plan(context: RunContext, report: PlanReport) -> Share:
    """Return this rank's share of ``report.plan`` without building its stage. Collective over all ranks."""
    emulation, plan = None, report.plan
    if context.job.cluster.emulate is not None:
        chain, profile = language(context.chain), context.profile
        emulation = emulate(context.world, context.transport, context.loaded, chain, profile, plan, context.cores)
    schedule = schedule_of(plan, context.profile.model)
    return Share(report, schedule, emulation, context.world.subset(active_ranks(plan)))


def build_share(
    context: RunContext, report: PlanReport, state: State, frozen: Kept | None = None, state_moves: bool = True
) -> Share:
    """Return this rank's share of ``report.plan`` with its stage. Collective over all ranks; idle ranks must be awake.

    Args:
        frozen: frozen weights that this rank already has in memory.
        state_moves: whether the trained state is moved in afterwards, so that only frozen weights are loaded here.

    Raises:
        CollectiveUserError: An active rank cannot build its stage; raised on all ranks.
    """
    share = join_plan(context, report)
    problem: CollectiveUserError | None = None
    if share.members is not None:
        try:
            share = _build(context, share, state_moves, state.loss_scale, frozen)
        except CollectiveUserError as error:
            problem = error
    context.world.share_problem(problem)
    return share


def _build(context: RunContext, share: Share, state_moves: bool, loss_scale: LossScale, frozen: Kept | None) -> Share:
    """Add this rank's trainer to ``share``; arguments as in ``build_share``. Collective over the active ranks.

    Raises CollectiveUserError if files are missing or do not match the model, or if memory runs out.
    """
    assert share.members is not None
    members, plan = share.members, share.own_plan
    group = group_of(context, members, plan)  # before files are sent: rank 0 then waits for the others only
    start: Start | None = None
    files: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if not (state_moves and context.tuning.full):  # an adapter's checkpoint does not hold the model
        directory, seed = model_directory(context.loaded), context.job.train.seed
        cache = _checked_cache_root(context, members) if directory is not None else None
        source_arguments = members, context.world.rank, context.transport, context.chain, plan, directory, seed
        start, files = open_start(*source_arguments, cache, tuple(frozen or ()))
        start = ReducedStart(start, context.tuning, seed) if context.job.adapter.start != "default" else start
    with members.collective_errors("loading weights"), files:
        trainer = trainer_of(context, share, start, loss_scale, group, frozen)
    return replace(share, trainer=trainer)


def _checked_cache_root(context: RunContext, members: World) -> Path | None:
    cache, root = context.job.model.shard_cache, cache_root(context)
    if cache is not None and root is not None and not Path(cache).expanduser().is_absolute():
        with members.collective_errors("looking up the shard cache"):
            if is_outside(root, context.loaded.directory):
                raise UserError(
                    "shard_cache.link",
                    f"[model] shard_cache = {as_toml(cache)}: the path contains a symbolic link that points outside the job "
                    f"file's directory, to {root.resolve()}; {ABSOLUTE_PATH_HINT}",
                )
    return root


def trainer_of(
    context: RunContext,
    share: Share,
    start: Start | None,
    loss_scale: LossScale,
    group: HostGroup | None,
    frozen: Kept | None = None,
) -> Trainer:
    """Create this rank's trainer under the plan of ``share``. Not collective. Raises UserError as ``Trainer`` does."""
    assert share.members is not None
    rank, emulation = context.world.rank, share.emulation
    transport = context.transport if emulation is None else emulation.transport
    memory = next((memory for memory in share.report.memory if memory.rank == rank), None)
    model = context.chain, context.tuning
    setup = RankSetup(rank, transport, *model, context.backend, context.job.train, group, memory, context.compiled)
    build: BuildStage = StageBuilder(setup, start, frozen, stream_folder(context))
    build = build if emulation is None else emulation.paced(build)
    divided = divided_tensors(share.own_plan, context.chain, context.tuning)
    return Trainer(setup, share.members, share.own_plan, share.schedule, build, divided, loss_scale)


def divided_tensors(plan: Plan, chain: LayerChain, tuning: Tuning) -> Divided:
    """Map the first rank of each tensor-parallel group in a plan to how the group shards its tensors."""
    return {
        stage.ranks[0]: divisions(language(chain), tuning, stage.shares, range(stage.first, stage.last), stage.experts)
        for _, _, stage in plan.numbered
        if stage.grouped
    }


def group_of(context: RunContext, members: World, plan: Plan) -> HostGroup | None:
    """Create the plan's tensor-parallel groups and return this rank's, or None. Collective over the active ranks."""
    groups: list[HostGroup | None] = [None]
    with members.collective_errors("creating tensor-parallel groups"):
        require_joinable(members, plan, context.job.cluster.communication_thread)
        require_divisible(context.chain, context.tuning, plan)
    for _, _, stage in plan.numbered:
        if stage.grouped:
            groups.append(host_group(members, stage.ranks, context.backend))
    return next(filter(None, groups), None)


# -------------------------------------------------------------------------------------------------- where training begins
def start_adapter(context: RunContext, members: World, trainer: Trainer) -> None:
    """Load the adapter from which the job starts; only rank 0 needs its files. Collective over the active ranks."""
    assert context.job.adapter.path is not None
    directory = context.loaded.resolve(context.job.adapter.path) if context.world.rank == 0 else None
    with members.on_leader("reading the adapter"):
        if directory is not None:
            check_adapter(directory, context.tuning)
    stored = read_adapter(directory, context.tuning) if directory is not None else {}
    _send_parameters(trainer, lambda shard: stored[shard.name])


def start_magnitudes(trainer: Trainer) -> None:
    """Initialise DoRA's magnitudes to the norms of complete rows where a group shards the columns. Collective over groups."""
    for stage in trainer.stages:
        values = stage.divided.start_magnitudes(stage.model) if stage.divided is not None else {}
        for path, value in values.items():
            set_parameter(trainer, f"{path}{MAGNITUDE}", value)


def start_layers(context: RunContext, members: World, trainer: Trainer) -> None:
    """Send the weights of a factory's existing model from rank 0 to the ranks that hold its layers.

    Rank 0 frees each tensor once it is sent. Collective over the active ranks.
    """
    values: dict[str, torch.Tensor] = {}
    with members.on_leader("reading the factory's weights"):
        if context.world.rank == 0:
            values = start_values(context.loaded)
    members.current_action = "sending the factory's weights"
    layer_of = context.chain.layer_of
    layer = 0

    def next_value(shard: TensorShard) -> torch.Tensor:
        nonlocal layer
        if layer_of(shard.name) != layer:
            layer = layer_of(shard.name)
            return_freed_memory()  # of the layers before: the model would be there twice
        return values.pop(shard.name).contiguous()

    _send_parameters(trainer, next_value)


def _send_parameters(trainer: Trainer, read: ReadTensor) -> None:
    """Send parameters from rank 0, where ``read`` returns them, to the ranks that hold them. Collective."""
    listed = transfers(tensor_shards(trainer.tuning, trainer.plan, ("parameters",)), lambda shard: (0,))
    store = lambda shard, value: set_parameter(trainer, shard.name, value)  # noqa: E731
    move(trainer.rank, trainer.transport, listed, read, store)
    trainer.share_tied_weight()


# -------------------------------------------------------------------------------------------------- a change of plan
def lack_of_snapshot_memory(share: Share) -> str | None:
    """Describe the hosts with too little memory for ``copy_trained_state``; None if all have enough. Collective."""
    assert share.members is not None and share.trainer is not None
    members, trainer = share.members, share.trainer
    shards = tensor_shards(trainer.tuning, trainer.plan, KINDS)
    return lack_of_memory(members, size_bytes([shard for shard in shards if trainer.rank == shard.owner]))


def copy_trained_state(trainer: Trainer, move_list: Sequence[Transfer]) -> Snapshot:
    """Copy the tensors that this rank sends or keeps to host memory. Collective over the tensor-parallel group, if any."""
    rank, live = trainer.rank, LiveState(trainer)
    shards = [
        transfer.shard
        for transfer in move_list
        if rank in transfer.keepers or (rank == transfer.source and transfer.destinations)
    ]
    snapshot = Snapshot(shards, trainer.backend)
    snapshot.copy_from(live)
    leader = trainer.plan.leader_of.get(rank)
    for transfer in move_list:
        if transfer.source == leader:
            live.give(transfer.shard)
    return snapshot


def move_trained_state(
    context: RunContext, share: Share, move_list: Sequence[Transfer], read: ReadTensor, state: State
) -> int:
    """Move trained parameters and moments to their ranks under the plan of ``share``. Collective over all ranks of the job.

    Args:
        move_list: the transfers, the same on all ranks.
        read: returns a tensor that this rank sends or keeps.

    Returns:
        Number of bytes received by this rank.
    """
    if share.trainer is None:
        return move(context.world.rank, context.transport, move_list, read, _refuse)
    return take_over(share.trainer, move_list, read, state.updates)


def change_plan(context: RunContext, before: Share, report: PlanReport, state: State) -> Share:
    """Change to ``report.plan`` and return this rank's new share. Collective over all ranks of the job; idle ranks must be awake.

    The caller must not hold another reference to the trainer of ``before``, because its memory is needed. Raises
    CollectiveUserError on all ranks if a rank cannot build its new stage.
    """
    world, rank = context.world, context.world.rank
    world.current_action = "changing to another plan"
    begin_s = time.perf_counter()
    move_list = transfers(tensor_shards(context.tuning, report.plan, KINDS), held_under(context.tuning, before.plan))
    read: ReadTensor = _nothing
    frozen: Kept = {}
    if before.trainer is not None:
        read = copy_trained_state(before.trainer, move_list)
        if before.trainer.layers is not None:
            kept_layers = [layer for layer, ranks in holders(report.plan).items() if world.rank in ranks]
            frozen = before.trainer.layers.frozen_layers(kept_layers)
        if world.rank in [*_grouped(before.own_plan), *_grouped(report.plan)]:
            frozen = {}  # parts of layers, or to be cut
        before.release_trainer()
        assert before.members is not None
        before.members.dissolve()  # nothing of the former plan sends or waits any more
        context.backend.free_unused()
        gc.freeze()  # what lives on is not looked through again by the next change
    copied_s = time.perf_counter()
    share = build_share(context, report, state, frozen)
    if share.emulation is not None and before.emulation is not None:
        share.emulation.pace.go_on_from(before.emulation.pace)
    built_s = time.perf_counter()
    received = move_trained_state(context, share, move_list, read, state)
    moved_s = time.perf_counter()
    seconds = {"keep": copied_s - begin_s, "build": built_s - copied_s, "move": moved_s - built_s}
    _LOG.info("rank %d: %d bytes received; seconds of the change: %s", rank, received, seconds)
    return replace(share, seconds=seconds)


def _grouped(plan: Plan) -> list[int]:
    return [rank for _, _, stage in plan.numbered if stage.grouped for rank in stage.ranks]


def _nothing(shard: TensorShard) -> torch.Tensor:
    raise AssertionError(f"this rank does not have {shard.name}")


def _refuse(shard: TensorShard, tensor: torch.Tensor) -> None:
    raise AssertionError(f"an idle rank was given {shard.name}")
