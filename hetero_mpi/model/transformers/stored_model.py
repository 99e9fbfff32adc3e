"""Configuration of a stored model. Where ``config.json`` and the tensors disagree, the tensors take precedence.

File headers (names, shapes, dtypes) suffice, except for two matrices that may be tied. Contradictions that the tensors cannot
resolve are rejected. Unread tensors are rejected if they would change the model, and reported otherwise.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hetero_mpi.model.files.model_files import ModelFiles, have_same_numbers
from hetero_mpi.model.transformers.chain import build_on_meta
from hetero_mpi.model.transformers.families import block_key, read_config
from hetero_mpi.model.transformers.weights import HALVES, names_in_model
from hetero_mpi.util.errors import UserError

_COMPUTED = re.compile(r"rotary_emb\.\w*(inv_freq|cos_cached|sin_cached)$|(^|\.)masked_bias$|(^|\.)position_ids$")
"""Buffers in old files that every model recomputes."""
_CAUSAL_MASK = re.compile(r"\.(attn|attention|self_attn)\.(bias|causal_mask)$")
"""A buffer that every model recomputes if it has four dimensions."""
_MAX_LISTED_NAMES = 3


@dataclass(frozen=True)
class StoredModel:
    """The configuration of a model directory, with notes on its contents."""

    config: dict[str, Any]
    """Keys of ``config.json``, corrected where the tensors contradict them."""
    notes: tuple[str, ...]
    """One sentence for each correction and each group of unread tensors."""


def stored_model(files: ModelFiles) -> StoredModel:
    """Check ``config.json`` against the files and correct it. Raises UserError if the model is damaged or not supported."""
    keys, notes = dict(files.config), []
    notes += _settle_dtype(files, keys)
    fit = _Fit.build(files, keys)
    for settle in (_settle_vocabulary, _settle_head, _settle_bias):
        while note := settle(fit, keys):
            notes.append(note)
            fit = _Fit.build(files, keys)
    fit.require()
    return StoredModel(keys, (*notes, *fit.unread_notes()))


def _main_dtype(files: ModelFiles) -> str | None:
    """Return the dtype, by torch's name, of most of the stored bytes; None if no floating-point tensors are stored."""
    bytes_of: Counter[str] = Counter()
    for tensor in files.names.values():
        if "float" in tensor.dtype:
            bytes_of[tensor.dtype] += tensor.bytes
    return max(bytes_of, key=lambda dtype: bytes_of[dtype], default=None)


