"""Runs training jobs, one after the other, in one MPI job and records how each ended: ``train_outcomes.py LIST.json OUT.json``.

Starting ranks costs more than training these models, so they are started once. Each entry of the list holds the options of
``train`` and, if wanted, what goes wrong: ``damage`` (a file of which rank 0 destroys some bytes before), ``breaks`` (the
name of a function below that breaks something in the running program) with ``elsewhere`` (a path) and ``rank`` for it.
The output holds for each entry and rank what was raised, its text and exit code (0: nothing), and what was printed.
"""

import contextlib
import gc
import importlib
import io
import json
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.model.eager_imports import eager_imports
from hetero_mpi.planning.analysis.calibration import Allowance, LinkBetween, WatchedPart
from hetero_mpi.planning.analysis.step_comparison import StepExchange
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.toml_files import load_plan
from hetero_mpi.util.errors import UserError
from tests.programs.pooled import forget
from tests.support.planning_samples import reported

with eager_imports():  # as a rank of ``train`` does
    import torch

    from hetero_mpi.data.batch import Batch
    from hetero_mpi.device.backend import Memory
    from hetero_mpi.engine import trainer
    from hetero_mpi.engine.host_group import HostGroup
    from hetero_mpi.engine.trainer import StepResult
    from hetero_mpi.model.files.model_files import ModelFiles
    from hetero_mpi.model.optimizer import Optimizer, StepDecider
    from hetero_mpi.model.stage import MicroBatch, Stage
    from hetero_mpi.state import saving
    from hetero_mpi.training import build, rebalance, run_report, training_run, trial, watchdog
    from hetero_mpi.training.setup.context import RunContext, Share, TrainOptions
    from hetero_mpi.training.training_run import train

Breaking = contextlib.AbstractContextManager[None]


@contextlib.contextmanager
def nothing(world: World, entry: dict[str, Any]) -> Iterator[None]:
    yield


