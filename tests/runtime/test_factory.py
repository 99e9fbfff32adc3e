"""Models made of a user's own layers: N ranks equal one process and a plain torch loop, under every plan.

One real mpirun per number of ranks goes through all cases. The reference knows nothing of stages, transports or our optimizer; it
takes from us the batches, and the seeds that start values and dropout are functions of.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import get_scheduler

from hetero_mpi.data.dataset import Samples
from hetero_mpi.inference.source import open_source
from hetero_mpi.job.load import load_job
from hetero_mpi.model.layer.interface import as_input, seed_from
from hetero_mpi.model.stage import MicroBatch, dropout_seed
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.toml_files import load_profile, save_plan
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.state.directory import checkpoint_path
from tests.programs import layers_model
from tests.support import plans
from tests.support.equality import assert_equals_reference, assert_same_run, tensors
from tests.support.errors import refuses
from tests.support.jobs import Outcome, Workshop
from tests.support.mpi import ROOT, finish_mpi, on_ranks, run_mpi
from tests.support.plans import pipeline

pytestmark = pytest.mark.slow

STEPS, BATCH, MICRO, SEED, LAYERS, CLIP = 3, 8, 2, 7, 6, 0.5
RANKS = (1, 2, 3)


@dataclass(frozen=True)
class Case:
    """A way to train: the factory, and for each number of ranks its pipelines: (ranks in order, boundaries, samples)."""

    name: str
    factory: str
    pipelines: dict[int, list[tuple[list[int], list[int], int]]]
    recompute: bool = False
    split: bool = False
    resumed_from: str = ""
    """Goes on from the checkpoint after step 1 of another case."""


WHOLE = [([0], [0, LAYERS], BATCH)]
CASES = (
    Case("even", "plain", {1: WHOLE, 2: [([0, 1], [0, 3, 6], BATCH)], 3: [([0, 1, 2], [0, 2, 4, 6], BATCH)]}),
    # A stage that holds only what has no parameters and makes a view of its input.
    Case("views", "plain", {1: WHOLE, 2: [([1, 0], [0, 2, 6], BATCH)], 3: [([2, 0, 1], [0, 2, 3, 6], BATCH)]}),
    Case(
        "dropout",
        "dropping",
        {1: WHOLE, 2: [([0, 1], [0, 4, 6], BATCH)], 3: [([0, 2, 1], [0, 1, 5, 6], BATCH)]},
        recompute=True,
        split=True,
    ),
    Case(
        "several",
        "plain",
        {1: WHOLE, 2: [([0], [0, 6], 6), ([1], [0, 6], 2)], 3: [([0, 1], [0, 3, 6], 5), ([2], [0, 6], 3)]},
    ),
    Case(
        "resumed",
        "plain",
        {1: WHOLE, 2: [([1, 0], [0, 5, 6], BATCH)], 3: [([1], [0, 6], 2), ([2, 0], [0, 4, 6], 6)]},
        resumed_from="even",
    ),
    # The weights are those of a model that is there already on rank 0; other ranks have other ones.
    Case(
        "existing",
        "existing",
        {1: WHOLE, 2: [([1], [0, 6], 6), ([0], [0, 6], 2)], 3: [([1, 2, 0], [0, 3, 4, 6], BATCH)]},
    ),
    Case(
        "existing-resumed",
        "existing",
        {1: WHOLE, 2: [([0, 1], [0, 3, 6], BATCH)], 3: [([2], [0, 6], 2), ([1, 0], [0, 4, 6], 6)]},
        resumed_from="existing",
    ),
)


class Lab(Workshop):
    """Files that the tests share. Every mpirun happens once."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._done: set[int] = set()

    def factory_job(self, name: str, factory: str, **tables: dict[str, object]) -> Path:
        values = {
            "model": {"factory": f"tests.programs.layers_model:{factory}"},
            "train": {
                "steps": STEPS,
                "global_batch": BATCH,
                "micro_batch": MICRO,
                "seed": SEED,
                "learning_rate": 3e-3,
                "warmup_steps": 1,
                "weight_decay": 0.1,
                "clip_norm": CLIP,
            },
            "checkpoint": {"every": 1, "keep": 100},
            "cluster": {"threads": 1},
            "plan": {"rebalance": False},
            "profile": {
                "repeats": 1,
                "largest_message_bytes": 4096,
                "cache": False,
                "calibrate": True,
            },  # no bit is another
            "report": {"write": False},
        }
        return self.job(name, values, **tables)

    def run_dir(self, ranks: int, case: Case) -> Path:
        """Where a case was run; the first call for a number of ranks runs all cases."""
        if ranks not in self._done:
            self._done.add(ranks)
            entries = {case.name: self._entry(ranks, case) for case in CASES}
            for name, outcome in self.run_entries(ranks, entries, timeout_s=400).items():
                assert set(outcome.raised) == {""}, (name, outcome.texts)
        return self.directory / f"np{ranks}-{case.name}"

    def _entry(self, ranks: int, case: Case) -> dict[str, object]:
        tables = {"train": {"recompute": case.recompute}}
        job = self.factory_job(case.name, case.factory, **tables)
        plan = self.directory / f"np{ranks}-{case.name}.plan.toml"
        save_plan(plan_of(case, ranks), plan)
        entry: dict[str, object] = {"job": job, "plan": plan, "run_dir": str(self.directory / f"np{ranks}-{case.name}")}
        if case is not CASES[0]:  # measured once
            entry["profile"] = str(self.directory / f"np{ranks}-{CASES[0].name}" / "profile.toml")
        if case.resumed_from:
            source = self.directory / f"np{ranks}-{case.resumed_from}"
            entry["resume"] = str(checkpoint_path(source / "checkpoints", 1))
        return entry


