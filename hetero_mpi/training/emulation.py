"""Emulated clusters: ranks that last as long as the devices and links of a profile, while a small model stands in for its own.

``[cluster] emulate = PROFILE``. The profile's model is what is planned; the job's model, with as many blocks, is what is
computed. Every forward, backward and optimizer step runs its real arithmetic and then waits until ``simulator.duration`` times
``[cluster] time_scale`` has passed; messages are held back by ``comm.emulated_link``. Nothing else differs from a run without
emulation: losses have the same bits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from hetero_mpi.comm.emulated_link import Delay, EmulatedTransport, clock_offsets_s, shared_cards
from hetero_mpi.comm.sleeping import Sleeper
from hetero_mpi.comm.transport import Transport
from hetero_mpi.comm.world import World
from hetero_mpi.errors import UserError
from hetero_mpi.job import LoadedJob
from hetero_mpi.model.chain import Chain
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.durations import duration
from hetero_mpi.planning.files import load_profile, profile_from_dict, profile_to_dict
from hetero_mpi.planning.network import Network
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.profile import EMULATED, ClusterProfile
from hetero_mpi.planning.schedule import Action, Op, Schedule, stages
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.report import units
from hetero_mpi.training.request import with_memory

NETWORK = Network(shared_nic=True)
"""How messages meet in an emulated cluster; its predictions are made alike."""
_PACED = (Op.F, Op.B, Op.STEP)


class Pace:
    """Makes this rank's actions last.

    Attributes:
        actions: how many were paced.
        late: of these, how many took longer than they should, by real arithmetic or since nobody woke this rank in time ...
        late_s: ... and by how much in all (wall clock).
    """

    def __init__(self, plan: Plan, profile: ClusterProfile, time_scale: float, sleeper: Sleeper) -> None:
        self._plan, self._profile, self._scale, self._sleeper = plan, profile, time_scale, sleeper
        self._known: dict[tuple[Op, int], float] = {}
        self.actions, self.late, self.late_s = 0, 0, 0.0

    def lasts_s(self, op: Op, stage: int) -> float:
        """Seconds of wall clock that an action of ``stage`` is to last."""
        if (op, stage) not in self._known:
            action = Action(op, stage, None if op is Op.STEP else 0)
            self._known[op, stage] = self._scale * duration(action, self._plan, self._profile)
        return self._known[op, stage]

    def hold(self, op: Op, stage: int, start_s: float) -> None:
        """Wait until an action that began at ``start_s`` (``time.perf_counter``) has lasted long enough."""
        if op not in _PACED:
            return
        end_s = start_s + self.lasts_s(op, stage)
        late_s = time.perf_counter() - end_s
        self.actions += 1
        if late_s > 0:
            self.late, self.late_s = self.late + 1, self.late_s + late_s
        else:
            self._sleeper.until(end_s)


@dataclass(frozen=True)
class Emulation:
    """What makes a rank behave like a device of a profile."""

    profile: ClusterProfile
    plan: Plan
    """Of the profile's model. ``stand_in_plan`` is the same for the job's own sequences."""
    time_scale: float
    """Seconds of wall clock per second of the emulated cluster."""
    transport: Transport
    """Carries the messages between stages in steps, and those only."""
    end_transport: Transport
    """Carries the gradient and the values of a tied matrix between the two ends."""
    pace: Pace
    stand_in_sequence: int
    """Tokens per sequence of the job."""
    cores: float
    """CPU cores this rank can count on."""

    @property
    def stand_in_plan(self) -> Plan:
        return replace(self.plan, sequence_length=self.stand_in_sequence)

    def step_s(self, wall_s: float) -> float:
        """Seconds of the emulated cluster."""
        return wall_s / self.time_scale

    def tokens(self, own: int) -> float:
        """Tokens of the emulated model that so many of the stand-in's stand for."""
        return own * self.profile.model.sequence_length / self.stand_in_sequence


def emulated_profile(
    world: World, loaded: LoadedJob, chain: Chain, tuning: Tuning, other: Path | None
) -> ClusterProfile:
    """The profile that the job names, for this many ranks, labelled as emulated. Collective; rank 0 reads the file.

    ``other``: the command line's ``--profile``, which would contradict.

    Raises:
        UserError: ranks or blocks do not fit the profile, or embedding and head are tied in one model only.
    """
    cluster, found = loaded.job.cluster, None
    assert cluster.emulate is not None
    with world.led("reading the profile to emulate"):
        if world.rank == 0:
            path = loaded.resolve(cluster.emulate)
            if other or loaded.job.profile.path:
                raise UserError(
                    f"[cluster] emulate = {cluster.emulate!r} brings its own profile: leave --profile and profile.path out"
                )
            profile = _first_ranks(load_profile(path), world.size, cluster.emulate_first, str(path))
            _check_model(profile, chain, chain.tied is not None and tuning.full, str(path))
            found = replace(
                profile,
                source=profile.source if profile.emulated else f"{EMULATED}, {profile.source}",
                key=f"{EMULATED}-{profile.key}",
                notes=(*_notes(profile, chain, loaded), *profile.notes),
            )
    profile = profile_from_dict(world.broadcast_json(profile_to_dict(found) if found is not None else None))
    return profile if cluster.memory_bytes is None else with_memory(profile, cluster.memory_bytes)


