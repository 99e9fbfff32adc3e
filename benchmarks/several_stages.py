"""What several stages per rank bring: the waiting of every order beside torch's schedules, and the gain on the shipped profiles.

    python benchmarks/several_stages.py [--ranks 2 4 8] [--groups 1 2 4] [--gbit 1 10 100] [--batch 16 64] [--most 12]
                                        [--json FILE] [--check]

*Waiting*: like ranks, even stages, messages that take no time; a forward through a rank's layers takes 1, a backward 2 (its halves
1 each). Printed is by how much a step is longer than computing, for ``--groups`` times as many micro-batches as ranks, and how many
micro-batches the fullest rank holds (in flight or with weight gradients put off; a rank's n stages count 1/n each). Ours: as
generated; one stage per rank as classic 1F1B and as ZB-H1. torch's: the lists that torch.distributed.pipelining makes, through the
same clock (its DualPipeV computes a forward and a backward at once; here one after the other).

*Gain*: each shipped profile of at most ``--most`` devices, as one pipeline, with every link between hosts at the given speed; where
the profile has one host, every rank counts as a host. The step of the plan that is chosen over the best with one stage per rank,
for ``--batch`` sequences a step. The profiles have no times of a backward in two parts: it comes in one, as with adapters.

``--check``: ``interleaved`` waits no longer than torch's interleaved 1F1B, and ``zbv`` than its ZBV and its DualPipeV, by more than
2.5 % of the step. Ours called ``dualpipev`` splits fewer backwards than either, which this clock counts as nothing gained.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining import schedules

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from depth_rule import MOST, linked  # noqa: E402
from harness import parser_of  # noqa: E402
from planner_quality import cases  # noqa: E402

from hetero_mpi.planning.decision.decide import decide  # noqa: E402
from hetero_mpi.planning.orders import computed_by_rank  # noqa: E402
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, StagePlan  # noqa: E402

Lists = Mapping[int, Sequence[tuple[str, int, int]]]
"""Rank -> (F, B, I or W; stage; micro-batch)."""
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
ALIKE = {"ScheduleInterleaved1F1B": "interleaved", "ScheduleZBVZeroBubble": "zbv", "ScheduleDualPipeV": "zbv"}
BAR = 0.025


def main() -> int:
    parser = parser_of(__doc__, ranks=[2], groups=[1], gbit=[1.0], batch=[16], most=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10, 100])
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--most", type=int, default=MOST, metavar="N", help="only profiles of at most N devices")
    arguments = parser.parse_args()
    missed = []
    print(
        f"{'':<34}" + "".join(f"{f'{p} ranks, {g * p} m.-b.':>20}" for p in arguments.ranks for g in arguments.groups)
    )
    sizes = [(ranks, groups * ranks) for ranks in arguments.ranks for groups in arguments.groups]
    found = {
        name: [waiting(name, *size) for size in sizes] for name in (*OURS, *ALIKE, "ScheduleInterleavedZeroBubble")
    }
    for name, row in found.items():
        cells = ["-" if one is None else f"{one[0]:.1%}, {one[1]:g} held" for one in row]
        print(f"{name:<34}" + "".join(f"{cell:>20}" for cell in cells))
    for theirs, ours in ALIKE.items():
        for size, own, other in zip(sizes, found[ours], found[theirs], strict=True):
            if own is not None and other is not None and own[0] > other[0] + BAR * (1 + other[0]):
                missed.append(f"{ours} waits longer than {theirs} for {size[0]} ranks, {size[1]} micro-batches")
    gains = print_gains(arguments.gbit, arguments.batch, arguments.most)
    if arguments.json:
        arguments.json.write_text(json.dumps({"waiting": {"sizes": sizes, **found}, "gains": gains}, indent=1) + "\n")
    print("\n".join(missed))
    return int(bool(missed) and arguments.check)


OURS = {
    "1F1B": (1, False, WARM_UP, False),
    "1F1B, backward split": (1, False, WARM_UP, True),
    "interleaved": (2, False, "interleaved", False),
    "interleaved, 4 stages": (4, False, "interleaved", False),
    "zbv": (2, True, "zbv", True),
    "dualpipev": (2, True, "dualpipev", True),
    "zbv, looped": (2, False, "zbv", True),
    "zbv, whole backward": (2, True, "zbv", False),
}
"""Stages per rank, in a V?, order, backward split?"""


def waiting(name: str, ranks: int, micro_batches: int) -> tuple[float, float] | None:
    """(waiting over computing, micro-batches held at most) of a schedule; None: it does not take so few micro-batches."""
    if name in OURS:
        each, v_shaped, order, split = OURS[name]
        turns = [range(ranks) if not v_shaped or turn % 2 == 0 else reversed(range(ranks)) for turn in range(each)]
        held = [rank for turn in turns for rank in turn]
        count = len(held)
        stages = tuple(StagePlan((rank,), place, place + 1, count - 1 - place) for place, rank in enumerate(held))
        pipeline = PipelinePlan(stages, 1, micro_batches, split, order)
        lists: Lists = {rank: list(own) for rank, own in computed_by_rank(pipeline).items()}
    else:
        each, count = 2, 2 * ranks
        try:
            lists = torch_lists(name, ranks, micro_batches)
        except (ValueError, RuntimeError):
            return None
    return step(lists, count) / each / (3 * micro_batches) - 1, most_held(lists) / each


def torch_lists(name: str, ranks: int, micro_batches: int) -> Lists:
    """The order that torch's schedule generates, in our form."""
    v_shaped = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    both = (0, 2 * ranks - 1) if v_shaped else (0, ranks)
    stages: list[Any] = [
        SimpleNamespace(
            group_size=ranks, num_stages=2 * ranks, group_rank=0, stage_index=index, has_backward=True, group=None,
            is_first=index == 0, is_last=index == 2 * ranks - 1, device=torch.device("cpu"), submod=torch.nn.Identity(),
        )
        for index in both
    ]  # fmt: skip
    made = getattr(schedules, name)(stages, micro_batches, loss_fn=lambda *_: 0)
    found: dict[int, list[tuple[str, int, int]]] = {}
    for rank, actions in made.pipeline_order.items():
        single = [part for action in actions if action is not None for part in (action.sub_actions or (action,))]
        names = {"F": "F", "B": "I", "W": "W", "BW": "B", "I": "I"}
        found[rank] = [(_name(part, names), part.stage_index, part.microbatch_index) for part in single]
    return found


