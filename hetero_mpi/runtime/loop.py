"""The loop over steps under one plan: batches from rank 0, one decision per step, evaluation, checkpoints, and progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.world import CollectiveUserError
from hetero_mpi.data.batch import Batch, pair_counts
from hetero_mpi.engine.recording import Recorder
from hetero_mpi.engine.trainer import StepResult
from hetero_mpi.errors import ExitCode
from hetero_mpi.model.optimizer import StepDecision, learning_rate
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.toml_files import plan_to_dict
from hetero_mpi.report.progress import ProgressDisplay
from hetero_mpi.report.run_files.line_files import unharmed
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.metrics import MetricsWriter, StepMetrics
from hetero_mpi.report.run_files.run_directory import note_end
from hetero_mpi.runtime.setup.context import RunContext, Share
from hetero_mpi.state.saving import Saver, Snapshots
from hetero_mpi.state.training_state import TrainingState

_SKIPS_IN_A_ROW = 10
"""Number of consecutive steps with non-finite gradients after which the run ends."""


class PlanChanges(Protocol):
    """Says when the plan is to be changed (``runtime.rebalance``)."""

    def begin(self, share: Share) -> None:
        """Prepare for the steps of a plan. Collective over the active ranks."""

    def end(self) -> None:
        """Forget the plan's trainer. No step follows under this plan."""

    def word(self) -> NDArray[np.float64]:
        """Numbers that travel with the step decision."""

    def due(self, step: int, result: StepResult) -> bool:
        """After step number ``step``, when ``result.heard`` is the sum of all ranks' words: is the plan to be changed now? The same
        answer on all ranks."""

    def chosen(self) -> PlanReport | None:
        """The plan to change to, on rank 0."""

    def changed(self, step: int, old: Plan, new: Plan, stall_s: float) -> None:
        """Report on rank 0 that layers have moved, and that training stood still for ``stall_s`` (wall clock)."""


@dataclass(frozen=True)
class Training:
    """The parts of a run that its steps share, over all its plans."""

    context: RunContext
    metadata: dict[str, Any]
    """Metadata of every checkpoint but its plan; used on rank 0."""
    asked: Callable[[], bool]
    """Has this rank been asked to end the run (``runtime.signals``)? On rank 0 also: has an idle rank?"""
    rebalancer: PlanChanges | None
    """None: the plan never changes."""
    metrics: MetricsWriter | None
    """On rank 0, as ``display``."""
    display: ProgressDisplay | None

    def described(self, share: Share) -> dict[str, Any]:
        """Metadata of every checkpoint under one plan."""
        return {**self.metadata, "plan": plan_to_dict(share.plan)}


