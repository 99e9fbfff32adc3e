"""PEFT adapter directories: ``adapter_config.json`` and ``adapter_model.safetensors``, as ``PeftModel`` reads them.

An adapter may be initialised from the model's weights, from which its initial product is then subtracted: PiSSA (Meng et al. 2024,
arXiv:2404.02948) takes the largest singular values, OLoRA (Büyükakyüz 2024, arXiv:2406.01775) the first columns of a QR
decomposition. The initial values are kept, so that the adapter can be saved for the original weights with twice the rank, as in
peft's conversion: W - s B0 A0 + s B A = W + s [B, -B0] [A; A0].
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero_mpi.job.rules import as_toml
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.peft_config import CONFIG, UNKNOWN, PeftConfig, read_peft_config
from hetero_mpi.model.files.model_directory import WholeDirectory
from hetero_mpi.model.files.model_files import StoredTensor, read_header, read_tensors, write_tensors
from hetero_mpi.model.layer.interface import Start, one_thread, seeded
from hetero_mpi.model.tuning import FILE_PREFIX, ROWS, Tuning, began_with, lora_config, scale_of
from hetero_mpi.util.errors import UserError


class ReducedStart:
    """Initialises adapters from a source of initial weights, and subtracts the initial adapters from those weights.

    Attributes:
        values: maps adapter tensors, and the constants that store them, to initial values, for the layers filled so far.
    """

    def __init__(self, start: Start, tuning: Tuning, seed: int) -> None:
        assert tuning.adapter is not None
        self._start, self._tuning, self._adapter, self._seed = start, tuning, tuning.adapter, seed
        self.values: dict[str, torch.Tensor] = {}

    def fill(self, chain: Any, model: Any, layer: int) -> None:
        self._start.fill(chain, model, layer)
        for name in self._tuning.modules_in(layer, layer + 1):
            weight, scale = model.get_parameter(f"{name}.weight"), scale_of(self._adapter, name)
            a, b = (f"{name}.lora_{side}.weight" for side in "AB")
            if not weight.isfinite().all():
                raise UserError(
                    "adapter.not_finite",
                    f"{name}.weight holds non-finite values, which [adapter] start = {as_toml(self._adapter.start)} cannot "
                    f'decompose: download the model again, or set start = "default"',
                )
            with torch.no_grad(), seeded(self._seed, name), one_thread():
                rank = self._tuning.trainable[a].shape[0]
                self.values[a], self.values[b] = _initial_factors(self._adapter.start, weight.detach(), rank, scale)
                weight.sub_(scale * self.values[b] @ self.values[a])
            self.values |= {began_with(tensor): self.values[tensor] for tensor in (a, b)}


def _initial_factors(start: str, weight: torch.Tensor, rank: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the initial factors (A, B), computed as in peft."""
    if start == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].contiguous(), q[:, :rank].contiguous()
    if start == "pissa":
        u, values, vh = torch.linalg.svd(weight, full_matrices=False)
    else:
        u, values, vh = torch.svd_lowrank(weight, rank, niter=int(start.rpartition("_")[2]))
        vh = vh.t()
    roots = torch.diag(torch.sqrt(values[:rank] / scale))
    return roots @ vh[:rank], u[:, :rank] @ roots


def as_written(adapter: AdapterTable) -> AdapterTable:
    """Return the adapter's settings as they are saved."""
    if adapter.start == "default":
        return adapter
    more = math.sqrt(2) if adapter.rslora else 2
    changed: dict[str, Any] = {"start": "default", "rank": 2 * adapter.rank, "alpha": more * adapter.alpha}
    changed["rank_pattern"] = {key: 2 * rank for key, rank in (adapter.rank_pattern or {}).items()} or None
    changed["alpha_pattern"] = {key: more * alpha for key, alpha in (adapter.alpha_pattern or {}).items()} or None
    return adapter.model_copy(update=changed)


