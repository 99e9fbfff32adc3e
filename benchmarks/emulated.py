"""Do emulated clusters take the time that was predicted for them? Whole runs of ``train`` on one rank per device.

    python benchmarks/emulated.py [--only NAME] [--json FILE] [--check]

RTX 5090 + Strix Halo and M4 Max + 2 TITAN X from ``profiles/``, eight mixed devices in five hosts over 1 and over 10 Gigabit
Ethernet, and four cards in two hosts, all derived from data sheets by the rules of ``profile_parts``. A Llama with hidden
size 32 stands in for their models, with as many blocks; the planner's best plan, of one or several pipelines with or without
split backward, is run for a few steps. For the four cards, a plan by hand of one pipeline in each host is run too, to
have unequal shares and sums of gradients between unlike cuts. Every forward and backward lasts at least some 10 ms.

Printed, in seconds of the emulated cluster: the bound that nothing can beat (total work over total speed), the limit that
whole items, whole sequences and the filling of the pipelines set to this plan, links at no cost in turn (``plan_bound_s``),
the prediction, the median of the measured steps, measured / predicted. Then, for RTX 5090 + Strix Halo, the question that is
asked most: the same tokens on the fast card alone and on both. Some five minutes on two cores.
``--check`` exits 1 where a measured step is not within 5 % of its prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from make_profiles import LLAMA_7B, M4_MAX, RTX_3090, RTX_4090, RTX_5090, STRIX_HALO, TITAN_X  # noqa: E402
from profile_parts import GIGABIT, TEN_GIGABIT, Link, sheet_cluster  # noqa: E402

from hetero_mpi.errors import UserError  # noqa: E402
from hetero_mpi.launch.launcher import build_command, find_launcher  # noqa: E402
from hetero_mpi.planning.bounds import plan_bound_s  # noqa: E402
from hetero_mpi.planning.durations import duration  # noqa: E402
from hetero_mpi.planning.files import load_plan, load_profile, save_plan, save_profile  # noqa: E402
from hetero_mpi.planning.plan import PipelinePlan, Plan, StagePlan  # noqa: E402
from hetero_mpi.planning.planner import make_plan  # noqa: E402
from hetero_mpi.planning.profile import ClusterProfile  # noqa: E402
from hetero_mpi.planning.request import PlanRequest  # noqa: E402
from hetero_mpi.planning.schedule import Action, Op, stages  # noqa: E402
from hetero_mpi.report.metrics import read_metrics  # noqa: E402
from hetero_mpi.report.summary import measured_step_s  # noqa: E402

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

    def planned(self) -> Plan:
        """Raises ``UserError`` where nothing fits into memory."""
        if self.plan is not None:
            return self.plan
        devices = len(self.profile.devices)
        sizes = tuple(n for n in range(1, self.global_batch + 1) if self.global_batch % n == 0)
        request = PlanRequest(
            self.global_batch,
            self.profile.model.sequence_length,
            tuple(n for n in sizes if n * devices <= self.global_batch) or (1,),
            max_pipelines=self.first or devices,
            recompute_choices=(False, True),
            split_choices=(False, True),
        )
        return make_plan(self._seen(), request)

    def _seen(self) -> ClusterProfile:
        count = self.first or len(self.profile.devices)
        links = tuple(one for one in self.profile.links if max(one.source, one.destination) < count)
        return replace(self.profile, devices=self.profile.devices[:count], links=links)


@dataclass(frozen=True)
class Result:
    """Seconds of the emulated cluster."""

    name: str
    ranks: int
    used: int
    time_scale: float
    shortest_action_s: float
    """Shortest forward or backward, on the wall clock."""
    bound_s: float
    limit_s: float
    pipelines: int
    predicted_s: float
    measured_s: float
    ratio: float


def mixed(link: Link, name: str) -> ClusterProfile:
    """Llama 7B, trained whole in fp32, in sequences of 512 tokens."""
    return sheet_cluster(
        name, "derived from data sheets (fp32)", MIXED, LLAMA_7B, "fp32", 512, link, ("Made up for the benchmark.",)
    )


def four_cards() -> ClusterProfile:
    """LoRA over Llama 7B packed in 4 bits: a card holds the whole model, and what is summed is small."""
    return sheet_cluster(
        "four-cards",
        "derived from data sheets",
        FOUR,
        LLAMA_7B,
        "bf16",
        512,
        GIGABIT,
        ("Made up for the benchmark.",),
        adapters=True,
    )


def two_pipelines() -> Plan:
    """A pipeline in each host of ``four_cards``, cut unlike, shares by speed."""
    first = PipelinePlan((StagePlan((0,), 0, 20, 2), StagePlan((1,), 20, 34, 0)), 1, 10)
    second = PipelinePlan((StagePlan((3,), 0, 22, 2), StagePlan((2,), 22, 34, 0)), 1, 6)
    return Plan((first, second), 16, 512, 34)


def trials() -> list[Trial]:
    def shipped(name: str) -> ClusterProfile:
        return load_profile(ROOT / "profiles" / f"{name}.toml")

    return [
        Trial(ALONE, shipped("homelab-5090-strix-halo"), 8, 1.0, 5),
        Trial("M4 Max + 2 TITAN X", shipped("homelab-m4max-2titanx"), 8, 0.5, 5),
        Trial("8 mixed devices, 1 GbE", mixed(GIGABIT, "mixed-1gbe"), 16, 0.5, 5),
        Trial("8 mixed devices, 10 GbE", mixed(TEN_GIGABIT, "mixed-10gbe"), 16, 0.5, 5),
        Trial("4 cards, 2 hosts, LoRA", four_cards(), 16, 2.0, 5),
        Trial("... a pipeline in each", four_cards(), 16, 2.0, 5, two_pipelines()),
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
held_out = 0.0

[train]
steps = {steps}
global_batch = {global_batch}

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
    print("                         ranks            on the emulated cluster, seconds          measured /  shortest")
    print("cluster                 (used) pipelines  bound   limit  predicted  measured  predicted    action here")
    results = []
    for trial in chosen:
        results.append(run(trial))
        one = results[-1]
        print(
            f"{one.name:<24} {one.ranks} ({one.used}) {one.pipelines:>9} {one.bound_s:>6.3f} {one.limit_s:>7.3f} "
            f"{one.predicted_s:>10.3f} {one.measured_s:>9.3f} {one.ratio:>10.3f} {1e3 * one.shortest_action_s:>11.1f} ms",
            flush=True,
        )
    for trial, both in zip(chosen, results, strict=True):
        for line in alone_lines(trial, both):
            print(line)
    worst = max(abs(one.ratio - 1) for one in results)
    if arguments.json:
        content = {"worst_error": worst, "bar": BAR, "rows": [asdict(one) for one in results]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    print(f"worst |measured / predicted - 1|: {100 * worst:.2f} % (bar {100 * BAR:.0f} %)")
    return int(arguments.check and worst > BAR)


def alone_lines(trial: Trial, both: Result) -> list[str]:
    """The same tokens on the first device alone, where the trial asks that."""
    if trial.name != ALONE:
        return []
    name = trial.profile.devices[0].name
    try:
        one = run(replace(trial, name=f"{name} alone", first=1))
    except UserError as error:
        return [f"{name} alone: the model does not fit ({str(error).splitlines()[0]})"]
    gain = one.measured_s / both.measured_s
    return [
        f"the same tokens on {name} alone: {one.measured_s:.3f} s measured, {one.predicted_s:.3f} s predicted; "
        f"on both {both.measured_s:.3f} s: {gain:.3f} times as fast"
    ]


def run(trial: Trial) -> Result:
    """One run of ``train`` on as many ranks as the cluster has. Raises ``UserError`` where nothing fits."""
    ranks = trial.first or len(trial.profile.devices)
    planned = trial.planned()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_profile(trial.profile, directory / "cluster.toml")
        save_plan(planned, directory / "given.toml")
        keys = {"blocks": len(trial.profile.model.layers) - 2, "steps": trial.steps}
        job = JOB.format(**keys, global_batch=trial.global_batch, time_scale=trial.time_scale)
        (directory / "job.toml").write_text(job)
        options = ["--run-dir", str(directory), "--plan", str(directory / "given.toml")]
        program = [sys.executable, "-m", "hetero_mpi", "train", str(directory / "job.toml"), *options]
        command = build_command(find_launcher(), ranks, None, program)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **command.environment}
        done = subprocess.run(command.arguments, env=environment, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{trial.name}:\n{done.stdout}\n{done.stderr}")
        plan = load_plan(directory / "plan.toml")
        measured_s = measured_step_s(read_metrics(directory / "metrics.jsonl").steps)
    assert measured_s is not None, "a trial has more steps than are left out"
    backward = [Op.F, Op.I, Op.W] if any(p.split_backward for p in plan.pipelines) else [Op.F, Op.B]
    shortest_s = min(
        duration(Action(op, number, 0), plan, trial.profile) for number, _, _ in stages(plan) for op in backward
    )
    return Result(
        trial.name,
        ranks,
        len(stages(plan)),
        trial.time_scale,
        trial.time_scale * shortest_s,
        plan.bound_step_s,
        plan_bound_s(plan, trial.profile),
        len(plan.pipelines),
        plan.predicted_step_s,
        measured_s,
        measured_s / plan.predicted_step_s,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="only clusters whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    parser.add_argument("--check", action="store_true", help="exit 1 where the bar is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