class _Fit:
    """Compares the model that a configuration describes (on the meta device) with the tensors in the files."""

    def __init__(self, files: ModelFiles, model: PreTrainedModel) -> None:
        self.files, self.model = files, model
        self.tied: Mapping[str, str] = model.all_tied_weights_keys
        names, base, plan = model.state_dict(), f"{model.base_model_prefix}.", model._pp_plan or {}
        self.blocks = next((name for name in plan if isinstance(_module(model, name), torch.nn.ModuleList)), base)
        self.layers = tuple(f"{name}." for name in plan)
        blocks = _module(model, self.blocks)
        self.count = len(blocks) if isinstance(blocks, torch.nn.ModuleList) else model.config.num_hidden_layers
        self.unread: dict[str, str] = {}
        """Maps each unread tensor's name in the files to its name in the model."""
        self.keys: dict[str, list[str]] = {}
        """Maps each name in the model to the names in the files."""
        self.shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Maps a name in the model to (shape in the files, shape by the configuration) where the two differ."""
        for key, ((name, *further_names), converted) in names_in_model(model, files.names).items():
            if name not in names:
                inside = f"{base}{name}".startswith(self.layers) and not name.startswith(
                    base
                )  # files of the base model
                self.unread[key] = f"{base}{name}" if inside else name
                continue
            for model_name in (name, *further_names):
                self.keys.setdefault(model_name, []).append(key)
            stored, shape = files.names[key].shape, tuple(names[name].shape)
            if not converted and stored != shape:
                self.shapes[name] = stored, shape
        self.missing = [name for name in names if name not in self.keys and name not in self.tied]
        halves = [
            key for file_keys in self.keys.values() if len(file_keys) == 1 for key in file_keys if key.endswith(HALVES)
        ]
        self.missing += [
            key.removesuffix(end) + other_end
            for key in halves
            for end, other_end in (HALVES, HALVES[::-1])
            if key.endswith(end)
        ]

    @classmethod
    def build(cls, files: ModelFiles, keys: dict[str, Any]) -> _Fit:
        config = read_config(keys)
        if config.num_hidden_layers > len(files.names):  # also avoids a slow build
            raise UserError(
                "model.blocks_differ",
                f"{files.directory}: config.json specifies {config.num_hidden_layers} blocks (num_hidden_layers), but the files "
                f"hold only {len(files.names)} tensors: correct config.json, or download the files again",
            )
        return cls(files, build_on_meta(config))

    @property
    def faults(self) -> list[str]:
        """Names in the model of missing, differently shaped and foreign tensors."""
        return [*self.missing, *self.shapes, *self.foreign.values()]

    def rows(self, name: str) -> int | None:
        """Return a matrix's number of rows in the files; None if the matrix is missing or stored differently."""
        file_keys = self.keys.get(name, [])
        shape = self.files.names[file_keys[0]].shape if len(file_keys) == 1 else ()
        return shape[0] if len(shape) == 2 else None

    def require(self) -> None:
        """Raise UserError unless the files hold exactly the tensors of the model's layers, in their shapes."""
        directory, config, count = self.files.directory, self.model.config, self._blocks_held()
        if count is not None and count != self.count:
            raise UserError(
                "model.blocks_differ",
                f"{directory}: the files hold {count} blocks ({self.blocks}.0 to .{count - 1}), but config.json specifies "
                f"{self.count} ({block_key(config, self.count)}): correct config.json, or download the files again",
            )
        if self.shapes:
            name, (stored, shape) = next(iter(self.shapes.items()))
            raise UserError(
                "model.shapes_differ",
                f"{directory}: {name} has shape {stored} in the files but {shape} according to config.json (differing tensors: "
                f"{len(self.shapes)}): they belong to two models; correct the sizes in config.json, or download the files again",
            )
        if self.missing:
            raise UserError(
                "model.tensors_missing",
                f"{directory}: the files lack {_some(self.missing)}, which the {config.model_type} model in config.json has: "
                f"correct config.json, or download the files again",
            )
        if self.foreign:
            raise UserError(
                "model.foreign_tensors",
                f"{directory}: the files hold {_some(self.foreign)}, which the {config.model_type} model in config.json does not "
                f"have; fix config.json, merge adapters, or dequantise the weights",
            )

    def unread_notes(self) -> list[str]:
        """Return a note about tensors that are not read because they belong to other parts, if there are any."""
        unread_keys = [key for key, name in self.unread.items() if not self._computed(key, name)]
        if not unread_keys:
            return []
        return [f"the files hold tensors that are ignored, and missing from the result: {_some(unread_keys)}"]

    def _blocks_held(self) -> int | None:
        """Return the number of blocks in the files; None if unknown."""
        pattern = re.compile(rf"{re.escape(self.blocks)}\.(\d+)\.")
        matches = [match for name in (*self.keys, *self.foreign.values()) if (match := pattern.match(name))]
        return 1 + max((int(match[1]) for match in matches), default=-1) if matches else None

    @functools.cached_property
    def foreign(self) -> dict[str, str]:
        """Unread tensors that belong to the model's layers."""
        return {
            key: name
            for key, name in self.unread.items()
            if not self._computed(key, name) and not self._left_out(key, name) and name.startswith(self.layers)
        }

    def _computed(self, key: str, name: str) -> bool:
        is_mask = _CAUSAL_MASK.search(key) is not None and len(self.files.names[key].shape) == 4
        return is_mask or _COMPUTED.search(name) is not None or _COMPUTED.search(key) is not None

    def _left_out(self, key: str, name: str) -> bool:
        """Return whether transformers ignores the tensor on purpose, as for multi-token prediction layers."""
        ignored_patterns = self.model._keys_to_ignore_on_load_unexpected or ()
        if any(re.search(pattern, text) for pattern in ignored_patterns for text in (key, name)):
            return True
        match = re.match(rf"{re.escape(self.blocks)}\.(\d+)\.", name)
        further = getattr(self.model.config, "num_nextn_predict_layers", 0)
        return match is not None and isinstance(further, int) and 0 <= int(match[1]) - self.count < further


