"""Checkpoints and the model directory: what leaves the ranks through rank 0, tensor by tensor, and how it comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from hetero_mpi.checkpoint import CheckpointReader, CheckpointWriter, checkpoint_path, newest_good, prune, verify
from hetero_mpi.data.tokenizer import save_tokenizer
from hetero_mpi.errors import UserError
from hetero_mpi.job import TrainTable
from hetero_mpi.model.adapter_files import read_adapter, write_adapter
from hetero_mpi.model.chain import Chain
from hetero_mpi.model.directory import ModelDirectoryWriter
from hetero_mpi.model.optimizer import MOMENTS
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.training.redistribute import Parcel, collect, distribute, parcels
from hetero_mpi.training.trainer import Trainer

KINDS = ("parameters", "moments1", "moments2")
_MOMENT_OF = dict(zip(KINDS[1:], MOMENTS, strict=True))


@dataclass
class RunState:
    """What a checkpoint knows of the run besides tensors."""

    step: int
    """Optimizer steps taken; the next one has this number, and the data position follows from it."""
    losses: list[float]
    """Loss of every step so far, nats per token."""
    updates: int
    """Steps of the optimizer: fewer than ``step`` when some were skipped."""
    loss_scale: tuple[float, int] | None = None
    """(factor, good steps since its last change) of fp16's loss scaling, as a checkpoint has it; None: its start."""


