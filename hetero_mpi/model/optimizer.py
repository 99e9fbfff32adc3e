"""The optimizer over a rank's own parameters, with fp32 gradients and one global decision per step.

Everything that decides (order of additions in the global norm, learning rate, which parameters decay) is a function of names
and of the global step, so the result does not depend on the partition.
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
    """The fp32 gradients of a shared part, one after the other with a few zeros between them, in the same memory for good.

    The buffer has a part for each holder, of the segments that this one owns (``HeldLayers.shared``); the layout is the same
    wherever they are held. Between two steps a part takes new values of its segments, in their dtype. The gradient of a parameter
    that is of several shared parts is elsewhere, and copied.

    Attributes:
        gradients: (n,), where the stage keeps its state.
        views: name -> the gradient in there of a parameter of which all is in there.
        parts: of ``gradients``, one for each holder.
        values: what of them new values take, in fp32 numbers.
    """

    def __init__(self, stage: HeldLayers, part: SharedPart) -> None:
        self._stage, self.backend = stage, stage.backend
        owned = stage.shared[part]
        sizes = [[segment.of(stage.parameters[segment.name]).numel() for segment in of_part] for of_part in owned]
        length = flat_layout(size for of_part in sizes for size in of_part)[1]
        own = stage.offloaded.flat[part.layer] if stage.offloaded is not None else None
        self.gradients = own if own is not None else torch.zeros(length, device=stage.backend.device)
        self.views: dict[str, torch.Tensor] = {}
        self.parts: list[slice] = []
        self.values: list[slice] = []
        self._copied: list[list[tuple[Segment, torch.Tensor]]] = []
        """A list for each holder, of its ranges with their places among the gradients."""
        self._rooms: list[list[tuple[Segment, torch.Tensor]]] = []
        """The same of all segments, with the places of their new values."""
        begin = 0
        for of_part, numbers in zip(owned, sizes, strict=True):
            starts, taken = flat_layout(numbers)
            end = begin + taken
            found = [
                (segment, self._room(begin + at, segment, torch.float32))
                for segment, at in zip(of_part, starts, strict=True)
            ]
            self.views |= {segment.name: room for segment, room in found if segment.length is None}
            self._copied.append([one for one in found if one[0].length is not None])
            dtypes = [stage.parameters[segment.name].dtype for segment in of_part]
            where, taken = flat_layout(-(-n * d.itemsize // 4) for n, d in zip(numbers, dtypes, strict=True))
            rooms = zip(of_part, where, dtypes, strict=True)
            self._rooms.append([(segment, self._room(begin + at, segment, dtype)) for segment, at, dtype in rooms])
            self.parts.append(slice(begin, end))
            self.values.append(slice(begin, begin + taken))
            begin = end

    def _room(self, start: int, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        own = segment.of(self._stage.parameters[segment.name])
        size = own.numel() * dtype.itemsize
        numbers = self.gradients[start : start + -(-size // 4)]
        return numbers.view(torch.uint8)[:size].view(dtype).view(own.shape)

    def collect(self, gradient: Callable[[str], torch.Tensor]) -> None:
        """Copy to here what is elsewhere of the gradients (``Optimizer.gradient``)."""
        for segment, there in itertools.chain(*self._copied):
            there.copy_(segment.of(gradient(segment.name)))

    def spread(self, place: int, gradient: Callable[[str], torch.Tensor]) -> None:
        """Copy a holder's sums to there."""
        for segment, here in self._copied[place]:
            segment.of(gradient(segment.name)).copy_(here)

    def pack(self, place: int) -> None:
        """Copy a holder's parameters to where new values go."""
        rooms = self._rooms[place]
        if rooms:
            torch._foreach_copy_([room for _, room in rooms], [self._stored(segment) for segment, _ in rooms])

    def unpack(self, place: int) -> None:
        """Copy the new values of a holder's parameters into these."""
        rooms = self._rooms[place]
        self._stage.overwrite({segment.name: room for segment, room in rooms if segment.length is None})
        for segment, room in rooms:
            if segment.length is not None:
                self._stored(segment).copy_(room)

    def _stored(self, segment: Segment) -> torch.Tensor:
        return segment.of(self._stage.storage_of(self._stage.parameters[segment.name]))


