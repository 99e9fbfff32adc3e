"""Models made of layers for tests/runtime/test_factory.py: one with everything a layer may have, and ones that break a rule."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import hetero_mpi

SHAPE, CLASSES = (2, 8, 8), 3


class Images:
    """Made-up images of three classes. (2, 8, 8) fp64, a whole number."""

    def __init__(self, count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.labels = random.integers(CLASSES, size=count)
        self.images = random.standard_normal((count, *SHAPE)) + self.labels[:, None, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return self.images[number], int(self.labels[number])


class Scaled(nn.Module):
    """A layer with a buffer that is saved, one that is not, a frozen parameter and start values of its own."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("hidden", torch.tensor([2.0]), persistent=False)
        self.frozen = nn.Parameter(torch.full((64,), 0.25), requires_grad=False)
        self.linear = nn.Linear(64, 16)
        nn.init.normal_(self.linear.weight, std=0.3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * getattr(self, "features", 1.0)
        return self.dropout(torch.tanh(self.linear(x * self.scale * self.hidden + self.frozen)))


def layers(dropout: float = 0.0) -> dict[str, Callable[[], nn.Module]]:
    return {
        "stem": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)),
        "pool": lambda: nn.MaxPool2d(2),
        "flat": lambda: nn.Flatten(),
        "scaled": lambda: Scaled(dropout),
        "hidden": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
        "out": lambda: nn.Linear(16, CLASSES),
    }


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def _model(chain: Any, loss: Any = loss) -> hetero_mpi.LayeredModel:
    return hetero_mpi.LayeredModel(chain, loss, data=lambda: Images(40, 1), evaluation=lambda: Images(10, 2))


def plain() -> hetero_mpi.LayeredModel:
    return _model(layers())


def dropping() -> hetero_mpi.LayeredModel:
    return _model(layers(dropout=0.2))


def existing() -> hetero_mpi.LayeredModel:
    """A model that is there already; what a rank draws depends on the rank, and rank 0's is what counts."""
    torch.manual_seed(int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))))
    net = nn.Sequential(OrderedDict((name, build()) for name, build in layers().items()))
    scaled = net.get_submodule("scaled")
    scaled.register_buffer("features", torch.randn(64))  # drawn too, and in no checkpoint
    return _model(net.eval())


def other_buffers() -> hetero_mpi.LayeredModel:
    """The same with another buffer in every process."""
    model = existing()
    model.modules()["scaled"].get_buffer("features").copy_(
        torch.from_numpy(np.random.default_rng(os.getpid()).random(64))
    )
    return model


def outside() -> hetero_mpi.LayeredModel:
    net = [build() for build in layers().values()]
    return _model([lambda layer=layer: layer for layer in net])


def copied() -> hetero_mpi.LayeredModel:
    torch.seed()
    net = [build() for build in layers().values()]
    return _model([lambda layer=layer: copy.deepcopy(layer) for layer in net])


def drawn() -> hetero_mpi.LayeredModel:
    def hidden() -> nn.Module:
        layer = nn.Linear(16, 16)
        layer.weight.data = torch.from_numpy(np.random.default_rng().standard_normal((16, 16))).float()
        return layer

    return _model({**layers(), "hidden": hidden})


def shared() -> hetero_mpi.LayeredModel:
    """Two entries of ``layers`` are the same layer."""
    layer = nn.Linear(16, 16)
    return _model({**layers(), "hidden": lambda: layer, "again": lambda: layer, "out": layers()["out"]})


def shared_inside() -> hetero_mpi.LayeredModel:
    """Two layers have the same weight, of which one keeps the transposed view."""
    weight = nn.Parameter(torch.ones(16, 16))

    def using(tensor: torch.Tensor) -> nn.Module:
        layer = nn.Linear(16, 16)
        layer.weight = nn.Parameter(tensor)
        return nn.Sequential(layer, nn.ReLU())

    first, last = lambda: using(weight.data), lambda: using(weight.data.t())
    return _model({**layers(), "hidden": first, "again": last, "out": layers()["out"]})


def shared_existing() -> hetero_mpi.LayeredModel:
    chain = OrderedDict((name, build()) for name, build in layers().items())
    chain["again"] = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    chain["again"][0].weight = chain["hidden"][0].weight
    chain.move_to_end("out")
    return _model(nn.Sequential(chain))


def nothing() -> None:
    pass


def fails() -> hetero_mpi.LayeredModel:
    raise RuntimeError("no such luck")


def batch_norm() -> hetero_mpi.LayeredModel:
    return _model({**layers(), "pool": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.MaxPool2d(2))})


def in_place() -> hetero_mpi.LayeredModel:
    return _model({**layers(), "pool": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))})


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def looks_around() -> hetero_mpi.LayeredModel:
    return _model({**layers(), "flat": lambda: nn.Sequential(Centred(), nn.Flatten())})


def unequal() -> hetero_mpi.LayeredModel:
    samples = [(np.zeros(8 + number // 39, np.float32), 0) for number in range(40)]
    return hetero_mpi.LayeredModel(layers(), loss, data=lambda: samples)


def not_finite() -> hetero_mpi.LayeredModel:
    return hetero_mpi.LayeredModel(layers(), loss, data=lambda: [(np.full(8, np.nan, np.float32), 0)] * 40)


def mean_loss() -> hetero_mpi.LayeredModel:
    return _model(layers(), nn.functional.cross_entropy)


def built_already() -> hetero_mpi.LayeredModel:
    return _model([nn.Flatten(), nn.Linear(128, CLASSES)])


def wrong_shape() -> hetero_mpi.LayeredModel:
    return _model({**layers(), "hidden": lambda: nn.Linear(17, 16)})
