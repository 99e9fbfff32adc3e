"""Stages for tests, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetero_mpi.device.backend import Backend
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.stage import Stage, StageSpec
from hetero_mpi.model.streamed_stage import StreamedStage
from hetero_mpi.model.transformers.weights import Start
from hetero_mpi.model.tuning import Tuning

_BUILT_WITH = ("kept", "embedding", "divided")


def stage_of(
    chain: LayerChain,
    first: int,
    last: int,
    backend: Backend,
    dtype: str,
    start: Start | None,
    seed: int = 0,
    tuning: Tuning | None = None,
    **options: Any,
) -> Stage:
    """``options``: further fields of ``StageSpec``, and arguments of ``Stage``."""
    built_with = {name: options.pop(name) for name in _BUILT_WITH if name in options}
    return Stage(StageSpec(chain, first, last, backend, dtype, seed, tuning, **options), start, **built_with)


def streamed_stage_of(
    chain: LayerChain,
    first: int,
    last: int,
    backend: Backend,
    dtype: str,
    start: Start | None,
    seed: int = 0,
    tuning: Tuning | None = None,
    folder: Path | None = None,
    **options: Any,
) -> StreamedStage:
    """``options``: further fields of ``StageSpec``."""
    return StreamedStage(StageSpec(chain, first, last, backend, dtype, seed, tuning, **options), start, folder=folder)
