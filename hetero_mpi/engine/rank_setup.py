"""A rank as the steps of a plan need it: its device, its transport, its model and what of it is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from hetero_mpi.comm.transport import Transport
from hetero_mpi.device.backend import DTYPES, Backend
from hetero_mpi.engine.wire_format import WireFormat, format_of
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.group.exchanges import StageLink
from hetero_mpi.model.held_layers import Shared
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.types.plan import RankMemory, StagePlan


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
