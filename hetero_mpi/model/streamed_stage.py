"""Offloaded stage, whose weights exceed device memory: runs layer by layer, each layer on all slices of a micro-batch.

    forward     layer 0 on slices a, b, c | layer 1 on a, b, c | ...      keeps each layer's inputs, prefetches the next weights
    backward    ... | layer 1 on a, b, c | layer 0 on a, b, c             recomputes a layer's forward, then runs its backward

One copy of a layer's weights from host memory (``host_weights``) serves all slices: layered gradient accumulation (Cephalo,
arXiv:2411.01075). Slices whose activations fit on the device keep them and are not recomputed. Adapters and their optimizer state
stay on the device. In full fine-tuning, gradients leave the device layer by layer (``offloaded_gradients``), while masters and
moments stay in host memory. A CPU rank keeps trained tensors in ordinary memory, as each step would rewrite mapped files.
"""

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
from hetero_mpi.model.layer.micro_batch import MicroBatch, Slices, joined, split_rows
from hetero_mpi.model.layer.quantize import unpack_experts
from hetero_mpi.model.offloaded_gradients import OffloadedGradients
from hetero_mpi.model.stage import Stage, StageSpec

Inputs = dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]]
"""Maps each layer to (input, output with its graph, or None if backward recomputes the output) of each slice."""