def plan_of(case: Case, ranks: int) -> Plan:
    schedule = "split" if case.split else "1f1b"
    made = [
        pipeline(order, edges, MICRO, samples, schedule, recompute=case.recompute)
        for order, edges, samples in case.pipelines[ranks]
    ]
    return plans.plan_of(*made, length=1)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("factory"))


def chain_of(factory: str) -> nn.Sequential:
    """The model in plain torch, with start values that are functions of (seed, name of the layer); or as it is there already."""
    made, built = getattr(layers_model, factory)(), OrderedDict()
    if isinstance(made.layers, nn.Sequential):
        return made.layers.train()
    for name, builder in made.layers.items():
        torch.manual_seed(seed_from(SEED, name))
        built[name] = builder()
    return nn.Sequential(built)


@dataclass
class Reference:
    losses: list[float]
    first_moments: dict[str, torch.Tensor]
    """First moments after step 1: the clipped gradients times (1 - beta1)."""
    evaluation_loss: float
    model: nn.Sequential


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {factory: run_reference(factory) for factory in ("plain", "dropping", "existing")}


def run_reference(factory: str) -> Reference:
    torch.set_num_threads(1)
    made, model, position = getattr(layers_model, factory)(), chain_of(factory), {}
    samples = Samples(made.data(), made.evaluation(), 0.02, SEED)
    for index, layer in enumerate(model):

        def seed(module: nn.Module, arguments: object, index: int = index) -> None:
            if module.training:
                torch.manual_seed(dropout_seed(SEED, position[0], index))

        layer.register_forward_pre_hook(seed)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    scheduler = get_scheduler("cosine", optimizer, 1, STEPS)
    losses, moments = [], {}
    for step in range(STEPS):
        batch = samples.batch(step, BATCH)
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, BATCH, MICRO):
            position[0] = MicroBatch(0, step, first, BATCH)
            rows = slice(first, first + MICRO)
            loss = made.loss(model(as_input(batch.tokens[rows])), as_input(batch.targets[rows])) / BATCH
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(list(trained.values()), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(total)
        if step == 0:
            moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in trained.items()}
    model.eval()
    held_out = next(samples.held_out_batches(64))
    with torch.no_grad():
        evaluation = made.loss(model(as_input(held_out.tokens)), as_input(held_out.targets)).item() / 10
    return Reference(losses, moments, evaluation, model)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@on_ranks(*RANKS)
def test_ranks_equal_a_plain_torch_loop(lab: Lab, references: dict[str, Reference], ranks: int, case: Case) -> None:
    assert_equals_reference(lab.run_dir(ranks, case), references[case.factory])


@pytest.mark.parametrize("name", ["even", "views", "dropout"])
@on_ranks(*RANKS[1:])
def test_another_cut_gives_the_same_bits(lab: Lab, ranks: int, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    assert_same_run(lab.run_dir(ranks, case), lab.run_dir(1, case))


@on_ranks(*RANKS)
def test_the_result_is_the_state_dict_of_plain_torch(lab: Lab, references: dict[str, Reference], ranks: int) -> None:
    state = load_file(lab.run_dir(ranks, CASES[0]) / "model" / "model.safetensors")
    model = nn.Sequential(OrderedDict((name, build()) for name, build in layers_model.layers().items()))
    model.load_state_dict(state, strict=True)
    for name, value in references["plain"].model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
    assert state["scaled.count"].dtype == torch.int64
    saved = {
        name: array
        for (kind, name), array in tensors(lab.run_dir(ranks, CASES[0]), STEPS).items()
        if kind == "parameters"
    }
    assert set(saved) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(state[name], torch.from_numpy(array)) for name, array in saved.items())


