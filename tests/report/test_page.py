"""What the run report says of the job, its sample, and what happened; and how it draws figures that are far apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetero_mpi.report.page import sections
from hetero_mpi.report.page.document import report_html
from hetero_mpi.report.page.job import job_rows
from hetero_mpi.report.past_run import SAMPLE_NAME, read_run
from tests.past_runs import JOB, cluster, make_run, planned

LORA: dict[str, Any] = {
    "model": {"path": "org/base", "quantization": "nf4", "double_quantization": True},
    "adapter": {"method": "lora", "rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["q_proj", "v_proj"]},
    "data": {"records": ["a.jsonl"], "sequence_length": 128, "packing": False, "held_out": 0.05},
    "train": {"steps": 60, "global_batch": 8, "micro_batch": "auto", "dtype": "auto", "learning_rate": 3e-3,
              "schedule": "cosine", "warmup_steps": 6, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "seed": 7},
}  # fmt: skip


def rows_of(directory: Path, job: dict[str, Any]) -> dict[str, str]:
    profile = cluster(1)
    return dict(job_rows(read_run(make_run(directory, planned(profile), profile, steps=2, job=job))))


def test_the_page_says_which_job_it_was(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "lora", LORA) == {
        "method": "LoRA on NF4 weights, double quantization, rank 4, alpha 8, dropout 0, targets q_proj, v_proj",
        "model": "org/base",
        "data": "records a.jsonl, sequences of 128 tokens, one document per sequence, 5.0 % of the sequences held out",
        "steps": "60 steps, 8 sequences per step, micro-batches as the plan has them",
        "optimizer": "AdamW, peak learning rate 0.003, schedule cosine, 6 steps of warm-up, betas 0.9 and 0.95, weight decay 0.1",
        "dtype": "fp32 (auto)",
        "seed": "7",
    }
    one_row = "<tr><td>dtype</td><td>fp32 (auto)</td></tr>"
    assert one_row in report_html(read_run(tmp_path / "lora"))


def test_methods_are_told_apart(tmp_path: Path) -> None:
    full = {"model": {"quantization": "none"}, "adapter": {"method": "none"}}
    assert rows_of(tmp_path / "full", full)["method"] == "full training of all weights"
    plain = {"model": {"quantization": "none"}, "adapter": {"method": "lora", "rank": 4}}
    assert rows_of(tmp_path / "lora", plain)["method"] == "LoRA, rank 4"


def test_a_job_of_which_little_is_known_is_no_error(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "a", JOB)["optimizer"] == "AdamW, peak learning rate 0.003"
    odd = {"train": {"learning_rate": {"a": 1}}, "data": {"held_out": "x"}, "model": [1]}
    assert "held out" not in rows_of(tmp_path / "b", odd).get("data", "")
    (tmp_path / "b" / "run.json").write_text("{")
    assert not sections.job(read_run(tmp_path / "b")).told


def test_the_sample_of_the_end_is_on_the_page(tmp_path: Path) -> None:
    profile = cluster(1)
    run = make_run(tmp_path / "a", planned(profile), profile, steps=2)
    assert "<pre>" not in report_html(read_run(run))
    (run / SAMPLE_NAME).write_text("## Prompt (greedy)\nint main\n\n## Continuation\n  <b>{\n")
    assert "<pre>## Prompt (greedy)\nint main\n\n## Continuation\n  &lt;b&gt;{</pre>" in report_html(read_run(run))
