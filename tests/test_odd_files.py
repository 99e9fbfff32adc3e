"""Devices, pipes, sockets and directories in the place of files that a user names: refused in words before they are opened."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_mpi.cli import main
from hetero_mpi.data.record_files import values_of
from hetero_mpi.data.text_sequences import Corpus
from hetero_mpi.data.tokenizer import load_tokenizer
from hetero_mpi.launch.supervisor.host_reports import RunDirectory
from hetero_mpi.model.adapters.adapter_files import adapter_of
from hetero_mpi.model.files.model_files import ModelFiles, read_header, read_json
from hetero_mpi.report.comparison_text import comparison_lines
from hetero_mpi.report.past_run import read_run
from hetero_mpi.rundir.line_files import EVENTS_NAME, METRICS_NAME, STEPS_NAME
from hetero_mpi.rundir.present import PRESENT_NAME, Present, write_present
from hetero_mpi.rundir.run_directory import LOCK_NAME, RUN_NAME, SAMPLE_NAME, append_event, claim, refuse_links
from hetero_mpi.util.disk import require_regular
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.shipped import USED_PROFILE
from tests.support.damages import DAMAGES
from tests.support.errors import refuses
from tests.support.mpi import ROOT
from tests.support.past_runs import cluster, make_run, planned


def device(place: Path) -> str:
    place.symlink_to("/dev/zero")
    return "a device"


def pipe(place: Path) -> str:
    os.mkfifo(place)
    return "a pipe"


def bound_socket(place: Path) -> str:
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(place.parent)  # a socket's name may have 107 bytes
        one.bind(place.name)
        os.chdir(here)
    return "a socket"


def directory(place: Path) -> str:
    place.mkdir()
    return "a directory"


ODD = (device, pipe, bound_socket, directory)
Odd = Callable[[Path], str]


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_regular_file(odd: Odd, tmp_path: Path) -> None:
    said = odd(tmp_path / "odd")
    with refuses("file.not_regular", tmp_path / "odd", said):
        require_regular(tmp_path / "odd")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link", "absent"):
        require_regular(tmp_path / name)


READERS: dict[str, Callable[[Path], object]] = {
    "json": lambda path: read_json(path, ""),
    "weights": read_header,
    "records": lambda path: list(values_of(path)),
    "text": lambda path: list(Corpus([str(path)]).blocks()),
    "adapter": lambda path: adapter_of(path.parent),
    "model": lambda path: ModelFiles(path.parent).check(),
    "tokenizer": lambda path: load_tokenizer(path.parent),
}
NAMES = {"adapter": "adapter_config.json", "model": "config.json", "tokenizer": "added_tokens.json"}


@pytest.mark.parametrize("odd", [device, pipe, bound_socket])
@pytest.mark.parametrize("reader", READERS)
def test_readers_of_models_and_data(reader: str, odd: Odd, tmp_path: Path) -> None:
    place = tmp_path / NAMES.get(reader, "odd")
    said = odd(place)
    (tmp_path / "tokenizer.json").write_text("{}")
    with refuses("file.not_regular", place, said):
        READERS[reader](place)


@pytest.mark.parametrize("odd", [device, pipe])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "run.json", "plan.toml", "profile.toml", "events.jsonl", "sample.txt", "now.json"]
)
def test_files_of_a_run(name: str, odd: Odd, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = cluster(2)
    run = make_run(tmp_path / "run", planned(profile), profile)
    (run / name).unlink(missing_ok=True)
    said = odd(run / name)
    assert main(["report", str(run)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"{run / name}: ") and said in shown
    with refuses("file.not_regular" if odd is pipe else "run.link", run / name), claim(run):
        pass


RUN_FILES = [METRICS_NAME, STEPS_NAME, EVENTS_NAME, RUN_NAME, PRESENT_NAME, LOCK_NAME, SAMPLE_NAME, USED_PROFILE, "plan.toml",
             "profile.toml"]  # fmt: skip


@pytest.mark.parametrize("name", RUN_FILES)
def test_damaged_files_of_a_run_are_left_out_or_refused_by_name(name: str, tmp_path: Path) -> None:
    profile = cluster(2)
    whole = make_run(tmp_path / "whole", planned(profile), profile, steps=3)
    shutil.copy(whole / "profile.toml", whole / USED_PROFILE)
    append_event(whole, "started", "the run starts")
    write_present(whole, Present(1.0, "training step 3"))
    (whole / SAMPLE_NAME).write_text("Once upon a time")
    with claim(whole):
        pass
    run = tmp_path / "run"
    for damage in DAMAGES:
        shutil.copytree(whole, run)
        damage(run / name)
        odd = (run / name).exists() and not (run / name).is_file()  # a directory, or a pipe
        refused = pytest.raises(UserError, match=re.escape(str(run / name))) if odd else contextlib.nullcontext()
        assert all(type(value) is int for value in RunDirectory(run).state().values()), damage
        with contextlib.nullcontext() if name in (LOCK_NAME, "profile.toml") else refused:
            comparison_lines([read_run(run), read_run(whole)])
        with refused:
            refuse_links(run)
        shutil.rmtree(run)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, b"[]", b"{}", b"1"])
def test_a_lock_that_says_nothing_of_its_holder(content: bytes, tmp_path: Path) -> None:
    with claim(tmp_path):
        (tmp_path / LOCK_NAME).write_bytes(content)
        with refuses("run.in_use", tmp_path), claim(tmp_path):
            pass


def ended(*words: str) -> tuple[int, str]:
    """Exit code and the last line of a command that reads an odd file. It would wait or read for ever if it opened it."""
    command = [sys.executable, "-m", "hetero_mpi", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, input="")
    return result.returncode, result.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    shutil.copy(ROOT / "jobs" / "quickstart.toml", tmp_path / "job.toml")
    job = str(tmp_path / "job.toml")
    for words in (
        ("train", str(tmp_path / "pipe.toml")),
        ("train", "/dev/zero"),
        ("train", "/dev/stdin"),
        ("inspect", str(tmp_path / "pipe.toml")),
        ("plan", "/dev/zero", "--profile", "a100-8"),
        ("plan", job, "--profile", "/dev/zero"),
        ("simulate", job, "--profile", str(tmp_path / "pipe.toml")),
        ("baseline", job, "--profile", "/dev/zero"),
    ):
        code, said = ended(*words)
        named = next(word for word in words if word.startswith("/dev/") or word.endswith("pipe.toml"))
        assert code == 2 and f"{named}: " in said, (words, said)


@pytest.mark.slow
def test_a_model_s_configuration(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three\n" * 200)
    (tmp_path / "job.toml").write_text(
        '[model]\nconfig = "/dev/zero"\n[tokenizer]\ntrain_vocab_size = 300\n[data]\ntext = ["text.txt"]\nsequence_length = 32\n'
        "[train]\nsteps = 2\nglobal_batch = 4\n"
    )
    code, said = ended("train", str(tmp_path / "job.toml"), "--run-dir", str(tmp_path / "run"))
    assert code == 2 and said.startswith("/dev/zero: ")