def _settle_dtype(files: ModelFiles, keys: dict[str, Any]) -> list[str]:
    stored_dtype, label = _main_dtype(files), keys.get("dtype", keys.get("torch_dtype"))
    keys.pop("torch_dtype", None)
    if stored_dtype is None:
        return []
    keys["dtype"] = stored_dtype
    if label in (None, stored_dtype, "auto"):
        return []
    return [f"config.json has dtype {label!r}, but most of the weights are {stored_dtype}: using {stored_dtype}"]


def _settle_vocabulary(fit: _Fit, keys: dict[str, Any]) -> str | None:
    inputs = fit.model.get_input_embeddings()
    embedding = next(f"{name}.weight" for name, module in fit.model.named_modules() if module is inputs)
    rows, label = fit.rows(embedding), fit.model.config.vocab_size
    if rows in (None, label):
        return None
    keys["vocab_size"] = rows
    return (
        f"config.json has vocab_size {label:,}, but {embedding} has {rows:,} rows in the files: using the files' number"
    )


def _settle_head(fit: _Fit, keys: dict[str, Any]) -> str | None:
    """Untie an LM head that differs from the embedding in the files."""
    for head, embedding in fit.tied.items():
        head_keys, embedding_keys = fit.keys.get(head, []), fit.keys.get(embedding, [])
        both = [fit.files.names[keys_of[0]] for keys_of in (head_keys, embedding_keys) if keys_of]
        if len(both) == 2 and not have_same_numbers(*both):
            keys["tie_word_embeddings"] = False
            if _Fit.build(fit.files, keys).tied:
                raise UserError(
                    "model.head_differs",
                    f"{fit.files.directory}: {head} in the files differs from {embedding}, but a {fit.model.config.model_type} "
                    f"model uses one matrix for both",
                )
            return (
                f"config.json has tie_word_embeddings = true, but {head} in the files differs from {embedding}: the two are not "
                f"tied, and the result gets tie_word_embeddings = false"
            )
    return None


def _settle_bias(fit: _Fit, keys: dict[str, Any]) -> str | None:
    """Change one bias setting if only biases do not match and more tensors match with the change."""
    if not fit.faults or not all(name.endswith(".bias") for name in fit.faults):
        return None
    config = fit.model.config
    for flag in sorted(name for name, value in vars(config).items() if "bias" in name and isinstance(value, bool)):
        value = not getattr(config, flag)
        other_fit = _Fit.build(fit.files, {**keys, flag: value})
        if len(other_fit.faults) < len(fit.faults):
            keys[flag] = value
            settled = sorted({*fit.faults} - {*other_fit.faults})
            has = "has" if value else "lacks"
            label = f"config.json has {flag} = {_toml_bool(not value)}"
            return f"{label}, but the model in the files {has} {_some(settled)}: using {_toml_bool(value)}"
    return None


def _module(model: PreTrainedModel, name: str) -> torch.nn.Module | None:
    return dict(model.named_modules()).get(name)


def _toml_bool(value: bool) -> str:
    return str(value).lower()


def _some(names: Collection[str]) -> str:
    listed = list(names)[:_MAX_LISTED_NAMES]
    return ", ".join(listed) + (f" and {len(names) - len(listed):,} more tensors" if len(names) > len(listed) else "")
