"""N ranks equal one process: the first promise of the program.

Each case runs on ranks of the pool when a test first asks for it, and is held against a plain transformers loop
(plain_training.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hetero_mpi.planning.types.toml_files import load_plan
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.state.directory import checkpoint_path
from hetero_mpi.state.hdf5 import KINDS
from hetero_mpi.state.reader import CheckpointReader
from tests.support import case_plans, plain_training, training_cases
from tests.support.case_product import FULL
from tests.support.jobs import write_profile
from tests.support.mpi import on_ranks
from tests.support.plain_training import Reference
from tests.support.rank_pool import run_pooled
from tests.support.training_cases import FURTHER, GROUPED, NORMAL, STEPS, Case

RANKS = (1, 2, 3, 4)
QUICK = (
    "llama-even",
    "gpt_neox-dropout-reversed",
    "phi3-nf4",
    "llama-lora-groups",
    "qwen3-tied-two-split-unequal",
    "llama-bf16-split",
    "mixtral-routers-streamed",
    "llama-tied-V-dropout",
)
"""Cases of the quick tier, on three ranks: each way to share the work once, and most of what is trained."""
TOLERANCE = 1e-6
IN_GROUPS = 3e-6
"""Of gradients where a group adds up its parts of every matrix product: fp32 rounds such sums otherwise. (In fp64 they are within
1e-6: ``tests/model/test_group.py``.)"""
RESUMED = (
    "llama-even",
    "gemma2-tied-ends",
    "gpt_neox-dropout-reversed",
    "phi3-nf4",
    "llama-dropout-streamed",
    "qwen3-tied-lora-streamed",
    "llama-8bit",
    "qwen3-tied-8bit-two-streamed",
    "mixtral-routers-streamed",
    "llama-tied-V-dropout",
    "qwen3-tied-noise-streamed",
    "llama-lora-plus",
    "llama-pissa",
    "phi3-nf4-pissa",
    "llama-adafactor",
    "qwen3-tied-adafactor-two-streamed",
    "qwen3-tied-muon",
    "gemma2-lora-tokens-streamed",
    "qwen3-tied-nf4-saved-V",
    "llama-8bit-V",
)
"""Cases that are also resumed after step 1, on two ranks and more under another split of the layers, in which nothing is
streamed."""
AGAIN = (
    "llama-frozen-rates-two",
    "qwen3-frozen-noise-groups",
    "qwen3-tied-two-split-unequal",
    "gemma2-tail-changing",
    "llama-lora-groups",
    "qwen3-nf4-group",
    "llama-pissa-groups",
    "qwen3-tied-olora-two-streamed",
    "llama-lora-saved-groups",
)
"""Cases with several pipelines, or stages of several ranks, that are also run again, resumed under their own plan, and resumed
under one pipeline."""
MORE_AGAIN = (
    "llama-lora-two-gpipe",
    "gpt_oss-routers-two-split-changing",
    "llama-tied-group-recompute",
    "qwen3-groups-changing",
)
"""The same in the long tier."""
ONE_PIPELINE = [case for case in NORMAL if case.pipelines == "one"]


@dataclass
class Bench:
    """Files and results that the tests of one session share; every mpirun and every reference runs once."""

    directory: Path
    finished: dict[Path, bool] = field(default_factory=dict)
    """Run directory -> whether the run ended."""
    references: dict[str, Reference] = field(default_factory=dict)
    measured: set[tuple[str, object]] = field(default_factory=set)
    """(field, value) of the cases that have measured their profile."""

    def __post_init__(self) -> None:
        self.text = training_cases.corpus(self.directory)
        self.tokenizer = training_cases.tokenizer_directory(self.directory, self.text)

    def run(self, ranks: int, case: Case, variant: str = "") -> Path:
        """The run directory of a case on so many ranks. ``variant``: "again"; "resumed" after step 1 under its own plan;
        "elsewhere", after step 1 under one pipeline; "resplit", after step 1 with other cuts and nothing streamed."""
        run = self.directory / f"np{ranks}" / "-".join(filter(None, (case.name, variant)))
        if run not in self.finished:
            self.finished[run] = False  # until it ends: a broken run is not repeated for every test
            self._run(ranks, case, variant, run)
            self.finished[run] = True
        assert self.finished[run], f"{run.name} failed before on {ranks} ranks"
        return run

    def reference(self, case: Case) -> Reference:
        if case.name not in self.references:
            model, adapter = self.start(case)
            self.references[case.name] = plain_training.run_reference(case, model, adapter, self.tokenizer, self.text)
        return self.references[case.name]

    def start(self, case: Case) -> tuple[Path, Path | None]:
        """Directories of the case's start weights and, where it tunes an adapter, of that."""
        model = training_cases.model_directory(self.directory, case)
        return model, None if case.tuning in ("full", *training_cases.STARTS) else training_cases.adapter_directory(
            self.directory, case
        )

    def _run(self, ranks: int, case: Case, variant: str, run: Path) -> None:
        run.parent.mkdir(exist_ok=True)
        straight = run.with_name(case.name)
        job = straight.with_suffix(".toml")
        entry: dict[str, Any] = {"job": str(job), "run_dir": str(run), "changing": case.changing}
        if not variant:
            model, adapter = self.start(case)
            job.write_text(training_cases.job_text(case, model, self.tokenizer, self.text, adapter))
        elif variant != "again":
            entry["resume"] = str(checkpoint_path(self.run(ranks, case) / "checkpoints", 1))
        if variant or not self._measures(ranks, case):
            entry["profile"] = str(write_profile(straight.with_suffix(".profile.toml"), job, ranks))
        path = run.with_suffix(".plan.toml")
        if variant == "resplit":
            split = "uneven" if case.split != "uneven" else "even"
            plan = case_plans.write_plan(path, replace(case, streamed=False), ranks, split)
        else:
            plan = case_plans.write_plan(path, case, ranks, **({"pipelines": "one"} if variant == "elsewhere" else {}))
        entry["plan"] = str(plan) if plan else None
        listed = run.with_suffix(".json")
        listed.write_text(json.dumps([entry]))
        result = run_pooled(ranks, "train_cases", [str(listed)], timeout_s=140)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]

    def _measures(self, ranks: int, case: Case) -> bool:
        """A rank alone does, the first time that it meets something to train, a dtype or an optimizer: measuring takes longer than
        the run."""
        if ranks > 1:
            return False
        new = {(name, getattr(case, name)) for name in ("tuning", "dtype", "optimizer")} - self.measured
        self.measured |= new
        return bool(new)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("equality"))