@contextlib.contextmanager
def model_is_elsewhere(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """On the machine of ``entry["rank"]`` another directory lies at the model's path."""
    if world.rank != entry["rank"]:
        yield
        return
    with mock.patch.object(build, "model_directory", lambda loaded: Path(entry["elsewhere"])):
        yield


@contextlib.contextmanager
def loading_fails(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """``entry["rank"]`` cannot build its stage, for a reason that its user can put right."""
    if world.rank != entry["rank"]:
        yield
        return
    with mock.patch.object(build, "Stage", side_effect=UserError("test.fault", "the shelf is full: make room")):
        yield


@contextlib.contextmanager
def forward_fails_on_rank_1(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """Rank 1's device gives up in the second step."""
    forward = Stage.forward

    def failing(
        stage: Stage, position: MicroBatch, x: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        if world.rank == 1 and position.step == 1:
            raise RuntimeError("the device fell off the bus")
        return forward(stage, position, x, targets)

    with mock.patch.object(Stage, "forward", failing):
        yield


@contextlib.contextmanager
def memory_is_limited_on_rank_1(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """From the second step on rank 1's process may not map more memory than it has."""
    forward, before = Stage.forward, resource.getrlimit(resource.RLIMIT_AS)

    def limited(
        stage: Stage, position: MicroBatch, x: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        if world.rank == 1 and position.step == 1:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped, before[1]))
        return forward(stage, position, x, targets)

    with mock.patch.object(Stage, "forward", limited):
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def rank_2_is_slow(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """Rank 2 sleeps in every layer's forward: its processor time does not tell."""
    forward = Stage.forward

    def slow(stage: Stage, position: MicroBatch, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if world.rank == 2:
            time.sleep(0.03 * (stage.last - stage.first))
        return forward(stage, position, x, targets)

    with mock.patch.object(Stage, "forward", slow):
        yield


class _Prompt(rebalance.Replanner):
    """The steps wait for its answers."""

    @property
    def ready(self) -> bool:
        while self._answering is not None and self._answering.running:
            time.sleep(0.05)
        return super().ready


@contextlib.contextmanager
def sums_are_slow(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """Groups wait in every sum, and the plan may change although it was given. Ranks are taken to be as fast as profiled, so that
    a busy machine decides nothing."""
    add, ratios = HostGroup.sum, StepExchange.ratios

    def slow(group: HostGroup, tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        group.summed_s += 0.002
        return add(group, tensor)

    def steady(word: StepExchange, told: NDArray[np.float64]) -> dict[WatchedPart, float]:
        found = {one: ratio for one, ratio in ratios(word, told).items() if not isinstance(one, LinkBetween)}
        return {one: 1.0 if isinstance(one, int) or ratio < 10 else 1e4 for one, ratio in found.items()}

    with (
        mock.patch.object(HostGroup, "sum", slow),
        mock.patch.object(StepExchange, "ratios", steady),
        mock.patch.object(rebalance, "Replanner", _Prompt),
        mock.patch.object(training_run, "rebalancer_of", lambda context, given: rebalance.Rebalancer(context)),
    ):
        yield


@contextlib.contextmanager
def there_is_no_time_for_another_plan(world: World, entry: dict[str, Any]) -> Iterator[None]:
    with mock.patch.object(trial, "allowance", lambda *of: Allowance(1, 0.1, most_s=0.0)):
        yield


@contextlib.contextmanager
def memory_lacks_in_the_trial(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """Rank ``entry["rank"]`` has no memory for the first ``entry["times"]`` plans that are tried."""
    rehearse, left = trainer.Trainer.rehearse, entry["times"]

    def lacking(own: trainer.Trainer, batch: Batch) -> None:
        nonlocal left
        if world.rank != entry["rank"] or left == 0 or not own.stages:
            return rehearse(own, batch)
        left -= 1
        with mock.patch.object(Stage, "forward", side_effect=torch.OutOfMemoryError("HIP out of memory. Tried it")):
            return rehearse(own, batch)

    with mock.patch.object(trainer.Trainer, "rehearse", lacking):
        yield


@contextlib.contextmanager
def a_small_device_is_left_clean(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """A stand-in GPU has ``entry["room"]`` bytes (None: plenty) beside what is on it when rank 1 rehearses a plan; whatever comes,
    a trial leaves on the devices what was there before.
    """
    from tests.stand_in_gpu import module

    rehearse, steps, room = trainer.Trainer.rehearse, trial._steps, entry["room"]

    def limited(own: trainer.Trainer, batch: Batch) -> None:
        small = world.rank == 1 and room is not None
        if small:
            module.device.set_limit(
                own.backend.index, module.device.used(own.backend.index) + room, "CUDA out of memory."
            )
        try:
            rehearse(own, batch)
        finally:
            if small:
                module.device.set_limit(own.backend.index, 1 << 60, "")

    def watched(context: RunContext, *arguments: Any) -> Any:
        index = context.backend.index
        gc.collect()
        before = module.device.used(index), module.device.registered_bytes()
        found = steps(context, *arguments)
        assert (module.device.used(index), module.device.registered_bytes()) == before, "a trial has left something"
        return found

    with mock.patch.object(trainer.Trainer, "rehearse", limited), mock.patch.object(trial, "_steps", watched):
        yield


@contextlib.contextmanager
def weights_are_locked(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """Reading any tensor of the model's files is an error."""

    def refuse(files: ModelFiles, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    with mock.patch.object(ModelFiles, "read", refuse):
        yield


@contextlib.contextmanager
def gradients_overflow_in_step_2(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """Some gradient is infinite in the second step although the loss is finite, as happens in narrow dtypes."""
    calls = 0
    squared_norms = Optimizer.squared_norms

    def overflowing(optimizer: Optimizer) -> dict[str, float]:
        nonlocal calls
        calls += 1
        norms = squared_norms(optimizer)
        return dict.fromkeys(norms, float("inf")) if calls == 2 else norms

    with mock.patch.object(Optimizer, "squared_norms", overflowing):
        yield


@contextlib.contextmanager
def loss_is_no_number_in_step_2(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """The loss of the second step of this run is NaN."""
    calls = 0
    fill = StepDecider.fill

    def failing(
        decider: StepDecider, norms: dict[str, float], losses: dict[int, float], stop: bool, part: int
    ) -> NDArray[np.float64]:
        nonlocal calls
        calls += 1
        return fill(decider, norms, dict.fromkeys(losses, float("nan")) if calls == 2 else losses, stop, part)

    with mock.patch.object(StepDecider, "fill", failing):
        yield


class Forced:
    """Changes to given plans after given steps, whatever the machines do."""

    def __init__(self, changes: list[tuple[int, str]]) -> None:
        self._plans = dict(changes)
        self._stage: weakref.ref[Stage] | None = None
        self._next = ""

    def start_plan(self, share: Share) -> None:
        gone = self._stage is None or self._stage() is None
        assert gone, "two stages are in memory"
        stage = share.trainer.layers if share.trainer is not None else None
        self._stage = weakref.ref(stage) if stage is not None else None
        print(f"begin with {len(share.plan.numbered)} stages")

    def end_plan(self) -> None:
        print("end")

    def word(self) -> NDArray[np.float64]:
        return np.ones(1)

    def due(self, step: int, result: StepResult) -> bool:
        assert result.extras_sum[0] >= 1
        self._next = self._plans.get(step + 1, "")
        return bool(self._next)

    def chosen(self) -> PlanReport:
        return reported(load_plan(self._next))

    def changed(self, step: int, old: Plan, new: Plan, stall_s: float) -> None:
        print(f"changed after step {step}")

    def close(self) -> None:
        print("no change follows")


@contextlib.contextmanager
def plans_change(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """``entry["changes"]``: pairs of a number of steps and the plan file to go on with."""
    with mock.patch.object(training_run, "rebalancer_of", lambda *arguments: Forced(entry["changes"])):
        yield


@contextlib.contextmanager
def no_room_to_change(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """Rank 1's host has hardly any memory left once it trains."""
    if world.rank != 1:
        yield
        return
    with mock.patch.object(saving, "host_memory", lambda: Memory(1000, "hardly any")):
        yield


@contextlib.contextmanager
def something_beside_fails(world: World, entry: dict[str, Any]) -> Iterator[None]:
    """Calling any of ``entry["names"]`` ("module:object.attribute") fails on every rank."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(run_report, "WRITE_INTERVAL_S", 0.01))
        patches.enter_context(mock.patch.object(watchdog, "_POLL_INTERVAL_S", 0.05))
        for name in entry["names"]:
            module, _, path = name.partition(":")
            importlib.import_module(module)
            failing = mock.patch(f"{module}.{path}", side_effect=RuntimeError("of a test"))
            patches.enter_context(failing)
        yield


WAYS: dict[str, Callable[[World, dict[str, Any]], Breaking]] = {
    way.__name__: way
    for way in (
        nothing,
        model_is_elsewhere,
        loading_fails,
        forward_fails_on_rank_1,
        memory_is_limited_on_rank_1,
        rank_2_is_slow,
        sums_are_slow,
        there_is_no_time_for_another_plan,
        memory_lacks_in_the_trial,
        a_small_device_is_left_clean,
        weights_are_locked,
        gradients_overflow_in_step_2,
        loss_is_no_number_in_step_2,
        plans_change,
        no_room_to_change,
        something_beside_fails,
    )
}


def damage(path: Path) -> None:
    """Destroy a few bytes in the middle, as a failing disk does."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(byte ^ 0xFF for byte in content[middle : middle + 64])
    path.write_bytes(content)


def options_of(entry: dict[str, Any]) -> TrainOptions:
    paths = {key: Path(entry[key]) for key in ("job", "plan", "profile") if entry.get(key)}
    return TrainOptions(
        **paths,
        overrides=tuple(entry.get("set", ())),
        run_dir=entry.get("run_dir"),
        resume=entry.get("resume"),
        dry_run=bool(entry.get("dry_run")),
    )


def outcome_of(world: World, entry: dict[str, Any]) -> dict[str, Any]:
    """How one job ended on this rank."""
    if world.rank == 0 and "damage" in entry:
        damage(Path(entry["damage"]))
    world.barrier()
    raised, text, code = "", "", 0
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), WAYS[entry.get("breaks", "nothing")](world, entry):
        try:
            train(world, options_of(entry))
        except CollectiveUserError as error:  # what one rank raises alone ends all of them
            raised, text, code = type(error).__name__, str(error), error.exit_code
    return {"raised": raised, "text": text, "code": code, "printed": printed.getvalue()}


def main(world: World) -> int:
    listed, results = Path(sys.argv[1]), Path(sys.argv[2])
    outcomes = []
    for entry in json.loads(listed.read_text()):
        outcomes.append(world.gather_json(outcome_of(world, entry)))
        forget()
        if world.rank == 0:
            results.write_text(json.dumps(outcomes))  # also when a later entry takes all ranks down
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
