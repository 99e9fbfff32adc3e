"""Do emulated clusters take the time that was predicted for them? Whole runs of ``train`` on one rank per device.

    python benchmarks/emulated.py [--only NAME] [--rounds 1] [--json FILE] [--check]

RTX 5090 + Strix Halo and M4 Max + 2 TITAN X from ``profiles/``, eight mixed devices in five hosts over 1 and over 10 Gigabit
Ethernet, and four and six cards in two and in four hosts, all derived from data sheets by the rules of ``profile_parts``. Then
Zorse's two clusters of four cards, over links at which one pipeline is fastest with several stages per rank. A
Llama with hidden size 32 stands in for their models, with as many blocks. ``train`` plans each as it would for a user, so that
they are run as one, two and three pipelines. For the four cards in two hosts, a plan by hand of one pipeline in each host is
run too, to have unlike cuts and gradient all-reduces over a slow link. Every forward and backward lasts at least some 10 ms.

Printed, in seconds of the emulated cluster: the bound that nothing can beat (total work over total speed, ``fluid_bound_s``); the
prediction; the measured step, median of ``--rounds`` runs' medians; measured / predicted. Then, for RTX 5090 + Strix Halo, the
question that is asked most: the same tokens on the fast card alone and on both.

Some nine minutes on two cores. Where the ranks' own arithmetic does not fit into the emulated times on this machine, the run is
repeated at the ``time_scale`` that its refusal names. ``--check`` exits 1 where a run fails, or a measured step is not within
5 % of its prediction.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from depth_rule import linked  # noqa: E402
from harness import parser_of, run_ranks  # noqa: E402
from make_profiles import LLAMA_7B, M4_MAX, RTX_3090, RTX_4090, RTX_5090, STRIX_HALO, TITAN_X  # noqa: E402
from profile_parts import GIGABIT, TEN_GIGABIT, Card, Link, sheet_cluster  # noqa: E402

from hetero_mpi.job.plan_request import INDIFFERENCE_RATIO, micro_batch_choices  # noqa: E402
from hetero_mpi.planning.bounds import fluid_bound_s  # noqa: E402
from hetero_mpi.planning.durations import duration  # noqa: E402
from hetero_mpi.planning.schedule import COMPUTE, schedule_of  # noqa: E402
from hetero_mpi.planning.types.plan import (  # noqa: E402
    PipelinePlan,
    Plan,
    PlanReport,
    StagePlan,
)
from hetero_mpi.planning.types.profile import ClusterProfile  # noqa: E402
from hetero_mpi.planning.types.request import PlanRequest  # noqa: E402
from hetero_mpi.planning.types.toml_files import load_profile, load_report, save_plan, save_profile  # noqa: E402
from hetero_mpi.rundir.metrics import measured_step_s, read_metrics  # noqa: E402

BAR = 0.05
ALONE = "RTX 5090 + Strix Halo"
"""The cluster whose first device is also run alone."""
MIXED = [
    ("studio", replace(RTX_4090, peak=82.6e12)),
    ("studio", replace(RTX_3090, peak=35.6e12)),
    ("studio", replace(RTX_3090, peak=35.6e12)),
    ("desktop", replace(RTX_5090, peak=104.8e12)),
    ("attic", TITAN_X),
    ("attic", TITAN_X),
    ("mini-pc", replace(STRIX_HALO, peak=14.8e12)),
    ("mac", M4_MAX),
]
"""(host, card) of every rank, with the fp32 peaks of the sheets (Strix Halo: without dual issue), since two cards do fp32 only."""
FOUR = [("left", RTX_4090), ("left", RTX_3090), ("right", RTX_3090), ("right", RTX_3090)]
APART = [("a", RTX_4090), ("b", RTX_4090), ("c", RTX_3090), ("d", RTX_3090)]
SIX = [("left", RTX_4090)] * 3 + [("right", RTX_3090)] * 3
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Trial:
    """A cluster, and how it is run."""

    name: str
    profile: ClusterProfile
    global_batch: int
    time_scale: float
    steps: int
    plan: Plan | None = None
    """By hand; None: the planner's."""
    first: int | None = None
    """Only so many of the profile's devices."""
    pipelines: int | None = None
    """So many at most; None: as many as help."""
    stages_per_rank: int = 4
    """So many at most."""

    def request(self) -> PlanRequest:
        """What ``train`` asks the planner for."""
        choices, _ = micro_batch_choices(self.global_batch, "auto", len(self.seen().devices), False)
        return PlanRequest(
            self.global_batch,
            self.profile.model.sequence_length,
            choices,
            max_pipelines=self.pipelines or self.global_batch,
            recompute_choices=(False, True),
            split_choices=(False, True),
            indifference=INDIFFERENCE_RATIO,
        )

    def seen(self) -> ClusterProfile:
        """The devices that are used."""
        count = self.first or len(self.profile.devices)
        links = tuple(one for one in self.profile.links if max(one.source, one.destination) < count)
        return replace(self.profile, devices=self.profile.devices[:count], links=links)


