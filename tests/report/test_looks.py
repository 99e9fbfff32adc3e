"""What people see, as snapshots: texts at three widths, and the words of the page of a run in its states.

``python -m tests.report.test_looks`` writes ``looks/`` anew; the difference is read in review.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hetero_mpi.planning.types.cost import LayerCost, ModelCost
from hetero_mpi.planning.types.plan import Alone, IdleRank, PipelinePlan, Plan, PlanReport, RankMemory, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, HostProfile, LayerTimes, LinkProfile
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD
from hetero_mpi.report.comparison_text import comparison_lines
from hetero_mpi.report.page.document import page_parts
from hetero_mpi.report.past_run import PastRun, anonymous, read_run
from hetero_mpi.report.plan_text import headline, plan_lines, plan_title, planned_lines
from hetero_mpi.report.profile_text import inspection_lines, measured_lines, profile_lines
from hetero_mpi.report.run_text import final_lines
from hetero_mpi.rundir.metrics import Evaluation
from hetero_mpi.rundir.present import Present, Standing, write_present
from hetero_mpi.rundir.run_directory import SAMPLE_NAME
from hetero_mpi.util.terminal import fit_to_terminal
from tests.support.past_runs import JOB, cluster, make_run, metrics, planned

LOOKS = Path(__file__).with_name("looks")
WIDTHS = 50, 80, 140


def layer(kind: str, parameters: int, boundary: int) -> LayerCost:
    return LayerCost(kind, parameters, parameters, 4 * parameters, 1000.0, 0.0, boundary)


MODEL = ModelCost(
    "llama",
    "fp32",
    128,
    tied=False,
    state_bytes_per_trainable_parameter=12.0,
    layers=(layer(EMBEDDING, 1_048_576, 1024), *[layer("block", 851_968, 1024)] * 6, layer(HEAD, 1_048_832, 0)),
)


def device(rank: int, host: str, name: str, block_s: float, reason: str) -> DeviceProfile:
    def times(seconds: float) -> LayerTimes:
        return LayerTimes(Curve((128,), (seconds,)), Curve((128,), (2 * seconds,)))

    layers = {EMBEDDING: times(block_s / 10), "block": times(block_s), HEAD: times(block_s / 2)}
    backend = "cuda" if "NVIDIA" in name else "cpu"
    return DeviceProfile(rank, host, backend, name, 8 * 10**9, reason, ("fp32",), layers, 0.0, 0.0)


PROFILE = ClusterProfile(
    source="measured",
    date="2026-11-20",
    key="k",
    mpi_library="Open MPI 5.0.11",
    versions={},
    model=MODEL,
    devices=(
        device(0, "box", "NVIDIA GeForce RTX 5090 Founders Edition", 0.001, "free on the card"),
        device(
            1,
            "box",
            "AMD Ryzen 9 9950X",
            0.010,
            "the host's free memory, 16.0 GB, shared by the 2 ranks on it that compute on it",
        ),
        device(2, "a-host-with-a-very-long-name.example.org", "cpu", 0.040, "free"),
    ),
    links=tuple(
        LinkProfile(a, b, 1e-4 if 2 in (a, b) else 1e-6, 1.25e8 if 2 in (a, b) else 5e9, 2 not in (a, b))
        for a in range(3)
        for b in range(3)
        if a != b
    ),
    notes=("2 ranks share the box: timed all at once",),
)

PLAN = Plan(
    pipelines=(PipelinePlan((StagePlan((1,), 0, 3, 1), StagePlan((0,), 3, 8, 0)), micro_batch=8, sequences=64),),
    global_batch=64,
    sequence_length=128,
    layers=8,
)
REPORT = PlanReport(
    PLAN,
    predicted_step_s=2.0,
    bound_step_s=1.6,
    memory=(RankMemory(0, 1_200_000_000, 7_600_000_000), RankMemory(1, 340_000_000, 7_600_000_000)),
    alone=Alone(0, 2.4),
    idle=(IdleRank(2, "it would slow the pipeline down by 14 %"),),
    reasons=("2 ranks beat 3 by 14 %",),
)

# Texts


def steps(step_s: float, first: int = 1, last: int = 5, predicted_s: float = 2.0) -> list[Any]:
    return [replace(metrics(step, step_s=step_s), predicted_step_s=predicted_s) for step in range(first, last + 1)]


STAGES = PLAN.pipelines[0].stages
ALONE = PipelinePlan((StagePlan((1,), 0, 8, 0),), 8, 64)
SAMPLES = replace(PROFILE, model=replace(MODEL, sequence_length=1))
EMULATED = replace(PROFILE, source="emulated, measured")
DERIVED = replace(PROFILE, source="derived from sheets")
TRIED = replace(REPORT, tried_step_s=2.0)
BESIDE = replace(PROFILE, hosts=(HostProfile("a", 1 << 30, "made up", cores=2.0, other_threads=1.0),))
OTHERS = "other programs took about 0.8 of 2 cores"
WRITTEN = {"model": Path("runs/a/model"), "checkpoint": Path("runs/a/checkpoints/step-5.h5")}


def with_pipelines(*pipelines: PipelinePlan, **changes: Any) -> PlanReport:
    return replace(REPORT, plan=replace(PLAN, pipelines=pipelines), **changes)


def with_depths(*depths: int, **changes: Any) -> PlanReport:
    stages = tuple(replace(stage, warm_up=depth) for stage, depth in zip(STAGES, depths, strict=True))
    return with_pipelines(replace(PLAN.pipelines[0], stages=stages, **changes))


def copies(*shares: int) -> list[PipelinePlan]:
    return [
        replace(ALONE, stages=(replace(ALONE.stages[0], ranks=(rank,)),), sequences=share)
        for rank, share in enumerate(shares)
    ]


TWO_PIPELINES = with_pipelines(
    replace(PLAN.pipelines[0], sequences=56, stages=(replace(STAGES[0], recompute=True), STAGES[1])),
    PipelinePlan((StagePlan((2,), 0, 8, 0),), micro_batch=8, sequences=8),
    idle=(),
)
GROUP = with_pipelines(
    replace(PLAN.pipelines[0], stages=(replace(STAGES[0], ranks=(0, 2), shares=(5, 3)), STAGES[1])), idle=()
)
TIED = replace(PROFILE, model=replace(MODEL, tied=True, tied_bytes=4 * 1_048_576))
TEXTS: dict[str, dict[str, Callable[[], list[str]]]] = {
    "profile": {
        "ranks": lambda: profile_lines(PROFILE),
        "of a model whose sequences are samples": lambda: profile_lines(SAMPLES),
        "everything": lambda: inspection_lines(PROFILE),
        "the first screen": lambda: measured_lines(PROFILE),
        "the first screen, emulated": lambda: measured_lines(EMULATED),
    },
    "plan": {
        "with reasons": lambda: plan_lines(REPORT, PROFILE),
        "of a file: with its bound": lambda: plan_lines(REPORT, None),
        "without a prediction": lambda: plan_lines(PLAN, PROFILE),
        "the first screen": lambda: planned_lines(REPORT, PROFILE, Path("runs/a")),
        "tried": lambda: [headline(replace(REPORT, tried_step_s=2.1))],
        "of samples": lambda: plan_lines(replace(REPORT, plan=replace(PLAN, sequence_length=1)), SAMPLES),
        "two pipelines, one repeats a forward": lambda: plan_lines(TWO_PIPELINES, PROFILE),
        "a group": lambda: plan_lines(GROUP, PROFILE),
        "GPipe": lambda: [plan_title(with_depths(7, 7).plan, PROFILE)],
        "split backward": lambda: [plan_title(with_depths(1, 0, split_backward=True).plan, PROFILE)],
        "own depths": lambda: [plan_title(with_depths(3, 0).plan, PROFILE)],
        "a copy per rank": lambda: plan_lines(with_pipelines(*copies(24, 24, 16)), PROFILE),
        "alone": lambda: plan_lines(with_pipelines(ALONE), PROFILE),
        "alone, tied: the matrix counts once": lambda: plan_lines(with_pipelines(ALONE), TIED),
    },
    "end": {
        "all of it": lambda: final_lines(REPORT, PROFILE, steps(2.2), [Evaluation(5, 3.25)], 5.0, WRITTEN),
        "25 % longer": lambda: final_lines(REPORT, PROFILE, steps(2.5)),
        "3.5 times as long": lambda: final_lines(REPORT, PROFILE, steps(7.0)),
        "shorter": lambda: final_lines(REPORT, PROFILE, steps(0.5)),
        "is from elsewhere": lambda: final_lines(REPORT, DERIVED, steps(2.5)),
        "emulated": lambda: final_lines(REPORT, EMULATED, steps(2.5)),
        "too few": lambda: final_lines(REPORT, PROFILE, steps(2.5, last=2)),
        "the plan changed": lambda: final_lines(REPORT, PROFILE, [*steps(6.0, 1, 10, 5.5), *steps(2.5, 11, 20)]),
        "a change of speed that was asked for": lambda: final_lines(
            REPORT, EMULATED, steps(4.0, last=10), speed_changes=[(0, 4, 0.34), (1, 20, 0.5)]
        ),
        "a change of speed before the plan": lambda: final_lines(
            REPORT, EMULATED, [*steps(1.0, 1, 10, 9.0), *steps(4.0, 11, 20)], speed_changes=[(0, 4, 0.34)]
        ),
        "tried, longer": lambda: final_lines(TRIED, BESIDE, steps(2.5)),
        "tried, shorter": lambda: final_lines(TRIED, PROFILE, steps(0.5)),
        "tried beside other programs, shorter": lambda: final_lines(TRIED, BESIDE, steps(0.5)),
        "longer, beside other programs": lambda: final_lines(REPORT, PROFILE, steps(20.0), cpu_text=OTHERS),
        "as predicted, beside other programs": lambda: final_lines(REPORT, PROFILE, steps(2.1), cpu_text=OTHERS),
    },
}


def texts_at_widths(name: str) -> str:
    parts = []
    for width in WIDTHS:
        with mock.patch.dict(os.environ, COLUMNS=str(width)):
            for title, lines in TEXTS[name].items():
                parts += [f"=== {width} columns: {title}", *map(fit_to_terminal, lines()), ""]
    return "\n".join(parts)


# The page

RANKS = {
    "0": Standing("training step 61, 0F3", computed=0.82, memory_bytes=1_200_000_000, sending={"1": [2, 3_100_000]}),
    "1": Standing("step 61, 1RECV_F2", 12.0, "rank 0 to send", sensors={"busy": 0.97, "watts": 310.4, "celsius": 61.0}),
    "2": Standing("training step 61, 2B1", silent_s=7.0),
}
LORA: dict[str, Any] = {
    "model": {"path": "org/base", "quantization": "nf4", "double_quantization": True},
    "adapter": {"method": "lora", "rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["q_proj", "v_proj"]},
    "data": {"records": ["a.jsonl"], "sequence_length": 128, "packing": False, "evaluation_fraction": 0.05},
    "train": {"steps": 60, "global_batch": 8, "micro_batch": "auto", "dtype": "auto", "learning_rate": 3e-3,
              "schedule": "cosine", "warmup_steps": 6, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "seed": 7},
}  # fmt: skip
ONGOING = {**JOB, "train": {**JOB["train"], "steps": 100}}


class Words(HTMLParser):
    """The words of a page, a line for each block; of a picture its label."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self._inside_svg = "", False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "svg":
            self._inside_svg = True
            self.text += f"\n[picture: {dict(attributes)['aria-label']}]\n"
        elif not self._inside_svg:
            self.text += {"td": " | ", "th": " | ", "span": "", "b": "", "i": "", "a": "", "code": ""}.get(tag, "\n")

    def handle_endtag(self, tag: str) -> None:
        self._inside_svg &= tag != "svg"

    def handle_data(self, data: str) -> None:
        self.text += "" if self._inside_svg else data


