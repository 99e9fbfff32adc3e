"""A rank's setup (device, transport, model), its stages' places in the plan, and its pipeline's rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hetero_mpi.comm.transport import Transport
from hetero_mpi.data.batch import Batch
from hetero_mpi.device.backend import DTYPES, Backend
from hetero_mpi.engine.wire_format import WireFormat, format_of
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.group.exchanges import StageLink
from hetero_mpi.model.held_layers import Shared
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.layer.loss import IGNORED
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.owners import owners
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, RankMemory, StagePlan


@dataclass(frozen=True)
class RankSetup:
    """A rank's device, peers, model and training settings under one plan."""

    rank: int
    """Rank number in the job."""
    transport: Transport
    """Connects all ranks of the job."""
    chain: LayerChain
    tuning: Tuning
    backend: Backend
    train: TrainTable
    group: StageLink | None = None
    """Tensor-parallel group of the rank's stage; None if the rank holds its stages alone."""
    memory: RankMemory | None = None
    """Predicted memory of this rank; None if unknown."""
    compiled: bool = False
    """Whether blocks are compiled on this rank."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.train.dtype]

    @property
    def leads(self) -> bool:
        """Whether this rank exchanges messages for its stages: it holds them alone, or it is its group's first rank."""
        return self.group is None or self.group.member == 0

    def wire_format(self) -> WireFormat:
        """Encoding of tensors that are sent between stages."""
        return format_of(self.train.wire, self.dtype, self.chain.appended_rows)


BuildStage = Callable[[StagePlan, bool, Shared, Collection[str], "Stage | None"], Stage]
"""Builds one of a rank's stages. Arguments: the plan's stage, whether its backward is split, layers shared with other ranks,
parameters owned by other ranks, and the rank's first stage if that holds a tied model's embedding.
Raises UserError if the model's files do not fit."""


@dataclass(frozen=True)
class Placement:
    """Place of one of a rank's stages in the plan."""

    index: int
    """Index among all stages of the plan."""
    pipeline: int
    position: int
    """Index within the pipeline."""


def places_of(rank: int, plan: Plan) -> tuple[Placement, ...]:
    """Placements of the rank's stages in chain order, all of one pipeline; empty if the plan leaves the rank idle."""
    numbered = [plan.numbered[number] for number in plan.of_rank(rank)]
    return tuple(Placement(index, p, plan.pipelines[p].stages.index(stage)) for index, p, stage in numbered)


def active_ranks(plan: Plan) -> list[int]:
    """Ranks that take part in every step: those with a stage, and rank 0, which reads the data."""
    return sorted({0, *plan.ranks})


def parameter_owners(tuning: Tuning, plan: Plan) -> dict[str, int]:
    """Trained parameter -> owner rank, in the model's order."""
    sizes = {name: (spec.layer, spec.count * (name not in tuning.still)) for name, spec in tuning.trainable.items()}
    return owners(plan, sizes)


@dataclass(frozen=True)
class BatchShare:
    """One pipeline's rows of a step's batch, divided into micro-batches.

    Attributes:
        sizes: number of rows of each micro-batch, consecutive in the arrays.
        first_samples: index of each micro-batch's first row in the global batch.
    """

    batch: Batch
    sizes: tuple[int, ...]
    first_samples: tuple[int, ...]


def training_share(plan: Plan, pipeline: int, batch: Batch) -> BatchShare:
    """A pipeline's rows of a training batch, assigned to pipelines in plan order.

    If the batch has fewer rows than ``plan.global_batch``, the last micro-batches are short; an empty micro-batch gets one row of
    ignored targets, so that every step runs the same actions.
    """
    pipe = plan.pipelines[pipeline]
    first = sum(earlier.sequences for earlier in plan.pipelines[:pipeline])
    rows = range(len(batch.tokens))[first : first + pipe.sequences]
    sizes = [max(0, min(pipe.size(m), len(rows) - m * pipe.micro_batch)) for m in range(pipe.micro_batches)]
    share = batch.rows([*rows, *[0] * sizes.count(0)])
    share.targets[len(rows) :] = IGNORED
    if share.compared is not None:
        share.compared.answers[len(rows) :] = 0
    starts = tuple(first + m * pipe.micro_batch for m in range(pipe.micro_batches))
    return BatchShare(share, tuple(size or 1 for size in sizes), starts)


def evaluation_shares(plan: Plan, rows: int) -> list[tuple[int, tuple[int, ...]]]:
    """(first row, sizes of micro-batches) of each pipeline for ``rows`` evaluation sequences, split as training batches are."""
    ends = [round(rows * total / plan.global_batch) for total in accumulate(p.sequences for p in plan.pipelines)]
    shares = []
    for begin, end, pipeline in zip([0, *ends[:-1]], ends, plan.pipelines, strict=True):
        shares.append((begin, _micro_batch_sizes(end - begin, pipeline)))
    return shares


def _micro_batch_sizes(rows: int, pipeline: PipelinePlan) -> tuple[int, ...]:
    full, remainder = divmod(rows, pipeline.micro_batch)
    return (*[pipeline.micro_batch] * full, *([remainder] if remainder else []))


def slots(counts: Sequence[int]) -> list[int]:
    """Offset of each pipeline's losses in a vector that holds ``counts[p]`` values of pipeline p, in plan order."""
    return [0, *accumulate(counts)][:-1]
