"""Stages of several ranks as the search finds them: as good as trying everything, on one host only, and only where that pays."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from hetero_mpi.planning.analysis.calibration import GroupSums, drifted_profile
from hetero_mpi.planning.bounds import filling_bounds_s, fluid_bound_s
from hetero_mpi.planning.decision import groups as group_search
from hetero_mpi.planning.decision.decide import decide
from hetero_mpi.planning.decision.groups import MIN_GAIN_RATIO
from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.decision.rules import plan_problems
from hetero_mpi.planning.memory_model import MemoryModel, predict_memory
from hetero_mpi.planning.orders.warm_up import scheduled_depths
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, HostProfile, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.training.replan import ReplanQuestion, answer
from tests.planning.test_group_costs import HEADS, divisible, scaled
from tests.support.planning_samples import SEQUENCE, make_model, make_profile
from tests.support.seeds import seeds


def boxes(hosts: str, slowness: Sequence[float], blocks: int = 4, memory: int = 10**7, **link: float) -> ClusterProfile:
    """A rank for each letter, on the host of that name."""
    link = {"latency_s": 1e-4, "bytes_per_s": 1e6, **link}
    profile = make_profile(slowness, divisible(make_model(blocks)), memory, **link)
    return replace(profile, devices=tuple(replace(d, host=h) for d, h in zip(profile.devices, hosts, strict=True)))


def asked(batch: int, sizes: tuple[int, ...] = (1,), **other: object) -> PlanRequest:
    return PlanRequest(batch, SEQUENCE, sizes, max_pipelines=batch, groups=True, **other)  # type: ignore[arg-type]


def held(plan: Plan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(stage.ranks, stage.shares) for _, _, stage in plan.numbered]


def every_plan(profile: ClusterProfile, batch: int) -> Iterator[Plan]:
    """All plans of one pipeline: every order of ranks and groups of a host, every cut, all shares, classic depths."""
    layers, heads = len(profile.model.layers), profile.model.heads
    assert heads is not None
    everybody = range(len(profile.devices))
    sets = [s for n in range(1, len(everybody) + 1) for s in itertools.combinations(everybody, n)]
    sets = [s for s in sets if len({profile.devices[rank].host for rank in s}) == 1 and len(s) <= heads]
    for count in range(1, len(everybody) + 1):
        for chosen in itertools.permutations(sets, count):
            if len({rank for s in chosen for rank in s}) < sum(map(len, chosen)):
                continue
            depths = scheduled_depths("1f1b", count, batch)
            for cuts in itertools.combinations(range(1, layers), count - 1):
                ends = (0, *cuts, layers)
                for shares in itertools.product(*(list(_shares(len(s), heads)) for s in chosen)):
                    stages = tuple(
                        StagePlan(ranks, ends[i], ends[i + 1], depths[i], shares=shares[i])
                        for i, ranks in enumerate(chosen)
                    )
                    yield Plan((PipelinePlan(stages, 1, batch),), batch, SEQUENCE, layers)


def _shares(count: int, heads: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield ()
        return
    for cuts in itertools.combinations(range(1, heads), count - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, heads)))


@seeds(12, 4)
def test_no_plan_of_one_pipeline_is_much_shorter_than_what_is_found(seed: int) -> None:
    draw = random.Random(seed)
    slowness = [draw.choice((0.5, 1.0, 1.0, 2.0)) for _ in range(3)]
    link = {"latency_s": draw.choice((1e-4, 1e-2, 0.1)), "bytes_per_s": draw.choice((1e4, 1e6))}
    profile = boxes("aab", slowness, 3, **link)
    profile = replace(profile, model=replace(profile.model, heads=4))
    batch = draw.choice((1, 2, 3))
    best_s = min(outlined(plan, profile).step_s for plan in every_plan(profile, batch))
    found = decide(profile, asked(batch))
    assert found is not None
    assert found.step_s <= best_s / (1 - MIN_GAIN_RATIO) * (1 + 1e-9)


def test_one_long_sequence_is_computed_by_all_ranks_of_the_fastest_host_in_proportion_to_their_speeds() -> None:
    profile = boxes("aabb", (1.0, 2.0, 4.0, 4.0))
    report = make_plan(profile, asked(1))
    assert held(report.plan) == [((0, 1), (5, 3))] or held(report.plan) == [((0, 1), (6, 2))]
    without = make_plan(profile, replace(asked(1), groups=False))
    assert report.predicted_step_s < (1 - MIN_GAIN_RATIO) * without.predicted_step_s
    shares = " and ".join(map(str, held(report.plan)[0][1]))
    assert f"ranks 0 and 1 share the model (tensor parallelism): {shares} of {HEADS} key/value heads" in report.reasons
    ratio = without.predicted_step_s / report.predicted_step_s
    assert any(r.startswith(f"the best plan without tensor parallelism: {ratio:.2f}x") for r in report.reasons)
    complete_plan(report.plan, profile, asked(1))  # and it can be run again from its file


def of_experts(profile: ClusterProfile, slow_rest: float, slow_experts: float) -> ClusterProfile:
    """Two ranks and ten experts. Of a block experts take 0.8. Rank 1 takes ``slow_rest`` times as long for the rest, and
    ``slow_experts`` times for experts."""

    def member(device: DeviceProfile, rest: float, experts: float) -> DeviceProfile:
        """Half of the experts is half of their time, half of the heads 0.6 of the rest's."""

        def of(kind: str, heads: float, share: float) -> LayerTimes:
            factor = 0.2 * rest * heads + 0.8 * experts * share if kind == "block" else rest * heads
            return scaled(device.layers[kind], factor)

        halves = {kind: of(kind, 0.6, 0.5) for kind in device.layers}
        without = {kind: of(kind, 0.6, 0.0) for kind in device.layers}
        return replace(
            device, layers={k: of(k, 1.0, 1.0) for k in device.layers}, halved=halves, without_experts=without
        )

    fast, slow = profile.devices
    devices = member(fast, 1.0, 1.0), member(slow, slow_rest, slow_experts)
    return replace(profile, model=replace(profile.model, experts=10), devices=devices)


