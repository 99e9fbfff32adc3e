"""Checkpoints, and the model or adapter directory: written through rank 0 tensor by tensor, checked, and brought back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from hetero_mpi.checkpoint import KINDS as KINDS
from hetero_mpi.checkpoint import CheckpointReader, newest_good, verify
from hetero_mpi.checkpoint.opening import damage_named
from hetero_mpi.data.tokenizer import save_tokenizer
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.errors import UserError
from hetero_mpi.job.schema import JobConfig, TrainTable
from hetero_mpi.model.adapter_files import adapter_directory, read_adapter, write_adapter
from hetero_mpi.model.layer.interface import LayerChain, ParameterSpec
from hetero_mpi.model.result_writer import result_writer
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.state.background_save import Saver
from hetero_mpi.state.redistribute import (
    Delivery,
    LiveState,
    Parcel,
    collect,
    deliveries,
    distribute,
    held_as,
    keeper,
    move,
    parcels,
    set_parameter,
)

LATEST = "latest"
"""``--resume latest``: from the newest state in the run directory."""
ANY = "any"
"""As ``LATEST``, or from the beginning where there is no state; the supervisor uses it."""


def open_saver(trainer: Trainer, directory: Path, job: JobConfig, newest: Path | None) -> Saver:
    """The ``Saver`` of the run's checkpoints in ``directory``, the newest of which is ``newest``. Collective over the active
    ranks.
    """
    listed = parcels(trainer.tuning, trainer.plan, KINDS)
    threaded = job.cluster.communication_thread
    live = LiveState(trainer)
    return Saver(trainer.world, trainer.backend, listed, live, directory, job.checkpoint, threaded, newest)


def find_checkpoint(run_dir: Path, wanted: str) -> tuple[Path, list[str]]:
    """The checkpoint to resume from, and remarks about damaged ones that were passed over. ``wanted``: ``LATEST`` (or ``ANY``), or
    the path of a checkpoint file. Raises UserError: no whole checkpoint is there.
    """
    if wanted not in (LATEST, ANY):
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


def check_fits(
    reader: CheckpointReader, path: Path, chain: LayerChain, tuning: Tuning, train: TrainTable, sequence_length: int
) -> None:
    """Refuse a checkpoint of another model, or of a run whose steps this one would not continue. Raises UserError: with the first
    difference.
    """
    if "version_id" in reader.metadata:
        raise UserError(f"{path} is one rank's copy, not a checkpoint; `--resume` alone looks for those on all hosts")
    check_train(reader, path, train)
    check_tensors(reader, path, tuning)
    check_settings(reader, path, chain, sequence_length)


def check_tensors(reader: CheckpointReader, path: Path, tuning: Tuning) -> None:
    """Refuse a checkpoint of another model, before any of its tensors is read. Raises UserError: with the first difference."""
    names = set(reader.names("parameters"))
    specs = {**tuning.trainable, **tuning.constants}
    own = set(specs)
    if names != own:
        extra, lacking = sorted(names - own), sorted(own - names)
        detail = f"it holds {extra[0]!r}, which this model does not have" if extra else f"it lacks {lacking[0]!r}"
        raise UserError(f"{path} is a checkpoint of another model: {detail}; resume with the job that wrote it")
    for spec in specs.values():
        check_shapes(reader, path, tuning, spec)


def check_shapes(reader: CheckpointReader, path: Path, tuning: Tuning, spec: ParameterSpec) -> None:
    """Refuse a tensor, of a checkpoint or of a local shard, that is not this model's. Raises UserError."""
    for kind in KINDS:
        there = held_as(tuning, spec, kind)
        if there is None:
            continue
        found, own = (
            (reader.shape(kind, spec.name), reader.dtype(kind, spec.name)),
            str(there[1]).removeprefix("torch."),
        )
        if found != (tuple(there[0]), own):
            raise UserError(
                f"{path} is a checkpoint of another model: {kind}/{spec.name} has shape {found[0]} of {found[1]} there and "
                f"{tuple(there[0])} of {own} here"
            )


def check_train(reader: CheckpointReader, path: Path, train: TrainTable) -> None:
    """Refuse a checkpoint or local shard of a run that took its steps in another way. Raises UserError."""
    then = reader.metadata["job"]
    now = {key: getattr(train, key) for key in ("seed", "global_batch", "dtype", "optimizer")}
    for key, value in now.items():
        if value == "auto":  # the dtype, before it is settled
            continue
        if then["train"].get(key, TrainTable.model_fields[key].default) != value:
            raise UserError(
                f"{path} was written with [train] {key} = {then['train'].get(key)!r}, this job says {value!r}: the run would not "
                f"continue where it stopped; set it back, or start without --resume"
            )


def check_settings(reader: CheckpointReader, path: Path, chain: LayerChain, sequence_length: int) -> None:
    """Refuse a checkpoint or local shard of other sequences, or of a model with other values. Raises UserError."""
    check_length(reader, path, sequence_length)
    described = reader.told("model_config")
    with damage_named(path, "metadata/model_config"):
        changed = chain.changed_since(described)
    if changed is not None:
        raise UserError(
            f"{path} was written when {changed} had other values, which are in no checkpoint: the run would not continue where it "
            f"stopped; give it the same values as then, or start without --resume"
        )