def tensors_as_written(tuning: Tuning, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors as they are saved. ``state`` holds the trained tensors and constants."""
    tensors = dict(state)
    for name in (name for name in tuning.trainable if began_with(name) in tuning.constants):
        is_a, first = ".lora_A." in name, tensors.pop(began_with(name))
        tensors[name] = torch.cat([state[name], first if is_a else -first], dim=0 if is_a else 1)
    return tensors


WEIGHTS = "adapter_model.safetensors"
_A = ".lora_A.weight"


def write_adapter(directory: Path, tuning: Tuning, state: dict[str, torch.Tensor], base: str | None) -> None:
    """Write an adapter to an existing directory. ``state`` maps names without peft's prefix to fp32 host tensors."""
    assert tuning.adapter is not None
    written = tuning.written
    layers = list(written.layers) if written.layers is not None else None
    config = lora_config(as_written(tuning.adapter), list(written.modules), list(written.parameters), layers)
    config.modules_to_save, config.trainable_token_indices = list(written.saved) or None, dict(written.tokens) or None
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(directory))
    keys = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    keys |= {
        key: getattr(config, key) for key in ("rank_pattern", "alpha_pattern")
    }  # peft sorts them, and the first match counts
    if tuning.written.tied is not None:  # peft writes the matrix for both ends
        head, embedding = tuning.written.tied
        state, keys["ensure_weight_tying"] = {**state, head: state[embedding].clone()}, True
    (directory / CONFIG).write_text(json.dumps(keys, indent=2), encoding="utf-8")
    write_tensors(
        directory / WEIGHTS, {FILE_PREFIX + name: tensor for name, tensor in tensors_as_written(tuning, state).items()}
    )


def adapter_directory(directory: Path) -> WholeDirectory:
    """Return a temporary directory for ``write_adapter`` and the tokenizer; it replaces ``directory`` on success."""
    return WholeDirectory(directory, "PEFT adapter directory", CONFIG, (WEIGHTS,))


def check_adapter(directory: Path, tuning: Tuning) -> None:
    """Check that an adapter matches the job and model.

    Raises:
        UserError: Files are missing or damaged, or a setting is unsupported or differs from the job's.
    """
    stored_adapter = _StoredAdapter.read(directory)
    assert tuning.adapter is not None
    adapter = tuning.adapter.model_copy(update={"tokens": tuning.tokens})  # empty if the full modules are trained
    for key, value in stored_adapter.as_job().items():
        by_tensors = key in ("modules_to_save", "tokens_in")
        if not by_tensors and (getattr(adapter, key) or None) != (value or None):
            raise UserError(
                "adapter.setting_differs",
                f"{directory}: the adapter has {key} = {as_toml(value)}, but the job has [adapter] {key} = "
                f"{as_toml(getattr(adapter, key))}; set the adapter's value in the job",
            )
    shapes = {name: stored.shape for name, stored in stored_adapter.tensors.items()}
    if tuning.written.tied is not None:
        head, embedding = tuning.written.tied
        has_ends = head in shapes and embedding in shapes
        if not has_ends or not torch.equal(stored_adapter.tensor(head), stored_adapter.tensor(embedding)):
            raise UserError(
                "adapter.tied_ends",
                f"{directory}: this adapter has separate embedding and head matrices, but the model ties them: train it with "
                f"peft's ensure_weight_tying = True, or merge it into its base (merge_and_unload)",
            )
        del shapes[head]
    if set(shapes) != set(tuning.trainable):
        odd = sorted(set(shapes) ^ set(tuning.trainable))[0]
        where = "the adapter but not by this job" if odd in shapes else "this job but not by the adapter"
        raise UserError(
            "adapter.targets_differ",
            f"{directory}: {odd} is trained by {where}; set [adapter] targets, layers, parameters, modules_to_save and tokens to "
            f"the adapter's values",
        )
    for name, shape in shapes.items():
        if shape != tuning.trainable[name].shape:
            raise UserError(
                "adapter.shape",
                f"{directory}: {name} has shape {shape}, this model needs {tuning.trainable[name].shape}: the adapter was trained "
                f"on another model",
            )