_BLOCK, _SHORT = 1024, 4096
"""Squares added in fp32 at a time, and how many numbers are left to fp64 at most."""


def learning_rate(train: TrainTable, step: int) -> float:
    """The learning rate of optimizer step ``step`` (the first is 0): up to the peak in a line, then by the job's schedule (of
    cosines: Loshchilov and Hutter 2017, arXiv:1608.03983; with a stable stage: Hu et al. 2024, arXiv:2404.06395). There is no
    state to save.

    The numbers are those of transformers' schedules, whose import alone takes two seconds.
    """
    warm_up, lowest = steps_of(train.warmup_steps, train.steps), train.min_learning_rate_ratio
    warm_up = min(warm_up, train.max_warmup_steps or warm_up)
    falling, factor, is_stable = train.steps - warm_up, 1.0, train.schedule == "warmup_stable_decay"
    if is_stable:
        falling = min(steps_of(train.decay_steps, train.steps), falling)
    done = (step - (train.steps - falling)) / max(1, falling)
    if step < warm_up:
        factor = step / warm_up
        lowest *= is_stable
    elif train.schedule == "linear":
        factor = max(0.0, (train.steps - step) / max(1, falling))
    elif train.schedule != "constant":
        if train.schedule == "cosine_with_restarts" and done < 1.0:
            done = (train.cycles * done) % 1.0
        factor = _fallen(train.decay, done)
    return train.learning_rate * (factor * (1 - lowest) + lowest)


def steps_of(steps: float, run: int) -> int:
    """Steps that a job's key says, where a number below 1 is a share of the run."""
    return math.ceil(run * steps) if 0 < steps < 1 else int(steps)


def _fallen(decay: str, done: float) -> float:
    """From 1 to 0 while ``done`` goes from 0 to 1."""
    done = min(max(done, 0.0), 1.0)
    if decay == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0 - (done if decay == "linear" else math.sqrt(done))


