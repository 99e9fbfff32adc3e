"""The training loop under one plan: reads batches on rank 0, takes steps, evaluates, saves checkpoints and reports progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hetero_mpi.comm.ranks.world import CollectiveUserError
from hetero_mpi.data.batch import Batch, answer_counts
from hetero_mpi.data.dataset import Dataset
from hetero_mpi.engine.recording import Recorder
from hetero_mpi.engine.trainer import StepResult, Trainer
from hetero_mpi.model.optimizer import StepDecision, learning_rate
from hetero_mpi.objectives import learns_from
from hetero_mpi.planning.types.toml_files import plan_to_dict
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.metrics import MetricsWriter, StepMetrics
from hetero_mpi.rundir.run_directory import note_step
from hetero_mpi.state.saving import Saver, Snapshots
from hetero_mpi.state.state import State
from hetero_mpi.training.follower import Event, Follower, Reply
from hetero_mpi.training.setup.context import RunContext, Share
from hetero_mpi.util import units
from hetero_mpi.util.background import warn_on_failure
from hetero_mpi.util.errors import ExitCode, UserError

if TYPE_CHECKING:
    from hetero_mpi.report.progress import ProgressDisplay
    from hetero_mpi.training.rebalance import Rebalancer

_MAX_CONSECUTIVE_SKIPS = 10
"""Number of consecutive steps with non-finite gradients after which the run fails."""


class NextAction(Enum):
    """Action to take after a step."""

    NEXT_STEP = auto()
    CHANGE_PLAN = auto()
    DONE = auto()


@dataclass(frozen=True)
class Training:
    """The parts of a run that are shared by the steps of all its plans."""

    context: RunContext
    metadata: dict[str, Any]
    """Metadata of every checkpoint except the plan; used on rank 0."""
    stop_requested: Callable[[], bool]
    """Whether this rank (or, on rank 0, an idle rank) has been asked to end the run (``training.signals``)."""
    rebalancer: Rebalancer | None
    """None if the plan never changes."""
    follower: Follower | None
    """None if no program follows the run."""
    sample: Callable[[Trainer], None]
    """Writes a sample. Collective over the active ranks."""
    metrics: MetricsWriter | None
    """None on ranks other than 0, like ``display``."""
    display: ProgressDisplay | None

    def described(self, share: Share) -> dict[str, Any]:
        """Return the metadata of every checkpoint under one plan."""
        return {**self.metadata, "plan": plan_to_dict(share.plan)}


class Loop:
    """Runs the steps of a job under one plan. All methods are collective over the active ranks.

    Args:
        state: the training state, which the loop updates; in resumed runs, its step is above 0.
        after_step: called by every active rank after every step except the last.
        snapshots: snapshots of this rank's trainer.
    """

    def __init__(
        self, training: Training, share: Share, state: State, after_step: Callable[[], None], snapshots: Snapshots
    ) -> None:
        assert share.trainer is not None and share.members is not None
        context = training.context
        self.job, self.plan, self.dataset = context.job, share.own_plan, context.dataset
        self.predicted_step_s = share.report.expected_step_s
        self.trainer, self.world, self.state = share.trainer, share.members, state
        self.metadata = training.described(share)
        self._stop_requested, self._after_step = training.stop_requested, after_step
        self._metrics, self._display, self._rebalancer = training.metrics, training.display, training.rebalancer
        self._follower, self._sample, self._report = training.follower, training.sample, share.report
        active = self.world.numbers or range(self.world.size)
        self._idle, self._reply = [rank for rank in range(context.world.size) if rank not in active], Reply.GO_ON
        self._reported_checkpoint = state.newest_checkpoint
        self._run_dir, self._steps_per_epoch = context.run_dir, context.steps_per_epoch
        threaded = self.job.cluster.communication_thread
        directory, newest = context.run_dir / "checkpoints", state.newest_checkpoint
        self.saver = Saver(self.world, snapshots, directory, self.job.checkpoint, threaded, newest)
        evaluation_batch = self._read_evaluation_batch()
        self._evaluation_batch = self._broadcast(evaluation_batch)
        self._mismatched_evaluation_batch = self._broadcast_mismatched(evaluation_batch)
        extra_sets = context.material.further if context.material is not None else {}
        self._extra_sets = {name: self._broadcast(extra_sets.get(name)) for name in self.job.data.evaluation_sets or ()}
        self._emulation = share.emulation
        steps, scale = (state.step, self.job.train.steps), share.emulation.time_scale if share.emulation else 1.0
        self._recorder = Recorder(self.trainer, context.transport, context.run_dir, steps, scale)

    def run(self) -> bool:
        """Train until the end (returns True) or a change of plan (False), after the last checkpoint is on disk.

        Raises:
            UserError: The loss is not finite, or too many consecutive steps had non-finite gradients.
            CollectiveUserError: The run was asked to end and has written a checkpoint (``ExitCode.STOPPED``).
        """
        train, action = self.job.train, NextAction.DONE
        with self.saver:
            self._tell(self._report)
            for step in range(self.state.step, train.steps):
                if self._stops_early():
                    break
                self.world.current_action = f"training step {step + 1}"
                begin = time.perf_counter()
                batch = self._batch(step)
                rebalancing = self._rebalancer.word() if self._rebalancer is not None else np.zeros(0)
                result = self.trainer.step(step, batch, self._stop_requested, rebalancing)
                line = self._step_metrics(step, result.decision, batch, time.perf_counter() - begin)
                action = self._finish_step(result, line, step + 1 == train.steps)
                if action is not NextAction.NEXT_STEP:
                    break
            self.trainer.settle()
        self._tell()
        return self._report_end(action is not NextAction.CHANGE_PLAN)

    def _finish_step(self, result: StepResult, line: StepMetrics, is_last: bool) -> NextAction:
        """Record a step, then evaluate, save and report as due. Returns the next action, which is the same on all ranks."""
        train, decision = self.job.train, result.decision
        self._record(result, line)
        evaluated, is_best = len(self.state.evaluations), False
        if len(self._evaluation_batch.tokens) and (is_last or _due(line.step, train.evaluate_every)):
            self._evaluate()
            is_best = self.state.higher_in_a_row == 0 and train.early_stopping_patience > 0
            is_last = is_last or self._stops_early()
        saves = is_last or decision.stop or is_best or _due(line.step, self.job.checkpoint.every)
        if saves:
            self._save()
        self._tell(*self.state.evaluations[evaluated:], line)
        if is_last:
            return NextAction.DONE
        if self._reply == Reply.SAMPLE:
            self._reply = Reply.GO_ON
            self._sample(self.trainer)
        ends = self._reply >= Reply.END
        if ends and not saves:
            self._save()
        if decision.stop or self._reply == Reply.LEAVE:
            self._stop("the program left its loop" if self._reply == Reply.LEAVE else "requested by a signal")
        if ends:
            say(f"step {line.step}: stopped by the program")
            return NextAction.DONE
        self._after_step()
        due = self._rebalancer is not None and self._rebalancer.due(line.step - 1, result)
        return NextAction.CHANGE_PLAN if due else NextAction.NEXT_STEP

    def _record(self, result: StepResult, line: StepMetrics) -> None:
        if self._metrics is not None and self._display is not None:
            self._metrics.step(line)
            self._display.update(line)
        self._recorder(line, result)
        self.state.add_step(line, result.decision.finite)
        if not result.decision.finite:
            self._report_skip(line.step - 1, result.decision)

    def _report_end(self, done: bool) -> bool:
        """Record the end of the steps under this plan, or the end of training if ``done``. Returns ``done``."""
        if done and self._stops_early():
            waited, lowest = self.state.higher_in_a_row, self.state.lowest_loss
            say(
                f"step {self.state.step}: early stopping: the evaluation loss has not improved for "
                f"{units.plural(waited, 'evaluation')} (best: {lowest:.4f}); "
                f"`python -m hetero_mpi export {self._run_dir} OUT --best` writes the best model"
            )
        if self.world.rank == 0:
            if done:
                with warn_on_failure("writing run.json"):
                    note_step(self._run_dir, "last_step", self.state.step)
            self.state.set_newest_checkpoint(self.saver.newest)  # the writing of the last one may have failed
        return done

    def _stops_early(self) -> bool:
        """Whether early stopping applies ([train] early_stopping_patience); the same on all ranks."""
        return 0 < self.job.train.early_stopping_patience <= self.state.higher_in_a_row

    def _batch(self, step: int) -> Batch:
        """Return the batch of a step, which rank 0 reads and broadcasts."""
        train, batch = self.job.train, None
        if self.dataset is not None:
            batch = self.dataset.batch(step, train.global_batch, train.last_batch == "smaller")
        with self.world.waiting("the batch from rank 0" if self.world.rank else "other ranks to receive the batch"):
            shared, mismatched = self._broadcast(batch), self._broadcast_mismatched(batch)
        return self._with_reference_point(shared, mismatched)

    def _tell(self, *events: Event) -> None:
        """Report events and a newly completed checkpoint to the program that follows the run; stores its reply."""
        if self._follower is None:
            return
        newest: list[Event] = []
        if self.world.rank == 0 and self.saver.newest not in (None, self._reported_checkpoint):
            self._reported_checkpoint = self.saver.newest
            newest = [self.saver.newest]
        reply = self._follower.report([*newest, *events], self.world, self._idle)
        self._reply = max(reply, self._reply)

    def _stop(self, reason: str) -> NoReturn:
        self.saver.finish()
        newest = self.saver.newest if self.world.rank == 0 else self.state.newest_checkpoint
        checkpoint_text = f"{newest} is complete" if newest is not None else "no checkpoint could be written"
        raise CollectiveUserError(
            "run.stopped",
            f"Stopped after step {self.state.step} ({reason}): {checkpoint_text}; to continue, add --resume to the same command "
            '(in Python: resume="latest")',
            exit_code=ExitCode.STOPPED,
        )

    def _step_metrics(self, step: int, decision: StepDecision, batch: Batch, seconds: float) -> StepMetrics:
        emulation, count = self._emulation, batch.tokens.size if self.plan.sequence_length > 1 else len(batch.tokens)
        tokens = float(count)
        if emulation is not None:
            seconds, tokens = emulation.step_s(seconds), emulation.tokens(count)
        return StepMetrics(
            step=step + 1,
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            lr=learning_rate(self.job.train, step),
            tokens=batch.target_tokens,
            tokens_per_s=tokens / seconds,
            step_s=seconds,
            predicted_step_s=self.predicted_step_s,
            emulated=emulation is not None,
            router_loss=decision.router_loss,
            epoch=(step + 1) / self._steps_per_epoch,
            **_rewards(batch, decision.rewards),
        )

    def _report_skip(self, step: int, decision: StepDecision) -> None:
        """Report a skipped step; raises an error on all ranks if the loss is not finite or too many steps were skipped."""
        in_a_row = self.state.skips_in_a_row
        if not math.isfinite(decision.loss):
            text = f"step {step + 1}: the loss is {decision.loss}; {self._remedy()}"
            self.world.agree(UserError("loss.not_finite", text, step=step + 1))
        if in_a_row == _MAX_CONSECUTIVE_SKIPS:
            text = f"step {step + 1}: gradients were not finite in {in_a_row} steps in a row, {self._origin_text(decision)}"
            self.world.agree(UserError("gradients.not_finite", f"{text}; {self._remedy()}", step=step + 1))
        scale = self.trainer.loss_scale.value
        scale_text = "" if scale == 1.0 else f", and the loss is scaled by {scale:g} from now on"
        where_first = self._origin_text(decision)
        say(f"step {step + 1}: gradients are not finite; skipping the step on every rank ({where_first}){scale_text}")

    def _origin_text(self, decision: StepDecision) -> str:
        """Describe where gradients were first non-finite in backward order."""
        if decision.first_non_finite is None:
            return "each gradient is finite, but not the sum of their squares"
        rank = self.trainer.owner[decision.first_non_finite]
        numbers = self.world.numbers or range(self.world.size)
        return f"first in {decision.first_non_finite} on rank {rank} ({self.world.hosts[list(numbers).index(rank)]})"

    def _remedy(self) -> str:
        """Describe the remedy for a diverged loss. Collective, because only rank 0 can see the checkpoints."""
        self.saver.finish()
        good = self.state.good_checkpoint
        checkpoint = self.world.broadcast_json(str(good) if good is not None and good.exists() else None)
        if checkpoint is None:
            return "there is no good checkpoint for --resume: lower [train] learning_rate, add warmup_steps, or check the data"
        return (
            f"the last good checkpoint is {checkpoint}: lower [train] learning_rate or check the data, "
            f"then use --resume {checkpoint}"
        )

    def _evaluate(self) -> None:
        self.world.current_action = "evaluating"
        batch = self._with_reference_point(self._evaluation_batch, self._mismatched_evaluation_batch)
        summed, *sums = self.trainer.evaluate(batch)
        loss, chain = summed / batch.divisor, self.trainer.chain
        metrics: dict[str, Any] = dict(_rewards(batch, sums))
        if batch.compared is None and chain.logits is not None:
            metrics = {"perplexity": math.exp(min(loss, 100.0))} if chain.routers is None else {}
            metrics |= {"token_accuracy": sums[0] / max(1, batch.target_tokens)}
        if self._extra_sets:
            metrics["sets"] = {
                name: self.trainer.evaluate(further)[0] / further.divisor for name, further in self._extra_sets.items()
            }
        self.state.add_evaluation(loss, **metrics)
        if self._metrics is not None:
            self._metrics.evaluation(self.state.step, loss, **metrics)
        say(f"step {self.state.step}: evaluation loss {loss:.4f}{self.state.evaluations[-1].beside()}")

    def _save(self) -> None:
        self.world.current_action = "taking a snapshot for a checkpoint"
        last = self.state.evaluations[-1] if self.state.evaluations else None
        held_out_loss = last.loss if last is not None and last.step == self.state.step else None
        metadata = {**self.metadata, **self.state.metadata()}
        if held_out_loss is not None:
            metadata["held_out_loss"] = held_out_loss
        self.state.set_newest_checkpoint(self.saver.save(metadata))

    def _broadcast(self, batch: Batch | None) -> Batch:
        """Broadcast rank 0's batch with its reference log-probabilities, padded as configured."""
        if batch is not None and batch.compared is not None and self.state.reference is not None:
            assert batch.numbers is not None
            batch = replace(batch, compared=replace(batch.compared, reference=self.state.reference[batch.numbers]))
        return self.trainer.shared_batch(batch, self.job.data.pad == "longest")

    def _broadcast_mismatched(self, batch: Batch | None) -> Batch | None:
        """Broadcast the batch's prompts with mismatched answers for KTO; returns None for other objectives."""
        if learns_from(self.job.train.preference) != "labels":
            return None
        if batch is None or batch.numbers is None:
            return self._broadcast(batch)
        assert isinstance(self.dataset, Dataset)
        return self._broadcast(self.dataset.gather(batch.numbers + 1))

    def _with_reference_point(self, batch: Batch, mismatched: Batch | None) -> Batch:
        """Add KTO's reference point, which a separate forward pass over the ``mismatched`` batch yields. Collective."""
        if mismatched is None or mismatched.compared is None or batch.compared is None:
            return batch
        logprobs, reference = self.trainer.likelihoods(mismatched), mismatched.compared.reference
        is_answer_token = np.arange(reference.shape[1]) < answer_counts(mismatched.compared.answers)[:, None]
        reference_point = max(0.0, float((logprobs - reference)[is_answer_token].mean()))
        return replace(batch, compared=replace(batch.compared, point=reference_point))

    def _read_evaluation_batch(self) -> Batch | None:
        """Return the evaluation batch, which may be empty; None on ranks other than 0."""
        if self.dataset is None:
            return None
        limit, empty = self.job.train.evaluate_sequences, np.empty((0, self.plan.sequence_length), np.int32)
        return next(self.dataset.held_out_batches(limit, limit), Batch(empty, empty, 0))


def _rewards(batch: Batch, sums: Sequence[float]) -> dict[str, float]:
    """Compute the fields of ``Rewards`` from the sums over a compared batch."""
    if (compared := batch.compared) is None:
        return {}
    chosen, rejected = sums[0] / max(1, compared.chosen), sums[1] / max(1, compared.rejected)
    rewards = {"chosen_reward": chosen} if compared.chosen else {}
    rewards |= {"rejected_reward": rejected} if compared.rejected else {}
    rewards |= {"reward_margin": chosen - rejected} if len(rewards) == 2 else {}
    rewards |= {"reward_accuracy": sums[2] / compared.count} if compared.point is None else {"kl": compared.point}
    return rewards


def _due(steps: int, every: float) -> bool:
    """Whether ``steps`` is a multiple of ``every``; false if ``every`` is 0."""
    return every > 0 and steps % every == 0
