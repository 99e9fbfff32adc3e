"""How a trained model is written: a Hugging Face directory of a language model, one file of layers of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from hetero_mpi.model.custom.custom_chain import CustomChain
from hetero_mpi.model.files.model_directory import LayersWriter, ModelDirectoryWriter
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.transformers.chain import language


class ResultWriter(Protocol):
    """Takes a trained model layer by layer and writes it to a directory, which appears whole at the end."""

    path: Path
    """Where other files that belong to it may be put."""

    def add(self, state: dict[str, torch.Tensor]) -> None:
        """One layer's parameters and constants, in host memory; the layers come in order."""
        ...


def result_writer(
    chain: LayerChain, directory: Path, shard_bytes: int, generation: Mapping[str, Any] | None
) -> AbstractContextManager[ResultWriter]:
    """The writer of a chain's trained model.

    Of a language model in files of at most ``shard_bytes``, with ``generation``, the keys of its ``generation_config.json``, where
    its base has one. Of layers of one's own ``model.safetensors`` with the full state dict of ``torch.nn.Sequential`` of the
    layers, in one file of any size.
    """
    if not isinstance(chain, CustomChain):
        return ModelDirectoryWriter(language(chain).model, directory, shard_bytes, generation)
    sizes = {spec.name: spec.shape for spec in (*chain.parameters.values(), *chain.constants.values())}
    return LayersWriter(directory, [partial(chain.buffers, layer) for layer in range(chain.layer_count)], sizes)
