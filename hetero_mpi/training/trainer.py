"""One rank's training state and the steps it takes: actions, gradient exchange of tied ends, the common verdict, the optimizer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetero_mpi.comm.transport import Transport
from hetero_mpi.comm.world import World
from hetero_mpi.device.backend import DTYPES, Backend, host_bytes
from hetero_mpi.job import TrainTable
from hetero_mpi.model.chain import Chain
from hetero_mpi.model.optimizer import Judge, LossScale, Optimizer, Verdict
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.model.weights import Start
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.schedule import Action, Event, Op, Schedule, stages
from hetero_mpi.training.emulation import Emulation
from hetero_mpi.training.executor import Executor, StepData

_TIED_GRADIENT, _TIED_WEIGHT = 1 << 12, (1 << 12) + 1


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a plan."""

    index: int
    """Number of its stage among all stages."""
    pipeline: int
    position: int
    """Index of the stage within its pipeline."""


def place_of(rank: int, plan: Plan) -> Place | None:
    """The rank's place, or None where the plan leaves it idle."""
    for index, (_, pipeline, stage) in enumerate(stages(plan)):
        if rank in stage.ranks:
            return Place(index, pipeline, plan.pipelines[pipeline].stages.index(stage))
    return None


def active_ranks(plan: Plan) -> list[int]:
    """Ranks that take part in every step: those with a stage, and rank 0, which reads the data and leads."""
    return sorted({0, *(rank for pipeline in plan.pipelines for stage in pipeline.stages for rank in stage.ranks)})