def adapter_of(directory: Path) -> tuple[AdapterTable, str | None]:
    """Return an adapter's settings as job keys (with full target names), and the name or directory of its base model.

    Raises:
        UserError: Files are missing or damaged, or a setting is unsupported.
    """
    stored = _StoredAdapter.read(directory)
    parameters = list(stored.config.target_parameters or [])
    keys = {"targets": stored.modules, "parameters": parameters, **stored.as_job()}
    return AdapterTable(method="lora", path=str(directory), **keys), stored.config.base_model_name_or_path


def with_patterns_of(directory: Path, adapter: AdapterTable) -> AdapterTable:
    """Fill in the job's unset patterns, layers and fully trained modules from the adapter in ``directory``.

    Raises:
        UserError: See ``adapter_of``.
    """
    stored = _StoredAdapter.read(directory)
    stored_keys = {**stored.as_job(), "layers": stored.config.layers}
    keys = ("layers", "rank_pattern", "alpha_pattern", "modules_to_save", "tokens", "tokens_in")
    return adapter.model_copy(update={key: stored_keys[key] for key in keys if getattr(adapter, key) is None})


def read_adapter(directory: Path, tuning: Tuning) -> dict[str, torch.Tensor]:
    """Read an adapter that passes ``check_adapter``, as a map from names without peft's prefix to fp32 host tensors."""
    stored = _StoredAdapter.read(directory)
    return {name: stored.tensor(name) for name in tuning.trainable}


