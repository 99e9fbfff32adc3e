"""The command ``plan`` as a person runs it, on a made-up profile in a file; losses, and what other machines would change."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hetero_mpi.commands import plan_commands
from hetero_mpi.job.load import job_from_tables, load_job
from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.decision.alternatives import AS_INT8, losses, what_ifs
from hetero_mpi.planning.decision.decide import decide
from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.search.search import Decision
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.cluster_changes import (
    restricted,
    with_adapters,
    with_copy_of,
    with_faster_links,
    with_free_links,
    with_plenty_of_memory,
)
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import (
    load_profile,
    load_report,
    profile_from_dict,
    profile_to_dict,
    report_from_dict,
    save_plan,
    save_profile,
)
from hetero_mpi.util import units
from hetero_mpi.util.shipped import shipped_profiles
from tests.support.errors import refuses
from tests.support.planning_folder import REQUEST, cluster, run
from tests.support.planning_samples import SEQUENCE, make_model, make_plan_of, make_profile, random_instance

ROOT = Path(__file__).parents[2]


# plan


@cache
def best() -> PlanReport:
    """The planner's own plan of the folder's profile and job."""
    return make_plan(cluster(), REQUEST)


def test_plan_prints_the_planners_plan_and_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "plan", "job.toml", "--profile", "profile.toml", "-o", "out/plan.toml")
    report = best()
    assert load_report("out/plan.toml") == report
    assert "rank 2 idles: " in text and "Predicted: " in text and "tokens/s" in text
    busiest = simulate(report.plan, cluster()).busy_s[0] / report.predicted_step_s
    assert f"Utilisation: rank 0 {units.percent(busiest)}, rank 1 " in text and "because: 2 of 3 ranks" in text
    assert "Limited by: " in text and "micro-batch: the planner's choice among 1, 2" in text
    assert "What if" not in text
    text = run(capsys, "plan")
    assert all(f" {name}: " in text for name in ("profile.toml", *shipped_profiles())), "those of the folder, too"


def test_plan_as_json_holds_plannings_own_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "plan", "job.toml", "--profile", "profile.toml", "--json", "--explain"))
    profile = cluster()
    report = best()
    simulated = simulate(report.plan, profile)
    assert report_from_dict(found["plan"]) == report
    assert found["step_s"] == simulated.step_s == found["planner_step_s"]
    assert found["tokens_per_s"] == pytest.approx(80 / simulated.step_s)
    assert found["bound_step_s"] == fluid_bound_s(profile, REQUEST) < simulated.step_s
    assert found["gap"] == pytest.approx(simulated.step_s / found["bound_step_s"] - 1)
    assert found["utilisation"] == {str(r): s / simulated.step_s for r, s in simulated.busy_s.items()}
    answers = {entry["change"]: entry["step_s"] for entry in found["what_if"]}
    assert list(answers) == [
        "link 0 - 1 10x faster", AS_INT8, "without rank 0 (x1)", "without rank 1 (x1.5)", "a second x1 on rank 0's host",
    ]  # fmt: skip
    assert answers["without rank 1 (x1.5)"] == make_plan(restricted(profile, [0, 2]), REQUEST).predicted_step_s
    assert answers["without rank 1 (x1.5)"] > simulated.step_s > answers["a second x1 on rank 0's host"]


def test_a_plan_edited_by_hand_is_costed_just_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = make_plan_of((0, 2, 8), (0, 1), 8)
    save_plan(edited, "edited.toml")
    arguments = ("plan", "job.toml", "--profile", "profile.toml", "--plan", "edited.toml")
    found = json.loads(run(capsys, *arguments, "--json"))
    least_s = best().predicted_step_s
    assert found["step_s"] == simulate(edited, cluster()).step_s > found["planner_step_s"] == least_s
    assert found["lost"]["choice"] == pytest.approx(1 - least_s / found["step_s"])
    text = run(capsys, *arguments)
    assert "the plan was given" in text and "The planner's plan: " in text and "this plan (the planner's plan" in text
    save_plan(make_plan_of((0, 2, 7), (0, 1), 8), "short.toml")
    assert "layers" in run(capsys, *arguments[:-1], "short.toml", code=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.sequence_length=20", "data.sequence_length = 20: the profile has 10"),
        ("train.dtype=bf16", 'train.dtype = "bf16": the profile has "fp32"'),
        (
            "model.config={model_type='qwen3', num_hidden_layers=6}",
            'model.config: a model of type "qwen3": the profile has "llama"',
        ),
        (
            "model.config={model_type='llama', num_hidden_layers=9}",
            "model.config: a model of 9 blocks: the profile has 6",
        ),
        ("adapter.method=lora", 'adapter.method = "lora": the profile has full fine-tuning'),
    ],
)
def test_a_profile_of_something_else_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], change: str, words: str
) -> None:
    for command in ("plan", "simulate"):
        text = run(capsys, command, "job.toml", "--profile", "profile.toml", "--set", change, code=2)
        assert words in text and "profile.toml" in text and "--set" in text


def test_the_stand_in_of_an_emulated_run_is_planned_as_the_profiles_model(folder: Path) -> None:
    job, profile = Path("job.toml"), Path("profile.toml")
    emulated = plan_commands.ask(job, ("cluster.emulate=profile.toml", "data.sequence_length=5"), profile)
    assert emulated.request == plan_commands.ask(job, (), profile).request
    Path("run.json").write_text("{")
    with refuses("run.damaged", "run.json"):
        plan_commands.ask(None, (), Path())


@pytest.mark.parametrize(("rank", "packed"), [(8, False), (16, True)], ids=["rank", "quantization"])
def test_a_profile_of_another_adapter_is_refused(folder: Path, rank: int, packed: bool) -> None:
    """Without a job, the profile's own rank and quantization are planned for."""
    profile = cluster()
    model = replace(with_adapters(profile.model, packed), adapter_rank=rank)
    save_profile(replace(profile, model=model), Path("adapter.toml"))
    question = plan_commands.ask(None, ("model.config.attention_dropout=0.1",), Path("adapter.toml"))
    assert question.loaded.job.adapter.rank == rank
    with refuses("plan.other_job", "rank = 16" if not packed else "quantization"):
        plan_commands.ask(Path("job.toml"), ("adapter.method=lora",), Path("adapter.toml"))
    with refuses("plan.other_job", "a:b", "llama"):
        plan_commands.plan_question(job_from_tables({"model": {"factory": "a:b"}}, "own", "."), profile)
    with refuses("job.invalid", "model.path"):
        plan_commands.ask(None, ("model.pth=a",), Path("adapter.toml"))


