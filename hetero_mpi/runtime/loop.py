"""The loop over steps: batches from rank 0, one verdict per step, evaluation, checkpoints and what a person is told."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.world import CollectiveUserError
from hetero_mpi.data.samples import DataSource
from hetero_mpi.data.sequences import Batch
from hetero_mpi.engine.placement import Tokens, holders
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.errors import ExitCode
from hetero_mpi.job.load import JobConfig
from hetero_mpi.model.optimizer import LearningRate, StepDecision
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.report.progress import ProgressDisplay
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.metrics import Evaluation, MetricsWriter, StepMetrics
from hetero_mpi.state.checkpointing import RunState, align_replicas, described, open_saver, replicas_differ

_SKIPS_IN_A_ROW = 10
"""So many steps with non-finite gradients one after the other end the run."""


@dataclass
class LoopResult:
    """What the loop leaves behind, the same on every active rank."""

    steps: list[StepMetrics] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    skipped: int = 0
    """Steps without an update, since gradients were not finite."""
    last_checkpoint: Path | None = None
    """The newest checkpoint of the run; on other ranks than 0 it may be one whose writing failed."""


@dataclass
class Books:
    """What a run keeps while its plans change. Whole on rank 0; other ranks have what they need to go on."""

    state: RunState
    result: LoopResult
    skips_in_a_row: int = 0
    good_checkpoint: Path | None = None
    """The newest checkpoint whose weights have since given a finite step."""

    @classmethod
    def opened(cls, state: RunState, resumed_from: Path | None = None) -> Books:
        """At the start of a run, or where it is resumed."""
        return cls(state, LoopResult(last_checkpoint=resumed_from))

    def to_dict(self) -> dict[str, Any]:
        """What a rank that joins must know, as JSON-able values."""
        last, good = self.result.last_checkpoint, self.good_checkpoint
        return {
            "step": self.state.step,
            "losses": list(self.state.losses),
            "updates": self.state.updates,
            "loss_scale": self.state.loss_scale,
            "skipped": self.result.skipped,
            "skips_in_a_row": self.skips_in_a_row,
            "last_checkpoint": str(last) if last is not None else None,
            "good_checkpoint": str(good) if good is not None else None,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Books:
        scale, last, good = (values[key] for key in ("loss_scale", "last_checkpoint", "good_checkpoint"))
        loss_scale = (scale[0], scale[1]) if scale is not None else None
        state = RunState(values["step"], list(values["losses"]), values["updates"], loss_scale)
        result = LoopResult(skipped=values["skipped"], last_checkpoint=Path(last) if last is not None else None)
        return cls(state, result, values["skips_in_a_row"], Path(good) if good is not None else None)


class Steering(Protocol):
    """Who may ask for another plan between two steps. Every active rank makes the same calls."""

    def word(self) -> NDArray[np.float64]:
        """What this rank says along with the verdict on a step: as many numbers on every rank."""
        ...

    def due(self, step: int, heard: NDArray[np.float64]) -> bool:
        """After step number ``step``, with all ranks' words added up: is the plan to be changed now? The same answer on all
        ranks."""
        ...


class Loop:
    """Runs the steps of a job under one plan. Everything here is collective over the active ranks.

    Args:
        trainer: this rank's share.
        job, plan: what to do and how.
        dataset: on rank 0, else None.
        directory: where checkpoints go.
        metadata: what every checkpoint carries besides tensors; used on rank 0.
        books: where the run stands (resumed runs start later); kept up to date.
        asked: has this rank been asked to end the run (``runtime.signals``)?
        steering: says when the plan is to be changed; None: never.
        beside: called after every step but the last, by every active rank.
    """

    def __init__(
        self,
        trainer: Trainer,
        job: JobConfig,
        plan: Plan,
        dataset: DataSource | None,
        directory: Path,
        metadata: dict[str, Any],
        books: Books,
        asked: Callable[[], bool] = lambda: False,
        steering: Steering | None = None,
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        trainer.asked = asked
        self._beside = beside
        self.record: Callable[[StepMetrics], None] = lambda line: None
        """Is told every step's figures, on every active rank; may call collectively."""
        if steering is not None:
            trainer.along = steering.word
        self.steering = steering
        self.trainer, self.job, self.plan, self.dataset = trainer, job, plan, dataset
        self.world = trainer.world
        self.metadata, self.books, self.state, self.result = metadata, books, books.state, books.result
        self.saver = open_saver(trainer, directory, job)
        self.saver.newest = self.result.last_checkpoint
        self.schedule = LearningRate(job.train)
        self._held_out = self._broadcast_held_out()
        self._align = replicas_differ(trainer)

    def run(self, metrics: MetricsWriter | None, display: ProgressDisplay | None) -> bool:
        """Train until the last step, or until the plan is to be changed, and until the last checkpoint is on disk.

        Args:
            metrics, display: on rank 0 only.

        Returns:
            Was it the last step? The same on all ranks.

        Raises:
            UserError: the loss is not a number, or too many steps in a row had non-finite gradients.
            CollectiveUserError: with ``ExitCode.STOPPED``: the run was asked to end, and has left a checkpoint.
        """
        with self.saver:
            done = self._run(metrics, display)
        if self.world.rank == 0:
            self.result.last_checkpoint = self.saver.newest  # the writing of the last one may have failed
        scale = self.trainer.loss_scale
        self.state.loss_scale = scale.value, scale.good_steps
        return done

    def _run(self, metrics: MetricsWriter | None, display: ProgressDisplay | None) -> bool:
        train, every = self.job.train, self.job.checkpoint.every
        for step in range(self.state.step, train.steps):
            self.world.doing = f"training step {step + 1}"
            begin = time.perf_counter()
            verdict, target_tokens = self._step(step)
            line = self._line(step, verdict, target_tokens, time.perf_counter() - begin)
            self.result.steps.append(line)
            if metrics is not None and display is not None:
                metrics.step(line)
                display.update(line)
            self.record(line)
            self._after(step, verdict)
            last = step + 1 == train.steps
            if len(self._held_out[0]) and (last or _due(step + 1, train.evaluate_every)):
                self._evaluate(metrics)
            if last or verdict.stop or _due(step + 1, every):
                self._save()
            if verdict.stop and not last:
                self._stop()
            if not last:
                self._beside()
            if self.steering is not None and self.steering.due(step, self.trainer.heard) and not last:
                return False
        return True

    def _step(self, step: int) -> tuple[StepDecision, int]:
        """(verdict, target tokens) of one step on the batch that rank 0 reads."""
        arrays = None
        if self.dataset is not None:
            arrays = self._padded(self.dataset.batch(step, self.job.train.global_batch))
        with self.world.waiting("rank 0 and the batch" if self.world.rank else "the others to take the batch"):
            tokens, targets = self.world.broadcast_arrays(arrays)
        target_tokens = self.trainer.chain.counted(targets)
        return self.trainer.step(step, tokens, targets, max(1, target_tokens)), target_tokens

    def _stop(self) -> NoReturn:
        self.saver.finish()
        newest = self.saver.newest if self.world.rank == 0 else self.result.last_checkpoint
        left = f"{newest} is whole" if newest is not None else "no checkpoint could be written"
        raise CollectiveUserError(
            f"Stopped after step {self.state.step}, as a signal asked for: {left}; go on with --resume",
            ExitCode.STOPPED,
        )

    def _line(self, step: int, verdict: StepDecision, target_tokens: int, seconds: float) -> StepMetrics:
        emulation, tokens = self.trainer.emulation, float(target_tokens)
        if emulation is not None:
            seconds, tokens = emulation.step_s(seconds), emulation.tokens(target_tokens)
        return StepMetrics(
            step=step + 1,
            loss=verdict.loss,
            grad_norm=verdict.grad_norm,
            lr=self.schedule.at(step),
            tokens=target_tokens,
            tokens_per_s=tokens / seconds,
            step_s=seconds,
            predicted_step_s=self.plan.predicted_step_s,
            emulated=emulation is not None,
        )

    def _after(self, step: int, verdict: StepDecision) -> None:
        """Keep the books; stop a run that has lost its way, on all ranks by the same verdict."""
        self.state.step = step + 1
        self.state.losses.append(verdict.loss)
        if verdict.finite:
            self.state.updates += 1
            self.books.skips_in_a_row, self.books.good_checkpoint = 0, self.result.last_checkpoint
            return
        self.result.skipped += 1
        self.books.skips_in_a_row = in_a_row = self.books.skips_in_a_row + 1
        if not math.isfinite(verdict.loss):
            self.world.agree(f"step {step + 1}: the loss is {verdict.loss}; {self._remedy()}")
        if in_a_row == _SKIPS_IN_A_ROW:
            self.world.agree(
                f"step {step + 1}: gradients were not finite in {in_a_row} steps in a row, {self._culprit(verdict)}; "
                f"{self._remedy()}"
            )
        scale = self.trainer.loss_scale.value
        then = "" if scale == 1.0 else f", and the loss is scaled by {scale:g} from now on"
        culprit = self._culprit(verdict)
        say(f"step {step + 1}: gradients are not finite; the step is skipped on every rank ({culprit}){then}")

    def _culprit(self, verdict: StepDecision) -> str:
        """Where they were not finite first: backward takes what is not finite on with it."""
        if verdict.culprit is None:
            return "each is, but not the sum of their squares"
        rank = holders(self.plan)[self.trainer.tuning.trainable[verdict.culprit].item][0]
        numbers = self.world.numbers or range(self.world.size)
        return f"first in {verdict.culprit} on rank {rank} ({self.world.hosts[list(numbers).index(rank)]})"

    def _remedy(self) -> str:
        """What to do about a run that has lost its way. Collective: only rank 0 sees whether a checkpoint is still there."""
        self.saver.finish()
        good = self.books.good_checkpoint
        checkpoint = self.world.broadcast_json(str(good) if good is not None and good.exists() else None)
        if checkpoint is None:
            return "there is no good checkpoint: lower [train] learning_rate, add warmup_steps, or look at the data"
        return (
            f"the last good checkpoint is {checkpoint}: lower [train] learning_rate or look at the data, "
            f"then --resume {checkpoint}"
        )

    def _evaluate(self, metrics: MetricsWriter | None) -> None:
        self.world.doing = "evaluating"
        tokens, targets = self._held_out
        loss = self.trainer.evaluate(tokens, targets) / max(1, self.trainer.chain.counted(targets))
        self.result.evaluations.append(Evaluation(self.state.step, loss))
        if metrics is not None:
            metrics.evaluation(self.state.step, loss)
        say(f"step {self.state.step}: held-out loss {loss:.4f}")

    def _save(self) -> None:
        self.world.doing = "taking a snapshot for a checkpoint"
        if self._align:
            align_replicas(self.trainer, self.state.updates)
        last = self.result.evaluations[-1] if self.result.evaluations else None
        held_out_loss = last.loss if last is not None and last.step == self.state.step else None
        self.result.last_checkpoint = self.saver.save(described(self.trainer, self.state, self.metadata, held_out_loss))

    def _padded(self, batch: Batch) -> list[Tokens]:
        """Tokens and targets as they travel, padded as the job says."""
        batch = batch.trimmed() if self.job.data.pad == "longest" else batch
        return [batch.tokens, batch.targets]

    def _broadcast_held_out(self) -> tuple[Tokens, Tokens]:
        """(tokens, targets) of the held-out sequences that are evaluated, N rows each; N may be 0."""
        arrays = None
        if self.dataset is not None:
            limit = self.job.train.evaluate_sequences
            batch = next(self.dataset.held_out_batches(limit, limit), None)
            empty = np.empty((0, self.plan.sequence_length), np.int32)
            arrays = self._padded(batch) if batch is not None else [empty, empty]
        tokens, targets = self.world.broadcast_arrays(arrays)
        return tokens, targets


def _due(steps: int, every: int) -> bool:
    """Is something due after ``steps`` steps that happens every ``every`` of them (0: never)?"""
    return every > 0 and steps % every == 0
