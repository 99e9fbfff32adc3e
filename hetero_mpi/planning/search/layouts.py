"""Choose the number, ranks and batch shares of data-parallel pipelines on many ranks.

For each promising pipeline count, dynamic programming estimates the best sequence of columns (``columns``). The best estimates
are simulated, and batch shares are balanced. Effort is limited in candidates, not seconds, so plans are deterministic.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_mpi.planning.memory import StageMode
from hetero_mpi.planning.memory_model import MemoryModel
from hetero_mpi.planning.search.columns import Chains, Column, ColumnOrder, along_hosts, in_columns, in_hosts
from hetero_mpi.planning.search.costs import Costs, costs_by_size
from hetero_mpi.planning.search.pipelines import Fitting, Line
from hetero_mpi.planning.search.rounds import Clock, LocalSearch
from hetero_mpi.planning.tables import MAX_PAIRED_RANKS, Floats, levels
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

MAX_DENSE_COUNT, COUNT_RATIO = 12, 1.12
"""All pipeline counts up to ``MAX_DENSE_COUNT`` are tried; larger counts grow by a factor of ``COUNT_RATIO``."""
COARSE_COUNTS = 6, 1.25
"""The same two limits for clusters of more than ``MAX_PAIRED_RANKS`` ranks."""
MAX_COLUMNS = 96
"""Maximum number of columns; no model benefits from this many stages."""
MIN_LINES = 1
"""Number of sort keys (``_KEYS``) tried per layout at first; all of them are tried for the best layouts."""
MAX_LAYOUTS = 6
MAX_LAYOUTS_PER_COUNT = 2
"""Maximum number of layouts simulated, in total and per pipeline count."""
MAX_IMPROVED, MAX_SLOWDOWN = 3, 1.1
"""Maximum number of pipeline counts whose batch shares are balanced, and their maximum step time relative to the best."""
PACES = ((1.0, 0.1), (1.0, 0.5), (1.0, 1.5), (0.9, 0.5))
"""(fraction of the estimated period, allowance in periods) pairs from which depths are guessed. With a single pair, plans for 32
to 64 ranks are up to 8 % slower."""


@dataclass
class _Layout:
    """Columns and the best order in which a pipeline passes through them."""

    chains: Chains
    line: ColumnOrder
    estimate_s: float


@dataclass
class _SimulatedLayout:
    """A layout with its fastest simulated pipeline."""

    chains: Chains
    chain: Fitting
    step_s: float

    def pipelines(self, sequences: Sequence[int]) -> list[Fitting]:
        """One pipeline per batch share in ``sequences``, timed on its own ranks."""
        columns, line = self.chains.columns, self.chain.line
        assert columns.base is not None
        return [
            columns.base.timed(
                line._replace(ranks=tuple(columns.members[k][p] for k in line.ranks), sequences=share), self.chain.ways
            )
            for p, share in enumerate(sequences)
        ]


def best_layouts(profile: ClusterProfile, request: PlanRequest, slices: Sequence[int] = ()) -> list[tuple[float, Plan]]:
    """The best plan for each promising pipeline count, with its step time, fastest first. Deterministic.

    Step times are those of ``Clock``, or slightly longer if a column contains different devices.
    """
    by_size = costs_by_size(profile, request, slices)
    clock, best_by_count = Clock(by_size), dict[int, _SimulatedLayout]()
    for layout in _sized(by_size):
        best_by_count.setdefault(layout.chains.pipelines, layout)
    least_s = min((layout.step_s for layout in best_by_count.values()), default=0.0)
    effort = clock.first.effort
    near = [layout for layout in best_by_count.values() if layout.step_s <= MAX_SLOWDOWN**effort * least_s]
    plans = [_finished(layout, clock) for layout in near[: effort * MAX_IMPROVED]]
    memory = MemoryModel(profile, request)
    return [plan for plan in sorted(plans, key=lambda plan: plan[0]) if memory.check_hosts(plan[1])]


def _sized(by_size: Mapping[int, Costs]) -> list[_SimulatedLayout]:
    """Simulate the best layouts at the smallest micro-batch size, then the fastest of them at larger sizes."""
    smallest, *larger = by_size.values()
    simulated = _simulated(_ranked(smallest))
    for costs in larger:
        again = [
            _estimated(Chains(in_columns(costs, layout_found.chains.columns.members)), MIN_LINES)
            for layout_found in simulated[: costs.effort * MAX_IMPROVED]
            if layout_found.chains.pipelines <= costs.request.global_batch // costs.micro_batch
        ]
        simulated += _simulated([layout for layout in again if layout is not None])
    return sorted(simulated, key=lambda layout_found: layout_found.step_s)


def _pipeline_counts(costs: Costs) -> list[int]:
    """Pipeline counts to try, limited by ranks, batch size and memory."""
    request, room = costs.request, float(costs.usable.sum())
    shares = request.global_batch // costs.micro_batch  # at least one micro-batch each

    def fits_memory(number: int) -> bool:
        all_layers = 0, costs.layer_count
        tables = (costs.stage_bytes(*all_layers, StageMode(way.recompute), number) for way in costs.ways)
        return any(way.streamed for way in costs.ways) or number * min(float(fixed) for fixed, _ in tables) <= room

    most = min(request.max_pipelines, costs.count, shares)
    while most and not fits_memory(most):
        most -= 1
    every, ratio = (MAX_DENSE_COUNT, COUNT_RATIO) if costs.count <= MAX_PAIRED_RANKS else COARSE_COUNTS
    numbers, number = [], 1.0
    while number <= most:
        numbers.append(int(number))
        number = number + 1 if number < every else max(number + 1, math.floor(number * ratio))
    near = [number for number in numbers if request.near and number == len(request.near[0].pipelines)]
    return near or numbers


def _ranked(costs: Costs) -> list[_Layout]:
    """The most promising layouts, re-estimated with all column orders, best first."""
    levelled = levels(costs.usable), costs.outward_level, levels(costs.speed)
    layouts = [
        layout
        for pipelines in _pipeline_counts(costs)
        for members in _groupings(costs, pipelines, levelled)
        if (layout := _estimated(_worthwhile(costs, members), MIN_LINES)) is not None
    ]
    layouts.sort(key=lambda candidate: candidate.estimate_s)
    promising, effort = list[_Layout](), costs.effort
    for layout in layouts:
        alike = sum(candidate.chains.pipelines == layout.chains.pipelines for candidate in promising)
        if len(promising) < effort * MAX_LAYOUTS and alike < effort * MAX_LAYOUTS_PER_COUNT:
            promising.append(layout)
    closer = [_estimated(layout.chains, len(_KEYS)) for layout in promising]
    return sorted((layout for layout in closer if layout is not None), key=lambda candidate: candidate.estimate_s)


def _groupings(costs: Costs, pipelines: int, levelled: tuple[Floats, Floats, Floats]) -> Iterator[list[Column]]:
    """Yield distinct groupings of ranks into columns. ``levelled``: memory, outward link and speed levels of the ranks."""
    memory, outward, speed = levelled
    yielded: set[tuple[Column, ...]] = set()
    builds = (in_hosts, along_hosts) if pipelines > 1 else (in_hosts,)
    for keys in ((memory, outward, speed), (memory, speed, outward)):
        for build in builds:
            members = build(costs, pipelines, keys)
            if members and tuple(sorted(members)) not in yielded:
                yielded.add(tuple(sorted(members)))
                yield members


def _worthwhile(costs: Costs, members: list[Column]) -> Chains:
    """Keep the columns that could do the most work in the ideal step time, ignoring links."""
    chains = Chains(in_columns(costs, members))
    if len(members) <= MAX_COLUMNS:
        return chains
    ideal_s = 2 * costs.request.global_batch / float(costs.speed.sum())
    speed = 1 / (chains.columns.forward_s + chains.columns.backward_s)[0].sum(axis=1)
    worth = speed * np.maximum(0.0, ideal_s - chains.sum_s.max(axis=1))
    worthiest = np.sort(np.argsort(-worth, kind="stable")[:MAX_COLUMNS])
    return Chains(in_columns(costs, [members[k] for k in worthiest.tolist()]))


_KEYS = "memory", "sums speed", "speed", "sums", "speed sums", "outward memory", "memory outward"
"""Sort keys of column orders, least important first; each order is also tried reversed."""


def _lines(chains: Chains, most: int) -> list[ColumnOrder]:
    columns = chains.columns
    assert columns.base is not None
    worth = {
        "speed": -(columns.forward_s + columns.backward_s)[0].sum(axis=1),
        "memory": columns.usable,
        "outward": columns.base.outward_level[np.array(columns.members)].min(axis=1),
        "sums": -chains.sum_s.max(axis=1),
    }
    orders: list[ColumnOrder] = []
    for names in _KEYS[:most]:
        keys = columns.place_of, columns.host, *(-worth[name] for name in names.split())
        line = tuple(np.lexsort(keys).tolist())
        orders += [line, line[::-1]]
    return list(dict.fromkeys(orders))


def _estimated(chains: Chains, lines: int) -> _Layout | None:
    """Return the layout with the best estimated time among the first ``lines`` sort keys, or None if none fits."""
    best: _Layout | None = None
    for line in _lines(chains, lines):
        estimate_s = chains.along(line, math.inf)[0]
        if estimate_s == math.inf:
            continue
        if lines > MIN_LINES:
            paced_s = chains.along(line, estimate_s / chains.micro_batches)[0]
            estimate_s = paced_s if paced_s < math.inf else estimate_s
        if best is None or estimate_s < best.estimate_s:
            best = _Layout(chains, line, estimate_s)
    return best


def _simulated(layouts: Sequence[_Layout]) -> list[_SimulatedLayout]:
    """Simulate the best pipeline of each layout; fastest first, without layouts that do not fit."""
    return sorted(filter(None, map(_simulated_layout, layouts)), key=lambda layout: layout.step_s)


def _simulated_layout(layout: _Layout) -> _SimulatedLayout | None:
    """Simulate the best pipeline along the layout's column order; None if none fits."""
    chains, columns = layout.chains, layout.chains.columns
    costs, n = {columns.micro_batch: columns.shared_by(chains.pipelines)}, chains.micro_batches
    clock, chain_lines = Clock(costs), dict[Line, None]()
    for fraction, allowance in PACES:
        _, picks, cuts = chains.along(layout.line, fraction * layout.estimate_s / n, allowance)
        counts, classic = tuple(last - first for first, last in itertools.pairwise(cuts)), range(len(picks), 0, -1)
        if picks:
            chain_lines[Line(picks, counts, tuple(classic), columns.micro_batch, n * columns.micro_batch)] = None
    rounds = LocalSearch(costs, clock.step_s, clock.step_s, clock.step_s)
    depths = filter(None, (rounds.with_promising_depths((line,)) for line in chain_lines))
    starts = [variants.first for variants in depths]
    if not starts:
        return None
    lines, step_s = min(starts, key=lambda start: start[1])
    fittings = rounds.fitted_within(math.inf, lines)
    assert fittings is not None
    return _SimulatedLayout(chains, fittings[0], step_s)


