"""The command ``export``: a checkpoint, or the newest one of a run, becomes a Hugging Face or PEFT directory. One process, no MPI.

Tensors pass one layer at a time, so a model larger than memory can be exported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers.utils import logging as transformers_logging

from hetero_mpi.checkpoint import CheckpointReader, lowest_held_out, newest_good
from hetero_mpi.data.tokenizer import load_tokenizer, save_tokenizer
from hetero_mpi.device.backend import DTYPES
from hetero_mpi.errors import UserError
from hetero_mpi.job.load import JobConfig, job_from_dict
from hetero_mpi.model.adapter import MAGNITUDE, expert_delta, merged, scale_of
from hetero_mpi.model.adapter_files import adapter_directory, write_adapter
from hetero_mpi.model.files.model_directory import ModelDirectoryWriter
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.stage import PassThrough
from hetero_mpi.model.transformers.chain import TransformersChain, build_on_meta
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.weights import FileStart
from hetero_mpi.model.tuning import Tuning, tuning_of
from hetero_mpi.state.checkpointing import check_tensors

_RESULTS = ("model", "adapter")


@dataclass(frozen=True)
class ExportSource:
    """An open checkpoint and what it says of itself."""

    reader: CheckpointReader
    path: Path
    job: JobConfig
    chain: TransformersChain
    tuning: Tuning
    base: Path | None
    """Directory of the weights that were tuned, as the run saw it."""


def export(source: Path, target: Path, merge: bool, best: bool = False) -> str:
    """Write ``target`` from a run directory or a checkpoint file; returns a sentence about what was written.

    Args:
        merge: add the adapter to its base weights and write a whole model; without it an adapter is written as such.
        best: of a run directory, take the checkpoint with the lowest held-out loss.

    Raises:
        UserError: no whole checkpoint, nothing to merge, or the base weights are not there.
    """
    transformers_logging.disable_progress_bar()  # one for each layer would say nothing
    path = _checkpoint(source, best)
    with CheckpointReader(path) as reader:
        opened = _open(reader, path)
        if merge and opened.tuning.full:
            raise UserError(f"{path} holds a whole model, no adapter: leave --merge out")
        if merge and (opened.base is None or not opened.base.is_dir()):
            raise UserError(f"merging needs the base weights, which are not at {opened.base}: export without --merge")
        if opened.tuning.full:
            what = _write_model(opened, target, _trained_layers(opened), DTYPES[opened.job.train.dtype])
        elif merge:
            what = _write_model(opened, target, _merged_layers(opened), _base_dtype(opened))
        else:
            what = _write_adapter(opened, target)
    return f"{target}: {what}, from {path}"


def _checkpoint(source: Path, best: bool) -> Path:
    if source.is_file():
        if best:
            raise UserError(f"--best chooses a checkpoint of a run directory, and {source} is one: leave --best out")
        return source
    directory = source / "checkpoints"
    if not directory.is_dir():
        raise UserError(f"{source} is neither a checkpoint file nor a run directory (it has no checkpoints/)")
    if best:
        return _best(directory)
    path, skipped = newest_good(directory)
    if path is None:
        reasons = "; ".join(f"{bad.name}: {reason}" for bad, reason in skipped) or "it is empty"
        raise UserError(f"{directory}: no whole checkpoint ({reasons})")
    return path


def _best(directory: Path) -> Path:
    found = lowest_held_out(directory)
    if not found:
        raise UserError(
            f"{directory}: no checkpoint knows its held-out loss; let [checkpoint] every be a multiple of [train] evaluate_every, "
            "or set [train] patience"
        )
    return found[0]


def _open(reader: CheckpointReader, path: Path) -> ExportSource:
    try:
        job = job_from_dict(reader.told("job"))
    except ValidationError as error:
        raise UserError(
            f"{path}: its job is not one of this version: {error}; export with the version that wrote it"
        ) from error
    if job.model.factory is not None:
        raise UserError(
            f"{path} is of a model made of layers ({job.model.factory}), which has no Hugging Face form: its run wrote "
            f"model/model.safetensors, and docs/checkpoint.md shows how to read the checkpoint itself"
        )
    chain = TransformersChain(read_config(reader.told("model_config")))
    base, tuning = reader.told("base_model"), tuning_of(job, chain)
    check_tensors(reader, path, tuning)
    return ExportSource(reader, path, job, chain, tuning, Path(base) if base else None)


def _write_model(
    source: ExportSource, target: Path, layers: Iterator[dict[str, torch.Tensor]], dtype: torch.dtype
) -> str:
    with ModelDirectoryWriter(source.chain.model, target, source.job.output.shard_bytes) as writer:
        for state in layers:
            writer.add({name: tensor.to(dtype) for name, tensor in state.items()})
        _copy_tokenizer(source, writer.path)
    added = "" if source.tuning.full else f": the weights of {source.base}, not quantised, with the adapter added"
    return f"a model in {str(dtype).removeprefix('torch.')}{added}"


def _write_adapter(source: ExportSource, target: Path) -> str:
    assert source.tuning.adapter is not None
    state = {name: _read(source, name) for name in source.tuning.trainable}
    base = str(source.base) if source.base is not None else None
    with adapter_directory(target) as whole:
        write_adapter(whole.path, source.tuning.adapter, source.tuning.suffixes(), state, base)
        _copy_tokenizer(source, whole.path)
    return "a PEFT adapter"


def _trained_layers(source: ExportSource) -> Iterator[dict[str, torch.Tensor]]:
    for layer in range(source.chain.layer_count):
        yield {spec.name: _read(source, spec.name) for spec in source.chain.specs(layer, layer + 1)}


def _merged_layers(source: ExportSource) -> Iterator[dict[str, torch.Tensor]]:
    """Base weights from their files, fp32, each adapted matrix merged with its adapter."""
    chain, adapter = source.chain, source.tuning.adapter
    assert adapter is not None and source.base is not None
    start = FileStart(ModelFiles(source.base), chain)
    model = build_on_meta(chain.config)
    for layer in range(chain.layer_count):
        start.fill(chain, model, layer)
        state = {spec.name: model.get_parameter(spec.name).detach() for spec in chain.specs(layer, layer + 1)}
        for name, module in source.tuning.adapted_tensors(chain, layer, layer + 1).items():
            a, b = (_read(source, f"{module}.lora_{side}.weight") for side in "AB")
            delta = expert_delta(model, name, a, b) if name in source.tuning.parameters else b @ a
            magnitude = _read(source, f"{module}{MAGNITUDE}") if adapter.dora else None
            state[name] = merged(state[name], scale_of(adapter) * delta, magnitude)
        yield state
        for name in chain.module_names(layer):
            model.set_submodule(name, PassThrough())


def _base_dtype(source: ExportSource) -> torch.dtype:
    """The dtype of the base weights' files."""
    assert source.base is not None
    config: dict[str, Any] = ModelFiles(source.base).config
    return getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))


def _read(source: ExportSource, name: str) -> torch.Tensor:
    return torch.from_numpy(source.reader.read("parameters", name)[0])


def _copy_tokenizer(source: ExportSource, target: Path) -> None:
    """The tokenizer of the run's own result, or of the base weights; none where neither is there."""
    run = source.path.parent.parent
    for directory in (*(run / name for name in _RESULTS), source.base):
        if directory is not None and (directory / "tokenizer.json").is_file():
            save_tokenizer(load_tokenizer(directory), target)
            return
