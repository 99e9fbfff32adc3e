"""The fastest of all plans of a small instance, by loops over everything: knows nothing of the planner's search.

It leaves out only what is provably alike: warm-up deeper than there are micro-batches, or deeper than that of a stage before
(a deadlock), depth and split backward of a lone stage, for which nobody waits, and rings of pipelines turned round.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetero_mpi.planning.durations import duration, finished_layers_s, sum_s, tied_s
from hetero_mpi.planning.memory import state_on_device, usable_bytes
from hetero_mpi.planning.memory_model import predict_hosts, predict_memory
from hetero_mpi.planning.outline import spans_s
from hetero_mpi.planning.owners import owned_state_bytes, weighted
from hetero_mpi.planning.schedule import Action, Op, reduced_layers, tied_heads
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, HostProfile, LayerTimes, LinkProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD
from tests.support.planning_samples import SEQUENCE, make_device, make_model, make_profile


def joint_instance(seed: int, ranks: int, blocks: int, batch: int) -> tuple[ClusterProfile, PlanRequest]:
    """Unlike devices, uneven links, memory that is short on devices and hosts, and a request that leaves much open."""
    draw = random.Random(seed)
    frozen = draw.random() < 0.15
    model = make_model(blocks, tied=draw.random() < 0.3)
    layers = [replace(layer, deferred_bytes_per_token=draw.choice((0.0, 150.0))) for layer in model.layers]
    if frozen:
        layers[0], layers[-1] = (replace(layers[i], trainable_parameters=0) for i in (0, -1))
    model = replace(model, layers=tuple(layers))
    measured = draw.random() < 0.8

    def curve(offset: float, seconds: float) -> Curve:
        return Curve((SEQUENCE, 2 * SEQUENCE), (offset + seconds, offset + 2 * seconds))

    def times(slowness: float, seconds: float) -> LayerTimes:
        offset, back = draw.uniform(0, 0.5) * slowness, draw.uniform(1.2, 3.0)
        forward, total = seconds * slowness, seconds * slowness * back
        share = draw.uniform(0.3, 0.7)
        return LayerTimes(
            curve(offset, forward),
            curve(offset, total),
            curve(offset, total + forward * draw.uniform(0.5, 1.2)) if draw.random() < 0.5 else None,
            curve(offset, total * share) if measured else None,
            curve(0.0, total * (1 - share) * 1.05) if measured else None,
        )

    alike = draw.random() < 0.25
    shared = ranks > 1 and draw.random() < 0.25
    devices: list[DeviceProfile] = []
    for rank in range(ranks):
        slowness = draw.choice((0.5, 1.0, 1.0, 3.0))
        device = make_device(rank, slowness, draw.choice((10_000_000, 10_000_000, 45_000, 60_000, 80_000)))
        kinds = ((EMBEDDING, 0.1), ("block", 1.0), (HEAD, draw.uniform(0.2, 3)))
        device = replace(
            device,
            host=f"host{max(0, rank - 1) if shared else rank}",
            layers={kind: times(slowness, seconds) for kind, seconds in kinds},
            forward_overhead_s=draw.choice((0.0, 0.1)),
            optimizer_s_per_parameter=draw.choice((0.0, 1e-4)),
            shares_host_memory=shared,
        )
        devices.append(replace(devices[0], rank=rank, host=device.host) if alike and rank else device)
    fast = draw.random() < 0.5
    even = LinkProfile(0, 0, draw.uniform(0, 0.5), draw.choice((2e3, 1e4, 1e5)), False)
    links = []
    for a, b in itertools.permutations(range(ranks), 2):
        own = LinkProfile(a, b, draw.uniform(0, 0.2), draw.choice((1e5, 1e9) if fast else (2e3, 1e4, 1e5)), False)
        links.append(replace(even, source=a, destination=b) if alike else own)
    hosts = tuple(
        HostProfile(name, draw.choice((60_000, 100_000, 10**9)), "made up", shared_nic=draw.random() < 0.3)
        for name in sorted({device.host for device in devices})
        if shared
    )
    profile = replace(make_profile([1.0] * ranks, model), devices=tuple(devices), links=tuple(links), hosts=hosts)
    request = PlanRequest(
        batch,
        SEQUENCE,
        tuple(size for size in (1, 2, 3, 4) if batch % size == 0),
        max_pipelines=draw.choice((1, 2, 3, 3)),
        recompute_choices=draw.choice(((False,), (False, True), (False, True), (True,))),
        split_choices=draw.choice(((False,), (False, True), (False, True), (True,))) if measured else (False,),
        schedule=draw.choice(("auto", "auto", "auto", "auto", "gpipe", "1f1b", "split" if measured else "auto")),
        allow_idle=draw.random() < 0.85 or ranks > blocks + 2,
        memory_reserve=draw.choice((0.0, 0.05)),
    )
    return profile, request


@dataclass
class Timed:
    """A pipeline, when its stages have done their last backward, when their layers' gradients are whole, its STEP."""

    pipeline: PipelinePlan
    clocks: dict[int, float]
    whole: dict[tuple[int, int], float]
    step_s: float

    @property
    def end_s(self) -> float:
        return max(self.clocks.values()) + self.step_s


