"""A stage: the layers ``[first, last)`` of the chain on one device, with forward and backward of one micro-batch.

The whole model's frame is there; the layers this rank does not hold are replaced by modules that pass their input through. So of
a language model transformers' own class runs: attention masks, rotary embeddings, soft-capping and the like are the library's.
Layers keep their global indices, so parameter names are the whole model's everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from transformers.integrations import sdpa_attention

from hetero_mpi.device.backend import DTYPES, Backend, return_freed_memory
from hetero_mpi.model.held_layers import HeldLayers, Kept, Shared, frozen_layers, take_over
from hetero_mpi.model.layer.gradients import Beginnings, Finished, GradientReadyHooks, WeightGradients
from hetero_mpi.model.layer.interface import LayerChain, PassThrough
from hetero_mpi.model.layer.loss import Routed, RouterLoss, target_losses
from hetero_mpi.model.layer.micro_batch import Comparison, Slices, joined, parts
from hetero_mpi.model.layer.micro_batch import MicroBatch as MicroBatch
from hetero_mpi.model.layer.quantize import is_empty, quantize, set_training
from hetero_mpi.model.layer.seeds import seed_from
from hetero_mpi.model.layer.share import LayerShare
from hetero_mpi.model.offloaded_gradients import OffloadedGradients
from hetero_mpi.model.transformers.weights import Start
from hetero_mpi.model.tuning import Tuning, full_training, inject, start_value


@dataclass(frozen=True)
class _Kept:
    """What backward of a slice needs: its input (not of a first stage), what entered the layers of it, its output, and where its
    layers begin."""

    position: MicroBatch
    x: torch.Tensor | None
    entered: torch.Tensor | None
    y: torch.Tensor
    beginnings: dict[int, Node]


class Stage(HeldLayers):
    """One stage: ``HeldLayers`` that compute.

    Attributes:
        deferred: what the second part of a split backward still needs; None where backward comes in one part.
        routers: this stage's part of the routers' loss; None where the model has none.
        divided: this rank's share of the layers, where a group of ranks holds the stage; else None.
    """

    def __init__(
        self,
        chain: LayerChain,
        first: int,
        last: int,
        backend: Backend,
        dtype: str,
        start: Start | None,
        seed: int = 0,
        tuning: Tuning | None = None,
        recompute: bool = False,
        split_backward: bool = False,
        kept: Kept | None = None,
        slice_sequences: int | None = None,
        shared: Shared | None = None,
        foreign: Collection[str] = (),
        embedding: nn.Parameter | None = None,
        divided: LayerShare | None = None,
    ) -> None:
        """Build own layers only.

        Args:
            start: where the model's weights come from; None leaves them uninitialised, to be filled from a checkpoint.
            seed: the job's seed, which keys the dropout masks and the start of adapters.
            tuning: what is trained; everything by default.
            split_backward: backward will come in two parts, ``backward_input`` and ``backward_weights``. Where adapters are
                trained the second part is empty.
            kept: layers whose frozen weights are there already (``frozen_layers``); ``start`` is not asked for them.
            slice_sequences: a micro-batch is computed in slices of so many sequences, one after the other; None: at once.
            shared: layers that several ranks hold -> the names of the trained parameters that each of them owns.
            foreign: of these, what other ranks own: it has no masters here.
            embedding: that of a tied model, where another stage of this rank holds it: the head shares its values.
            divided: this rank's share of the layers, where a group of ranks holds the stage: each of them builds it, and calls
                ``forward``, ``backward`` and ``evaluate`` with the same tensors, of which all get the same results.

        :raises UserError: the model's files do not fit its configuration.
        """
        self.chain, self.first, self.last, self.layers = chain, first, last, range(first, last)
        self.backend, self.dtype, self.seed = backend, DTYPES[dtype], seed
        self.tuning = tuning if tuning is not None else full_training(chain)
        self.slice_sequences, self.shared, self.foreign = slice_sequences, shared or {}, foreign
        assert divided is None or not (split_backward or slice_sequences), "a group's backward is whole"
        self.divided = divided
        self.masters: dict[str, torch.Tensor] = {}
        self.tied_head: nn.Parameter | None = None
        self.model: Any = chain.frame()
        self._materialize(start, kept or {}, embedding)
        chain.restore_buffers(self.model, backend.device)
        if not backend.shares_keys(self.dtype):
            # From now on transformers repeats keys and values that heads share, as it does itself where a mask is given.
            sdpa_attention.use_gqa_in_sdpa = lambda *_: False
        self.routers = self._router_loss()
        self.parameters = self._trained_parameters()
        if self.divided is not None:
            self.divided.connect(self.model, first, last)
        if recompute or self.tuning.nf4:
            chain.recompute(self.model, recompute)
        set_training(self.model, True)
        self.offloaded: OffloadedGradients | None = None
        self.deferred: WeightGradients | None = None
        if split_backward and self.tuning.full:
            self._put_off_matrices()
        self._trained_layers = {chain.layer_of(name) for name in self.parameters}
        """Layers that hold something trained, be it the head's copy of a tied matrix."""
        if self.tied_head is not None and self.tied_head.requires_grad:
            self._trained_layers.add(last - 1)
        self._beginnings = Beginnings(chain, self.model, first, last)
        self._kept: dict[int, list[_Kept]] = {}
        self._position: MicroBatch | None = None
        if self.tuning.uses_dropout(chain):
            for layer in range(first, last):  # masks depend on (seed, step, first sample, layer) alone
                module = self.model.get_submodule(chain.module_names(layer)[0])
                module.register_forward_pre_hook(partial(self._seed, layer))
        self._input: torch.Tensor | None = None
        if not self.is_first:
            entrance = self.model.get_submodule(chain.module_names(first)[0])
            entrance.register_forward_pre_hook(self._enter, with_kwargs=True)

    @property
    def state_device(self) -> torch.device:
        """Where parameters, masters, gradients and moments are kept between the computations of a layer."""
        return self.backend.device

    @property
    def is_first(self) -> bool:
        """Does this stage take token ids (it holds the embedding)?"""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.chain.layer_count

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
        for part, rows in replace(position, targets=targets).slices(len(x), self.slice_sequences):
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
        report = GradientReadyHooks(self._trained_layers, finished)
        if self.deferred is not None:
            self.deferred.compute(index, report.down_to)
        report.down_to(self.first)

    def _backward(
        self, index: int, dy: torch.Tensor | None, finished: Finished | None = None, borrowed: bool = False
    ) -> torch.Tensor | None:
        slices = self._kept.pop(index)
        report, dxs = GradientReadyHooks(self._trained_layers, finished), []
        for kept, own_dy in zip(slices, parts(dy, [len(one.y) if one.y.dim() else 1 for one in slices]), strict=True):
            # Recomputing has the same input and draws the same random numbers again.
            self._position, self._input = kept.position, kept.entered
            if self.deferred is not None:
                self.deferred.begin(index)
            if kept is slices[-1]:
                report.follow(kept.beginnings)
            if kept.y.requires_grad:  # not where a first stage holds nothing that is trained
                torch.autograd.backward(kept.y, own_dy)
            if self.deferred is not None and borrowed:
                self.deferred.detach_from((kept.x, own_dy))
            if kept.x is not None:
                assert kept.x.grad is not None
                dxs.append(kept.x.grad)
        report.down_to(self.first)
        return joined(dxs) if dxs else None

    def model_parameter(self, name: str) -> nn.Parameter:
        parameter: nn.Parameter = self.model.get_parameter(name)
        return parameter

    def forget(self) -> None:
        """Drop what forwards kept for backwards that will not come."""
        self._kept.clear()
        if self.deferred is not None:
            self.deferred.forget()

    @torch.no_grad()
    def evaluate(
        self,
        x: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        comparison: Comparison | None = None,
        routed: Routed | None = None,
    ) -> torch.Tensor:
        """Forward without dropout and without keeping anything; the last stage returns the *sum* of the losses, or margins."""
        set_training(self.model, False)
        try:
            whole = MicroBatch(0, 0, 0, 1, positions, comparison, routed, targets)
            return self._together(self._evaluated(whole.slices(len(x), self.slice_sequences), x))
        finally:
            set_training(self.model, True)

    def _evaluated(self, slices: Slices, x: torch.Tensor) -> list[torch.Tensor]:
        return [self._compute(self.first, self.last, part, x[rows]) for part, rows in slices]

    def apply(self, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Own layers on ``x``, as the model is called with ``keywords``; the last stage gives what the loss takes."""
        self._input = x
        return self.chain.run(self.model, self.first, self.last, x, **keywords)

    def _compute(self, first: int, last: int, part: MicroBatch, x: torch.Tensor) -> torch.Tensor:
        """Own layers ``[first, last)`` on a slice; after the model's last one the loss."""
        self._position = part
        self._input = x = x if self.routers is None else self.routers.enter(x)
        y = self.chain.run(self.model, first, last, x, **self.chain.isolation(x, part.positions))
        if last == self.chain.layer_count:
            return self._loss(part, y)
        return y if self.routers is None else self.routers.leave(y)

    def _loss(self, part: MicroBatch, y: torch.Tensor) -> torch.Tensor:
        """The share of the loss, of the last layer's output."""
        assert part.targets is not None
        if part.comparison is not None:
            assert part.positions is not None
            of_targets = target_losses if self.divided is None else self.divided.target_losses
            return part.comparison.loss(of_targets(y, part.targets), part.positions) / part.divisor
        summed = self.chain.loss if self.divided is None else self.divided.loss
        loss = summed(y, part.targets) / part.divisor
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

    def before_each_layer(self, call: Callable[[int], None]) -> None:
        for layer in self._trained_layers:
            for name in self.chain.module_names(layer):
                module = self.model.get_submodule(name)
                # Before the hooks by which streamed weights come to the device.
                module.register_forward_pre_hook(lambda *_, layer=layer: call(layer), prepend=True)

    def take_gradients(self, parameter: nn.Parameter, add: Callable[[torch.Tensor], None]) -> None:
        def take(p: torch.Tensor) -> None:
            assert p.grad is not None
            add(p.grad)
            p.grad = None

        if parameter.requires_grad:  # not where the leader of a group trains it
            parameter.register_post_accumulate_grad_hook(take)
        if self.deferred is not None:
            self.deferred.adders[parameter] = add

    def frozen_layers(self, layers: Iterable[int]) -> Kept:
        if self.tuning.full:
            return {}
        return frozen_layers(self.chain, self.model, [layer for layer in layers if layer in self.layers])

    def _materialize(self, start: Start | None, kept: Kept, embedding: nn.Parameter | None) -> None:
        chain, model = self.chain, self.model
        needs_tied_copy = chain.tied is not None and self.is_last
        for layer in range(chain.layer_count):
            own, scales = layer in self.layers, None
            if own and layer in kept:
                take_over(model, kept[layer])
                if self.divided is not None:
                    self.divided.fit(model, layer)
            elif own or (layer == 0 and needs_tied_copy and embedding is None):
                scales = self._fill(start, layer)
            if layer == 0 and needs_tied_copy:
                self._tie(embedding)
            if scales is not None and own:
                self._place(layer, scales)
            if own:
                self._placed(layer)
                return_freed_memory()
            else:
                for name in chain.module_names(layer):
                    model.set_submodule(name, PassThrough())

    def _fill(self, start: Start | None, layer: int) -> Mapping[str, torch.Tensor]:
        """Fill a layer in host memory. Returns the scales for ``quantize`` that parts of tensors have from the whole."""
        if start is not None:
            start.fill(self.chain, self.model, layer)
        else:
            self.chain.vacate(self.model, layer)
        if self.divided is None:
            return {}
        scales = {}
        if self.tuning.double and self._is_packed(layer):
            (name,) = self.chain.module_names(layer)
            scales = self.divided.double_scales(name, self.model.get_submodule(name), self.dtype)
        self.divided.cut(self.model, layer)
        return scales

    def _is_packed(self, layer: int) -> bool:
        return self.tuning.nf4 and 0 < layer < self.chain.layer_count - 1

    def _tie(self, other: nn.Parameter | None) -> None:
        """Give the head its own Parameter over the embedding's values. ``other``: the embedding, where another stage has it.

        Two parameters even on one rank, so that the order of additions in the summed gradient (embedding's + head's) is the
        same for every partition.
        """
        assert self.chain.tied is not None
        head, embedding = self.chain.tied
        module, _, attribute = head.rpartition(".")
        weight = (self.model.get_parameter(embedding) if other is None else other).detach()
        weight = weight if self.is_first or other is not None else weight.to(self.state_device, self.dtype)
        self.tied_head = nn.Parameter(weight, requires_grad=self.tuning.full)
        setattr(self.model.get_submodule(module), attribute, self.tied_head)

    def _place(self, layer: int, scales: Mapping[str, torch.Tensor]) -> None:
        """Move a layer to the device in the compute dtype; keep fp32 masters where that is narrower and weights are trained.

        ``scales``: as ``_fill`` returns them.
        """
        if self._is_packed(layer):
            for name in self.chain.module_names(layer):
                quantize(self.model.get_submodule(name), self.backend.device, self.dtype, self.tuning.double, scales)
        for name in self.chain.module_names(layer):
            for full_name, parameter in self.model.get_submodule(name).named_parameters(prefix=name):
                if parameter is not self.tied_head and parameter.is_floating_point() and not is_empty(parameter):
                    self._place_parameter(full_name, parameter)
        if layer == 0 and self.tied_head is not None:
            assert self.chain.tied is not None
            self.tied_head.data = self.model.get_parameter(self.chain.tied[1]).data

    def _placed(self, layer: int) -> None:
        """A layer's weights are on the device now."""

    def _place_parameter(self, name: str, parameter: nn.Parameter) -> None:
        value = parameter.detach()
        trained = self.tuning.full and name in self.chain.parameters
        if trained and self.divided is not None:
            trained = self.divided.trains(name)
        if not trained:  # narrowed on the host: the device never holds both forms of a matrix that it only reads
            value = value.to(self.chain.dtype_of(name, self.dtype))
        value = value.to(self.state_device)
        if trained and self.dtype != torch.float32 and name not in self.foreign and value.numel():
            self.masters[name] = value
        parameter.data = value.to(self.chain.dtype_of(name, self.dtype))
        parameter.requires_grad_(trained)

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters this rank trains, after adapters are in place."""
        specs = self.tuning.specs(self.first, self.last)
        here = [spec.name for spec in specs if self.divided is None or self.divided.exists(spec.name)]
        if self.tuning.adapter is None:
            return {name: self.model.get_parameter(name) for name in here}
        modules = self.tuning.modules_in(self.first, self.last)
        experts = [n for n in self.tuning.parameters if self.first <= self.chain.layer_of(n) < self.last]
        self.model.is_loaded_in_4bit = self.tuning.nf4  # peft looks here to choose its layers for packed weights
        found = inject(self.model, self.tuning.adapter, modules, experts, self.backend.device, self._adapter_start)
        own = {name: found[name] for name in here}
        # Else peft would bring the inputs of all adapted layers to fp32, and keep them so.
        if self.dtype != torch.float32:
            for name, parameter in own.items():
                if name not in self.foreign:
                    self.masters[name] = parameter.data
                parameter.data = parameter.data.to(self.dtype)
        return own

    def _adapter_start(self, name: str) -> torch.Tensor:
        """The start value of an adapter's tensor, of which a member of a group has its part."""
        whole = start_value(name, self.tuning.trainable[name].shape, self.seed)
        return whole if self.divided is None else self.divided.own(name, whole)

    def _router_loss(self) -> RouterLoss | None:
        routers = self.chain.routers
        if routers is None:
            return None
        own = [name for name in routers.names if self.first <= self.chain.layer_of(name) < self.last]
        position = lambda: self._position.routed if self._position is not None else None  # noqa: E731
        leads = self.divided is None or self.divided.leads
        return RouterLoss(routers, map(self.model.get_submodule, own), position, leads)

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


def dropout_seed(seed: int, position: MicroBatch, layer: int) -> int:
    """Seed of the generator before ``layer`` runs in a micro-batch."""
    return seed_from(seed, "dropout", position.step, position.first_sample, layer)
