"""One rank's training state and the steps it takes: actions, exchanges between holders, the step decision, the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.data.batch import Batch, Compared, Weighed
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
from hetero_mpi.model.layer.micro_batch import REWARDS, Comparison, StepData
from hetero_mpi.model.optimizer import LossScale, Optimizer, StepDecider, StepDecision, added
from hetero_mpi.model.stage import Stage
from hetero_mpi.planning.schedule import Event, Schedule
from hetero_mpi.planning.types.plan import Plan

_NOTHING: NDArray[np.float64] = np.zeros(0)


@dataclass(frozen=True)
class StepResult:
    """The result of a step on one rank."""

    decision: StepDecision
    heard: NDArray[np.float64] = field(default_factory=lambda: _NOTHING)
    """The sum of what all ranks said ``along`` with the decision."""
    events: tuple[Event, ...] = ()
    """Actions of this rank with their times, in seconds from ``began_s`` on; nothing without a stage."""
    began_s: float = 0.0
    """Its beginning (``time.perf_counter``)."""
    worked_s: float = 0.0
    """Seconds of a CPU rank's forwards and backwards by processor time."""
    length: int = 0
    """Tokens per sequence."""


class Trainer:
    """A rank's share of a run. Ranks without a stage (rank 0 may be one) hold nothing and only follow the collectives.

    Attributes:
        places, stages: of this rank, in chain order.
        pipeline: to which they belong; None without a stage.
        held, optimizer: this rank's share of the model, all stages together; None without a stage.
        latest: the last step's result; None before the first.
        loss_scale: fp16's; every step decision changes it.
        memory: what is predicted for this rank; None: not known.
        owner: trained parameter -> the rank that has its master and moments, counts its norm, steps it, and saves it; of what the
            group of this rank cuts, each member does so with its part.
        divided: name -> the division of every tensor of its stage, where a group holds that.
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
        """Build this rank's stages. Local: ranks need not come here together. Raises UserError: the model's files do not fit, or
        the memory does not suffice.

        Args:
            world: the active ranks (``active_ranks``), for collective calls.
            build: makes each stage.
            divided: how the groups of the plan divide tensors.
            loss_scale: the run's; None: its start.
        """
        self.setup, self.plan = setup, plan
        self.rank, self.world, self.transport = setup.rank, world, setup.transport
        self.chain, self.tuning, self.backend, self.group = setup.chain, setup.tuning, setup.backend, setup.group
        train = setup.train
        self.owner = parameter_owners(self.tuning, plan)
        self.first = plan.leader_of.get(self.rank, self.rank)
        self.divided: Mapping[str, Division] = divided.get(self.first, {})
        owning = {name: divided[rank][name] for name, rank in self.owner.items() if rank in divided}
        micro_batches = [pipeline.micro_batches for pipeline in plan.pipelines]
        self.decider = StepDecider(
            list(self.tuning.trainable),
            train.clip_norm,
            sum(micro_batches),
            self.chain.routers is not None,
            {name: len(one.bounds) - 1 for name, one in owning.items() if one.cut},
            0 if train.preference == "none" else REWARDS,
        )
        self.places = places_of(self.rank, plan)
        self.pipeline = self.places[0].pipeline if self.places else None
        self.dtype = setup.dtype
        self.loss_scale = loss_scale or LossScale.of(self.dtype)
        self.latest: StepResult | None = None
        self.stages: list[Stage] = []
        self.held: HeldLayers | None = None
        self.optimizer: Optimizer | None = None
        self.executor: Executor | None = None
        self.tied: TiedMatrix | None = None
        self.loss_slots, self.memory = slots(micro_batches), setup.memory
        if self.places:
            with memory_explained(lambda: "loading its layers", self.memory, self.backend):
                shared = shared_parts(self.rank, plan, self.tuning, divided, self.owner)
                own = {part: owned for part, owned in shared.items() if self.rank in part.ranks}
                for place in self.places:
                    self.stages.append(self._stage(place, own, build))
                self.held = self.stages[0] if len(self.stages) == 1 else HeldStages(self.stages)
                self._build(self.held, shared, schedule)

    def _stage(self, place: Placement, shared: Shared, build: BuildStage) -> Stage:
        pipeline, tied = self.plan.pipelines[place.pipeline], self.chain.tied
        own = pipeline.stages[place.position]
        shared = {part: owned for part, owned in shared.items() if own.first <= part.layer < own.last}
        foreign = {name for name in self.owner if not self._steps(name)}
        ends = tied is not None and self.stages and self.stages[0].is_first and own.last == self.chain.layer_count
        beginning = self.stages[0] if ends else None
        return build(own, pipeline.split_backward and place.position > 0, shared, foreign, beginning)

    def _build(self, held: HeldLayers, shared: Collection[SharedPart], schedule: Schedule) -> None:
        assert self.pipeline is not None
        pipeline = self.plan.pipelines[self.pipeline]
        self.optimizer = Optimizer(held, self.setup.train)
        ends, tied = (pipeline.stages[0].ranks, pipeline.stages[-1].ranks), self.tuning.tied(self.chain)
        here = any(self.rank in ranks for ranks in ends)
        if tied is not None and here and (self.group is None or self.has_part(tied)):
            apart = (self.rank, self.rank) if ends[0] == ends[1] else (ends[0][0], ends[1][0])
            self.tied = TiedMatrix(self.rank, *apart, tied, self.optimizer, self.transport)
        self.update = ShardedUpdate(self.rank, self.plan.layers - 1, shared, self.tied, self.optimizer, self.transport)
        self.executor = Executor(self.setup, self.stages, self.places, pipeline, schedule[self.rank])
        self.backend.begin_peak()

    def _steps(self, name: str) -> bool:
        """Has this rank the master and moments of a parameter, or of its part of it?"""
        return self.owner[name] == self.rank or (self.owner[name] == self.first and self.has_part(name))

    def has_part(self, name: str) -> bool:
        """Has this rank's group cut the tensor, of which it has a part? (It may have none.)"""
        one, group = self.divided.get(name), self.group
        return one is not None and group is not None and one.cut and one.exists(group.member)

    def step(
        self, step: int, batch: Batch, asked: Callable[[], bool] = lambda: False, along: NDArray[np.float64] = _NOTHING
    ) -> StepResult:
        """One optimizer step, or, when loss or gradients are not finite, none on any rank. Collective. Raises UserError: this rank
        (alone) ran out of memory.

        Args:
            step: number of the step, from 0.
            batch: at most ``plan.global_batch`` rows of at most ``plan.sequence_length`` tokens, or samples.
            asked: has this rank been asked to end the run? The step decision tells all ranks.
            along: numbers that travel with the decision, as many on every active rank, so that they cost no message.
        """
        self._fits(batch)
        ending, executor = _StepEnd(self, step, asked, along), self.executor
        if executor is None:
            self.latest = ending.agreed({}, {})
            return self.latest
        self.update.begin()
        data = self.step_data(step, batch)
        with memory_explained(lambda: f"{executor.current} (step {step + 1})", self.memory, self.backend):
            ran = executor.run(data, ending)
        assert ran.decided is not None
        self.latest = replace(
            ran.decided,
            events=ran.events,
            began_s=ran.began_s,
            worked_s=ran.worked_s,
            length=data.length,
        )
        return self.latest

    def rehearse(self, batch: Batch) -> None:
        """A step of this rank by itself. Local; what is trained changes. Raises OutOfMemory."""
        if self.executor is None or self.optimizer is None or self.pipeline is None:
            return
        setup, pipeline = replace(self.setup, transport=Nowhere()), self.plan.pipelines[self.pipeline]
        executor = Executor(setup, self.stages, self.places, pipeline, self.executor.actions)
        apart = self.group.apart() if self.group is not None else contextlib.nullcontext()
        with memory_explained(lambda: str(executor.current), self.memory, self.backend), apart:
            executor.run(self.step_data(0, batch), UpdateAlone(self.optimizer))

    def evaluate(self, held_out: Batch) -> list[float]:
        """Sums over held-out sequences, or samples: of the losses of all targets, where that of routers counts as in training; and
        of preferences what a comparison sums beside, else how many targets are the likeliest. Collective.

        Every pipeline takes its share of the rows; numbers are added in fp64 in the order of the rows.
        """
        shares = evaluation_shares(self.plan, len(held_out.tokens))
        found = np.zeros((1 + (self.decider.rewards or 1), sum(len(sizes) for _, sizes in shares)))
        own = self._evaluated(held_out, shares)
        if self.pipeline is not None and own:
            begin = slots([len(sizes) for _, sizes in shares])[self.pipeline]
            found[0, begin : begin + len(own)] = [float(loss) for loss in own]
            for (index, _), sums in sorted(self.stages[-1].rewards.items()):
                found[1:, begin + index] += sums.tolist()
        return [added(values) for values in self.world.all_reduce_sum(found.ravel()).reshape(found.shape)]

    def shared_batch(self, own: Batch | None, trimmed: bool) -> Batch:
        """Rank 0's batch on every active rank; other ranks have none. Collective. ``trimmed``: to its longest row."""
        arrays: list[NDArray[Any]] | None = None
        if own is not None:
            own = own.trimmed() if trimmed else own
            arrays = [own.tokens, own.targets, *([own.positions] if own.positions is not None else [])]
            arrays += [own.compared.answers, own.compared.reference] if own.compared is not None else []
            arrays += [own.weighed.weights] if own.weighed is not None else []
        tokens, targets, *further = self.world.broadcast_arrays(arrays)
        weighed = (
            Weighed.of(targets, further.pop()) if len(further) in (1, 2) and further[-1].dtype.kind == "f" else None
        )
        positions = further[0] if further else None
        batch = Batch(tokens, targets, self.chain.counted(targets), positions, weighed=weighed)
        return replace(batch, compared=Compared.of(batch, *further[1:])) if further[1:] else batch

    def likelihoods(self, batch: Batch) -> NDArray[np.float64]:
        """Log-likelihoods of all answers by the model as it is now, [B, R]; see ``Compared``. Collective."""
        assert batch.compared is not None
        shares = evaluation_shares(self.plan, len(batch.tokens))
        found = np.zeros(batch.compared.reference.shape)
        own = self._evaluated(batch, shares, True)
        if self.pipeline is not None and own:
            first, sizes = shares[self.pipeline]
            found[first : first + sum(sizes)] = torch.cat(own).cpu().double().numpy()
        return self.world.all_reduce_sum(found.ravel()).reshape(found.shape)

    def _evaluated(
        self, batch: Batch, shares: Sequence[tuple[int, tuple[int, ...]]], likelihoods: bool = False
    ) -> list[torch.Tensor]:
        """Results of each micro-batch on the last stage of the rank's pipeline; else nothing."""
        if self.executor is None or self.pipeline is None:
            return []
        first, sizes = shares[self.pipeline]
        rows = batch.rows(range(first, first + sum(sizes)))
        routed = None if likelihoods else self._routed(rows, batch, batch.divisor)
        with memory_explained(lambda: "evaluation", self.memory, self.backend):
            data = self._data(0, BatchShare(rows, sizes, (0,) * len(sizes)), likelihoods)
            found = self.executor.evaluate(replace(data, routed=routed))
            return found if self.setup.leads else []

    def settle(self) -> None:
        """Return when new values of the latest step are there. Called by every active rank, if no step follows at once."""
        if self.executor is not None:
            self.update.settle()

    def close(self) -> None:
        """No step follows: another trainer may use the transport. Called by every active rank."""
        if self.executor is not None:
            self.update.dissolve()

    def share_tied_weight(self) -> None:
        """Bring the embedding's values to the head's copy of a tied matrix, within each pipeline. Called by every active rank."""
        if self.executor is not None:
            self.update.share_tied_weight()

    def _fits(self, batch: Batch) -> None:
        rows, length = len(batch.tokens), self.chain.length(batch.tokens)
        assert 0 < rows <= self.plan.global_batch and 0 < length <= self.plan.sequence_length, (
            f"a batch has at most {self.plan.global_batch} rows of {self.plan.sequence_length} tokens, not {rows} x {length}"
        )

    def step_data(self, step: int, batch: Batch) -> StepData:
        """The input of the rank's pipeline in a step."""
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
        )

    def _routed(self, own: Batch, whole: Batch, divisor: float) -> Routed | None:
        """The routers' losses of this pipeline's rows: their mean over the whole batch, times what it is divided by yet."""
        if self.chain.routers is None:
            return None
        lengths = torch.from_numpy(own.lengths).to(self.backend.device)
        return Routed(lengths, divisor / max(1, int(np.count_nonzero(whole.lengths))))