@pytest.mark.parametrize("key", ["model.quantization", "adapter.rank", "train.freeze", "cluster.device"])
def test_what_a_profile_measures_is_not_set_without_a_job(folder: Path, key: str) -> None:
    with refuses("plan.fixed_by_profile", key):
        plan_commands.ask(None, ("train.global_batch=8", f"{key}=4", "adapter.method=none"), Path("profile.toml"))


def test_what_the_job_fixes_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*changes: str) -> dict[str, object]:
        sets = [part for change in changes for part in ("--set", change)]
        return json.loads(run(capsys, "plan", "job.toml", "--profile", "profile.toml", "--json", *sets))  # type: ignore[no-any-return]

    memory = planned("cluster.memory_bytes=150000", "plan.memory_reserve=0.1")["plan"]["report"]["memory"]  # type: ignore[index]
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
    assert "with an adapter the weights are frozen" in refused


def test_what_limits_is_said_once_and_alternatives_are_priced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "plan", "job.toml", "--profile", "profile.toml")
    assert text.lower().count("limited by") == 1
    report = best()
    assert "the same ranks with an even cut: " in text and "busiest: stage " in text
    without = make_plan(restricted(cluster(), [0, 2]), REQUEST).predicted_step_s / report.predicted_step_s - 1
    assert f"without it, the step is {units.percent(without)} longer" in text, "what the least busy rank is there for"


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
        "pipelines[0]: micro_batch = 4: the job allows 1"
    ]