def every_group(profile: ClusterProfile) -> Iterator[Plan]:
    """The whole model on both ranks, shared in every way, one sequence a step."""
    layers = len(profile.model.layers)
    for heads, experts, again in itertools.product(range(HEADS + 1), range(11), (False, True)):
        stage = StagePlan((0, 1), 0, layers, 0, again, shares=(heads, HEADS - heads), experts=(experts, 10 - experts))
        if not stage.idles:
            yield Plan((PipelinePlan((stage,), 1, 1),), 1, SEQUENCE, layers)


@pytest.mark.parametrize("slow_rest", [2.0, 6.0])
@pytest.mark.parametrize("memory", [60_000, 80_000, 100_000, 120_000])
def test_the_fast_rank_has_as_many_heads_and_experts_as_its_memory_holds(memory: int, slow_rest: float) -> None:
    """A block's experts take nine tenths of it, and both ranks need their memory: 60,000 or more bytes and 200,000."""
    profile = boxes("aa", (1.0, 1.0), memory=200_000)
    large = dict.fromkeys(("parameters", "trainable_parameters"), 2000)
    experts = dict.fromkeys(("expert_parameters", "expert_trainable"), 1800)
    divided = dict.fromkeys(("divided_parameters", "divided_trainable"), 1900)
    first, *blocks, last = profile.model.layers
    blocks = [replace(block, parameter_bytes=8000, **large, **divided, **experts) for block in blocks]
    profile = replace(profile, model=replace(profile.model, layers=(first, *blocks, last)))
    profile = of_experts(profile, slow_rest, 1.0)
    fast, slow = profile.devices
    profile = replace(profile, devices=(replace(fast, memory_bytes=memory), slow))
    reserve = asked(1).memory_reserve
    fitting = (
        plan
        for plan in every_group(profile)
        if all(one.peak_bytes <= one.usable_bytes for one in predict_memory(plan, profile, reserve))
    )
    best_s = min(outlined(plan, profile).step_s for plan in fitting)
    found = decide(profile, asked(1))
    assert found is not None and found.step_s <= best_s * (1 + 1e-9)
    ((_, shares),) = held(found.plan)
    assert shares == ((8, 0) if slow_rest > 2 and memory > 60_000 else (6, 2))


@pytest.mark.parametrize(
    ("slow_rest", "slow_experts", "heads", "experts"),
    [
        (2.0, 0.5, (6, 2), (2, 8)),
        (2.0, 1.0, (6, 2), (5, 5)),
        (2.0, 1.4, (6, 2), (6, 4)),
        (6.0, 0.5, (8, 0), (2, 8)),  # without any head it takes as long as rank 0 with all
    ],
)
def test_experts_are_shared_by_how_fast_ranks_are_at_them_and_heads_by_how_fast_they_are_at_the_rest(
    slow_rest: float, slow_experts: float, heads: tuple[int, int], experts: tuple[int, int]
) -> None:
    profile, request = boxes("aa", (1.0, 1.0)), asked(1)
    blocks = [replace(layer, expert_parameters=200, expert_trainable=200) for layer in profile.model.layers[1:-1]]
    layers = (profile.model.layers[0], *blocks, profile.model.layers[-1])
    profile = of_experts(replace(profile, model=replace(profile.model, layers=layers)), slow_rest, slow_experts)
    report = make_plan(profile, request)
    (stage,) = report.plan.pipelines[0].stages
    best_s = min(outlined(plan, profile).step_s for plan in every_group(profile))
    assert report.predicted_step_s == pytest.approx(best_s)
    assert (stage.shares, stage.experts) == (heads, experts)
    assert (
        f"ranks 0 and 1 share the model (tensor parallelism): {heads[0]} and {heads[1]} of 8 key/value heads, "
        f"{experts[0]} and {experts[1]} of 10 experts"
    ) in report.reasons
    complete_plan(report.plan, profile, request)


def test_ranks_beyond_the_number_of_heads_hold_experts() -> None:
    """Of two heads and eight experts, where experts take most of the time."""
    profile = boxes("aaaa", (1.0,) * 4)
    blocks = [replace(layer, expert_parameters=200, expert_trainable=200) for layer in profile.model.layers[1:-1]]
    layers = (profile.model.layers[0], *blocks, profile.model.layers[-1])
    devices = (
        replace(
            device,
            halved={kind: scaled(times, 0.5) for kind, times in device.layers.items()},
            without_experts={k: scaled(t, 0.1 if k == "block" else 0.5) for k, t in device.layers.items()},
        )
        for device in profile.devices
    )
    profile = replace(profile, model=replace(profile.model, layers=layers, heads=2, experts=8), devices=tuple(devices))
    (stage,) = make_plan(profile, asked(1)).plan.pipelines[0].stages
    assert stage.ranks == (0, 1, 2, 3) and sorted(stage.shares) == [0, 0, 1, 1] and stage.experts == (2, 2, 2, 2)


def test_a_gpu_and_a_processor_form_a_group_beside_another_gpu() -> None:
    """Two GPUs and two processors, of which one is slower."""
    profile = boxes("aaaa", (1.0, 1.1, 5.0, 4.0))
    devices = (replace(one, backend="cuda" if one.rank < 2 else "cpu") for one in profile.devices)
    profile = replace(profile, devices=tuple(devices))
    search = group_search.GroupSearch(profile, asked(4), lambda *_: None, [profile.devices])
    found = set(search._groupings())
    assert ((0, 3), (1, 2)) in found and ((0, 1),) in found
    alike = group_search.GroupSearch(boxes("aaaa", (1.0, 1.1, 5.0, 4.0)), asked(4), lambda *_: None, [profile.devices])
    assert ((0, 3), (1, 2)) not in set(alike._groupings())


def test_groups_of_two_hosts_are_stages_of_a_pipeline() -> None:
    plan = make_plan(boxes("aabb", (1.0,) * 4), asked(2)).plan
    assert held(plan) in ([((0, 1), (4, 4)), ((2, 3), (4, 4))], [((2, 3), (4, 4)), ((0, 1), (4, 4))])


@pytest.mark.slow
def test_hosts_on_a_slow_network_whose_ranks_lack_memory_train_side_by_side_each_as_a_group() -> None:
    """No rank holds the model. Stages of a host's ranks would wait for each other, and a pipeline over both hosts for messages."""
    profile = boxes("aabb", (1.0,) * 4, memory=45_000)
    hosts = [device.host for device in profile.devices]
    near = (replace(x, bytes_per_s=1e6 if hosts[x.source] == hosts[x.destination] else 2e4) for x in profile.links)
    profile, request = replace(profile, links=tuple(near)), asked(4, recompute_choices=(False, True))
    found = decide(profile, request)
    assert found is not None and sorted(held(found.plan)) == [((0, 1), (4, 4)), ((2, 3), (4, 4))]
    assert [pipeline.sequences for pipeline in found.plan.pipelines] == [2, 2]
    assert all(one.peak_bytes <= one.usable_bytes for one in predict_memory(found.plan, profile, 0.05))
    assert not [*plan_problems(found.plan, profile)]
    one_pipeline = decide(profile, replace(request, max_pipelines=1))
    assert one_pipeline is not None and one_pipeline.plan.leader_of and found.without_groups_s is not None
    assert found.step_s < (1 - MIN_GAIN_RATIO) * min(found.without_groups_s, one_pipeline.step_s)


def test_a_fast_rank_by_itself_takes_more_sequences_than_a_group_beside_it() -> None:
    """Without the group rank 0 takes 13.8 s for its sequence; rank 2 takes 12.4 s for two."""
    found = decide(boxes("aab", (1.0, 1.5, 0.45)), asked(3))
    assert found is not None and sorted(held(found.plan)) == [((0, 1), (5, 3)), ((2,), ())]
    assert {one.stages[0].ranks: one.sequences for one in found.plan.pipelines} == {(0, 1): 1, (2,): 2}
    assert found.step_s < (1 - MIN_GAIN_RATIO) * 13.8


@pytest.mark.slow
def test_pairs_of_a_host_of_four_and_the_pair_of_another_are_three_pipelines() -> None:
    found = decide(boxes("aaaabb", (1.0,) * 6), asked(3))
    assert found is not None and sorted(held(found.plan)) == [((n, n + 1), (4, 4)) for n in (0, 2, 4)]
    assert len(found.plan.pipelines) == 3


@seeds(20, 5)
def test_no_plan_of_some_pipelines_is_below_the_bound_of_that_many(seed: int) -> None:
    draw = random.Random(seed)
    slowness = [draw.choice((0.5, 1.0, 2.0)) for _ in range(4)]
    profile = boxes(
        draw.choice(("aabb", "abcd", "aaaa")), slowness, draw.randint(2, 5), bytes_per_s=draw.choice((500, 1e3, 1e5))
    )
    batch, layers = draw.choice((2, 3, 5, 8)), len(profile.model.layers)
    bounds_s = filling_bounds_s(profile, asked(batch))
    for _ in range(300):
        number = draw.choice(list(bounds_s))
        ranks = draw.sample(range(4), draw.randint(number, 4))
        ends = [0, *sorted(draw.sample(range(1, len(ranks)), number - 1)), len(ranks)]
        shares = [0, *sorted(draw.sample(range(1, batch), number - 1)), batch]
        pipelines = []
        for (begin, end), (before, after) in zip(itertools.pairwise(ends), itertools.pairwise(shares), strict=True):
            count = end - begin
            cuts = [0, *sorted(draw.sample(range(1, layers), count - 1)), layers]
            own = (
                StagePlan(
                    (ranks[begin + k],),
                    cuts[k],
                    cuts[k + 1],
                    min(after - before, draw.choice((1, 3)) * (count - 1 - k)),
                )
                for k in range(count)
            )
            pipelines.append(PipelinePlan(tuple(own), 1, after - before))
        step_s = outlined(Plan(tuple(pipelines), batch, SEQUENCE, layers), profile).step_s
        assert bounds_s[number] <= step_s * (1 + 1e-9)


def test_the_bound_of_as_many_pipelines_as_like_ranks_is_a_rank_s_time_or_that_of_their_sums() -> None:
    """A sequence takes 13.8 s; three quarters of 3,600 gradients leave and reach every rank."""
    for bytes_per_s, least_s in ((1e6, 13.8), (500.0, 4 * 3600 * 3 / 4 / 500)):
        profile = boxes("abcd", (1.0,) * 4, bytes_per_s=bytes_per_s)
        assert filling_bounds_s(profile, asked(4))[4] == pytest.approx(least_s)


def test_a_layer_larger_than_every_rank_of_a_host_is_held_by_two_of_them() -> None:
    """The head's parameters and their state take 640 kB; a rank has 400."""
    profile, request = boxes("aa", (1.0, 1.0), memory=400_000), asked(2)
    *others, head = profile.model.layers
    large = dict.fromkeys(("parameters", "trainable_parameters", "divided_parameters", "divided_trainable"), 40_000)
    head = replace(head, parameter_bytes=160_000, **large)
    profile = replace(profile, model=replace(profile.model, layers=(*others, head)))
    assert decide(profile, replace(request, groups=False)) is None
    report = make_plan(profile, request)
    assert [ranks for ranks, _ in held(report.plan)] == [(0, 1)]
    assert all(one.peak_bytes <= one.usable_bytes for one in predict_memory(report.plan, profile, 0.05))
    assert "no plan without tensor parallelism fits in memory" in report.reasons


@pytest.mark.parametrize("memory", [0, 1])
def test_a_rank_without_memory_holds_nothing(memory: int) -> None:
    profile = boxes("aaa", (1.0, 1.0, 1.0))
    first, *others = profile.devices
    profile = replace(profile, devices=(replace(first, memory_bytes=memory), *others))
    assert {rank for ranks, _ in held(make_plan(profile, asked(1)).plan) for rank in ranks} <= {1, 2}


def test_a_group_in_its_hosts_memory_fits_into_that_memory() -> None:
    profile = boxes("aab", (1.0, 1.0, 1.0))
    devices = tuple(replace(device, shares_host_memory=device.host == "a") for device in profile.devices)
    for memory in (60_000, 80_000, 10**6):
        small = replace(profile, devices=devices, hosts=(HostProfile("a", memory, "made up"),))
        found = decide(small, asked(1))
        assert found is not None
        assert MemoryModel(small, asked(1)).check_hosts(found.plan)


def test_never_a_group_across_hosts() -> None:
    found = decide(boxes("ab", (1.0, 1.0)), asked(1))
    assert found is not None and not found.plan.leader_of


@pytest.mark.slow
def test_layers_move_from_a_group_that_has_become_slow_and_no_group_is_formed_while_a_run_goes_on() -> None:
    profile, request = boxes("aabb", (1.0,) * 4), replace(asked(2), max_pipelines=1)
    report = make_plan(profile, request)
    first = report.plan.pipelines[0].stages[0]
    # Of all ranks a ratio is kept, but a group is measured by the first of its ranks.
    ratios = {**dict.fromkeys(range(4), 1.0), first.ranks[0]: 3.0}
    reply = answer(ReplanQuestion(drifted_profile(profile, report.plan, ratios), request, report, 1000, 0.1))
    after = {stage.ranks: stage.last - stage.first for _, _, stage in reply.report.plan.numbered}
    assert after.get(first.ranks, 0) < first.last - first.first
    assert reply.prospect.then_s < reply.prospect.now_s
    groups = {GroupSums(stage.ranks): 1e5 for _, _, stage in report.plan.numbered if stage.grouped}
    reply = answer(ReplanQuestion(drifted_profile(profile, report.plan, dict(groups)), request, report, 1000, 0.1))
    assert groups and not reply.report.plan.leader_of, "groups that have become slow are left"
    apart = make_plan(profile, replace(request, groups=False))
    reply = answer(ReplanQuestion(drifted_profile(profile, apart.plan, {0: 3.0}), request, apart, 1000, 0.1))
    assert not reply.report.plan.leader_of


@pytest.mark.parametrize(
    ("change", "request_changes"),
    [({"heads": None}, {}), ({"heads": 1}, {}), ({}, {"groups": False}), ({}, {"schedule": "1f1b"})],
)
def test_no_group_where_there_can_be_none(change: dict[str, object], request_changes: dict[str, object]) -> None:
    profile = boxes("aa", (1.0, 1.0))
    profile = replace(profile, model=replace(profile.model, **change))  # type: ignore[arg-type]
    found = decide(profile, replace(asked(1), **request_changes))  # type: ignore[arg-type]
    assert found is not None and not found.plan.leader_of


def test_emulated_ranks_hold_their_stages_alone() -> None:
    found = decide(replace(boxes("aa", (1.0, 1.0)), source="emulated: made up"), asked(1))
    assert found is not None and not found.plan.leader_of


def test_a_batch_that_like_ranks_divide_is_not_searched_for_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines side by side have nothing to wait for: the bound says so, and no cluster with groups is made."""
    made: list[object] = []
    monkeypatch.setattr(group_search, "contracted", lambda *arguments: made.append(arguments))
    for hosts, batch in (("aa", 8), ("aabb", 8)):
        request, profile = asked(batch, (1, 2)), boxes(hosts, (1.0,) * len(hosts))
        found, plain = decide(profile, request), decide(profile, replace(request, groups=False))
        assert found == plain
    assert not made


@seeds(20, 5)
def test_no_plan_with_groups_is_below_the_fluid_bound(seed: int) -> None:
    draw = random.Random(seed)
    slowness = [draw.choice((0.5, 1.0, 3.0)) for _ in range(4)]
    profile = boxes(draw.choice(("aabb", "aaaa", "aaab")), slowness, draw.randint(2, 5))
    batch = draw.choice((1, 2))
    bound_s = fluid_bound_s(profile, asked(batch))
    plans = [plan for plan in every_plan(boxes("aab", slowness[:3], 2), batch) if plan.leader_of]
    small = boxes("aab", slowness[:3], 2)
    assert min(outlined(plan, small).step_s for plan in plans) >= fluid_bound_s(small, asked(batch))
    found = decide(profile, asked(batch))
    assert found is not None and found.step_s >= bound_s
