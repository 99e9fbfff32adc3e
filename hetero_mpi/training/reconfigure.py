"""Changes the plan inside the running processes, between two steps.

    before      rank 0: layers 0-3     rank 1: layers 4-8     rank 2: idle
    keep        copies what it trains  copies what it trains                   in host memory; stages are given up
    build       layers 0-2             layers 3-5             layers 6-8       frozen weights new here: own files, or sent
    move                layer 3 -> 1   layers 6-8 -> 2                         parameters and moments; the rest stays
    after       the loop goes on with the next step: the same data, the same numbers

A change has three parts, which a recovery combines in another way (there, what is moved comes from copies on other ranks). ``keep``
copies what this rank brings along. ``build_share`` builds the stages of a plan. ``hand_over`` moves the trained state by a list of
deliveries. Only one stage is in memory at any time.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hetero_mpi.comm.ranks.world import CollectiveUserError
from hetero_mpi.emulation.emulated_cluster import emulate
from hetero_mpi.engine.placement import active_ranks
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.model.held_layers import Kept
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.planning.schedule import holders, schedule_of
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.state.checkpoint import KINDS
from hetero_mpi.state.redistribute import Delivery, LiveState, Parcel, deliveries, held_under, move, parcels, take_over
from hetero_mpi.state.saving import Snapshot, lack_of_memory, size_bytes
from hetero_mpi.state.training_state import TrainingState
from hetero_mpi.training.build import build
from hetero_mpi.training.setup.context import RunContext, Share

_LOG = logging.getLogger(__name__)
Own = Callable[[Parcel], torch.Tensor]
"""Returns a parcel that this rank has, as a contiguous host tensor."""


def lack_of_room(share: Share) -> str | None:
    """The hosts without memory for what ``keep`` copies, in words; None: all have it. Collective over the active ranks."""
    assert share.members is not None and share.trainer is not None
    members, trainer = share.members, share.trainer
    held = [parcel for parcel in parcels(trainer.tuning, trainer.plan, KINDS) if trainer.rank == parcel.owner]
    return lack_of_memory(members, size_bytes(held))


def keep(trainer: Trainer, listed: Sequence[Delivery]) -> Snapshot:
    """Copies in host memory of the parcels that this rank sends or keeps. Local; a group comes together."""
    rank, live = trainer.rank, LiveState(trainer)
    own = [one.parcel for one in listed if rank in one.keepers or (rank == one.source and one.destinations)]
    snapshot = Snapshot(own, trainer.backend)
    snapshot.take(live)
    leader = trainer.plan.leader_of.get(rank)
    for one in listed:
        if one.source == leader:
            live.give(one.parcel)
    return snapshot


def join(context: RunContext, report: PlanReport) -> Share:
    """This rank's share of ``report.plan``, without a stage yet. Collective over all ranks of the job."""
    emulation, plan = None, report.plan
    if context.job.cluster.emulate is not None:
        chain, profile = language(context.chain), context.profile
        emulation = emulate(context.world, context.transport, context.loaded, chain, profile, plan, context.cores)
    schedule = schedule_of(plan, context.profile.model)
    return Share(report, schedule, emulation, context.world.subset(active_ranks(plan)))


def build_share(
    context: RunContext, report: PlanReport, state: TrainingState, kept: Kept | None = None, brought: bool = True
) -> Share:
    """This rank's share of ``report.plan`` with its stage. Collective over all ranks of the job, idle ones included; no rank may be
    asleep. Raises CollectiveUserError: on all ranks, if an active rank cannot build its stage.

    Args:
        kept: frozen weights that this rank already has in memory.
        brought: the trained state is still to be moved.
    """
    share = join(context, report)
    problem: CollectiveUserError | None = None
    if share.members is not None:
        try:
            share = build(context, share, brought, state.loss_scale, kept)
        except CollectiveUserError as error:
            problem = error
    context.world.share_problem(problem)
    return share


def hand_over(context: RunContext, share: Share, listed: Sequence[Delivery], own: Own, state: TrainingState) -> int:
    """Move trained parameters and moments to the ranks that hold them under the plan of ``share``. Collective over all ranks of the
    job. Returns the bytes that this rank received.

    Args:
        listed: who sends what to whom, the same on all ranks.
        own: returns a parcel that this rank sends or keeps.
    """
    if share.trainer is None:
        return move(context.world.rank, context.transport, listed, own, _refuse)
    return take_over(share.trainer, listed, own, state.updates)


def change(context: RunContext, before: Share, report: PlanReport, state: TrainingState) -> Share:
    """Change to ``report.plan``; returns this rank's new share. Collective over all ranks of the job, idle ones included.

    No rank may be asleep. Nobody else may hold the trainer of ``before``, as its memory is needed. ``state``: of this rank. Raises
    CollectiveUserError: on all ranks, if one cannot build its new stage.
    """
    world, rank = context.world, context.world.rank
    world.doing = "changing to another plan"
    begin = time.perf_counter()
    listed = deliveries(parcels(context.tuning, report.plan, KINDS), held_under(context.tuning, before.plan))
    brought: Own = _nothing
    kept: Kept = {}
    if before.trainer is not None:
        brought = keep(before.trainer, listed)
        if before.trainer.held is not None:
            kept = before.trainer.held.frozen_layers(_layers_of(world.rank, report.plan))
        if world.rank in [*_grouped(before.own_plan), *_grouped(report.plan)]:
            kept = {}  # parts of layers, or to be cut
        before.give_up()
        assert before.members is not None
        before.members.dissolve()  # nothing of the former plan sends or waits any more
        context.backend.free_unused()
        gc.freeze()  # what lives on is not looked through again by the next change
    copied = time.perf_counter()
    share = build_share(context, report, state, kept)
    if share.emulation is not None and before.emulation is not None:
        share.emulation.pace.go_on_from(before.emulation.pace)
    built = time.perf_counter()
    received = hand_over(context, share, listed, brought, state)
    moved = time.perf_counter()
    seconds = {"keep": copied - begin, "build": built - copied, "move": moved - built}
    _LOG.info("rank %d: %d bytes received; seconds of the change: %s", rank, received, seconds)
    return replace(share, seconds=seconds)


def _layers_of(rank: int, plan: Plan) -> list[int]:
    return [layer for layer, ranks in holders(plan).items() if rank in ranks]


def _grouped(plan: Plan) -> list[int]:
    return [rank for _, _, stage in plan.numbered if stage.grouped for rank in stage.ranks]


def _nothing(parcel: Parcel) -> torch.Tensor:
    raise AssertionError(f"this rank does not have {parcel.name}")


def _refuse(parcel: Parcel, tensor: torch.Tensor) -> None:
    raise AssertionError(f"an idle rank was given {parcel.name}")
