"""The model or adapter directory of a run, written through rank 0 tensor by tensor; and start values brought from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from hetero_mpi.comm.transport import Transport, receive_in_order, send_in_order
from hetero_mpi.data.tokenizer import save_tokenizer
from hetero_mpi.device.backend import HOST, host_bytes
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.model.adapters.adapter_files import adapter_directory, read_adapter, write_adapter
from hetero_mpi.model.result_writer import result_writer
from hetero_mpi.state.redistribute import LiveState, Parcel, deliveries, give_parts, move, parcels, set_parameter

_TAG = 1 << 14


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
    listed = deliveries(parcels(trainer.tuning, trainer.plan, ("parameters",)), lambda parcel: (0,))
    move(trainer.rank, trainer.transport, listed, produce, lambda one, value: set_parameter(trainer, one.name, value))
    trainer.share_tied_weight()


def collect(
    rank: int, transport: Transport, listed: Iterable[Parcel], own: LiveState
) -> Iterator[tuple[Parcel, torch.Tensor]]:
    """Send every parcel to rank 0. Collective: every rank must exhaust the iterator. ``own``: returns a parcel this rank holds.

    Yields:
        on rank 0 each parcel with its host tensor, valid until the next one is taken; nothing on other ranks.
    """
    listed = list(listed)
    if rank != 0:
        owned = (_on_host(own(parcel)) for parcel in listed if parcel.owner == rank)
        send_in_order(transport, ((0, _TAG, host_bytes(tensor)) for tensor in owned))
        give_parts(rank, listed, own)
        return
    coming = ((p.owner, _TAG, np.empty(p.bytes, np.uint8)) for p in listed if p.owner != 0)
    arriving = receive_in_order(transport, coming)
    for parcel in listed:
        if parcel.owner == 0:
            yield parcel, _on_host(own(parcel))
        else:
            yield parcel, torch.from_numpy(next(arriving)).view(parcel.dtype).view(parcel.shape)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(HOST).contiguous()
