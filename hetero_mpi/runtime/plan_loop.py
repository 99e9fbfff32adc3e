"""The steps of a run: a loop over shares, a rank's parts while one plan lasts.

Active ranks take steps until rank 0 wants another plan, idle ones sleep until then, and all go over to it together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.engine.placement import active_ranks
from hetero_mpi.engine.recording import Recorder
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.toml_files import plan_from_dict, plan_to_dict, save_plan
from hetero_mpi.report import units
from hetero_mpi.report.progress import ProgressDisplay
from hetero_mpi.report.run_files.line_files import unharmed
from hetero_mpi.report.run_files.metrics import MetricsWriter
from hetero_mpi.runtime.loop import Books, Loop
from hetero_mpi.runtime.rebalance import Rebalancer
from hetero_mpi.runtime.reconfigure import Share, change
from hetero_mpi.runtime.recovery import Past, beside_steps
from hetero_mpi.runtime.run_report import open_metrics, show_plan
from hetero_mpi.runtime.setup.setup import Setting
from hetero_mpi.runtime.signals import StopRequest
from hetero_mpi.runtime.watchdog import Lookout, Watchdog, limit_s

Shown = tuple[MetricsWriter | None, ProgressDisplay | None]


class Steps:
    """What lasts while plans change.

    Args:
        setting: of the run.
        past: keeps the books, for another attempt after a death; has the profile that plans are made for.
        metadata: what every checkpoint carries besides tensors; used on rank 0.
        asked: has this rank been asked to end the run?
        shown: where steps are told, on rank 0.
        rebalancer: says when the plan is to be changed; None: never.
    """

    def __init__(
        self,
        setting: Setting,
        past: Past,
        metadata: dict[str, Any],
        asked: Callable[[], bool],
        shown: Shown,
        rebalancer: Rebalancer | None,
    ) -> None:
        self.setting, self.past, self.metadata = setting, past, metadata
        self.asked, self.shown, self.rebalancer = asked, shown, rebalancer

    def take(self, share: Share, books: Books) -> Share:
        """Train to the last step; returns the share that took it, and leaves the books in ``past``. Collective over all ranks of
        the job. Nobody else may hold the trainer of ``share``."""
        while (word := self._until_change(share, books)) is not None:
            if share.members is None:
                self.past.books = books = Books.from_dict(word["books"])
            share = self._changed(share, plan_from_dict(word["plan"]), books)
        return share

    def _until_change(self, share: Share, books: Books) -> dict[str, Any] | None:
        """Take steps, or sleep on an idle rank, until another plan is due, which all ranks are told; None: the run is over.

        Collective over all ranks of the job.
        """
        setting, rebalancer = self.setting, self.rebalancer
        world = setting.world
        if share.members is None:
            world.doing = "idle, by the plan"
            word: dict[str, Any] | None = world.sleep_until_released(self.asked)
            return word
        assert share.trainer is not None and self.past.profile is not None
        if rebalancer is not None:
            rebalancer.begin(share)
        dataset = setting.material.dataset if setting.material is not None else None
        described = {**self.metadata, "plan": plan_to_dict(share.plan)}
        directory = setting.run_dir / "checkpoints"
        with passed_on(world, share):
            with beside_steps(setting, self.past, share.trainer, books, described) as beside:
                loop = Loop(
                    share.trainer,
                    setting.job,
                    share.own_plan,
                    dataset,
                    directory,
                    described,
                    books,
                    self.asked,
                    rebalancer,
                    beside,
                )
                loop.record = Recorder(
                    share.trainer,
                    share.members,
                    setting.transport,
                    setting.run_dir,
                    books.state.step,
                    setting.job.train.steps,
                )
                with _watchdog(setting, share.members, share.trainer) as watchdog:
                    show_plan(self.shown[1], setting, self.past.profile, share.plan, watchdog)
                    done = loop.run(*self.shown)
            if rebalancer is not None:
                rebalancer.end()
            if done:
                return None
            plan = rebalancer.chosen() if rebalancer is not None else None
            word = {"plan": plan_to_dict(plan), "books": books.to_dict()} if plan is not None else None
            word = share.members.broadcast_json(word)
        world.release(idle_ranks(world, share), None, word)
        return word

    def _changed(self, before: Share, plan: Plan, books: Books) -> Share:
        """Go over to another plan, and tell. Collective over all ranks of the job."""
        setting, rebalancer = self.setting, self.rebalancer
        assert self.past.profile is not None
        begin = time.perf_counter()
        share = change(setting, self.past.profile, before, plan, books)
        if setting.world.rank == 0:
            with unharmed("plan.toml"):
                save_plan(plan, setting.run_dir / "plan.toml")
            if rebalancer is not None:
                rebalancer.changed(books.state.step, before.plan, plan, time.perf_counter() - begin)
        return share


@contextlib.contextmanager
def passed_on(world: World, share: Share) -> Iterator[None]:
    """A block of the active ranks: what they end with, the sleeping ranks end with too."""
    try:
        yield
    except CollectiveUserError as error:
        world.release(idle_ranks(world, share), error)
        raise


def idle_ranks(world: World, share: Share) -> list[int]:
    """Ranks that sleep while the share's plan lasts."""
    active = active_ranks(share.plan)
    return [rank for rank in range(world.size) if rank not in active]


def open_display(setting: Setting, books: Books, stack: contextlib.ExitStack) -> Shown:
    """Where steps are told, on rank 0."""
    if setting.world.rank != 0:
        return None, None
    metrics = stack.enter_context(open_metrics(setting, books.state.step))
    display = stack.enter_context(ProgressDisplay(setting.job.train.steps, books.state.step))
    display.unit = units.unit_of(setting.job.data.sequence_length)
    return metrics, display


def asked_of(everybody: World, stop: StopRequest) -> Callable[[], bool]:
    """Whether this rank has been asked to end the run; on rank 0 also, whether an idle rank has."""

    def asked() -> bool:
        return stop() or everybody.asked()

    return asked


def _watchdog(setting: Setting, world: World, trainer: Trainer) -> contextlib.AbstractContextManager[object]:
    cluster = setting.job.cluster
    scale = cluster.time_scale if cluster.emulate is not None else 1.0
    limit = limit_s(cluster.watchdog_s, scale * trainer.plan.predicted_step_s)
    if limit == 0 or not cluster.communication_thread or world.thread_level != "multiple":
        return contextlib.nullcontext()
    assert isinstance(setting.transport, MpiTransport)
    lookout = Lookout(world, trainer, setting.transport)
    return Watchdog(world, limit, lookout.look, lookout.forgive)
