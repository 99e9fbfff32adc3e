"""The datasets, models and tokenizers in memory that a program passes to a trainer.

They become files in the user's cache, and a model receives its trained weights.
"""

import copy
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.data.batch import IGNORED
from hetero_mpi.data.record_shapes import PAIRS, PREFERENCE, SPELLINGS
from hetero_mpi.model.files import hub
from hetero_mpi.model.files.model_files import ModelFiles, have_same_numbers
from hetero_mpi.rundir.logs import write_line
from hetero_mpi.util.disk import cache_folder, write_errors
from hetero_mpi.util.errors import UserError, require
from hetero_mpi.util.sealed import load_sealed, store_folder

Rows = Collection[Mapping[str, Any]]
RECORD_KEYS = (*SPELLINGS, "prompt", "chosen")
"""Keys that identify a row as a record, as in TRL, even if it has a text as well."""
_CACHE_HINT = "set XDG_CACHE_HOME to a directory that you can write to"
_ROWS_NAME = "rows.jsonl"
_MODEL_INPUTS = ("input_ids", "attention_mask", "labels")
_MASKS = ("completion_mask", "assistant_masks")


def rows_of(dataset: Any, name: str, limit: int | None) -> tuple[Rows, dict[str, Any]]:
    """Return the rows as a re-iterable, and the first row. Raises UserError if there are no rows or their format is unsupported.

    ``limit``: number of rows to take from a dataset of unknown length.
    """
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, (Iterable, Mapping)):
        dataset = [dataset[number] for number in range(len(dataset))]  # a dataset of torch
    is_valid = isinstance(dataset, Iterable) and not isinstance(dataset, (str, bytes, Mapping))
    require(is_valid, "trainer.dataset", name, "a datasets.Dataset, such as a split, or a list of dicts", dataset)
    rows: Any = dataset if hasattr(dataset, "__len__") else list(islice(dataset, limit))
    first = next(iter(rows), None)
    is_valid = isinstance(first, (Mapping, NoneType))
    require(is_valid, "trainer.dataset", name, "rows that are dicts, as in docs/data.md", first)
    first = {key: value for key, value in (first or {}).items() if value is not None}  # columns without a value
    if not first:
        raise UserError("trainer.dataset", f"{name}: must have rows; see docs/data.md for the formats")
    return rows, first


def has_messages(row: Mapping[str, Any]) -> bool:
    """Whether a row has messages, perhaps in addition to their prompt as text, as in many datasets."""
    texts = row.keys() & {"prompt", *PAIRS["prompt/completion"][1], *PREFERENCE}
    return any(key in row for key in SPELLINGS) or any(not isinstance(row[key], str) for key in texts)


