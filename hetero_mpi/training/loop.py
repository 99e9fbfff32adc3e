"""The loop over steps: batches from rank 0, one verdict per step, evaluation, checkpoints and what a person is told."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hetero_mpi.comm.world import CollectiveUserError
from hetero_mpi.data.sequences import IGNORED, Batch, Dataset
from hetero_mpi.errors import ExitCode
from hetero_mpi.job import Job
from hetero_mpi.model.optimizer import LearningRate, Verdict
from hetero_mpi.planning.plan import Plan
from hetero_mpi.report.logs import say
from hetero_mpi.report.metrics import Evaluation, MetricsWriter, StepMetrics
from hetero_mpi.report.progress import Progress
from hetero_mpi.training.places import holders
from hetero_mpi.training.saving import RunState, align_replicas, described, open_saver, replicas_differ
from hetero_mpi.training.trainer import Trainer

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


class Loop:
    """Runs the steps of a job. Everything here is collective over the active ranks.

    Args:
        trainer: this rank's share.
        job, plan: what to do and how.
        dataset: on rank 0, else None.
        directory: where checkpoints go.
        metadata: what every checkpoint carries besides tensors; used on rank 0.
        state: where the run stands (resumed runs start later).
        resumed_from: the checkpoint the run started from.
        asked: has this rank been asked to end the run (``training.signals``)?
    """

    def __init__(
        self,
        trainer: Trainer,
        job: Job,
        plan: Plan,
        dataset: Dataset | None,
        directory: Path,
        metadata: dict[str, Any],
        state: RunState,
        resumed_from: Path | None = None,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        trainer.asked = asked
        self.trainer, self.job, self.plan, self.dataset = trainer, job, plan, dataset
        self.world = trainer.world
        self.metadata, self.state = metadata, state
        self.saver = open_saver(trainer, directory, job)
        self.saver.newest = resumed_from
        self.schedule = LearningRate(job.train)
        self.result = LoopResult(last_checkpoint=resumed_from)
        self._good_checkpoint: Path | None = None
        """The newest checkpoint whose weights have since given a finite step."""
        self._held_out = self._broadcast_held_out()
        self._align = replicas_differ(trainer)

    def run(self, metrics: MetricsWriter | None, display: Progress | None) -> LoopResult:
        """Train until the last step, and until the last checkpoint is on disk; ``metrics`` and ``display`` on rank 0 only.

        Raises:
            UserError: the loss is not a number, or too many steps in a row had non-finite gradients.
            CollectiveUserError: with ``ExitCode.STOPPED``: the run was asked to end, and has left a checkpoint.
        """
        with self.saver:
            self._run(metrics, display)
        if self.world.rank == 0:
            self.result.last_checkpoint = self.saver.newest  # the writing of the last one may have failed
        return self.result

    def _run(self, metrics: MetricsWriter | None, display: Progress | None) -> None:
        train, every = self.job.train, self.job.checkpoint.every
        in_a_row = 0
        for step in range(self.state.step, train.steps):
            self.world.doing = f"training step {step + 1}"
            begin = time.perf_counter()
            verdict, target_tokens = self._step(step)
            line = self._line(step, verdict, target_tokens, time.perf_counter() - begin)
            self.result.steps.append(line)
            if metrics is not None and display is not None:
                metrics.step(line)
                display.update(step + 1, verdict.loss, line.tokens_per_s)
            in_a_row = 0 if verdict.finite else in_a_row + 1
            self._after(step, verdict, in_a_row)
            last = step + 1 == train.steps
            if len(self._held_out[0]) and (last or _due(step + 1, train.evaluate_every)):
                self._evaluate(metrics)
            if last or verdict.stop or _due(step + 1, every):
                self._save()
            if verdict.stop and not last:
                self._stop()

    def _step(self, step: int) -> tuple[Verdict, int]:
        """(verdict, target tokens) of one step on the batch that rank 0 reads."""
        arrays = None
        if self.dataset is not None:
            arrays = self._padded(self.dataset.batch(step, self.job.train.global_batch))
        with self.world.waiting("rank 0 and the batch" if self.world.rank else "the others to take the batch"):
            tokens, targets = self.world.broadcast_array(arrays)
        target_tokens = int(np.count_nonzero(targets != IGNORED))
        return self.trainer.step(step, tokens, targets, max(1, target_tokens)), target_tokens

    def _stop(self) -> NoReturn:
        self.saver.finish()
        newest = self.saver.newest if self.world.rank == 0 else self.result.last_checkpoint
        left = f"{newest} is whole" if newest is not None else "no checkpoint could be written"
        raise CollectiveUserError(
            f"Stopped after step {self.state.step}, as a signal asked for: {left}; go on with --resume",
            ExitCode.STOPPED,
        )

    def _line(self, step: int, verdict: Verdict, target_tokens: int, seconds: float) -> StepMetrics:
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

    def _after(self, step: int, verdict: Verdict, in_a_row: int) -> None:
        """Keep the books; stop a run that has lost its way, on all ranks by the same verdict."""
        self.state.step = step + 1
        self.state.losses.append(verdict.loss)
        if verdict.finite:
            self.state.updates += 1
            self._good_checkpoint = self.result.last_checkpoint
            return
        self.result.skipped += 1
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

    def _culprit(self, verdict: Verdict) -> str:
        """Where they were not finite first: backward takes what is not finite on with it."""
        if verdict.culprit is None:
            return "each is, but not the sum of their squares"
        rank = holders(self.plan)[self.trainer.tuning.trainable[verdict.culprit].item][0]
        numbers = self.world.numbers or range(self.world.size)
        return f"first in {verdict.culprit} on rank {rank} ({self.world.hosts[list(numbers).index(rank)]})"

    def _remedy(self) -> str:
        """What to do about a run that has lost its way. Collective: only rank 0 sees whether a checkpoint is still there."""
        self.saver.finish()
        good = self._good_checkpoint
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
        loss = self.trainer.evaluate(tokens, targets) / max(1, int(np.count_nonzero(targets != IGNORED)))
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

    def _padded(self, batch: Batch) -> np.ndarray:
        """Tokens and targets as they travel, int32 (2, B, T), padded as the job says."""
        batch = batch.trimmed() if self.job.data.pad == "longest" else batch
        return np.stack([batch.tokens, batch.targets])

    def _broadcast_held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets) of the held-out sequences that are evaluated, int32 (N, T) each; N may be 0."""
        arrays = None
        if self.dataset is not None:
            limit = self.job.train.evaluate_sequences
            batch = next(self.dataset.held_out_batches(limit, limit), None)
            empty = np.empty((2, 0, self.plan.sequence_length), np.int32)
            arrays = self._padded(batch) if batch is not None else empty
        tokens, targets = self.world.broadcast_array(arrays)
        return tokens, targets


def _due(steps: int, every: int) -> bool:
    """Is something due after ``steps`` steps that happens every ``every`` of them (0: never)?"""
    return every > 0 and steps % every == 0
