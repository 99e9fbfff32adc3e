"""One rank's part of the benchmark: seconds of every layer kind as they are in a real step, of the optimizer and of host copies.

Small models are timed as two short stages, the front and the back of the chain, which pass a micro-batch on as neighbours in a
pipeline do: each layer runs after others, on cold caches. A layer that is larger than any cache finds it cold anyway and is
timed in a stage of its own, which needs the least memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.device.memory import is_out_of_memory
from hetero_mpi.errors import UserError
from hetero_mpi.model.group.division import experts_to_share
from hetero_mpi.model.group.link import StageGroup
from hetero_mpi.model.model_cost import shareable_heads
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.planning.types.profile import LayerTimes
from hetero_mpi.profiling.bench import Bench, copy_speeds, host_optimizer_s
from hetero_mpi.profiling.subject import Subject, cold_by_itself, layer_groups, sampled_rows
from hetero_mpi.profiling.timings import Seconds, TimedPart, TimingSamples, layer_times

Pass = Callable[[Sequence[Bench], int, TimingSamples], None]
"""Benches, sequences per micro-batch, where the times go."""
_FEW = 2
"""Repetitions of what planning uses less often: backward with recompute and in two parts, and members of groups."""
_LONG_ENOUGH_S = 1.0
"""So long the repetitions at one token count take at most (one at least, after one that warms up)."""
_WARM_UP_S = 0.5
"""Accelerators raise their clocks for about so long."""
_TOO_LONG_S = 20.0
"""A token count is left out where one repetition would take longer than this. Where the first pass of all does, its times are
taken, and nothing else of this group is measured: a device as slow as that gets layers only for its memory."""


@dataclass(frozen=True)
class DeviceTimes:
    """What one rank measured of itself; seconds, bytes per second, bytes. All of it depends on the device alone."""

    measured: str
    """When."""
    rows: tuple[int, ...]
    """Sequences per micro-batch that were timed."""
    layers: dict[str, LayerTimes]
    forward_overhead_s: float
    backward_overhead_s: float
    activation_bytes: dict[str, float]
    """kind -> bytes kept from forward to backward per token."""
    deferred_bytes: dict[str, float]
    """kind -> bytes kept between both parts of a split backward per token."""
    optimizer_s_per_parameter: float
    copy_latency_s: float
    device_to_host_bytes_per_s: float
    host_to_device_bytes_per_s: float
    host_optimizer_s_per_parameter: float | None = None
    slow_s: float = 0.0
    """The longest first pass, where it was too long to time more; else 0."""
    halved: dict[str, LayerTimes] = field(default_factory=dict)
    """Of a member of a group with half of the heads and of the experts, without sums; empty: not timed."""
    without_experts: dict[str, LayerTimes] = field(default_factory=dict)
    """The same with none of the experts."""
    kept: bool = False
    """From an earlier run?"""


class DeviceBenchmark:
    def __init__(self, subject: Subject, backend: Backend, repeats: int) -> None:
        self.subject, self.backend, self.chain = subject, backend, subject.chain
        self.rows = sampled_rows(subject.micro_batches)
        self.repeats, self.few = repeats, min(repeats, _FEW)
        self.groups = layer_groups(self.chain.kinds, cold_by_itself(subject))
        self._activations: dict[str, float] = {}
        self._deferred: dict[str, float] = {}
        self._slow_s = 0.0

    def run(self, today: str) -> DeviceTimes:
        """Measure everything but members of groups; a few seconds for small models.

        :raises UserError: the device has no memory for a layer with the smallest micro-batch.
        """
        samples, steps = TimingSamples(), []
        with self._shortage_explained():
            for group in self.groups:
                measured, slow = self._measure(group, samples)
                steps += measured
                self.backend.free_unused()
                if self.subject.tuning.full and not slow:
                    self._measure_split(group, samples)
                    self.backend.free_unused()
            latency_s, out, back = copy_speeds(self.backend, self.repeats)
            in_host_memory = host_optimizer_s(self.backend, self.subject.train) if self.subject.tuning.full else None
        parameters = sum(count for count, _ in steps)
        return DeviceTimes(
            measured=today,
            rows=tuple(rows for rows in self.rows if samples.has(rows)),
            layers=self._layer_times(samples),
            forward_overhead_s=samples.overhead_s(TimedPart.FORWARD),
            backward_overhead_s=samples.overhead_s(TimedPart.BACKWARD),
            activation_bytes=self._activations,
            deferred_bytes={kind: self._deferred.get(kind, 0.0) for kind in self._activations},
            optimizer_s_per_parameter=sum(seconds for _, seconds in steps) / max(1, parameters),
            copy_latency_s=latency_s,
            device_to_host_bytes_per_s=out,
            host_to_device_bytes_per_s=back,
            host_optimizer_s_per_parameter=in_host_memory,
            slow_s=self._slow_s,
        )

    def with_member_times(self, times: DeviceTimes) -> DeviceTimes:
        """``times`` with what a member of a group takes, as far as there could be a group. Raises: as ``run``."""
        heads = shareable_heads(self.chain, self.subject.tuning) if self.subject.groups else None
        if heads is None or heads < 2 or self._slow_s:
            return times
        halves, experts = (heads // 2, heads - heads // 2), experts_to_share(language(self.chain))
        if experts is None or experts < 2:
            return replace(times, halved=self._there_and_back(StageGroup(halves, _NobodyElse())))
        some, none = (StageGroup(halves, _NobodyElse(), (own, experts - own)) for own in (experts // 2, 0))
        return replace(times, halved=self._there_and_back(some), without_experts=self._there_and_back(none))

    def _there_and_back(self, member_of: StageGroup) -> dict[str, LayerTimes]:
        """Seconds of forward and backward of a group's first member."""
        samples = TimingSamples()
        with self._shortage_explained():
            for group in self.groups:
                benches = [Bench(self.subject, self.backend, *layers, group=member_of) for layers in group]
                self._warm_up(benches)
                self._count_by_count(self.few, samples, benches, self._pass)
                del benches
                self.backend.free_unused()
        return self._layer_times(samples)

    @contextlib.contextmanager
    def _shortage_explained(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"{self.backend.description()} has no memory left for one layer with {self.rows[0]} sequences of "
                f"{self.subject.sequence_length} tokens; lower [train] micro_batch or [data] sequence_length, or leave "
                f"this rank out"
            ) from error

    def _measure(
        self, group: Sequence[tuple[int, int]], samples: TimingSamples
    ) -> tuple[list[tuple[int, float]], bool]:
        """Fill ``samples``; returns (parameters, seconds of an optimizer step) of each stage, and whether a pass takes too long."""
        benches = [Bench(self.subject, self.backend, *layers) for layers in group]
        first, first_s = self._first_pass(benches)
        if first_s > _TOO_LONG_S and self.backend.name != "cpu":  # a GPU's kernels may have been made meanwhile
            first, first_s = self._first_pass(benches)
        slow = first_s > _TOO_LONG_S
        if slow:
            self._slow_s = max(self._slow_s, first_s)
            samples.update(first)
        else:
            self._warm_up(benches)
            self._count_by_count(self.repeats, samples, benches, self._pass)
            for bench in benches:
                bench.recompute(True)
            self._count_by_count(self.few, samples, benches, partial(self._pass, part=TimedPart.RECOMPUTE))
            for bench in benches:
                bench.recompute(False)
        return [bench.optimizer_step(self.rows[0], once=slow) for bench in benches], slow

    def _first_pass(self, benches: Sequence[Bench]) -> tuple[TimingSamples, float]:
        """The smallest micro-batch once, its activations noted: its times, and the seconds of all."""
        first, begin = TimingSamples(), time.perf_counter()
        for bench in benches:
            self._note(self._activations, bench.activation_bytes(partial(self._pass, [bench], self.rows[0], first)))
        return first, time.perf_counter() - begin

    def _warm_up(self, benches: Sequence[Bench]) -> None:
        begin = time.perf_counter()
        while self.backend.name != "cpu" and time.perf_counter() - begin < _WARM_UP_S:
            self._pass(benches, self.rows[0], TimingSamples())

    def _measure_split(self, group: Sequence[tuple[int, int]], samples: TimingSamples) -> None:
        """The same for backward in two parts, which every stage of a pipeline but the first may do."""
        benches = [Bench(self.subject, self.backend, *layers, split=True) for layers in group if layers[0] > 0]
        self._count_by_count(self.few, samples, benches, self._split_pass)
        for bench in benches:
            self._note(self._deferred, bench.deferred_bytes(self.rows[0]))

    def _count_by_count(self, repeats: int, samples: TimingSamples, benches: Sequence[Bench], run: Pass) -> None:
        """``run`` the benches at every token count: once to warm up, then ``repeats`` times that count, unless it takes long.

        A count for which the device has no memory is left out, and all larger ones.
        """
        warm_s, short = 0.0, False
        for place, rows in enumerate(self.rows):
            if place and warm_s * rows / self.rows[place - 1] > _TOO_LONG_S:
                return
            try:
                begin = time.perf_counter()
                run(benches, rows, TimingSamples())
                warm_s = time.perf_counter() - begin
                for repetition in range(repeats):
                    if repetition and time.perf_counter() - begin > _LONG_ENOUGH_S:
                        break
                    run(benches, rows, samples)
            except (RuntimeError, MemoryError) as error:
                if place == 0 or not is_out_of_memory(error):
                    raise
                short = True
            if short:  # here nothing refers to what the failed pass had got any more
                for bench in benches:
                    bench.stage.forget()
                self.backend.free_unused()
                return

    def _pass(
        self, benches: Sequence[Bench], rows: int, samples: TimingSamples, part: TimedPart = TimedPart.BACKWARD
    ) -> None:
        """A micro-batch through all stages and back, as through a pipeline."""
        for bench in benches:
            layers, outside = bench.forward(rows)
            if part is TimedPart.BACKWARD:
                self._add(samples, TimedPart.FORWARD, rows, layers)
                samples.add(TimedPart.FORWARD, bench.stage.first, rows, outside)
        for bench in reversed(benches):
            layers, outside = bench.backward(rows)
            if part is TimedPart.RECOMPUTE:  # of blocks only
                layers = {layer: seconds for layer, seconds in layers.items() if 0 < layer < self.chain.layer_count - 1}
            self._add(samples, part, rows, layers)
            samples.add(part, bench.stage.first, rows, outside)

    def _split_pass(self, benches: Sequence[Bench], rows: int, samples: TimingSamples) -> None:
        """Two micro-batches in the order of a pipeline: F0 I0 F1 I1 W0 W1."""
        for bench in benches:
            for index in (0, 1):
                bench.forward(rows, index)
                layers, _ = bench.backward_input(rows, index)
                self._add(samples, TimedPart.INPUT, rows, layers)
            for index in (0, 1):
                self._add(samples, TimedPart.WEIGHT, rows, bench.backward_weights(index))

    def _add(self, samples: TimingSamples, part: TimedPart, rows: int, layers: Seconds) -> None:
        for layer, seconds in layers.items():
            samples.add(part, self.chain.kinds[layer], rows, seconds)

    def _note(self, largest: dict[str, float], sizes: dict[int, int]) -> None:
        """Keep the largest bytes per token of every kind; ``sizes``: bytes of layers with the smallest micro-batch."""
        for layer, size in sizes.items():
            kind = self.chain.kinds[layer]
            largest[kind] = max(largest.get(kind, 0.0), size / (self.rows[0] * self.subject.sequence_length))

    def _layer_times(self, samples: TimingSamples) -> dict[str, LayerTimes]:
        kinds = dict.fromkeys(self.chain.kinds)
        return {kind: layer_times(samples, kind, self.subject.sequence_length) for kind in kinds}


class _NobodyElse:
    """The link of a group's first member, which trains what it holds, to a second one that is not there: sums are its own."""

    member, size = 0, 2

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor
