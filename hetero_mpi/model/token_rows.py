"""Trained rows of a few tokens over a frozen embedding or output projection: the others need neither gradients nor moments. The
numbers are those of peft's ``trainable_token_indices``, which copies the whole matrix in every forward instead."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def use_rows(module: Any, tokens: Sequence[int], rows: nn.Parameter) -> None:
    """From now on an embedding, or a linear layer, computes with ``rows`` (tokens, width) for these tokens, ascending."""
    places = torch.tensor(tokens, device=rows.device)
    if isinstance(module, nn.Embedding):
        padding = tokens.index(module.padding_idx) if module.padding_idx in tokens else None
        small = copy.copy(module)  # a family's own embedding may scale what it looks up
        vars(small).update(_parameters={"weight": rows}, num_embeddings=len(tokens), padding_idx=padding)

    def look_up(_: nn.Module, given: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        found = torch.searchsorted(places, given[0]).clamp(max=len(tokens) - 1)
        here = (places[found] == given[0]).unsqueeze(-1)
        return torch.where(here, type(small).forward(small, found), output)

    def project(_: nn.Module, given: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        bias = None if module.bias is None else module.bias[places]
        return output.index_copy_(-1, places, F.linear(given[0], rows, bias))

    module.register_forward_hook(look_up if isinstance(module, nn.Embedding) else project)
