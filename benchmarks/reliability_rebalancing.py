"""A device that slows down and recovers: the row ``rebalancing`` of ``reliability.py``."""

from __future__ import annotations

import json
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import run_ranks  # noqa: E402

from hetero_mpi.planning.analysis.calibration import drifted_profile  # noqa: E402
from hetero_mpi.planning.decision.planner import make_plan  # noqa: E402
from hetero_mpi.planning.types.cost import LayerCost, ModelCost  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes, LinkProfile  # noqa: E402
from hetero_mpi.planning.types.request import PlanRequest  # noqa: E402
from hetero_mpi.planning.types.toml_files import save_profile  # noqa: E402
from hetero_mpi.training.rebalance import Decider, Move  # noqa: E402
from hetero_mpi.training.replan import ReplanQuestion, answer  # noqa: E402

Row = tuple[str, float, str, float | None, float | None]
"""Name, value, unit, and between which bounds it must lie."""
STEPS, SLOW, AGAIN = 100, 20, 60
"""Steps of a run; the second of three devices falls to a third of its speed after so many, and recovers after so many."""
BLOCKS, TOKENS, BATCH, HIDDEN = 12, 256, 8, 32
NOISY_STEPS, SPREAD, OUTLIERS = 1000, 0.2, 0.05


def rebalancing(folder: Path, smallest: bool) -> list[Row]:
    """The same emulated run with layers that stay where they are and with layers that move, and synthetic noise."""
    noisy_steps = 10 if smallest else NOISY_STEPS
    save_profile(_cluster(), folder / "three.toml")
    runs = {way: _run(folder, way) for way in ("staying", "moving", "undisturbed")}
    steps = {way: [line for line in _lines(run / "metrics.jsonl") if "step_s" in line] for way, run in runs.items()}
    seconds = {way: [line["step_s"] for line in lines] for way, lines in steps.items()}
    moves = [line for line in _lines(runs["moving"] / "events.jsonl") if line["event"] == "rebalanced"]
    slow = {way: statistics.median(found[SLOW:AGAIN]) for way, found in seconds.items()}
    faster = sum(seconds["staying"]) / _total_s(runs, seconds)
    equal = all(
        [line["loss"] for line in lines] == [line["loss"] for line in steps["staying"]] for lines in steps.values()
    )
    return [
        ("step before, emulated", 1e3 * statistics.median(seconds["moving"][2:SLOW]), "ms", None, None),
        ("step while one of three devices is slow, layers stay", 1e3 * slow["staying"], "ms", None, None),
        ("... layers move", 1e3 * slow["moving"], "ms", None, None),
        ("... how many times as fast", slow["staying"] / slow["moving"], "", 1.3, None),
        (f"{STEPS} steps, moving included: how many times as fast", faster, "", 1.1, None),
        ("changes of plan", len(moves), "", 2, 2),
        ("... steps after the slowing", moves[0]["step"] - SLOW if moves else float("nan"), "", None, 15),
        ("... steps after the recovery", moves[-1]["step"] - AGAIN if moves else float("nan"), "", None, 20),
        ("... training stood still, the longer one", max((1e3 * move["stall_s"] for move in moves), default=0.0), "ms", None, None),
        ("runs whose losses are equal to the last bit (1: all)", float(equal), "", 1, None),
        ("changes of plan in an undisturbed run", float(_changes(runs["undisturbed"])), "", None, 0),
        (f"changes of plan in 3 x {noisy_steps} steps with {SPREAD:.0%} noise", float(_noise(noisy_steps)), "", None, 0),
    ]  # fmt: skip


def _total_s(runs: dict[str, Path], seconds: dict[str, list[float]]) -> float:
    stalls = [line["stall_s"] for line in _lines(runs["moving"] / "events.jsonl") if line["event"] == "rebalanced"]
    return sum(seconds["moving"]) + sum(stalls)


