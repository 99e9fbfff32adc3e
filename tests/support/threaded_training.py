"""Trainers on threads of this process instead of ranks: all of a step but MPI, without the seconds that starting ranks takes.

Threads share torch's random generators, so no dropout here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.rank_setup import RankSetup
from hetero_mpi.engine.stage_builder import StageBuilder
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.schema import TrainTable
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.model.tuning import Tuning, full_training
from hetero_mpi.planning.orders import ORDERS
from hetero_mpi.planning.schedule import schedule_of
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, Plan, StagePlan
from tests.support.loopback import LoopbackNetwork, LoopbackTransport
from tests.support.planning_samples import make_model

TIMEOUT_S = 120.0


class Meeting:
    """What the threads' collectives share."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)


class ThreadWorld:
    """The collectives that a trainer uses, between threads."""

    host, numbers, thread_level = "here", (), "multiple"

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, len(meeting.values), meeting

    def all_gather_json(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        found = list(self._meeting.values)
        self._meeting.barrier.wait()
        return found

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def all_reduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        total: NDArray[Any] = np.sum(np.stack(self.all_gather_json(array)), axis=0)
        return total


class Threads:
    """One trainer for each rank of a plan whose ranks are 0, 1, ...; ``backend`` makes each one's device."""

    def __init__(
        self,
        chain: TransformersChain,
        plan: Plan,
        train: TrainTable,
        tuning: Tuning | None = None,
        backend: Callable[[], Backend] = Backend,
    ) -> None:
        torch.set_num_threads(1)  # the ranks are threads enough
        tuning = tuning if tuning is not None else full_training(chain)
        self.size = 1 + max(rank for pipeline in plan.pipelines for stage in pipeline.stages for rank in stage.ranks)
        self.transports: tuple[LoopbackTransport, ...] = LoopbackNetwork(self.size).transports
        meeting = Meeting(self.size)
        schedule = schedule_of(plan, cost_of(chain, tuning))
        self.trainers = [
            Trainer(
                setup,
                cast(World, ThreadWorld(setup.rank, meeting)),
                plan,
                schedule,
                StageBuilder(setup, SeededStart(train.seed)),
            )
            for rank, transport in enumerate(self.transports)
            for setup in [RankSetup(rank, transport, chain, tuning, backend(), train)]
        ]
        self._meeting = meeting

    def together(self, play: Callable[[Trainer], Any]) -> list[Any]:
        """What ``play`` gives on every rank, each in a thread of its own."""
        found: list[Any] = [None] * self.size
        failures: list[BaseException] = []

        def run(trainer: Trainer) -> None:
            try:
                found[trainer.rank] = play(trainer)
            except BaseException as error:
                failures.append(error)
                self._meeting.barrier.abort()
                for transport in self.transports:
                    transport.close()

        threads = [threading.Thread(target=run, args=(trainer,), daemon=True) for trainer in self.trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        if failures:
            raise failures[0]
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        return found


def cost_of(chain: TransformersChain, tuning: Tuning) -> ModelCost:
    """As much of a model's cost as schedules depend on."""
    model = make_model(chain.blocks, chain.tied is not None and tuning.full)
    trained = [sum(spec.count for spec in tuning.specs(layer, layer + 1)) for layer in range(chain.layer_count)]
    layers = tuple(replace(one, trainable_parameters=n) for one, n in zip(model.layers, trained, strict=True))
    return replace(model, layers=layers)


def plan_of(
    chain: TransformersChain,
    pipelines: Sequence[tuple[Sequence[int], Sequence[int], int, int]],
    length: int,
    schedule: str = "1f1b",
    recompute: bool = False,
) -> Plan:
    """``pipelines``: (ranks in chain order, boundaries, micro-batch, sequences) of each. ``schedule``: as ``trained_once``."""
    made = []
    for ranks, edges, micro_batch, sequences in pipelines:
        count = -(-sequences // micro_batch)
        depths = [count if schedule == "gpipe" else min(len(ranks) - 1 - i, count) for i in range(len(ranks))]
        stages = tuple(StagePlan((rank,), edges[i], edges[i + 1], depths[i], recompute) for i, rank in enumerate(ranks))
        order = schedule if schedule in ORDERS else WARM_UP
        split = schedule == "split" or ORDERS[order].SPLITS
        made.append(PipelinePlan(stages, micro_batch, sequences, split, order))
    return Plan(tuple(made), sum(p.sequences for p in made), length, chain.layer_count)
