"""``benchmarks/peers.py`` compares like with like, and says which is which."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import peers  # noqa: E402


def plan_of(*pipelines: int) -> Plan:
    """A plan of pipelines with so many stages each, of a chain of four layers."""
    made = tuple(
        PipelinePlan(tuple(StagePlan((stage,), stage, stage + 1, 0) for stage in range(count)), 1, 4)
        for count in pipelines
    )
    return Plan(made, 4, 16, 4)


@pytest.mark.parametrize(
    ("stages", "kind"),
    [((2,), "pipeline of 2"), ((1, 1), "data parallel 2"), ((1,), "one process"), ((2, 1), "2 pipelines of 2, 1")],
)
def test_a_plan_is_called_what_it_is(stages: tuple[int, ...], kind: str) -> None:
    assert peers.kind_of(plan_of(*stages)) == kind


def test_pipelines_are_compared_with_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {peers.OUR_1F1B: 0.386, peers.OUR_PIPELINE: 0.385, peers.OUR_CHOICE: 0.346, peers.DATA_PARALLEL: 0.359}
    seconds |= {"Schedule1F1B": 0.409, "ScheduleDualPipeV": 0.372, peers.PLAIN: 0.614}
    kinds = {
        peers.OUR_CHOICE: peers.DATA_PARALLEL_2,
        peers.DATA_PARALLEL: peers.DATA_PARALLEL_2,
        peers.PLAIN: peers.ONE_PROCESS,
    }
    rows = {name: peers.Row(kinds.get(name, peers.PIPELINE_OF_2), [step] * 3) for name, step in seconds.items()}
    rows |= {
        name: peers.Row(peers.PIPELINE_OF_2, error="did not end")
        for name in (*peers.SCHEDULES, *peers.OURS)
        if name not in rows
    }
    assert peers._print_ratios(rows, unlike=False), "0.372 / 0.385 is below the bar"
    printed = capsys.readouterr().out
    assert "ours, 1F1B (pipeline of 2) against Schedule1F1B (pipeline of 2): 1.060 (bar 0.97)" in printed
    assert (
        "ours, planner's pipeline (pipeline of 2) against ScheduleDualPipeV (pipeline of 2): 0.966 (bar 0.97, missed)"
        in printed
    )
    assert "ours, free choice (data parallel 2) against DistributedDataParallel (data parallel 2): 1.038" in printed


def test_contenders_that_were_not_chosen_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {peers.OUR_V: 0.35, "ScheduleDualPipeV": 0.37, peers.PLAIN: 0.6}
    rows = {name: peers.Row(peers.PIPELINE_OF_2, [step] * 3) for name, step in seconds.items()}
    assert not peers._print_ratios(rows, unlike=False)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if ") against " in line)
    assert line.strip() == "ours, zbv (pipeline of 2) against ScheduleDualPipeV (pipeline of 2): 1.057"


@pytest.mark.long
def test_all_others_compute_the_same_losses(tmp_path: Path) -> None:
    job = peers._job(tmp_path, 1)
    worker = [str(peers.WORKER), str(job)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    losses = []
    for name in (peers.PLAIN, peers.DATA_PARALLEL, "ScheduleDualPipeV"):
        command = [*([sys.executable] if name == peers.PLAIN else torchrun), *worker, name, "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"seconds"'))
        losses.append(json.loads(line)["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_a_contender_that_does_not_end_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers start their ranks in process groups of their own, and leave them behind when they are killed."""
    monkeypatch.setattr(peers, "PATIENCE_S", 3.0)
    started = tmp_path / "started"
    rank = f"import os, time; open({str(started)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)"
    launcher = (
        "import subprocess, sys\n"
        f"ranks = [subprocess.Popen([sys.executable, '-c', {rank!r}], start_new_session=True) for _ in range(2)]\n"
        "[one.wait() for one in ranks]"
    )
    assert peers._run([sys.executable, "-c", launcher]).returncode == peers.TIMED_OUT
    ranks = [int(word) for word in started.read_text().split()]
    assert len(ranks) == 2
    until = time.monotonic() + 30  # they are killed, and end when the system gets to it
    while (left := set(map(state, ranks))) - {None, psutil.STATUS_ZOMBIE} and time.monotonic() < until:
        time.sleep(0.05)
    assert left <= {None, psutil.STATUS_ZOMBIE}


@pytest.mark.slow
def test_figures_of_a_contender_that_hangs_at_its_exit_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PATIENCE_S", 3.0)
    figures: dict[str, list[float]] = {"seconds": [0.5, 0.4], "losses": [7.0, 6.5]}
    for printed, expected in ((json.dumps(figures), figures), ("", "did not end within 3 s")):
        worker = tmp_path / "worker.py"
        worker.write_text(f"import time\nprint({printed!r}, flush=True)\ntime.sleep(600)\n")
        monkeypatch.setattr(peers, "WORKER", worker)
        assert peers._other(peers.PLAIN, tmp_path / "job.toml", []) == expected


def state(process: int) -> str | None:
    try:
        return str(psutil.Process(process).status())
    except psutil.NoSuchProcess:
        return None
