"""A model as a chain of items: embedding, block 0 .. block L-1, head (final norm and output projection).

``base_model_pp_plan`` of transformers' configurations says which modules come before and after the blocks. Everything here is
on torch's meta device: names and shapes, no memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hetero_mpi.errors import UserError
from hetero_mpi.planning.cost import EMBEDDING, HEAD


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of the whole model: the item that holds it and its shape."""

    name: str
    item: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return int(torch.Size(self.shape).numel())


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """transformers' own model class, whole, fp32, without memory. Its constants are parameters without a gradient."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _constants_to_parameters(model)
    return model


def _constants_to_parameters(model: PreTrainedModel) -> None:
    """Buffers that are in a model's files (a router's correction, a layer's scale) become frozen parameters.

    So one mechanism reads, places, keeps and writes whatever is in the files.
    """
    in_files = model.state_dict().keys()
    for prefix, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if f"{prefix}.{name}" in in_files:
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def uses_dropout(model: nn.Module) -> bool:
    """Does any layer draw random numbers in training: a dropout module, or a rate (``hidden_dropout``, a router's jitter)?"""
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or any(
            isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name)
            for name, value in vars(module).items()
        )
        for module in model.modules()
    )


class Chain:
    """Names, shapes and kinds of a model's items.

    Attributes:
        items: number of items, blocks + 2.
        parameters: name -> ``ParameterSpec``, in the model's own order, each tensor that can be trained once.
        constants: name -> ``ParameterSpec`` of what is in the model's files but is never trained.
        tied: (head's name, embedding's name) when the head's matrix *is* the embedding's, else None.
        kinds: kind of each item; blocks with equal shapes and attention type share one.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config
        self._fp32_names: dict[torch.dtype, set[str]] = {}
        self.model = build_on_meta(config)
        plan = self.model._pp_plan or {}
        base = self.model.base_model_prefix
        inner = [name for name in plan if name.startswith(f"{base}.")]
        outer = [name for name in plan if not name.startswith(f"{base}.")]
        lists = [
            name for name, module in self.model.named_modules() if name in inner and isinstance(module, nn.ModuleList)
        ]
        if len(lists) != 1 or not outer:
            raise UserError(
                f"the {config.model_type} family declares no pipeline plan in transformers that hetero_mpi can follow"
            )
        self.blocks_name = lists[0]
        position = inner.index(self.blocks_name)
        self.before_names = tuple(inner[:position])
        self.after_names = tuple(inner[position + 1 :] + outer)
        self.blocks = len(self.model.get_submodule(self.blocks_name))
        self.items = self.blocks + 2
        self.tied = self._tied_pair()
        held = {
            name: (ParameterSpec(name, self.item_of(name), tuple(parameter.shape)), parameter.requires_grad)
            for name, parameter in self.model.named_parameters()
            if self.tied is None or name != self.tied[0]
        }
        self.parameters = {name: spec for name, (spec, trained) in held.items() if trained}
        self.constants = {name: spec for name, (spec, trained) in held.items() if not trained}
        self._refuse_strays()
        self.kinds = self._kinds()

    def module_names(self, item: int) -> tuple[str, ...]:
        """Qualified names of the modules that make up an item."""
        if item == 0:
            return self.before_names
        if item == self.items - 1:
            return self.after_names
        return (f"{self.blocks_name}.{item - 1}",)

    def item_of(self, name: str) -> int:
        """Index of the item that holds the parameter or module ``name``."""
        if name.startswith(f"{self.blocks_name}."):
            return int(name[len(self.blocks_name) + 1 :].split(".", 1)[0]) + 1
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in self.before_names):
            return 0
        return self.items - 1

    def dtype_of(self, name: str, compute: torch.dtype) -> torch.dtype:
        """The dtype a tensor has where ``compute`` is the model's: some families keep routers and decays in fp32."""
        if compute == torch.float32:
            return compute
        if compute not in self._fp32_names:
            with torch.device("meta"):
                narrow = AutoModelForCausalLM.from_config(self.config, dtype=compute)
            patterns = [pattern.replace("*", ".*") for pattern in narrow._get_dtype_plan(compute)]
            self._fp32_names[compute] = {
                name
                for name, tensor in narrow.state_dict().items()
                if tensor.dtype == torch.float32 or any(re.search(pattern, name) for pattern in patterns)
            }
        return torch.float32 if name in self._fp32_names[compute] else compute

    def specs(self, first: int, last: int) -> list[ParameterSpec]:
        """Parameters of items ``[first, last)``."""
        return [spec for spec in self.parameters.values() if first <= spec.item < last]

    def constant_specs(self, first: int, last: int) -> list[ParameterSpec]:
        """Constants of items ``[first, last)``."""
        return [spec for spec in self.constants.values() if first <= spec.item < last]

    def _tied_pair(self) -> tuple[str, str] | None:
        pairs = dict(self.model.all_tied_weights_keys)
        if not pairs:
            return None
        if len(pairs) > 1:
            raise UserError(
                f"hetero_mpi can tie the output projection to the embedding, but this {self.config.model_type} model ties "
                f"{len(pairs)} pairs: {pairs}"
            )
        return next(iter(pairs.items()))

    def _refuse_strays(self) -> None:
        """Parameters outside every item would be trained by nobody."""
        known = tuple(f"{name}." for name in (*self.before_names, self.blocks_name, *self.after_names))
        strays = [name for name in (*self.parameters, *self.constants) if not name.startswith(known)]
        if strays:
            raise UserError(
                f"parameters outside the pipeline plan of {self.config.model_type}: {', '.join(strays[:5])}"
            )

    def _kinds(self) -> tuple[str, ...]:
        layer_types = getattr(self.config, "layer_types", None) or ["block"] * self.blocks
        signatures: dict[tuple, str] = {}  # type: ignore[type-arg]
        kinds = []
        for index in range(self.blocks):
            prefix = f"{self.blocks_name}.{index}."
            shapes = tuple((n[len(prefix) :], s.shape) for n, s in self.parameters.items() if n.startswith(prefix))
            signature = (layer_types[index], shapes)
            if signature not in signatures:
                same_type = sum(known[0] == layer_types[index] for known in signatures)
                signatures[signature] = layer_types[index] + (f"_{same_type + 1}" if same_type else "")
            kinds.append(signatures[signature])
        return (EMBEDDING, *kinds, HEAD)
