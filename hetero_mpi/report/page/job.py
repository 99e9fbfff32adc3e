"""The job of a run in a few rows: method, model, data, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hetero_mpi.job.rules import EIGHT_BIT
from hetero_mpi.report import units
from hetero_mpi.report.past_run import PastRun


def job_rows(run: PastRun) -> list[tuple[str, str]]:
    """(what, setting); rows of which the run says nothing are left out."""

    def told(text: str, table: str, key: str) -> str:
        said = _said(run.setting(table, key))
        return text.format(said) if said else ""

    held_out, config = run.setting("data", "held_out"), run.setting("model", "config")
    own_held_out = f"{units.percent(held_out)} of the sequences held out" if isinstance(held_out, (int, float)) else ""
    new = (
        f"a new {_said(config.get('model_type'))} model".replace("  ", " ")
        if isinstance(config, dict)
        else _said(config)
    )
    by_plan = run.setting("train", "micro_batch") == "auto"
    adamw = "AdamW in 8 bits" if run.setting("train", "optimizer") == EIGHT_BIT else "AdamW"
    betas = [_said(beta) for key in ("beta1", "beta2") if (beta := run.setting("train", key)) is not None]
    asked, used = told("{}", "train", "dtype"), run.profile.model.dtype if run.profile is not None else ""
    rows = {
        "method": _method(run, told),
        "model": [told("{}", "model", "path"), told("made by {}", "model", "factory"), new],
        "data": [
            told("text {}", "data", "text"),
            told("records {}", "data", "records"),
            told("sequences of {} tokens", "data", "sequence_length"),
            {True: "packed", False: "one document per sequence"}.get(run.setting("data", "packing"), ""),
            told("evaluated on {}", "data", "evaluation") or own_held_out,
        ],
        "steps": [
            told("{} steps", "train", "steps"),
            told("{} sequences per step", "train", "global_batch"),
            "micro-batches as the plan has them" if by_plan else told("micro-batches of {}", "train", "micro_batch"),
        ],
        "optimizer": [
            told(f"{adamw}, peak learning rate {{}}", "train", "learning_rate"),
            told("schedule {}", "train", "schedule"),
            told("{} steps of warm-up", "train", "warmup_steps"),
            f"betas {' and '.join(betas)}" if betas else "",
            told("epsilon {}", "train", "epsilon"),
            told("weight decay {}", "train", "weight_decay"),
            told("gradients clipped to norm {}", "train", "clip_norm"),
        ],
        "dtype": [f"{used} ({asked})" if asked and used and asked != used else asked or used],
        "seed": [told("{}", "train", "seed")],
    }
    joined = {what: ", ".join(filter(None, parts)) for what, parts in rows.items()}
    return [(what, text) for what, text in joined.items() if text and run.job]


def _method(run: PastRun, told: Callable[[str, str, str], str]) -> list[str]:
    method = run.setting("adapter", "method")
    if method != "lora":
        return ["full training of all weights"] if method == "none" else []
    nf4 = run.setting("model", "quantization") == "nf4"
    doubled = ", double quantization" if run.setting("model", "double_quantization") else ""
    return [
        f"LoRA on NF4 weights{doubled}" if nf4 else "LoRA",
        told("rank {}", "adapter", "rank"),
        told("alpha {}", "adapter", "alpha"),
        told("dropout {}", "adapter", "dropout"),
        *(key for key in ("rslora", "dora") if run.setting("adapter", key)),
        told("targets {}", "adapter", "targets"),
        told("from {}", "adapter", "path"),
    ]


def _said(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_said, value))
    if value is None:
        return ""
    return format(value, {int: ",", float: "g"}.get(type(value), ""))
