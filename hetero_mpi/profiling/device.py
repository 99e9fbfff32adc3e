"""One rank's part of the benchmark: seconds of forward and backward per layer kind, of the optimizer and of host copies.

A kind is timed as a stage that holds one item of it. What a stage costs without any item (masks, rotary tables, the loop over
passed-through layers) is timed too and taken off, since a real stage pays it once and not per layer.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hetero_mpi.device.backend import DTYPES, Backend
from hetero_mpi.job import TrainTable
from hetero_mpi.model.chain import Chain
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.model.weights import materialize
from hetero_mpi.planning.profile import Curve, LayerTimes

_LONG_ENOUGH_S = 1.5
"""A measurement that took this long in all stops repeating (three repetitions at least)."""
_COPY_BYTES = (4096, 16 << 20)


@dataclass(frozen=True)
class DeviceTimes:
    """What one rank measured of itself; seconds, bytes per second, bytes."""

    layers: dict[str, LayerTimes]
    forward_overhead_s: float
    backward_overhead_s: float
    activation_bytes: dict[str, float]
    """kind -> bytes kept from forward to backward per token."""
    optimizer_fixed_s: float
    optimizer_s_per_parameter: float
    copy_latency_s: float
    device_to_host_bytes_per_s: float
    host_to_device_bytes_per_s: float


class ProfilingStart:
    """Weights that are quick to make and numerically harmless; timing does not depend on their values."""

    def fill(self, chain: Chain, model: PreTrainedModel, item: int) -> None:
        """As ``weights.SeededStart.fill``."""
        for root in chain.module_names(item):
            for module in model.get_submodule(root).modules():
                materialize(module)
                for parameter in module.parameters(recurse=False):
                    with torch.no_grad():
                        parameter.uniform_(-0.02, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)


class DeviceBenchmark:
    """Times the kinds of a model on one backend.

    Args:
        chain, tuning, backend, train: the model, what of it is trained, where it runs, and the job's optimizer settings.
        sequence_length: tokens per sequence.
        micro_batches: sequences per micro-batch to time, increasing.
        repeats: timed repetitions; the median counts.
        line_up: called before every measurement; a barrier makes all ranks measure at once, as they will compute at once.
    """

    def __init__(
        self,
        chain: Chain,
        tuning: Tuning,
        backend: Backend,
        train: TrainTable,
        sequence_length: int,
        micro_batches: Sequence[int],
        repeats: int,
        line_up: Callable[[], None],
    ) -> None:
        self.chain, self.tuning, self.backend, self.train = chain, tuning, backend, train
        self.sequence_length, self.micro_batches = sequence_length, tuple(micro_batches)
        self.repeats, self.line_up = repeats, line_up

    def run(self) -> DeviceTimes:
        """Measure everything; a few seconds for small models."""
        empty = self._stage(1, 1)
        rows = self.micro_batches[0]
        overhead = [statistics.median(times) for times in self._time(empty, rows)]
        layers, activations = {}, {}
        samples: list[tuple[int, float]] = []
        for kind in dict.fromkeys(self.chain.kinds):
            item = self.chain.kinds.index(kind)
            stage = self._stage(item, item + 1)
            layers[kind] = self._layer_times(stage, overhead)
            activations[kind] = self._activation_bytes(stage)
            samples.append(self._optimizer_seconds(stage))
            del stage
        fixed, slope = _line(samples)
        return DeviceTimes(layers, overhead[0], overhead[1], activations, fixed, slope, *self._copy_speeds())

    def _stage(self, first: int, last: int) -> Stage:
        return Stage(self.chain, first, last, self.backend, self.train.dtype, ProfilingStart(), 0, self.tuning)

    def _inputs(self, stage: Stage, rows: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(x, targets, dy) of a micro-batch of ``rows`` sequences."""
        shape, device = (rows, self.sequence_length), self.backend.device
        tokens = torch.arange(rows * self.sequence_length, device=device).view(shape) % self.chain.config.vocab_size
        hidden = torch.full(
            (*shape, self.chain.config.hidden_size), 0.01, dtype=DTYPES[self.train.dtype], device=device
        )
        hidden += torch.linspace(0, 1, hidden.shape[-1], dtype=hidden.dtype, device=device)
        return (
            tokens if stage.is_first else hidden,
            tokens if stage.is_last else None,
            None if stage.is_last else torch.full_like(hidden, 1e-3),
        )

    def _time(self, stage: Stage, rows: int) -> tuple[list[float], list[float]]:
        """Seconds of each repetition of forward and of backward; the first repetition warms up and is not counted."""
        x, targets, dy = self._inputs(stage, rows)
        position = MicroBatch(0, 0, 0, rows * self.sequence_length)
        forward, backward = [], []
        self.line_up()
        begin = time.perf_counter()
        for repetition in range(self.repeats + 1):
            start = time.perf_counter()
            stage.forward(position, x, targets)
            self.backend.synchronize()
            middle = time.perf_counter()
            stage.backward(0, dy)
            self.backend.synchronize()
            if repetition > 0:
                forward.append(middle - start)
                backward.append(time.perf_counter() - middle)
            if repetition >= 3 and time.perf_counter() - begin > _LONG_ENOUGH_S:
                break
        return forward, backward

    def _layer_times(self, stage: Stage, overhead: Sequence[float]) -> LayerTimes:
        measured = [self._time(stage, rows) for rows in self.micro_batches]
        tokens = tuple(rows * self.sequence_length for rows in self.micro_batches)
        curves = []
        for direction in (0, 1):
            medians = [statistics.median(times[direction]) for times in measured]
            # Never below a tenth of what was measured: timing noise must not make a layer free.
            seconds = tuple(max(median - overhead[direction], 0.1 * median) for median in medians)
            curves.append(Curve(tokens, seconds, tuple(_spread(times[direction]) for times in measured)))
        return LayerTimes(*curves)

    def _activation_bytes(self, stage: Stage) -> float:
        """Bytes autograd keeps between forward and backward, per token; parameters are not counted, every storage once."""
        kept: dict[int, int] = {}
        own = {
            parameter.untyped_storage().data_ptr()
            for parameter in stage.model.parameters()
            if parameter.device.type != "meta"
        }

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        rows = self.micro_batches[0]
        x, targets, dy = self._inputs(stage, rows)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            stage.forward(MicroBatch(0, 0, 0, 1), x, targets)
        stage.backward(0, dy)
        return sum(kept.values()) / (rows * self.sequence_length)

    def _optimizer_seconds(self, stage: Stage) -> tuple[int, float]:
        """(parameters, seconds) of norm, clipping and AdamW; the gradients are those of the timed backwards."""
        optimizer = Optimizer(stage, self.train)
        parameters = sum(target.numel() for target in optimizer.targets.values())
        seconds = []
        for step in range(4):
            self.backend.synchronize()
            start = time.perf_counter()
            optimizer.squared_norms()
            optimizer.step(min(step, self.train.steps - 1), 0.5)
            self.backend.synchronize()
            seconds.append(time.perf_counter() - start)
        return parameters, statistics.median(seconds[1:])

    def _copy_speeds(self) -> tuple[float, float, float]:
        """(latency_s, device_to_host_bytes_per_s, host_to_device_bytes_per_s); free on CPU ranks, which copy nothing."""
        if self.backend.name == "cpu":
            return 0.0, math.inf, math.inf
        out, back = [], []
        for size in _COPY_BYTES:
            device = torch.zeros(size, dtype=torch.uint8, device=self.backend.device)
            host = self.backend.to_host(device)
            out.append(self._median_s(lambda device=device: self.backend.to_host(device)))  # type: ignore[misc]
            back.append(self._median_s(lambda host=host: self.backend.from_host(host)))  # type: ignore[misc]
        span = _COPY_BYTES[1] - _COPY_BYTES[0]
        speeds = [span / max(times[1] - times[0], 1e-9) for times in (out, back)]
        return max(out[0], back[0]), speeds[0], speeds[1]

    def _median_s(self, action: Callable[[], object]) -> float:
        seconds = []
        for _ in range(self.repeats + 1):
            self.backend.synchronize()
            start = time.perf_counter()
            action()
            self.backend.synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:])


def _spread(seconds: list[float]) -> float:
    """(p75 - p25) / median."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def _line(samples: list[tuple[int, float]]) -> tuple[float, float]:
    """(fixed, per unit) of a line through (amount, seconds), neither negative; through the origin when undetermined."""
    amounts, seconds = [float(a) for a, _ in samples], [s for _, s in samples]
    mean_a, mean_s = statistics.fmean(amounts), statistics.fmean(seconds)
    variance = sum((a - mean_a) ** 2 for a in amounts)
    slope = (
        sum((a - mean_a) * (s - mean_s) for a, s in zip(amounts, seconds, strict=True)) / variance if variance else 0.0
    )
    fixed = mean_s - slope * mean_a
    if slope <= 0 or fixed < 0:
        return 0.0, sum(seconds) / sum(amounts)
    return fixed, slope
