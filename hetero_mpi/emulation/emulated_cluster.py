"""Emulated clusters: ranks that last as long as the devices and links of a profile, while a small model stands in for its own.

``[cluster] emulate = PROFILE``. The profile's model is what is planned; the job's model, with as many blocks, is what is
computed, by stages (``paced_stage``) and over a transport (``paced_transport``) that take as long as the profile's. Every pair of
ranks has a link to itself: NICs that a profile says hosts share are taken out of it when it is read, for planner, prediction and
ranks alike. Nothing else differs from a run without emulation: losses have the same bits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

from hetero_mpi.comm.links import clock_offset_s
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.emulation.paced_stage import ActionPacer, PacedStage, Sleeper
from hetero_mpi.emulation.paced_transport import Delay, PacedTransport
from hetero_mpi.engine.channel import EVALUATION, TIED_TAG
from hetero_mpi.engine.placement import BuildStage
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.job.plan_request import with_memory
from hetero_mpi.model.held_layers import Shared
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import block_key
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.durations import return_s, tied_s
from hetero_mpi.planning.types.cluster_changes import restricted
from hetero_mpi.planning.types.plan import Plan, StagePlan
from hetero_mpi.planning.types.profile import EMULATED, ClusterProfile
from hetero_mpi.planning.types.sizes import DTYPE_BYTES, sent_bytes
from hetero_mpi.planning.types.toml_files import load_profile, profile_from_dict, profile_to_dict
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError

MAX_LATE = 0.1
"""Share of late actions from which steps are longer than the emulated cluster's by more than a busy machine explains."""


@dataclass(frozen=True)
class Emulation:
    """The stages, the transport and the times that make a rank behave like a device of a profile."""

    profile: ClusterProfile
    plan: Plan
    """Plan of the profile's model. ``stand_in_plan`` is the same for the job's own sequences."""
    time_scale: float
    """Seconds of wall clock per second of the emulated cluster."""
    transport: Transport
    """Paces the messages and exchanges of steps, and no others."""
    pace: ActionPacer
    stand_in_sequence: int
    """Tokens per sequence of the job."""

    @property
    def stand_in_plan(self) -> Plan:
        return replace(self.plan, sequence_length=self.stand_in_sequence)

    def paced(self, build: BuildStage) -> BuildStage:
        """``build`` with stages that last."""

        def paced(
            own: StagePlan, split: bool, shared: Shared, foreign: Collection[str], beginning: Stage | None
        ) -> Stage:
            stage = build(own, split, shared, foreign, beginning)
            number = next(number for number, _, one in self.plan.numbered if one == own)
            return cast(Stage, PacedStage(stage, number, self.pace))

        return paced

    def step_s(self, wall_s: float) -> float:
        """Seconds of the emulated cluster."""
        return wall_s / self.time_scale

    def tokens(self, own: int) -> float:
        """Tokens of the emulated model that so many of the stand-in's stand for."""
        return own * self.profile.model.sequence_length / self.stand_in_sequence


def emulated_profile(world: World, loaded: LoadedJob, chain: TransformersChain, tuning: Tuning) -> ClusterProfile:
    """The profile that the job names, for this many ranks, labelled as emulated. Collective; rank 0 reads the file.

    Raises UserError: ranks or blocks do not fit the profile, or embedding and head are tied in one model only.
    """
    cluster, found = loaded.job.cluster, None
    assert cluster.emulate is not None
    with world.led("reading the profile to emulate"):
        if world.rank == 0:
            path = loaded.profile_file(cluster.emulate)
            profile = _first_ranks(load_profile(path), world.size, cluster.emulate_first, str(path))
            _check_model(profile, chain, tuning.tied(chain) is not None, str(path))
            found = replace(
                profile,
                hosts=tuple(replace(host, shared_nic=False) for host in profile.hosts),
                source=profile.source if profile.emulated else f"{EMULATED}, {profile.source}",
                key=f"{EMULATED}-{profile.key}",
                notes=(*_notes(profile, chain, loaded), *profile.notes),
            )
    profile = profile_from_dict(world.broadcast_json(profile_to_dict(found) if found is not None else None))
    return with_memory(profile, cluster.memory_bytes)


def _first_ranks(profile: ClusterProfile, ranks: int, fewer: bool, path: str) -> ClusterProfile:
    known = len(profile.devices)
    if ranks > known or (ranks < known and not fewer):
        also = "" if ranks > known else f", or set [cluster] emulate_first = true to emulate its first {ranks}"
        raise UserError(
            "emulation.ranks", f"{path} describes {known} ranks, this job has {ranks}: start {known} ranks{also}"
        )
    return restricted(profile, range(ranks))