class Loop:
    """Runs the steps of a job under one plan. All methods are collective over the active ranks.

    Args:
        state: the training state (resumed runs start later); it is updated.
        beside: called after every step but the last, by every active rank.
        snapshots: of the trainer.
    """

    def __init__(
        self,
        training: Training,
        share: Share,
        state: TrainingState,
        beside: Callable[[], None],
        snapshots: Snapshots,
    ) -> None:
        assert share.trainer is not None and share.members is not None
        context = training.context
        self.job, self.plan, self.dataset = context.job, share.own_plan, context.dataset
        self.predicted_step_s = share.report.expected_step_s
        self.trainer, self.world, self.state = share.trainer, share.members, state
        self.metadata = training.described(share)
        self._asked, self._rebalancer, self._beside = training.asked, training.rebalancer, beside
        self._metrics, self._display = training.metrics, training.display
        self._run_dir = context.run_dir
        threaded = self.job.cluster.communication_thread
        directory, newest = context.run_dir / "checkpoints", state.newest_checkpoint
        self.saver = Saver(self.world, snapshots, directory, self.job.checkpoint, threaded, newest)
        self._held_out = self._broadcast_held_out()
        self._emulation = share.emulation
        steps, scale = (state.step, self.job.train.steps), share.emulation.time_scale if share.emulation else 1.0
        self._recorder = Recorder(self.trainer, context.transport, context.run_dir, steps, scale)

    def run(self) -> bool:
        """Train until the last step (returns True), or until the plan is to be changed; the same on all ranks. The last checkpoint
        is on disk then.

        Raises:
            UserError: the loss is not a number, or too many steps in a row had non-finite gradients.
            CollectiveUserError: with ``ExitCode.STOPPED``: the run was asked to end, and has written a checkpoint.
        """
        with self.saver:
            done = self._run()
            self.trainer.settle()
        if done and self._over():
            waited, lowest = self.state.higher_in_a_row, self.state.lowest_loss
            say(
                f"step {self.state.step}: training ends, as {waited} evaluations in a row were not below {lowest:.4f}; "
                f"`python -m hetero_mpi export {self._run_dir} OUT --best` writes the model of then"
            )
        if self.world.rank == 0:
            if done:
                with unharmed("run.json"):
                    note_end(self._run_dir, self.state.step)
            self.state.set_newest_checkpoint(self.saver.newest)  # the writing of the last one may have failed
        return done

    def _run(self) -> bool:
        train, every = self.job.train, self.job.checkpoint.every
        for step in range(self.state.step, train.steps):
            if self._over():
                break
            self.world.doing = f"training step {step + 1}"
            begin = time.perf_counter()
            result, target_tokens = self._step(step)
            decision = result.decision
            line = self._line(step, decision, target_tokens, time.perf_counter() - begin)
            if self._metrics is not None and self._display is not None:
                self._metrics.step(line)
                self._display.update(line)
            self._recorder(line, result)
            self.state.add_step(line, decision.finite)
            if not decision.finite:
                self._skipped(step, decision)
            last = step + 1 == train.steps
            best = False
            if len(self._held_out.tokens) and (last or _due(step + 1, train.evaluate_every)):
                self._evaluate()
                best = self.state.higher_in_a_row == 0 and train.patience > 0
                last = last or self._over()
            if last or decision.stop or best or _due(step + 1, every):
                self._save()
            if decision.stop and not last:
                self._stop()
            if not last:
                self._beside()
            if self._rebalancer is not None and self._rebalancer.due(step, result) and not last:
                return False
        return True

    def _over(self) -> bool:
        """Has the held-out loss not become lower for as long as the job has patience? The same on all ranks."""
        return 0 < self.job.train.patience <= self.state.higher_in_a_row

    def _step(self, step: int) -> tuple[StepResult, int]:
        """(result, target tokens) of one step on the batch that rank 0 reads."""
        own = self.dataset.batch(step, self.job.train.global_batch) if self.dataset is not None else None
        with self.world.waiting("rank 0 and the batch" if self.world.rank else "the others to take the batch"):
            batch = self._broadcast(own)
        along = self._rebalancer.word() if self._rebalancer is not None else np.zeros(0)
        return self.trainer.step(step, batch, self._asked, along), batch.target_tokens

    def _stop(self) -> NoReturn:
        self.saver.finish()
        newest = self.saver.newest if self.world.rank == 0 else self.state.newest_checkpoint
        left = f"{newest} is whole" if newest is not None else "no checkpoint could be written"
        raise CollectiveUserError(
            f"Stopped after step {self.state.step}, as a signal asked for: {left}; go on with --resume",
            ExitCode.STOPPED,
        )

    def _line(self, step: int, decision: StepDecision, target_tokens: int, seconds: float) -> StepMetrics:
        emulation, tokens = self._emulation, float(target_tokens)
        if emulation is not None:
            seconds, tokens = emulation.step_s(seconds), emulation.tokens(target_tokens)
        return StepMetrics(
            step=step + 1,
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            lr=learning_rate(self.job.train, step),
            tokens=target_tokens,
            tokens_per_s=tokens / seconds,
            step_s=seconds,
            predicted_step_s=self.predicted_step_s,
            emulated=emulation is not None,
            router_loss=decision.router_loss,
        )

    def _skipped(self, step: int, decision: StepDecision) -> None:
        """Report a step without an update. Too many in a row end the run, on all ranks by the same decision."""
        in_a_row = self.state.skips_in_a_row
        if not math.isfinite(decision.loss):
            self.world.agree(f"step {step + 1}: the loss is {decision.loss}; {self._remedy()}")
        if in_a_row == _SKIPS_IN_A_ROW:
            self.world.agree(
                f"step {step + 1}: gradients were not finite in {in_a_row} steps in a row, {self._where_first(decision)}; "
                f"{self._remedy()}"
            )
        scale = self.trainer.loss_scale.value
        then = "" if scale == 1.0 else f", and the loss is scaled by {scale:g} from now on"
        where_first = self._where_first(decision)
        say(f"step {step + 1}: gradients are not finite; the step is skipped on every rank ({where_first}){then}")

    def _where_first(self, decision: StepDecision) -> str:
        """Where gradients were not finite first, in words; in backward all earlier layers follow."""
        if decision.first_non_finite is None:
            return "each is, but not the sum of their squares"
        rank = self.trainer.owner[decision.first_non_finite]
        numbers = self.world.numbers or range(self.world.size)
        return f"first in {decision.first_non_finite} on rank {rank} ({self.world.hosts[list(numbers).index(rank)]})"

    def _remedy(self) -> str:
        """The remedy when the loss has diverged. Collective, as only rank 0 sees whether a checkpoint is still there."""
        self.saver.finish()
        good = self.state.good_checkpoint
        checkpoint = self.world.broadcast_json(str(good) if good is not None and good.exists() else None)
        if checkpoint is None:
            return "there is no good checkpoint: lower [train] learning_rate, add warmup_steps, or look at the data"
        return (
            f"the last good checkpoint is {checkpoint}: lower [train] learning_rate or look at the data, "
            f"then --resume {checkpoint}"
        )

    def _evaluate(self) -> None:
        self.world.doing = "evaluating"
        loss, preferred = self._held_out_loss()
        self.state.add_evaluation(loss)
        if self._metrics is not None:
            self._metrics.evaluation(self.state.step, loss)
        say(f"step {self.state.step}: held-out loss {loss:.4f}{preferred}")

    def _held_out_loss(self) -> tuple[float, str]:
        """The held-out loss; and of DPO how many pairs the model now tells better than the reference does, in words."""
        pairs, train = self._held_out.pairs, self.job.train
        if pairs is None or train.preference != "dpo":
            return self.trainer.evaluate(self._held_out) / self._held_out.divisor, ""
        there = np.arange(pairs.reference.shape[1]) < pair_counts(pairs.answers)[:, None]
        gained = (self.trainer.margins(self._held_out) - pairs.reference)[there]
        loss = float(np.logaddexp(0.0, -train.preference_beta * gained).mean())
        better = np.count_nonzero(gained > 0)
        return loss, f"; of {len(gained)} pairs {better} lean more to the chosen answer than at the beginning"

    def _save(self) -> None:
        self.world.doing = "taking a snapshot for a checkpoint"
        last = self.state.evaluations[-1] if self.state.evaluations else None
        held_out_loss = last.loss if last is not None and last.step == self.state.step else None
        metadata = {**self.metadata, **self.state.checkpoint_metadata()}
        if held_out_loss is not None:
            metadata["held_out_loss"] = held_out_loss
        self.state.set_newest_checkpoint(self.saver.save(metadata))

    def _broadcast(self, own: Batch | None) -> Batch:
        """Rank 0's batch, padded as the job says; other ranks have none."""
        if own is not None and own.pairs is not None and self.state.reference is not None:
            assert own.numbers is not None
            own = replace(own, pairs=replace(own.pairs, reference=self.state.reference[own.numbers]))
        return self.trainer.shared_batch(own, self.job.data.pad == "longest")

    def _broadcast_held_out(self) -> Batch:
        """The held-out sequences that are evaluated; there may be none."""
        own = None
        if self.dataset is not None:
            limit = self.job.train.evaluate_sequences
            empty = np.empty((0, self.plan.sequence_length), np.int32)
            own = next(self.dataset.held_out_batches(limit, limit), Batch(empty, empty, 0))
        return self._broadcast(own)


def _due(steps: int, every: int) -> bool:
    """Whether something is due after ``steps`` steps that happens every ``every`` steps (0: never)."""
    return every > 0 and steps % every == 0
