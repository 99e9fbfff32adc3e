"""A model as a chain of items: embedding, block 0 .. block L-1, head (final norm and output projection).

``base_model_pp_plan`` of transformers' configurations says which modules come before and after the blocks. Everything here is
on torch's meta device: names and shapes, no memory.
"""

from __future__ import annotations

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
    """transformers' own model class, whole, fp32, without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def uses_dropout(model: nn.Module) -> bool:
    """Does any layer draw random numbers in training?"""
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or getattr(module, "attention_dropout", 0) not in (0, 0.0, None)
        for module in model.modules()
    )


class Chain:
    """Names, shapes and kinds of a model's items.

    Attributes:
        items: number of items, blocks + 2.
        parameters: name -> ``ParameterSpec``, in the model's own order, each trained tensor once.
        tied: (head's name, embedding's name) when the head's matrix *is* the embedding's, else None.
        kinds: kind of each item; blocks with equal shapes and attention type share one.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config
        self.model = build_on_meta(config)
        plan = self.model._pp_plan or {}
        base = self.model.base_model_prefix
        inner = [name for name in plan if name.startswith(f"{base}.")]
        outer = [name for name in plan if not name.startswith(f"{base}.")]
        lists = [name for name in inner if isinstance(self.model.get_submodule(name), nn.ModuleList)]
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
        self.parameters = {
            name: ParameterSpec(name, self.item_of(name), tuple(parameter.shape))
            for name, parameter in self.model.named_parameters()
            if self.tied is None or name != self.tied[0]
        }
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

    def specs(self, first: int, last: int) -> list[ParameterSpec]:
        """Parameters of items ``[first, last)``."""
        return [spec for spec in self.parameters.values() if first <= spec.item < last]

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
        known = (*self.before_names, f"{self.blocks_name}.", *self.after_names)
        strays = [name for name in self.parameters if not name.startswith(known)]
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
