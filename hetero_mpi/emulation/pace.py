"""Emulated clusters: ranks that last as long as the devices and links of a profile, while a small model stands in for its own.

``[cluster] emulate = PROFILE``. The profile's model is what is planned; the job's model, with as many blocks, is what is
computed. Every forward, backward (whole or in parts) and optimizer step runs its real arithmetic and then waits until
``durations.duration`` times ``[cluster] time_scale`` has passed; ``emulation.emulated_links`` delays messages and all-reduces.
The profile is looked at through ``NETWORK`` once, when it is read: planner, prediction and ranks see the same NICs.
Nothing else differs from a run without emulation: losses have the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from hetero_mpi import units
from hetero_mpi.comm.clocks import clock_offset_s
from hetero_mpi.comm.precise_sleep import Sleeper
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.emulation.emulated_links import Delay, EmulatedTransport
from hetero_mpi.emulation.emulated_nics import Nics, shared_nics
from hetero_mpi.errors import UserError
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.job.plan_request import with_memory
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.durations import Durations, finished_layers_s, return_s, sum_s, tied_s, update_s, values_s
from hetero_mpi.planning.schedule import COMPUTE, Action, Op
from hetero_mpi.planning.types.cluster_changes import restricted
from hetero_mpi.planning.types.cost import DTYPE_BYTES, sent_bytes
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import EMULATED, ClusterProfile
from hetero_mpi.planning.types.request import Network
from hetero_mpi.planning.types.toml_files import load_profile, profile_from_dict, profile_to_dict

NETWORK = Network(shared_nic=True)
"""How messages meet in an emulated cluster: the ranks of every host share its NIC."""
_PACED = (*COMPUTE, Op.STEP)


class ActionPacer:
    """Makes this rank's actions last.

    Attributes:
        actions: how many were paced.
        late: of these, how many took longer than they should, by real arithmetic or since nobody woke this rank in time ...
        late_s: ... and by how much in all (wall clock).

    Args:
        speeds: (rank, from which step on, share of the profile's speed).
    """

    def __init__(
        self,
        plan: Plan,
        profile: ClusterProfile,
        time_scale: float,
        sleeper: Sleeper,
        speeds: Sequence[tuple[int, int, float]] = (),
    ) -> None:
        self._plan, self._scale, self._sleeper = plan, time_scale, sleeper
        self._speeds = sorted(speeds, key=lambda change: change[1])
        self._step = 0
        self._known = Durations(plan, profile)
        self._profile = self._known.profile
        self._finished_s: dict[Action, dict[int, float]] = {}
        self.actions, self.late, self.late_s = 0, 0, 0.0
        self._layer = 0

    def lasts_s(self, action: Action) -> float:
        """Seconds of wall clock that an action is to last; STEP without what it or the next forward waits for."""
        scale = self._scale_now(action)
        if action.op is Op.STEP:
            return scale * update_s(action.stage, self._plan, self._profile)
        return scale * self._known.of(action)[0]

    def _scale_now(self, action: Action) -> float:
        """Seconds of wall clock per second of the device that does ``action``, at its speed in this step."""
        rank, speed = self._known.stages[action.stage].ranks[0], 1.0
        for changed, first_step, share in self._speeds:
            speed = share if changed == rank and first_step <= self._step else speed
        return self._scale / speed

    def begin_step(self, step: int) -> None:
        """The number of the step that runs: devices may change their speed."""
        self._step = step

    def begin_exchange(self, layer: int) -> None:
        """Whose gradients this rank is about to sum, or whose values to exchange; ``exchange_s`` is asked for it."""
        self._layer = layer

    def go_on_from(self, before: ActionPacer) -> None:
        """Count on, after a change of plans."""
        self.actions, self.late, self.late_s = before.actions, before.late, before.late_s

    def exchange_s(self, sums: bool) -> float:
        """Seconds of wall clock that the exchange of the layer named last is to last: its gradients are summed, or new values go
        out. The stand-in's bytes do not matter, and what the emulated model does not train takes no time."""
        seconds = sum_s if sums else values_s
        return self._scale * seconds(self._plan, self._profile, self._layer)

    def hold(self, action: Action, start_s: float, finished: Callable[[int], None] | None = None) -> None:
        """Wait until an action that began at ``start_s`` (``time.perf_counter``) has lasted long enough.

        ``finished``: is told each layer when a last backward would have finished it.
        """
        if action.op not in _PACED:
            return
        end_s = start_s + self.lasts_s(action)
        late_s = time.perf_counter() - end_s
        if finished is not None:
            for layer, after_s in self._layers_s(action).items():
                self._sleeper.until(start_s + after_s)
                finished(layer)
        self.actions += 1
        if late_s > 0:
            self.late, self.late_s = self.late + 1, self.late_s + late_s
        else:
            self._sleeper.until(end_s)

    def _layers_s(self, action: Action) -> dict[int, float]:
        if action not in self._finished_s:
            self._finished_s[action] = finished_layers_s(action, self._plan, self._profile)
        scale = self._scale_now(action)
        return {layer: scale * seconds for layer, seconds in self._finished_s[action].items()}


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
    """Carries the gradient and the values of a tied matrix between the two ends, and sums gradients. As simulated, these share
    NICs among themselves; the few messages between stages that still pass beside them are not slowed down by them."""
    pace: ActionPacer
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
    world: World, loaded: LoadedJob, chain: TransformersChain, tuning: Tuning, other: Path | None
) -> ClusterProfile:
    """The profile that the job names, for this many ranks, labelled as emulated. Collective; rank 0 reads the file.

    ``other``: the command line's ``--profile``, which would contradict.

    Raises UserError: ranks or blocks do not fit the profile, or embedding and head are tied in one model only.
    """
    cluster, found = loaded.job.cluster, None
    assert cluster.emulate is not None
    with world.led("reading the profile to emulate"):
        if world.rank == 0:
            path = loaded.profile_file(cluster.emulate)
            if other or loaded.job.profile.path:
                raise UserError(
                    f"[cluster] emulate = {cluster.emulate!r} brings its own profile: leave --profile and profile.path out"
                )
            profile = _first_ranks(load_profile(path), world.size, cluster.emulate_first, str(path))
            _check_model(profile, chain, chain.tied is not None and tuning.full, str(path))
            found = replace(
                NETWORK.seen_by(profile),
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
        raise UserError(f"{path} describes {known} ranks, this job has {ranks}: start {known} ranks{also}")
    return restricted(profile, range(ranks))


def _check_model(profile: ClusterProfile, chain: TransformersChain, tied: bool, path: str) -> None:
    blocks = len(profile.model.layers) - 2
    if chain.blocks != blocks:
        raise UserError(
            f"a model stands in for another with as many blocks: {path} has {blocks}, this job's model has {chain.blocks}. "
            f"Set num_hidden_layers = {blocks} in [model.config]"
        )
    if tied != profile.model.tied:
        trains = {own: f"trains {'a' if own else 'no'} matrix that embedding and head share" for own in (True, False)}
        raise UserError(
            f"stand-in and model must agree on tied ends: {path} {trains[profile.model.tied]}, this job {trains[tied]}. "
            f"Set tie_word_embeddings = {str(profile.model.tied).lower()} in [model.config]"
        )


def _notes(profile: ClusterProfile, chain: TransformersChain, loaded: LoadedJob) -> tuple[str, ...]:
    parameters = sum(spec.count for spec in chain.parameters.values())
    cluster, own = loaded.job.cluster, profile.model
    scale = "" if cluster.time_scale == 1 else f" One second of it takes {cluster.time_scale:g} s here."
    return (
        f"{EMULATED}: times and messages are those of {loaded.job.cluster.emulate}, for {own.model_type} in {own.dtype} with "
        f"sequences of {own.sequence_length:,} tokens; a {chain.config.model_type} of {units.count(parameters)} parameters "
        f"with sequences of {loaded.job.data.sequence_length} is what is computed.{scale}",
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
    hosts = [device.host for device in profile.devices]
    nics, end_nics = shared_nics(world, hosts), shared_nics(world, hosts)
    offsets_s = world.all_gather_json(clock_offset_s(world, transport))
    pace = ActionPacer(plan, profile, scale, sleeper, loaded.job.cluster.speed_changes())
    own = loaded.job.data.sequence_length
    dtype = loaded.job.train.dtype
    row_bytes = own * sent_bytes(chain.config.hidden_size * DTYPE_BYTES[dtype], dtype, profile.model.wire)

    def links(delay_s: Delay, nics: Nics) -> EmulatedTransport:
        return EmulatedTransport(transport, world.rank, delay_s, nics, offsets_s, sleeper, pace.exchange_s)

    return Emulation(
        profile,
        plan,
        scale,
        links(_between_stages(profile, plan, scale, row_bytes), nics),
        links(_between_ends(profile, plan, scale), end_nics),
        pace,
        own,
        cores,
    )


def _between_stages(profile: ClusterProfile, plan: Plan, scale: float, row_bytes: int) -> Delay:
    """What activations and gradients take. ``row_bytes`` of the stand-in stand for a sequence of the profile's model."""
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
    """What the exchange between the ends of a tied model takes: its gradient one way, its values the other."""
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
    return [f"Emulation: {late:,} of {actions:,} actions took longer here than they were to last{mean}"]
