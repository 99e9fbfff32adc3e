"""A rank's setup (device, transport, model), the positions of its stages in the plan, and its pipeline's rows of a batch."""

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
    """A rank's device, transport, model and training settings under one plan."""

    rank: int
    """Rank number in the job."""
    transport: Transport
    """The transport that connects all ranks of the job."""
    chain: LayerChain
    tuning: Tuning
    backend: Backend
    train: TrainTable
    group: StageLink | None = None
    """The tensor-parallel group of the rank's stage; None if the stage is not sharded."""
    memory: RankMemory | None = None
    """Predicted memory of this rank; None if unknown."""
    compiled: bool = False
    """Whether this rank compiles its blocks."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.train.dtype]

    @property
    def leads(self) -> bool:
        """Whether this rank exchanges messages for its stages: it is in no group, or it is its group's first rank."""
        return self.group is None or self.group.member == 0

    def wire_format(self) -> WireFormat:
        """Return the encoding of tensors sent between stages."""
        return format_of(self.train.wire, self.dtype, self.chain.appended_rows)


BuildStage = Callable[[StagePlan, bool, Shared, Collection[str], "Stage | None"], Stage]
"""Builds one of a rank's stages. The arguments are the plan's stage, whether its backward is split, the parts shared with other
ranks, the parameters owned by other ranks, and the rank's first stage if that stage holds a tied model's embedding. Raises
UserError if the model's files do not match."""


@dataclass(frozen=True)
class Placement:
    """Position of one of a rank's stages in the plan."""

    index: int
    """Index among all stages of the plan."""
    pipeline: int
    position: int
    """Index within the pipeline."""


def places_of(rank: int, plan: Plan) -> tuple[Placement, ...]:
    """Return the placements of the rank's stages, all in one pipeline, in chain order; empty if the plan leaves the rank idle."""
    numbered = [plan.numbered[number] for number in plan.of_rank(rank)]
    return tuple(Placement(index, p, plan.pipelines[p].stages.index(stage)) for index, p, stage in numbered)


def active_ranks(plan: Plan) -> list[int]:
    """Return the ranks that take part in every step: those with a stage, and rank 0, which reads the data."""
    return sorted({0, *plan.ranks})


def parameter_owners(tuning: Tuning, plan: Plan) -> dict[str, int]:
    """Map each trained parameter to its owner rank, in the model's order."""
    sizes = {name: (spec.layer, spec.count * (name not in tuning.still)) for name, spec in tuning.trainable.items()}
    return owners(plan, sizes)


@dataclass(frozen=True)
class BatchShare:
    """One pipeline's rows of a step's batch, divided into micro-batches.

    Attributes:
        sizes: number of rows of each micro-batch; micro-batches are consecutive in the arrays.
        first_samples: index of each micro-batch's first row in the global batch.
    """

    batch: Batch
    sizes: tuple[int, ...]
    first_samples: tuple[int, ...]


def training_share(plan: Plan, pipeline: int, batch: Batch) -> BatchShare:
    """Return a pipeline's rows of a training batch; pipelines take consecutive rows in plan order.

    If the batch has fewer rows than ``plan.global_batch``, the last micro-batches are short. An empty micro-batch gets one row
    whose targets are ignored, so that every step runs the same actions.
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
    """Return (first row, micro-batch sizes) of each pipeline for ``rows`` evaluation sequences, in the proportions of training."""
    ends = [round(rows * total / plan.global_batch) for total in accumulate(p.sequences for p in plan.pipelines)]
    shares = []
    for begin, end, pipeline in zip([0, *ends[:-1]], ends, plan.pipelines, strict=True):
        shares.append((begin, _micro_batch_sizes(end - begin, pipeline)))
    return shares


def _micro_batch_sizes(rows: int, pipeline: PipelinePlan) -> tuple[int, ...]:
    full, remainder = divmod(rows, pipeline.micro_batch)
    return (*[pipeline.micro_batch] * full, *([remainder] if remainder else []))


def slots(counts: Sequence[int]) -> list[int]:
    """Return the offset of each pipeline's losses in a vector that holds ``counts[p]`` values for pipeline p, in plan order."""
    return [0, *accumulate(counts)][:-1]
