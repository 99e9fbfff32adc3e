"""One rank's training state and steps: actions, exchanges, the collective step decision and the optimizer."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.data.batch import Batch, Compared, Weighed
from hetero_mpi.device.backend import HOST, keep_freed_memory
from hetero_mpi.engine.executor import Executor
from hetero_mpi.engine.memory_trial import Nowhere, UpdateAlone, memory_explained
from hetero_mpi.engine.placement import (
    BatchShare,
    BuildStage,
    Placement,
    RankSetup,
    evaluation_shares,
    parameter_owners,
    places_of,
    slots,
    training_share,
)
from hetero_mpi.engine.sharded_update import Divided, ShardedUpdate, TiedMatrix, shared_parts
from hetero_mpi.model.group.tensor_division import Division
from hetero_mpi.model.held_layers import HeldLayers, HeldStages, Shared, SharedPart
from hetero_mpi.model.layer.interface import as_input
from hetero_mpi.model.layer.loss import Routed
from hetero_mpi.model.layer.micro_batch import REWARD_COUNT, Comparison, StepData
from hetero_mpi.model.optimizer import LossScale, Optimizer, StepDecider, StepDecision, added
from hetero_mpi.model.stage import Stage
from hetero_mpi.planning.schedule import Event, Schedule
from hetero_mpi.planning.types.plan import Plan

_NOTHING: NDArray[np.float64] = np.zeros(0)


@dataclass(frozen=True)
class StepResult:
    decision: StepDecision
    extras_sum: NDArray[np.float64] = field(default_factory=lambda: _NOTHING)
    """Sum over all ranks of the ``extras`` passed to ``Trainer.step``."""
    events: tuple[Event, ...] = ()
    """This rank's actions with their times, in seconds since ``began_s``; empty if the rank has no stage."""
    began_s: float = 0.0
    """Start of the step (``time.perf_counter``)."""
    worked_s: float = 0.0
    """CPU seconds spent in the forward and backward passes of a CPU rank."""
    length: int = 0
    """Tokens per sequence."""