def formatted(rows: Rows, formatting_func: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return the texts that ``formatting_func`` makes of rows; one that takes a batch gets batches of one row."""
    texts = [formatting_func(row) for row in rows]
    if any(isinstance(text, list) for text in texts):
        texts = [text for row in rows for text in formatting_func({key: [value] for key, value in row.items()})]
    if any(not isinstance(text, str) for text in texts):
        raise UserError("trainer.formatting_func", "formatting_func: must return the text of a row")
    return [{"text": text} for text in texts]


def text_tokens(rows: Rows, column: str, tokenizer: Any, end: str | None) -> list[dict[str, list[int]]]:
    """Tokenise texts as TRL does, each with the end token."""
    if isinstance(tokenizer, (str, PathLike)):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    end = end or tokenizer.eos_token
    return [{"input_ids": tokenizer(row[column].removesuffix(end) + end)["input_ids"]} for row in rows]


def tokenised(rows: Rows, name: str, data_collator: Callable[[Any], Any] | None) -> list[dict[str, list[int]]]:
    """Return token ids and labels of tokenised rows, after the collator, if any, and without padding."""
    result = []
    for number, row in enumerate(rows):
        inputs = {key: row[key] for key in (*_MODEL_INPUTS, *_MASKS) if row.get(key) is not None}
        batch = {key: [values] for key, values in inputs.items()} if data_collator is None else data_collator([inputs])
        columns = {key: np.asarray(batch[key])[0] for key in (*_MODEL_INPUTS, *_MASKS) if key in batch}
        ids = columns["input_ids"]
        is_input = columns.get("attention_mask", np.ones_like(ids)) != 0
        labels = columns.get("labels")
        if labels is None:
            targets = np.logical_and.reduce([columns.get(key, np.ones_like(ids)) != 0 for key in _MASKS])
            labels = np.where(targets & is_input, ids, IGNORED)
        if labels.shape != ids.shape or (labels[~is_input] != IGNORED).any():
            rule = "labels must be as many as input_ids, and -100 for padding, which would be learnt"
            raise UserError("trainer.labels", f"{name}: row {number}: {rule}")
        result.append({"input_ids": ids[is_input].tolist(), "labels": labels[is_input].tolist()})
    return result


def rows_file(rows: Iterable[Mapping[str, Any]]) -> str:
    """Write the rows as JSON Lines to the user's cache, and return the file's path."""

    def save(folder: Path) -> None:
        with (folder / _ROWS_NAME).open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows):
                try:
                    file.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
                except (TypeError, ValueError) as error:
                    text = f"dataset: row {number} is not serialisable as JSON: {error}"
                    raise UserError("trainer.dataset", text) from None

    return os.path.join(_stored("rows", save), _ROWS_NAME)


def tokenizer_directory(tokenizer: Any, model: str, end: str | None) -> str | None:
    """Return the path of a tokenizer, or None for that of ``model``. ``end``: end token to use instead of its own."""
    if end is not None:
        named = model if tokenizer is None else tokenizer
        tokenizer = AutoTokenizer.from_pretrained(named) if isinstance(named, (str, PathLike)) else copy.deepcopy(named)
        tokenizer.eos_token = end
    if tokenizer is None or isinstance(tokenizer, (str, PathLike)):
        return os.fspath(tokenizer) if tokenizer is not None else None
    return _stored("tokenizer", getattr(tokenizer, "tokenizer", tokenizer).save_pretrained)


def model_directory(model: Any, base_folder: Path | None) -> tuple[str, str | None]:
    """Return the directory or name of a model, and the directory of its adapter, if any.

    Loaded weights, which the program may have changed, are saved to the user's cache. Quantised weights are read from the model's
    own directory, since they have lost precision.

    ``base_folder``: directory for changed weights that the files of a new adapter will refer to, or None to train all weights.
    """
    if isinstance(model, (str, PathLike)):
        return os.fspath(model), None
    base, adapter = model, None
    if hasattr(model, "peft_config"):
        base, adapter = model.get_base_model(), _stored("adapter", model.save_pretrained)
    if getattr(base.config, "quantization_config", None) is not None:
        return base.name_or_path, adapter
    tensors = base.state_dict().items()
    state = {_PEFT_PREFIX.sub(".", name): tensor for name, tensor in tensors if not _PEFT_ONLY.search(name)}
    path = _stored("model", partial(base.save_pretrained, state_dict=state), base_folder)
    if base_folder is not None and _is_copy(Path(path), base):
        shutil.rmtree(path)
        return base.name_or_path, adapter
    return path, adapter


_FREE_KEYS = ("transformers_version", "_name_or_path", "dtype", "use_cache", "pad_token_id", "architectures")
"""Keys of a configuration that do not change a model's results."""


def _is_copy(saved: Path, model: Any) -> bool:
    """Whether a model has the configuration and weights of its source; names in memory may differ, so ``saved`` is compared."""
    try:
        source = ModelFiles(hub.directory_of(model.name_or_path))
        config = type(model.config).from_pretrained(source.directory).to_dict()
        is_same = all(model.config.to_dict().get(key) == config[key] for key in config.keys() - {*_FREE_KEYS})
        pairs = [(source.names.get(name), tensor) for name, tensor in ModelFiles(saved).names.items()]
        return is_same and all(first is not None and have_same_numbers(first, second) for first, second in pairs)
    except (OSError, ValueError):  # such as a UserError: there are no files
        return False


def update_model(world: World, model: Any, result: Path) -> bool:
    """Copy the trained weights from ``result`` on rank 0's host into the loaded model of every rank, in place. Collective.

    Returns:
        Whether the model has the trained weights; a base model cannot hold those of an adapter. True for a path.
    """
    own, trained = _trainable_state(model), dict[str, torch.Tensor]()
    if not world.broadcast_json(bool(own)):
        return True
    with world.on_leader("reading the result"):
        is_adapter = (result / "adapter_config.json").is_file()
        if world.rank == 0 and is_adapter == hasattr(model, "peft_config"):
            adapter = load_file(result / "adapter_model.safetensors") if is_adapter else None
            trained = adapter or type(model).from_pretrained(result, dtype="auto").state_dict()
    listed = world.broadcast_json({name: [tensor.shape, str(tensor.dtype)] for name, tensor in trained.items()})
    shapes = {name: [*tensor.shape] for name, tensor in own.items() if not tensor.is_meta}
    is_fitting = bool(listed) and (not own or shapes == {name: shape for name, (shape, _) in listed.items()})
    if not all(world.all_gather_json(is_fitting)):
        return False
    for name, (shape, dtype) in listed.items():
        tensor = trained[name] if world.rank == 0 else torch.empty(shape, dtype=getattr(torch, dtype.split(".")[1]))
        tensor = tensor.contiguous()
        world.broadcast_bytes(tensor.flatten().view(torch.uint8).numpy())
        if own:
            own[name].copy_(tensor)
    return True


def load_result(result: Path) -> Any:
    """Load a trained model, or its base model with the trained adapter."""
    from peft import AutoPeftModelForCausalLM

    kind: Any = AutoPeftModelForCausalLM if (result / "adapter_config.json").is_file() else AutoModelForCausalLM
    return kind.from_pretrained(result, dtype="auto")


def weightless(model: Any, peft_config: Any) -> Any:
    """Build a model without weights, with a new adapter if there is a ``peft_config``, to count its parameters."""
    from peft import get_peft_model

    config = AutoConfig.from_pretrained(model) if isinstance(model, (str, PathLike)) else model.config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        return model if peft_config is None else get_peft_model(model, copy.deepcopy(peft_config))


def _trainable_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a loaded model, or of its adapter; none of a path."""
    if not hasattr(model, "peft_config"):
        return model.state_dict() if hasattr(model, "save_pretrained") else {}
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=next(iter(model.peft_config)), save_embedding_layers=False)


_PEFT_PREFIX = re.compile(r"\.(base_layer|original_module)\.")
_PEFT_ONLY = re.compile(r"\.(lora_|modules_to_save\.|token_adapter\.)")
"""Names of the tensors that peft adds to a base model."""


def _stored(kind: str, save: Callable[[Path], object], folder: Path | None = None) -> str:
    """Save an object to ``folder``, by default the user's cache, where equal objects share a directory; return its path."""
    folder, digest = (folder or cache_folder("datasets")).absolute(), hashlib.sha256()
    with write_errors(folder, _CACHE_HINT):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            save(Path(temporary))
            files = sorted(file for file in Path(temporary).rglob("*") if file.is_file())
            for file in files:
                digest.update(file.name.encode())
                digest.update(np.memmap(file, np.uint8).data if file.stat().st_size else b"")
            path = folder / f"{kind}-{digest.hexdigest()[:32]}"
            if load_sealed(path, lambda *_: True, write_line) is None:
                parts = [*Path(temporary).iterdir()]
                fill = lambda folder: [part.rename(folder / part.name) for part in parts] and None  # noqa: E731
                store_folder(path, fill, _CACHE_HINT)
    return str(path)
