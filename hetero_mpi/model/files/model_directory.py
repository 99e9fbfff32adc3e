"""From tensors, layer by layer, to a Hugging Face model directory that ``from_pretrained`` loads in a plain process.

    with ModelDirectoryWriter(model, directory, shard_bytes=1_000_000_000) as writer:
        for state in layers:                       # the embedding, each block, norm + head
            writer.add(state)
        tokenizer.save_pretrained(writer.path)    # whatever else belongs into the directory

The names and contents of the files are those of transformers' ``save_pretrained``, through its own conversion, but only
one layer and one shard are in memory at a time. The directory appears at the end, whole, in place of a former one.
"""

from __future__ import annotations

import copy
import json
import os

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hetero_mpi.disk import sync
from hetero_mpi.model.files.model_files import INDEX, WEIGHTS
from hetero_mpi.model.files.whole_directory import WholeDirectory, write_tensors

CONFIG = "config.json"
_WEIGHT_FILES = ("model-", WEIGHTS, "pytorch_model")


class ModelDirectoryWriter(WholeDirectory):
    """Writes a model directory, for which other files (a tokenizer's) may be put into ``path``.

    ``model`` gives class, configuration, generation configuration and names; its parameters may be on the meta device.
    ``shard_bytes`` bounds the size of each safetensors file (a single larger tensor gets a file of its own).
    Host memory: at most ``shard_bytes`` plus one layer and its converted copy.
    """

    def __init__(self, model: PreTrainedModel, directory: str | os.PathLike[str], shard_bytes: int) -> None:
        self._model = model
        self._shard_bytes = shard_bytes
        self._awaited = _written_names(model)
        self._buffer: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._dtype: torch.dtype | None = None
        super().__init__(directory, "model directory", CONFIG, _WEIGHT_FILES)

    def add(self, state: dict[str, torch.Tensor]) -> None:
        """Add one layer's tensors, under the model's own parameter names.

        A layer holds whole conversion groups (all experts of a block). The tensors are copied. A name that is not the
        model's, or comes twice, is a defect of the caller; the tied copy of a head is passed over.
        """
        tied = set(self._model.all_tied_weights_keys)
        state = {name: tensor for name, tensor in state.items() if name not in tied}
        assert set(state) <= self._awaited, f"unknown or repeated: {sorted(set(state) - self._awaited)}"
        self._awaited -= set(state)
        for name, tensor in revert_weight_conversion(self._model, state).items():
            if self._dtype is None and tensor.is_floating_point():
                self._dtype = tensor.dtype
            if self._buffer and _bytes(self._buffer) + tensor.nbytes > self._shard_bytes:
                self._write_shard()
            # A copy of its own: the caller may change its tensor, and a view would keep a whole storage alive.
            self._buffer[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def _complete(self) -> None:
        assert not self._awaited, f"never added: {sorted(self._awaited)}"
        self._write_shard()
        self._name_shards()
        self._write_configuration()

    def _write_shard(self) -> None:
        self._shards.append(list(self._buffer))
        self._total_bytes += _bytes(self._buffer)
        path = self.path / _part(len(self._shards))
        write_tensors(path, self._buffer)
        sync(path)
        self._buffer = {}

    def _name_shards(self) -> None:
        """Give the shards their final names, their number being known now; write the index where there are several."""
        count = len(self._shards)
        if count == 1:
            os.rename(self.path / _part(1), self.path / WEIGHTS)
            return
        weight_map = {}
        for number, names in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors"
            os.rename(self.path / _part(number), self.path / final)
            weight_map.update(dict.fromkeys(names, final))
        metadata = {"total_parameters": self._model.num_parameters(), "total_size": self._total_bytes}
        index = {"metadata": metadata, "weight_map": weight_map}
        (self.path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _write_configuration(self) -> None:
        """As save_pretrained does, but without its validation, which would throw away a finished run for a warning."""
        config = copy.deepcopy(self._model.config)
        config.architectures = [type(self._model).__name__]
        config.dtype = str(self._dtype).removeprefix("torch.")
        config.to_json_file(self.path / CONFIG, use_diff=True)
        if self._model.can_generate() and self._model.generation_config is not None:
            self._model.generation_config.to_json_file(self.path / "generation_config.json", use_diff=True)


def _written_names(model: PreTrainedModel) -> set[str]:
    """The names of ``model.state_dict()`` that ``save_pretrained`` would write: no tied copies, no ignored ones."""
    unwritten = set(model.all_tied_weights_keys) | set(model._keys_to_ignore_on_save or ())
    return set(model.state_dict()) - unwritten


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _part(number: int) -> str:
    return f"part-{number:05d}.safetensors"
