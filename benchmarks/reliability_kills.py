"""Ranks of real runs are killed at random moments, and the survivors go on: the row ``kills`` of ``reliability.py``."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
RUNS, RANKS, STEPS = 8, 4, 400
PATIENCE_S = 600.0
Row = tuple[str, float, str, float | None, float | None]
"""Name, value, unit, and between which bounds it must lie."""


def kills(folder: Path) -> list[Row]:
    """SIGKILL at random moments, three times in each run of four ranks, until one rank is left to finish."""
    dice = random.Random(1)
    job = _job(folder)
    whole = _losses(_finished(folder, job, "undisturbed", 1, []))
    tried = survived = 0
    equal = 0
    seconds: list[float] = []
    lost: list[int] = []
    every: list[int] = []
    for number in range(RUNS):
        run = folder / f"run-{number}"
        process, log = _start(folder, job, run, RANKS, ["--with-ft", "ulfm"])
        alive = list(range(RANKS))
        for turn in range(1, RANKS):
            _wait(process, run, turn * STEPS // (RANKS + 1) + dice.randrange(STEPS // 10), log)
            time.sleep(dice.random() * 0.1)
            victim = alive.pop(dice.randrange(len(alive)))
            before = _newest(run)
            tried += 1
            began = time.monotonic()
            _rank(process, victim).send_signal(signal.SIGKILL)
            if not _wait(process, run, before + 1, log, fails=False):
                break
            survived += 1
            seconds.append(time.monotonic() - began)
            begins = [int(step) for step in re.findall(r"Going on after step (\d+)", log.read_text())]
            lost.append(before - begins[-1] if begins else before)
        code = process.wait(PATIENCE_S)
        equal += code == 0 and _losses(run) == whole
        every += [int(found) for found in re.findall(r"memory: every (\d+) step", log.read_text())]
    return [
        ("deaths of a rank tried", tried, "", None, None),
        ("... survived", survived, "", tried, None),
        ("runs", RUNS, "", None, None),
        ("... with exactly the losses of an undisturbed run", equal, "", RUNS, None),
        ("steps between copies in memory, as chosen (median)", statistics.median(every or [0]), "", None, None),
        ("steps lost per death (median)", statistics.median(lost), "", None, None),
        ("steps lost per death (most)", max(lost), "", None, None),
        ("from the death to the next step that is new (median)", statistics.median(seconds), "s", None, 5.0),
        ("from the death to the next step that is new (most)", max(seconds), "s", None, None),
    ]


def _job(folder: Path) -> Path:
    import tomli_w

    values = {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 128,
                "intermediate_size": 344,
                "num_hidden_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
            }
        },
        "tokenizer": {"train_vocab_size": 1024},
        "data": {"text": ["{stdlib}/*.py"], "max_bytes": 500_000, "sequence_length": 128, "held_out": 0},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 1},
        "plan": {"pipelines": 1},
        "cluster": {"threads": 1},
    }
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def _start(folder: Path, job: Path, run: Path, ranks: int, options: list[str]) -> tuple[psutil.Popen, Path]:
    from hetero_mpi.launch.launcher import build_command, find_launcher

    program = [sys.executable, "-m", "hetero_mpi", "train", str(job), "--run-dir", str(run)]
    command = build_command(find_launcher(), ranks, None, program, options)
    environment = {**os.environ, **command.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = folder / f"{run.name}.txt"
    with log.open("w") as stream:
        process = psutil.Popen(command.arguments, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    return process, log


def _finished(folder: Path, job: Path, name: str, ranks: int, options: list[str]) -> Path:
    process, log = _start(folder, job, folder / name, ranks, options)
    if process.wait(PATIENCE_S) != 0:
        raise SystemExit(log.read_text())
    return folder / name


def _wait(process: psutil.Popen, run: Path, step: int, log: Path, fails: bool = True) -> bool:
    """Until a step is done; False, or the end of the benchmark, where the run ends before it."""
    deadline = time.monotonic() + PATIENCE_S
    while _newest(run) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            if fails:
                raise SystemExit(f"ended before step {step}:\n{log.read_text()}")
            return False
        time.sleep(0.01)
    return True


def _rank(process: psutil.Popen, rank: int) -> psutil.Process:
    for child in process.children(recursive=True):
        if "train" in child.cmdline() and child.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
            return child
    raise SystemExit(f"rank {rank} is not there")


def _steps(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for line in lines:
        if line.endswith("}") and "loss" in (values := json.loads(line)):
            found[int(values["step"])] = float(values["loss"])
    return found


def _newest(run: Path) -> int:
    return max(_steps(run), default=0)


def _losses(run: Path) -> list[float]:
    return [loss for _, loss in sorted(_steps(run).items())]
