"""Is a run equal to one process? The one owner of that question, and of what two runs have in common.

bench = Bench(directory)
assert_equals_plain(bench, 3, named("llama-even"))                        # three ranks, and a plain transformers loop
assert_equals_plain(bench, 3, named("llama-even"), via="replan")          # resumed under another split: the same bits

assert_same_run(run, straight)                                            # losses and the last checkpoint, to the bit
assert_same_run(run, straight, losses_apart=3e-6, tensors_apart=1e-4)     # up to the rounding of sums in another order
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.toml_files import load_plan, load_report, save_plan
from hetero_mpi.rundir.line_files import METRICS_NAME
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.state.directory import checkpoint_path, newest_readable
from hetero_mpi.state.hdf5 import KINDS
from hetero_mpi.state.reader import CheckpointReader
from tests.support import case_plans, plain_training, training_cases
from tests.support.jobs import Workshop, write_profile
from tests.support.rank_pool import run_pooled
from tests.support.training_cases import GROUPED, STARTS, STEPS, Case

Tensors = Mapping[tuple[str, str], np.ndarray]
"""(kind, name) -> array of everything in a checkpoint."""
TOLERANCE = 1e-6
IN_GROUPS = 3e-6
"""Of gradients where a group adds up its parts of every matrix product: fp32 rounds such sums otherwise. (In fp64 they are within
1e-6: ``tests/model/test_group.py``.)"""


# Two runs


def losses(run: Path) -> list[float]:
    """Of the run's steps, each of which is told once."""
    steps = read_metrics(run / METRICS_NAME).steps
    assert [line.step for line in steps] == list(range(steps[0].step, steps[-1].step + 1)) if steps else True
    return [line.loss for line in steps]


def evaluation(run: Path) -> float:
    """The last evaluation loss of a run."""
    return read_metrics(run / METRICS_NAME).evaluations[-1].loss


def tensors(run: Path, step: int | None = None) -> Tensors:
    """Of a checkpoint file, or of a run's checkpoint after ``step`` steps, by default its last one."""
    if run.is_dir():
        folder = run / "checkpoints"
        newest = checkpoint_path(folder, step) if step is not None else newest_readable(folder)
        assert newest is not None, f"no checkpoint in {folder}"
        run = newest
    with CheckpointReader(run) as reader:
        return {(kind, name): reader.read(kind, name)[0] for kind in KINDS for name in reader.names(kind)}


def assert_same_tensors(found: Tensors, expected: Tensors, apart: float = 0.0) -> None:
    """``apart``: the largest difference in parts of a tensor's norm; 0: the same bits."""
    assert found.keys() == expected.keys() and expected
    for key, array in expected.items():
        if apart == 0:
            assert np.array_equal(found[key], array), key
        else:
            assert np.linalg.norm(found[key] - array) <= apart * np.linalg.norm(array), key


def assert_same_run(
    run: Path, expected: Path, losses_apart: float = 0.0, tensors_apart: float | None = 0.0, step: int | None = None
) -> None:
    """The losses of all steps of ``run`` are the last ones of ``expected``, and its last checkpoint (or that after ``step``) is.

    Args:
        losses_apart: Largest relative difference of a loss; 0: the same bits.
        tensors_apart: The same of tensors, in parts of their norms; None: they are not compared.
    """
    own, all_expected = losses(run), losses(expected)
    assert own and len(set(all_expected)) > min(1, len(all_expected) - 1), "a loss that never changes shows nothing"
    if losses_apart == 0:
        assert own == all_expected[-len(own) :]
    else:
        assert own == pytest.approx(all_expected[-len(own) :], rel=losses_apart), run
    if tensors_apart is not None:
        assert_same_tensors(tensors(run, step), tensors(expected, step), tensors_apart)


# A run and a plain loop


class Reference(Protocol):
    """What a plain loop computed."""

    losses: list[float]
    first_moments: dict[str, torch.Tensor]
    evaluation_loss: float