class Trainer:
    """A rank's share of a run. Ranks without a stage (rank 0 may be one) have no ``stage`` and only follow the collectives.

    Attributes:
        stage, optimizer: this rank's share of the model; None without a stage.
        events: what took place in the last step.
    """

    def __init__(
        self,
        rank: int,
        world: World,
        transport: Transport,
        chain: Chain,
        tuning: Tuning,
        plan: Plan,
        schedule: Schedule,
        backend: Backend,
        train: TrainTable,
        start: Start | None,
        emulation: Emulation | None = None,
    ) -> None:
        """Build this rank's stage.

        Args:
            rank: this rank's number in the plan.
            world: the active ranks (``active_ranks``), for collective calls.
            start: where weights come from; None: left to be filled from a checkpoint.
            emulation: makes steps last as on other devices.

        Raises:
            UserError: the model's files do not fit.
        """
        self.rank, self.world, self.transport = rank, world, transport
        self.emulation = emulation
        self.end_transport = emulation.end_transport if emulation is not None else transport
        self.chain, self.tuning, self.plan, self.backend = chain, tuning, plan, backend
        self.actions: tuple[Action, ...] = schedule.get(rank, ())
        self.judge = Judge(list(tuning.trainable), train.clip_norm)
        self.place = place_of(rank, plan)
        self.dtype = DTYPES[train.dtype]
        self.loss_scale = LossScale.of(self.dtype)
        self.events: list[Event] = []
        self.stage: Stage | None = None
        self.optimizer: Optimizer | None = None
        self.executor: Executor | None = None
        if self.place is not None:
            pipeline = plan.pipelines[self.place.pipeline]
            own = pipeline.stages[self.place.position]
            self.stage = Stage(
                chain, own.first, own.last, backend, train.dtype, start, train.seed, tuning, own.recompute
            )
            self.optimizer = Optimizer(self.stage, train)
            self.executor = Executor(
                self.stage,
                self.place.index,
                pipeline,
                self.place.position,
                transport,
                chain.config.hidden_size,
                plan.sequence_length,
                emulation,
            )

    def step(self, step: int, tokens: np.ndarray, targets: np.ndarray, target_tokens: int) -> Verdict:
        """One optimizer step, or, when loss or gradients are not finite, none on any rank. Collective.

        Args:
            step: number of the step, from 0.
            tokens, targets: the global batch, int32 (B, T).
            target_tokens: targets that count in it.
        """
        if self.executor is None or self.optimizer is None:
            return self._verdict({}, None)
        optimizer = self.optimizer
        optimizer.zero()
        verdicts: list[Verdict] = []

        def finish(action: Action) -> None:
            verdicts.append(self._finish_step(step))

        self.events = self.executor.run(
            self.actions, self._data(step, tokens, targets, target_tokens), {Op.REDUCE: self._reduce, Op.STEP: finish}
        )
        return verdicts[0]

    def evaluate(self, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
        """Sum of the losses of all targets in held-out batches, each int32 (micro-batch, T) twice. Collective."""
        total = 0.0
        if self.executor is not None:
            total = self.executor.evaluate([self._data(0, tokens, targets, 1) for tokens, targets in batches])
        return float(self.world.all_reduce_sum(np.array([total]))[0])

    def parameter(self, name: str) -> torch.Tensor:
        """The fp32 value of a parameter or constant of this rank, in host memory."""
        assert self.optimizer is not None
        if name in self.tuning.constants:
            return self._constant(name)
        return self.backend.to_host(self.optimizer.targets[name])

    def compute_parameter(self, name: str) -> torch.Tensor:
        """A parameter of this rank in the compute dtype, or a constant in fp32, in host memory."""
        assert self.stage is not None
        if name in self.tuning.constants:
            return self._constant(name)
        return self.backend.to_host(self.stage.parameters[name].to(self.dtype))

    def set_parameter(self, name: str, value: torch.Tensor) -> None:
        """Overwrite a parameter (and what it is rounded to) or a constant from an fp32 host tensor."""
        assert self.optimizer is not None and self.stage is not None
        with torch.no_grad():
            if name in self.tuning.constants:
                self.stage.model.get_parameter(name).copy_(value)
                return
            self.optimizer.targets[name].copy_(value)
            self.stage.parameters[name].copy_(self.optimizer.targets[name])

    def _constant(self, name: str) -> torch.Tensor:
        assert self.stage is not None
        return self.backend.to_host(self.stage.model.get_parameter(name).float())

    def share_tied_weight(self) -> None:
        """Bring the embedding's values to the head's copy of a tied matrix. Called by every active rank."""
        ends = self._tied_ends()
        if ends is None or ends[0] == ends[1]:
            return
        assert self.chain.tied is not None
        embedding, head = ends
        if self.rank == embedding:
            weight = self.compute_parameter(self.chain.tied[1])
            self.end_transport.wait(self.end_transport.send(head, _TIED_WEIGHT, host_bytes(weight)))
        elif self.rank == head:
            assert self.stage is not None and self.stage.tied_head is not None
            weight = torch.empty(self.stage.tied_head.shape, dtype=self.stage.tied_head.dtype)
            self.end_transport.wait(self.end_transport.post_receive(embedding, _TIED_WEIGHT, host_bytes(weight)))
            with torch.no_grad():
                self.stage.tied_head.copy_(weight)

    def _data(self, step: int, tokens: np.ndarray, targets: np.ndarray, target_tokens: int) -> StepData:
        assert self.stage is not None

        def place(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).long().to(self.backend.device)

        return StepData(
            step,
            place(tokens) if self.stage.is_first else None,
            place(targets) if self.stage.is_last else None,
            target_tokens,
            self.loss_scale.value,
        )

    def _finish_step(self, step: int) -> Verdict:
        assert self.executor is not None and self.optimizer is not None
        self.executor.flush()
        self._add_own_tied_gradient()
        loss = None
        if self.executor.losses:
            # fp64, in the order of the micro-batches: the same bits for every partition.
            loss = float(torch.stack(self.executor.losses).double().cpu().sum())
        verdict = self._verdict(self.optimizer.squared_norms(), loss)
        begin = time.perf_counter()
        if verdict.finite:
            self.optimizer.step(step, verdict.scale)
        if self.emulation is not None:
            assert self.place is not None
            self.emulation.pace.hold(Op.STEP, self.place.index, begin)
        if verdict.finite:
            self.share_tied_weight()
        return verdict

    def _verdict(self, squared_norms: dict[str, float], loss: float | None) -> Verdict:
        if self.emulation is not None:
            self.world.meet_asleep()  # ranks that are ahead take no core from those that emulate with it
        summed = self.world.all_reduce_sum(self.judge.fill(squared_norms, loss))
        verdict = self.judge.decide(summed, self.loss_scale.value)
        self.loss_scale.update(verdict.finite)
        return verdict

    def _tied_ends(self) -> tuple[int, int] | None:
        """(rank of the embedding, rank of the head) of a tied model that is trained itself."""
        if self.chain.tied is None or not self.tuning.full:
            return None
        pipeline = self.plan.pipelines[0]
        return pipeline.stages[0].ranks[0], pipeline.stages[-1].ranks[0]

    def _add_own_tied_gradient(self) -> None:
        ends = self._tied_ends()
        if ends is not None and ends[0] == ends[1]:
            assert self.optimizer is not None and self.chain.tied is not None
            self.optimizer.gradient(self.chain.tied[1]).add_(self.optimizer.tied_gradient())

    def _reduce(self, action: Action) -> None:
        """Add the gradient of the head's copy of a tied matrix to the embedding's, which alone is optimised."""
        ends = self._tied_ends()
        assert (
            ends is not None
            and self.chain.tied is not None
            and self.optimizer is not None
            and self.executor is not None
        )
        embedding, head = ends
        if self.rank == head:
            gradient = self.backend.to_host(self.optimizer.tied_gradient())
            self.end_transport.wait(self.end_transport.send(embedding, _TIED_GRADIENT, host_bytes(gradient)))
        else:
            own = self.optimizer.gradient(self.chain.tied[1])
            other = torch.empty(own.shape, dtype=torch.float32)
            self.end_transport.wait(self.end_transport.post_receive(head, _TIED_GRADIENT, host_bytes(other)))
            own.add_(self.backend.from_host(other))