@dataclass(frozen=True)
class Result:
    """Seconds of the emulated cluster."""

    name: str
    ranks: int
    stages: int
    time_scale: float
    shortest_action_s: float
    """Shortest forward or backward, on the wall clock."""
    bound_s: float
    pipelines: int
    predicted_s: float
    measured_s: float
    """Median over the rounds."""

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s


def mixed(link: Link, name: str) -> ClusterProfile:
    """Llama 7B, trained whole in fp32, in sequences of 512 tokens."""
    return sheet_cluster(
        name, "derived from data sheets (fp32)", MIXED, LLAMA_7B, "fp32", 512, link, ("Made up for the benchmark.",)
    )


def few_cards(places: list[tuple[str, Card]], link: Link) -> ClusterProfile:
    """LoRA over Llama 7B packed in 4 bits: a card holds the whole model, and what is summed is small."""
    source, note = "derived from data sheets", ("Made up for the benchmark.",)
    return sheet_cluster("few-cards", source, places, LLAMA_7B, "bf16", 512, link, note, adapters=True)


def two_pipelines() -> Plan:
    """A pipeline in each host of ``FOUR``, cut unlike, shares by speed."""
    first = PipelinePlan((StagePlan((0,), 0, 20, 2), StagePlan((1,), 20, 34, 0)), 1, 10)
    second = PipelinePlan((StagePlan((3,), 0, 22, 2), StagePlan((2,), 22, 34, 0)), 1, 6)
    return Plan((first, second), 16, 512, 34)


def trials() -> list[Trial]:
    def shipped(name: str) -> ClusterProfile:
        return load_profile(ROOT / "profiles" / f"{name}.toml")

    pair, four = (
        linked(shipped(name), gigabytes_per_s * 1e9)
        for name, gigabytes_per_s in (("zorse-2xa6000-2xw6800", 0.125), ("zorse-2xl4-a6000-p40", 1.25))
    )
    return [
        Trial(ALONE, shipped("homelab-5090-strix-halo"), 8, 1.0, 5),
        Trial("M4 Max + 2 TITAN X", shipped("homelab-m4max-2titanx"), 8, 0.5, 5),
        Trial("8 mixed devices, 1 GbE", mixed(GIGABIT, "mixed-1gbe"), 16, 0.5, 5),
        Trial("8 mixed devices, 10 GbE", mixed(TEN_GIGABIT, "mixed-10gbe"), 16, 0.5, 5),
        Trial("4 cards, 4 hosts, LoRA", few_cards(APART, TEN_GIGABIT), 8, 4.0, 5),
        Trial("6 cards, 2 hosts, LoRA", few_cards(SIX, TEN_GIGABIT), 12, 4.0, 5),
        Trial("4 cards, 2 hosts, LoRA", few_cards(FOUR, GIGABIT), 16, 4.0, 5),
        Trial("... a pipeline in each", few_cards(FOUR, GIGABIT), 16, 4.0, 5, two_pipelines()),
        Trial("2 A6000 + 2 W6800", pair, 16, 1.0, 5, pipelines=1),
        Trial("... A6000, W6800: one stage each", pair, 16, 1.0, 5, pipelines=1, stages_per_rank=1),
        Trial("2 L4 + A6000 + P40", four, 16, 1.0, 5, pipelines=1),
        Trial("... L4, A6000, P40: one stage each", four, 16, 1.0, 5, pipelines=1, stages_per_rank=1),
    ]


JOB = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = {blocks}
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 64
tie_word_embeddings = false

[tokenizer]
train_vocab_size = 300

[data]
text = ["{{stdlib}}/asyncio/*.py"]
sequence_length = 16
evaluation_fraction = 0.0

[train]
steps = {steps}
global_batch = {global_batch}

[plan]
rebalance = false
pipelines = {pipelines}
stages_per_rank = {each}

