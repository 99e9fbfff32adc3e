"""PEFT adapter directories: ``adapter_config.json`` and ``adapter_model.safetensors``, as ``PeftModel`` reads them.

Also here: adapters that begin with a part of the weights, which learn beside what is left: PiSSA (Meng et al. 2024,
arXiv:2404.02948) with the largest singular values, OLoRA (Büyükakyüz 2024, arXiv:2406.01775) with the first columns of a QR
decomposition.

What an adapter began with is kept beside it. So it can be written as one for the weights as they were, of twice the rank:
W - s B0 A0 + s B A = W + s [B, -B0] [A; A0]. peft converts it in the same way.
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
    """Start weights less what adapters begin with.

    Attributes:
        values: of the layers that were filled: adapter's tensor, and constant beside it -> what it begins with.
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
                    f"{name}.weight holds numbers that are not finite, and [adapter] start = {as_toml(self._adapter.start)} takes "
                    f'it apart: get the model\'s files again, or set start = "default"',
                )
            with torch.no_grad(), seeded(self._seed, name), one_thread():
                rank = self._tuning.trainable[a].shape[0]
                self.values[a], self.values[b] = _parts(self._adapter.start, weight.detach(), rank, scale)
                weight.sub_(scale * self.values[b] @ self.values[a])
            self.values |= {began_with(tensor): self.values[tensor] for tensor in (a, b)}