def save_checkpoint(trainer: Trainer, state: RunState, directory: Path, metadata: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint on rank 0. Collective over the active ranks.

    Args:
        metadata: job, plan, profile and the like (values used on rank 0 only).
        keep: newest checkpoints that stay.

    Returns:
        The file's path (on rank 0 it exists).
    """
    path = checkpoint_path(directory, state.step)
    coming = collect(trainer.rank, trainer.transport, parcels(trainer.tuning, trainer.plan, KINDS), _state_of(trainer))
    if trainer.rank != 0:
        for _ in coming:
            pass
        return path
    losses = np.array(state.losses, dtype=np.float64)
    scale = trainer.loss_scale
    described = {
        **metadata,
        "step": state.step,
        "updates": state.updates,
        "losses": losses,
        "loss_scale": [scale.value, scale.good_steps],
    }
    with CheckpointWriter(path, described) as writer:
        for parcel, tensor in coming:
            writer.write(parcel.kind, parcel.name, tensor.numpy(), "float32")
    prune(directory, keep)
    return path


def find_checkpoint(run_dir: Path, wanted: str) -> tuple[Path, list[str]]:
    """The checkpoint to resume from, and remarks about damaged ones that were passed over.

    Args:
        wanted: ``latest``, or the path of a checkpoint file.

    Raises:
        UserError: there is none that is whole.
    """
    if wanted != "latest":
        path = Path(wanted)
        if not path.exists():
            raise UserError(f"{path}: no such checkpoint; `--resume latest` takes the newest one of the run directory")
        damage = verify(path)
        if damage is not None:
            raise UserError(damage)
        return path, []
    directory = run_dir / "checkpoints"
    path_or_none, skipped = newest_good(directory)
    remarks = [f"passed over {path}: {reason}" for path, reason in skipped]
    if path_or_none is None:
        detail = "; ".join(remarks) if remarks else "it holds none"
        raise UserError(f"{directory}: no whole checkpoint to resume from ({detail}); start without --resume")
    return path_or_none, remarks


def check_fits(reader: CheckpointReader, path: Path, tuning: Tuning, train: TrainTable, sequence_length: int) -> None:
    """Refuse a checkpoint of another model or of a run whose steps would not continue in this one.

    Raises:
        UserError: with the first difference.
    """
    names = set(reader.names("parameters"))
    own = set(tuning.trainable) | set(tuning.constants)
    if names != own:
        extra, lacking = sorted(names - own), sorted(own - names)
        detail = f"it holds {extra[0]!r}, which this model does not have" if extra else f"it lacks {lacking[0]!r}"
        raise UserError(f"{path} is a checkpoint of another model: {detail}; resume with the job that wrote it")
    for name, spec in tuning.trainable.items():
        shape = tuple(reader.shape("parameters", name))
        if shape != spec.shape:
            raise UserError(
                f"{path} is a checkpoint of another model: {name} has shape {shape} there and {spec.shape} here"
            )
    then = reader.metadata["job"]
    now = {"seed": train.seed, "global_batch": train.global_batch, "dtype": train.dtype}
    for key, value in now.items():
        if then["train"][key] != value:
            raise UserError(
                f"{path} was written with [train] {key} = {then['train'][key]!r}, this job says {value!r}: the run would not "
                f"continue where it stopped; set it back, or start without --resume"
            )
    if then["data"]["sequence_length"] != sequence_length:
        raise UserError(
            f"{path} was written with [data] sequence_length = {then['data']['sequence_length']}, this job says "
            f"{sequence_length}: the order of samples would differ; set it back, or start without --resume"
        )


def restore(trainer: Trainer, reader: CheckpointReader | None, state: RunState) -> None:
    """Bring parameters and moments from rank 0's checkpoint to the ranks that hold them now. Collective.

    Args:
        reader: the open checkpoint on rank 0, else None.
        state: what the checkpoint says of the run.
    """
    if state.loss_scale is not None:
        trainer.loss_scale.value, trainer.loss_scale.good_steps = state.loss_scale

    def produce(parcel: Parcel) -> torch.Tensor:
        assert reader is not None
        array, _ = reader.read(parcel.kind, parcel.name)
        return torch.from_numpy(np.ascontiguousarray(array))

    waiting: dict[str, dict[str, torch.Tensor]] = {}

    def keep(parcel: Parcel, tensor: torch.Tensor) -> None:
        if parcel.kind == "parameters":
            trainer.set_parameter(parcel.name, tensor)
            return
        moments = waiting.setdefault(parcel.name, {})
        moments[_MOMENT_OF[parcel.kind]] = tensor
        if len(moments) == len(MOMENTS):
            assert trainer.optimizer is not None
            trainer.optimizer.restore(parcel.name, waiting.pop(parcel.name), state.updates)

    distribute(trainer.rank, trainer.transport, parcels(trainer.tuning, trainer.plan, KINDS), produce, keep)
    trainer.share_tied_weight()


def save_model(trainer: Trainer, directory: Path, shard_bytes: int, tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Write the model as a Hugging Face directory on rank 0, item by item, its tokenizer beside it. Collective."""
    listed = parcels(trainer.tuning, trainer.plan, ("parameters",), trainer.dtype)
    coming = collect(trainer.rank, trainer.transport, listed, lambda parcel: trainer.compute_parameter(parcel.name))
    if trainer.rank != 0:
        for _ in coming:
            pass
        return
    with ModelDirectoryWriter(trainer.chain.model, directory, shard_bytes) as writer:
        for state in _by_item(trainer.chain, coming):
            writer.add(state)
        if tokenizer is not None:
            save_tokenizer(tokenizer, writer.path)


def save_adapter(
    trainer: Trainer, directory: Path, base: str | None, tokenizer: PreTrainedTokenizerFast | None
) -> None:
    """Write the adapter as a PEFT directory on rank 0, with the tokenizer. Collective. ``base``: what it was trained on."""
    listed = parcels(trainer.tuning, trainer.plan, ("parameters",))
    coming = collect(trainer.rank, trainer.transport, listed, lambda parcel: trainer.parameter(parcel.name))
    state = {parcel.name: tensor.clone() for parcel, tensor in coming}
    if trainer.rank == 0:
        assert trainer.tuning.adapter is not None
        write_adapter(directory, trainer.tuning.adapter, trainer.tuning.suffixes(), state, base)
        if tokenizer is not None:
            save_tokenizer(tokenizer, directory)


def load_adapter(trainer: Trainer, directory: Path | None) -> None:
    """Start from a PEFT directory that rank 0 has (``directory``, None elsewhere). Collective."""
    stored = read_adapter(directory, trainer.tuning) if directory is not None else {}
    listed = parcels(trainer.tuning, trainer.plan, ("parameters",))
    distribute(
        trainer.rank,
        trainer.transport,
        listed,
        lambda parcel: stored[parcel.name],
        lambda parcel, tensor: trainer.set_parameter(parcel.name, tensor),
    )


def _state_of(trainer: Trainer):  # type: ignore[no-untyped-def]
    def own(parcel: Parcel) -> torch.Tensor:
        if parcel.kind == "parameters":
            return trainer.parameter(parcel.name)
        assert trainer.optimizer is not None
        return trainer.backend.to_host(trainer.optimizer.state(parcel.name)[_MOMENT_OF[parcel.kind]])

    return own


def _by_item(chain: Chain, coming: Iterator[tuple[Parcel, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    item = 0
    state: dict[str, torch.Tensor] = {}
    for parcel, tensor in coming:
        if chain.item_of(parcel.name) != item:
            yield state
            item, state = chain.item_of(parcel.name), {}
        state[parcel.name] = tensor
    yield state
