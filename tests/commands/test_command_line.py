"""The command line: what is mistyped is told with the nearest name, and a mistake in a job file before torch is imported."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_mpi.cli import main
from hetero_mpi.commands.options import parser
from tests.support.mpi import ROOT


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("trian job.toml", "train"), ("sft job.toml", "train"), ("mesh inti hosts.toml", "init"),
        ("train job.toml --sett train.steps=6", "--set"), ("train job.toml --dryrun=yes", "--dry-run"),
        ("train job.toml --run_dir out", "--run-dir"), ("plan job.toml --profile p.toml --explane", "--explain"),
        ("launch -np 2 --hosfile hosts -- train job.toml", "--hostfile"), ("launch -np 2 -- trian job.toml", "train"),
        ("launch -np 2 -- train job.toml --resme", "--resume"), ("launch -np 2 job.toml", "train job.toml"),
        ("launch --nproc_per_node=2 train job.toml", "-np 2"),
        ("launch -np 2 --bind-to none -- train job.toml", '--mpirun-args="--bind-to none"'),
        ("launch axolotl.yml", "init --from axolotl.yml"), ("train job.toml --steps 10", "--set train.steps=10"),
        ("train --lr 1e-4 job.toml", "--set train.learning_rate=1e-4"),
        ("train job.toml --learning-rate=1e-4", "--set train.learning_rate=1e-4"),
        ("train job.toml --model org/name --bf16", "--set model.path=org/name"),
        ("train job.toml --model org/name --bf16", "--set train.dtype=bf16"),
        ("train job.toml --batch-size 4", "--set train.global_batch=4"),
        ("train job.toml --output-dir out", "--set output.run_dir=out"),
        ("train job.toml --data a.txt", "--set 'data.text=[\"a.txt\"]'"),
        ("train job.toml --load_in_4bit", "--set adapter.method=lora --set model.quantization=nf4"),
        ("train job.toml --train.steps=10", "--set train.steps=10"),
        ("train job.toml --set train.steps 10", "--set train.steps=10"), ("train job.toml steps=10", "--set train.steps=10"),
        ("train --config job.toml", "train job.toml"), ("serve runs/x --max-model-len 100", "--context 100"),
        ("generate --model runs/x --prompt hi", "generate runs/x"),
    ],
)  # fmt: skip
def test_a_mistyped_command_line_gets_what_to_write(
    words: str, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert written in re.sub(r"\(choose from .*?\)", "", capsys.readouterr().err.partition(": error: ")[2])


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


@pytest.mark.parametrize(
    "words",
    [
        ["train", "job.toml"], ["generate", "runs/x", "--prompt", "a"], ["launch", "-np", "2", "--", "train", "job.toml"],
        ["plan", "--profile", "homelab-5090-strix-halo"], ["export", "runs/x", "out"],
        ["train", "job.toml", "--lr", "1"],
    ],
    ids=" ".join,
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