def assert_equals_reference(
    run: Path, reference: Reference, gradients_apart: float = TOLERANCE, frozen: Sequence[str] = ()
) -> None:
    """Losses, the evaluation, and of a run from the beginning its gradients: what the optimizer keeps of them after one step."""
    own = losses(run)
    np.testing.assert_allclose(own, reference.losses[-len(own) :], rtol=TOLERANCE)
    assert evaluation(run) == pytest.approx(reference.evaluation_loss, rel=1e-5)
    if len(own) < len(reference.losses):
        return
    after_one = tensors(run, 1)
    moments = {kind: {name for of, name in after_one if of == kind} for kind in ("moments1", "moments2")}
    assert moments["moments1"] | moments["moments2"] == reference.first_moments.keys() - set(frozen)
    for name in reference.first_moments.keys() - set(frozen):
        expected = reference.first_moments[name]
        found = after_one["moments1" if name in moments["moments1"] else "moments2", name]
        if expected.dtype == torch.uint8:
            assert (found != expected.numpy()).mean() <= 1e-3, "a gradient's last bit changes a code at times"
            continue
        assert expected.norm() > 0, f"{name} has no gradient: the comparison would be empty"
        assert (torch.from_numpy(found) - expected).norm() / expected.norm() <= gradients_apart, name


def assert_near_reference(run: Path, reference: Reference, first: float, gradients: float, names: set[str]) -> None:
    """In bf16 the plain loop adds gradients up in bf16 (we in fp32) and, in full training, steps without fp32 masters, so only
    the first loss has the same bits; afterwards 2 %, and 2 % of each gradient's norm (8 bits of mantissa). fp16 with loss
    scaling is held against fp32."""
    assert losses(run)[0] == pytest.approx(reference.losses[0], rel=first)
    np.testing.assert_allclose(losses(run), reference.losses, rtol=0.02)
    after_one = tensors(run, 1)
    for name in names:
        expected = reference.first_moments[name].float()
        assert (torch.from_numpy(after_one["moments1", name]) - expected).norm() / expected.norm() <= gradients, name


# The cases of training_cases.py


@dataclass
class Bench:
    """Files and results that the tests of one session share; every mpirun and every reference runs once."""

    directory: Path
    finished: dict[Path, bool] = field(default_factory=dict)
    """Run directory -> whether the run ended."""
    references: dict[str, plain_training.Reference] = field(default_factory=dict)
    measured: set[tuple[str, object]] = field(default_factory=set)
    """(field, value) of the cases that have measured their profile."""

    def __post_init__(self) -> None:
        self.text = training_cases.corpus(self.directory)
        self.tokenizer = training_cases.tokenizer_directory(self.directory, self.text)

    def run(self, ranks: int, case: Case, variant: str = "") -> Path:
        """The run directory of a case on so many ranks. ``variant``: "again"; "resume" after step 1 under its own plan;
        "regroup", after step 1 under one pipeline; "replan", after step 1 with other cuts and nothing streamed."""
        run = self.directory / f"np{ranks}" / "-".join(filter(None, (case.name, variant)))
        if run not in self.finished:
            self.finished[run] = False  # until it ends: a broken run is not repeated for every test
            self._run(ranks, case, variant, run)
            self.finished[run] = True
        assert self.finished[run], f"{run.name} failed before on {ranks} ranks"
        return run

    def reference(self, case: Case) -> plain_training.Reference:
        if case.name not in self.references:
            model, adapter = self.start(case)
            self.references[case.name] = plain_training.run_reference(case, model, adapter, self.tokenizer, self.text)
        return self.references[case.name]

    def start(self, case: Case) -> tuple[Path, Path | None]:
        """Directories of the case's start weights and, where it tunes an adapter, of that."""
        model = training_cases.model_directory(self.directory, case)
        begins = case.tuning in ("full", *STARTS)
        return model, None if begins else training_cases.adapter_directory(self.directory, case)

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
        if variant == "replan":
            split = "uneven" if case.split != "uneven" else "even"
            plan = case_plans.write_plan(path, replace(case, streamed=False), ranks, split)
        else:
            plan = case_plans.write_plan(path, case, ranks, **({"pipelines": "one"} if variant == "regroup" else {}))
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


