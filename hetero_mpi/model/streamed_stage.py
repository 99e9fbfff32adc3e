"""A stage that holds more than its device: layer by layer, each on all slices of a micro-batch.

Forward keeps the inputs of all layers. Backward takes the layers from the last to the first: it repeats a layer's forward and
goes back through it. Slices for whose activations there is room are kept instead, and not repeated. Weights are in host memory
(``host_weights``) and come to the device one layer ahead, so one copy serves all slices (Cephalo, arXiv:2411.01075, calls it
layered gradient accumulation). Adapters and their state stay on the device. Where all weights are trained, gradients leave it
layer by layer (``offloaded_gradients``), and masters and moments are never there.
A rank that computes in host memory (a CPU) keeps what is trained in its ordinary memory, since every step reads and writes all of
it: of mapped files, each would be written to the disk in every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero_mpi.device.backend import HOST, return_freed_memory
from hetero_mpi.model.held_layers import Kept
from hetero_mpi.model.host_weights import HostLayer, HostWeights
from hetero_mpi.model.layer.gradients import Finished, GradientReadyHooks
from hetero_mpi.model.layer.interface import PassThrough, Start
from hetero_mpi.model.layer.micro_batch import MicroBatch, Slices, joined, parts
from hetero_mpi.model.layer.quantize import refer_to_packed, unpack_experts
from hetero_mpi.model.offloaded_gradients import OffloadedGradients
from hetero_mpi.model.stage import Stage, StageSpec

Inputs = dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]]
"""Layer -> of every slice its input, and its output where that was computed so that backward can begin with it."""


class StreamedStage(Stage):
    """A ``Stage`` whose layers are computed one by one; the same numbers as of one that recomputes, in slices as large.

    Attributes:
        weights: those in host memory.
    """

    def __init__(
        self, spec: StageSpec, start: Start | None, kept: Kept | None = None, folder: Path | None = None
    ) -> None:
        """As ``Stage``. ``folder``: where mapped files go, of what is frozen beside adapters: of all layers on a rank that computes
        in the host's own memory (integrated GPUs too), else of ``spec.on_disk``; None: all is in memory.

        :raises UserError: also where the folder cannot take the files.
        """
        self._folder = folder
        self._host_layers: dict[int, HostLayer] = {}
        super().__init__(spec, start, kept)
        chain, layers = self.chain, range(self.first, self.last)
        self._keeping = self._backwards = False
        if self.tuning.nf4:  # backward repeats each layer's forward just before, or else the experts'
            keeps = spec.kept_slices > 0
            unpack_experts(self.model, keeps and (lambda: self._keeping), keeps and self.tuning.uses_dropout(chain))
            if keeps and self.backend.device != HOST:
                refer_to_packed(self.model)
        self.weights = HostWeights(self._host_layers, self.backend, spec.on_disk if folder is not None else ())
        if self.state_device != self.backend.device:
            self.offloaded = OffloadedGradients(self.backend, self._trained_by_layer(), self.tied_head)
        self._modules = {
            layer: {name: self.model.get_submodule(name) for name in chain.module_names(layer)} for layer in layers
        }
        self._shown = set(layers)
        self._layer_inputs: dict[int, tuple[Slices, Inputs]] = {}
        for layer in layers:
            entrance = self._modules[layer][chain.module_names(layer)[0]]
            entrance.register_forward_pre_hook(partial(self._arrive, layer))
            if layer > self.first:
                entrance.register_forward_pre_hook(self._enter_alone, with_kwargs=True)

    @property
    def state_device(self) -> torch.device:
        return HOST if self.tuning.full else self.backend.device

    def storage_of(self, parameter: nn.Parameter) -> torch.Tensor:
        if self.tuning.full:
            self.weights.release()
        return parameter.data

    def overwrite(self, values: Mapping[str, torch.Tensor]) -> None:
        super().overwrite(values)
        if self.offloaded is not None and self.chain.tied is not None and self.tied_head is not None and self.is_first:
            # Each end of the matrix is in its own layer's block.
            self.storage_of(self.tied_head).copy_(self.parameters[self.chain.tied[1]].data)

    def forward(self, position: MicroBatch, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        slices = replace(position, targets=targets).slices(len(x), self.spec.slice_sequences)
        inputs: Inputs = {}
        outputs = self._through(slices, x, inputs)
        self._layer_inputs[position.index] = slices, inputs
        return self._together(outputs)

    def _evaluated(self, slices: Slices, x: torch.Tensor) -> list[torch.Tensor]:
        return self._through(slices, x, None)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        yield
        if self.tuning.full and self.backend.device == HOST:
            # Freed blocks between others would not all fit the next step's: ranks grew by a twentieth in their second step.
            return_freed_memory()

    def forget(self) -> None:
        super().forget()
        self._layer_inputs.clear()
        self._backwards = False

    def frozen_layers(self, layers: Iterable[int]) -> Kept:
        """None: another stage would have to bring them to the device, and reads them from the model's files as well."""
        return {}

    def _placed(self, layer: int) -> None:
        if self.tuning.full and self.backend.device == HOST:
            return
        modules = [self.model.get_submodule(name) for name in self.chain.module_names(layer)]
        mapped = self.backend.shares_host_memory() or layer in self.spec.on_disk
        folder = self._folder if mapped and not self.tuning.full else None
        more = sum(one > layer for one in self.spec.on_disk) if layer in self.spec.on_disk else 0
        self._host_layers[layer] = HostLayer(modules, self.backend, folder, not self.tuning.full, more)
        if self.tuning.full:  # in fp32 the block has the masters
            for spec in self.tuning.specs(layer, layer + 1):
                if spec.name in self.foreign:
                    continue
                self.masters.setdefault(spec.name, self.model.get_parameter(spec.name).data)

    def _trained_by_layer(self) -> dict[int, dict[str, nn.Parameter]]:
        found: dict[int, dict[str, nn.Parameter]] = {layer: {} for layer in sorted(self.trained_layers)}
        for name, parameter in self.parameters.items():
            found[self.chain.layer_of(name)][name] = parameter
        for part, owned in self.shared.items():  # in the order in which they are exchanged
            found[part.layer] = {one.name: self.parameters[one.name] for segments in owned for one in segments}
        return found

    def _through(self, slices: Slices, x: torch.Tensor, inputs: Inputs | None) -> list[torch.Tensor]:
        """All layers forward, each on every slice; what backward begins with is noted."""
        values = [x[rows] for _, rows in slices]
        most = 0 if inputs is None else self.spec.kept_slices
        for layer in self._one_by_one(range(self.first, self.last)):
            found = [
                self._kept_pass(layer, part, value) if place < most else self._passed(layer, part, value)
                for place, ((part, _), value) in enumerate(zip(slices, values, strict=True))
            ]
            if inputs is not None:
                inputs[layer] = [(value, y if place < most else None) for place, (value, y) in enumerate(found)]
            values = [y.detach() for _, y in found]
        return values

    def _passed(self, layer: int, part: MicroBatch, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's input and output, for a backward that repeats it."""
        with torch.no_grad():
            return value, self._compute(layer, layer + 1, part, value)

    def _kept_pass(self, layer: int, part: MicroBatch, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, with all that backward needs."""
        self._keeping = True
        try:
            with torch.enable_grad(), self.weights.referred_to():
                x = value if layer == 0 else value.requires_grad_(True)
                return x, self._compute(layer, layer + 1, part, x)
        finally:
            self._keeping = False

    def _backward(
        self, index: int, dy: torch.Tensor | None, finished: Finished | None = None, borrowed: bool = False
    ) -> torch.Tensor | None:
        slices, inputs = self._layer_inputs.pop(index)
        report = GradientReadyHooks(self.trained_layers, finished)
        gradients = list(parts(dy, [rows.stop - rows.start for _, rows in slices]))
        self._backwards = True
        for layer in self._one_by_one(reversed(range(self.first, self.last))):
            self._arrive(layer)
            if self.offloaded is not None:
                self.offloaded.begin(layer)
            for place, ((part, _), (value, y)) in enumerate(zip(slices, inputs.pop(layer), strict=True)):
                x = value
                if y is None:
                    x = value if layer == 0 else value.detach().requires_grad_(True)
                    y = self._compute(layer, layer + 1, part, x)
                if y.requires_grad:  # not of an embedding that is not trained
                    torch.autograd.backward(y, gradients[place])
                gradients[place] = x.grad
            whole_from = layer
            if self.offloaded is not None:
                self.offloaded.end(layer)
                if finished is not None:
                    self.offloaded.wait(newest=False)  # gradients of the layer itself are on their way to host memory
                    whole_from = layer + 1
            report.down_to(whole_from)
        if self.offloaded is not None and finished is not None:
            self.offloaded.wait()
        report.down_to(self.first)
        self._backwards = False
        return None if self.is_first else joined([dx for dx in gradients if dx is not None])

    def _one_by_one(self, layers: Iterable[int]) -> Iterator[int]:
        """Each of ``layers``, which computes alone meanwhile; whoever calls the model between actions finds all layers."""
        try:
            for layer in layers:
                self._show([layer])
                yield layer
        finally:
            self._show(self._modules)

    def _show(self, layers: Iterable[int]) -> None:
        """Only these layers compute when the model is called; others hand their input on."""
        wanted = set(layers)
        for layer in self._shown ^ wanted:
            for name, module in self._modules[layer].items():
                self.model.set_submodule(name, module if layer in wanted else PassThrough())
        self._shown = wanted

    def _enter_alone(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The layer's input, where no layer before it makes it now."""
        return self._enter(module, arguments, keywords) if len(self._shown) == 1 else None

    def _arrive(self, layer: int, *_: object) -> None:
        """A layer begins: its weights must be there, and those of the next one may come."""
        self.weights.need(layer)
        self.weights.prefetch(layer - 1 if self._backwards else layer + 1, keeping=layer)
