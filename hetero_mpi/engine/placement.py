"""Where a rank stands in a plan, and which rows of a batch it computes on.

A rank as the steps of a plan need it: its device, its transport, its model and what of it is trained.
"""

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
    """A rank, its device and its peers while one plan lasts, and what is trained."""

    rank: int
    """Its number in the whole job."""
    transport: Transport
    """Joins all ranks of the job."""
    chain: LayerChain
    tuning: Tuning
    backend: Backend
    train: TrainTable
    group: StageLink | None = None
    """The ranks that hold the rank's stage together; None: it alone."""
    memory: RankMemory | None = None
    """The prediction for this rank; None: not known."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.train.dtype]

    @property
    def leads(self) -> bool:
        """Whether this rank is alone with its stages, or the first of the group that holds its stage."""
        return self.group is None or self.group.member == 0

    def wire_format(self) -> WireFormat:
        """How tensors travel between stages."""
        return format_of(self.train.wire, self.dtype, self.chain.appended_rows)


BuildStage = Callable[[StagePlan, bool, Shared, Collection[str], "Stage | None"], Stage]
"""Makes one of a rank's stages: of a plan's stage, whether its backward is split, the layers that several ranks hold, what other
ranks own of them, and the stage with a tied model's embedding where that is another one of this rank. Raises UserError: the model's
files do not fit."""


@dataclass(frozen=True)
class Placement:
    """Where a stage of a rank stands in a plan."""

    index: int
    """Its number among all stages."""
    pipeline: int
    position: int
    """Its index within its pipeline."""


def places_of(rank: int, plan: Plan) -> tuple[Placement, ...]:
    """Placements of the rank's stages, which are of one pipeline, in chain order; none where the plan leaves it idle."""
    numbered = [plan.numbered[number] for number in plan.of_rank(rank)]
    return tuple(Placement(number, of, plan.pipelines[of].stages.index(stage)) for number, of, stage in numbered)


def active_ranks(plan: Plan) -> list[int]:
    """Ranks that take part in every step: those with a stage, and rank 0, which reads the data and leads."""
    return sorted({0, *plan.ranks})


def parameter_owners(tuning: Tuning, plan: Plan) -> dict[str, int]:
    """Trained parameter -> the rank that owns it, in the model's order."""
    sizes = {name: (spec.layer, spec.count * (name not in tuning.still)) for name, spec in tuning.trainable.items()}
    return owners(plan, sizes)


@dataclass(frozen=True)
class BatchShare:
    """One pipeline's rows of a step's batch, cut into micro-batches.

    ``sizes``: rows of each micro-batch, which follow one another in the arrays; ``first_samples``: where each begins in the
    whole batch.
    """

    batch: Batch
    sizes: tuple[int, ...]
    first_samples: tuple[int, ...]


def training_share(plan: Plan, pipeline: int, batch: Batch) -> BatchShare:
    """The rows of a step's batch that a pipeline learns from.

    Rows are dealt in plan order. A batch of fewer rows than ``plan.global_batch`` leaves the last micro-batches short; one
    that would be empty gets a row of ignored targets, so that the same actions run in every step.
    """
    own = plan.pipelines[pipeline]
    first = sum(earlier.sequences for earlier in plan.pipelines[:pipeline])
    rows = range(len(batch.tokens))[first : first + own.sequences]
    sizes = [max(0, min(own.size(m), len(rows) - m * own.micro_batch)) for m in range(own.micro_batches)]
    share = batch.rows([*rows, *[0] * sizes.count(0)])
    share.targets[len(rows) :] = IGNORED
    if share.compared is not None:
        share.compared.answers[len(rows) :] = 0
    starts = tuple(first + m * own.micro_batch for m in range(own.micro_batches))
    return BatchShare(share, tuple(size or 1 for size in sizes), starts)


def evaluation_shares(plan: Plan, rows: int) -> list[tuple[int, tuple[int, ...]]]:
    """(first row, rows of each batch) of every pipeline, for ``rows`` held-out sequences dealt by the pipelines' shares."""
    ends = [round(rows * total / plan.global_batch) for total in accumulate(p.sequences for p in plan.pipelines)]
    found = []
    for begin, end, pipeline in zip([0, *ends[:-1]], ends, plan.pipelines, strict=True):
        found.append((begin, _cut(end - begin, pipeline)))
    return found


def _cut(rows: int, pipeline: PipelinePlan) -> tuple[int, ...]:
    full, left = divmod(rows, pipeline.micro_batch)
    return (*[pipeline.micro_batch] * full, *([left] if left else []))


def slots(counts: Sequence[int]) -> list[int]:
    """Where each pipeline's losses begin in a vector that holds ``counts[p]`` of pipeline p, in plan order."""
    return [0, *accumulate(counts)][:-1]
