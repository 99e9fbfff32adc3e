"""The command line: what is mistyped is told with the nearest name, and a mistake in a job file before torch is imported."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_mpi.cli import main
from hetero_mpi.commands.options import parser
from tests.support.mpi import ROOT, run_mpi


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("trian job.toml", "train"),
        ("mesh inti hosts.toml", "init"),
        ("train job.toml --sett train.steps=6", "--set"),
        ("train job.toml --dryrun=yes", "--dry-run"),
        ("plan job.toml --profile p.toml --explane", "--explain"),
        ("launch -np 2 --hosfile hosts -- train job.toml", "--hostfile"),
        ("launch -np 2 -- trian job.toml", "train"),
        ("launch -np 2 -- train job.toml --resme", "--resume"),
    ],
)
def test_what_is_mistyped_is_told_with_the_nearest_name(
    words: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {nearest}?\n")


def test_a_word_that_is_like_no_other_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("xyzzy", "train job.toml --qqqqqq", "train job.toml another.toml"):
        with pytest.raises(SystemExit):
            main(words.split())
        assert "did you mean" not in capsys.readouterr().err
    assert main([]) == 2 and " train " in capsys.readouterr().err, "without a command the commands are shown"


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """Variables with which importing torch or transformers fails."""
    for name in ("torch", "transformers"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "__init__.py").write_text("raise SystemError('imported too early')\n")
    return {"PYTHONPATH": f"{tmp_path}/broken:{ROOT}"}


@pytest.mark.parametrize("command", ["train", "profile -o profile.toml"])
def test_a_missing_or_wrong_job_file_is_told_before_torch_is_imported(
    tmp_path: Path, without_torch: dict[str, str], command: str
) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[train]\nsteps = -1\n")
    for path, told in ((tmp_path / "absent.toml", "absent.toml"), (wrong, "[train] steps = -1")):
        words = [sys.executable, "-m", "hetero_mpi", *command.split(), str(path)]
        result = subprocess.run(words, env={**os.environ, **without_torch}, capture_output=True, text=True, cwd=ROOT)
        assert result.returncode == 2 and told in result.stderr and "too early" not in result.stderr, result.stderr


def test_ranks_too_tell_a_missing_job_file_before_torch_is_imported_np2(without_torch: dict[str, str]) -> None:
    result = run_mpi(2, ["-m", "hetero_mpi", "train", "absent.toml"], env=without_torch)
    assert result.returncode == 2 and result.stderr.count("absent.toml") == 1, result.stderr
    assert "too early" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["train", "job.toml"], ["generate", "runs/x", "--prompt", "a"], ["launch", "-np", "2", "--", "train", "job.toml"],
        ["plan", "--profile", "homelab-5090-strix-halo"], ["export", "runs/x", "out"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_python_without_our_packages_gets_one_line(words: list[str], tmp_path: Path) -> None:
    """``-S`` leaves out what is installed. The packages are looked for before one of them is imported."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-S", "-m", "hetero_mpi", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()[-1:]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert line.startswith(f"This Python ({sys.executable}) is missing packages: torch, mpi4py, numpy, transformers, ")
    assert "tomli-w" in line and f"`{sys.executable} -m pip install -e {ROOT}`" in line


def test_every_command_has_its_function() -> None:
    """The parser names functions in modules that are loaded only when they are called."""

    def functions(of: argparse.ArgumentParser) -> Iterator[str]:
        if (run := of.get_default("run")) is not None:
            yield run
        for action in of._actions:
            if isinstance(action, argparse._SubParsersAction):
                for below in action.choices.values():
                    yield from functions(below)

    named = [*functions(parser())]
    assert len(named) > 15
    for module, function in (name.split(":") for name in named):
        assert callable(getattr(importlib.import_module(f"hetero_mpi.{module}"), function)), f"{module}:{function}"
