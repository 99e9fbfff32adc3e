"""A rank's share of the layers of a stage that a group of ranks holds, as the stage sees it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class LayerShare(Protocol):
    """Which part of a tensor is a member's own, where its share begins and ends, and what the loss is."""

    @property
    def leads(self) -> bool:
        """Is it the group's first member?"""

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The member's part of a tensor."""

    def exists(self, name: str) -> bool:
        """Has it a part of this tensor?"""

    def trains(self, name: str) -> bool:
        """Does a trained tensor have a gradient here?"""

    def double_scales(self, block: str, module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Name of each tensor in a block that is packed and cut -> the scales of the member's part."""

    def cut(self, model: nn.Module, layer: int) -> None:
        """Leave of a layer in host memory, which is whole, the member's parts."""

    def fit(self, model: nn.Module, layer: int) -> None:
        """Give the modules of a layer, whose tensors are cut, the sizes of these."""

    def connect(self, model: nn.Module, first: int, last: int) -> None:
        """Exchange with the other members where shares of the layers [first, last) begin and end."""

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The summed loss of logits of the member's words."""

    def target_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of every target."""