def words_of(run: PastRun, *names: str) -> str:
    """What the page says; ``names``: in these parts."""
    reader = Words()
    for name, part in page_parts(run).items():
        if not names or name in names:
            reader.feed(f"<p>## {name}</p>{part}")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", reader.text.replace("\N{NO-BREAK SPACE}", " "))
    lines = (line.strip() for line in text.replace(str(run.directory.parent), "FOLDER").splitlines())
    return "\n".join(line for line in lines if line)


def pages(folder: Path) -> str:
    """The words of the page of a run in each state."""
    three, emulated, one = cluster(3), cluster(3, source="emulated, measured"), cluster(1)
    over = make_run(folder / "a <b> & c", planned(cluster(4), 3), cluster(4), job=LORA)
    (over / SAMPLE_NAME).write_text("## Prompt (greedy)\nint main\n\n## Continuation\n  <b>{\n")
    found = {"over": words_of(read_run(over))}
    found["over, for others"] = words_of(anonymous(read_run(over)), "links", "plan", "happenings", "next_commands")
    found["emulated"] = words_of(read_run(make_run(folder / "emulated", planned(emulated), emulated, steps=10)))
    alone = [PipelinePlan((StagePlan((rank,), 0, planned(three).plan.layers, 0),), 1, 4) for rank in range(3)]
    beside = replace(planned(three), plan=replace(planned(three).plan, pipelines=tuple(alone)))
    run = make_run(folder / "beside", beside, three, steps=10, job=ONGOING)
    write_present(run, Present(time.time(), "training step 11", ranks=RANKS))
    found["whole models side by side"] = words_of(replace(read_run(run), rank_steps=()), "now", "plan", "links")
    found["of one rank"] = words_of(read_run(make_run(folder / "one", planned(one), one, steps=2)))
    run = make_run(folder / "goes on", planned(three), three, job=ONGOING)
    write_present(run, Present(time.time(), "training step 61", ranks=RANKS))
    found["goes on"] = words_of(read_run(run), "header", "tiles", "now")
    events = (run / "events.jsonl").open("a")
    with events:
        events.write(json.dumps({"unix_s": 4e9, "event": "ranks-lost", "text": "Lost rank 2", "ranks": [2]}) + "\n")
    found["a rank is dead"] = words_of(read_run(run), "now")
    write_present(run, Present(time.time(), "saving", "step 61: the loss is <nan>", RANKS))
    found["ended with an error"] = words_of(read_run(run), "header")
    write_present(run, Present(1.0e9, "training step 61", ranks=RANKS))
    found["broken off"] = words_of(read_run(run), "header")
    for path in (run / "checkpoints").glob("*.h5"):
        path.unlink()
    found["broken off without a checkpoint"] = words_of(read_run(run), "header")
    return "\n".join(f"=== {state}\n{text}\n" for state, text in found.items())


