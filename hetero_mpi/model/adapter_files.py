"""PEFT adapter directories: ``adapter_config.json`` and ``adapter_model.safetensors``, as ``PeftModel`` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hetero_mpi.errors import UserError
from hetero_mpi.job.rules import as_toml
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapter_start import as_written, tensors_as_written
from hetero_mpi.model.files.model_directory import WholeDirectory
from hetero_mpi.model.files.model_files import StoredTensor, read_header, read_tensor, write_tensors
from hetero_mpi.model.peft_config import CONFIG, PeftConfig, read_peft_config
from hetero_mpi.model.tuning import FILE_PREFIX, Tuning, lora_config

WEIGHTS = "adapter_model.safetensors"
_A = ".lora_A.weight"


def write_adapter(directory: Path, tuning: Tuning, state: dict[str, torch.Tensor], base: str | None) -> None:
    """Write an adapter into a directory that is there. ``state``: adapter tensor (without peft's prefix), and constant -> fp32 host
    tensor."""
    assert tuning.adapter is not None
    written = tuning.written
    layers = list(written.layers) if written.layers is not None else None
    config = lora_config(as_written(tuning.adapter), list(written.modules), list(written.parameters), layers)
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(directory))
    keys = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    keys |= {
        key: getattr(config, key) for key in ("rank_pattern", "alpha_pattern")
    }  # peft sorts them, and the first match counts
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
    config, _ = _read(directory)
    adapter = tuning.adapter
    assert adapter is not None
    for key, value in _as_job(config).items():
        if (getattr(adapter, key) or None) != (value or None):
            raise UserError(
                f"{directory}: the adapter has {key} = {as_toml(value)}, the job says [adapter] {key} = "
                f"{as_toml(getattr(adapter, key))}; make them equal"
            )
    shapes = {name: stored.shape for name, stored in _stored(directory).items()}
    if set(shapes) != set(tuning.trainable):
        odd = sorted(set(shapes) ^ set(tuning.trainable))[0]
        where = "the adapter but not by this job" if odd in shapes else "this job but not by the adapter"
        raise UserError(
            f"{directory}: {odd} is trained by {where}; set [adapter] targets, layers and parameters as the adapter has them"
        )
    for name, shape in shapes.items():
        if shape != tuning.trainable[name].shape:
            raise UserError(
                f"{directory}: {name} has shape {shape}, this model needs {tuning.trainable[name].shape}: another model's adapter"
            )


def adapter_of(directory: Path) -> tuple[AdapterTable, str | None]:
    """An adapter's settings, as the job's keys say them (targets by their full names), and its base model's name or directory.

    :raises UserError: as ``check_adapter``, for the adapter alone.
    """
    config, modules = _read(directory)
    parameters = list(config.target_parameters or [])
    table = AdapterTable(method="lora", path=str(directory), targets=modules, parameters=parameters, **_as_job(config))
    return table, config.base_model_name_or_path


def with_patterns_of(directory: Path, adapter: AdapterTable) -> AdapterTable:
    """The job's table with what it leaves to the adapter that it starts from: patterns, and the blocks.

    :raises UserError: as ``adapter_of``.
    """
    config, _ = _read(directory)
    own = {**_as_job(config), "layers": config.layers}
    left = {key: own[key] for key in ("layers", "rank_pattern", "alpha_pattern") if getattr(adapter, key) is None}
    return adapter.model_copy(update=left)


def _as_job(config: PeftConfig) -> dict[str, Any]:
    """Settings by the job's keys."""
    return {
        "rank": config.r,
        "alpha": config.lora_alpha,
        "rslora": bool(config.use_rslora),
        "dora": bool(config.use_dora),
        "rank_pattern": config.rank_pattern or None,
        "alpha_pattern": config.alpha_pattern or None,
    }


def read_adapter(directory: Path, tuning: Tuning) -> dict[str, torch.Tensor]:
    """name (without peft's prefix) -> fp32 host tensor of an adapter that fits (``check_adapter``)."""
    stored = _stored(directory)
    return {name: read_tensor(name, stored[name]).float() for name in tuning.trainable}


def _read(directory: Path) -> tuple[PeftConfig, list[str]]:
    """The configuration, and the names of the modules that have tensors."""
    config = read_peft_config(directory)
    holders = tuple(f".{name.rpartition('.')[0]}" for name in config.target_parameters or [])
    names = sorted(name.removesuffix(_A) for name in _stored(directory) if name.endswith(_A))
    modules = [n for n in names if not holders or not f".{n.replace('.base_layer', '')}".endswith(holders)]
    for name in modules:
        if not config.reaches(name):
            raise UserError(
                f"{directory}: there are tensors of {name}, which the targets in {CONFIG} do not reach: peft would leave them out; "
                f"correct target_modules there, or save the adapter again"
            )
    return config, modules


def _stored(directory: Path) -> dict[str, StoredTensor]:
    """name (without peft's prefix) -> where it lies."""
    try:
        found = read_header(directory / WEIGHTS)
    except OSError as error:
        raise UserError(f"{directory / WEIGHTS}: missing or damaged ({error}); save the adapter again") from None
    return {name.removeprefix(FILE_PREFIX): stored for name, stored in found.items()}
