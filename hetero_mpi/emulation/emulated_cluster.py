"""Emulated clusters: ranks with the speeds of a profile's devices and links, computing a small stand-in for its model.

Enabled by ``[cluster] emulate = PROFILE``. The planner plans the profile's model. The job's model, with the same number of
blocks, runs on stages (``paced_stage``) and a transport (``PacedTransport``) that take as long as those of the profile. Every
pair of ranks has its own link: shared NICs are removed when the profile is read, for planner, prediction and ranks alike.
Nothing else differs from a run without emulation; losses are bitwise equal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import numpy as np

from hetero_mpi.comm.links import clock_offset_s
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Arrived, Buffer, Exchange, Group, Message, Ready, Request, Transport
from hetero_mpi.emulation.paced_stage import ActionPacer, PacedStage, Sleeper
from hetero_mpi.engine.channel import EVALUATION, TIED_TAG
from hetero_mpi.engine.placement import BuildStage
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.job.plan_request import with_memory_budget
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
"""Fraction of late actions above which the machine's load alone does not explain why steps take too long."""


@dataclass(frozen=True)
class Emulation:
    """The stages, the transport and the times that make a rank behave like a device of a profile."""

    profile: ClusterProfile
    plan: Plan
    """Plan of the profile's model; ``stand_in_plan`` has the sequence length of the job."""
    time_scale: float
    """Wall-clock seconds per second of the emulated cluster."""
    transport: Transport
    """Transport that paces the messages and exchanges of steps only."""
    pace: ActionPacer
    stand_in_sequence: int
    """Tokens per sequence in the job."""

    @property
    def stand_in_plan(self) -> Plan:
        return replace(self.plan, sequence_length=self.stand_in_sequence)

    def paced(self, build: BuildStage) -> BuildStage:
        """Wrap ``build`` so that it returns paced stages."""

        def paced(
            stage_plan: StagePlan, split: bool, shared: Shared, foreign: Collection[str], beginning: Stage | None
        ) -> Stage:
            stage = build(stage_plan, split, shared, foreign, beginning)
            number = next(number for number, _, candidate in self.plan.numbered if candidate == stage_plan)
            return cast(Stage, PacedStage(stage, number, self.pace))

        return paced

    def step_s(self, wall_s: float) -> float:
        """Convert wall-clock seconds to seconds of the emulated cluster."""
        return wall_s / self.time_scale

    def tokens(self, stand_in_tokens: int) -> float:
        """Convert tokens of the stand-in to the corresponding tokens of the emulated model."""
        return stand_in_tokens * self.profile.model.sequence_length / self.stand_in_sequence


def emulated_profile(world: World, loaded: LoadedJob, chain: TransformersChain, tuning: Tuning) -> ClusterProfile:
    """Load the job's profile for this number of ranks and label it as emulated. Collective; rank 0 reads the file.

    Raises UserError if ranks or blocks do not match the profile, or only one of the models ties embedding and head.
    """
    cluster, emulated = loaded.job.cluster, None
    assert cluster.emulate is not None
    with world.on_leader("reading the profile to emulate"):
        if world.rank == 0:
            path = loaded.profile_file(cluster.emulate)
            profile = _first_ranks(load_profile(path), world.size, cluster.emulate_first, str(path))
            _check_model(profile, chain, tuning.tied(chain) is not None, str(path))
            emulated = replace(
                profile,
                hosts=tuple(replace(host, shared_nic=False) for host in profile.hosts),
                source=profile.source if profile.emulated else f"{EMULATED}, {profile.source}",
                key=f"{EMULATED}-{profile.key}",
                notes=(*_notes(profile, chain, loaded), *profile.notes),
            )
    profile = profile_from_dict(world.broadcast_json(profile_to_dict(emulated) if emulated is not None else None))
    return with_memory_budget(profile, cluster.memory_bytes)


def _first_ranks(profile: ClusterProfile, ranks: int, allow_fewer: bool, path: str) -> ClusterProfile:
    available = len(profile.devices)
    if ranks > available or (ranks < available and not allow_fewer):
        hint = "" if ranks > available else f", or set [cluster] emulate_first = true to emulate its first {ranks}"
        raise UserError(
            "emulation.ranks",
            f"{path} describes {available} ranks, this job has {ranks}: start {available} ranks{hint}",
        )
    return restricted(profile, range(ranks))


