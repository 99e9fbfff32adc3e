"""Metrics for TensorBoard, Weights & Biases and Trackio: what their own readers find, and that none of them ends a run."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.report.past_run import read_run
from hetero_mpi.rundir.metrics import Trackers
from tests.support.mpi import ROOT
from tests.support.past_runs import cluster, make_run, planned


def test_tensorboard_files(tmp_path: Path) -> None:
    loader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_file_loader", reason="tensorboard is not installed"
    )
    profile = cluster(2)
    lines = read_run(make_run(tmp_path / "a", planned(profile), profile)).metrics.steps
    trackers = Trackers(["tensorboard"], tmp_path, {})
    trackers.step(replace(lines[0], reward_margin=0.5))
    trackers.evaluation(1, 2.5, reward_margin=0.25, sets={"training": 3.5})
    trackers.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = [
        (value.tag, event.step) for event in loader.EventFileLoader(str(file)).Load() for value in event.summary.value
    ]
    found = dict(values)
    assert found["loss/training"] == found["loss/held out"] == found["loss/training, held out"] == 1
    assert len(found) == len(values), "a set of any name has a tag of its own"
    assert found["rewards/margins"] == found["rewards/margins, held out"] == 1 and "kl" not in found


@pytest.mark.slow
def test_weights_and_biases_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a key nothing is asked for and nothing is sent."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    profile = cluster(2)
    lines = read_run(make_run(tmp_path / "a", planned(profile), profile)).metrics.steps
    caplog.set_level("INFO")
    trackers = Trackers(["wandb"], tmp_path, {"train": {"steps": 3}})
    for line in lines[:2]:
        trackers.step(line)
    trackers.evaluation(2, 2.5)
    trackers.close()
    assert "wandb: offline; to upload later: wandb sync " in caplog.text
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    until = time.monotonic() + 30
    while b"loss/held out" not in (kept := file.read_bytes()) and time.monotonic() < until:
        time.sleep(0.1)  # wandb's own process writes it, at times after ``finish``
    # protocol buffers, in which texts stand as they are
    assert kept.count(b"loss/training") >= 2 and b"loss/held out" in kept
    for line in lines[:2]:
        assert repr(line.loss).encode() in kept


def test_trackio(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    program = """
import sys
from dataclasses import replace
from pathlib import Path
from hetero_mpi.rundir.metrics import Trackers
trackers = Trackers(["trackio"], Path(sys.argv[1]) / "mine", {"train": {"steps": 3}})
trackers.evaluation(2, 2.5)
trackers.close()
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=120)
    (file,) = (tmp_path / "trackio").glob("hetero_mpi*.db")
    with contextlib.closing(sqlite3.connect(file)) as found:
        ((run, step, metrics),) = found.execute("select run_name, step, metrics from metrics").fetchall()
    assert (run, step) == ("mine", 2) and "held out" in str(metrics)


def test_a_tracker_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def log(self, values: dict[str, float], *, step: int) -> None:
            raise RuntimeError("no room")

        def finish(self) -> None:
            raise RuntimeError("closed twice")

    monkeypatch.setattr("hetero_mpi.rundir.trackers.trackio.open_tracker", lambda run_dir, job: Full())
    monkeypatch.setitem(sys.modules, "wandb", None)
    caplog.set_level("INFO")
    trackers = Trackers(["wandb", "trackio"], tmp_path, {})
    trackers.evaluation(1, 2.5)
    trackers.evaluation(2, 2.5)
    trackers.close()
    said = caplog.text
    assert said.count("Warning: opening wandb (pip install wandb") == 1
    assert said.count("Warning: sending metrics to trackio failed (RuntimeError: no room)") == 1