def _first_ranks(profile: ClusterProfile, ranks: int, fewer: bool, path: str) -> ClusterProfile:
    known = len(profile.devices)
    if ranks > known or (ranks < known and not fewer):
        also = "" if ranks > known else f", or set [cluster] emulate_first = true to emulate its first {ranks}"
        raise UserError(f"{path} describes {known} ranks, this job has {ranks}: start {known} ranks{also}")
    links = tuple(link for link in profile.links if max(link.source, link.destination) < ranks)
    return replace(profile, devices=profile.devices[:ranks], links=links)


def _check_model(profile: ClusterProfile, chain: Chain, tied: bool, path: str) -> None:
    blocks = len(profile.model.layers) - 2
    if chain.blocks != blocks:
        raise UserError(
            f"a model stands in for another with as many blocks: {path} has {blocks}, this job's model has {chain.blocks}. "
            f"Set num_hidden_layers = {blocks} in [model.config]"
        )
    if tied != profile.model.tied:
        trains = {
            True: "trains a matrix that embedding and head share",
            False: "trains no matrix shared by embedding and head",
        }
        raise UserError(
            f"stand-in and model must agree on tied ends: {path} {trains[profile.model.tied]}, this job {trains[tied]}. "
            f"Set tie_word_embeddings = {str(profile.model.tied).lower()} in [model.config]"
        )


def _notes(profile: ClusterProfile, chain: Chain, loaded: LoadedJob) -> tuple[str, ...]:
    parameters = sum(spec.count for spec in chain.parameters.values())
    cluster, own = loaded.job.cluster, profile.model
    scale = "" if cluster.time_scale == 1 else f" One second of it takes {cluster.time_scale:g} s here."
    return (
        f"{EMULATED}: times and messages are those of {loaded.job.cluster.emulate}, for {own.model_type} in {own.dtype} with "
        f"sequences of {own.sequence_length:,} tokens; a {chain.config.model_type} of {units.count(parameters)} parameters "
        f"with sequences of {loaded.job.data.sequence_length} is what is computed.{scale}",
    )


def predicted(plan: Plan, profile: ClusterProfile, schedule: Schedule) -> Plan:
    """The plan with its prediction for ranks that share their host's network card; the reasons say so if that matters."""
    step_s = simulate(plan, profile, schedule, NETWORK).step_s
    reasons = plan.reasons
    if abs(step_s / plan.predicted_step_s - 1) > 1e-3:
        reasons += (
            f"the ranks of a host share its network card: {units.seconds(step_s)} per step instead of the "
            f"{units.seconds(plan.predicted_step_s)} of links of their own",
        )
    return replace(plan, predicted_step_s=step_s, reasons=reasons)


def emulate(
    world: World, transport: Transport, loaded: LoadedJob, profile: ClusterProfile, plan: Plan, cores: float
) -> Emulation:
    """Set up this rank. Collective over all ranks of the job.

    Args:
        cores: CPU cores this rank can count on.
    """
    sleeper = Sleeper(spare_core=cores >= 2)  # one computes, one spins
    scale = loaded.job.cluster.time_scale
    cards = shared_cards(world, [device.host for device in profile.devices])
    offsets_s = clock_offsets_s(world, transport)

    def links(delay_s: Delay) -> EmulatedTransport:
        return EmulatedTransport(transport, world.rank, delay_s, cards, offsets_s, sleeper)

    return Emulation(
        profile,
        plan,
        scale,
        links(_between_stages(profile, plan, scale)),
        links(_between_ends(profile, scale)),
        Pace(plan, profile, scale, sleeper),
        loaded.job.data.sequence_length,
        cores,
    )


def _between_stages(profile: ClusterProfile, plan: Plan, scale: float) -> Delay:
    """What activations and gradients take. The bytes of the stand-in stand for those of the profile's model."""
    delays = {}
    for number, index, stage in stages(plan):
        for op in (Op.SEND_F, Op.SEND_B):
            other = number + (1 if op is Op.SEND_F else -1)
            same = [peer for at, pipeline, peer in stages(plan) if at == other and pipeline == index]
            if same:
                delays[stage.ranks[0], same[0].ranks[0]] = scale * duration(Action(op, number, 0), plan, profile)
    return lambda source, destination, own_bytes: delays[source, destination]


def _between_ends(profile: ClusterProfile, scale: float) -> Delay:
    """What one way of the exchange between the ends of a tied model takes."""
    return lambda source, destination, own_bytes: (
        scale * profile.transfer_s(source, destination, profile.model.tied_bytes)
    )


def punctuality_lines(world: World, emulation: Emulation) -> list[str]:
    """How well the ranks kept the times, for the end of a run. Collective over the active ranks."""
    pace = emulation.pace
    rows = world.all_gather_json([pace.actions, pace.late, pace.late_s])
    actions, late, late_s = (sum(row[column] for row in rows) for column in range(3))
    mean = f", by {units.seconds(late_s / late)} on average" if late else ""
    return [f"Emulation: {late:,} of {actions:,} actions took longer here than they were to last{mean}"]
