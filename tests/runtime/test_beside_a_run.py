"""Pages, reports, sensors, trackers and the like stand beside a run: each of them fails, and the run ends well on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import Outcome, Workshop

pytestmark = pytest.mark.slow

RANKS = 2
RUNTIME, REPORT = "hetero_mpi.training", "hetero_mpi.report"
WRITTEN = {"report": {"write": True}}
WATCHED = {"report": {"write": False, "watch": True}}
SAMPLED = {"sample": {"prompt": "abc", "max_new_tokens": 3}}
FAILING: dict[str, tuple[dict[str, dict[str, Any]], list[str]]] = {
    "the live page cannot be started": (WATCHED, [f"{RUNTIME}.run_report:start_module"]),
    "the live page cannot be ended": (WATCHED, ["subprocess:Popen.wait"]),
    "now.json": (WRITTEN, [f"{RUNTIME}.run_report:write_present"]),
    "report.html": (WRITTEN, [f"{REPORT}.page.document:write_report"]),
    "trace.json": (WRITTEN, [f"{RUNTIME}.run_report:save_run_trace"]),
    "architecture.png": (WRITTEN, [f"{REPORT}.figures.architecture:architecture"]),
    "the device's sensors": ({}, ["hetero_mpi.device.backend:Backend.sensors"]),
    "figures of a rank": ({}, ["hetero_mpi.comm.mpi_transport:MpiTransport.sending"]),
    "the watchdog": ({}, [f"{RUNTIME}.watchdog:StandingReader.read_standing"]),
    "steps.jsonl": ({}, ["hetero_mpi.engine.recording:rank_step_to_dict", "hetero_mpi.engine.recording:keep_until"]),
    "metrics.jsonl of before": ({}, ["hetero_mpi.rundir.metrics:keep_until"]),
    "a line of a step": ({}, [f"{REPORT}.progress:ProgressDisplay._line"]),
    "the plan on the screen": ({}, [f"{RUNTIME}.run_report:overview"]),
    "run.json": (
        {},
        [f"{RUNTIME}.run_report:describe_run", f"{RUNTIME}.loop:note_step", f"{RUNTIME}.run_report:note_step"],
    ),
    "the profile that was used": ({}, [f"{RUNTIME}.run_report:load_profile"]),
    "the summary": ({}, [f"{RUNTIME}.run_report:final_lines"]),
    "processors' times": ({}, ["psutil:cpu_times"]),
    "the sample's prompt": (SAMPLED, ["hetero_mpi.inference.generate:render_prompt"]),
    "the sample's text": (SAMPLED, ["hetero_mpi.inference.generate:Spelling.add"]),
    "stragglers": ({"plan": {"rebalance": True}}, [f"{RUNTIME}.rebalance:StepExchange.ratios"]),
    "a tracker": (
        {"report": {"write": False, "trackers": ["tensorboard"]}},
        ["hetero_mpi.rundir.trackers.tensorboard:TensorBoard.log"],
    ),
}
"""Activity -> (tables of the job, what fails), of which a line tells."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    workshop = Workshop(tmp_path_factory.mktemp("beside"))
    model, entries = workshop.model(), {}
    for number, (activity, (tables, names)) in enumerate(FAILING.items()):
        job = workshop.job(f"job-{number}", workshop.values(model), **{"train": {"steps": 2}, **tables})
        run_dir = workshop.directory / f"run-{number}"
        entries[activity] = {"job": job, "run_dir": run_dir, "breaks": "something_beside_fails", "names": names}
    return workshop.run_entries(RANKS, entries, timeout_s=600)


@pytest.mark.parametrize("activity", FAILING)
def test_what_stands_beside_a_run_cannot_end_it(activity: str, outcomes: dict[str, Outcome]) -> None:
    outcome, names = outcomes[activity], FAILING[activity][1]
    assert outcome.codes == (0,) * RANKS and outcome.raised == ("",) * RANKS
    lines = [line for line in outcome.printed.splitlines() if "RuntimeError: of a test" in line]
    assert 1 <= len(lines) <= RANKS * len(names)
