"""A pipeline stage: consecutive layers of the model, with forward and backward of one micro-batch.

y = stage.forward(micro_batch, x)           activations are kept under the micro-batch's index
dx = stage.backward(index, dy, finished)    gradients are added to the parameters; or, with a split backward:
dx = stage.backward_input(index, dy)        input gradients, for which the previous stage waits
stage.backward_weights(index, finished)     later, weight gradients of linear layers
"""

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
from hetero_mpi.model.layer.compiled import CompiledForward
from hetero_mpi.model.layer.gradients import Beginnings, Finished, GradientReadyHooks, WeightGradients
from hetero_mpi.model.layer.interface import Start, seed_from
from hetero_mpi.model.layer.loss import likeliest, target_losses
from hetero_mpi.model.layer.micro_batch import MicroBatch as MicroBatch
from hetero_mpi.model.layer.micro_batch import Slices, joined, split_rows
from hetero_mpi.model.offloaded_gradients import OffloadedGradients
from hetero_mpi.model.stage_layers import HeadLosses, LayerShare, StageLayers
from hetero_mpi.model.stage_layers import StageSpec as StageSpec


@dataclass(frozen=True)
class _Saved:
    """Kept for backward: the input (None on the first stage), the layers' input, the output, and each layer's first node."""

    position: MicroBatch
    x: torch.Tensor | None
    entered: torch.Tensor | None
    y: torch.Tensor
    beginnings: dict[int, Node]


class Stage(StageLayers):
    """A pipeline stage: ``StageLayers`` with forward and backward.

    Attributes:
        deferred: tensors that the weight part of a split backward still needs; None if backward is not split.
        compiled: compiled forwards of the blocks; empty if they run eagerly.
        rewards: maps (micro-batch, its first sequence) to reward statistics in preference training; in other evaluations, to the
            number of correctly predicted targets.
    """

    def __init__(
        self,
        spec: StageSpec,
        start: Start | None,
        kept_layers: Kept | None = None,
        first_stage: StageLayers | None = None,
        divided: LayerShare | None = None,
    ) -> None:
        """Build the stage; see ``StageLayers`` for the arguments."""
        super().__init__(spec, start, kept_layers, first_stage, divided)
        chain, first, last = self.chain, self.first, self.last
        self._repeats_keys = not self.backend.shares_keys(self.dtype)
        if self.divided is not None:
            self.divided.connect(self.model, first, last)
        if spec.recompute or self.tuning.nf4:
            chain.recompute(self.model, spec.recompute)
        self.model.train(True)
        self.offloaded: OffloadedGradients | None = None
        self.deferred: WeightGradients | None = None
        if spec.split_backward and self.tuning.full:
            self._defer_weight_gradients()
        self._beginnings = Beginnings(chain, self.model, first, last)
        self._kept: dict[int, list[_Saved]] = {}
        self.rewards: dict[tuple[int, int], torch.Tensor] = {}
        if self.tuning.uses_dropout(chain):
            for layer in range(first, last):  # masks depend only on (seed, step, first sample, layer)
                module = self.model.get_submodule(chain.module_names(layer)[0])
                module.register_forward_pre_hook(partial(self._seed_dropout, layer))
        if self.tuning.noise is not None and self.is_first:
            self.model.get_input_embeddings().register_forward_hook(partial(self._add_noise, self.tuning.noise))
        self._head = chain.sliced_head(self.model, spec.dtype, self.divided) if self.is_last else None
        self._input: torch.Tensor | None = None
        if not self.is_first:
            first_module = self.model.get_submodule(chain.module_names(first)[0])
            first_module.register_forward_pre_hook(self._feed_input, with_kwargs=True, prepend=True)  # before groups'
        self.compiled: list[CompiledForward] = []
        if spec.compiled and self.deferred is None and self.divided is None:
            for layer in range(max(first, 1), min(last, chain.layer_count - 1)):
                block = self.model.get_submodule(chain.module_names(layer)[0])
                block.forward = CompiledForward(block.forward, self._has_packed_records)
                self.compiled.append(block.forward)

    def forward(self, position: MicroBatch, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Run forward for one micro-batch and keep its activations until ``backward`` is called with the same index.

        Args:
            x: token ids (B, T) int64 on the first stage, else the previous stage's output (B, T, D) in the compute dtype; for a
                custom model, the samples (B, ...) or the previous layers' output.
            targets: on the last stage: (B, T) int64, shifted by one, ``IGNORED`` where there is no loss; or the samples' targets.

        Returns:
            Detached output, shaped as the next stage's ``x``; on the last stage the micro-batch's share of the loss (fp32 scalar).
        """
        saved = []
        for part, rows in replace(position, targets=targets).slices(len(x), self.spec.slice_sequences):
            x_slice = x[rows] if self.is_first else x[rows].detach().requires_grad_(True)
            self._beginnings.start()
            y = self._compute(self.first, self.last, part, x_slice)
            saved.append(_Saved(part, None if self.is_first else x_slice, self._input, y, self._beginnings.stop()))
        self._kept[position.index] = saved
        return self._join_outputs([entry.y.detach() for entry in saved])

    def _join_outputs(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the outputs of all slices: concatenate rows or, on the last stage, sum the losses."""
        return joined(outputs) if outputs[0].dim() else functools.reduce(torch.add, outputs)

    def backward(
        self, index: int, dy: torch.Tensor | None = None, finished: Finished | None = None
    ) -> torch.Tensor | None:
        """Run backward for one micro-batch and accumulate its gradients in the parameters.

        Args:
            dy: gradient of the output; on the last stage the loss factor (a scalar), where None means 1.
            finished: for the last micro-batch of a step, called with each layer that has trained parameters as soon as their
                gradients are final, in reverse layer order, while backward still runs.

        Returns:
            Gradient of the input; None on the first stage.
        """
        if self.deferred is None:
            return self._backward(index, dy, finished)
        dx = self._backward(index, dy)
        self.backward_weights(index, finished)
        return dx

    def backward_input(self, index: int, dy: torch.Tensor | None = None) -> torch.Tensor | None:
        """Run backward for one micro-batch, except for the weight gradients of linear layers, which ``backward_weights`` adds.

        Arguments and result are as for ``backward``. The buffers of ``dy`` and of the stage's input may be overwritten afterwards.
        """
        return self._backward(index, dy, borrowed=True)

    def backward_weights(self, index: int, finished: Finished | None = None) -> None:
        """Run the weight part of a micro-batch's backward; ``finished`` is as for ``backward``."""
        report = GradientReadyHooks(self.trained_layers, finished)
        if self.deferred is not None:
            self.deferred.compute(index, report.down_to)
        report.down_to(self.first)

    def _backward(
        self, index: int, dy: torch.Tensor | None, finished: Finished | None = None, borrowed: bool = False
    ) -> torch.Tensor | None:
        slices = self._kept.pop(index)
        report, dxs = GradientReadyHooks(self.trained_layers, finished), []
        for entry, own_dy in zip(slices, split_rows(dy, [len(s.y) if s.y.dim() else 1 for s in slices]), strict=True):
            # Recomputing has the same input and draws the same random numbers again.
            self._position, self._input = entry.position, entry.entered
            if self.deferred is not None:
                self.deferred.start_micro_batch(index)
            if entry is slices[-1]:
                report.follow(entry.beginnings)
            if entry.y.requires_grad:  # not where a first stage holds nothing that is trained
                with self.chain.attention(entry.position.records, self._repeats_keys):  # forward may be repeated here
                    torch.autograd.backward(entry.y, own_dy)
            if self.deferred is not None and borrowed:
                self.deferred.detach_from((entry.x, own_dy))
            if entry.x is not None:
                assert entry.x.grad is not None
                dxs.append(entry.x.grad)
        report.down_to(self.first)
        return joined(dxs) if dxs else None

    def forget(self) -> None:
        """Drop the activations of forwards whose backward will not run."""
        self._kept.clear()
        if self.deferred is not None:
            self.deferred.forget()

    @torch.no_grad()
    def evaluate(
        self, x: torch.Tensor, targets: torch.Tensor | None = None, position: MicroBatch | None = None
    ) -> torch.Tensor:
        """Run forward in evaluation mode; the last stage returns the *summed* loss, or log-probabilities for a comparison."""
        self.model.train(False)
        try:
            micro_batch = replace(position or MicroBatch(0, 0, 0, 1), divisor=1, targets=targets)
            return self._join_outputs(self._evaluated(micro_batch.slices(len(x), self.spec.slice_sequences), x))
        finally:
            self.model.train(True)

    def _evaluated(self, slices: Slices, x: torch.Tensor) -> list[torch.Tensor]:
        return [self._compute(self.first, self.last, part, x[rows]) for part, rows in slices]

    def apply(self, x: torch.Tensor, packed: bool = False, **keywords: Any) -> torch.Tensor:
        """Run this stage's layers on ``x``, passing ``keywords`` to the model; the last stage returns the loss function's input."""
        self._input = x
        with self.chain.attention([] if packed else None, self._repeats_keys):
            return self.chain.run(self.model, self.first, self.last, x, **keywords)

    def _compute(self, first: int, last: int, part: MicroBatch, x: torch.Tensor) -> torch.Tensor:
        """Run layers ``[first, last)`` on a slice and, if they include the model's last layer, compute the loss."""
        self._position = part
        self._input = x = x if self.routers is None else self.routers.enter(x)
        ends = last == self.chain.layer_count
        head = self._head if ends and self._head is not None and self._head.slices(part.targets) else None
        with self.chain.attention(part.records, self._repeats_keys):
            keywords = self.chain.isolation(x, part.positions)
            y = self.chain.run(self.model, first, last - (head is not None), x, **keywords)
        if ends:
            return self._loss(part, y, head or self.divided)
        return y if self.routers is None else self.routers.leave(y)

    def _loss(self, part: MicroBatch, y: torch.Tensor, losses_of_head: HeadLosses | None) -> torch.Tensor:
        """Compute the share of the loss from the last layer's output, or from the final norm's if the head computes in slices.

        ``losses_of_head`` has the loss functions of a sliced head or a tensor-parallel rank; None for the model's loss.
        """
        assert part.targets is not None
        loss_by_target = target_losses if losses_of_head is None else losses_of_head.target_losses
        if part.comparison is None:
            if part.weights is not None:
                loss = (loss_by_target(y, part.targets) * part.weights).sum()
            else:
                loss = (self.chain.loss if losses_of_head is None else losses_of_head.loss)(y, part.targets)
            if not self.model.training and self.chain.logits is not None:
                count = likeliest if losses_of_head is None else losses_of_head.likeliest
                self.rewards[part.index, part.first_sample] = count(y, part.targets).reshape(1)
        else:
            assert part.positions is not None
            losses, key = loss_by_target(y, part.targets), (part.index, part.first_sample)
            if part.comparison.train is None:
                loss = part.comparison.likelihoods(losses, part.positions)
            else:
                loss, self.rewards[key] = part.comparison.loss(losses, part.positions)
        loss = loss / part.divisor
        if self.routers is None:
            return loss
        if part.routed is None:
            self.routers.drop()
            return loss
        return loss + self.routers.loss((part.index, part.first_sample))

    def _feed_input(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        """Feed the received tensor to the first module, bypassing what a model does to embeddings (scaling, dropout).

        ``inputs_embeds`` only determines the shapes of masks and positions.
        """
        if arguments:
            return (self._input, *arguments[1:]), keywords
        return arguments, {**keywords, "hidden_states": self._input}

    def take_gradients(self, parameter: nn.Parameter, add: Callable[[torch.Tensor], None]) -> None:
        super().take_gradients(parameter, add)
        if self.deferred is not None:
            self.deferred.adders[parameter] = add

    def _defer_weight_gradients(self) -> None:
        self.deferred = WeightGradients()
        for layer in range(self.first, self.last):
            for name in self.chain.module_names(layer):
                for module in self.model.get_submodule(name).modules():
                    if type(module) is nn.Linear and module.weight.requires_grad:
                        self.deferred.watch(module, layer)

    def _has_packed_records(self) -> bool:
        return self._position is not None and self._position.positions is not None

    def _seed_dropout(self, layer: int, module: nn.Module, arguments: object) -> None:
        if module.training and self._position is not None:
            self.backend.seed(dropout_seed(self.seed, self._position, layer))

    def _add_noise(self, alpha: float, module: nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
        """Add NEFTune noise to the embeddings as transformers does, but depending only on (seed, step, sequence)."""
        if not module.training or self._position is None:
            return output
        amplitude, on_host = alpha / math.sqrt(output.shape[1] * output.shape[2]), self.divided is not None
        noise = torch.empty_like(output, device=HOST if on_host else None)  # equal on all devices of a group
        for row, row_noise in enumerate(noise):
            seed = seed_from(self.seed, "noise", self._position.step, self._position.first_sample + row)
            if not on_host:
                self.backend.seed(seed)
            generator = torch.Generator().manual_seed(seed) if on_host else None
            row_noise.uniform_(-amplitude, amplitude, generator=generator)
        return output + noise.to(output.device)


def dropout_seed(seed: int, position: MicroBatch, layer: int) -> int:
    """Return the random seed for a layer's dropout in a micro-batch."""
    return seed_from(seed, "dropout", position.step, position.first_sample, layer)
