"""The loop over steps: batches from rank 0, one verdict per step, evaluation, checkpoints and what a person is told."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hetero_mpi.data.sequences import IGNORED, Dataset
from hetero_mpi.job import Job
from hetero_mpi.model.optimizer import LearningRate, Verdict
from hetero_mpi.planning.plan import Plan
from hetero_mpi.report.logs import say
from hetero_mpi.report.metrics import Evaluation, MetricsWriter, StepMetrics
from hetero_mpi.report.progress import Progress
from hetero_mpi.training.saving import RunState, save_checkpoint
from hetero_mpi.training.trainer import Trainer

_LOG = logging.getLogger(__name__)
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
    ) -> None:
        self.trainer, self.job, self.plan, self.dataset = trainer, job, plan, dataset
        self.world = trainer.world
        self.directory, self.metadata, self.state = directory, metadata, state
        self.schedule = LearningRate(job.train)
        self.result = LoopResult(last_checkpoint=resumed_from)
        self._good_checkpoint: Path | None = None
        """The newest checkpoint whose weights have since given a finite step."""
        self._held_out = self._broadcast_held_out()

    def run(self, metrics: MetricsWriter | None, display: Progress | None) -> LoopResult:
        """Train until the last step; ``metrics`` and ``display`` on rank 0 only.

        Raises:
            UserError: the loss is not a number, or too many steps in a row had non-finite gradients.
        """
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
            if self._held_out and (last or _due(step + 1, train.evaluate_every)):
                self._evaluate(metrics)
            if last or _due(step + 1, every):
                self._save()
        return self.result

    def _step(self, step: int) -> tuple[Verdict, int]:
        """(verdict, target tokens) of one step on the batch that rank 0 reads."""
        arrays = None
        if self.dataset is not None:
            batch = self.dataset.batch(step, self.job.train.global_batch)
            arrays = np.stack([batch.tokens, batch.targets])
        tokens, targets = self.world.broadcast_array(arrays)
        target_tokens = int(np.count_nonzero(targets != IGNORED))
        return self.trainer.step(step, tokens, targets, max(1, target_tokens)), target_tokens

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
                f"step {step + 1}: gradients were not finite in {in_a_row} steps in a row; {self._remedy()}"
            )
        scale = self.trainer.loss_scale.value
        then = "" if scale == 1.0 else f", and the loss is scaled by {scale:g} from now on"
        say(f"step {step + 1}: gradients are not finite; the step is skipped on every rank{then}")

    def _remedy(self) -> str:
        """What to do about a run that has lost its way. Collective: only rank 0 sees whether a checkpoint is still there."""
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
        total = self.trainer.evaluate(self._held_out)
        targets = sum(int(np.count_nonzero(batch[1] != IGNORED)) for batch in self._held_out)
        loss = total / max(1, targets)
        self.result.evaluations.append(Evaluation(self.state.step, loss))
        if metrics is not None:
            metrics.evaluation(self.state.step, loss)
        say(f"step {self.state.step}: held-out loss {loss:.4f}")

    def _save(self) -> None:
        self.world.doing = "writing a checkpoint"
        self.result.last_checkpoint = save_checkpoint(
            self.trainer, self.state, self.directory, self.metadata, self.job.checkpoint.keep
        )
        _LOG.info("step %d: checkpoint %s", self.state.step, self.result.last_checkpoint)

    def _broadcast_held_out(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Held-out batches of exactly one micro-batch each; the last is filled up with rows that count for nothing."""
        arrays = None
        if self.dataset is not None:
            rows = self.plan.pipelines[0].micro_batch
            batches = []
            for batch in self.dataset.held_out_batches(rows, self.job.train.evaluate_sequences):
                missing = rows - len(batch.tokens)
                tokens = np.pad(batch.tokens, ((0, missing), (0, 0)), mode="edge")
                targets = np.pad(batch.targets, ((0, missing), (0, 0)), constant_values=IGNORED)
                batches.append(np.stack([tokens, targets]))
            shape = (0, 2, rows, self.plan.sequence_length)
            arrays = np.stack(batches) if batches else np.empty(shape, np.int32)
        return [(pair[0], pair[1]) for pair in self.world.broadcast_array(arrays)]


def _due(steps: int, every: int) -> bool:
    """Is something due after ``steps`` steps that happens every ``every`` of them (0: never)?"""
    return every > 0 and steps % every == 0