def assert_equals_plain(bench: Bench, ranks: int, case: Case, via: str = "run") -> None:
    """A case on so many ranks is equal to one process.

    Args:
        via: How the run came about: ``run`` (held against the plain loop), ``one`` (the bits of our own single process), ``again``
            (the same run once more), ``resume`` (from step 1 under its own plan), ``replan`` (from step 1 under another split),
            ``regroup`` (from step 1 with another number of holders of each layer), or ``load`` (its result in a plain process).
    """
    run = bench.run(ranks, case)
    if via == "run":
        _check_run(bench, run, ranks, case)
    elif via == "one":
        assert_same_run(run, bench.run(1, case))
    elif via == "load":
        _check_result(bench, run, case)
    elif via == "regroup":
        resumed = bench.run(ranks, case, via)
        assert len(_holders(resumed)) == 1
        # The first step starts from equal state, the next one from states that differ by one step's rounding.
        for own, expected, apart in zip(losses(resumed), losses(run)[1:], (TOLERANCE, 10 * TOLERANCE), strict=True):
            assert own == pytest.approx(expected, rel=apart)
    else:
        if via in ("again", "resume"):
            assert len(_holders(run)) > 1
        assert_same_run(bench.run(ranks, case, via), run)


def _holders(run: Path) -> list[int]:
    """A number for each pipeline, and one more for each group of ranks in them."""
    plan = load_plan(run / "plan.toml")
    return [*range(len(plan.pipelines)), *(stage.ranks[0] for _, _, stage in plan.numbered if stage.grouped)]


def _check_run(bench: Bench, run: Path, ranks: int, case: Case) -> None:
    reference = bench.reference(case)
    assert len(losses(run)) == STEPS
    parted = case.pipelines in GROUPED and ranks > 1
    if case.dtype != "fp32":
        # Members of a group round their parts of a product before they are added. A processor without units for bf16 computes in
        # fp32, whose sums depend on the rows of a micro-batch; rounding to bf16 then falls to the one side or the other.
        parted |= case.shares == "unequal" and ranks > 1
        first, gradients = (1e-3, 0.04) if parted else (1e-6 if case.dtype == "bf16" else 1e-3, 0.02)
        if case.tuning != "full":  # ours adds the products of base layer and adapter before it rounds, peft rounds each
            first, gradients = 1e-3, 0.08
        names = reference.first_moments.keys() - reference.frozen
        assert_near_reference(run, reference, first, gradients, names)
        return
    frozen = sorted(reference.frozen)
    assert_equals_reference(run, reference, IN_GROUPS if parted else TOLERANCE, frozen)
    at_end = tensors(run, STEPS)
    for name in frozen:
        assert np.array_equal(at_end["parameters", name], reference.parameters[name].numpy()), name


def _check_result(bench: Bench, run: Path, case: Case) -> None:
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
    if case.tuning in STARTS:  # for the weights as they were
        begun = {name: saved.pop(name.replace(".lora_", ".began_with_")) for name in list(saved) if ".lora_" in name}
        for name, array in begun.items():
            both = (saved[name], array if ".lora_A." in name else -array)
            saved[name] = torch.cat(both, dim=0 if ".lora_A." in name else 1)
    for name, array in saved.items():
        assert torch.equal(loaded[name].detach(), array.to(loaded[name].dtype)), name
    assert (result / "tokenizer.json").exists()


# Plans that resume each other


@dataclass(frozen=True)
class Stretch:
    """A part of a training: by which plan, and after how many steps of which other run it goes on."""

    plan: str
    after: str = ""
    step: int = 1


def run_stretches(
    shop: Workshop,
    name: str,
    model: Path,
    plans: Mapping[str, Plan],
    stretches: Mapping[str, Stretch],
    tables: Mapping[str, Any] | None = None,
) -> dict[str, Path]:
    """Run one job on ``model`` by several plans, of which some go on where others have been; stretch -> run directory.

    ``tables``: keys of the job. Every run ends well, and under the plan that it was given.
    """
    ranks = 1 + max(max(plan.ranks) for plan in plans.values())
    job = shop.job(name, shop.values(model), **(tables or {}))
    profile = write_profile(shop.directory / f"{name}.made.toml", job, ranks)
    runs = {stretch: shop.directory / f"{name}-{stretch}" for stretch in stretches}
    entries = {}
    for stretch, part in stretches.items():
        plan = shop.directory / f"{name}-{part.plan}.plan.toml"
        save_plan(plans[part.plan], plan)
        resume = checkpoint_path(runs[part.after] / "checkpoints", part.step) if part.after else None
        entries[stretch] = {"job": job, "profile": profile, "plan": plan, "run_dir": runs[stretch], "resume": resume}
    shop.finish_entries(ranks, entries)
    for stretch, part in stretches.items():
        assert load_report(runs[stretch] / "plan.toml").plan.pipelines == plans[part.plan].pipelines
    return runs