class Optimizer:
    """The optimizer of one rank, of the parameters that it owns: all that its stages train, but for ``stage.foreign``.

    In fp32 the parameters themselves are optimised. In a narrower dtype gradients are added up in fp32 as soon as autograd has
    them, the fp32 masters are stepped, and the parameters are rounded from these. Where the stage keeps its parameters in host
    memory beside a device of its own, all of that is there, too.

    Attributes:
        targets: name -> what is stepped, of each parameter that this rank owns.
        flat: what several ranks hold -> its gradients.
    """

    def __init__(self, stage: HeldLayers, train: TrainTable) -> None:
        self.stage, self.train = stage, train
        self.targets: dict[str, torch.nn.Parameter] = {}
        self._added: dict[str, torch.nn.Parameter | SimpleNamespace] = {}
        """name -> what has the gradient that is added up (``grad``)."""
        self._tied: torch.nn.Parameter | SimpleNamespace | None = stage.tied_head
        narrow, offloaded = stage.dtype != torch.float32, stage.offloaded
        for name, parameter in stage.parameters.items():
            apart = narrow or offloaded is not None
            if name not in stage.foreign:
                self.targets[name] = torch.nn.Parameter(stage.masters[name]) if apart else parameter
            self._added[name] = self.targets.get(name, SimpleNamespace(grad=None)) if apart else parameter
            if narrow and offloaded is None:
                _accumulate_in_fp32(stage, parameter, self._added[name])
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
            self._added[name].grad = view
        tuning = stage.tuning
        listed = [
            (target, stage.chain.decays(name), tuning.moments.get(name, TWO), tuning.shares.get(name, 1.0))
            for name, target in self.targets.items()
        ]
        self.library = LibraryOptimizers(train, True, listed)

    def end_step(self, step: int, scale: float | None) -> None:
        """Step (None: do not), and leave gradients of zero: what is saved or evaluated next has their memory."""
        with self.stage.updating():
            if scale is not None:
                self.step(step, scale)
            self.zero()

    def zero(self) -> None:
        """Gradients are zero. The buffers of ``flat`` are zeroed by who exchanges them."""
        if self.stage.offloaded is not None:
            self.stage.offloaded.zero()
            return
        for name, holder in self._added.items():
            # Without a buffer of its own a parameter takes the first gradient that autograd makes as it is, which is faster
            # than adding it to zeros.
            holder.grad = self._views.get(name)
            if holder is not self.stage.parameters[name]:
                self.stage.parameters[name].grad = None
        if self._tied is not None:
            self._tied.grad = None

    def tied_gradient(self) -> torch.Tensor:
        """The fp32 gradient of the head's copy of a tied embedding matrix."""
        assert self._tied is not None
        self._wait()
        return self._tied.grad

    def gradient(self, name: str) -> torch.Tensor:
        """The fp32 gradient summed so far; zeros where a parameter took no part."""
        holder = self._added[name]
        if holder.grad is None:
            holder.grad = torch.zeros_like(self.stage.parameters[name], dtype=torch.float32)
        self._wait()
        return holder.grad

    def _wait(self) -> None:
        """Return when gradients that leave the device have left it."""
        if self.stage.offloaded is not None:
            self.stage.offloaded.wait()

    def squared_norms(self) -> dict[str, float]:
        """name -> sum of squares of the gradient, of what this rank owns; to be added in fp64 over all ranks in name order."""
        if not self.targets:
            return {}
        parts = [_short(self.gradient(name)) for name in self.targets]
        # All in one transfer; and not every device computes in fp64.
        hosts = self.stage.backend.to_host(torch.cat(parts)).split([len(part) for part in parts])
        norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in hosts])
        return dict(zip(self.targets, norms.square().tolist(), strict=True))

    def step(self, step: int, scale: float) -> None:
        """One step with gradients multiplied by ``scale`` (1: not clipped)."""
        gradients = [self.gradient(name) for name in self.targets]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        self.library.step(learning_rate(self.train, step))
        if self.stage.masters:
            self.stage.overwrite(self.targets)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """The moments of a parameter, by their kinds in a checkpoint (``LibraryOptimizers.state``); zeros before its first step."""
        return self.library.state(self.targets[name])

    def restore(self, name: str, moments: dict[str, torch.Tensor], steps: int) -> None:
        """Put back the moments of a parameter after ``steps`` optimizer steps."""
        self.library.restore(self.targets[name], moments, steps)


def _short(gradient: torch.Tensor) -> torch.Tensor:
    """A vector of at most a few thousand numbers with the norm of ``gradient``, by norms of short blocks in fp32.

    That takes half the time of adding in fp64 from the start, and has its precision: few numbers meet in any one fp32 sum.
    """
    flat = gradient.reshape(-1)
    while flat.numel() > _SHORT:
        blocks = flat.numel() // _BLOCK
        norms = torch.linalg.vector_norm(flat[: blocks * _BLOCK].view(blocks, _BLOCK), dim=1)
        rest = flat[blocks * _BLOCK :]
        flat = torch.cat((norms, rest)) if len(rest) else norms
    return flat


def _accumulate_in_fp32(
    stage: HeldLayers, parameter: torch.nn.Parameter, holder: torch.nn.Parameter | SimpleNamespace
) -> None:
    """Add every gradient of ``parameter`` to ``holder.grad`` (fp32) and free it at once."""

    def add(gradient: torch.Tensor) -> None:
        if holder.grad is None:
            holder.grad = gradient.float()
        else:
            holder.grad.add_(gradient)

    stage.take_gradients(parameter, add)