def _changes(run: Path) -> int:
    return sum(line["event"] == "rebalanced" for line in _lines(run / "events.jsonl"))


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def _run(folder: Path, way: str) -> Path:
    run, job = folder / way, folder / f"{way}.toml"
    import tomli_w

    changes = [f"rank 1 runs at 0.333 from step {SLOW + 1}", f"rank 1 runs at 1 from step {AGAIN + 1}"]
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    }
    values = {
        "model": {"config": config},
        "tokenizer": {"train_vocab_size": 512},
        "data": {"text": ["{stdlib}/*.py"], "max_bytes": 500_000, "sequence_length": 32, "evaluation_fraction": 0},
        "train": {"steps": STEPS, "global_batch": BATCH, "micro_batch": 1, "dtype": "fp32"},
        "cluster": {
            "threads": 1,
            "emulate": str(folder / "three.toml"),
            "emulate_changes": changes if way != "undisturbed" else [],
        },
        "plan": {"pipelines": 1, "rebalance": way != "staying"},
    }
    job.write_text(tomli_w.dumps(values))
    command, scale = ["-m", "hetero_mpi", "train", str(job), "--run-dir", str(run)], ""
    for _ in range(3):  # a refusal says at which time scale this machine can do it
        done = run_ranks(3, [*command, *(["--set", f"cluster.time_scale={scale}"] if scale else [])], 1800.0)
        refused = re.search(r"Set \[cluster\] time_scale = ([\d.]+)", done.stdout + done.stderr)
        if done.returncode == 0 or refused is None:
            break
        scale = refused[1]
    if done.returncode != 0:
        raise SystemExit(f"{way}:\n{done.stdout}{done.stderr}")
    return run


def _cluster() -> ClusterProfile:
    """Three like devices on three hosts; a block takes 5 ms forward and 10 ms backward for one sequence."""

    def times(seconds: float) -> LayerTimes:
        return LayerTimes(Curve((TOKENS,), (seconds,)), Curve((TOKENS,), (2 * seconds,)))

    def layer(kind: str, boundary_bytes: int) -> LayerCost:
        return LayerCost(kind, 10_000, 10_000, 40_000, 1000.0, 100.0, boundary_bytes)

    chain = (layer("embedding", 4096), *[layer("block", 4096)] * BLOCKS, layer("head", 0))
    model = ModelCost("llama", "fp32", TOKENS, False, 12.0, chain)
    device = DeviceProfile(
        0,
        "host0",
        "cuda",
        "made up",
        10**10,
        "made up",
        ("fp32",),
        {"embedding": times(0.001), "block": times(0.005), "head": times(0.005)},
        0.001,
        0.0,
    )
    devices = tuple(replace(device, rank=rank, host=f"host{rank}") for rank in range(3))
    links = tuple(LinkProfile(a, b, 0.0005, 1e9, False) for a in range(3) for b in range(3) if a != b)
    return ClusterProfile("made up", "2026-01-01", "rebalancing", "none", {}, model, devices, links)


def _noise(steps: int) -> int:
    """Changes of plan while nothing changes: every step scatters, and one in twenty takes three times as long."""
    profile, request = _cluster(), PlanRequest(BATCH, TOKENS, (1,), indifference=0.005)
    plan, changes = make_plan(profile, request), 0
    for seed in range(3):
        rng, decider = np.random.default_rng(seed), Decider(range(3))
        for step in range(steps):
            spikes = np.where(rng.random(3) < OUTLIERS, 3.0, 1.0)
            ratios = np.maximum(0.2, 1 + SPREAD * rng.normal(size=3)) * spikes
            decider.observe(dict(enumerate(ratios.tolist())))
            move = decider.decide(steps - step)
            if move is Move.ASK:
                assert decider.requested_ratios is not None
                drifted = drifted_profile(profile, plan.plan, decider.requested_ratios)
                question = ReplanQuestion(drifted, request, plan, steps - step, 0.1)
                decider.answered(answer(question).prospect)
            elif move is Move.GO:
                changes += 1
                decider.record_move()
    return changes
