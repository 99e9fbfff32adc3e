"""Builds the stages of a rank as its plan has them: resident or streamed, whole or a share of every layer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.schema import TrainTable
from hetero_mpi.model.group.layers import DividedLayers
from hetero_mpi.model.group.link import GroupLink, StageGroup
from hetero_mpi.model.held_layers import Kept, Shared
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.streamed_stage import StreamedStage
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.model.transformers.weights import Start
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.types.plan import StagePlan


@dataclass(frozen=True)
class StageBuilder:
    """What every stage of a rank is built from."""

    chain: LayerChain
    tuning: Tuning
    backend: Backend
    train: TrainTable
    start: Start | None
    """Where weights come from; None: left to be filled from a checkpoint."""
    kept: Kept | None = None
    """Frozen weights that this rank has already."""
    stream_folder: Path | None = None
    """Where a streamed stage that computes in host memory keeps its frozen weights; None: in memory."""
    group: GroupLink | None = None
    """The ranks that hold the rank's stage together; None: it alone."""

    def __call__(
        self,
        own: StagePlan,
        split_backward: bool,
        shared: Shared,
        foreign: Collection[str],
        embedding: nn.Parameter | None,
    ) -> Stage:
        """The stage of a plan; see ``Stage``. Raises UserError: the model's files do not fit."""
        train = self.train
        given = self.chain, own.first, own.last, self.backend, train.dtype, self.start, train.seed, self.tuning
        if own.streamed:
            options = {"kept": self.kept, "slice_sequences": own.slice_sequences, "shared": shared, "foreign": foreign}
            return StreamedStage(*given, folder=self.stream_folder, **options)
        divided = None
        if self.group is not None:
            together = StageGroup(own.shares, self.group, own.experts)
            divided = DividedLayers(language(self.chain), self.tuning, together)
        further = own.recompute, split_backward, self.kept, own.slice_sequences, shared, foreign, embedding, divided
        return Stage(*given, *further)
