"""Optimizer for the parameters that a rank owns, with fp32 gradients and one collective decision per step.

The order of additions in the global norm, the learning rate and weight decay depend only on parameter names and the global step.
Results therefore do not depend on the partition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.held_layers import HeldLayers, Segment, SharedPart
from hetero_mpi.model.library_optimizers import LibraryOptimizers
from hetero_mpi.model.offloaded_gradients import flat_layout
from hetero_mpi.planning.types.moments import TWO


class FlatGradients:
    """The flat, preallocated fp32 gradient buffer of a shared part, with padding between gradients.

    The buffer has one part per owner, for the segments that it owns (``HeldLayers.shared``), with the same layout on all ranks.
    Between steps each part carries the new values of its segments, in their dtype. If a parameter is split over several shared
    parts, its gradient is stored elsewhere and copied to and from the buffer.

    Attributes:
        gradients: (n,), on the stage's state device.
        views: maps the name of each parameter that lies entirely in this buffer to a view of its gradient.
        parts: slice of ``gradients`` that belongs to each owner.
        values: slice of ``gradients`` that each owner's new values occupy.
    """

    def __init__(self, stage: HeldLayers, part: SharedPart) -> None:
        self._stage, self.backend = stage, stage.backend
        owned = stage.shared[part]
        sizes = [[segment.of(stage.parameters[segment.name]).numel() for segment in segments] for segments in owned]
        length = flat_layout(size for segments in sizes for size in segments)[1]
        flat = stage.offloaded.flat[part.layer] if stage.offloaded is not None else None
        self.gradients = flat if flat is not None else torch.zeros(length, device=stage.backend.device)
        self.views: dict[str, torch.Tensor] = {}
        self.parts: list[slice] = []
        self.values: list[slice] = []
        self._copied_views: list[list[tuple[Segment, torch.Tensor]]] = []
        """For each owner: (segment that covers only part of its parameter, its view in the buffer)."""
        self._value_views: list[list[tuple[Segment, torch.Tensor]]] = []
        """For each owner: (segment, view for the segment's new values)."""
        begin = 0
        for segments, numbers in zip(owned, sizes, strict=True):
            starts, used = flat_layout(numbers)
            end = begin + used
            gradient_views = [
                (segment, self._view(begin + start, segment, torch.float32))
                for segment, start in zip(segments, starts, strict=True)
            ]
            self.views |= {segment.name: view for segment, view in gradient_views if segment.length is None}
            self._copied_views.append([pair for pair in gradient_views if pair[0].length is not None])
            dtypes = [stage.parameters[segment.name].dtype for segment in segments]
            value_starts, used = flat_layout(-(-n * d.itemsize // 4) for n, d in zip(numbers, dtypes, strict=True))
            layout = zip(segments, value_starts, dtypes, strict=True)
            self._value_views.append(
                [(segment, self._view(begin + at, segment, dtype)) for segment, at, dtype in layout]
            )
            self.parts.append(slice(begin, end))
            self.values.append(slice(begin, begin + used))
            begin = end

    def _view(self, start: int, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        parameter_part = segment.of(self._stage.parameters[segment.name])
        size = parameter_part.numel() * dtype.itemsize
        words = self.gradients[start : start + -(-size // 4)]
        return words.view(torch.uint8)[:size].view(dtype).view(parameter_part.shape)

    def collect(self, gradient: Callable[[str], torch.Tensor]) -> None:
        """Copy gradients that are stored elsewhere (``Optimizer.gradient``) into the buffer."""
        for segment, buffer_view in itertools.chain(*self._copied_views):
            buffer_view.copy_(segment.of(gradient(segment.name)))

    def spread(self, owner_index: int, gradient: Callable[[str], torch.Tensor]) -> None:
        """Copy an owner's summed gradients from the buffer to gradients that are stored elsewhere."""
        for segment, buffer_view in self._copied_views[owner_index]:
            segment.of(gradient(segment.name)).copy_(buffer_view)

    def pack(self, owner_index: int) -> None:
        """Copy an owner's parameters into the buffer as new values."""
        value_views = self._value_views[owner_index]
        if value_views:
            torch._foreach_copy_(
                [view for _, view in value_views], [self._parameter_view(segment) for segment, _ in value_views]
            )

    def unpack(self, owner_index: int) -> None:
        """Copy an owner's new values from the buffer to the parameters."""
        value_views = self._value_views[owner_index]
        self._stage.overwrite({segment.name: view for segment, view in value_views if segment.length is None})
        for segment, view in value_views:
            if segment.length is not None:
                self._parameter_view(segment).copy_(view)

    def _parameter_view(self, segment: Segment) -> torch.Tensor:
        return segment.of(self._stage.storage_of(self._stage.parameters[segment.name]))


_BLOCK_ELEMENTS, _MAX_FP64_ELEMENTS = 1024, 4096
"""Number of elements per fp32 block norm; maximum number of block norms that are summed in fp64."""


def learning_rate(train: TrainTable, step: int) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0): linear warmup, then the job's schedule. Stateless.

    Cosine: Loshchilov and Hutter 2017, arXiv:1608.03983; warmup-stable-decay: Hu et al. 2024, arXiv:2404.06395. Values equal those
    of transformers' schedules, whose import takes two seconds.
    """
    warmup_steps, min_ratio = steps_of(train.warmup_steps, train.steps), train.min_learning_rate_ratio
    warmup_steps = min(warmup_steps, train.max_warmup_steps or warmup_steps)
    decay_steps, factor, is_stable = train.steps - warmup_steps, 1.0, train.schedule == "warmup_stable_decay"
    if is_stable:
        decay_steps = min(steps_of(train.decay_steps, train.steps), decay_steps)
    progress = (step - (train.steps - decay_steps)) / max(1, decay_steps)
    if step < warmup_steps:
        factor = step / warmup_steps
        min_ratio *= is_stable
    elif train.schedule == "linear":
        factor = max(0.0, (train.steps - step) / max(1, decay_steps))
    elif train.schedule != "constant":
        if train.schedule == "cosine_with_restarts" and progress < 1.0:
            progress = (train.cycles * progress) % 1.0
        factor = _decay_factor(train.decay, progress)
    return train.learning_rate * (factor * (1 - min_ratio) + min_ratio)


def steps_of(steps: float, run: int) -> int:
    """Return the number of steps that a job key specifies; a value below 1 is a fraction of the ``run`` steps."""
    return math.ceil(run * steps) if 0 < steps < 1 else int(steps)


def _decay_factor(decay: str, progress: float) -> float:
    """Return a factor that decays from 1 to 0 as ``progress`` goes from 0 to 1."""
    progress = min(max(progress, 0.0), 1.0)
    if decay == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - (progress if decay == "linear" else math.sqrt(progress))


class Optimizer:
    """Updates the parameters that one rank owns: all that its stages train, except ``stage.foreign``.

    In fp32 the parameters themselves are updated. In a narrower dtype autograd's gradients are immediately accumulated in fp32, the
    fp32 masters are updated, and the parameters are rounded from them. Offloaded stages keep all of these in host memory.

    Attributes:
        targets: maps the name of each owned parameter to the tensor that is updated (master or parameter).
        flat: maps each shared part to its gradients.
    """

    def __init__(self, stage: HeldLayers, train: TrainTable) -> None:
        self.stage, self.train = stage, train
        self.targets: dict[str, torch.nn.Parameter] = {}
        self._accumulators: dict[str, torch.nn.Parameter | SimpleNamespace] = {}
        """Maps each name to the object whose ``grad`` accumulates the gradient."""
        self._tied: torch.nn.Parameter | SimpleNamespace | None = stage.tied_head
        narrow, offloaded = stage.dtype != torch.float32, stage.offloaded
        for name, parameter in stage.parameters.items():
            separate = narrow or offloaded is not None
            if name not in stage.foreign:
                self.targets[name] = torch.nn.Parameter(stage.masters[name]) if separate else parameter
            self._accumulators[name] = self.targets.get(name, SimpleNamespace(grad=None)) if separate else parameter
            if narrow and offloaded is None:
                _accumulate_in_fp32(stage, parameter, self._accumulators[name])
        if offloaded is not None:
            self._tied = SimpleNamespace(grad=offloaded.tied)
        elif narrow and stage.tied_head is not None and stage.tied_head.requires_grad:
            self._tied = SimpleNamespace(grad=None)
            _accumulate_in_fp32(stage, stage.tied_head, self._tied)
        self.flat = {part: FlatGradients(stage, part) for part in stage.shared}
        self._views = {name: view for flat in self.flat.values() for name, view in flat.views.items()}
        if offloaded is not None:
            self._views = offloaded.views
        for name, view in self._views.items():
            self._accumulators[name].grad = view
        tuning = stage.tuning
        groups = [
            (target, stage.chain.decays(name), tuning.moments.get(name, TWO), tuning.shares.get(name, 1.0))
            for name, target in self.targets.items()
        ]
        self.library = LibraryOptimizers(train, True, groups)

    def end_step(self, step: int, scale: float | None) -> None:
        """Update the parameters unless ``scale`` is None, then free the gradients' memory for evaluation and saving."""
        with self.stage.updating():
            if scale is not None:
                self.step(step, scale)
            self.zero()

    def zero(self) -> None:
        """Reset the gradients, except for the buffers of ``flat``, which the exchange zeroes."""
        if self.stage.offloaded is not None:
            self.stage.offloaded.zero()
            return
        for name, holder in self._accumulators.items():
            # Without a buffer a parameter adopts the first gradient of autograd, which is faster than adding it to zeros.
            holder.grad = self._views.get(name)
            if holder is not self.stage.parameters[name]:
                self.stage.parameters[name].grad = None
        if self._tied is not None:
            self._tied.grad = None

    def tied_gradient(self) -> torch.Tensor:
        """Return the fp32 gradient of the head's copy of a tied embedding matrix."""
        assert self._tied is not None
        self._wait()
        return self._tied.grad

    def gradient(self, name: str) -> torch.Tensor:
        """Return the accumulated fp32 gradient; zeros for an unused parameter."""
        holder = self._accumulators[name]
        if holder.grad is None:
            holder.grad = torch.zeros_like(self.stage.parameters[name], dtype=torch.float32)
        self._wait()
        return holder.grad

    def _wait(self) -> None:
        """Wait until gradients are in host memory if they are offloaded."""
        if self.stage.offloaded is not None:
            self.stage.offloaded.wait()

    def squared_norms(self) -> dict[str, float]:
        """Map each parameter that this rank owns to its gradient's squared norm, with blocks summed in fp64 from first to last."""
        if not self.targets:
            return {}
        parts = [_block_norms(self.gradient(name)) for name in self.targets]
        # One transfer and one call for all, since the device idles; some devices lack fp64.
        squares = np.square(self.stage.backend.to_host(torch.cat(parts)).numpy(), dtype=np.float64)
        indices = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return dict(zip(self.targets, np.bincount(indices, squares, len(parts)).tolist(), strict=True))

    def step(self, step: int, scale: float) -> None:
        """Run one step with gradients multiplied by ``scale``, the factor from the step decision."""
        gradients = [self.gradient(name) for name in self.targets]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        self.library.step(learning_rate(self.train, step))
        if self.stage.masters:
            self.stage.overwrite(self.targets)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return a parameter's moments by kind (``LibraryOptimizers.state``); zeros before its first step."""
        return self.library.state(self.targets[name])

    def restore(self, name: str, moments: dict[str, torch.Tensor], steps: int) -> None:
        """Restore a parameter's moments to their values after ``steps`` optimizer steps."""
        self.library.restore(self.targets[name], moments, steps)


def _block_norms(gradient: torch.Tensor) -> torch.Tensor:
    """Return a vector of at most a few thousand elements that has the same norm: norms of short blocks, computed in fp32.

    This is as precise as fp64 addition, because each fp32 sum is short, and takes half the time.
    """
    flat = gradient.reshape(-1)
    while flat.numel() > _MAX_FP64_ELEMENTS:
        blocks = flat.numel() // _BLOCK_ELEMENTS
        norms = torch.linalg.vector_norm(flat[: blocks * _BLOCK_ELEMENTS].view(blocks, _BLOCK_ELEMENTS), dim=1)
        rest = flat[blocks * _BLOCK_ELEMENTS :]
        flat = torch.cat((norms, rest)) if len(rest) else norms
    return flat


def _accumulate_in_fp32(
    stage: HeldLayers, parameter: torch.nn.Parameter, holder: torch.nn.Parameter | SimpleNamespace
) -> None:
    """Accumulate every gradient of ``parameter`` in ``holder.grad`` (fp32) and free it immediately."""

    def add(gradient: torch.Tensor) -> None:
        if holder.grad is None:
            holder.grad = gradient.float()
        else:
            holder.grad.add_(gradient)

    stage.take_gradients(parameter, add)


@dataclass(frozen=True)
class StepDecision:
    """The collective decision about a step, equal on all ranks."""

    loss: float
    """Mean loss over the target tokens of the global batch, in nats per token."""
    grad_norm: float
    scale: float
    """Factor by which gradients are multiplied (clipping and loss scaling)."""
    finite: bool
    first_non_finite: str | None = None
    """First parameter in backward order with a non-finite gradient; None if the step is finite, or if only the sum overflows."""
    stop: bool = False
    """Whether any rank was asked to end the run."""
    router_loss: float | None = None
    """Mean router loss over the global batch's sequences, before its coefficient; part of ``loss``. None if there is none."""
    rewards: tuple[float, ...] = ()
    """Reward statistics of preference training, summed over all micro-batches."""


class StepDecider:
    """Combines all ranks' squared norms and losses into one decision by an all-reduce of one fp64 vector.

        | squared norm of each parameter, by name | loss of each micro-batch | router losses | rewards | ranks asked to stop |

    Each parameter (or shard) and each micro-batch of all pipelines has a slot that exactly one rank fills, so the all-reduce is
    exact in any order. Adding the slots in name and micro-batch order then gives bitwise equal results for every partition.

    ``names`` lists the trained parameters in the model's order. ``routers`` adds slots for router losses. ``parts`` maps each
    sharded parameter to its number of shards. ``rewards`` is the number of reward statistics per micro-batch.
    """

    def __init__(
        self,
        names: list[str],
        clip_norm: float | None,
        micro_batches: int = 1,
        routers: bool = False,
        parts: Mapping[str, int] | None = None,
        rewards: int = 0,
    ) -> None:
        self.names = tuple(names)
        slots = [(name, part) for name in sorted(names) for part in range((parts or {}).get(name, 1))]
        self.slots = {slot: i for i, slot in enumerate(slots)}
        self.clip_norm, self.micro_batches, self.routers, self.rewards = clip_norm, micro_batches, routers, rewards

    def fill(
        self, squared_norms: dict[str, float], losses: dict[int, float], stop: bool = False, part: int = 0
    ) -> np.ndarray:
        """Return this rank's fp64 vector. ``losses`` maps indices after the norms to values; ``part`` is its shard index."""
        vector = np.zeros(len(self.slots) + self.micro_batches * (1 + self.routers + self.rewards) + 1)
        vector[-1] = stop
        for name, value in squared_norms.items():
            vector[self.slots[name, part if (name, part) in self.slots else 0]] = value
        for index, loss in losses.items():
            vector[len(self.slots) + index] = loss
        return vector

    def decide(self, summed: np.ndarray, loss_scale: float = 1.0) -> StepDecision:
        """Return the step decision, given the sum of all ranks' vectors; gradients contain the factor ``loss_scale``."""
        norms, losses = summed[: len(self.slots)], summed[len(self.slots) : -1]
        norm = float(np.sqrt(added(norms))) / loss_scale
        loss, *other_sums = (added(values) for values in losses.reshape(-1, self.micro_batches))
        router_loss = other_sums.pop(0) if self.routers else None
        finite = bool(np.isfinite(norm) and np.isfinite(loss))
        scale = 1.0 / loss_scale
        if finite and self.clip_norm is not None:
            scale *= min(1.0, self.clip_norm / (norm + 1e-6))  # torch.nn.utils.clip_grad_norm_'s formula
        first_non_finite = None if finite else self._first_non_finite(norms)
        stop = bool(summed[-1] > 0)
        return StepDecision(loss, norm, scale, finite, first_non_finite, stop, router_loss, tuple(other_sums))

    def _first_non_finite(self, norms: np.ndarray) -> str | None:
        """Return the last non-finite parameter in model order: backward starts at the end and spreads non-finite values."""
        non_finite_names = {name for (name, _), slot in self.slots.items() if not np.isfinite(norms[slot])}
        return next((name for name in reversed(self.names) if name in non_finite_names), None)


def added(values: np.ndarray) -> float:
    """Sum fp64 values from first to last; numpy's sum adds in an order that depends on the number of values."""
    total = 0.0
    for value in values.tolist():
        total += value
    return total


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2), per collective step decision.

    Scaling the loss keeps small gradients from vanishing in fp16. An overflow halves the factor and skips the step on every rank;
    ``PATIENCE`` finite steps in a row double it. In other dtypes the factor is always 1.
    """

    value: float
    good_steps: int = 0

    PATIENCE = 1000
    START = 2.0**16

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> LossScale:
        return cls(cls.START if dtype == torch.float16 else 1.0)

    def update(self, finite: bool) -> None:
        if self.value == 1.0:
            return
        if not finite:
            self.value, self.good_steps = max(2.0, self.value / 2), 0
        elif self.good_steps + 1 == self.PATIENCE:
            self.value, self.good_steps = self.value * 2, 0
        else:
            self.good_steps += 1