def _finished(layout: _SimulatedLayout, clock: Clock) -> tuple[float, Plan]:
    """Step time and plan of ``layout``, with batch shares balanced by pipeline speed."""
    base = layout.chains.columns.base
    assert base is not None
    pipelines = layout.pipelines(_sequences_per_pipeline(layout))
    ranks, request = [device.rank for device in base.devices], base.request
    plan = tuple(fitting.pipeline(ranks, request.schedule != "auto") for fitting in pipelines)
    return clock.step_s(pipelines), Plan(plan, request.global_batch, request.sequence_length, base.layer_count)


def _sequences_per_pipeline(layout: _SimulatedLayout) -> list[int]:
    """Choose batch shares so that all pipelines finish at nearly the same time."""
    costs, count = layout.chains.columns, layout.chains.pipelines
    size, total = costs.micro_batch, costs.request.global_batch // costs.micro_batch
    near = max(2, total // count)
    fewer, more = max(1, near * 3 // 4), near * 5 // 4 + 1
    low, high = (layout.pipelines([size * number] * count) for number in (fewer, more))
    ends_s = [[max(fitting.spans_s[1]) for fitting in pipelines] for pipelines in (low, high)]
    each_s = [(high_s - low_s) / (more - fewer) for low_s, high_s in zip(*ends_s, strict=True)]
    # End of each pipeline with one more micro-batch.
    waiting = [(low_s + each * (2 - fewer), p) for p, (low_s, each) in enumerate(zip(ends_s[0], each_s, strict=True))]
    heapq.heapify(waiting)
    numbers = [1] * count
    for _ in range(total - count):
        then_s, p = waiting[0]
        heapq.heapreplace(waiting, (then_s + each_s[p], p))
        numbers[p] += 1
    return [size * number for number in numbers]
