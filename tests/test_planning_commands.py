"""The offline commands as a person runs them: ``plan``, ``simulate`` and ``inspect``, on a made-up profile in a file."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetero_mpi import offline
from hetero_mpi.checkpoint import CheckpointWriter
from hetero_mpi.cli import main
from hetero_mpi.errors import UserError
from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.changes import restricted, with_copy_of, with_faster_links, with_free_links
from hetero_mpi.planning.files import (
    load_plan,
    load_profile,
    plan_from_dict,
    profile_from_dict,
    profile_to_dict,
    save_plan,
    save_profile,
)
from hetero_mpi.planning.idling import Idling, busy, idling
from hetero_mpi.planning.memory import predict_memory
from hetero_mpi.planning.network import Network
from hetero_mpi.planning.offline import losses, what_ifs
from hetero_mpi.planning.packing.bound import packing_bound_s
from hetero_mpi.planning.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.planner import make_plan
from hetero_mpi.planning.profile import ClusterProfile, HostProfile, LayerTimes, LinkProfile
from hetero_mpi.planning.request import PlanRequest
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.report import units
from hetero_mpi.report.inspection import residuals
from tests.mpi import run_mpi
from tests.planning_samples import JOB_TOML, make_model, make_plan_of, make_profile, random_instance

ROOT = Path(__file__).parent.parent
JOB = JOB_TOML + "[plan]\npipelines = 1\n"
TINY = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
[tokenizer]
train_vocab_size = 300
[data]
text = ["{stdlib}/json/*.py"]
sequence_length = 32
[train]
global_batch = 4
dtype = "fp32"
"""
REQUEST = PlanRequest(8, 10, (1, 2), recompute_choices=(False, True), split_choices=(False, True), indifference=0.005)
"""The job as planning sees it, on three ranks."""


def cluster() -> ClusterProfile:
    """A fast, a medium and a very slow rank on slow links, with the samples that the links were fitted to."""
    profile = make_profile((1.0, 1.5, 12.0), make_model(6), latency_s=0.05, bytes_per_s=2e4)
    links = tuple(replace(link, sample_bytes=(1000, 10_000), sample_s=(0.1, 0.5)) for link in profile.links)
    devices = tuple(
        replace(device, layers={kind: spread(times) for kind, times in device.layers.items()})
        for device in profile.devices
    )
    return replace(profile, links=links, devices=devices)


