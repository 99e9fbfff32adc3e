"""The benchmark of one rank: times of every layer kind under training conditions, of the optimizer and of host copies.

Small models are timed as two short stages, the front and the back of the chain, so that each layer runs after others on cold
caches. Layers larger than the caches are timed in separate stages, which need the least memory.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.device.shortage import is_out_of_memory
from hetero_mpi.model.group.division import experts_to_share
from hetero_mpi.model.group.exchanges import StageGroup
from hetero_mpi.model.model_cost import shareable_heads
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.planning.types.profile import LayerTimes
from hetero_mpi.profiling.bench import Bench, copy_speeds, host_optimizer_s
from hetero_mpi.profiling.benchmark_spec import (
    BenchmarkSpec,
    DeviceTimes,
    Group,
    exceeds_caches,
    fits_caches,
    layer_groups,
    sampled_rows,
)
from hetero_mpi.profiling.timings import (
    MAX_PASS_S,
    Seconds,
    TimedPart,
    TimedVariant,
    TimingRounds,
    TimingSamples,
    layer_times,
)
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError

Pass = Callable[[Sequence[Bench], int, TimingSamples], None]
"""A function that times one micro-batch; its arguments are the benches, sequences per micro-batch, and samples to fill."""
_MAX_SECONDARY_REPEATS = 2
"""Maximum repetitions for recomputation, split backward and tensor-parallel shards."""
_WARM_UP_S = 0.5
"""Time that an accelerator takes to raise its clock rate."""
_MAX_FIRST_PASS_S = 20.0
"""Maximum duration of the first pass; if a device is slower, nothing else of the group is measured."""


class DeviceBenchmark:
    def __init__(self, subject: BenchmarkSpec, backend: Backend, repeats: int) -> None:
        self.subject, self.backend, self.chain = subject, backend, subject.chain
        self.rows = sampled_rows(subject.micro_batches)
        self.repeats, self.few = repeats, min(repeats, _MAX_SECONDARY_REPEATS)
        self.groups = layer_groups(self.chain.kinds, exceeds_caches(subject))
        self._activations: dict[str, float] = {}
        self._deferred: dict[str, float] = {}
        self._slow_s = 0.0
        self._warms_up = backend.name != "cpu" or subject.compiled

    def run(self, today: str, members: bool = False) -> DeviceTimes:
        """Run the benchmark; ``members`` also times tensor-parallel shards.

        Raises:
            UserError: if the device is out of memory for a layer with the smallest micro-batch.
        """
        full_stages, half_members, expertless_members = TimingSamples(), TimingSamples(), TimingSamples()
        of_members = dict(zip(self._members(), (half_members, expertless_members), strict=False)) if members else {}
        steps = []
        with self._explain_out_of_memory():
            for group in self.groups:
                steps += self._measure(group, full_stages, of_members)
                self.backend.free_unused()
            latency_s, out, back = copy_speeds(self.backend, self.repeats)
            host_optimizer = host_optimizer_s(self.backend, self.subject.train) if self.subject.tuning.full else None
            self.backend.free_unused()
        parameters = sum(count for count, _ in steps)
        return DeviceTimes(
            measured=today,
            rows=tuple(rows for rows in self.rows if full_stages.has(rows)),
            layers=self._layer_times(full_stages),
            forward_overhead_s=full_stages.overhead_s(TimedPart.FORWARD),
            backward_overhead_s=full_stages.overhead_s(TimedPart.BACKWARD),
            activation_bytes=self._activations,
            deferred_bytes={kind: self._deferred.get(kind, 0.0) for kind in self._activations},
            optimizer_s_per_parameter=sum(seconds for _, seconds in steps) / max(1, parameters),
            copy_latency_s=latency_s,
            device_to_host_bytes_per_s=out,
            host_to_device_bytes_per_s=back,
            host_optimizer_s_per_parameter=host_optimizer,
            slow_s=self._slow_s,
            halved={} if self._slow_s else self._layer_times(half_members),
            without_experts={} if self._slow_s else self._layer_times(expertless_members),
        )

    def _members(self) -> list[StageGroup]:
        """Return the tensor-parallel shards to time: half the heads and experts, and half the heads without experts."""
        heads = shareable_heads(self.chain, self.subject.tuning) if self.subject.groups else None
        if heads is None or heads < 2:
            return []
        halves, experts = (heads // 2, heads - heads // 2), experts_to_share(language(self.chain))
        if experts is None or experts < 2:
            return [StageGroup(halves, _AbsentPeer())]
        return [StageGroup(halves, _AbsentPeer(), (owned, experts - owned)) for owned in (experts // 2, 0)]

    @contextlib.contextmanager
    def _explain_out_of_memory(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                "memory.exceeded",
                f"{self.backend.description()} ran out of memory in one layer with {self.rows[0]} "
                f"{units.rows_of(self.subject.sequence_length)}; lower [train] micro_batch or [data] sequence_length, or exclude "
                f"this rank",
            ) from error

    def _measure(
        self, group: Group, samples: TimingSamples, of_members: Mapping[StageGroup, TimingSamples]
    ) -> list[tuple[int, float]]:
        """Fill the samples; return (parameters, seconds of an optimizer step) for each stage."""
        benches = [Bench(self.subject, self.backend, *layers) for layers in group]
        first, first_s = self._first_pass(benches)
        if first_s > _MAX_FIRST_PASS_S and self._warms_up:  # the first pass may have compiled kernels
            first, first_s = self._first_pass(benches)
        if first_s > _MAX_FIRST_PASS_S:
            self._slow_s = max(self._slow_s, first_s)
            samples.update(first)
            return [bench.optimizer_step(self.rows[0], single_step=True) for bench in benches]
        self._warm_up(benches)
        self._allocate_host_memory(benches, first_s)
        arguments = group, samples, of_members
        if fits_caches(self.subject, group):
            self._time(
                [
                    *self._stage_variants(benches, samples),
                    *(way for make in self._secondary_variants(*arguments) for way in make()),
                ]
            )
        else:  # one after the other: together they might not fit
            self._time(self._stage_variants(benches, samples))
        steps = [bench.optimizer_step(self.rows[0], single_step=False) for bench in benches]
        del benches
        if not fits_caches(self.subject, group):
            for make in self._secondary_variants(*arguments):
                self.backend.free_unused()
                self._time(make())
        return steps

    def _allocate_host_memory(self, benches: Sequence[Bench], first_s: float) -> None:
        """Run the largest micro-batch once, so that its host memory is already mapped when it is timed."""
        timed_rows = [rows for rows in self.rows if first_s * rows / self.rows[0] <= MAX_PASS_S]
        try:
            for bench in benches:
                if self.backend.name == "cpu" and timed_rows:
                    bench.forward(timed_rows[-1])
        except (RuntimeError, MemoryError) as error:  # the rounds will find out how many fit
            if not is_out_of_memory(error):
                raise
        for bench in benches:
            bench.stage.forget()

    def _time(self, variants: Sequence[TimedVariant]) -> None:
        TimingRounds(self._clock, warms_up=self._warms_up).time(variants)

    def _clock(self) -> float:
        """Read the clock in seconds; on a CPU, the CPU time, which excludes waiting for a core."""
        self.backend.synchronize()
        return time.thread_time() if self.backend.name == "cpu" else time.perf_counter()

    def _stage_variants(self, benches: Sequence[Bench], samples: TimingSamples) -> list[TimedVariant]:
        """Return the variants of complete layers, without and with recomputation."""
        return [
            self._variant(benches, self._pass, samples, self.repeats, ends=False),
            self._variant(benches, self._recomputing_pass, samples, self.few),
        ]

    def _secondary_variants(
        self, group: Group, samples: TimingSamples, of_members: Mapping[StageGroup, TimingSamples]
    ) -> Iterator[Callable[[], list[TimedVariant]]]:
        """Yield factories of variants with separate stages: split backward (not of the first stage), and shards."""

        def split() -> list[TimedVariant]:
            benches = [Bench(self.subject, self.backend, *layers, split=True) for layers in group if layers[0] > 0]
            for bench in benches:
                self._note(self._deferred, bench.deferred_bytes(self.rows[0]))
            return [self._variant(benches, self._split_pass, samples, self.few)] if benches else []

        def member(member_of: StageGroup) -> list[TimedVariant]:
            benches = [Bench(self.subject, self.backend, *layers, group=member_of) for layers in group]
            return [self._variant(benches, self._pass, of_members[member_of], self.few)]

        if self.subject.tuning.full:
            yield split
        for member_of in of_members:
            yield partial(member, member_of)

    def _variant(
        self, benches: Sequence[Bench], run: Pass, samples: TimingSamples, repeats: int, ends: bool = True
    ) -> TimedVariant:
        def forget() -> None:
            for bench in benches:
                bench.stage.forget()
            self.backend.free_unused()

        return TimedVariant(partial(run, benches), forget, self.rows, samples, repeats, ends)

    def _first_pass(self, benches: Sequence[Bench]) -> tuple[TimingSamples, float]:
        """Run the smallest micro-batch and record activation sizes; return its times and total seconds."""
        first, begin = TimingSamples(), time.perf_counter()
        for bench in benches:
            self._note(
                self._activations,
                bench.activation_bytes(self.rows[0], partial(self._pass, [bench], self.rows[0], first)),
            )
        return first, time.perf_counter() - begin

    def _warm_up(self, benches: Sequence[Bench]) -> None:
        begin = time.perf_counter()
        while self.backend.name != "cpu" and time.perf_counter() - begin < _WARM_UP_S:
            self._pass(benches, self.rows[0], TimingSamples())

    def _pass(
        self, benches: Sequence[Bench], rows: int, samples: TimingSamples, part: TimedPart = TimedPart.BACKWARD
    ) -> None:
        """Run a micro-batch forward through all stages and back, as a pipeline does."""
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

    def _recomputing_pass(self, benches: Sequence[Bench], rows: int, samples: TimingSamples) -> None:
        for bench in benches:
            bench.recompute(True)
        try:
            self._pass(benches, rows, samples, TimedPart.RECOMPUTE)
        finally:
            for bench in benches:
                bench.recompute(False)

    def _split_pass(self, benches: Sequence[Bench], rows: int, samples: TimingSamples) -> None:
        """Run two micro-batches in the order of a pipeline with split backward: F0 I0 F1 I1 W0 W1."""
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
        """Raise each kind's largest bytes per token to ``sizes``, bytes of layers with the smallest micro-batch."""
        for layer, size in sizes.items():
            kind = self.chain.kinds[layer]
            largest[kind] = max(largest.get(kind, 0.0), size / (self.rows[0] * self.subject.sequence_length))

    def _layer_times(self, samples: TimingSamples) -> dict[str, LayerTimes]:
        """Map each layer kind to its times; empty if nothing was timed."""
        if not any(map(samples.has, self.rows)):
            return {}
        kinds = dict.fromkeys(self.chain.kinds)
        return {kind: layer_times(samples, kind, self.subject.sequence_length) for kind in kinds}


class _AbsentPeer:
    """Stands in for the other rank of a tensor-parallel group of two; all-reduces return the local tensor."""

    member, size = 0, 2

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor
