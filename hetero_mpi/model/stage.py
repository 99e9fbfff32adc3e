"""A stage: some layers of the chain, with forward and backward of one micro-batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from hetero_mpi.device.backend import HOST
from hetero_mpi.model.held_layers import Kept
from hetero_mpi.model.layer.gradients import Beginnings, Finished, GradientReadyHooks, WeightGradients
from hetero_mpi.model.layer.interface import Start, seed_from
from hetero_mpi.model.layer.loss import likeliest, target_losses
from hetero_mpi.model.layer.micro_batch import MicroBatch as MicroBatch
from hetero_mpi.model.layer.micro_batch import Slices, joined, parts
from hetero_mpi.model.layer.quantize import set_training
from hetero_mpi.model.offloaded_gradients import OffloadedGradients
from hetero_mpi.model.stage_layers import HeadLosses, LayerShare, StageLayers
from hetero_mpi.model.stage_layers import StageSpec as StageSpec


@dataclass(frozen=True)
class _Kept:
    """The tensors that backward of a slice needs: its input (not of a first stage), what entered the layers of it, its output, and
    where its layers begin."""

    position: MicroBatch
    x: torch.Tensor | None
    entered: torch.Tensor | None
    y: torch.Tensor
    beginnings: dict[int, Node]


class Stage(StageLayers):
    """One stage: ``StageLayers`` that compute.

    Attributes:
        deferred: what the second part of a split backward still needs; None where backward comes in one part.
        rewards: (micro-batch, its first sequence) -> the numbers that a comparison gives beside the loss; of an evaluation
            without one, how many targets are the likeliest tokens.
    """

    def __init__(
        self,
        spec: StageSpec,
        start: Start | None,
        kept: Kept | None = None,
        beginning: StageLayers | None = None,
        divided: LayerShare | None = None,
    ) -> None:
        """As ``StageLayers``."""
        super().__init__(spec, start, kept, beginning, divided)
        chain, first, last = self.chain, self.first, self.last
        self._repeats_keys = not self.backend.shares_keys(self.dtype)
        if self.divided is not None:
            self.divided.connect(self.model, first, last)
        if spec.recompute or self.tuning.nf4:
            chain.recompute(self.model, spec.recompute)
        set_training(self.model, True)
        self.offloaded: OffloadedGradients | None = None
        self.deferred: WeightGradients | None = None
        if spec.split_backward and self.tuning.full:
            self._put_off_matrices()
        self._beginnings = Beginnings(chain, self.model, first, last)
        self._kept: dict[int, list[_Kept]] = {}
        self.rewards: dict[tuple[int, int], torch.Tensor] = {}
        if self.tuning.uses_dropout(chain):
            for layer in range(first, last):  # masks depend on (seed, step, first sample, layer) alone
                module = self.model.get_submodule(chain.module_names(layer)[0])
                module.register_forward_pre_hook(partial(self._seed, layer))
        if self.tuning.noise is not None and self.is_first:
            self.model.get_input_embeddings().register_forward_hook(partial(self._noisy, self.tuning.noise))
        self._head = chain.sliced_head(self.model, spec.dtype, self.divided) if self.is_last else None
        self._input: torch.Tensor | None = None
        if not self.is_first:
            entrance = self.model.get_submodule(chain.module_names(first)[0])
            entrance.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)  # before a group divides it

    def forward(self, position: MicroBatch, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Forward of one micro-batch; what backward needs is kept until ``backward`` of the same index.

        Args:
            x: token ids (B, T) int64 on the first stage, else the previous stage's output (B, T, D) in the compute dtype; of a
                model made of layers, the samples (B, ...), or what the layers before make of them.
            targets: (B, T) int64 on the last stage, ``IGNORED`` where nothing is learnt; already shifted by one. Or the
                samples' own.

        Returns: Output, shaped as the next stage's ``x``, detached; on the last stage this micro-batch's share of the loss, a
        scalar (fp32).
        """
        kept = []
        for part, rows in replace(position, targets=targets).slices(len(x), self.spec.slice_sequences):
            own = x[rows] if self.is_first else x[rows].detach().requires_grad_(True)
            self._beginnings.start()
            y = self._compute(self.first, self.last, part, own)
            kept.append(_Kept(part, None if self.is_first else own, self._input, y, self._beginnings.stop()))
        self._kept[position.index] = kept
        return self._together([one.y.detach() for one in kept])

    def _together(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The micro-batch's output, of its slices': rows one after the other; on the last stage the sum of the losses."""
        return joined(outputs) if outputs[0].dim() else functools.reduce(torch.add, outputs)

    def backward(
        self, index: int, dy: torch.Tensor | None = None, finished: Finished | None = None
    ) -> torch.Tensor | None:
        """Backward of one micro-batch; gradients are added to the parameters'.

        Args:
            dy: gradient of the output; on the last stage the factor of the loss (a scalar), None for 1.
            finished: for the last micro-batch of a step: called with each layer of this stage that has trained parameters, the
                last first, as soon as their gradients are whole, while backward goes on.

        Returns: Gradient of the input, or None on the first stage.
        """
        if self.deferred is None:
            return self._backward(index, dy, finished)
        dx = self._backward(index, dy)
        self.backward_weights(index, finished)
        return dx

    def backward_input(self, index: int, dy: torch.Tensor | None = None) -> torch.Tensor | None:
        """Backward of one micro-batch but for the weight gradients of linear layers, which ``backward_weights`` adds.

        Takes and returns what ``backward`` does. The buffers of ``dy`` and of the stage's input may be overwritten afterwards.
        """
        return self._backward(index, dy, borrowed=True)

    def backward_weights(self, index: int, finished: Finished | None = None) -> None:
        """The rest of the backward of a micro-batch; ``finished`` as in ``backward``."""
        report = GradientReadyHooks(self.trained_layers, finished)
        if self.deferred is not None:
            self.deferred.compute(index, report.down_to)
        report.down_to(self.first)

    def _backward(
        self, index: int, dy: torch.Tensor | None, finished: Finished | None = None, borrowed: bool = False
    ) -> torch.Tensor | None:
        slices = self._kept.pop(index)
        report, dxs = GradientReadyHooks(self.trained_layers, finished), []
        for kept, own_dy in zip(slices, parts(dy, [len(one.y) if one.y.dim() else 1 for one in slices]), strict=True):
            # Recomputing has the same input and draws the same random numbers again.
            self._position, self._input = kept.position, kept.entered
            if self.deferred is not None:
                self.deferred.begin(index)
            if kept is slices[-1]:
                report.follow(kept.beginnings)
            if kept.y.requires_grad:  # not where a first stage holds nothing that is trained
                packed = kept.position.positions is not None
                with self.chain.attention(packed, self._repeats_keys):  # forward may be repeated here
                    torch.autograd.backward(kept.y, own_dy)
            if self.deferred is not None and borrowed:
                self.deferred.detach_from((kept.x, own_dy))
            if kept.x is not None:
                assert kept.x.grad is not None
                dxs.append(kept.x.grad)
        report.down_to(self.first)
        return joined(dxs) if dxs else None

    def forget(self) -> None:
        """Drop what forwards kept for backwards that will not come."""
        self._kept.clear()
        if self.deferred is not None:
            self.deferred.forget()

    @torch.no_grad()
    def evaluate(
        self, x: torch.Tensor, targets: torch.Tensor | None = None, position: MicroBatch | None = None
    ) -> torch.Tensor:
        """Forward without dropout and without keeping anything; the last stage returns the *sum* of the losses, or the likelihoods
        that a comparison asks for."""
        set_training(self.model, False)
        try:
            whole = replace(position or MicroBatch(0, 0, 0, 1), divisor=1, targets=targets)
            return self._together(self._evaluated(whole.slices(len(x), self.spec.slice_sequences), x))
        finally:
            set_training(self.model, True)

    def _evaluated(self, slices: Slices, x: torch.Tensor) -> list[torch.Tensor]:
        return [self._compute(self.first, self.last, part, x[rows]) for part, rows in slices]

    def apply(self, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Own layers on ``x``, as the model is called with ``keywords``; the last stage gives what the loss takes."""
        self._input = x
        with self.chain.attention(False, self._repeats_keys):
            return self.chain.run(self.model, self.first, self.last, x, **keywords)

    def _compute(self, first: int, last: int, part: MicroBatch, x: torch.Tensor) -> torch.Tensor:
        """Own layers ``[first, last)`` on a slice; after the model's last one the loss."""
        self._position = part
        self._input = x = x if self.routers is None else self.routers.enter(x)
        ends = last == self.chain.layer_count
        head = self._head if ends and self._head is not None and self._head.slices(part.targets) else None
        with self.chain.attention(part.positions is not None, self._repeats_keys):
            y = self.chain.run(
                self.model, first, last - (head is not None), x, **self.chain.isolation(x, part.positions)
            )
        if ends:
            return self._loss(part, y, head or self.divided)
        return y if self.routers is None else self.routers.leave(y)

    def _loss(self, part: MicroBatch, y: torch.Tensor, own: HeadLosses | None) -> torch.Tensor:
        """The share of the loss, of the last layer's output; where the head computes in slices, of the last norm's. ``own``: the
        losses that such a head has, or a member of a group."""
        assert part.targets is not None
        of_targets = target_losses if own is None else own.target_losses
        if part.comparison is None:
            if part.weights is not None:
                loss = (of_targets(y, part.targets) * part.weights).sum()
            else:
                loss = (self.chain.loss if own is None else own.loss)(y, part.targets)
            if not self.model.training and self.chain.logits is not None:
                count = likeliest if own is None else own.likeliest
                self.rewards[part.index, part.first_sample] = count(y, part.targets).reshape(1)
        else:
            assert part.positions is not None
            losses, place = of_targets(y, part.targets), (part.index, part.first_sample)
            if part.comparison.train is None:
                loss = part.comparison.likelihoods(losses, part.positions)
            else:
                loss, self.rewards[place] = part.comparison.loss(losses, part.positions)
        loss = loss / part.divisor
        if self.routers is None:
            return loss
        if part.routed is None:
            self.routers.drop()
            return loss
        return loss + self.routers.loss((part.index, part.first_sample))

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        """The received tensor enters at the first own module: what a model does to its embeddings (Granite's multiplier,
        Starcoder's dropout) has been done to it already. ``inputs_embeds`` only gives masks and positions their shape."""
        if arguments:
            return (self._input, *arguments[1:]), keywords
        return arguments, {**keywords, "hidden_states": self._input}

    def take_gradients(self, parameter: nn.Parameter, add: Callable[[torch.Tensor], None]) -> None:
        super().take_gradients(parameter, add)
        if self.deferred is not None:
            self.deferred.adders[parameter] = add

    def _put_off_matrices(self) -> None:
        self.deferred = WeightGradients()
        for layer in range(self.first, self.last):
            for name in self.chain.module_names(layer):
                for module in self.model.get_submodule(name).modules():
                    if type(module) is nn.Linear and module.weight.requires_grad:
                        self.deferred.watch(module, layer)

    def _seed(self, layer: int, module: nn.Module, arguments: object) -> None:
        if module.training and self._position is not None:
            self.backend.seed(dropout_seed(self.seed, self._position, layer))

    def _noisy(self, alpha: float, module: nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
        """NEFTune's noise on the embeddings, as transformers adds it; but that of a sequence depends on (seed, step, sequence)."""
        if not module.training or self._position is None:
            return output
        most, together = alpha / math.sqrt(output.shape[1] * output.shape[2]), self.divided is not None
        noise = torch.empty_like(output, device=HOST if together else None)  # a group's devices may draw unlike numbers
        for row, own in enumerate(noise):
            seed = seed_from(self.seed, "noise", self._position.step, self._position.first_sample + row)
            if not together:
                self.backend.seed(seed)
            own.uniform_(-most, most, generator=torch.Generator().manual_seed(seed) if together else None)
        return output + noise.to(output.device)


def dropout_seed(seed: int, position: MicroBatch, layer: int) -> int:
    """Seed of the generator before ``layer`` runs in a micro-batch."""
    return seed_from(seed, "dropout", position.step, position.first_sample, layer)