def test_a_plan_that_the_planner_would_not_make_is_costed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faster than the planner's own, or where it has none, as the job leaves no other micro-batch: a step loses less than all."""
    save_plan(best().plan, "best.toml")
    arguments = ("plan", "job.toml", "--profile", "profile.toml", "--plan", "best.toml", "--json", "--set")
    worse = json.loads(run(capsys, *arguments, "plan.schedule=gpipe", "--set", "plan.pipelines=1"))
    assert worse["planner_step_s"] > worse["step_s"] and worse["lost"]["choice"] == 0
    small = (*arguments, "cluster.memory_bytes=97000", "--set", "train.recompute=false", "--set", "train.micro_batch=8")
    alone = json.loads(run(capsys, *small))
    assert alone["planner_step_s"] is None and alone["step_s"] > 0
    assert "The planner found no plan: the model does not fit" in run(capsys, *(x for x in small if x != "--json"))
    for found in (worse, alone):
        lost = found["lost"]
        assert sum(lost[cause] for cause in ("choice", "links", "memory", "granularity")) <= 1


def test_what_if_names_the_next_ethernet() -> None:
    model = make_model(6, boundary_bytes_per_token=10**7)
    profile = make_profile((1.0, 1.0), model, memory_bytes=10**12, bytes_per_s=0.94e9 / 8)
    request = PlanRequest(8, 10, (1,))
    own = make_plan(profile, request)
    answers = {answer.change: answer.step_s for answer in what_ifs(own, profile, request)}
    faster = with_faster_links(profile, times=10, latency=False)
    assert answers["10 GbE instead of 1"] == make_plan(faster, request).predicted_step_s < own.predicted_step_s
    assert "one more x1 on rank 0's host" in answers


@pytest.mark.slow
def test_a_slow_card_that_is_used_is_used_for_a_reason() -> None:
    """2 x L4 + A6000 + P40: the P40 idles, or the plan says what it would cost to leave it out."""
    profile = load_profile(ROOT / "profiles" / "zorse-2xl4-a6000-p40.toml")
    request = PlanRequest(64, profile.model.sequence_length, (1, 2, 4), recompute_choices=(False, True))
    report = make_plan(profile, request)
    p40 = next(device.rank for device in profile.devices if "P40" in device.name)
    others = [device.rank for device in profile.devices if device.rank != p40]
    without = make_plan(restricted(profile, others), request).predicted_step_s
    if p40 in {idle.rank for idle in report.idle}:
        assert without <= report.predicted_step_s * (1 + 1e-9)
    else:
        longer = f"without it, the step is {units.percent(without / report.predicted_step_s - 1)} longer"
        assert any(f"rank {p40} (NVIDIA P40) holds" in reason and longer in reason for reason in report.reasons)
        assert without > report.predicted_step_s


def test_memory_that_hosts_share_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = cluster()
    devices = tuple(replace(d, host="box", shares_host_memory=True) for d in profile.devices)
    links = tuple(replace(link, same_host=True) for link in profile.links)
    hosts = (HostProfile("box", 10**9, "made up"),)
    save_profile(replace(profile, devices=devices, links=links, hosts=hosts), folder / "one.toml")
    text = run(capsys, "plan", "job.toml", "--profile", "one.toml")
    assert "host box: " in text


# Losses and what-if


def test_losses_add_up_and_name_what_limits() -> None:
    slow_links = make_profile((1.0, 1.0, 1.0), make_model(6), latency_s=9.0)
    short = make_profile((1.0, 4.0), make_model(6), memory_bytes=(60_000, 10_000_000))
    uneven = make_profile((1.0, 1.0), make_model(1))
    even = make_profile((1.0,), make_model(6))
    request = PlanRequest(8, 10, (1,))
    for profile, limit in ((slow_links, "link"), (short, "memory"), (uneven, "granularity"), (even, "device")):
        report = make_plan(profile, request)
        lost = losses(report, report, profile, request)
        assert lost.limit == limit, lost
        total = lost.choice + lost.links + lost.memory + lost.granularity
        assert total == pytest.approx(1 - lost.bound_s / lost.step_s)
    profile = make_profile((1.0, 9.0), make_model(6))
    bad = complete_plan(make_plan_of((0, 1, 8), (0, 1), 8), profile, request)
    assert losses(bad, make_plan(profile, request), profile, request).limit == "plan"


