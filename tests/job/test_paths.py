"""What a job file can name for writing stays where it belongs: no job of somebody else's writes elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero_mpi.cli import main
from hetero_mpi.job.load import load_job, run_directory
from hetero_mpi.rundir.run_directory import claim, refuse_links
from tests.support.errors import refuses
from tests.support.planning_samples import JOB_TOML


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "work"
    directory.mkdir()
    monkeypatch.chdir(directory)
    path = directory / "job.toml"
    path.write_text(JOB_TOML)
    return path


@pytest.mark.parametrize("text", ["../x", "runs/../../x", "../../{name}", "away/{name}", "away", "inner/up/x"])
def test_a_relative_run_directory_stays_inside_links_included(job: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (job.parent / "away").symlink_to(tmp_path / "elsewhere")
    (job.parent / "inner").mkdir()
    (job.parent / "inner" / "up").symlink_to("../..")
    with refuses("job.output.run_dir"):
        load_job(job, [f"output.run_dir={text}"])


def test_what_is_meant_is_allowed(job: Path, tmp_path: Path) -> None:
    (job.parent / "near").symlink_to(job.parent / "runs")
    for text in ("runs/{name}", "near/{name}", str(tmp_path / "far" / "x"), "~/x"):
        assert run_directory(load_job(job, [f"output.run_dir={text}"])).is_absolute()
    for text in ("cache", "a/../cache", str(tmp_path / "cache"), "~/cache"):
        assert load_job(job, [f"model.shard_cache={text}"]).job.model.shard_cache == text


@pytest.mark.parametrize("key", ["model.shard_cache", "profile.save_as"])
@pytest.mark.parametrize("text", ["../cache", "a/../../cache", ".."])
def test_a_relative_place_that_is_written_stays_inside(job: Path, key: str, text: str) -> None:
    with refuses(f"job.{key}"):
        load_job(job, [f"{key}={text}"])


@pytest.mark.parametrize("name", ["checkpoints", "copies", "logs", "metrics.jsonl", ".lock", "logs/rank-0000.log"])
def test_links_that_lead_out_of_a_run_directory_are_refused(tmp_path: Path, name: str) -> None:
    run, link = tmp_path / "run", tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    outside = tmp_path / "precious"
    link.symlink_to(outside)
    with refuses("run.link"), claim(run):
        pass
    assert not outside.exists()
    link.unlink()
    (run / "real").touch() if "." in name else (run / "real").mkdir()
    link.symlink_to(run / "real")
    refuse_links(run)


@pytest.mark.parametrize("place", ["working directory", "job", "run directory", "launched"])
def test_paths_that_are_no_utf8_are_refused_before_anything_is_made(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path / "M") + b"\xfcller")
    words = {"job": ["train", odd], "run directory": ["train", str(job), "--run-dir", odd]}.get(
        place, ["train", str(job)]
    )
    if place == "launched":
        words = ["launch", "-np", "1", "--", "train", odd]
    if place == "working directory":
        os.mkdir(odd)
        monkeypatch.chdir(odd)
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "is not UTF-8" in told and "M\\udcfcller" in told and "convmv" in told
    assert not os.path.exists(odd) or not os.listdir(odd)


def test_a_working_directory_that_has_gone(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(job.parent)
    gone = job.parent / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert main(["train", "job.toml"]) == 2
    assert "the working directory has been removed" in capsys.readouterr().err