def tier(ranks: int, name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Quick on three ranks; slow on one and three; long on others, and where one rank has no choice of plans."""
    if ranks == 3:
        return () if name in QUICK else (pytest.mark.slow,)
    return (pytest.mark.slow if ranks == 1 and named(name).pipelines == "one" else pytest.mark.long,)


def several(*names: str, ranks: Sequence[int] = RANKS[1:]) -> pytest.MarkDecorator:
    """Run the test with each of these cases on each of these numbers of ranks, each in its tier."""
    return pytest.mark.parametrize(
        ("ranks", "case"),
        [pytest.param(n, named(name), id=f"np{n}-{name}", marks=tier(n, name)) for name in names for n in ranks],
    )


def named(name: str) -> Case:
    return next(case for case in NORMAL if case.name == name)


def losses(run: Path) -> list[float]:
    return [step.loss for step in read_metrics(run / "metrics.jsonl").steps]


def tensors(run: Path, step: int) -> dict[tuple[str, str], np.ndarray]:
    """(kind, name) -> array of everything in the checkpoint after ``step`` steps."""
    with CheckpointReader(checkpoint_path(run / "checkpoints", step)) as reader:
        return {(kind, name): reader.read(kind, name)[0] for kind in KINDS for name in reader.names(kind)}


def check_against_reference(bench: Bench, ranks: int, case: Case) -> None:
    run, reference = bench.run(ranks, case), bench.reference(case)
    assert len(losses(run)) == STEPS
    parted = case.pipelines in GROUPED and ranks > 1
    if case.dtype != "fp32":
        # Members of a group round their parts of a product before they are added. A processor without units for bf16 computes in
        # fp32, whose sums depend on the rows of a micro-batch; rounding to bf16 then falls to the one side or the other.
        parted |= case.shares == "unequal" and ranks > 1
        first, gradients = (1e-3, 0.04) if parted else (1e-6 if case.dtype == "bf16" else 1e-3, 0.02)
        check_narrow(run, reference, first, gradients)
        return
    np.testing.assert_allclose(losses(run), reference.losses, rtol=TOLERANCE)
    after_one = tensors(run, 1)
    moments = {kind: {name for of, name in after_one if of == kind} for kind in ("moments1", "moments2")}
    assert moments["moments1"] | moments["moments2"] == reference.first_moments.keys() - reference.frozen
    for name, expected in reference.first_moments.items():
        kind = "moments1" if name in moments["moments1"] else "moments2"
        if name in reference.frozen:
            assert np.array_equal(tensors(run, STEPS)["parameters", name], reference.parameters[name].numpy()), name
            continue
        if expected.dtype == torch.uint8:
            assert (after_one[kind, name] != expected.numpy()).mean() <= 1e-3, (
                "a gradient's last bit changes a code at times"
            )
            continue
        difference = torch.from_numpy(after_one[kind, name]) - expected
        assert expected.norm() > 0, f"{name} has no gradient: the comparison would be empty"
        assert difference.norm() / expected.norm() <= (IN_GROUPS if parted else TOLERANCE), name
    evaluation = read_metrics(run / "metrics.jsonl").evaluations[-1].loss
    assert evaluation == pytest.approx(reference.evaluation_loss, rel=1e-5)


def check_narrow(run: Path, reference: Reference, first: float, gradients: float) -> None:
    """In bf16 the plain loop adds gradients up in bf16 (we in fp32) and, in full training, steps without fp32 masters, so only
    the first loss has the same bits; afterwards 2 %, and 2 % of each gradient's norm (8 bits of mantissa). fp16 with loss
    scaling is held against fp32."""
    assert losses(run)[0] == pytest.approx(reference.losses[0], rel=first)
    np.testing.assert_allclose(losses(run), reference.losses, rtol=0.02)
    after_one = tensors(run, 1)
    for name in reference.first_moments.keys() - reference.frozen:
        expected = reference.first_moments[name]
        difference = torch.from_numpy(after_one["moments1", name]) - expected.float()
        assert difference.norm() / expected.float().norm() <= gradients, name


def check_same_bits(first: Path, second: Path, step: int) -> None:
    ours, theirs = tensors(first, step), tensors(second, step)
    assert ours.keys() == theirs.keys()
    for key, array in ours.items():
        assert np.array_equal(array, theirs[key]), key


@several(*(case.name for case in NORMAL), ranks=RANKS)
def test_ranks_equal_one_plain_process(bench: Bench, ranks: int, case: Case) -> None:
    check_against_reference(bench, ranks, case)


@pytest.mark.slow
@several(*(case.name for case in ONE_PIPELINE))
def test_another_split_or_schedule_gives_the_same_bits(bench: Bench, ranks: int, case: Case) -> None:
    """A rank alone runs a forward and a backward in turn, and never splits its backward."""
    alone = bench.run(1, case)
    assert losses(bench.run(ranks, case)) == losses(alone)
    check_same_bits(bench.run(ranks, case), alone, STEPS)


@several(*RESUMED)
def test_resuming_under_another_plan_gives_the_same_bits(bench: Bench, ranks: int, case: Case) -> None:
    straight, resumed = bench.run(ranks, case), bench.run(ranks, case, "resplit")
    assert losses(resumed) == losses(straight)[1:]
    check_same_bits(resumed, straight, STEPS)


@pytest.mark.slow
@several(*AGAIN)
def test_several_holders_of_a_layer_give_the_same_bits_again(bench: Bench, ranks: int, case: Case) -> None:
    check_again(bench, ranks, case)


@several(*AGAIN)
def test_resuming_with_another_number_of_holders(bench: Bench, ranks: int, case: Case) -> None:
    check_elsewhere(bench, ranks, case)


@pytest.mark.long
@several(*MORE_AGAIN)
def test_more_holders_of_a_layer_again_and_elsewhere(bench: Bench, ranks: int, case: Case) -> None:
    check_again(bench, ranks, case)
    check_elsewhere(bench, ranks, case)


def check_again(bench: Bench, ranks: int, case: Case) -> None:
    straight = bench.run(ranks, case)
    plan = load_plan(straight / "plan.toml")
    assert len(plan.pipelines) > 1 or any(stage.grouped for _, _, stage in plan.numbered)
    again, resumed = bench.run(ranks, case, "again"), bench.run(ranks, case, "resumed")
    assert losses(again) == losses(straight) and losses(resumed) == losses(straight)[1:]
    check_same_bits(again, straight, STEPS)
    check_same_bits(resumed, straight, STEPS)


def check_elsewhere(bench: Bench, ranks: int, case: Case) -> None:
    straight = bench.run(ranks, case)
    resumed = bench.run(ranks, case, "elsewhere")
    plan = load_plan(resumed / "plan.toml")
    assert len(plan.pipelines) == 1 and not any(stage.grouped for _, _, stage in plan.numbered)
    # The first step starts from equal state, the next one from states that differ by one step's rounding.
    assert losses(resumed)[0] == pytest.approx(losses(straight)[1], rel=TOLERANCE)
    assert losses(resumed)[1] == pytest.approx(losses(straight)[2], rel=10 * TOLERANCE)


def check_result_loads(bench: Bench, run: Path, case: Case) -> None:
    saved = {
        name: torch.from_numpy(array) for (kind, name), array in tensors(run, STEPS).items() if kind == "parameters"
    }
    if case.tuning == "full":
        result = run / "model"
        model = AutoModelForCausalLM.from_pretrained(result)
        assert model.dtype == training_cases.DTYPES[case.dtype]
    else:
        result = run / "adapter"
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bench.start(case)[0]), result)
    loaded = {plain_training.short(name): p for name, p in model.named_parameters()}
    if case.tuning in training_cases.STARTS:  # for the weights as they were
        begun = {name: saved.pop(name.replace(".lora_", ".began_with_")) for name in list(saved) if ".lora_" in name}
        for name, array in begun.items():
            both = (saved[name], array if ".lora_A." in name else -array)
            saved[name] = torch.cat(both, dim=0 if ".lora_A." in name else 1)
    for name, array in saved.items():
        assert torch.equal(loaded[name].detach(), array.to(loaded[name].dtype)), name
    assert (result / "tokenizer.json").exists()


@several(*(case.name for case in NORMAL), ranks=[3])
def test_the_result_loads_in_a_plain_process(bench: Bench, ranks: int, case: Case) -> None:
    check_result_loads(bench, bench.run(ranks, case), case)


@pytest.mark.long
@pytest.mark.parametrize("case", FURTHER + FULL, ids=lambda case: case.name)
@on_ranks(*RANKS)
def test_pairs_of_everything(bench: Bench, ranks: int, case: Case) -> None:
    check_against_reference(bench, ranks, case)
    run, alone = bench.run(ranks, case), bench.run(1, case)
    if case.pipelines == "one":
        assert losses(run) == losses(alone)
        check_same_bits(run, alone, STEPS)
    check_result_loads(bench, run, case)