[cluster]
device = "cpu"
threads = 1
emulate = "cluster.toml"
emulate_first = true
time_scale = {time_scale}
"""


def main() -> int:
    arguments = _arguments()
    chosen = [trial for trial in trials() if arguments.only is None or arguments.only in trial.name]
    print(f"{'':<34} ranks     pipe- time_  seconds of the emulated cluster{'':>7} measured /    shortest")
    print(f"{'cluster':<34} (stages)  lines scale  bound  predicted  measured  predicted  action here")
    results, problems = [], []
    for trial in chosen:
        try:
            results.append(run(trial, arguments.rounds))
            print(_line(results[-1]), flush=True)
            if trial.name == ALONE:
                alone = run(replace(trial, name=f"{trial.profile.devices[0].name} alone", first=1), arguments.rounds)
                print(f"{_line(alone)}\n{_comparison(alone, results[-1])}", flush=True)
                results.append(alone)
        except Failure as failure:
            problems.append(f"{trial.name}: {failure}")
            print(problems[-1], flush=True)
    worst = max((abs(one.ratio - 1) for one in results), default=float("inf"))
    if arguments.json:
        rows = [{**asdict(one), "ratio": one.ratio} for one in results]
        content = {"worst_error": worst, "bar": BAR, "rows": rows, "failed": problems}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    failed = f", {len(problems)} runs failed" if problems else ""
    print(f"worst |measured / predicted - 1|: {100 * worst:.2f} % (bar {100 * BAR:.0f} %){failed}")
    return int(arguments.check and (worst > BAR or bool(problems)))


class Failure(Exception):
    """A run of ``train`` that did not end well."""


def _line(one: Result) -> str:
    return (
        f"{one.name:<34} {one.ranks} ({one.stages:>2}) {one.pipelines:>8} {one.time_scale:>5.2g} {one.bound_s:>7.3f} "
        f"{one.predicted_s:>10.3f} {one.measured_s:>9.3f} {one.ratio:>10.3f} "
        f"{1e3 * one.shortest_action_s:>9.1f} ms"
    )


def _comparison(alone: Result, both: Result) -> str:
    return (
        f"the same tokens take {alone.measured_s:.3f} s on the first device alone and {both.measured_s:.3f} s on both: "
        f"{alone.measured_s / both.measured_s:.3f} times as fast ({alone.predicted_s / both.predicted_s:.3f} predicted)"
    )


def run(trial: Trial, rounds: int) -> Result:
    """So many runs of ``train`` on as many ranks as the cluster has. Raises ``Failure``."""
    measured, scale = [], trial.time_scale
    for _ in range(rounds):
        report, profile, measured_s, scale = _once(replace(trial, time_scale=scale))
        measured.append(measured_s)
    plan = report.plan
    actions = {
        (a.op, a.stage): a for held in schedule_of(plan, profile.model).values() for a in held if a.op in COMPUTE
    }
    return Result(
        trial.name,
        len(profile.devices),
        len(plan.numbered),
        scale,
        scale * min(duration(action, plan, profile) for action in actions.values()),
        fluid_bound_s(profile, trial.request()),
        len(plan.pipelines),
        report.predicted_step_s,
        statistics.median(measured),
    )


def _once(trial: Trial) -> tuple[PlanReport, ClusterProfile, float, float]:
    """(plan, profile as the run saw it, seconds per step, time_scale), at a larger scale where the trial's is refused."""
    ranks = len(trial.seen().devices)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_profile(trial.profile, directory / "cluster.toml")
        job = JOB.format(
            blocks=len(trial.profile.model.layers) - 2,
            steps=trial.steps,
            global_batch=trial.global_batch,
            pipelines=trial.pipelines or '"auto"',
            each=trial.stages_per_rank,
            time_scale=trial.time_scale,
        )
        (directory / "job.toml").write_text(job)
        program = ["-m", "hetero_mpi", "train", str(directory / "job.toml"), "--run-dir", str(directory / "run")]
        if trial.plan is not None:
            save_plan(trial.plan, directory / "given.toml")
            program += ["--plan", str(directory / "given.toml")]
        try:
            done = run_ranks(ranks, program, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Failure(f"did not end within {TIMEOUT_S:.0f} s") from None
        output = f"{done.stdout}\n{done.stderr}"
        wanted = re.search(r"Set \[cluster\] time_scale = ([\d.]+)", output)
        if done.returncode != 0 and wanted is not None and float(wanted[1]) > trial.time_scale:
            print(f"{trial.name}: refused at time_scale = {trial.time_scale:g}, again at {wanted[1]}", flush=True)
            return _once(replace(trial, time_scale=float(wanted[1])))
        if done.returncode != 0:
            raise Failure(f"exit code {done.returncode}\n{output}")
        report, seen = load_report(directory / "run" / "plan.toml"), load_profile(directory / "run" / "profile.toml")
        measured_s = measured_step_s(read_metrics(directory / "run" / "metrics.jsonl").steps)
    assert measured_s is not None, "a trial has more steps than are left out"
    return report, seen, measured_s, trial.time_scale


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, only=ALONE, rounds=1)
    parser.add_argument("--only", metavar="NAME", help="only clusters whose name contains this")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="runs of every cluster")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
