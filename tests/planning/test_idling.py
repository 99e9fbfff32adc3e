"""The command ``simulate``, and why devices idle."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.planning.analysis.idle_time import Idling, idling
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.memory_model import predict_memory
from hetero_mpi.planning.schedule import busy
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import HostProfile
from hetero_mpi.planning.types.request import with_shared_nics
from hetero_mpi.planning.types.toml_files import load_plan, save_plan, save_profile
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError
from tests.support.planning_folder import REQUEST, cluster, run
from tests.support.planning_samples import make_model, make_plan_of, make_profile, random_instance
from tests.support.seeds import seeds


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


@seeds(20, 8)
def test_computing_and_idling_add_up_to_the_step(seed: int) -> None:
    profile, request = random_instance(seed, ranks=4, layers=8)
    try:
        report = make_plan(profile, request)
    except UserError:
        pytest.skip("nothing fits")
    simulated = simulate(report.plan, profile)
    found = idling(simulated.events, report.plan)
    assert busy(simulated.events) == pytest.approx(simulated.busy_s)
    assert simulated.busy_s.keys() == found.keys()
    for rank, seconds in simulated.busy_s.items():
        assert min(vars(found[rank]).values()) >= -1e-12
        assert seconds + found[rank].total_s == pytest.approx(simulated.step_s)


def test_simulate_shows_causes_and_writes_pictures_and_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "simulate", "job.toml", "--profile", "profile.toml", "-o", "here")
    simulated = simulate(make_plan(cluster(), REQUEST).plan, cluster())
    assert (
        "Simulated step: " in text and "waits for activations" in text and "step end: waiting for slower ranks" in text
    )
    assert sorted(path.name for path in Path("here").iterdir()) == ["timeline.png", "timeline.svg", "trace.json"]
    entries = json.loads(Path("here/trace.json").read_text())["traceEvents"]
    assert sum(entry["ph"] == "X" for entry in entries) == len(simulated.events)
    save_plan(make_plan_of((0, 8), (1,), 8), "alone.toml")
    run(capsys, "simulate", "job.toml", "--profile", "profile.toml", "--plan", "alone.toml")
    entries = json.loads(Path("runs/job/simulation/trace.json").read_text())["traceEvents"]
    assert {entry["pid"] for entry in entries} == {200}


def test_simulate_answers_for_other_networks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(make_plan_of((0, 2, 8), (0, 1), 8), "two.toml")
    arguments = ("simulate", "job.toml", "--profile", "profile.toml", "--plan", "two.toml")
    shared = with_shared_nics(cluster())
    for options, profile, words in (
        ((), cluster(), "Simulated step: "),
        (("--shared-nic",), shared, "one NIC per host for all messages to other hosts: no change"),
    ):
        simulated = simulate(load_plan("two.toml"), profile)
        text = run(capsys, *arguments, *options)
        assert f"Simulated step: {units.seconds(simulated.step_s)}, " in text and words in text
        assert ("Simulated with one NIC per host " in text) == bool(options)


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
    assert f"host alpha: {units.size(peaks[0] + peaks[1])} of {units.size(380_000)} for all its ranks" in text
    assert f"{units.size(peaks[2])} of {units.size(9_500_000)}" in text and "memory peak" in text
    assert "8 sequences = 4 micro-batches x 2 sequences (the last: 1) + 1 micro-batch x 1 sequence" in text
    assert "2 copies of the model (1 in 2 stages, 1 on 1 rank), schedule 1F1B copy " in text


def test_idling_is_explained_where_nics_are_shared() -> None:
    profile = make_profile((1.0, 1.0), make_model(2), latency_s=0.5)
    profile = replace(profile, devices=tuple(replace(device, host="both") for device in profile.devices))
    plan = make_plan_of((0, 2, 4), (0, 1), 2)
    simulated = simulate(plan, with_shared_nics(profile))
    found = idling(simulated.events, plan)
    assert all(found[r].total_s + s == pytest.approx(simulated.step_s) for r, s in simulated.busy_s.items())
    assert found[0].link_s == pytest.approx(1.0)