class Trainer:
    """Trains one rank. A rank without a stage (possibly rank 0) holds no layers and only joins collectives.

    Attributes:
        places, stages: this rank's stages in chain order, with their positions in the plan.
        pipeline: index of the stages' pipeline; None if the rank has no stage.
        layers, optimizer: the layers of all of this rank's stages, and their optimizer; None if the rank has no stage.
        latest: result of the last step; None before the first.
        loss_scale: fp16 loss scale, updated by every step decision.
        memory: predicted memory of this rank; None if unknown.
        owner: maps each trained parameter to its owner rank, which holds its master and moments, computes its norm, updates it and
            saves it. If the owner's group shards the parameter, each member does so for its shard.
        divided: maps names to the sharding of this rank's tensors; empty if the rank is in no tensor-parallel group.
    """

    def __init__(
        self,
        setup: RankSetup,
        world: World,
        plan: Plan,
        schedule: Schedule,
        build: BuildStage,
        divided: Divided,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Build this rank's stages. Not collective.

        Args:
            world: the active ranks (``active_ranks``), for collective calls.
            build: builds each stage.
            divided: sharding of tensors by the plan's tensor-parallel groups.
            loss_scale: current loss scale of the run; None at the start of a run.

        Raises:
            UserError: The model's files do not match, or the rank ran out of memory.
        """
        self.setup, self.plan = setup, plan
        self.rank, self.world, self.transport = setup.rank, world, setup.transport
        self.chain, self.tuning, self.backend, self.group = setup.chain, setup.tuning, setup.backend, setup.group
        train = setup.train
        self.owner = parameter_owners(self.tuning, plan)
        self.first = plan.leader_of.get(self.rank, self.rank)
        self.divided: Mapping[str, Division] = divided.get(self.first, {})
        owned_divisions = {name: divided[rank][name] for name, rank in self.owner.items() if rank in divided}
        micro_batches = [pipeline.micro_batches for pipeline in plan.pipelines]
        self.decider = StepDecider(
            list(self.tuning.trainable),
            train.clip_norm,
            sum(micro_batches),
            self.chain.routers is not None,
            {name: len(division.bounds) - 1 for name, division in owned_divisions.items() if division.cut},
            0 if train.preference == "none" else REWARD_COUNT,
        )
        self.places = places_of(self.rank, plan)
        self.pipeline = self.places[0].pipeline if self.places else None
        self.dtype = setup.dtype
        self.loss_scale = loss_scale or LossScale.for_dtype(self.dtype)
        self.latest: StepResult | None = None
        self.stages: list[Stage] = []
        self.layers: HeldLayers | None = None
        self.optimizer: Optimizer | None = None
        self.executor: Executor | None = None
        self.tied: TiedMatrix | None = None
        self.loss_slots, self.memory = slots(micro_batches), setup.memory
        if self.places:
            with memory_explained(lambda: "loading its layers", self.memory, self.backend):
                shared = shared_parts(self.rank, plan, self.tuning, divided, self.owner)
                own_parts = {part: owned for part, owned in shared.items() if self.rank in part.ranks}
                for placement in self.places:
                    self.stages.append(self._stage(placement, own_parts, build))
                self.layers = self.stages[0] if len(self.stages) == 1 else HeldStages(self.stages)
                self._build(self.layers, shared, schedule)

    def _stage(self, placement: Placement, shared: Shared, build: BuildStage) -> Stage:
        pipeline, tied = self.plan.pipelines[placement.pipeline], self.chain.tied
        stage = pipeline.stages[placement.position]
        shared = {part: owned for part, owned in shared.items() if stage.first <= part.layer < stage.last}
        foreign = {name for name in self.owner if not self._steps(name)}
        ends = tied is not None and self.stages and self.stages[0].is_first and stage.last == self.chain.layer_count
        first_stage = self.stages[0] if ends else None
        return build(stage, pipeline.split_backward and placement.position > 0, shared, foreign, first_stage)

    def _build(self, layers: HeldLayers, shared: Collection[SharedPart], schedule: Schedule) -> None:
        assert self.pipeline is not None
        pipeline = self.plan.pipelines[self.pipeline]
        self.optimizer = Optimizer(layers, self.setup.train)
        ends, tied = (pipeline.stages[0].ranks, pipeline.stages[-1].ranks), self.tuning.tied(self.chain)
        has_end = any(self.rank in ranks for ranks in ends)
        if tied is not None and has_end and (self.group is None or self.has_part(tied)):
            end_ranks = (self.rank, self.rank) if ends[0] == ends[1] else (ends[0][0], ends[1][0])
            self.tied = TiedMatrix(self.rank, *end_ranks, tied, self.optimizer, self.transport)
        self.update = ShardedUpdate(self.rank, self.plan.layers - 1, shared, self.tied, self.optimizer, self.transport)
        self.executor = Executor(self.setup, self.stages, self.places, pipeline, schedule[self.rank])
        self.backend.begin_peak()
        if self.backend.device == HOST:
            keep_freed_memory()

    def _steps(self, name: str) -> bool:
        """Whether this rank holds the master and moments of a parameter, or of its shard of the parameter."""
        return self.owner[name] == self.rank or (self.owner[name] == self.first and self.has_part(name))

    def has_part(self, name: str) -> bool:
        """Whether this rank's group shards the tensor and this rank holds a shard."""
        division, group = self.divided.get(name), self.group
        return division is not None and group is not None and division.cut and division.exists(group.member)

    def step(
        self, step: int, batch: Batch, stops: Callable[[], bool] = lambda: False, extras: NDArray[np.float64] = _NOTHING
    ) -> StepResult:
        """Run one training step; all ranks skip the update if the loss or gradients are not finite. Collective.

        Args:
            step: step number, counted from 0.
            batch: at most ``plan.global_batch`` rows of at most ``plan.sequence_length`` tokens, or samples.
            stops: returns whether this rank was asked to end the run; the step decision tells all ranks.
            extras: numbers to sum over all ranks in the same message as the decision; the same length on every active rank.

        Raises:
            OutOfMemory: This rank ran out of memory.
        """
        rows, length = len(batch.tokens), self.chain.length(batch.tokens)
        assert 0 < rows <= self.plan.global_batch and 0 < length <= self.plan.sequence_length, (
            f"a batch has at most {self.plan.global_batch} rows of {self.plan.sequence_length} tokens, not {rows} x {length}"
        )
        step_end, executor = _StepEnd(self, step, stops, extras), self.executor
        if executor is None:
            self.latest = step_end.agreed({}, {})
            return self.latest
        self.update.start_step()
        data = self.step_data(step, batch)
        with memory_explained(lambda: f"{executor.current} (step {step + 1})", self.memory, self.backend):
            outcome = executor.run(data, step_end)
        assert outcome.decided is not None
        self.latest = replace(
            outcome.decided,
            events=outcome.events,
            began_s=outcome.began_s,
            worked_s=outcome.worked_s,
            length=data.length,
        )
        return self.latest

    def rehearse(self, batch: Batch) -> None:
        """Run a step on this rank alone, which changes its parameters. Not collective. Raises ``OutOfMemory``."""
        if self.executor is None or self.optimizer is None or self.pipeline is None:
            return
        setup, pipeline = replace(self.setup, transport=Nowhere()), self.plan.pipelines[self.pipeline]
        executor = Executor(setup, self.stages, self.places, pipeline, self.executor.actions)
        alone = self.group.apart() if self.group is not None else contextlib.nullcontext()
        with memory_explained(lambda: str(executor.current), self.memory, self.backend), alone:
            executor.run(self.step_data(0, batch), UpdateAlone(self.optimizer))

    def evaluate(self, batch: Batch) -> list[float]:
        """Return sums over all rows: the loss, then reward statistics or the number of correct predictions.

        The loss includes router losses. Collective: each pipeline evaluates its share; values are added in fp64 in row order.
        """
        shares = evaluation_shares(self.plan, len(batch.tokens))
        sums_by_slot = np.zeros((1 + (self.decider.rewards or 1), sum(len(sizes) for _, sizes in shares)))
        losses = self._evaluated(batch, shares)
        if self.pipeline is not None and losses:
            begin = slots([len(sizes) for _, sizes in shares])[self.pipeline]
            sums_by_slot[0, begin : begin + len(losses)] = [float(loss) for loss in losses]
            for (index, _), sums in sorted(self.stages[-1].rewards.items()):
                sums_by_slot[1:, begin + index] += sums.tolist()
        return [added(values) for values in self.world.all_reduce_sum(sums_by_slot.ravel()).reshape(sums_by_slot.shape)]

    def shared_batch(self, source: Batch | None, trimmed: bool) -> Batch:
        """Broadcast rank 0's batch; other ranks pass None. Collective. ``trimmed`` cuts the batch to its longest row."""
        arrays: list[NDArray[Any]] | None = None
        if source is not None:
            source = source.trimmed() if trimmed else source
            arrays = [source.tokens, source.targets, *([source.positions] if source.positions is not None else [])]
            arrays += [source.compared.answers, source.compared.reference] if source.compared is not None else []
            arrays += [source.weighed.weights] if source.weighed is not None else []
        tokens, targets, *extra = self.world.broadcast_arrays(arrays)
        weighed = (
            Weighed.from_batch(targets, extra.pop()) if len(extra) in (1, 2) and extra[-1].dtype.kind == "f" else None
        )
        positions = extra[0] if extra else None
        batch = Batch(tokens, targets, self.chain.counted(targets), positions, weighed=weighed)
        return replace(batch, compared=Compared.from_batch(batch, *extra[1:])) if extra[1:] else batch

    def likelihoods(self, batch: Batch) -> NDArray[np.float64]:
        """Return the log-probabilities of all answers under the current model, (B, R); see ``Compared``. Collective."""
        assert batch.compared is not None
        shares = evaluation_shares(self.plan, len(batch.tokens))
        table = np.zeros(batch.compared.reference.shape)
        rows = self._evaluated(batch, shares, True)
        if self.pipeline is not None and rows:
            first, sizes = shares[self.pipeline]
            table[first : first + sum(sizes)] = torch.cat(rows).cpu().double().numpy()
        return self.world.all_reduce_sum(table.ravel()).reshape(table.shape)

    def _evaluated(
        self, batch: Batch, shares: Sequence[tuple[int, tuple[int, ...]]], likelihoods: bool = False
    ) -> list[torch.Tensor]:
        """Return the results of each micro-batch on the last stage of the rank's pipeline; an empty list on other stages."""
        if self.executor is None or self.pipeline is None:
            return []
        first, sizes = shares[self.pipeline]
        rows = batch.rows(range(first, first + sum(sizes)))
        routed = None if likelihoods else self._routed(rows, batch, batch.divisor)
        with memory_explained(lambda: "evaluation", self.memory, self.backend):
            data = self._data(0, BatchShare(rows, sizes, (0,) * len(sizes)), likelihoods)
            outputs = self.executor.evaluate(replace(data, routed=routed))
            return outputs if self.setup.leads else []

    def settle(self) -> None:
        """Wait for the latest step's parameter values. Every active rank calls it, unless another step follows immediately."""
        if self.executor is not None:
            self.update.settle()

    def close(self) -> None:
        """Release the transport for another trainer after the last step. Every active rank calls it."""
        if self.executor is not None:
            self.update.dissolve()

    def share_tied_weight(self) -> None:
        """Copy the embedding's values to the tied head in each pipeline. Every active rank calls it."""
        if self.executor is not None:
            self.update.share_tied_weight()

    def step_data(self, step: int, batch: Batch) -> StepData:
        """Return the input of this rank's pipeline for a step."""
        assert self.pipeline is not None
        share = training_share(self.plan, self.pipeline, batch)
        data = self._data(step, share)
        return replace(data, routed=self._routed(share.batch, batch, 1))

    def _data(self, step: int, share: BatchShare, likelihoods: bool = False) -> StepData:
        batch, comparison = share.batch, None
        first, last = self.stages[0].is_first, self.stages[-1].is_last

        def place(array: NDArray[Any]) -> torch.Tensor:
            return as_input(array).to(self.backend.device)

        if (compared := batch.compared) is not None and last:
            train, answers = None if likelihoods else self.setup.train, place(compared.answers)
            further = place(compared.reference), compared.likelihood_weight, compared.point or 0.0
            comparison = Comparison(train, answers, *further)
        return StepData(
            step,
            share.sizes,
            share.first_samples,
            self.chain.length(batch.tokens),
            place(batch.tokens) if first else None,
            place(batch.targets) if last else None,
            None if batch.positions is None else place(batch.positions),
            batch.divisor,
            self.loss_scale.value,
            comparison,
            weights=place(batch.weighed.weights) if last and batch.weighed is not None else None,
            host_positions=None if batch.positions is None else as_input(batch.positions),
        )

    def _routed(self, share: Batch, global_batch: Batch, divisor: float) -> Routed | None:
        """Return the data of router losses, weighted so that division by ``divisor`` gives the mean over the global batch."""
        if self.chain.routers is None:
            return None
        lengths = torch.from_numpy(share.lengths).to(self.backend.device)
        return Routed(lengths, divisor / max(1, int(np.count_nonzero(global_batch.lengths))))


@dataclass(frozen=True)
class _StepEnd:
    """The ``executor.Update`` of one step; its fields match the arguments of ``Trainer.step``."""

    trainer: Trainer
    step: int
    stops: Callable[[], bool]
    extras: NDArray[np.float64]

    def finished(self, layer: int) -> None:
        self.trainer.update.finished(layer)

    def reduce(self, layer: int) -> None:
        self.trainer.update.reduce(layer)

    def decide(self, losses: Sequence[torch.Tensor]) -> StepResult:
        trainer = self.trainer
        assert trainer.executor is not None and trainer.optimizer is not None and trainer.pipeline is not None
        trainer.update.finish_step()
        trainer.executor.flush()
        first, leads = trainer.loss_slots[trainer.pipeline], trainer.setup.leads
        shares = torch.stack(list(losses)).tolist() if losses and leads else []
        filled = {first + index: loss for index, loss in enumerate(shares)}
        last, count = trainer.stages[-1], trainer.decider.micro_batches
        statistics = [] if last.routers is None else [last.routers.seen]
        for kind, values_by_slice in enumerate([*statistics, last.rewards], start=1):
            for (index, _), values in sorted(values_by_slice.items() if leads else ()):
                for slot, value in enumerate(values.reshape(-1).tolist(), start=kind):
                    slot = slot * count + first + index
                    filled[slot] = filled.get(slot, 0.0) + value
        decided = self.agreed(trainer.optimizer.squared_norms(), filled)
        assert trainer.transport.pending() == 0, "the step left requests pending"
        return decided

    def carry_out(self, decided: StepResult) -> None:
        trainer, decision = self.trainer, decided.decision
        assert trainer.optimizer is not None
        trainer.optimizer.end_step(self.step, decision.scale if decision.finite else None)
        if decision.finite:
            trainer.update.publish()
            # Without THREAD_MULTIPLE the next collective calls need MPI to themselves; offloaded weights are copied next.
            if trainer.world.thread_level != "multiple" or trainer.optimizer.stage.offloaded is not None:
                trainer.update.settle()

    def agreed(self, squared_norms: dict[str, float], losses: dict[int, float]) -> StepResult:
        """Take the collective step decision. ``losses`` is as for ``StepDecider.fill``; the result has no events yet."""
        trainer = self.trainer
        member = trainer.group.member if trainer.group is not None else 0
        with trainer.world.waiting("all ranks' part of the step decision"):
            rank_vector = trainer.decider.fill(squared_norms, losses, self.stops(), member)
            summed = trainer.world.all_reduce_sum(np.concatenate([rank_vector, self.extras]))
        decision = trainer.decider.decide(summed[: len(rank_vector)], trainer.loss_scale.value)
        trainer.loss_scale.update(decision.finite)
        return StepResult(decision, summed[len(rank_vector) :])