def comparison(folder: Path) -> str:
    """Two runs beside each other, at three widths."""
    two = cluster(2)
    runs = [
        read_run(make_run(folder / name, planned(two), two, steps, job=job))
        for name, steps, job in (("one", 60, JOB), ("other", 40, LORA))
    ]
    parts = []
    for width in WIDTHS:
        with mock.patch.dict(os.environ, COLUMNS=str(width)):
            parts += [f"=== {width} columns", *comparison_lines(runs), ""]
    return "\n".join(parts).replace(str(folder), "FOLDER")


FROM_FILES: Mapping[str, Callable[[Path], str]] = {"page": pages, "comparison": comparison}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_look_as_they_did(name: str) -> None:
    assert texts_at_widths(name) == (LOOKS / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", FROM_FILES)
def test_runs_look_as_they_did(name: str, tmp_path: Path) -> None:
    assert FROM_FILES[name](tmp_path) == (LOOKS / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", ["profile", "plan", "end"])
def test_no_line_is_wider_than_its_terminal(name: str) -> None:
    for part in texts_at_widths(name).split("=== ")[1:]:
        width, lines = int(part.split()[0]), part.splitlines()[1:]
        assert [line for line in lines if len(line) > width and " " in line.strip()] == []


if __name__ == "__main__":
    LOOKS.mkdir(exist_ok=True)
    for name in TEXTS:
        (LOOKS / f"{name}.txt").write_text(texts_at_widths(name))
    for name, make in FROM_FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            (LOOKS / f"{name}.txt").write_text(make(Path(folder)))
