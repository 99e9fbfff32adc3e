"""The layers ``[first, last)`` of the chain with their weights on one device: what a stage holds before it computes.

The whole model's frame is there; the layers this rank does not hold are replaced by modules that pass their input through. So of
a language model transformers' own class runs: attention masks, rotary embeddings, soft-capping and the like are the library's.
Layers keep their global indices, so parameter names are the whole model's everywhere.

Also here: trained rows of a few tokens over a frozen embedding or output projection: the others need neither gradients nor
moments. The numbers are those of peft's ``trainable_token_indices``, which copies the whole matrix in every forward instead.
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
from hetero_mpi.model.layer.loss import RouterLoss
from hetero_mpi.model.layer.micro_batch import MicroBatch
from hetero_mpi.model.layer.quantize import is_empty, quantize
from hetero_mpi.model.tuning import ROWS, Tuning, full_training, inject, start_value


class HeadLosses(Protocol):
    """Losses of what a stage's head gives."""

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The summed loss of logits, of a member of a group those of its words."""

    def target_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of every target."""

    def likeliest(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """How many targets have the largest logit."""


class LayerShare(HeadLosses, Protocol):
    """Which part of a tensor is a member's own, where its share begins and ends, and what the loss is."""

    @property
    def leads(self) -> bool:
        """Whether it is the group's first member."""

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The member's part of a tensor."""

    def exists(self, name: str) -> bool:
        """Has it a part of this tensor?"""

    def trains(self, name: str) -> bool:
        """Whether a trained tensor has a gradient here."""

    def double_scales(self, block: str, module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Name of each tensor in a block that is packed and cut -> the scales of the member's part."""

    def cut(self, model: nn.Module, layer: int) -> None:
        """Leave of a layer in host memory, which is whole, the member's parts."""

    def fit(self, model: nn.Module, layer: int) -> None:
        """Give the modules of a layer, whose tensors are cut, the sizes of these."""

    def connect(self, model: nn.Module, first: int, last: int) -> None:
        """Exchange with the other members where shares of the layers [first, last) begin and end."""

    def start_magnitudes(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Adapted layer of which each member has some columns -> DoRA's start. Collective."""


@dataclass(frozen=True)
class StageSpec:
    """Which layers a stage holds, what of them is trained, and how it computes them."""

    chain: LayerChain
    first: int
    last: int
    backend: Backend
    dtype: str
    seed: int = 0
    """The job's, which keys the dropout masks and the start of adapters."""
    tuning: Tuning | None = None
    """None: everything is trained."""
    recompute: bool = False
    split_backward: bool = False
    """Backward will come in two parts, ``backward_input`` and ``backward_weights``. Where adapters are trained the second part is
    empty."""
    slice_sequences: int | None = None
    """A micro-batch is computed in slices of so many sequences, one after the other; None: at once."""
    kept_slices: int = 0
    """Of a streamed stage: slices of every micro-batch whose forward is not repeated."""
    on_disk: Collection[int] = ()
    """Of a streamed stage: layers whose frozen weights host memory has no room for."""
    shared: Shared = field(default_factory=dict)
    """What several ranks hold -> the segments of trained parameters that each of them owns."""
    foreign: Collection[str] = ()
    """Those of them that other ranks own: they have no masters here."""


class StageLayers(HeldLayers):
    """The modules, weights and masters of a ``Stage``.

    Attributes:
        model: the frame with own layers.
        routers: this stage's part of the routers' loss; None where the model has none.
        divided: this rank's share of the layers, where a group of ranks holds the stage; else None.
    """

    def __init__(
        self,
        spec: StageSpec,
        start: Start | None,
        kept: Kept | None = None,
        beginning: StageLayers | None = None,
        divided: LayerShare | None = None,
    ) -> None:
        """Build own layers only.

        Args:
            start: where the model's weights come from; None leaves them uninitialised, to be filled from a checkpoint.
            kept: layers whose frozen weights are there already (``frozen_layers``); ``start`` is not asked for them.
            beginning: the stage with the embedding of a tied model, where that is another one of this rank: the head shares its
                values.
            divided: this rank's share of the layers, where a group of ranks holds the stage: each of them builds it, and calls
                ``forward``, ``backward`` and ``evaluate`` with the same tensors, of which all get the same results.

        :raises UserError: the model's files do not fit its configuration.
        """
        chain, backend = spec.chain, spec.backend
        self.spec, self.chain, self.first, self.last = spec, chain, spec.first, spec.last
        self.layers, self.backend = range(spec.first, spec.last), backend
        self.dtype, self.seed = DTYPES[spec.dtype], spec.seed
        self.tuning = spec.tuning if spec.tuning is not None else full_training(chain)
        self.shared, self.foreign = spec.shared, spec.foreign
        assert divided is None or not (spec.split_backward or spec.slice_sequences), "a group's backward is whole"
        self.divided = divided
        self.masters: dict[str, torch.Tensor] = {}
        self.tied_head: nn.Parameter | None = None
        self.model: Any = chain.frame()
        self._begun: dict[str, torch.Tensor] = {}
        """Constants of adapters, in host memory."""
        tied = chain.tied if beginning is not None else None
        self._materialize(start, kept or {}, beginning.model_parameter(tied[1]) if beginning and tied else None)
        chain.restore_buffers(self.model, backend.device)
        self._position: MicroBatch | None = None
        """The micro-batch, or the slice of one, that is computed now."""
        self.routers = self._router_loss()
        self.parameters = self._trained_parameters(getattr(start, "values", {}), beginning)
        self.trained_layers = {chain.layer_of(name) for name in self.parameters}
        """Layers that hold something trained, be it the head's copy of a tied matrix."""
        if self.tied_head is not None and self.tied_head.requires_grad:
            self.trained_layers.add(spec.last - 1)

    @property
    def state_device(self) -> torch.device:
        """Where parameters, masters, gradients and moments are kept between the computations of a layer."""
        return self.backend.device

    @property
    def is_first(self) -> bool:
        """Whether this stage takes token ids (it holds the embedding)."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.chain.layer_count

    def model_parameter(self, name: str) -> nn.Parameter:
        parameter: nn.Parameter = self._begun[name] if name in self._begun else self.model.get_parameter(name)
        return parameter

    def before_each_layer(self, call: Callable[[int], None]) -> None:
        for layer in self.trained_layers:
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

    def frozen_layers(self, layers: Iterable[int]) -> Kept:
        if self.tuning.full:
            return {}
        trained = {spec.layer for name, spec in self.tuning.trainable.items() if name in self.chain.parameters}
        wanted = [layer for layer in layers if layer in self.layers and layer not in trained]
        return frozen_layers(self.chain, self.model, wanted)

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
        self.tied_head = nn.Parameter(weight, requires_grad=embedding in self.tuning.trainable)
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
        trained = name in self.tuning.trainable and name not in self.tuning.still
        if trained and self.divided is not None:
            trained = self.divided.trains(name)
        if not trained:  # narrowed on the host: the device never holds both forms of a matrix that it only reads
            value = value.to(self.chain.dtype_of(name, self.dtype))
        value = value.to(self.state_device)
        if trained and self.dtype != torch.float32 and name not in self.foreign and value.numel():
            self.masters[name] = value
        parameter.data = value.to(self.chain.dtype_of(name, self.dtype))
        parameter.requires_grad_(trained)

    def _trained_parameters(
        self, values: Mapping[str, torch.Tensor], beginning: StageLayers | None
    ) -> dict[str, nn.Parameter]:
        """The parameters this rank trains, after adapters are in place. ``values``: what adapters begin with, where known."""
        specs = self.tuning.specs(self.first, self.last)
        here = [spec.name for spec in specs if self.divided is None or self.divided.exists(spec.name)]
        whole = {name: self.model.get_parameter(name) for name in here if name in self.chain.parameters}
        if self.tuning.adapter is None:
            return whole
        again = [one for one in (*whole.values(), self.tied_head) if one is not None and one.requires_grad]
        modules = self.tuning.modules_in(self.first, self.last)
        experts = [n for n in self.tuning.parameters if self.first <= self.chain.layer_of(n) < self.last]
        experts = [n for n in experts if self.divided is None or self.divided.exists(n)]
        self.model.is_loaded_in_4bit = self.tuning.nf4  # peft looks here to choose its layers for packed weights
        for name, spec in self.tuning.constants.items():
            if self.first <= spec.layer < self.last:
                self._begun[name] = values[name].clone() if name in values else torch.zeros(spec.shape)
        started = partial(self._adapter_start, values)
        found = inject(self.model, self.tuning.adapter, modules, experts, self.backend.device, started)
        for name in (name for name in here if name in found):
            if self.divided is not None and not self.divided.trains(
                name
            ):  # all members compute it; the leader's counts
                found[name].register_hook(torch.zeros_like)
        for parameter in again:
            parameter.requires_grad_(True)
        found |= self._token_rows(here)
        # Else peft would bring the inputs of all adapted layers to fp32, and keep them so.
        if self.dtype != torch.float32:
            for name, parameter in found.items():
                if name in here and name not in self.foreign:
                    self.masters[name] = parameter.data
                parameter.data = parameter.data.to(self.dtype, copy=True)
        self._tie_rows(found if self.is_first else beginning.parameters if beginning is not None else {})
        found |= whole
        return {name: found[name] for name in here}

    def _token_rows(self, here: Iterable[str]) -> dict[str, nn.Parameter]:
        """Trained rows (fp32, on the device), which begin as the frozen ones."""
        found = {}
        for name in (name for name in here if name.endswith(ROWS)):
            module: Any = self.model.get_submodule(name.removesuffix(ROWS))
            rows = module.weight.detach()[self.tuning.tokens].to(self.backend.device, torch.float32)
            found[name] = nn.Parameter(rows)
            use_rows(module, self.tuning.tokens, found[name])
        return found

    def _tie_rows(self, at_the_beginning: Mapping[str, nn.Parameter]) -> None:
        """Give the head its own Parameter of rows that are trained at both ends, as ``_tie`` does it with the whole matrix."""
        name = self.tuning.tied(self.chain) or ""
        if self.tied_head is not None and self.chain.tied is not None and name.endswith(ROWS):
            own = self.tied_head.detach()[self.tuning.tokens].to(self.backend.device)
            self.tied_head = nn.Parameter(at_the_beginning[name].data if name in at_the_beginning else own)
            head = self.chain.tied[0].rpartition(".")[0]
            use_rows(self.model.get_submodule(head), self.tuning.tokens, self.tied_head)

    def _adapter_start(self, values: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """The start value of an adapter's tensor, of which a member of a group has its part."""
        whole = values.get(name)
        if whole is None:
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


def use_rows(module: Any, tokens: Sequence[int], rows: nn.Parameter) -> None:
    """From now on an embedding, or a linear layer, computes with ``rows`` (tokens, width) for these tokens, ascending."""
    places = torch.tensor(tokens, device=rows.device)
    if isinstance(module, nn.Embedding):
        padding = tokens.index(module.padding_idx) if module.padding_idx in tokens else None
        small = copy.copy(module)  # a family's own embedding may scale what it looks up
        vars(small).update(_parameters={"weight": rows}, num_embeddings=len(tokens), padding_idx=padding)

    def look_up(_: nn.Module, given: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        found = torch.searchsorted(places, given[0]).clamp(max=len(tokens) - 1)
        here = (places[found] == given[0]).unsqueeze(-1)
        return torch.where(here, type(small).forward(small, found), output)

    def project(_: nn.Module, given: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        bias = None if module.bias is None else module.bias[places]
        return output.index_copy_(-1, places, F.linear(given[0], rows, bias))

    module.register_forward_hook(look_up if isinstance(module, nn.Embedding) else project)
