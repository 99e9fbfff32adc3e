"""What the checks of stand-in GPUs share; a pytest plugin of their process, which has the stand-in for its only GPUs."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # bitsandbytes' plain kernels would be compiled anew for every shape
from hetero_mpi.device.accelerators import open_backend
from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.tuning import full_training
from hetero_mpi.profiling.benchmark_spec import BenchmarkSpec, DeviceTimes
from hetero_mpi.profiling.device import DeviceBenchmark
from tests.stand_in_gpu import backend, module

CHAIN = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 512,
}
LARGE = ((5 << 20) + 4) // 4
"""Numbers of a block that no power of two fits."""


backend.install()


@pytest.fixture
def standin() -> Any:
    """The stand-in's C++ side."""
    gc.collect()  # what tests before have left
    module.device.set_delays(0.0, 0.0)
    return module.device


@pytest.fixture
def gpu(standin: Any) -> Iterator[Backend]:
    """Its second device, opened as a rank opens it."""
    yield open_backend("auto", 1)
    standin.maybe_set_device(0)
    standin.set_limit(1, 1 << 60, "")


def chain(**changes: Any) -> TransformersChain:
    return TransformersChain(read_config({**CHAIN, **changes}))


def subject(micro_batches: tuple[int, ...] = (1, 2)) -> BenchmarkSpec:
    model = chain()
    return BenchmarkSpec(
        model, full_training(model), TrainTable(steps=1, global_batch=8, dtype="bf16"), 16, micro_batches, 1.0, 1, None
    )


def measured(gpu: Backend, micro_batches: tuple[int, ...] = (1, 2)) -> DeviceTimes:
    return DeviceBenchmark(subject(micro_batches), gpu, 1).run("now")


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Python's collector comes by only where it is called."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
