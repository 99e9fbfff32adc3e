"""The layers ``[first, last)`` of a stage: modules and weights on one device, without forward and backward.

    model of 4 blocks, stage [2, 4):   PassThrough  PassThrough  block 1  block 2  PassThrough  PassThrough
    layer                              0 embedding  1            2        3        4            5 head

A stage's model is the whole model, with the layers of other ranks replaced by modules that pass their input through. So
transformers' own class runs, with its attention masks, rotary embeddings and soft-capping, and parameters keep their usual names.

``use_rows`` trains the rows of a few tokens over a frozen embedding or head, so that other rows need neither gradients nor moments.
Results equal those of peft's ``trainable_token_indices``, which copies the whole matrix in every forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from hetero_mpi.device.backend import DTYPES, Backend, return_freed_memory
from hetero_mpi.model.held_layers import HeldLayers, Kept, Shared, frozen_layers, take_over
from hetero_mpi.model.layer.interface import LayerChain, PassThrough, Start
from hetero_mpi.model.layer.lora import join_products
from hetero_mpi.model.layer.loss import RouterLoss
from hetero_mpi.model.layer.micro_batch import MicroBatch
from hetero_mpi.model.layer.quantize import is_empty, quantize
from hetero_mpi.model.tuning import ROWS, Tuning, full_training, inject, start_value


class HeadLosses(Protocol):
    """Loss functions that take the output of a stage's head."""

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the summed loss of the logits; a tensor-parallel rank passes the logits of its vocabulary shard."""

    def target_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each target."""

    def likeliest(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the number of targets that have the largest logit."""


class LayerShare(HeadLosses, Protocol):
    """A tensor-parallel rank's shards of a stage's tensors, with the rank's exchanges and loss functions."""

    @property
    def leads(self) -> bool:
        """Whether this is the group's first rank."""

    def shard(self, name: str, full_tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor."""

    def exists(self, name: str) -> bool:
        """Return whether this rank has a shard of the tensor."""

    def trains(self, name: str) -> bool:
        """Return whether a trained tensor has a gradient on this rank."""

    def double_scales(self, block: str, module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Map the name of each packed, sharded tensor of a block to the NF4 scales of this rank's shard."""

    def cut(self, model: nn.Module, layer: int) -> None:
        """Replace a full layer in host memory by this rank's shards."""

    def fit(self, model: nn.Module, layer: int) -> None:
        """Set the sizes of a layer's modules to those of their sharded tensors."""

    def connect(self, model: nn.Module, first: int, last: int) -> None:
        """Register the exchanges before and after the sharded modules of layers ``[first, last)``."""

    def start_magnitudes(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Map each adapted layer that is sharded by columns to its initial DoRA magnitudes. Collective."""


@dataclass(frozen=True)
class StageSpec:
    """The layers, trained parameters and memory strategy of a stage."""

    chain: LayerChain
    first: int
    last: int
    backend: Backend
    dtype: str
    seed: int = 0
    """The job's seed, for dropout masks and initial adapters."""
    tuning: Tuning | None = None
    """What is trained; None for full fine-tuning."""
    recompute: bool = False
    split_backward: bool = False
    """Whether backward runs in two parts, ``backward_input`` and ``backward_weights``; with adapters the second part is empty."""
    slice_sequences: int | None = None
    """Number of sequences per slice; a micro-batch is computed slice by slice. None for one slice."""
    kept_slices: int = 0
    """For offloaded stages: number of slices per micro-batch whose forward is not recomputed."""
    on_disk: Collection[int] = ()
    """For offloaded stages: layers whose frozen weights exceed host memory."""
    shared: Shared = field(default_factory=dict)
    """Maps each shared part to the segments of trained parameters that each of its ranks owns."""
    foreign: Collection[str] = ()
    """Trained parameters that other ranks own and that have no masters on this rank."""
    compiled: bool = False
    """Whether to compile the blocks (``layer.compiled``); ignored if backward is split or the stage is sharded."""


class StageLayers(HeldLayers):
    """The modules, weights and masters of a ``Stage``.

    Attributes:
        model: the whole model, in which only this stage's layers have weights.
        routers: router loss of this stage; None if the model has none.
        divided: this rank's shard of the layers; None if the stage is not sharded.
    """

    def __init__(
        self,
        spec: StageSpec,
        start: Start | None,
        kept_layers: Kept | None = None,
        first_stage: StageLayers | None = None,
        divided: LayerShare | None = None,
    ) -> None:
        """Build this stage's layers only.

        Args:
            start: source of the weights; None leaves them uninitialised, to be filled from a checkpoint.
            kept_layers: layers whose frozen weights are already in memory (``frozen_layers``) and are not read from ``start``.
            first_stage: another stage of this rank that holds a tied model's embedding, whose values the head shares.
            divided: this rank's shard of the layers under tensor parallelism. All ranks of the group build the stage, call
                ``forward``, ``backward`` and ``evaluate`` with the same tensors, and get the same results.

        Raises:
            UserError: The model's files do not match its configuration.
        """
        chain, backend = spec.chain, spec.backend
        self.spec, self.chain, self.first, self.last = spec, chain, spec.first, spec.last
        self.layers, self.backend = range(spec.first, spec.last), backend
        self.dtype, self.seed = DTYPES[spec.dtype], spec.seed
        self.tuning = spec.tuning if spec.tuning is not None else full_training(chain)
        self.shared, self.foreign = spec.shared, spec.foreign
        assert divided is None or not (spec.split_backward or spec.slice_sequences), "a group neither splits nor slices"
        self.divided = divided
        self.masters: dict[str, torch.Tensor] = {}
        self.tied_head: nn.Parameter | None = None
        self.model: Any = chain.frame()
        self._initial: dict[str, torch.Tensor] = {}
        """Initial adapter tensors that were subtracted from the weights, in host memory."""
        tied = chain.tied if first_stage is not None else None
        self._materialize(
            start, kept_layers or {}, first_stage.model_parameter(tied[1]) if first_stage and tied else None
        )
        chain.restore_buffers(self.model, backend.device)
        self._position: MicroBatch | None = None
        """The micro-batch or slice that is being computed."""
        self.routers = self._router_loss()
        self.parameters = self._trained_parameters(getattr(start, "values", {}), first_stage)
        # fp32 keeps peft's order of sums, to 1e-6 of every gradient; the compiler joins these operations itself.
        if self.dtype != torch.float32 and not spec.compiled:
            join_products(self.model)
        self.trained_layers = {chain.layer_of(name) for name in self.parameters}
        """Layers with trained tensors, including the head if it has a copy of a trained tied matrix."""
        if self.tied_head is not None and self.tied_head.requires_grad:
            self.trained_layers.add(spec.last - 1)

    @property
    def state_device(self) -> torch.device:
        """The device of parameters, masters, gradients and moments while their layer is not being computed."""
        return self.backend.device

    @property
    def is_first(self) -> bool:
        """Whether this stage takes token ids because it holds the embedding."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.chain.layer_count

    def model_parameter(self, name: str) -> nn.Parameter:
        parameter: nn.Parameter = self._initial[name] if name in self._initial else self.model.get_parameter(name)
        return parameter

    def before_each_layer(self, call: Callable[[int], None]) -> None:
        for layer in self.trained_layers:
            for name in self.chain.module_names(layer):
                module = self.model.get_submodule(name)
                # Before the hooks that copy offloaded weights to the device.
                module.register_forward_pre_hook(lambda *_, layer=layer: call(layer), prepend=True)

    def take_gradients(self, parameter: nn.Parameter, add: Callable[[torch.Tensor], None]) -> None:
        def pass_on(p: torch.Tensor) -> None:
            assert p.grad is not None
            add(p.grad)
            p.grad = None

        if parameter.requires_grad:  # false if only the group's leader trains it
            parameter.register_post_accumulate_grad_hook(pass_on)

    def frozen_layers(self, layers: Iterable[int]) -> Kept:
        if self.tuning.full:
            return {}
        trained = {spec.layer for name, spec in self.tuning.trainable.items() if name in self.chain.parameters}
        frozen = [layer for layer in layers if layer in self.layers and layer not in trained]
        return frozen_layers(self.chain, self.model, frozen)

    def _materialize(self, start: Start | None, kept_layers: Kept, embedding: nn.Parameter | None) -> None:
        chain, model = self.chain, self.model
        needs_tied_copy = chain.tied is not None and self.is_last
        for layer in range(chain.layer_count):
            is_local, scales = layer in self.layers, None
            if is_local and layer in kept_layers:
                take_over(model, kept_layers[layer])
                if self.divided is not None:
                    self.divided.fit(model, layer)
            elif is_local or (layer == 0 and needs_tied_copy and embedding is None):
                scales = self._fill(start, layer)
            if layer == 0 and needs_tied_copy:
                self._tie(embedding)
            if scales is not None and is_local:
                self._place(layer, scales)
            if is_local:
                self._on_layer_placed(layer)
                return_freed_memory()
            else:
                for name in chain.module_names(layer):
                    model.set_submodule(name, PassThrough())

    def _fill(self, start: Start | None, layer: int) -> Mapping[str, torch.Tensor]:
        """Fill a layer in host memory and return the NF4 scales of its shards, which are computed from the full tensors."""
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

    def _tie(self, other_embedding: nn.Parameter | None) -> None:
        """Give the head its own Parameter with the embedding's values, or with those of another stage's ``other_embedding``.

        With separate parameters even on one rank, the summed gradient is added in the same order for every partition.
        """
        assert self.chain.tied is not None
        head, embedding = self.chain.tied
        module, _, attribute = head.rpartition(".")
        weight = (self.model.get_parameter(embedding) if other_embedding is None else other_embedding).detach()
        weight = weight if self.is_first or other_embedding is not None else weight.to(self.state_device, self.dtype)
        self.tied_head = nn.Parameter(weight, requires_grad=embedding in self.tuning.trainable)
        setattr(self.model.get_submodule(module), attribute, self.tied_head)

    def _place(self, layer: int, scales: Mapping[str, torch.Tensor]) -> None:
        """Move a layer to the device in the compute dtype, and keep fp32 masters of trained weights if that dtype is narrower.

        ``scales`` is the result of ``_fill``.
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

    def _on_layer_placed(self, layer: int) -> None:
        """Hook that is called once a layer's weights are on the device."""

    def _place_parameter(self, name: str, parameter: nn.Parameter) -> None:
        value = parameter.detach()
        trained = name in self.tuning.trainable and name not in self.tuning.still
        if trained and self.divided is not None:
            trained = self.divided.trains(name)
        if not trained:  # converted on the host, so that the device never holds a frozen matrix in both dtypes
            value = value.to(self.chain.dtype_of(name, self.dtype))
        value = value.to(self.state_device)
        if trained and self.dtype != torch.float32 and name not in self.foreign and value.numel():
            self.masters[name] = value
        parameter.data = value.to(self.chain.dtype_of(name, self.dtype))
        parameter.requires_grad_(trained)

    def _trained_parameters(
        self, values: Mapping[str, torch.Tensor], first_stage: StageLayers | None
    ) -> dict[str, nn.Parameter]:
        """Inject adapters and return the parameters that this rank trains. ``values`` overrides the adapters' initial values."""
        specs = self.tuning.specs(self.first, self.last)
        local = [spec.name for spec in specs if self.divided is None or self.divided.exists(spec.name)]
        plain = {name: self.model.get_parameter(name) for name in local if name in self.chain.parameters}
        if self.tuning.adapter is None:
            return plain
        retrained = [p for p in (*plain.values(), self.tied_head) if p is not None and p.requires_grad]
        modules = self.tuning.modules_in(self.first, self.last)
        experts = [n for n in self.tuning.parameters if self.first <= self.chain.layer_of(n) < self.last]
        experts = [n for n in experts if self.divided is None or self.divided.exists(n)]
        self.model.is_loaded_in_4bit = self.tuning.nf4  # peft chooses its layers for packed weights by this attribute
        for name, spec in self.tuning.constants.items():
            if self.first <= spec.layer < self.last:
                self._initial[name] = values[name].clone() if name in values else torch.zeros(spec.shape)
        start_value_of = partial(self._adapter_start, values)
        adapters = inject(self.model, self.tuning.adapter, modules, experts, self.backend.device, start_value_of)
        for name in (name for name in local if name in adapters):
            if self.divided is not None and not self.divided.trains(name):  # all compute it; only the leader's is used
                adapters[name].register_hook(torch.zeros_like)
        for parameter in retrained:
            parameter.requires_grad_(True)
        adapters |= self._token_rows(local)
        # fp32 adapters would make peft convert the inputs of all adapted layers to fp32 and keep them.
        if self.dtype != torch.float32:
            for name, parameter in adapters.items():
                if name in local and name not in self.foreign:
                    self.masters[name] = parameter.data
                parameter.data = parameter.data.to(self.dtype, copy=True)
        self._tie_rows(adapters if self.is_first else first_stage.parameters if first_stage is not None else {})
        adapters |= plain
        return {name: adapters[name] for name in local}

    def _token_rows(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """Create trainable token rows (fp32, on the device), initialised from the frozen rows."""
        rows_by_name = {}
        for name in (name for name in names if name.endswith(ROWS)):
            module: Any = self.model.get_submodule(name.removesuffix(ROWS))
            rows = module.weight.detach()[self.tuning.tokens].to(self.backend.device, torch.float32)
            rows_by_name[name] = nn.Parameter(rows)
            use_rows(module, self.tuning.tokens, rows_by_name[name])
        return rows_by_name

    def _tie_rows(self, first_parameters: Mapping[str, nn.Parameter]) -> None:
        """Give the head its own Parameter for tied token rows, as ``_tie`` does for the whole matrix."""
        name = self.tuning.tied(self.chain) or ""
        if self.tied_head is not None and self.chain.tied is not None and name.endswith(ROWS):
            head_rows = self.tied_head.detach()[self.tuning.tokens].to(self.backend.device)
            self.tied_head = nn.Parameter(first_parameters[name].data if name in first_parameters else head_rows)
            head = self.chain.tied[0].rpartition(".")[0]
            use_rows(self.model.get_submodule(head), self.tuning.tokens, self.tied_head)

    def _adapter_start(self, values: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """Return the initial value of an adapter tensor, or of this rank's shard of the tensor."""
        full_tensor = values.get(name)
        if full_tensor is None:
            full_tensor = start_value(name, self.tuning.trainable[name].shape, self.seed)
        return full_tensor if self.divided is None else self.divided.shard(name, full_tensor)

    def _router_loss(self) -> RouterLoss | None:
        routers = self.chain.routers
        if routers is None:
            return None
        router_names = [name for name in routers.names if self.first <= self.chain.layer_of(name) < self.last]
        position = lambda: self._position.routed if self._position is not None else None  # noqa: E731
        leads = self.divided is None or self.divided.leads
        return RouterLoss(routers, map(self.model.get_submodule, router_names), position, leads)


def use_rows(module: Any, tokens: Sequence[int], rows: nn.Parameter) -> None:
    """Make an embedding or linear layer use ``rows`` (tokens, width) for the given tokens, which are in ascending order."""
    token_ids = torch.tensor(tokens, device=rows.device)
    if isinstance(module, nn.Embedding):
        padding = tokens.index(module.padding_idx) if module.padding_idx in tokens else None
        row_module = copy.copy(module)  # a subclass of Embedding may scale its output
        vars(row_module).update(_parameters={"weight": rows}, num_embeddings=len(tokens), padding_idx=padding)

    def look_up(_: nn.Module, arguments: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        row_indices = torch.searchsorted(token_ids, arguments[0]).clamp(max=len(tokens) - 1)
        is_trained = (token_ids[row_indices] == arguments[0]).unsqueeze(-1)
        return torch.where(is_trained, type(row_module).forward(row_module, row_indices), output)

    def project(_: nn.Module, arguments: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        bias = None if module.bias is None else module.bias[token_ids]
        return output.index_copy_(-1, token_ids, F.linear(arguments[0], rows, bias))

    module.register_forward_hook(look_up if isinstance(module, nn.Embedding) else project)
