"""The job of a run in a few rows: method, model, data, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetero_mpi.job.rules import EIGHT_BIT
from hetero_mpi.report import units
from hetero_mpi.report.past_run import PastRun


def job_rows(run: PastRun) -> list[tuple[str, str]]:
    """(what, setting); rows of which the run says nothing are left out."""
    if not run.job:
        return []
    rows = (("method", _method(run)), ("model", _model(run)), ("data", _data(run)), ("steps", _steps(run)),
            ("optimizer", _optimizer(run)), ("dtype", _dtype(run)), ("seed", _said(run.setting("train", "seed"))))  # fmt: skip
    return [row for row in rows if row[1]]


def _method(run: PastRun) -> str:
    method = run.setting("adapter", "method")
    if method != "lora":
        return "full training of all weights" if method == "none" else ""
    nf4 = run.setting("model", "quantization") == "nf4"
    doubled = ", double quantization" if run.setting("model", "double_quantization") else ""
    return _joined(
        f"LoRA on NF4 weights{doubled}" if nf4 else "LoRA",
        _filled("rank {}", run.setting("adapter", "rank")),
        _filled("alpha {}", run.setting("adapter", "alpha")),
        _filled("dropout {}", run.setting("adapter", "dropout")),
        *(key for key in ("rslora", "dora") if run.setting("adapter", key)),
        _filled("targets {}", run.setting("adapter", "targets")),
        _filled("from {}", run.setting("adapter", "path")),
    )


def _model(run: PastRun) -> str:
    path, factory, config = (run.setting("model", key) for key in ("path", "factory", "config"))
    if isinstance(config, dict):
        config = f"a new {_said(config.get('model_type'))} model".replace("  ", " ")
    return _joined(_said(path), _filled("made by {}", factory), _said(config))


def _data(run: PastRun) -> str:
    share = run.setting("data", "held_out")
    own = f"{units.percent(share)} of the sequences held out" if isinstance(share, (int, float)) else ""
    return _joined(
        _filled("text {}", run.setting("data", "text")),
        _filled("records {}", run.setting("data", "records")),
        _filled("sequences of {} tokens", run.setting("data", "sequence_length")),
        {True: "packed", False: "one document per sequence"}.get(run.setting("data", "packing"), ""),
        _filled("evaluated on {}", run.setting("data", "evaluation")) or own,
    )


def _steps(run: PastRun) -> str:
    micro_batch = run.setting("train", "micro_batch")
    return _joined(
        _filled("{} steps", run.setting("train", "steps")),
        _filled("{} sequences per step", run.setting("train", "global_batch")),
        "micro-batches as the plan has them" if micro_batch == "auto" else _filled("micro-batches of {}", micro_batch),
    )


def _optimizer(run: PastRun) -> str:
    name = "AdamW in 8 bits" if run.setting("train", "optimizer") == EIGHT_BIT else "AdamW"
    return _joined(
        _filled(f"{name}, peak learning rate {{}}", run.setting("train", "learning_rate")),
        _filled("schedule {}", run.setting("train", "schedule")),
        _filled("{} steps of warm-up", run.setting("train", "warmup_steps")),
        _filled("betas {}", [b for key in ("beta1", "beta2") if (b := run.setting("train", key)) is not None], " and "),
        _filled("epsilon {}", run.setting("train", "epsilon")),
        _filled("weight decay {}", run.setting("train", "weight_decay")),
        _filled("gradients clipped to norm {}", run.setting("train", "clip_norm")),
    )  # fmt: skip


def _dtype(run: PastRun) -> str:
    asked, used = _said(run.setting("train", "dtype")), run.profile.model.dtype if run.profile is not None else ""
    return f"{used} ({asked})" if asked and used and asked != used else asked or used


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _filled(text: str, value: Any, between: str = ", ") -> str:
    """``text`` with the value in it; empty where the value is missing."""
    said = _said(value, between)
    return text.format(said) if said else ""


def _said(value: Any, between: str = ", ") -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return between.join(map(_said, value))
    if value is None:
        return ""
    return format(value, {int: ",", float: "g"}.get(type(value), ""))