def _check_model(profile: ClusterProfile, chain: TransformersChain, tied: bool, path: str) -> None:
    blocks = len(profile.model.layers) - 2
    if chain.blocks != blocks:
        raise UserError(
            "emulation.blocks",
            f"the stand-in model must have as many blocks as the emulated model: {path} has {blocks}, this job's model has "
            f"{chain.blocks}. Set {block_key(chain.model.config, chain.blocks)} = {blocks} in [model.config]",
        )
    if tied != profile.model.tied:
        descriptions = {tie: f"trains {'one matrix for both' if tie else 'no shared matrix'}" for tie in (True, False)}
        raise UserError(
            "emulation.tied",
            f"the stand-in model must tie embedding and head if the emulated model does: {path} "
            f"{descriptions[profile.model.tied]}, the job {descriptions[tied]}. "
            f"Set tie_word_embeddings = {str(profile.model.tied).lower()} in [model.config]",
        )


def _notes(profile: ClusterProfile, chain: TransformersChain, loaded: LoadedJob) -> tuple[str, ...]:
    parameters = sum(spec.count for spec in chain.parameters.values())
    cluster, model = loaded.job.cluster, profile.model
    scale = "" if cluster.time_scale == 1 else f" One emulated second takes {cluster.time_scale:g} s."
    shares_nic = any(host.shared_nic for host in profile.hosts)
    nic_note = " NICs that its hosts share are not emulated: each pair of ranks has its own link." if shares_nic else ""
    return (
        f"{EMULATED}: times and messages are those of {loaded.job.cluster.emulate}, for {model.model_type} in {model.dtype} with "
        f"{units.rows_of(model.sequence_length)}; the stand-in model is a {chain.config.model_type} of {units.count(parameters)} "
        f"parameters with sequences of {loaded.job.data.sequence_length} tokens.{scale}{nic_note}",
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
    """Set up emulation on this rank, which has ``cores`` CPU cores; ``chain`` is the stand-in. Collective."""
    sleeper = Sleeper(spare_core=cores >= 2)  # one computes, one spins
    scale = loaded.job.cluster.time_scale
    offsets_s = world.all_gather_json(clock_offset_s(world, transport))
    pace = ActionPacer(plan, profile, scale, sleeper, loaded.job.cluster.speed_changes())
    sequence_length = loaded.job.data.sequence_length
    dtype = loaded.job.train.dtype
    row_bytes = sequence_length * sent_bytes(chain.config.hidden_size * DTYPE_BYTES[dtype], dtype, profile.model.wire)

    stage_delay, tied_delay = _stage_delay(profile, plan, scale, row_bytes), _tied_delay(profile, plan, scale)

    def delay_of(tag: int) -> Delay | None:
        if tag < TIED_TAG:
            return stage_delay if tag % 4 != EVALUATION else None
        return tied_delay if tag <= TIED_TAG + 1 else None

    paced = PacedTransport(transport, world.rank, delay_of, pace.exchange_s, offsets_s, sleeper)
    return Emulation(profile, plan, scale, paced, pace, sequence_length)


def _stage_delay(profile: ClusterProfile, plan: Plan, scale: float, row_bytes: int) -> Delay:
    """Return the delay of activations and gradients; ``row_bytes`` is a sequence's size in the stand-in."""
    boundary_bytes = {}
    for pipeline in plan.pipelines:
        for before, after in pairwise(pipeline.stages):
            size = profile.model.sent_bytes_per_token(before.last - 1) * plan.sequence_length
            boundary_bytes[before.ranks[0], after.ranks[0]] = boundary_bytes[after.ranks[0], before.ranks[0]] = size

    def delay_s(source: int, destination: int, stand_in_bytes: int) -> float:
        size = boundary_bytes[source, destination] * stand_in_bytes / row_bytes
        return scale * profile.transfer_s(source, destination, size)

    return delay_s


def _tied_delay(profile: ClusterProfile, plan: Plan, scale: float) -> Delay:
    """Return the delay of messages between the ends of a tied model: gradients one way, values the other."""
    delays = {}
    for pipeline in plan.pipelines:
        embedding, head = pipeline.stages[0].ranks[0], pipeline.stages[-1].ranks[0]
        if profile.model.tied and embedding != head:
            delays[head, embedding] = scale * tied_s(profile, embedding, head)
            delays[embedding, head] = scale * return_s(profile, embedding, head)
    return lambda source, destination, stand_in_bytes: delays[source, destination]


def punctuality_lines(world: World, emulation: Emulation) -> list[str]:
    """Report at the end of a run how precisely the ranks kept the times. Collective over the active ranks."""
    pace = emulation.pace
    rows = world.all_gather_json([pace.actions, pace.late, pace.late_s])
    actions, late, late_s = (sum(row[column] for row in rows) for column in range(3))
    mean = f", by {units.seconds(late_s / late)} on average" if late else ""
    remedy = (
        "; raise [cluster] time_scale, or make the model or its sequences smaller" if late > MAX_LATE * actions else ""
    )
    return [f"Emulation: {late:,} of {actions:,} actions took longer than in the emulated cluster{mean}{remedy}"]


STAMP_TAG = 1 << 14
"""Offset from a message's tag to that of its timestamp; MPI guarantees tags up to 32767. ``clock_offset_s`` uses the tag
below."""
_SUM_TAG = STAMP_TAG - 2
"""The start times of a group's exchanges have this tag minus the group's number."""
Delay = Callable[[int, int, int], float]
"""(source rank, destination rank, bytes of the message) -> its duration in seconds; messages of one ``Delay`` share links."""


def _encode_time(moment_s: float = 0.0) -> Buffer:
    """Encode a time as 8 bytes."""
    return np.array([moment_s]).view(np.uint8)


def _decode_time(stamp: Buffer) -> float:
    return float(stamp.view(np.float64)[0])


class _PacedMessage(Message):
    """A message with an arrival time, complete once both have been transferred and that time has come."""

    def __init__(self, request: Request, stamp: Buffer, stamp_request: Request, offset_s: float) -> None:
        assert isinstance(request, Message), "transports make messages"
        super().__init__(request.kind, request.peer, request.tag, request.buffer)
        self.moves = [request, stamp_request]
        self._stamp, self._offset_s = stamp, offset_s

    @property
    def moment_s(self) -> float:
        """Arrival time on this rank's clock, known once ``moves`` are complete."""
        return _decode_time(self._stamp) + self._offset_s

    @property
    def ended_s(self) -> float | None:
        return self.moment_s if all(part.completed for part in self.moves) else None

    @property
    def completed(self) -> bool:
        return all(part.completed for part in self.moves) and time.perf_counter() >= self.moment_s


class _PacedExchange(Exchange):
    """An exchange that lasts ``duration_s`` from the time its last member starts; members exchange their start times.

    Args:
        offset_s: This rank's clock minus rank 0's.
        before: The previous exchange of this rank.
    """

    def __init__(
        self,
        request: Exchange,
        inner: Transport,
        rank: int,
        offset_s: float,
        duration_s: float,
        before: _PacedExchange | None,
    ) -> None:
        super().__init__(request.group, request.parts, request.sums, number=request.number)
        called_s = time.perf_counter()
        self.starts = {member: _encode_time(called_s - offset_s) for member in request.group.ranks}
        """Member -> its start time on rank 0's clock, so that all members compute a bitwise equal end."""
        self._own, self._called_s, self._before = self.starts[rank], called_s, before
        self._offset_s, self._duration_s = offset_s, duration_s
        peers, tag = [member for member in self.starts if member != rank], _SUM_TAG - request.group.number
        self.moves = [inner.exchange(request)]
        self.moves += [inner.post_receive(peer, tag, self.starts[peer]) for peer in peers]
        self.moves += [inner.send(peer, tag, self._own, self.started) for peer in peers]

    def started(self) -> bool:
        """Whether the previous exchange's end, and so this rank's start time, is known. Called by the transport thread."""
        before = self._before
        if before is not None and before.all_moved:
            self._own[:] = _encode_time(max(self._called_s, before.moment_s) - self._offset_s)
            self._before = None  # avoids a chain over the whole run
        return self._before is None

    @property
    def all_moved(self) -> bool:
        return all(part.completed for part in self.moves)

    @property
    def moment_s(self) -> float:
        """End of the exchange on this rank's clock, known once ``moves`` are complete."""
        return max(map(_decode_time, self.starts.values())) + self._offset_s + self._duration_s

    @property
    def completed(self) -> bool:
        return self.all_moved and time.perf_counter() >= self.moment_s


class PacedTransport(Transport):
    """Wraps ``inner`` with the timing of another cluster; closing it leaves ``inner`` open.

    All ranks must start the exchanges of all groups in one common order, as the engine does layer by layer. Other orders could
    deadlock, since a rank starts an exchange only after its previous one.

    Args:
        delay_of: Maps a message's tag to its delay, or to None if the message is not paced.
        exchange_s: Maps (number of an exchange, whether it is a reduce-scatter) to its duration in seconds.
        offsets_s: Each rank's clock minus rank 0's, from ``clock_offset_s``.
    """

    piece_bytes = sys.maxsize  # a message is delayed once: each piece would add a link's latency

    def __init__(
        self,
        inner: Transport,
        rank: int,
        delay_of: Callable[[int], Delay | None],
        exchange_s: Callable[[int, bool], float],
        offsets_s: Sequence[float],
        sleeper: Sleeper,
    ) -> None:
        self.inner, self.rank, self._delay_of, self._exchange_s = inner, rank, delay_of, exchange_s
        self._offsets_s, self._sleeper = dict(enumerate(offsets_s)), sleeper
        self._link_free_s: dict[tuple[Delay, int], float] = {}
        self._last_exchange: _PacedExchange | None = None

    @property
    def idle(self) -> bool:
        return self.inner.idle

    @idle.setter
    def idle(self, idle: bool) -> None:
        self.inner.idle = idle

    def post_receive(self, source: int, tag: int, buffer: Buffer, arrived: Arrived | None = None) -> Request:
        request = self.inner.post_receive(source, tag, buffer, arrived)
        if self._delay_of(tag) is None:
            return request
        stamp = _encode_time()
        moment = self.inner.post_receive(source, tag + STAMP_TAG, stamp)
        return _PacedMessage(request, stamp, moment, self._offsets_s[self.rank] - self._offsets_s.get(source, 0.0))

    def send(self, destination: int, tag: int, buffer: Buffer, ready: Ready | None = None) -> Request:
        """Send a message at once; its timing starts when the previous messages on the link have arrived."""
        request, delay_s = self.inner.send(destination, tag, buffer, ready), self._delay_of(tag)
        if delay_s is None:
            return request
        begin_s = max(time.perf_counter(), self._link_free_s.get((delay_s, destination), 0.0))
        end_s = self._link_free_s[delay_s, destination] = begin_s + delay_s(self.rank, destination, buffer.size)
        stamp = _encode_time(end_s)
        return _PacedMessage(request, stamp, self.inner.send(destination, tag + STAMP_TAG, stamp), 0.0)

    def group(self, ranks: tuple[int, ...], number: int) -> Group:
        assert number < _SUM_TAG // 2, "group numbers share the tags with messages"
        return self.inner.group(ranks, number)

    def dissolve(self, group: Group) -> None:
        self.inner.dissolve(group)

    def exchange(self, request: Exchange) -> Request:
        duration_s, offset_s = self._exchange_s(request.number, request.sums), self._offsets_s[self.rank]
        self._last_exchange = _PacedExchange(request, self.inner, self.rank, offset_s, duration_s, self._last_exchange)
        return self._last_exchange

    def wait(self, request: Request) -> None:
        """Wait until the message has been transferred and its time has come, for both sender and receiver."""
        if not isinstance(request, _PacedMessage | _PacedExchange):
            self.inner.wait(request)
            return
        for part in request.moves:
            self.inner.wait(part)
        self._sleeper.until(request.moment_s)

    def pending(self) -> int:
        """Count pending messages, including timestamps."""
        return self.inner.pending()

    def close(self) -> None:
        """Do nothing; ``inner`` stays open."""
