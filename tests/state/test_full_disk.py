"""A disk that is full while a run goes on: a real one, small, mounted for the test (root; skipped elsewhere)."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_mpi.rundir.line_files import keep_until
from hetero_mpi.rundir.logs import LOGGER, setup_logging
from hetero_mpi.rundir.metrics import Evaluation, MetricsWriter, StepMetrics, read_metrics
from hetero_mpi.rundir.run_directory import EventLog, append_event, claim, set_run_aside
from hetero_mpi.state.directory import checkpoint_path, set_later_aside
from hetero_mpi.util.errors import ExitCode
from tests.support.errors import refuses
from tests.support.long_run import LongRun

pytestmark = pytest.mark.slow


class SmallDisk:
    """A mounted disk of ``mebibytes`` MiB."""

    def __init__(self, path: Path) -> None:
        self.path, self._ballast = path, path / "ballast"

    def fill(self) -> None:
        """Until not a byte more finds room in a new page."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (65536, 4096):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def free(self) -> None:
        self._ballast.unlink()


def mounted(path: Path, mebibytes: int) -> Iterator[SmallDisk]:
    path.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("a small disk can be mounted by root only, where mounting is allowed")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    yield from mounted(tmp_path / "small", 1)


@pytest.fixture
def larger_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    yield from mounted(tmp_path / "small", 64)


def line(step: int) -> StepMetrics:
    return StepMetrics(step, 2.0, 1.0, 1e-3, 100, 1e3, 0.1, 0.1)


def test_metrics_wait_for_room_and_are_whole_then(disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    path = disk.path / "metrics.jsonl"
    with caplog.at_level(logging.INFO), MetricsWriter(path) as writer:
        for step in range(1, 101):
            if step == 10:
                disk.fill()
            writer.step(line(step))
            if step == 10:
                writer.evaluation(step, 1.5)
            if step == 90:
                assert len(read_metrics(path).steps) < 60, "the disk is full"
                disk.free()
    metrics = read_metrics(path)
    assert [one.step for one in metrics.steps] == list(range(1, 101)), "nothing is lost, and no line is torn"
    assert metrics.evaluations == (Evaluation(10, 1.5),)
    told = [record.getMessage() for record in caplog.records]
    assert (
        sum("its lines are buffered" in text for text in told) == 1
        and sum("is writable again" in text for text in told) == 1
    )


def test_a_run_that_goes_on_drops_later_steps_on_a_full_disk_too(disk: SmallDisk) -> None:
    path = disk.path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 101):
            writer.step(line(step))
    steps = disk.path / "steps.jsonl"
    steps.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 101)))
    disk.fill()
    with MetricsWriter(path, 40):
        keep_until(steps, 40)
    assert [one.step for one in read_metrics(path).steps] == list(range(1, 41))
    assert steps.read_text().count("\n") == 40
    assert sorted(entry.name for entry in disk.path.iterdir()) == ["ballast", "metrics.jsonl", "steps.jsonl"]


def test_the_supervisors_events_wait_for_room(disk: SmallDisk, capfd: pytest.CaptureFixture[str]) -> None:
    journal = EventLog(disk.path, "supervisor")
    disk.fill()
    for number in range(100):
        journal.report("start", f"start {number}")
    append_event(disk.path, "copies", "of a rank")
    disk.free()
    journal.report("end", "the end")
    told = [json.loads(text)["text"] for text in (disk.path / "events.jsonl").read_text().splitlines()]
    assert told[:-1] == [f"start {number}" for number in range(100)] and told[-1] == "the end"
    assert capfd.readouterr().err.count("its lines are buffered") == 1


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_an_earlier_run_that_cannot_be_set_aside_stays_as_it_was(disk: SmallDisk) -> None:
    run = disk.path / "run"
    (run / "logs").mkdir(parents=True)
    for name in ("metrics.jsonl", "plan.toml", "logs/rank-0000.log"):
        (run / name).write_text("a line of an earlier run\n" * 400)
    disk.fill()
    before = _content(run)
    with refuses("run.not_archived"):
        set_run_aside(run, lambda _: False)
    assert _content(run) == before


def test_later_checkpoints_that_cannot_be_moved_aside_are_a_plain_error(disk: SmallDisk) -> None:
    (disk.path / "checkpoints").mkdir()
    for step in (2, 4):
        checkpoint_path(disk.path / "checkpoints", step).write_text("")
    before = _content(disk.path)
    taken = f"remount,nr_inodes={len(before) + 1}"
    subprocess.run(["mount", "-o", taken, str(disk.path)], check=True)
    with refuses("resume.not_archived"):
        set_later_aside(disk.path, 2)
    assert _content(disk.path) == before


def test_logs_and_the_lock_of_a_full_disk_are_nobodys_end(disk: SmallDisk, capfd: pytest.CaptureFixture[str]) -> None:
    (disk.path / ".lock").touch()
    try:
        path = setup_logging(disk.path, 0, 1)
        assert path is not None
        disk.fill()
        for number in range(500):
            logging.getLogger(LOGGER).info("a line of some length, number %d", number)
        with claim(disk.path):
            disk.free()
        logging.getLogger(LOGGER).info("the last line")
        assert "the last line" in path.read_text()
    finally:
        setup_logging(None, 0, 1)
        logging.captureWarnings(False)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.long
def test_training_outlives_a_full_disk_np2(larger_disk: SmallDisk, tmp_path: Path) -> None:
    job, run = LongRun(tmp_path, 2), larger_disk.path / "run"
    launch = [sys.executable, "-m", "hetero_mpi", "launch", "-np", "2", "--", *job.arguments(run)]
    more = ["--set", "checkpoint.every=50", "--set", "report.write=true"]
    with job.started([*launch, *more], job.environment(), run) as running:
        running.wait_for_steps(5)
        larger_disk.fill()
        running.wait_for("the warning", lambda: "metrics.jsonl cannot be written" in running.text())
        running.wait_for(
            "a checkpoint that is not written", lambda: "checkpoint" in running.text().split("cannot be")[1]
        )
        larger_disk.free()
        running.wait_for_steps(120)
        running.process.send_signal(signal.SIGINT)
        assert running.end() == ExitCode.STOPPED, running.text()
        told = running.text()
    assert "Traceback" not in told and told.count("metrics.jsonl cannot be written") == 1, told
    steps = [one.step for one in read_metrics(run / "metrics.jsonl").steps]
    assert steps == list(range(1, len(steps) + 1))
    assert f"{run}/checkpoints/step-{steps[-1]:08d}.h5 is whole" in told
