"""A stage for benchmarking: built as in training, with random weights and inputs, and timed layer by layer."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from hetero_mpi.device.backend import DTYPES, Backend
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.group.exchanges import StageGroup
from hetero_mpi.model.group.layers import DividedLayers
from hetero_mpi.model.layer.compiled import compiler_failure
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.layer.quantize import is_empty, unpack_experts
from hetero_mpi.model.library_optimizers import LibraryOptimizers
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.stage import MicroBatch, Stage, StageSpec
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.planning.types.moments import OF_OPTIMIZER
from hetero_mpi.planning.types.sizes import DTYPE_BYTES, in_slices
from hetero_mpi.profiling.benchmark_spec import CACHE_BYTES, BenchmarkSpec
from hetero_mpi.profiling.timings import LayerClock, Seconds

_OPTIMIZER_STEPS = 4
_COMPILE_ROUND_COUNT = 8


class ProfilingStart:
    """Fills layers with weights that are cheap to create and numerically harmless; timings do not depend on them."""

    def fill(self, chain: LayerChain, model: nn.Module, layer: int) -> None:
        chain.vacate(model, layer)
        for root in chain.module_names(layer):
            for module in model.get_submodule(root).modules():
                for parameter in module.parameters(recurse=False):
                    with torch.no_grad():
                        parameter.uniform_(-0.02, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)


class Bench:
    """A stage of the layers ``[first, last)`` with its optimizer, which accumulates narrow gradients during backward."""

    def __init__(
        self,
        subject: BenchmarkSpec,
        backend: Backend,
        first: int,
        last: int,
        split: bool = False,
        group: StageGroup | None = None,
    ) -> None:
        train, chain = subject.train, subject.chain
        self.subject, self.backend = subject, backend
        tuning = replace(subject.tuning, still=frozenset())  # blocks of a kind are timed by one of them, frozen or not
        spec = StageSpec(chain, first, last, backend, train.dtype, 0, tuning, False, split, compiled=subject.compiled)
        divided = DividedLayers(language(chain), tuning, group) if group is not None else None
        self.stage = Stage(spec, ProfilingStart(), divided=divided)
        self.clock = LayerClock(self.stage)
        self.optimizer = Optimizer(self.stage, train)

    def forward(self, rows: int, index: int = 0) -> tuple[Seconds, float]:
        """Time the forward of micro-batch ``index`` with ``rows`` sequences: (seconds by layer, seconds outside layers)."""
        x, targets, _ = self._inputs(rows)
        position = MicroBatch(index, 0, 0, rows * self.subject.sequence_length)
        return self.clock.forward(lambda: self.stage.forward(position, x, targets))

    def backward(self, rows: int) -> tuple[Seconds, float]:
        """Time the backward of micro-batch 0; returns the same as ``forward``."""
        dy = self._inputs(rows)[2]
        return self.clock.backward(lambda: self.stage.backward(0, dy))

    def backward_input(self, rows: int, index: int) -> tuple[Seconds, float]:
        """Time the input part of a split backward; returns the same as ``forward``."""
        dy = self._inputs(rows)[2]
        return self.clock.backward(lambda: self.stage.backward_input(index, dy))

    def backward_weights(self, index: int) -> Seconds:
        """Time the weight part of a split backward and return the seconds of every layer."""
        return self.clock.weights(lambda finished: self.stage.backward_weights(index, finished))

    def pass_s(self, rows: int) -> float:
        """Seconds for the forward and backward of ``rows`` sequences."""
        return self._seconds(lambda: (self.forward(rows), self.backward(rows)))

    def recompute(self, enabled: bool) -> None:
        self.subject.chain.recompute(self.stage.model, enabled)

    def activation_bytes(self, rows: int, run: Callable[[], object]) -> dict[int, int]:
        """Map each layer to the bytes that autograd saves in ``run``, a forward of ``rows`` sequences, without parameters.

        A shared storage counts for the first layer that saves it. Values that packed experts and sliced logits recompute count
        as saved.
        """
        storages: dict[int, tuple[int, int]] = {}
        """Storage address -> (layer, bytes)."""
        model = self.stage.model
        parameter_addresses = {p.untyped_storage().data_ptr() for p in model.parameters() if p.device.type != "meta"}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameter_addresses:
                storages.setdefault(storage.data_ptr(), (self.clock.current, storage.nbytes()))
            return tensor

        if self.subject.tuning.nf4:
            unpack_experts(model, repeat=False, draws=False)
        self.clock.current = self.stage.first
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run()
        if self.subject.tuning.nf4:
            self.recompute(False)
        layer_bytes = {}
        for layer in range(self.stage.first, self.stage.last):
            modules = map(model.get_submodule, self.stage.chain.module_names(layer))
            unpacked = sum(p.nbytes for module in modules for p in module.parameters() if is_empty(p))
            layer_bytes[layer] = max(0, sum(size for holder, size in storages.values() if holder == layer) - unpacked)
        logits = (self.subject.chain.logits or 0) * DTYPE_BYTES[self.subject.train.dtype]
        tokens = rows * self.subject.sequence_length
        if self.stage.is_last and in_slices(logits, tokens):
            layer_bytes[self.stage.last - 1] += logits * tokens
        return layer_bytes

    def deferred_bytes(self, rows: int) -> dict[int, int]:
        """Map each layer to the bytes kept from the input part of a split backward until the weight part."""
        deferred = self.stage.deferred
        assert deferred is not None
        self.forward(rows)
        self.backward_input(rows, 0)
        sizes = deferred.bytes_by_layer()
        self.backward_weights(0)
        return sizes

    def optimizer_step(self, rows: int, single_step: bool) -> tuple[int, float]:
        """Time norm, clipping and optimizer step, on cold caches unless ``single_step``; return (parameters, seconds)."""
        parameters = sum(target.numel() for target in self.optimizer.targets.values())
        cache_filler = torch.zeros(CACHE_BYTES, dtype=torch.uint8) if self.backend.name == "cpu" else None
        seconds = []
        for step in range((1 if single_step else _OPTIMIZER_STEPS) if parameters else 0):
            if cache_filler is not None:
                cache_filler.add_(1)
            if not single_step:
                self.forward(rows)
                self.backward(rows)
            seconds.append(self._seconds(lambda step=step: self._step(step)))  # type: ignore[misc]
        return parameters, statistics.median(seconds[1:] or seconds or [0.0])

    def _step(self, step: int) -> None:
        self.optimizer.squared_norms()
        self.optimizer.step(min(step, self.subject.train.steps - 1), 0.5)

    def _seconds(self, action: Callable[[], object]) -> float:
        self.backend.synchronize()
        start = self.backend.mark()
        action()
        return self.backend.mark().seconds_since(start)

    def _inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        stage, length = self.stage, self.subject.sequence_length
        x, *rest = stage.chain.example(stage.first, stage.last, rows, length, DTYPES[self.subject.train.dtype])
        targets, dy = (None if tensor is None else tensor.to(self.backend.device) for tensor in rest)
        return x.to(self.backend.device), targets, dy


class CompileTrial(NamedTuple):
    """The reason why a block cannot be compiled (empty if it can), and median seconds (0 if not compared with eager)."""

    failure: str = ""
    compiled_s: float = 0.0
    eager_s: float = 0.0
    faster: bool = False


def try_compiled_block(subject: BenchmarkSpec, backend: Backend, compares: bool) -> CompileTrial:
    """Compile the first block for one sequence and for several; if ``compares``, time it against the eager block."""
    if subject.chain.routers is not None:
        return CompileTrial("the router loss reads values inside the blocks")
    rows = subject.micro_batches[:2]
    try:
        compiled = Bench(replace(subject, compiled=True), backend, 1, 2)
        failures = [compiled.stage.compiled[0].failure for count in rows if compiled.pass_s(count)]
    except Exception as error:  # of any kind: a compiler may be missing, old or broken
        return CompileTrial(compiler_failure(error))
    if failures[-1] or not compares:
        return CompileTrial(failures[-1])
    benches = compiled, Bench(replace(subject, compiled=False), backend, 1, 2)
    rounds = [[bench.pass_s(rows[-1]) for bench in benches] for _ in range(1 + _COMPILE_ROUND_COUNT)][1:]
    (_, compiled_s, slow_s), (fast_s, eager_s, _) = (statistics.quantiles(times) for times in zip(*rounds, strict=True))
    return CompileTrial("", compiled_s, eager_s, slow_s < fast_s)


def host_optimizer_s(backend: Backend, train: TrainTable) -> float | None:
    """Seconds per parameter of an offloaded stage's optimizer step in host memory; None on CPU ranks."""
    if backend.name == "cpu":
        return None
    count, seconds = 1 << 23, []
    master = torch.nn.Parameter(torch.zeros(count >> 11, 1 << 11))
    rounded = torch.zeros_like(master, dtype=DTYPES[train.dtype])
    library = LibraryOptimizers(train, True, [(master, True, OF_OPTIMIZER[train.optimizer][-1], 1.0)])
    master.grad = torch.ones_like(master)
    for _ in range(_OPTIMIZER_STEPS):
        start = time.thread_time()  # as CPU ranks are timed
        torch.linalg.vector_norm(master.grad)
        master.grad.mul_(0.5)
        library.step(train.learning_rate)
        rounded.copy_(master.detach())
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds[1:]) / count


def copy_speeds(backend: Backend, repeats: int) -> tuple[float, float, float]:
    """Measure (latency_s, device_to_host_bytes_per_s, host_to_device_bytes_per_s); CPU ranks copy nothing."""
    if backend.name == "cpu":
        return 0.0, math.inf, math.inf
    small, large = 4096, 16 << 20
    times: dict[int, tuple[float, float]] = {}
    for size in (small, large):
        device = torch.zeros(size, dtype=torch.uint8, device=backend.device)
        host = backend.host_buffer((size,), torch.uint8)
        out, back = [], []
        for _ in range(repeats + 1):
            backend.synchronize()
            start = time.perf_counter()
            host.copy_(device)
            backend.synchronize()
            middle = time.perf_counter()
            backend.from_host(host)
            backend.synchronize()
            out.append(middle - start)
            back.append(time.perf_counter() - middle)
        times[size] = statistics.median(out[1:]), statistics.median(back[1:])
    out_speed, back_speed = ((large - small) / max(times[large][i] - times[small][i], 1e-9) for i in (0, 1))
    return max(times[small]), out_speed, back_speed
