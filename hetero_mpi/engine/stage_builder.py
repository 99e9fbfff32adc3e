"""How the stages of a rank are built as its plan has them: resident or streamed, whole or a share of every layer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hetero_mpi.engine.rank_setup import RankSetup
from hetero_mpi.model.group.exchanges import StageGroup
from hetero_mpi.model.group.layers import DividedLayers
from hetero_mpi.model.head_slices import HeadSlices
from hetero_mpi.model.held_layers import Kept, Shared
from hetero_mpi.model.layer.interface import Start
from hetero_mpi.model.stage import Stage, StageSpec
from hetero_mpi.model.streamed_stage import StreamedStage
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.planning.types.plan import StagePlan


@dataclass(frozen=True)
class StageBuilder:
    """A ``BuildStage`` from weights that are read or kept."""

    setup: RankSetup
    start: Start | None
    """Where weights come from; None: left to be filled from a checkpoint."""
    kept: Kept | None = None
    """Frozen weights that this rank has already."""
    stream_folder: Path | None = None
    """Where a streamed stage keeps frozen weights in files; None: in memory."""

    def __call__(
        self,
        own: StagePlan,
        split_backward: bool,
        shared: Shared,
        foreign: Collection[str],
        beginning: Stage | None,
    ) -> Stage:
        setup = self.setup
        spec = StageSpec(
            setup.chain,
            own.first,
            own.last,
            setup.backend,
            setup.train.dtype,
            setup.train.seed,
            setup.tuning,
            own.recompute and not own.streamed,  # it repeats each layer anyway, and its backward is one
            split_backward and not own.streamed,
            own.slice_sequences,
            own.kept_slices,
            own.disk_layers(setup.chain.layer_count),
            None if own.head_tokens is None else partial(HeadSlices, language(setup.chain), own.head_tokens),
            shared,
            foreign,
        )
        if own.streamed:
            return StreamedStage(spec, self.start, self.kept, folder=self.stream_folder)
        divided = None
        if setup.group is not None:
            together = StageGroup(own.shares, setup.group, own.experts)
            divided = DividedLayers(language(setup.chain), setup.tuning, together)
        return Stage(spec, self.start, self.kept, beginning, divided)