def check_length(reader: CheckpointReader, path: Path, sequence_length: int) -> None:
    """Refuse a checkpoint or local shard of sequences of another length. Raises UserError."""
    length = reader.metadata["job"]["data"].get("sequence_length")
    if length != sequence_length:
        raise UserError(
            f"{path} was written with [data] sequence_length = {length}, this job says "
            f"{sequence_length}: the order of samples would differ; set it back, or start without --resume"
        )


def check_data(then: str | None, path: Path, fingerprint: str, allowed: bool) -> str | None:
    """A remark if the run goes on with other data than the checkpoint's; None if with the same. Raises UserError: the data are
    other ones, and the user does not allow that.

    Args:
        then: the checkpoint's data fingerprint.
        fingerprint: of the data now (``Dataset.fingerprint``).
        allowed: the user allows other data.
    """
    if then is None or then == fingerprint:
        return None
    if not allowed:
        raise UserError(
            f"{path} was written with other data: its files, tokenizer or shares have changed since, so the run would not "
            "continue where it stopped; restore the data, start without --resume, or go on with the new data: "
            "--set checkpoint.allow_other_data=true"
        )
    return "The data has changed since the checkpoint was written; the run goes on with the new data, as the job allows"


def restore(trainer: Trainer, reader: CheckpointReader | None, updates: int) -> None:
    """Send parameters and moments from rank 0's checkpoint to the ranks that need them now. Collective.

    Args:
        reader: the open checkpoint on rank 0, else None.
        updates: updates by the optimizer so far.
    """

    def produce(parcel: Parcel) -> torch.Tensor:
        assert reader is not None
        array, _ = reader.read(parcel.kind, parcel.name)
        return torch.from_numpy(np.ascontiguousarray(array))

    listed = parcels(trainer.tuning, trainer.plan, KINDS)
    take_over(trainer, deliveries(listed, lambda parcel: (0,)), produce, updates)


def take_over(trainer: Trainer, listed: Sequence[Delivery], own: Callable[[Parcel], torch.Tensor], updates: int) -> int:
    """Move parameters and moments of all ``KINDS`` from the ranks that have them to the ranks that need them now. Collective over
    the trainers. Ranks that only send call ``redistribute.move`` with the same list. Returns the bytes that this rank received.

    Args:
        own: returns what this rank has, as a contiguous host tensor.
        updates: updates by the optimizer so far.
    """
    received = move(trainer.rank, trainer.transport, listed, own, keeper(trainer, updates))
    trainer.share_tied_weight()
    return received


def save_model(
    trainer: Trainer,
    directory: Path,
    shard_bytes: int,
    tokenizer: PreTrainedTokenizerFast | None,
    generation: Mapping[str, Any] | None,
) -> None:
    """Write the model on rank 0, layer by layer: a Hugging Face directory with its tokenizer, or what else the chain writes.
    Collective. ``generation``: as ``result_writer`` takes it.
    """
    listed = parcels(trainer.tuning, trainer.plan, ("parameters",), trainer.dtype)
    coming = collect(trainer.rank, trainer.transport, listed, LiveState(trainer, rounded=True))
    if trainer.rank != 0:
        for _ in coming:
            pass
        return
    with result_writer(trainer.chain, directory, shard_bytes, generation) as writer:
        for _, of_layer in groupby(coming, key=lambda pair: trainer.chain.layer_of(pair[0].name)):
            writer.add({parcel.name: tensor for parcel, tensor in of_layer})
        if tokenizer is not None:
            save_tokenizer(tokenizer, writer.path)


def save_adapter(
    trainer: Trainer, directory: Path, base: str | None, tokenizer: PreTrainedTokenizerFast | None
) -> None:
    """Write the adapter on rank 0 as a PEFT directory with the tokenizer. Collective. ``base``: the model it was trained on."""
    listed = parcels(trainer.tuning, trainer.plan, ("parameters",))
    coming = collect(trainer.rank, trainer.transport, listed, LiveState(trainer))
    state = {parcel.name: tensor.clone() for parcel, tensor in coming}
    if trainer.rank == 0:
        with adapter_directory(directory) as whole:
            write_adapter(whole.path, trainer.tuning, state, base)
            if tokenizer is not None:
                save_tokenizer(tokenizer, whole.path)


def load_adapter(trainer: Trainer, directory: Path | None) -> None:
    """Load the parameters of a PEFT directory that rank 0 has (``directory``, None elsewhere). Collective."""
    stored = read_adapter(directory, trainer.tuning) if directory is not None else {}
    send_parameters(trainer, lambda parcel: stored[parcel.name])


def send_parameters(trainer: Trainer, produce: Callable[[Parcel], torch.Tensor]) -> None:
    """Send parameters, which ``produce`` returns on rank 0, to the ranks that hold them. Collective."""
    listed = parcels(trainer.tuning, trainer.plan, ("parameters",))
    distribute(
        trainer.rank, trainer.transport, listed, produce, lambda one, value: set_parameter(trainer, one.name, value)
    )