def spread(times: LayerTimes) -> LayerTimes:
    """Quartiles 5 % apart."""
    return LayerTimes(replace(times.forward_s, spread=(0.05,)), replace(times.backward_s, spread=(0.05,)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with ``job.toml`` and ``profile.toml``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    save_profile(cluster(), tmp_path / "profile.toml")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What the command prints: on stdout, or on stderr where it fails."""
    found = main(arguments)
    out, err = capsys.readouterr()
    assert found == code, err or out
    return " ".join((out if code == 0 else err).split())  # lines are wrapped


# plan


def test_plan_prints_the_planners_plan_and_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "plan", "job.toml", "--profile", "profile.toml", "-o", "out/plan.toml")
    plan = make_plan(cluster(), REQUEST)
    assert load_plan("out/plan.toml") == plan
    assert "rank 2 idles: " in text and "Predicted: " in text and "tokens/s" in text
    busiest = simulate(plan, cluster()).busy_s[0] / plan.predicted_step_s
    assert f"Utilisation: rank 0 {units.percent(busiest)}, rank 1 " in text and "because: rank 0 alone: " in text
    assert "Limited by: " in text and "micro-batch: the planner's choice among 1, 2" in text
    assert "What if" not in text


def test_plan_as_json_holds_plannings_own_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "plan", "job.toml", "--profile", "profile.toml", "--json", "--explain"))
    profile = cluster()
    plan = make_plan(profile, REQUEST)
    simulated = simulate(plan, profile)
    assert plan_from_dict(found["plan"]) == plan
    assert found["step_s"] == simulated.step_s == found["planner_step_s"]
    assert found["tokens_per_s"] == pytest.approx(80 / simulated.step_s)
    assert (
        found["bound_step_s"] == packing_bound_s(profile, REQUEST, simulated.step_s) > fluid_bound_s(profile, REQUEST)
    )
    assert found["gap"] == pytest.approx(simulated.step_s / found["bound_step_s"] - 1)
    assert found["utilisation"] == {str(r): s / simulated.step_s for r, s in simulated.busy_s.items()}
    answers = {entry["change"]: entry["step_s"] for entry in found["what_if"]}
    assert list(answers) == [
        "link 0 - 1 10x faster", "without rank 0 (x1)", "without rank 1 (x1.5)", "a second x1, like rank 0",
    ]  # fmt: skip
    assert answers["without rank 1 (x1.5)"] == make_plan(restricted(profile, [0, 2]), REQUEST).predicted_step_s
    assert answers["without rank 1 (x1.5)"] > simulated.step_s > answers["a second x1, like rank 0"]


def test_a_plan_edited_by_hand_is_costed_just_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = make_plan_of((0, 2, 8), (0, 1), 8)
    save_plan(edited, "edited.toml")
    arguments = ("plan", "job.toml", "--profile", "profile.toml", "--plan", "edited.toml")
    found = json.loads(run(capsys, *arguments, "--json"))
    best = make_plan(cluster(), REQUEST)
    assert found["step_s"] == simulate(edited, cluster()).step_s > found["planner_step_s"] == best.predicted_step_s
    assert found["lost"]["choice"] == pytest.approx(1 - best.predicted_step_s / found["step_s"])
    text = run(capsys, *arguments)
    assert "given by hand" in text and "The planner's own plan: " in text and "this plan (the planner's own" in text
    save_plan(make_plan_of((0, 2, 7), (0, 1), 8), "short.toml")
    assert "items" in run(capsys, *arguments[:-1], "short.toml", code=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.sequence_length=20", "data.sequence_length = 20: the profile has 10"),
        ("train.dtype=bf16", 'train.dtype = "bf16": the profile has "fp32"'),
        ("model.config={model_type='qwen3', num_hidden_layers=6}", 'model_type = "qwen3": the profile has "llama"'),
        ("model.config={model_type='llama', num_hidden_layers=9}", "9 blocks: the profile has 6"),
        ("adapter.method=lora", 'adapter.method = "lora": the profile has training of all weights'),
    ],
)
def test_a_profile_of_something_else_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], change: str, words: str
) -> None:
    for command in ("plan", "simulate"):
        text = run(capsys, command, "job.toml", "--profile", "profile.toml", "--set", change, code=2)
        assert words in text and "profile.toml" in text and "--set" in text


def test_what_the_job_fixes_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*changes: str) -> dict[str, object]:
        sets = [part for change in changes for part in ("--set", change)]
        return json.loads(run(capsys, "plan", "job.toml", "--profile", "profile.toml", "--json", *sets))  # type: ignore[no-any-return]

    memory = planned("cluster.memory_bytes=150000", "plan.memory_reserve=0.1")["plan"]["memory"]  # type: ignore[index]
    assert {entry["usable_bytes"] for entry in memory} == {135_000}
    dropout = planned("model.config={model_type='llama', num_hidden_layers=6, attention_dropout=0.1}")
    assert "fixed, since dropout" in dropout["remarks"][-1]  # type: ignore[index]
    assert len(planned("plan.allow_idle=false")["utilisation"]) == 3  # type: ignore[arg-type]


def test_a_model_that_fits_nowhere_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "job.toml", "--profile", "profile.toml", "--set", "cluster.memory_bytes=20000")
    assert "does not fit in memory" in run(capsys, *arguments, code=2)


def test_the_schedule_can_be_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "job.toml", "--profile", "profile.toml", "--json")
    deep = json.loads(run(capsys, *arguments, "--schedule", "gpipe"))["plan"]["pipelines"][0]
    count = deep["sequences"] // deep["micro_batch"]
    assert {stage["warm_up"] for stage in deep["stages"]} == {count}
    assert json.loads(run(capsys, *arguments, "--set", "plan.schedule=gpipe"))["plan"]["pipelines"][0] == deep
    text = run(capsys, "simulate", "job.toml", "--profile", "profile.toml", "--schedule", "1f1b", "-o", "out")
    assert "Simulated step: " in text
    refused = run(capsys, *arguments, "--schedule", "split", "--set", "adapter.method=lora", code=2)
    assert "an adapter leaves these frozen" in refused


def test_what_limits_is_said_once_and_alternatives_are_priced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "plan", "job.toml", "--profile", "profile.toml")
    assert text.lower().count("limited by") == 1
    plan = make_plan(cluster(), REQUEST)
    alone = simulate(make_plan_of((0, 8), (0,), 8), cluster()).step_s
    assert f"rank 0 alone: {alone / plan.predicted_step_s:.2f}x slower" in text
    assert "the same ranks with equally many items each: " in text and "busiest: stage " in text
    without = make_plan(restricted(cluster(), [0, 2]), REQUEST).predicted_step_s / plan.predicted_step_s - 1
    assert f"without it the step is {without:.1%} longer" in text, "what the rank that computes least is there for"


def test_a_plan_that_differs_from_the_job_is_costed_and_the_differences_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = make_plan_of((0, 4, 8), (0, 1), 8)
    (pipeline,) = edited.pipelines
    stages = (pipeline.stages[0], replace(pipeline.stages[1], recompute=True))
    save_plan(replace(edited, pipelines=(replace(pipeline, micro_batch=4, stages=stages),)), "edited.toml")
    arguments = ("plan", "job.toml", "--profile", "profile.toml", "--plan", "edited.toml")
    settings = ("--set", "train.recompute=false", "--set", "train.micro_batch=1")
    found = json.loads(run(capsys, *arguments, *settings, "--json"))
    assert [text.split(":")[0] + text.partition(":")[2][:17] for text in found["differences"]] == [
        "pipelines[0] micro_batch = 4:",
        "pipelines[0] recompute = true",
    ]
    assert "The given plan differs from the job: pipelines[0]: micro_batch = 4" in run(capsys, *arguments, *settings)
    assert json.loads(run(capsys, *arguments, "--json"))["differences"] == [
        "pipelines[0]: micro_batch = 4: the job leaves 1, 2"
    ]


def test_what_if_names_the_next_ethernet() -> None:
    model = make_model(6, boundary_bytes_per_token=10**7)
    profile = make_profile((1.0, 1.0), model, memory_bytes=10**12, bytes_per_s=0.94e9 / 8)
    request = PlanRequest(8, 10, (1,))
    own = make_plan(profile, request)
    answers = {answer.change: answer.step_s for answer in what_ifs(own, profile, request)}
    faster = with_faster_links(profile, times=10, latency=False)
    assert answers["10 GbE instead of 1"] == make_plan(faster, request).predicted_step_s < own.predicted_step_s
    assert "one more x1, like rank 0" in answers


def test_a_slow_card_that_is_used_is_used_for_a_reason() -> None:
    """2 x L4 + A6000 + P40: the P40 idles, or the plan says what it would cost to leave it out."""
    profile = load_profile(ROOT / "profiles" / "zorse-2xl4-a6000-p40.toml")
    request = PlanRequest(64, profile.model.sequence_length, (1, 2, 4), recompute_choices=(False, True))
    plan = make_plan(profile, request)
    p40 = next(device.rank for device in profile.devices if "P40" in device.name)
    others = [device.rank for device in profile.devices if device.rank != p40]
    without = make_plan(restricted(profile, others), request).predicted_step_s
    if p40 in {idle.rank for idle in plan.idle}:
        assert without <= plan.predicted_step_s * (1 + 1e-9)
    else:
        longer = f"without it the step is {without / plan.predicted_step_s - 1:.1%} longer"
        assert any(f"rank {p40} (NVIDIA P40) holds" in reason and longer in reason for reason in plan.reasons)
        assert without > plan.predicted_step_s


def test_memory_that_hosts_share_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = cluster()
    devices = tuple(replace(d, host="box", shares_host_memory=True) for d in profile.devices)
    links = tuple(replace(link, same_host=True) for link in profile.links)
    hosts = (HostProfile("box", 10**9, "made up"),)
    save_profile(replace(profile, devices=devices, links=links, hosts=hosts), folder / "one.toml")
    text = run(capsys, "plan", "job.toml", "--profile", "one.toml")
    assert "Memory of host box, which ranks share: " in text


# Losses and what-if


def test_losses_add_up_and_name_what_limits() -> None:
    slow_links = make_profile((1.0, 1.0, 1.0), make_model(6), latency_s=9.0)
    short = make_profile((1.0, 4.0), make_model(6), memory_bytes=(60_000, 10_000_000))
    uneven = make_profile((1.0, 1.0), make_model(1))
    even = make_profile((1.0,), make_model(6))
    request = PlanRequest(8, 10, (1,))
    for profile, limit in ((slow_links, "link"), (short, "memory"), (uneven, "granularity"), (even, "device")):
        plan = make_plan(profile, request)
        lost = losses(plan, plan, profile, request)
        assert lost.limit == limit, lost
        total = lost.choice + lost.links + lost.memory + lost.granularity
        assert total == pytest.approx(1 - lost.bound_s / lost.step_s)


def test_changed_clusters_are_what_they_are_called() -> None:
    profile, _ = random_instance(seed=3, ranks=3, items=5)
    faster = with_faster_links(profile, [(0, 2)])
    for a, b in ((0, 1), (2, 1), (0, 2), (2, 0)):
        factor = 10 if {a, b} == {0, 2} else 1
        assert faster.transfer_s(a, b, 500) == pytest.approx(profile.transfer_s(a, b, 500) / factor)
    assert with_free_links(profile).transfer_s(0, 1, 1e9) == 0
    two = restricted(profile, [2, 0])
    assert [device.rank for device in two.devices] == [0, 1] and two.devices[0].layers == profile.devices[2].layers
    assert two.transfer_s(0, 1, 500) == profile.transfer_s(2, 0, 500) and len(two.links) == 2
    more = with_copy_of(profile, 1)
    assert more.devices[3] == replace(profile.devices[1], rank=3)
    assert more.transfer_s(3, 0, 500) == profile.transfer_s(1, 0, 500)
    assert more.transfer_s(2, 3, 500) == profile.transfer_s(2, 1, 500)
    assert more.link(1, 3).bytes_per_s == max(profile.link(1, rank).bytes_per_s for rank in (0, 2))
    assert profile_from_dict(profile_to_dict(more)) == more, "the file format's own rules hold"


def test_a_what_if_without_an_answer_says_why() -> None:
    profile = make_profile((1.0, 2.0), make_model(2), memory_bytes=(50_000, 50_000))
    request = PlanRequest(2, 10, (1,), memory_reserve=0.0)
    answers = list(what_ifs(make_plan(profile, request), profile, request))
    without = [answer for answer in answers if answer.change.startswith("without")]
    assert len(without) == 2 and all(answer.step_s is None and "does not fit" in answer.problem for answer in without)


# simulate and the causes of idling


def test_causes_of_idling_are_those_of_a_pipeline_drawn_by_hand() -> None:
    """Two stages, two micro-batches; F and B of stage 0 take 1.1 and 2.2, of stage 1 1.5 and 3; a message takes 0.5 s.

    ::

        seconds   0    1.1  1.6       3.1 (1.1+0.5+1.5)
        rank 0    F0   F1 until 2.2, waits for the gradient: computed at 6.1, here at 6.6; B0 until 8.8; B1 ... 13.3
        rank 1    waits 1.1 for F0, 0.5 for the link; F0 B0 until 6.1, F1 B1 until 10.6; then the end
    """
    profile = make_profile((1.0, 1.0), make_model(2), latency_s=0.5)
    plan = make_plan_of((0, 2, 4), (0, 1), 2)
    simulated = simulate(plan, profile)
    found = idling(simulated.events, plan)
    assert simulated.step_s == pytest.approx(13.3)
    expected = {
        0: Idling(gradients_s=(6.1 - 2.2) + (10.6 - 8.8), link_s=0.5 + 0.5),
        1: Idling(activations_s=1.1, link_s=0.5, end_s=13.3 - 10.6),
    }
    for rank, causes in expected.items():
        assert vars(found[rank]) == pytest.approx(vars(causes))


@pytest.mark.parametrize("seed", range(20))
def test_computing_and_idling_add_up_to_the_step(seed: int) -> None:
    profile, request = random_instance(seed, ranks=4, items=8)
    try:
        plan = make_plan(profile, request)
    except UserError:
        pytest.skip("nothing fits")
    simulated = simulate(plan, profile)
    found = idling(simulated.events, plan)
    assert busy(simulated.events) == pytest.approx(simulated.busy_s)
    assert simulated.busy_s.keys() == found.keys()
    for rank, seconds in simulated.busy_s.items():
        assert min(vars(found[rank]).values()) >= -1e-12
        assert seconds + found[rank].total_s == pytest.approx(simulated.step_s)


def test_simulate_shows_causes_and_writes_pictures_and_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "simulate", "job.toml", "--profile", "profile.toml", "-o", "here")
    simulated = simulate(make_plan(cluster(), REQUEST), cluster())
    assert (
        "Simulated step: " in text and "waits for activations" in text and "the end: done, while others are not" in text
    )
    assert sorted(path.name for path in Path("here").iterdir()) == ["timeline.png", "timeline.svg", "trace.json"]
    entries = json.loads(Path("here/trace.json").read_text())["traceEvents"]
    assert sum(entry["ph"] == "X" for entry in entries) == len(simulated.events)
    save_plan(make_plan_of((0, 8), (1,), 8), "alone.toml")
    run(capsys, "simulate", "job.toml", "--profile", "profile.toml", "--plan", "alone.toml")
    entries = json.loads(Path("runs/job/simulation/trace.json").read_text())["traceEvents"]
    assert {entry["pid"] for entry in entries} == {1}


def test_simulate_answers_for_other_networks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(make_plan_of((0, 2, 8), (0, 1), 8), "two.toml")
    arguments = ("simulate", "job.toml", "--profile", "profile.toml", "--plan", "two.toml")
    for options, network, words in (
        ((), Network(), "Simulated step: "),
        (("--blocking-sends",), Network(blocking_sends=True), "a rank computes nothing while it sends: "),
        (
            ("--shared-nic",),
            Network(shared_nic=True),
            "all messages of a host to others pass through one card: no change",
        ),
    ):
        simulated = simulate(load_plan("two.toml"), cluster(), network=network)
        text = run(capsys, *arguments, *options)
        assert f"Simulated step: {units.seconds(simulated.step_s)}, " in text and words in text
        assert ("Simulated so that " in text) == bool(options)


def test_simulate_shows_memory_per_rank_and_host_of_several_pipelines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 0 and 1, a pipeline, compute in the memory of one host; rank 2 is a pipeline by itself."""
    profile = cluster()
    devices = tuple(
        replace(d, host="alpha" if d.rank < 2 else "beta", shares_host_memory=d.rank < 2) for d in profile.devices
    )
    links = tuple(replace(link, same_host={link.source, link.destination} == {0, 1}) for link in profile.links)
    hosts = (HostProfile("alpha", 400_000, "made up"),)
    save_profile(replace(profile, devices=devices, hosts=hosts, links=links), "profile.toml")
    halves = PipelinePlan((StagePlan((0,), 0, 4, 1), StagePlan((1,), 4, 8, 0)), 2, 7)
    alone = PipelinePlan((StagePlan((2,), 0, 8, 0),), 1, 1)
    save_plan(Plan((halves, alone), 8, 10, 8), "both.toml")
    text = run(capsys, "simulate", "job.toml", "--profile", "profile.toml", "--plan", "both.toml")
    plan = load_plan("both.toml")
    peaks = [m.peak_bytes for m in predict_memory(plan, profile)]
    assert f"host alpha: {units.size(peaks[0] + peaks[1])} of {units.size(380_000)} for its ranks together" in text
    assert f"{units.size(peaks[2])} of {units.size(9_500_000)}" in text and "memory peak" in text
    assert "8 sequences = 4 micro-batches x 2 sequences (the last: 1) + 1 micro-batch x 1 sequence" in text
    assert "3 stages in 2 pipelines, schedule 1F1B pipeline" in text


@pytest.mark.parametrize("network", [Network(blocking_sends=True), Network(shared_nic=True)])
def test_idling_is_explained_on_any_network(network: Network) -> None:
    profile = make_profile((1.0, 1.0), make_model(2), latency_s=0.5)
    profile = replace(profile, devices=tuple(replace(device, host="both") for device in profile.devices))
    plan = make_plan_of((0, 2, 4), (0, 1), 2)
    simulated = simulate(plan, profile, network=network)
    found = idling(simulated.events, plan)
    assert all(found[r].total_s + s == pytest.approx(simulated.step_s) for r, s in simulated.busy_s.items())
    held_up = 0.5 if network.blocking_sends else 0.0  # rank 0 cannot begin its second forward while it sends the first
    assert found[0].link_s == pytest.approx(held_up + 1.0)


# profile


def test_profile_measures_under_mpirun_and_its_file_is_planned_with_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "tiny.toml"
    job.write_text(TINY)
    output = tmp_path / "new" / "profile.toml"
    done = run_mpi(2, ["-m", "hetero_mpi", "profile", str(job), "-o", str(output), "--set", "profile.repeats=1"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Written: ") == 1 and str(output) in done.stdout
    measured = load_profile(output)
    assert measured.source == "measured" and len(measured.devices) == 2 and len(measured.links) == 2
    assert measured.model.dtype == "fp32" and len(measured.model.layers) == 4
    monkeypatch.chdir(tmp_path)
    found = json.loads(run(capsys, "plan", str(job), "--profile", str(output), "--json"))
    assert found["step_s"] > 0 and plan_from_dict(found["plan"]).items == 4
    assert not (tmp_path / "runs").exists(), "profile and plan touch no run directory"


# inspect


def test_inspect_shows_a_profile_with_residuals_and_spread(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "inspect", "profile.toml")
    assert "Rank 2: x12 (cpu)" in text and "5.0 %" in text and "Picture: profile.png" in text
    assert "0 -> 1 50.0 ms 20.0 kB/s 5.0 % 10 % 2" in text
    assert Path("profile.png").stat().st_size > 20_000
    run(capsys, "inspect", "profile.toml", "-o", "elsewhere/other.png")
    assert Path("elsewhere/other.png").is_file()


def test_residuals_are_relative_to_the_measured_times() -> None:
    link = LinkProfile(0, 1, 0.05, 2e4, False, (1000, 10_000), (0.1, 0.5))
    assert residuals(link) == pytest.approx([0.0, 0.1])
    assert residuals(LinkProfile(0, 1, 0.05, 2e4, False)) == []


def test_inspect_shows_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(make_plan(cluster(), REQUEST), "what.toml")
    text = run(capsys, "inspect", "what.toml")
    assert "embedding + blocks" in text and "rank 2 idles" in text and "because: " in text


def test_inspect_shows_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = {
        "step": 7,
        "losses": np.array([4.0, 2.5, 3.25]),
        "job": {"train": {"steps": 20, "dtype": "bf16"}, "adapter": {"method": "lora"}},
        "model_config": {"model_type": "qwen3", "num_hidden_layers": 28},
        "versions": {"torch": "2.13.0"},
    }
    write_checkpoint(Path("step-00000007.h5"), metadata)
    text = run(capsys, "inspect", "step-00000007.h5")
    assert "step 7 of 20" in text and "3.2500 at the last step" in text and "2.5000 at best" in text
    assert "qwen3, 28 blocks; trained: a lora adapter" in text and "computed in bf16" in text
    assert "2 trained tensors, 16 numbers" in text and "torch 2.13.0" in text


def write_checkpoint(path: Path, metadata: dict[str, object]) -> None:
    """Two parameters, of 12 and 4 numbers."""
    with CheckpointWriter(path, metadata) as writer:
        for name, shape in (("a.weight", (3, 4)), ("b.weight", (4,))):
            for kind in ("parameters", "moments1", "moments2"):
                writer.write(kind, name, np.ones(shape, np.float32), "float32")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("job.toml", JOB, "it looks like a job"),
        ("odd.toml", "[odd]\na = 1\n", "neither a profile"),
        ("odd.txt", "= = =", "neither an HDF5 nor a TOML file"),
        ("cut.h5", "\x89HDF", "neither an HDF5 nor a TOML file"),
    ],
)
def test_inspect_says_what_it_wants(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, words: str
) -> None:
    Path(name).write_bytes(content.encode("latin-1"))
    assert words in run(capsys, "inspect", name, code=2)
    assert "cannot be read" in run(capsys, "inspect", "absent.toml", code=2)


# A laptop without torch and MPI

PROGRAM = """
import sys
for name in ("torch", "mpi4py", "transformers", "peft", "h5py", "bitsandbytes"):
    sys.modules[name] = None  # importing it raises ImportError
from hetero_mpi.cli import main
arguments = [["plan", "job.toml", "--profile", "profile.toml", "--explain", "-o", "plan.toml"], ["inspect", "plan.toml"]]
for each in arguments:
    assert main(each) == 0
assert "matplotlib" not in sys.modules, "nothing was drawn"
for each in (["simulate", "job.toml", "--profile", "profile.toml", "-o", "out"], ["inspect", "profile.toml"]):
    assert main(each) == 0
assert "matplotlib" in sys.modules
"""


def test_offline_commands_need_neither_torch_nor_mpi(folder: Path) -> None:
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + PROGRAM], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "out" / "timeline.svg").is_file() and (folder / "profile.png").is_file()


def test_dropout_is_seen_in_the_jobs_files(folder: Path) -> None:
    """Without the model's code, rates in its configuration and the adapter's are what can be seen."""
    question = offline.ask(Path("job.toml"), (), Path("profile.toml"))
    assert not offline.uses_dropout(question.loaded, {"attention_dropout": 0.0, "drop_count": 3})
    assert offline.uses_dropout(question.loaded, {"resid_pdrop": 0.1})