@dataclass(frozen=True)
class _StepEnd:
    """The ``executor.Update`` of one step. The other fields are those of ``Trainer.step``."""

    trainer: Trainer
    step: int
    asked: Callable[[], bool]
    along: NDArray[np.float64]

    def finished(self, layer: int) -> None:
        self.trainer.update.finished(layer)

    def reduce(self, layer: int) -> None:
        self.trainer.update.reduce(layer)

    def decide(self, losses: Sequence[torch.Tensor]) -> StepResult:
        trainer = self.trainer
        assert trainer.executor is not None and trainer.optimizer is not None and trainer.pipeline is not None
        trainer.update.end()
        trainer.executor.flush()
        first, leads = trainer.loss_slots[trainer.pipeline], trainer.setup.leads
        shares = torch.stack(list(losses)).tolist() if losses and leads else []
        filled = {first + index: loss for index, loss in enumerate(shares)}
        last, count = trainer.stages[-1], trainer.decider.micro_batches
        beside = [] if last.routers is None else [last.routers.seen]
        for kind, seen in enumerate([*beside, last.rewards], start=1):
            for (index, _), values in sorted(seen.items() if leads else ()):
                for place, value in enumerate(values.reshape(-1).tolist(), start=kind):
                    place = place * count + first + index
                    filled[place] = filled.get(place, 0.0) + value
        decided = self.agreed(trainer.optimizer.squared_norms(), filled)
        assert trainer.transport.pending() == 0, "the step left requests pending"
        return decided

    def carry_out(self, decided: StepResult) -> None:
        trainer, decision = self.trainer, decided.decision
        assert trainer.optimizer is not None
        trainer.optimizer.end_step(self.step, decision.scale if decision.finite else None)
        if decision.finite:
            trainer.update.publish()
            # Else collective calls follow, which must have MPI to themselves; or weights are on their way to the device.
            if trainer.world.thread_level != "multiple" or trainer.optimizer.stage.offloaded is not None:
                trainer.update.settle()

    def agreed(self, squared_norms: dict[str, float], losses: dict[int, float]) -> StepResult:
        """The common step decision, without events. ``losses``: as ``StepDecider.fill`` takes them."""
        trainer = self.trainer
        member = trainer.group.member if trainer.group is not None else 0
        with trainer.world.waiting("all ranks' part of the step decision"):
            own = trainer.decider.fill(squared_norms, losses, self.asked(), member)
            summed = trainer.world.all_reduce_sum(np.concatenate([own, self.along]))
        decision = trainer.decider.decide(summed[: len(own)], trainer.loss_scale.value)
        trainer.loss_scale.update(decision.finite)
        return StepResult(decision, summed[len(own) :])