class StreamedStage(Stage):
    """A ``Stage`` that runs layer by layer; results equal those of a stage with activation checkpointing and the same slices.

    Attributes:
        weights: weights in host memory.
    """

    def __init__(
        self, spec: StageSpec, start: Start | None, kept_layers: Kept | None = None, folder: Path | None = None
    ) -> None:
        """Build the stage; see ``Stage`` for the arguments.

        Args:
            folder: directory for memory-mapped files with frozen weights: those of all layers if the device shares host memory
                (CPUs, integrated GPUs), else those of ``spec.on_disk``. None keeps all weights in memory.

        Raises:
            UserError: The model's files do not match, or the folder cannot hold the mapped files.
        """
        self._folder = folder
        self._host_layers: dict[int, HostLayer] = {}
        super().__init__(spec, start, kept_layers)
        chain, layers = self.chain, range(self.first, self.last)
        self._keeps_graph = self._in_backward = False
        if self.tuning.nf4:  # unpacked experts are not kept: backward recomputes the layer, or at least the experts
            keeps = spec.kept_slices > 0
            unpack_experts(self.model, keeps and (lambda: self._keeps_graph), keeps and self.tuning.uses_dropout(chain))
        self.weights = HostWeights(self._host_layers, self.backend, spec.on_disk if folder is not None else ())
        if self.state_device != self.backend.device:
            self.offloaded = OffloadedGradients(self.backend, self._trained_by_layer(), self.tied_head)
        self._modules = {
            layer: {name: self.model.get_submodule(name) for name in chain.module_names(layer)} for layer in layers
        }
        self._active_layers = set(layers)
        self._layer_inputs: dict[int, tuple[Slices, Inputs]] = {}
        for layer in layers:
            first_module = self._modules[layer][chain.module_names(layer)[0]]
            first_module.register_forward_pre_hook(partial(self._await_weights, layer))
            if layer > self.first:
                first_module.register_forward_pre_hook(self._feed_input_if_alone, with_kwargs=True)

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
            # Embedding and head each have a copy in their layer's block.
            self.storage_of(self.tied_head).copy_(self.parameters[self.chain.tied[1]].data)

    def forward(self, position: MicroBatch, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        slices = replace(position, targets=targets).slices(len(x), self.spec.slice_sequences)
        inputs: Inputs = {}
        outputs = self._run_layers(slices, x, inputs)
        self._layer_inputs[position.index] = slices, inputs
        return self._join_outputs(outputs)

    def _evaluated(self, slices: Slices, x: torch.Tensor) -> list[torch.Tensor]:
        return self._run_layers(slices, x, None)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        yield
        if self.tuning.full and self.backend.device == HOST:
            # Fragmented free memory made ranks grow by 5 % in their second step.
            return_freed_memory()

    def forget(self) -> None:
        super().forget()
        self._layer_inputs.clear()
        self._in_backward = False

    def frozen_layers(self, layers: Iterable[int]) -> Kept:
        """Return nothing: another stage can read the weights from the model's files just as fast."""
        return {}

    def _on_layer_placed(self, layer: int) -> None:
        if self.tuning.full and self.backend.device == HOST:
            return
        modules = [self.model.get_submodule(name) for name in self.chain.module_names(layer)]
        mapped = self.backend.shares_host_memory() or layer in self.spec.on_disk
        folder = self._folder if mapped and not self.tuning.full else None
        rest = sum(other_layer > layer for other_layer in self.spec.on_disk) if layer in self.spec.on_disk else 0
        self._host_layers[layer] = HostLayer(modules, self.backend, folder, not self.tuning.full, rest)
        if self.tuning.full:  # in fp32 the block itself holds the masters
            for spec in self.tuning.specs(layer, layer + 1):
                if spec.name in self.foreign:
                    continue
                self.masters.setdefault(spec.name, self.model.get_parameter(spec.name).data)

    def _trained_by_layer(self) -> dict[int, dict[str, nn.Parameter]]:
        parameters_by_layer: dict[int, dict[str, nn.Parameter]] = {layer: {} for layer in sorted(self.trained_layers)}
        for name, parameter in self.parameters.items():
            parameters_by_layer[self.chain.layer_of(name)][name] = parameter
        for part, owned in self.shared.items():  # in the order of the exchange
            parameters_by_layer[part.layer] = {
                segment.name: self.parameters[segment.name] for segments in owned for segment in segments
            }
        return parameters_by_layer

    def _run_layers(self, slices: Slices, x: torch.Tensor, inputs: Inputs | None) -> list[torch.Tensor]:
        """Run all layers forward, each on every slice, and store in ``inputs`` the tensors from which backward starts."""
        values = [x[rows] for _, rows in slices]
        kept_slices = 0 if inputs is None else self.spec.kept_slices
        for layer in self._activate_each(range(self.first, self.last)):
            passes = [
                self._run_with_graph(layer, part, value)
                if i < kept_slices
                else self._run_without_graph(layer, part, value)
                for i, ((part, _), value) in enumerate(zip(slices, values, strict=True))
            ]
            if inputs is not None:
                inputs[layer] = [(value, y if i < kept_slices else None) for i, (value, y) in enumerate(passes)]
            values = [y.detach() for _, y in passes]
        return values

    def _run_without_graph(
        self, layer: int, part: MicroBatch, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (input, output) of a layer, without a graph, for a backward that recomputes the layer."""
        with torch.no_grad():
            return value, self._compute(layer, layer + 1, part, value)

    def _run_with_graph(self, layer: int, part: MicroBatch, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (input, output) of a layer, with the output's autograd graph."""
        self._keeps_graph = True
        try:
            with torch.enable_grad(), self.weights.referred_to():
                x = value if layer == 0 else value.requires_grad_(True)
                return x, self._compute(layer, layer + 1, part, x)
        finally:
            self._keeps_graph = False

    def _backward(
        self, index: int, dy: torch.Tensor | None, finished: Finished | None = None, borrowed: bool = False
    ) -> torch.Tensor | None:
        slices, inputs = self._layer_inputs.pop(index)
        report = GradientReadyHooks(self.trained_layers, finished)
        gradients = list(split_rows(dy, [rows.stop - rows.start for _, rows in slices]))
        self._in_backward = True
        for layer in self._activate_each(reversed(range(self.first, self.last))):
            self._await_weights(layer)
            if self.offloaded is not None:
                self.offloaded.start_layer(layer)
            for i, ((part, _), (value, y)) in enumerate(zip(slices, inputs.pop(layer), strict=True)):
                x = value
                if y is None:
                    x = value if layer == 0 else value.detach().requires_grad_(True)
                    y = self._compute(layer, layer + 1, part, x)
                if y.requires_grad:  # a frozen embedding's output does not
                    torch.autograd.backward(y, gradients[i])
                gradients[i] = x.grad
            final_from = layer
            if self.offloaded is not None:
                self.offloaded.finish_layer(layer)
                if finished is not None:
                    self.offloaded.wait(newest=False)  # this layer's gradients are still being copied to the host
                    final_from = layer + 1
            report.down_to(final_from)
        if self.offloaded is not None and finished is not None:
            self.offloaded.wait()
        report.down_to(self.first)
        self._in_backward = False
        return None if self.is_first else joined([dx for dx in gradients if dx is not None])

    def _activate_each(self, layers: Iterable[int]) -> Iterator[int]:
        """Activate ``layers`` one at a time; afterwards activate all layers again, for other callers of the model."""
        try:
            for layer in layers:
                self._activate([layer])
                yield layer
        finally:
            self._activate(self._modules)

    def _activate(self, layers: Iterable[int]) -> None:
        """Activate only these layers in the model; all others pass their input through."""
        active = set(layers)
        for layer in self._active_layers ^ active:
            for name, module in self._modules[layer].items():
                self.model.set_submodule(name, module if layer in active else PassThrough())
        self._active_layers = active

    def _feed_input_if_alone(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Replace the module's input with the stored layer input if only one layer is active."""
        return self._feed_input(module, arguments, keywords) if len(self._active_layers) == 1 else None

    def _await_weights(self, layer: int, *_: object) -> None:
        """Wait for a layer's weights before the layer runs, and prefetch those of the layer that runs next."""
        self.weights.need(layer)
        self.weights.prefetch(layer - 1 if self._in_backward else layer + 1, keeping=layer)
