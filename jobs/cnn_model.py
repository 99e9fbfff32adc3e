"""A small convolutional network on made-up images: the model, loss and data of jobs/cnn.toml.

An image holds a blob and noise; the class says in which of four quarters the blob is, and whether it is bright or dark.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import hetero_mpi

SIZE, CLASSES = 16, 8


class Images:
    """Images made by a function of (seed, number): nothing is stored. (1, SIZE, SIZE) fp32, with a class."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        random = np.random.default_rng([self.seed, number])
        label = int(random.integers(CLASSES))
        quarter, dark = divmod(label, 2)
        row, column = divmod(quarter, 2)
        y, x = random.integers(2, SIZE // 2 - 2, 2) + np.array([row, column]) * (SIZE // 2)
        rows, columns = np.mgrid[:SIZE, :SIZE]
        blob = np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / 4)
        image = 0.3 * random.standard_normal((SIZE, SIZE)) + (-blob if dark else blob)
        return image[None].astype(np.float32), label


def convolution(channels_in: int, channels: int) -> nn.Module:
    """Halves the size of its feature maps."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU(), nn.MaxPool2d(2)
    )


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def cnn() -> hetero_mpi.LayeredModel:
    """What jobs/cnn.toml names: five layers, which may be on five ranks."""
    return hetero_mpi.LayeredModel(
        layers={
            "first": lambda: convolution(1, 16),
            "second": lambda: convolution(16, 32),
            "third": lambda: convolution(32, 32),
            "hidden": lambda: nn.Sequential(nn.Flatten(), nn.Linear(32 * 4, 64), nn.ReLU()),
            "classes": lambda: nn.Linear(64, CLASSES),
        },
        loss=loss,
        data=lambda: Images(4000, seed=1),
        evaluation=lambda: Images(500, seed=2),
    )