def _parts(start: str, weight: torch.Tensor, rank: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(A, B) as peft begins with them."""
    if start == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].contiguous(), q[:, :rank].contiguous()
    if start == "pissa":
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        left, values, right = torch.svd_lowrank(weight, rank, niter=int(start.rpartition("_")[2]))
        right = right.t()
    roots = torch.diag(torch.sqrt(values[:rank] / scale))
    return roots @ right[:rank], left[:, :rank] @ roots


def as_written(adapter: AdapterTable) -> AdapterTable:
    """The settings of the adapter as it is written."""
    if adapter.start == "default":
        return adapter
    more = math.sqrt(2) if adapter.rslora else 2
    changed: dict[str, Any] = {"start": "default", "rank": 2 * adapter.rank, "alpha": more * adapter.alpha}
    changed["rank_pattern"] = {key: 2 * rank for key, rank in (adapter.rank_pattern or {}).items()} or None
    changed["alpha_pattern"] = {key: more * alpha for key, alpha in (adapter.alpha_pattern or {}).items()} or None
    return adapter.model_copy(update=changed)


def tensors_as_written(tuning: Tuning, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its tensors. ``state``: those that are trained, and the constants."""
    found = dict(state)
    for name in (name for name in tuning.trainable if began_with(name) in tuning.constants):
        is_a, first = ".lora_A." in name, found.pop(began_with(name))
        found[name] = torch.cat([state[name], first if is_a else -first], dim=0 if is_a else 1)
    return found


WEIGHTS = "adapter_model.safetensors"
_A = ".lora_A.weight"


def write_adapter(directory: Path, tuning: Tuning, state: dict[str, torch.Tensor], base: str | None) -> None:
    """Write an adapter into a directory that is there. ``state``: adapter tensor (without peft's prefix), and constant -> fp32 host
    tensor."""
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
    if tuning.written.tied is not None:  # each end has the matrix, as peft itself writes it
        head, embedding = tuning.written.tied
        state, keys["ensure_weight_tying"] = {**state, head: state[embedding].clone()}, True
    (directory / CONFIG).write_text(json.dumps(keys, indent=2), encoding="utf-8")
    write_tensors(
        directory / WEIGHTS, {FILE_PREFIX + name: one for name, one in tensors_as_written(tuning, state).items()}
    )


def adapter_directory(directory: Path) -> WholeDirectory:
    """A place for ``write_adapter`` and the tokenizer, which replaces ``directory`` when all is there."""
    return WholeDirectory(directory, "PEFT adapter directory", CONFIG, (WEIGHTS,))


def check_adapter(directory: Path, tuning: Tuning) -> None:
    """Refuse an adapter that does not fit.

    :raises UserError: missing or damaged files, a setting that is not computed, or another one than the job's.
    """
    found = _Found.at(directory)
    assert tuning.adapter is not None
    adapter = tuning.adapter.model_copy(update={"tokens": tuning.tokens})  # none where the whole modules are trained
    for key, value in found.as_job().items():
        by_tensors = key in ("modules_to_save", "tokens_in")
        if not by_tensors and (getattr(adapter, key) or None) != (value or None):
            raise UserError(
                "adapter.setting_differs",
                f"{directory}: the adapter has {key} = {as_toml(value)}, the job says [adapter] {key} = "
                f"{as_toml(getattr(adapter, key))}; make them equal",
            )
    shapes = {name: stored.shape for name, stored in found.tensors.items()}
    if tuning.written.tied is not None:
        head, embedding = tuning.written.tied
        both = head in shapes and embedding in shapes
        if not both or not torch.equal(found.tensor(head), found.tensor(embedding)):
            raise UserError(
                "adapter.tied_ends",
                f"{directory}: this adapter has an embedding and a head of its own, and the model one matrix for both: train it "
                f"with peft's ensure_weight_tying = True, or merge it into its base (merge_and_unload)",
            )
        del shapes[head]
    if set(shapes) != set(tuning.trainable):
        odd = sorted(set(shapes) ^ set(tuning.trainable))[0]
        where = "the adapter but not by this job" if odd in shapes else "this job but not by the adapter"
        raise UserError(
            "adapter.targets_differ",
            f"{directory}: {odd} is trained by {where}; set [adapter] targets, layers, parameters, modules_to_save and tokens "
            f"as the adapter has them",
        )
    for name, shape in shapes.items():
        if shape != tuning.trainable[name].shape:
            raise UserError(
                "adapter.shape",
                f"{directory}: {name} has shape {shape}, this model needs {tuning.trainable[name].shape}: another model's adapter",
            )


def adapter_of(directory: Path) -> tuple[AdapterTable, str | None]:
    """An adapter's settings, as the job's keys say them (targets by their full names), and its base model's name or directory.

    :raises UserError: as ``check_adapter``, for the adapter alone.
    """
    found = _Found.at(directory)
    parameters = list(found.config.target_parameters or [])
    own = {"targets": found.modules, "parameters": parameters, **found.as_job()}
    return AdapterTable(method="lora", path=str(directory), **own), found.config.base_model_name_or_path


def with_patterns_of(directory: Path, adapter: AdapterTable) -> AdapterTable:
    """The job's table with what it leaves to the adapter that it starts from: patterns, the blocks, and what is trained whole.

    :raises UserError: as ``adapter_of``.
    """
    found = _Found.at(directory)
    own = {**found.as_job(), "layers": found.config.layers}
    keys = ("layers", "rank_pattern", "alpha_pattern", "modules_to_save", "tokens", "tokens_in")
    return adapter.model_copy(update={key: own[key] for key in keys if getattr(adapter, key) is None})


def read_adapter(directory: Path, tuning: Tuning) -> dict[str, torch.Tensor]:
    """name (without peft's prefix) -> fp32 host tensor of an adapter that fits (``check_adapter``)."""
    found = _Found.at(directory)
    return {name: found.tensor(name) for name in tuning.trainable}


@dataclass(frozen=True)
class _Found:
    """The contents of an adapter's directory."""

    config: PeftConfig
    modules: list[str]
    """Names of the adapted modules."""
    tensors: dict[str, StoredTensor]
    """By their names without peft's prefix."""
    rows: dict[str, StoredTensor]
    """Those of ``tensors`` of which some rows are others -> these rows."""

    @classmethod
    def at(cls, directory: Path) -> _Found:
        """:raises UserError: missing or damaged files, a setting that is not computed, tensors that the settings do not reach."""
        config = read_peft_config(directory)
        try:
            stored = read_header(directory / WEIGHTS)
        except OSError as error:
            raise UserError(
                "adapter.damaged", f"{directory / WEIGHTS}: missing or damaged ({error}); save the adapter again"
            ) from None
        named = {name.removeprefix(FILE_PREFIX): one for name, one in stored.items()}
        # Where the vocabulary has grown, peft writes embedding and head once more, and what it trains over.
        tensors = {name: one for name, one in named.items() if not any(part in name for part in _TWICE)}
        rows = {}
        for name in [name for name in tensors if name.endswith(_UNDER_ROWS)]:
            module = name.removesuffix(_UNDER_ROWS)
            if module + ROWS not in tensors:
                raise UserError(
                    "adapter.unsupported",
                    f"{directory}: {name} has no rows of tokens beside it ({module}{ROWS}), {UNKNOWN}",
                )
            rows[f"{module}.weight"], tensors[f"{module}.weight"] = tensors.pop(module + ROWS), tensors.pop(name)
        holders = tuple(f".{name.rpartition('.')[0]}" for name in config.target_parameters or [])
        names = sorted(name.removesuffix(_A) for name in tensors if name.endswith(_A))
        modules = [n for n in names if not holders or not f".{n.replace('.base_layer', '')}".endswith(holders)]
        for name in modules:
            if not config.reaches(name):
                raise UserError(
                    "adapter.unreached_tensors",
                    f"{directory}: there are tensors of {name}, which the targets in {CONFIG} do not reach: peft would leave them "
                    f"out; correct target_modules there, or save the adapter again",
                )
        found = cls(config, modules, tensors, rows)
        found._check_whole(directory)
        if len({tuple(sorted(found._tokens(name))) for name in tensors if name.endswith(ROWS)}) > 1:
            raise UserError(
                "adapter.unsupported", f"{directory}: trainable_token_indices of embedding and head differ, {UNKNOWN}"
            )
        return found

    def _check_whole(self, directory: Path) -> None:
        """Refuse settings of what is trained beside adapters that no tensor is there for, and tokens that are named twice."""
        given = self.config.trainable_token_indices or []
        by_end = given if isinstance(given, dict) else {"": given}
        with_rows = [name.removesuffix(ROWS) for name in self.tensors if name.endswith(ROWS)]
        with_rows += [name.removesuffix(".weight") for name in self.rows]
        same = [{*self._tokens(name)} for name in with_rows]  # a tied model's rows are written once
        whole = [name for name in self.tensors if ".lora_" not in name]
        missing = {
            "trainable_token_indices": [
                end
                for end, tokens in by_end.items()
                if tokens and not any(name.endswith(end) for name in with_rows) and {*tokens} not in same
            ],
            "modules_to_save": [
                end for end in self.config.modules_to_save or [] if not any(f"{end}." in n for n in whole)
            ],
        }
        for key, ends in missing.items():
            if ends:
                raise UserError(
                    "adapter.tensors_missing",
                    f"{directory}: {CONFIG} has {key} = {as_toml(getattr(self.config, key))}, and {WEIGHTS} no tensors of "
                    f"{ends[0] or 'them'}: it is damaged, or of another adapter; save the adapter again",
                )
        twice = next((tokens for tokens in by_end.values() if len({*tokens}) < len(tokens)), None)
        if twice is not None:
            raise UserError(
                "adapter.unsupported",
                f"{directory}: trainable_token_indices = {as_toml(twice)} name a token twice, {UNKNOWN}",
            )
        for name, stored in self.rows.items():
            tokens, shape = self._tokens(name), self.tensors[name].shape
            if stored.shape != (len(tokens), *shape[1:]) or max(tokens, default=0) >= shape[0]:
                raise UserError(
                    "adapter.shape",
                    f"{directory}: {name} has shape {shape} and its rows of tokens {stored.shape}, which trainable_token_indices = "
                    f"{as_toml(tokens)} do not fit; save the adapter again",
                )

    def tensor(self, name: str) -> torch.Tensor:
        """In fp32, rows of tokens in the order of these."""
        read = read_tensors({name: self.tensors[name]} | ({ROWS: self.rows[name]} if name in self.rows else {}))
        tensor = read[name].float()
        if name.endswith(ROWS):
            return tensor[torch.tensor(self._tokens(name)).argsort()]
        if name in self.rows:
            tensor[self._tokens(name)] = read[ROWS].float()
        return tensor

    def _tokens(self, name: str) -> list[int]:
        """Ids of the rows of an embedding or a head, in their order."""
        given, module = self.config.trainable_token_indices or [], name.removesuffix(ROWS).removesuffix(".weight")
        if isinstance(given, list):
            return given
        return next((own for end, own in given.items() if module.endswith(end)), [])

    def as_job(self) -> dict[str, Any]:
        """Settings by the job's keys."""
        config = self.config
        ends = {"embedding" if "." in n.removesuffix(ROWS) else "head": n for n in self.tensors if n.endswith(ROWS)}
        whole = {n.rpartition(".")[0] for n in self.tensors if ".lora_" not in n and not n.endswith(ROWS)}
        return {
            "rank": config.r,
            "alpha": config.lora_alpha,
            "rslora": bool(config.use_rslora),
            "dora": bool(config.use_dora),
            "rank_pattern": config.rank_pattern or None,
            "alpha_pattern": config.alpha_pattern or None,
            "modules_to_save": sorted(whole) or None,
            "tokens": sorted(self._tokens(next(iter(ends.values())))) if ends else None,
            "tokens_in": None if not ends else next(iter(ends)) if len(ends) == 1 else "both",
        }


_UNDER_ROWS = ".token_adapter.base_layer.weight"
_TWICE = (".original_module.", ".modules_to_save.")
"""Parts of the names of what else stands there, too, or is not computed with."""