@dataclass(frozen=True)
class _StoredAdapter:
    config: PeftConfig
    modules: list[str]
    """Names of the adapted modules."""
    tensors: dict[str, StoredTensor]
    """Maps names without peft's prefix to tensors."""
    rows: dict[str, StoredTensor]
    """Maps the name of each tensor with replaced rows to those rows."""

    @classmethod
    def read(cls, directory: Path) -> _StoredAdapter:
        """Read a directory. Raises UserError for missing or damaged files, unsupported settings, or unreached tensors."""
        config = read_peft_config(directory)
        try:
            stored = read_header(directory / WEIGHTS)
        except OSError as error:
            raise UserError(
                "adapter.damaged", f"{directory / WEIGHTS}: missing or damaged ({error}); save the adapter again"
            ) from None
        named = {name.removeprefix(FILE_PREFIX): tensor for name, tensor in stored.items()}
        # For a resized vocabulary peft also writes embedding and head, and their original modules.
        tensors = {name: tensor for name, tensor in named.items() if not any(part in name for part in _IGNORED_PARTS)}
        rows = {}
        for name in [name for name in tensors if name.endswith(_UNDER_ROWS)]:
            module = name.removesuffix(_UNDER_ROWS)
            if module + ROWS not in tensors:
                raise UserError(
                    "adapter.unsupported", f"{directory}: {name} lacks its token rows ({module}{ROWS}), {UNKNOWN}"
                )
            rows[f"{module}.weight"], tensors[f"{module}.weight"] = tensors.pop(module + ROWS), tensors.pop(name)
        holders = tuple(f".{name.rpartition('.')[0]}" for name in config.target_parameters or [])
        names = sorted(name.removesuffix(_A) for name in tensors if name.endswith(_A))
        modules = [n for n in names if not holders or not f".{n.replace('.base_layer', '')}".endswith(holders)]
        for name in modules:
            if not config.reaches(name):
                raise UserError(
                    "adapter.unreached_tensors",
                    f"{directory}: {WEIGHTS} has tensors for {name}, which target_modules in {CONFIG} do not match, so peft would "
                    f"ignore them; correct target_modules, or save the adapter again",
                )
        adapter = cls(config, modules, tensors, rows)
        adapter._check_whole(directory)
        if len({tuple(sorted(adapter._tokens(name))) for name in tensors if name.endswith(ROWS)}) > 1:
            raise UserError(
                "adapter.unsupported", f"{directory}: trainable_token_indices differ for embedding and head, {UNKNOWN}"
            )
        return adapter

    def _check_whole(self, directory: Path) -> None:
        """Reject fully trained modules or token rows without tensors, repeated tokens, and mismatched shapes of token rows."""
        indices = self.config.trainable_token_indices or []
        by_end = indices if isinstance(indices, dict) else {"": indices}
        with_rows = [name.removesuffix(ROWS) for name in self.tensors if name.endswith(ROWS)]
        with_rows += [name.removesuffix(".weight") for name in self.rows]
        known_tokens = [{*self._tokens(name)} for name in with_rows]  # a tied model's rows are written once
        full_tensors = [name for name in self.tensors if ".lora_" not in name]
        missing = {
            "trainable_token_indices": [
                end
                for end, tokens in by_end.items()
                if tokens and not any(name.endswith(end) for name in with_rows) and {*tokens} not in known_tokens
            ],
            "modules_to_save": [
                end for end in self.config.modules_to_save or [] if not any(f"{end}." in n for n in full_tensors)
            ],
        }
        for key, ends in missing.items():
            if ends:
                raise UserError(
                    "adapter.tensors_missing",
                    f"{directory}: {CONFIG} has {key} = {as_toml(getattr(self.config, key))}, but {WEIGHTS} has no tensors for "
                    f"{ends[0] or 'it'}: the file is damaged, or belongs to another adapter; save the adapter again",
                )
        repeated = next((tokens for tokens in by_end.values() if len({*tokens}) < len(tokens)), None)
        if repeated is not None:
            raise UserError(
                "adapter.unsupported",
                f"{directory}: trainable_token_indices = {as_toml(repeated)} lists a token more than once, {UNKNOWN}",
            )
        for name, stored in self.rows.items():
            tokens, shape = self._tokens(name), self.tensors[name].shape
            if stored.shape != (len(tokens), *shape[1:]) or max(tokens, default=0) >= shape[0]:
                raise UserError(
                    "adapter.shape",
                    f"{directory}: {name} has shape {shape} and its token rows {stored.shape}, which do not match "
                    f"trainable_token_indices = {as_toml(tokens)}; save the adapter again",
                )

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in fp32, with token rows in ascending order."""
        read = read_tensors({name: self.tensors[name]} | ({ROWS: self.rows[name]} if name in self.rows else {}))
        tensor = read[name].float()
        if name.endswith(ROWS):
            return tensor[torch.tensor(self._tokens(name)).argsort()]
        if name in self.rows:
            tensor[self._tokens(name)] = read[ROWS].float()
        return tensor

    def _tokens(self, name: str) -> list[int]:
        """Return the token ids of an embedding's or head's trained rows, in stored order."""
        indices, module = self.config.trainable_token_indices or [], name.removesuffix(ROWS).removesuffix(".weight")
        if isinstance(indices, list):
            return indices
        return next((tokens for end, tokens in indices.items() if module.endswith(end)), [])

    def as_job(self) -> dict[str, Any]:
        """Return the settings as job keys."""
        config = self.config
        ends = {"embedding" if "." in n.removesuffix(ROWS) else "head": n for n in self.tensors if n.endswith(ROWS)}
        full_modules = {n.rpartition(".")[0] for n in self.tensors if ".lora_" not in n and not n.endswith(ROWS)}
        return {
            "rank": config.r,
            "alpha": config.lora_alpha,
            "rslora": bool(config.use_rslora),
            "dora": bool(config.use_dora),
            "rank_pattern": config.rank_pattern or None,
            "alpha_pattern": config.alpha_pattern or None,
            "modules_to_save": sorted(full_modules) or None,
            "tokens": sorted(self._tokens(next(iter(ends.values())))) if ends else None,
            "tokens_in": None if not ends else next(iter(ends)) if len(ends) == 1 else "both",
        }


_UNDER_ROWS = ".token_adapter.base_layer.weight"
_IGNORED_PARTS = (".original_module.", ".modules_to_save.")
"""Substrings of the names of duplicate or unused tensors."""
