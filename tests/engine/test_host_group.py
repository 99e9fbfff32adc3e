"""Exchanges of the ranks of a group, as far as one rank sees them; between ranks they are in ``tests/runtime/test_grouped.py``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.host_group import HostGroup


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exchange", [HostGroup.sum, HostGroup.maximum])
def test_what_an_exchange_gives_stays_after_the_next_ones(exchange: Callable[..., Any], dtype: torch.dtype) -> None:
    """Backward may need it long after; memory that is used again lies behind every exchange."""
    world: Any = SimpleNamespace(rank=0, size=2, waiting=lambda what: nullcontext())
    group = HostGroup(world, Backend())
    with group.apart():
        given = [torch.full((2, 1, 4, 3), float(number), dtype=dtype) for number in (1, 2)]
        first = exchange(group, given[0])
        kept = first.clone()
        for other in (HostGroup.sum, HostGroup.maximum):
            other(group, given[1].clone())
    assert kept.any() and torch.equal(first, kept)
