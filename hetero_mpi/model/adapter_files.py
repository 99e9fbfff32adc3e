"""PEFT adapter directories: ``adapter_config.json`` and ``adapter_model.safetensors``, as ``PeftModel`` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hetero_mpi.errors import UserError
from hetero_mpi.job.load import AdapterTable
from hetero_mpi.job.rules import as_toml
from hetero_mpi.model.files.model_directory import WholeDirectory, write_tensors
from hetero_mpi.model.files.model_files import StoredTensor, read_header, read_json, read_tensor
from hetero_mpi.model.tuning import FILE_PREFIX, Tuning, lora_config

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_A = ".lora_A.weight"
_NOT_PLAIN = ("rank_pattern", "alpha_pattern", "bias", "modules_to_save", "layer_replication")
"""Keys of peft's configuration that change what an adapter computes."""


def write_adapter(
    directory: Path, adapter: AdapterTable, targets: list[str], state: dict[str, torch.Tensor], base: str | None
) -> None:
    """Write an adapter into a directory that is there.

    Args:
        targets: last parts of the adapted modules' names.
        state: adapter tensor (without peft's prefix) -> fp32 host tensor.
    """
    config = lora_config(adapter, targets, list(adapter.parameters))
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(directory))
    write_tensors(directory / _WEIGHTS, {FILE_PREFIX + name: tensor for name, tensor in state.items()})


def adapter_directory(directory: Path) -> WholeDirectory:
    """A place for ``write_adapter`` and the tokenizer, which replaces ``directory`` when all is there."""
    return WholeDirectory(directory, "PEFT adapter directory", _CONFIG, (_WEIGHTS,))


def check_adapter(directory: Path, tuning: Tuning) -> None:
    """Refuse an adapter that does not fit.

    :raises UserError: missing or damaged files, another rank, alpha or set of targets than the job's.
    """
    config = _read_config(directory)
    adapter = tuning.adapter
    assert adapter is not None
    for key, ours, theirs in (
        ("rank", adapter.rank, config.get("r")),
        ("alpha", adapter.alpha, config.get("lora_alpha")),
        ("rslora", adapter.rslora, bool(config.get("use_rslora"))),
        ("dora", adapter.dora, bool(config.get("use_dora"))),
    ):
        if ours != theirs:
            raise UserError(
                f"{directory}: the adapter has {key} = {as_toml(theirs)}, the job says [adapter] {key} = {as_toml(ours)}; make "
                f"them equal"
            )
    shapes = {name: stored.shape for name, stored in _stored(directory).items()}
    if set(shapes) != set(tuning.trainable):
        odd = sorted(set(shapes) ^ set(tuning.trainable))[0]
        where = "the adapter but not by this job" if odd in shapes else "this job but not by the adapter"
        raise UserError(
            f"{directory}: {odd} is trained by {where}; set [adapter] targets and parameters as the adapter has them"
        )
    for name, shape in shapes.items():
        if shape != tuning.trainable[name].shape:
            raise UserError(
                f"{directory}: {name} has shape {shape}, this model needs {tuning.trainable[name].shape}: another model's adapter"
            )


def adapter_of(directory: Path) -> tuple[AdapterTable, str | None]:
    """What an adapter is, as the job's keys say it (targets by their full names), and its base model's directory.

    :raises UserError: missing or damaged files, or a kind of adapter that is not plain LoRA.
    """
    config = _read_config(directory)
    unusual = [key for key in _NOT_PLAIN if config.get(key) not in (None, False, "none", {}, [])]
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if unusual or type(rank) is not int or not isinstance(alpha, int | float) or rank < 1 or alpha <= 0:
        what = f"{unusual[0]} = {config[unusual[0]]!r}" if unusual else f"r = {rank!r}, lora_alpha = {alpha!r}"
        raise UserError(f"{directory / _CONFIG}: hetero_mpi knows plain LoRA, not {what}; merge the adapter with peft")
    parameters = list(config.get("target_parameters") or [])
    holders = tuple(f".{name.rpartition('.')[0]}" for name in parameters)
    names = sorted(name.removesuffix(_A) for name in _stored(directory) if name.endswith(_A))
    targets = [name for name in names if not parameters or not f".{name.replace('.base_layer', '')}".endswith(holders)]
    rslora, dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    table = AdapterTable(
        method="lora", rank=rank, alpha=float(alpha), targets=targets, parameters=parameters, rslora=rslora, dora=dora
    )
    return table, config.get("base_model_name_or_path")


def read_adapter(directory: Path, tuning: Tuning) -> dict[str, torch.Tensor]:
    """name (without peft's prefix) -> fp32 host tensor of an adapter that fits (``check_adapter``)."""
    stored = _stored(directory)
    return {name: read_tensor(name, stored[name]).float() for name in tuning.trainable}


def _read_config(directory: Path) -> dict[str, Any]:
    config = read_json(directory / _CONFIG, f"Without it {directory} is not a PEFT adapter directory.")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{directory}: hetero_mpi continues LoRA adapters, this one is {kind!r}")
    return config


def _stored(directory: Path) -> dict[str, StoredTensor]:
    """name (without peft's prefix) -> where it lies."""
    try:
        found = read_header(directory / _WEIGHTS)
    except OSError as error:
        raise UserError(f"{directory / _WEIGHTS}: missing or damaged ({error}); save the adapter again") from None
    return {name.removeprefix(FILE_PREFIX): stored for name, stored in found.items()}