@dataclass(frozen=True)
class StepDecision:
    """The common decision about a step, the same on every rank."""

    loss: float
    """Mean over the target tokens of the global batch, in nats per token."""
    grad_norm: float
    scale: float
    """Factor for the gradients (clipping)."""
    finite: bool
    first_non_finite: str | None = None
    """The parameter whose gradient is not finite, the first in backward. None: the step is finite, or only the sum is too large."""
    stop: bool = False
    """Some rank has been asked to end the run."""
    router_loss: float | None = None
    """Mean over the sequences of the global batch, before its coefficient; None: the model has none. ``loss`` includes it."""
    rewards: tuple[float, ...] = ()
    """Of preferences: the numbers that a comparison gives beside the loss, of all micro-batches."""


class StepDecider:
    """Turns every rank's squared norms and losses into one decision.

    Each trained parameter (of one that a group of ranks has cut, each part), and each micro-batch of all pipelines, has its own
    slot of a vector that is summed over the ranks. Exactly one rank fills a slot, so the sum is exact in any order, and adding the
    slots in the order of names and of micro-batches gives the same bits for every partition. The last number counts ranks that were
    asked to end the run.

    ``names``: the trained parameters, in the model's order. ``routers``: micro-batches have slots for the routers' loss, too.
    ``rewards``: and so many for numbers of a comparison. ``parts``: name -> in how many parts it is cut, where it is.
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
        """This rank's part: float64. ``losses``: of the micro-batches whose head it holds; after those of all, the routers', and
        the rewards. ``part``: which one of cut parameters it has."""
        vector = np.zeros(len(self.slots) + self.micro_batches * (1 + self.routers + self.rewards) + 1)
        vector[-1] = stop
        for name, value in squared_norms.items():
            vector[self.slots[name, part if (name, part) in self.slots else 0]] = value
        for index, loss in losses.items():
            vector[len(self.slots) + index] = loss
        return vector

    def decide(self, summed: np.ndarray, loss_scale: float = 1.0) -> StepDecision:
        """The step decision from the sum of all ranks' parts; gradients are ``loss_scale`` times too large."""
        norms, losses = summed[: len(self.slots)], summed[len(self.slots) : -1]
        norm = float(np.sqrt(added(norms))) / loss_scale
        loss, *further = (added(of_one) for of_one in losses.reshape(-1, self.micro_batches))
        router_loss = further.pop(0) if self.routers else None
        finite = bool(np.isfinite(norm) and np.isfinite(loss))
        scale = 1.0 / loss_scale
        if finite and self.clip_norm is not None:
            scale *= min(1.0, self.clip_norm / (norm + 1e-6))  # torch.nn.utils.clip_grad_norm_'s formula
        first_non_finite = None if finite else self._first_non_finite(norms)
        stop = bool(summed[-1] > 0)
        return StepDecision(loss, norm, scale, finite, first_non_finite, stop, router_loss, tuple(further))

    def _first_non_finite(self, norms: np.ndarray) -> str | None:
        """Backward goes from the end of the model to its beginning, and spreads what is not finite on its way."""
        broken = {name for (name, _), slot in self.slots.items() if not np.isfinite(norms[slot])}
        return next((name for name in reversed(self.names) if name in broken), None)


def added(values: np.ndarray) -> float:
    """The sum of fp64 values from the first to the last: numpy's own order depends on their number."""
    total = 0.0
    for value in values.tolist():
        total += value
    return total


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2), by the common step decision.

    The loss is multiplied before backward so that small gradients do not vanish in fp16. An overflow halves the factor and skips
    the step on every rank; ``PATIENCE`` good steps in a row double it. In other dtypes the factor is 1 and stays so.
    """

    value: float
    good_steps: int = 0

    PATIENCE = 1000
    START = 2.0**16

    @classmethod
    def of(cls, dtype: torch.dtype) -> LossScale:
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