def test_every_layer_has_its_own_costs(lab: Lab) -> None:
    """Feature maps differ from cut to cut, and so do messages; a sample counts as one token."""
    model = load_profile(lab.run_dir(3, CASES[0]) / "profile.toml").model
    assert (model.model_type, model.dtype, model.sequence_length) == ("tests.programs.layers_model:plain", "fp32", 1)
    assert len({layer.kind for layer in model.layers}) == LAYERS
    assert [layer.boundary_bytes_per_token for layer in model.layers] == [4 * n for n in (256, 64, 64, 16, 16, 0)]
    assert [layer.trainable_parameters for layer in model.layers] == [4 * 19 + 8, 0, 0, 65 * 16, 17 * 16, 17 * 3]
    assert model.layers[3].parameters == 65 * 16 + 64


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the most memory used is read from Linux's /proc"
)
def test_a_model_that_is_there_already_is_never_there_twice(tmp_path: Path) -> None:
    result = run_mpi(1, ["tests/programs/existing_memory.py", str(tmp_path)], timeout_s=200)
    found = re.search(r"start \+(\d+) MiB, kept \+(\d+) MiB", result.stdout)
    assert found is not None, result.stdout + result.stderr
    most, kept = map(int, found.groups())
    assert kept > 30 and most < 60, f"of a model of 40 MiB: {found[0]}"


WRONG = {
    "nothing": "returns a NoneType: it must return a hetero_mpi.LayeredModel",
    "fails": "RuntimeError: no such luck (",
    "missing": "has no function missing",
    "batch_norm": "layer 'pool' normalises over the batch",
    "in_place": "layer 'pool' changes its input in place",
    "looks_around": "layer 'flat' gives a different output for a sample if the batch contains other samples",
    "mean_loss": 'use reduction="sum"',
    "unequal": "that of 39 is (9,)",
    "not_finite": "sample 0",
    "built_already": "layer '0' is a Flatten: pass a function that builds it",
    "outside": "layer '0' was built outside its builder: parameter 0.weight is the same tensor on every call",
    "copied": "layer '0' has different initial values than on rank 0 (0.weight)",
    "drawn": "layer 'hidden' has different initial values on every call of its builder (weight)",
    "shared": "layers 'hidden' and 'again' share a parameter (weight of 'again')",
    "shared_inside": "layers 'hidden' and 'again' share a parameter (0.weight of 'again')",
    "shared_existing": "layers 'hidden' and 'again' share a parameter (0.weight of 'again')",
    "wrong_shape": "layer 'hidden' fails on an input of shape (2, 16)",
}


@pytest.fixture(scope="module")
def refused(lab: Lab) -> dict[str, Outcome]:
    def entry(name: str, **tables: dict[str, object]) -> dict[str, object]:
        job = lab.factory_job(f"wrong-{name}", name, **tables)
        return {"job": job, "run_dir": str(lab.directory / f"wrong-{name}")}

    nowhere = entry("nowhere", model={"factory": "no_such_module:plain"})
    resumed = str(checkpoint_path(lab.run_dir(3, CASES[-2]) / "checkpoints", 1))
    changed = {**entry("other_buffers"), "resume": resumed}
    return lab.run_entries(2, {**{name: entry(name) for name in WRONG}, "nowhere": nowhere, "changed": changed})


def test_buffers_that_have_changed_since_the_checkpoint_are_refused(refused: dict[str, Outcome]) -> None:
    assert "was written with different values of buffer features of layer 'scaled'" in refused["changed"].texts[1]


@pytest.mark.parametrize("name", WRONG)
def test_what_splitting_would_change_is_refused_on_all_ranks(refused: dict[str, Outcome], name: str) -> None:
    outcome = refused[name]
    assert outcome.codes == (2, 2) and outcome.texts[0] == outcome.texts[1]
    assert WRONG[name] in outcome.texts[0]


def test_a_missing_module_is_told_with_the_place(refused: dict[str, Outcome], lab: Lab) -> None:
    text = refused["nowhere"].texts[1]
    assert f"there is no module no_such_module in {lab.directory} or on the Python path" in text


@pytest.mark.long
def test_the_example_learns(tmp_path: Path) -> None:
    """jobs/cnn.toml as it is, but for its length."""
    command = ["-m", "hetero_mpi", "train", "jobs/cnn.toml", "--run-dir", str(tmp_path), "--set", "train.steps=40"]
    result = finish_mpi(2, [*command, "--set", "report.write=false"], timeout_s=200)
    assert "cnn_model:cnn, 5 layers" in result.stdout and not re.search("tokens|sequences", result.stdout), (
        result.stdout
    )
    with refuses("generate.custom_model", "cnn_model:cnn"):
        open_source(tmp_path)
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert found.steps[-1].loss < 0.7 * found.steps[0].loss
    assert found.evaluations[-1].loss < 0.7 * found.steps[0].loss
    assert load_job(ROOT / "jobs" / "cnn.toml").job.train.dtype == "fp32"
