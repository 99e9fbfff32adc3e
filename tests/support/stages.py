"""Stages for tests, in one call."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.model.layer.interface import LayerChain, Start
from hetero_mpi.model.stage import MicroBatch, Stage, StageSpec
from hetero_mpi.model.streamed_stage import StreamedStage
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.types import sizes

_BUILT_WITH = ("kept_layers", "first_stage", "divided", "folder")


def stage_of(
    chain: LayerChain,
    first: int,
    last: int,
    backend: Backend,
    dtype: str,
    start: Start | None,
    seed: int = 0,
    tuning: Tuning | None = None,
    kind: type[Any] = Stage,
    **options: Any,
) -> Any:
    """A stage of this kind. ``options``: further fields of ``StageSpec``, and arguments of the stage."""
    built_with = {name: options.pop(name) for name in _BUILT_WITH if name in options}
    return kind(StageSpec(chain, first, last, backend, dtype, seed, tuning, **options), start, **built_with)


def trained_once(stages: Sequence[Stage], position: MicroBatch, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """Forward and backward of a micro-batch through all stages; the loss."""
    x = tokens
    for stage in stages:
        x = stage.forward(position, x, targets if stage.is_last else None)
    gradient = None
    for stage in reversed(stages):
        gradient = stage.backward(0, gradient)
    assert gradient is None, "token ids have no gradient"
    return float(x)


def slice_heads(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """From now on heads compute so many tokens at a time."""
    monkeypatch.setattr(sizes, "LOGITS_BYTES", 0)
    monkeypatch.setattr(sizes, "HEAD_TOKENS", tokens)


streamed_stage_of = partial(stage_of, kind=StreamedStage)