def _name(action: Any, names: Mapping[str, str]) -> str:
    kinds = schedules._ComputationType
    by_kind = {kinds.FORWARD: "F", kinds.BACKWARD_INPUT: "I", kinds.BACKWARD_WEIGHT: "W", kinds.FULL_BACKWARD: "B"}
    return by_kind.get(action.computation_type) or names[str(action.computation_type)]


def step(lists: Lists, count: int) -> float:
    """Units until the last action ends, where every stage takes UNITS."""
    done: dict[tuple[str, int, int], int] = {}
    clock, position, moved = dict.fromkeys(lists, 0), dict.fromkeys(lists, 0), True
    while moved:
        moved = False
        for rank, actions in lists.items():
            while position[rank] < len(actions):
                name, stage, m = actions[position[rank]]
                waits = None
                if name == "F" and stage > 0:
                    waits = ("F", stage - 1, m)
                elif name in "BI":
                    waits = ("F", stage, m) if stage == count - 1 else ("B", stage + 1, m)
                if waits is not None and waits not in done:
                    break
                clock[rank] = max(clock[rank], done[waits] if waits is not None else 0) + UNITS[name]
                done["B" if name == "I" else name, stage, m] = clock[rank]
                position[rank] += 1
                moved = True
    assert all(position[rank] == len(actions) for rank, actions in lists.items()), "deadlock"
    return max(clock.values())


def most_held(lists: Lists) -> int:
    """Of a rank's stages together."""
    most = 0
    for actions in lists.values():
        flying, put_off = 0, 0
        for name, _, _ in actions:
            flying += (name == "F") - (name in "BI")
            put_off += (name == "I") - (name == "W")
            most = max(most, flying + put_off)
    return most


def print_gains(speeds: Sequence[float], batches: Sequence[int], most: int) -> list[list[object]]:
    """Print a line per profile, speed and batch; [name, Gbit/s, batch, seconds with one stage per rank, of the plan chosen]."""
    rows: list[list[object]] = []
    print(
        f"\n{'profile':<36}{'Gbit/s':>7}{'batch':>6}{'ranks':>6}{'chosen':>26}{'one stage each':>16}{'several':>12}{'ratio':>8}"
    )
    for case, gbit, batch in itertools.product(cases([], 0, most), speeds, batches):
        request = replace(case.request, global_batch=batch, max_pipelines=1, schedule="auto", stages_per_rank=4)
        found = decide(linked(case.profile, gbit * 1e9 / 8), request)
        if found is None:
            continue
        (pipeline,) = found.plan.pipelines
        one_s = found.one_stage_s or found.step_s
        each = max(map(len, pipeline.stages_of.values()))
        chosen = f"{pipeline.order}, {each} per rank" if pipeline.interleaved else "one stage each"
        print(
            f"{case.name:<36}{gbit:>7g}{batch:>6}{len(pipeline.stages_of):>6}{chosen:>26}{one_s:>14.4g} s"
            f"{found.step_s:>10.4g} s{found.step_s / one_s:>8.3f}"
        )
        rows.append([case.name, gbit, batch, one_s, found.step_s])
    return rows


if __name__ == "__main__":
    sys.exit(main())