def pipelines(
    profile: ClusterProfile, request: PlanRequest, order: tuple[int, ...], share: int
) -> Iterator[PipelinePlan]:
    """Every pipeline over the ranks of ``order``."""
    layers, count = len(profile.model.layers), len(order)
    for inner in itertools.combinations(range(1, layers), count - 1):
        cuts = (0, *inner, layers)
        for size in request.micro_batch_choices:
            if share % size:
                continue
            for split in splits(request, count):
                for warm_up in warm_ups(request, count, share // size):
                    for again in itertools.product(request.recompute_choices, repeat=count):
                        stages = tuple(
                            StagePlan((r,), cuts[i], cuts[i + 1], warm_up[i], again[i]) for i, r in enumerate(order)
                        )
                        yield PipelinePlan(stages, size, share, split)


def splits(request: PlanRequest, stages: int) -> tuple[bool, ...]:
    if stages == 1:
        return (False,)
    return {"auto": request.split_choices, "split": (True,)}.get(request.schedule, (False,))


def warm_ups(request: PlanRequest, stages: int, count: int) -> list[tuple[int, ...]]:
    if request.schedule == "gpipe":
        return [(count,) * stages]
    if request.schedule != "auto":
        return [tuple(min(stages - 1 - i, count) for i in range(stages))]
    if stages == 1:
        return [(0,)]
    every = itertools.product(range(count), repeat=stages)
    return [warm_up for warm_up in every if all(a >= b for a, b in itertools.pairwise(warm_up))]


class Prices:
    """Seconds of actions and peaks of stages, each worked out once: they depend on the stage and its neighbour alone."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request, self.layer_count = profile, request, len(profile.model.layers)
        self.known: dict[object, float] = {}
        self.finished: dict[object, dict[int, float]] = {}

    def plan(self, pipeline: PipelinePlan) -> Plan:
        return Plan((pipeline,), pipeline.sequences, self.request.sequence_length, self.layer_count)

    def seconds(self, op: Op, pipeline: PipelinePlan, s: int) -> float:
        stage, peer = pipeline.stages[s], {Op.SEND_F: s + 1, Op.SEND_B: s - 1}.get(op, s)
        key = (
            op,
            pipeline.micro_batch,
            stage.ranks,
            pipeline.stages[peer].ranks,
            stage.first,
            stage.last,
            stage.recompute,
        )
        if key not in self.known:
            self.known[key] = duration(Action(op, s, 0), self.plan(pipeline), self.profile)
        return self.known[key]

    def whole_after_s(self, op: Op, pipeline: PipelinePlan, s: int) -> dict[int, float]:
        stage = pipeline.stages[s]
        key = (op, pipeline.micro_batch, stage.ranks, stage.first, stage.last, stage.recompute)
        if key not in self.finished:
            self.finished[key] = finished_layers_s(Action(op, s, 0), self.plan(pipeline), self.profile)
        return self.finished[key]

    def step_s(self, pipeline: PipelinePlan) -> float:
        key = tuple((stage.ranks, stage.last) for stage in pipeline.stages)
        if key not in self.known:
            steps = (Action(Op.STEP, s) for s in range(len(pipeline.stages)))
            self.known[key] = max(duration(step, self.plan(pipeline), self.profile) for step in steps)
        return self.known[key]

    def busiest_s(self, pipeline: PipelinePlan) -> float:
        """What the busiest rank computes, one action after the other: no step with this pipeline is shorter."""
        busy = []
        for s in range(len(pipeline.stages)):
            ops = (Op.F, Op.I, Op.W) if pipeline.split_backward and s else (Op.F, Op.B)
            busy.append(pipeline.micro_batches * sum(self.seconds(op, pipeline, s) for op in ops))
        return max(busy)

    def fit(self, pipeline: PipelinePlan, pipelines: float) -> bool:
        """Does every stage fit on its device, where as many pipelines own as much each of the state?"""
        for s, stage in enumerate(pipeline.stages):
            lists = (pipeline.split_backward, s == 0, pipeline.micro_batches, pipeline.stages[0].warm_up, stage.warm_up)
            key = (stage.first, stage.last, stage.recompute, pipeline.micro_batch, lists)
            if key not in self.known:
                memory = predict_memory(self.plan(pipeline), self.profile)
                self.known[key] = next(m.peak_bytes for m in memory if m.rank == stage.ranks[0])
            if self.known[key] - _elsewhere_bytes(self.profile, stage, pipelines) > usable_bytes(
                self.profile.devices[stage.ranks[0]].memory_bytes, self.request.memory_reserve
            ):
                return False
        return True


def timed(pipeline: PipelinePlan, prices: Prices) -> Timed:
    """When the stages are done, by ``spans_s``."""
    count, splits_here = len(pipeline.stages), pipeline.split_backward
    split = [splits_here and s > 0 for s in range(count)]
    backward = [prices.seconds(Op.I if split[s] else Op.B, pipeline, s) for s in range(count)]
    weights = [prices.seconds(Op.W, pipeline, s) if split[s] else 0.0 for s in range(count)]
    _, clocks = spans_s(
        [prices.seconds(Op.F, pipeline, s) for s in range(count)],
        backward,
        [prices.seconds(Op.SEND_F, pipeline, s) for s in range(count - 1)],
        [prices.seconds(Op.SEND_B, pipeline, s + 1) for s in range(count - 1)],
        [stage.warm_up for stage in pipeline.stages],
        pipeline.micro_batches,
        weights if splits_here else None,
    )
    whole = {}
    for s, stage in enumerate(pipeline.stages):
        begun = clocks[s] - (weights[s] if split[s] else backward[s])
        for layer, after in prices.whole_after_s(Op.W if split[s] else Op.B, pipeline, s).items():
            whole[stage.ranks[0], layer] = begun + after
    own = {stage.ranks[0]: clocks[s] for s, stage in enumerate(pipeline.stages)}
    alone = pipeline.sequences == prices.request.global_batch  # else others may own what it steps
    return Timed(pipeline, own, whole, prices.step_s(pipeline) if alone else 0.0)


def together_s(parts: list[Timed], plan: Plan, profile: ClusterProfile) -> float:
    """The end of a step: gradient all-reduces, then STEP, where messages do not queue for NICs."""
    ends = {rank: seconds for part in parts for rank, seconds in part.clocks.items()}
    whole = {key: seconds for part in parts for key, seconds in part.whole.items()}
    numbered = plan.numbered
    for head, embedding in tied_heads(plan, profile.model).items():
        source, destination = numbered[head][2].ranks[0], numbered[embedding][2].ranks[0]
        come = whole[source, plan.layers - 1] + tied_s(profile, destination, source)
        whole[destination, 0] = max(whole[destination, 0], come)
        ends[source] = max(ends[source], come)
    free = dict.fromkeys(ends, 0.0)
    for layer in sorted(reduced_layers(plan, profile.model), reverse=True):
        ranks = plan.holders[layer]
        start = max(max(free[rank], whole[rank, layer]) for rank in ranks)
        free.update(dict.fromkeys(ranks, start + sum_s(plan, profile, layer)))
    steps = (Action(Op.STEP, number) for number in range(len(numbered)))
    return max(*ends.values(), *free.values()) + max(duration(step, plan, profile) for step in steps)


def partitions(profile: ClusterProfile, request: PlanRequest) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Orders of ranks, each for a pipeline; rings of three in both senses."""
    ranks = [device.rank for device in profile.devices if profile.model.dtype in device.dtypes]
    layers = len(profile.model.layers)
    for used in range(1, len(ranks) + 1):
        if not request.allow_idle and used < min(len(ranks), layers * request.max_pipelines):
            continue
        for chosen in itertools.permutations(ranks, used):
            for ends in itertools.product((False, True), repeat=used - 1):
                marks = [0, *(i + 1 for i, end in enumerate(ends) if end), used]
                partition = tuple(chosen[a:b] for a, b in itertools.pairwise(marks))
                longest = max(map(len, partition))
                small_enough = len(partition) <= min(request.max_pipelines, request.global_batch) and longest <= layers
                if small_enough and partition[0] == min(partition):  # the ring turned round is the same
                    yield partition


def brute_force_s(profile: ClusterProfile, request: PlanRequest) -> float:
    """The least step time of all plans that fit; infinite: none does."""
    layers, best = len(profile.model.layers), math.inf
    nics = any(host.shared_nic for host in profile.hosts)
    prices, known = Prices(profile, request), {}  # type: tuple[Prices, dict[tuple[tuple[int, ...], int], list[Timed]]]
    for partition in partitions(profile, request):
        for inner in itertools.combinations(range(1, request.global_batch), len(partition) - 1):
            shares = [b - a for a, b in itertools.pairwise((0, *inner, request.global_batch))]
            for order, share in zip(partition, shares, strict=True):
                if (order, share) not in known:
                    possible = pipelines(profile, request, order, share)
                    least = 1 if len(partition) == 1 else math.inf  # others may own all that it trains
                    promising = (one for one in possible if prices.fit(one, least) and prices.busiest_s(one) < best)
                    fitting = [timed(one, prices) for one in promising]
                    known[order, share] = sorted(fitting, key=lambda one: one.end_s)
            own = [known[order, share] for order, share in zip(partition, shares, strict=True)]
            for parts in itertools.product(*own):
                if parts[0].end_s >= best:
                    break  # and so are all that follow: whatever else happens, a pipeline's own end is not earlier
                if max(part.end_s for part in parts) >= best:
                    continue
                plan = Plan(tuple(p.pipeline for p in parts), request.global_batch, request.sequence_length, layers)
                alone = [predict_hosts(prices.plan(p.pipeline), profile, request.memory_reserve) for p in parts]
                peaks: Counter[str] = Counter()
                for host in itertools.chain(*alone):
                    peaks[host.host] += host.peak_bytes
                if all(prices.fit(part.pipeline, 1) for part in parts) and all(
                    peaks[host.host] <= host.usable_bytes for host in itertools.chain(*alone)
                ):
                    best = min(best, simulate(plan, profile).step_s if nics else together_s(list(parts), plan, profile))
                    continue
                plan = with_state_dealt(plan, profile, request.memory_reserve)
                if memory_suffices(plan, profile, request.memory_reserve):
                    best = min(best, simulate(plan, profile).step_s)
    return best


def with_state_dealt(plan: Plan, profile: ClusterProfile, reserve: float) -> Plan:
    """The plan with the optimizer's state dealt evenly, or where that does not fit by what ranks leave free when they own none."""
    if memory_suffices(plan, profile, reserve):
        return plan
    owned = owned_state_bytes(plan, profile.model)
    free = {
        one.rank: one.usable_bytes - one.peak_bytes + owned[one.rank] for one in predict_memory(plan, profile, reserve)
    }
    return weighted(plan, free)


def memory_suffices(plan: Plan, profile: ClusterProfile, reserve: float) -> bool:
    """Does every rank and every host hold what the plan asks of its memory?"""
    memory = *predict_memory(plan, profile, reserve), *predict_hosts(plan, profile, reserve)
    return all(one.peak_bytes <= one.usable_bytes for one in memory)


def _elsewhere_bytes(profile: ClusterProfile, stage: StagePlan, pipelines: float) -> int:
    """Bytes of masters and moments of a stage that other ranks own, where so many pipelines own as much each.

    Adapters' state is too small to matter.
    """
    if pipelines == 1 or not profile.model.trained_whole:
        return 0
    owned = profile.model.owned_bytes(stage.first, stage.last) * state_on_device(profile, stage)
    return math.floor(owned * (1 - 1 / pipelines))