@pytest.mark.parametrize(("memory_bytes", "searches"), [(10_000_000, 1), (60_000, 2)])
def test_what_is_lost_takes_one_search_where_memory_is_plenty(
    memory_bytes: int, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says what whole searches of both clusters would."""
    profile = make_profile((1.0, 2.0, 2.0), make_model(10), memory_bytes, 0.1, 1e4)
    request = PlanRequest(8, SEQUENCE, (1, 2), max_pipelines=3, recompute_choices=(False, True))
    own, free = make_plan(profile, request), with_free_links(profile)
    whole = [decide(one, request) for one in (free, with_plenty_of_memory(free))]
    asked: list[PlanRequest] = []

    def counted(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
        asked.append(request)
        return decide(profile, request)

    monkeypatch.setattr("hetero_mpi.planning.decision.alternatives.fastest", counted)
    lost = losses(own, own, profile, request)
    assert len(asked) == searches and all(own.plan in one.near for one in asked)
    seconds = [one.step_s for one in whole if one is not None]
    assert lost.free_links_s == pytest.approx(seconds[0])
    assert lost.memory == pytest.approx((seconds[0] - min(seconds)) / own.predicted_step_s)


def test_faster_links_are_not_planned_for_where_messages_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free links bound what faster ones can bring: the same answers, with fewer searches."""
    profile, request = make_profile((1.0, 1.0), make_model(6), bytes_per_s=1e12), PlanRequest(8, 10, (1,))
    own = make_plan(profile, request)
    lost = losses(own, own, profile, request)
    assert lost.free_links_s == pytest.approx(own.predicted_step_s)
    searched = [answer for answer in what_ifs(own, profile, request) if "faster" in answer.change]
    monkeypatch.setattr("hetero_mpi.planning.decision.alternatives.with_copy_of", lambda profile, rank: profile)
    asked: list[object] = []
    monkeypatch.setattr("hetero_mpi.planning.decision.alternatives.fastest", lambda *question: asked.append(question))
    answers = list(what_ifs(own, profile, request, lost.free_links_s))
    known = [answer for answer in answers if "faster" in answer.change]
    assert [one.change for one in known] == [one.change for one in searched] and len(known) == 1
    assert known[0].step_s == pytest.approx(searched[0].step_s) and len(asked) == 2, "one machine fewer, one more"


def test_changed_clusters_are_what_they_are_called() -> None:
    profile, _ = random_instance(seed=3, ranks=3, layers=5)
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


def test_a_reason_and_a_what_if_figure_for_one_rank_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """On this cluster, a longer search for one of them found another plan."""
    text = run(capsys, "plan", "--profile", "zorse-2xa6000-2xw6800", "--explain")
    [(rank, longer)] = re.findall(r"rank (\d+) \([^()]*\) holds .*: planned without it, the step is (.*) longer", text)
    assert re.findall(rf"without rank {rank} .*?: \+(.*?) \(", text) == [longer]


@pytest.mark.parametrize(
    ("load", "file", "place"),
    [
        (load_profile, "plan.toml", "--plan"),
        (load_report, "profile.toml", "--profile"),
        (load_profile, "job.toml", "job"),
        (load_job, "plan.toml", "--plan"),
    ],
)
def test_a_file_of_another_kind_is_refused_in_one_line(
    folder: Path, load: Callable[[str], object], file: str, place: str
) -> None:
    save_plan(best(), "plan.toml")
    with refuses("file.kind", file, place) as refusal:
        load(file)
    assert "\n" not in str(refusal.value)
