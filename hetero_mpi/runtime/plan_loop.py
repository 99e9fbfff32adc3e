"""The steps of a run over all its plans: each turn trains under one plan (``Share``), then all ranks change to the next.

Active ranks train until rank 0 wants another plan. Idle ranks sleep until then. All ranks change together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.engine.placement import active_ranks
from hetero_mpi.planning.types.plan_report import PlanReport
from hetero_mpi.planning.types.toml_files import plan_to_dict, report_from_dict, save_plan
from hetero_mpi.report import units
from hetero_mpi.report.progress import ProgressDisplay
from hetero_mpi.report.run_files.line_files import unharmed
from hetero_mpi.report.run_files.metrics import MetricsWriter
from hetero_mpi.runtime.build import Share
from hetero_mpi.runtime.loop import Loop
from hetero_mpi.runtime.rebalance import Rebalancer
from hetero_mpi.runtime.reconfigure import change
from hetero_mpi.runtime.recovery import RunHistory, beside_steps
from hetero_mpi.runtime.run_report import open_metrics, show_plan
from hetero_mpi.runtime.setup.setup import RunContext
from hetero_mpi.runtime.signals import StopRequest
from hetero_mpi.runtime.watchdog import Lookout, Watchdog, limit_s
from hetero_mpi.state.training_state import TrainingState

Shown = tuple[MetricsWriter | None, ProgressDisplay | None]


class Steps:
    """Trains to the last step, however often the plan changes.

    Args:
        context: of the run.
        history: keeps the state, for another attempt after a death.
        metadata: what every checkpoint carries besides tensors; used on rank 0.
        asked: has this rank been asked to end the run?
        shown: writer of metrics and progress display, on rank 0.
        rebalancer: says when the plan is to be changed; None: never.
    """

    def __init__(
        self,
        context: RunContext,
        history: RunHistory,
        metadata: dict[str, Any],
        asked: Callable[[], bool],
        shown: Shown,
        rebalancer: Rebalancer | None,
    ) -> None:
        self.context, self.history, self.metadata = context, history, metadata
        self.asked, self.shown, self.rebalancer = asked, shown, rebalancer

    def take(self, share: Share, state: TrainingState) -> tuple[Share, TrainingState]:
        """Train to the last step; returns the share that took it, and the state after it. Collective over all ranks of the job.

        Nobody else may hold the trainer of ``share``: a change of plan needs its memory.
        """
        while (word := self._until_change(share, state)) is not None:
            if share.members is None:
                state = TrainingState.from_dict(word["state"])
                self.history.stands_at(state)
            share = self._changed(share, report_from_dict(word["plan"]), state)
        return share, state

    def _until_change(self, share: Share, state: TrainingState) -> dict[str, Any] | None:
        """Train, or sleep on an idle rank, until another plan is due; returns that plan and the state, on all ranks. None: the run
        is over.

        Collective over all ranks of the job.
        """
        context, rebalancer = self.context, self.rebalancer
        world = context.world
        if share.members is None:
            world.doing = "idle, by the plan"
            word: dict[str, Any] | None = world.sleep_until_released(self.asked)
            return word
        assert share.trainer is not None
        if rebalancer is not None:
            rebalancer.begin(share)
        described = {**self.metadata, "plan": plan_to_dict(share.plan)}
        with passed_on(world, share):
            with beside_steps(context, self.history, share.trainer, state, described) as beside:
                loop = Loop(context, share, state, described, self.asked, rebalancer, beside)
                with _watchdog(context, share) as watchdog:
                    show_plan(self.shown[1], context, share.plan, watchdog)
                    done = loop.run(*self.shown)
            if rebalancer is not None:
                rebalancer.end()
            if done:
                return None
            chosen = rebalancer.chosen() if rebalancer is not None else None
            word = {"plan": plan_to_dict(chosen), "state": state.to_dict()} if chosen is not None else None
            word = share.members.broadcast_json(word)
        world.release(idle_ranks(world, share), None, word)
        return word

    def _changed(self, before: Share, report: PlanReport, state: TrainingState) -> Share:
        """Change to another plan, and report it. Collective over all ranks of the job."""
        context, rebalancer = self.context, self.rebalancer
        begin = time.perf_counter()
        share = change(context, before, report, state)
        if context.world.rank == 0:
            with unharmed("plan.toml"):
                save_plan(report, context.run_dir / "plan.toml")
            if rebalancer is not None:
                rebalancer.changed(state.step, before.plan, report.plan, time.perf_counter() - begin)
        return share


@contextlib.contextmanager
def passed_on(world: World, share: Share) -> Iterator[None]:
    """A block of the active ranks. An error that they all end with is raised on the sleeping ranks too."""
    try:
        yield
    except CollectiveUserError as error:
        world.release(idle_ranks(world, share), error)
        raise


def idle_ranks(world: World, share: Share) -> list[int]:
    """Ranks that sleep while the plan of ``share`` lasts."""
    active = active_ranks(share.plan)
    return [rank for rank in range(world.size) if rank not in active]


def open_display(context: RunContext, state: TrainingState, stack: contextlib.ExitStack) -> Shown:
    """The writer of metrics and the progress display, on rank 0; None elsewhere."""
    if context.world.rank != 0:
        return None, None
    metrics = stack.enter_context(open_metrics(context, state.step))
    unit = units.unit_of(context.job.data.sequence_length)
    train, per_epoch = context.job.train, None
    if train.epochs is not None and context.dataset is not None:
        per_epoch = len(context.dataset.train) / train.global_batch
    display = stack.enter_context(ProgressDisplay(train.steps, state.step, unit=unit, steps_per_epoch=per_epoch))
    return metrics, display


def asked_of(everybody: World, stop: StopRequest) -> Callable[[], bool]:
    """A function: has this rank been asked to end the run? On rank 0 also: has an idle rank?"""

    def asked() -> bool:
        return stop() or everybody.asked()

    return asked


def _watchdog(context: RunContext, share: Share) -> contextlib.AbstractContextManager[object]:
    assert share.members is not None and share.trainer is not None
    cluster, world = context.job.cluster, share.members
    scale = cluster.time_scale if cluster.emulate is not None else 1.0
    limit = limit_s(cluster.watchdog_s, scale * share.report.predicted_step_s)
    if limit == 0 or not cluster.communication_thread or world.thread_level != "multiple":
        return contextlib.nullcontext()
    assert isinstance(context.transport, MpiTransport)
    lookout = Lookout(world, share.trainer, context.transport)
    return Watchdog(world, limit, lookout.look, lookout.forgive)
