"""Initial weights of a few layers: initialised from seed and name, or read from a language model's files.

Both fill fp32 host tensors for modules that were on the meta device, one layer at a time. A rank's peak host memory is therefore
its own shard plus one layer.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.util.errors import UserError

_MXFP4 = ("gate_up_proj", "down_proj")
_BLOCKS, _SCALES = HALVES = "_blocks", "_scales"
"""Suffixes of the names of two stored tensors that form one tensor."""
_MXFP4_ROWS = 1 << 20
"""Number of rows of 32 weights to unpack at a time; transformers' default takes gigabytes."""


class SeededStart:
    """Initial values by the model's rules, derived only from the seed and names.

    They do not depend on which rank initialises which layer.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fill(self, chain: LayerChain, model: nn.Module, layer: int) -> None:
        chain.initialise(model, layer, self.seed)


class TensorSource(Protocol):
    """Tensors of a Hugging Face directory by their names in its files, on this rank's disk (``ModelFiles``) or on rank 0."""

    directory: Path
    """The directory to name in messages."""

    @property
    def names(self) -> Mapping[str, Any]:
        """All tensors by name, in the same order on every rank."""

    def read_layer(self, layer: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Read one layer's tensors into host memory in their own dtype. Call with layers in increasing order."""


class FileStart:
    """Initial weights from a Hugging Face directory, with transformers' own name conversion.

    Names in the files may differ from module names: Mixtral, for example, keeps one fused tensor for all experts of a layer. Layers
    are loaded one at a time, because each holds complete conversion groups.

    Raises UserError if tensors are missing from the files or differ in shape from the configuration.
    """

    def __init__(self, files: TensorSource, chain: TransformersChain) -> None:
        self.files = files
        self.mapping = weight_mapping(chain.model)
        self.dtypes: dict[str, torch.dtype] = {}
        """Maps names in the model to dtypes in the files."""
        self._grown: dict[str, int] = {}
        """Maps an embedding's or head's name in the files to the larger number of rows in the model, which has new tokens."""
        self.keys_of_layer = self._assign(chain)

    def fill(self, chain: TransformersChain, model: PreTrainedModel, layer: int) -> None:
        state = self.files.read_layer(layer, self.keys_of_layer[layer])
        state |= {key: with_mean_rows(state[key], rows) for key, rows in self._grown.items() if key in state}
        info, _ = convert_and_load_state_dict_in_model(
            model, state, LoadStateDictConfig(weight_mapping=self.mapping, dtype=torch.float32), None
        )
        mismatches = [
            f"{name} has shape {tuple(actual)}, not {tuple(shape)}" for name, actual, shape in info.mismatched_keys
        ]
        if problems := [*mismatches, *info.conversion_errors.values(), *info.error_msgs]:
            raise UserError("model.conversion", f"{self.files.directory}: {problems[0]}")
        missing = [
            spec.name
            for spec in (*chain.specs(layer, layer + 1), *chain.constant_specs(layer, layer + 1))
            if model.get_parameter_or_buffer(spec.name).device.type == "meta"
        ]
        if missing:
            raise UserError(
                "model.tensors_missing",
                f"{self.files.directory}: the files lack {', '.join(missing[:5])} ({len(missing)} in all)",
            )

    def _assign(self, chain: TransformersChain) -> Mapping[int, list[str]]:
        keys: defaultdict[int, list[str]] = defaultdict(list)
        ends = chain.model.get_input_embeddings(), chain.model.get_output_embeddings()
        for key, ((name, *further_names), _) in names_in_model(chain.model, self.files.names).items():
            if name in chain.parameters and chain.model.get_submodule(name.rpartition(".")[0]) in ends:
                (stored, *_), (rows, *_) = self.files.names[key].shape, chain.parameters[name].shape
                self._grown |= {key: rows} if stored < rows else {}
            # Anything else (a tied copy, a rotary buffer of old files) is not a weight of ours: ``stored_model.py`` has judged it.
            if name in chain.parameters or name in chain.constants:
                keys[chain.layer_of(name)].append(key)
                stored = getattr(torch, self.files.names[key].dtype)
                stored = stored if stored.is_floating_point else torch.bfloat16  # codes of 4 bits
                self.dtypes |= dict.fromkeys((name, *further_names), stored)
        return keys


class UnpackMxfp4(ConversionOps):
    """Unpacks published gpt-oss experts (one byte per two weights, one scale byte per 32 weights); exact, even in bf16."""

    def convert(
        self, input_dict: dict[str, Any], *, model: nn.Module, full_layer_name: str, **_: Any
    ) -> dict[str, torch.Tensor]:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        name = full_layer_name.rpartition(".")[2]
        blocks, scales = (
            value[0] if isinstance(value, list) else value
            for value in (input_dict[name + _BLOCKS], input_dict[name + _SCALES])
        )
        dtype = model.get_parameter(full_layer_name).dtype
        return {full_layer_name: convert_moe_packed_tensors(blocks, scales, dtype=dtype, rows_per_chunk=_MXFP4_ROWS)}


def weight_mapping(model: PreTrainedModel) -> list[Any]:
    """Return transformers' conversion of names and tensors from a family's files to the model."""
    packed = [
        WeightConverter([name + _BLOCKS, name + _SCALES], name, [UnpackMxfp4()])
        for name in (_MXFP4 if model.config.model_type == "gpt_oss" else ())
    ]
    return [*packed, *get_model_conversion_mapping(model)]


def with_mean_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Extend an embedding, head or bias to ``rows`` by its mean row, in fp32; fp64 sums do not depend on the thread count."""
    wide = tensor.float()
    mean = torch.stack([piece.double().sum(0) for piece in wide.split(_MAX_SUMMED_ROWS)]).sum(0) / len(wide)
    return torch.cat([wide, mean.float().expand(rows - len(wide), *wide.shape[1:])])


_MAX_SUMMED_ROWS = 4096


def names_in_model(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, tuple[list[str], bool]]:
    """Map each name in the files to (names in the model, whether the tensor is merged or reshaped on loading).

    A stored tensor that is split has several names. A tensor that the model lacks has the name that transformers would give it.
    """
    mapping = weight_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names = model.state_dict()
    names_by_key = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        parts = next(
            (converter.target_patterns for converter in converters if pattern in converter.source_patterns), [name]
        )
        before, _, behind = name.partition(parts[0])  # transformers names the first one
        names_by_key[key] = ([before + part + behind for part in parts], pattern is not None)
        if name not in names and key in names:
            names_by_key[key] = ([key], False)
    return names_by_key