def _check_model(profile: ClusterProfile, chain: TransformersChain, tied: bool, path: str) -> None:
    blocks = len(profile.model.layers) - 2
    if chain.blocks != blocks:
        raise UserError(
            "emulation.blocks",
            f"a model stands in for another with as many blocks: {path} has {blocks}, this job's model has {chain.blocks}. "
            f"Set {block_key(chain.model.config, chain.blocks)} = {blocks} in [model.config]",
        )
    if tied != profile.model.tied:
        trains = {own: f"trains {'a' if own else 'no'} matrix that embedding and head share" for own in (True, False)}
        raise UserError(
            "emulation.tied",
            f"stand-in and model must agree on tied ends: {path} {trains[profile.model.tied]}, this job {trains[tied]}. "
            f"Set tie_word_embeddings = {str(profile.model.tied).lower()} in [model.config]",
        )


def _notes(profile: ClusterProfile, chain: TransformersChain, loaded: LoadedJob) -> tuple[str, ...]:
    parameters = sum(spec.count for spec in chain.parameters.values())
    cluster, own = loaded.job.cluster, profile.model
    scale = "" if cluster.time_scale == 1 else f" One second of it takes {cluster.time_scale:g} s here."
    shared = any(host.shared_nic for host in profile.hosts)
    apart = " NICs that its hosts share are not emulated: each pair of ranks has a link to itself." if shared else ""
    return (
        f"{EMULATED}: times and messages are those of {loaded.job.cluster.emulate}, for {own.model_type} in {own.dtype} with "
        f"{units.rows_of(own.sequence_length)}; a {chain.config.model_type} of {units.count(parameters)} parameters "
        f"with sequences of {loaded.job.data.sequence_length} is what is computed.{scale}{apart}",
    )


def emulate(
    world: World,
    transport: Transport,
    loaded: LoadedJob,
    chain: TransformersChain,
    profile: ClusterProfile,
    plan: Plan,
    cores: float,
) -> Emulation:
    """Set up this rank. Collective over all ranks. ``chain``: the stand-in. ``cores``: CPU cores this rank can count on."""
    sleeper = Sleeper(spare_core=cores >= 2)  # one computes, one spins
    scale = loaded.job.cluster.time_scale
    offsets_s = world.all_gather_json(clock_offset_s(world, transport))
    pace = ActionPacer(plan, profile, scale, sleeper, loaded.job.cluster.speed_changes())
    own = loaded.job.data.sequence_length
    dtype = loaded.job.train.dtype
    row_bytes = own * sent_bytes(chain.config.hidden_size * DTYPE_BYTES[dtype], dtype, profile.model.wire)

    between, ends = _between_stages(profile, plan, scale, row_bytes), _between_ends(profile, plan, scale)

    def delay_of(tag: int) -> Delay | None:
        if tag < TIED_TAG:
            return between if tag % 4 != EVALUATION else None
        return ends if tag <= TIED_TAG + 1 else None

    paced = PacedTransport(transport, world.rank, delay_of, pace.exchange_s, offsets_s, sleeper)
    return Emulation(profile, plan, scale, paced, pace, own)


def _between_stages(profile: ClusterProfile, plan: Plan, scale: float, row_bytes: int) -> Delay:
    """Seconds of activations and gradients. ``row_bytes`` of the stand-in stand for a sequence of the profile's model."""
    boundary_bytes = {}
    for pipeline in plan.pipelines:
        for before, after in pairwise(pipeline.stages):
            size = profile.model.sent_bytes_per_token(before.last - 1) * plan.sequence_length
            boundary_bytes[before.ranks[0], after.ranks[0]] = boundary_bytes[after.ranks[0], before.ranks[0]] = size

    def delay_s(source: int, destination: int, own_bytes: int) -> float:
        size = boundary_bytes[source, destination] * own_bytes / row_bytes
        return scale * profile.transfer_s(source, destination, size)

    return delay_s


def _between_ends(profile: ClusterProfile, plan: Plan, scale: float) -> Delay:
    """Seconds of the exchange between the ends of a tied model: its gradient one way, its values the other."""
    delays = {}
    for pipeline in plan.pipelines:
        embedding, head = pipeline.stages[0].ranks[0], pipeline.stages[-1].ranks[0]
        if profile.model.tied and embedding != head:
            delays[head, embedding] = scale * tied_s(profile, embedding, head)
            delays[embedding, head] = scale * return_s(profile, embedding, head)
    return lambda source, destination, own_bytes: delays[source, destination]


def punctuality_lines(world: World, emulation: Emulation) -> list[str]:
    """How well the ranks kept the times, for the end of a run. Collective over the active ranks."""
    pace = emulation.pace
    rows = world.all_gather_json([pace.actions, pace.late, pace.late_s])
    actions, late, late_s = (sum(row[column] for row in rows) for column in range(3))
    mean = f", by {units.seconds(late_s / late)} on average" if late else ""
    remedy = (
        "; raise [cluster] time_scale, or make the model or its sequences smaller" if late > MAX_LATE * actions else ""
    )
    return [f"Emulation: {late:,} of {actions:,} actions took longer here than they were to last{mean}{remedy}"]
