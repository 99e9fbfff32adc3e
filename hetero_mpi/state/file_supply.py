"""Distribute initial weights: rank 0 sends layers to ranks that do not have the model directory.

A rank reads its own disk if the model there equals rank 0's, else its shard cache. Rank 0 sends the layers that are in neither,
as raw bytes with the names and dtypes in its files (the receiver converts them). The lists of missing layers are exchanged
once at the beginning, and they determine all messages:

    receiver, per layer   post receives for the layer's tensors; send GO
    rank 0, round-robin   one layer of each receiver per round: wait for GO, read and send tensor by tensor

Thus a receiver holds one layer at a time and rank 0 two tensors, and ranks with their own files never wait. A receiver that
fails sends STOP instead of GO, and rank 0 skips its remaining layers.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Buffer, Transport, send_in_order
from hetero_mpi.device.backend import host_bytes
from hetero_mpi.model.files.model_files import (
    DirectoryContents,
    ListedTensor,
    ModelFiles,
    StoredTensor,
    read_header,
    read_tensors,
    write_tensors,
)
from hetero_mpi.model.layer.interface import LayerChain, Start
from hetero_mpi.model.transformers.chain import TransformersChain, language
from hetero_mpi.model.transformers.weights import FileStart, SeededStart, TensorSource
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.rundir.logs import say
from hetero_mpi.util import units
from hetero_mpi.util.disk import SPARE_BYTES, free_bytes, write_atomic, write_errors
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.sealed import load_sealed, store_folder

_WORD, _TENSOR = 1 << 13, (1 << 13) + 1
_STOP, _GO = 0, 1
_LINE_EVERY_S = 5.0
_NAME = "tensors.safetensors"
_REMEDY = "choose another [model] shard_cache, or leave it empty for no cache"


@dataclass(frozen=True)
class FilesReport:
    """Whether a rank has the model's files, and which layers it must receive."""

    lack: str | None = None
    """Why the rank cannot read the model from its own disk; None if it can."""
    missing: Sequence[int] = ()
    """Layers to receive from rank 0, in loading order."""
    cached: int = 0
    """Number of required layers in the rank's shard cache."""
    remarks: Sequence[str] = ()
    """Notes for the user on invalid cache entries."""


def open_start(
    world: World,
    rank: int,
    transport: Transport,
    model: LayerChain,
    plan: Plan,
    directory: Path | None,
    seed: int,
    cache_root: Path | None = None,
    layers_in_memory: Collection[int] = (),
) -> tuple[Start, contextlib.AbstractContextManager[object]]:
    """Open the initial weights. Collective over the active ranks; rank 0 returns after sending all missing layers.

    Returns the weights and a context manager for loading them, which notifies rank 0 of a failure. Raises UserError if rank 0's
    files are missing or damaged, or if a shard cache is unusable. If a file is truncated during the transfer, only rank 0 raises
    it; the receivers are still waiting, so the caller must let the error end the whole job.

    Args:
        rank: number of this rank in the plan.
        directory: the model's directory, which must exist on rank 0; None to initialise the weights from ``seed``.
        cache_root: shard cache for received layers; None to cache nothing.
        layers_in_memory: layers that this rank does not need to load.
    """
    if directory is None:
        return SeededStart(seed), contextlib.nullcontext()
    chain = language(model)
    files: ModelFiles | None = None
    listed: dict[str, Any] | None = None
    with world.collective_errors("opening the model's files"):
        if rank == 0:
            files = ModelFiles(directory)
            files.check()
            listed = files.contents().to_dict() if world.size > 1 else None
    if world.size == 1:
        assert files is not None
        return FileStart(files, chain), contextlib.nullcontext()
    contents = DirectoryContents.from_dict(world.broadcast_json(listed))
    incoming: Incoming | None = None
    report = FilesReport()
    with world.collective_errors("looking for the model's files"):
        source: TensorSource | None = files
        reason: str | None = None
        if rank != 0:
            source, reason = _local_files(directory, contents)
            if reason is not None:
                cache = ShardCache(cache_root, contents.identity) if cache_root is not None else None
                source = incoming = Incoming(transport, contents, directory, cache)
        assert source is not None
        start = FileStart(source, chain)
        if incoming is not None and reason is not None:
            load_order = [layer for layer in needed_layers(chain, plan, rank) if layer not in layers_in_memory]
            report = incoming.find_missing(reason, load_order, start.keys_of_layer)
    rows = [FilesReport(**row) for row in world.all_gather_json(asdict(report))]
    if files is not None:
        world.current_action = "sending the model's files to ranks without them"
        _send_missing_layers(world, transport, files, contents, start.keys_of_layer, rows)
    return start, incoming if incoming is not None else contextlib.nullcontext()


def needed_layers(chain: TransformersChain, plan: Plan, rank: int) -> list[int]:
    """List the layers that a rank loads, in order: those of its stages, after the embedding if a stage's head is tied to it."""
    layers: list[int] = []
    for _, _, stage in plan.numbered:
        if rank in stage.ranks:
            layers += [0] if stage.last == chain.layer_count and chain.tied is not None else []
            layers += range(stage.first, stage.last)
    return list(dict.fromkeys(layers))


class ShardCache:
    """Disk cache of received layers, so that a rank without the model directory need not receive them at the next start.

        PATH/3f9a.../layer-00004/tensors.safetensors      the tensors of layer 4, as received

    The subdirectory is named by a prefix of the model's identity (``DirectoryContents.identity``). Each layer is a sealed folder
    (``sealed.py``). An entry is used only if it is intact, belongs to this model and has exactly the requested tensors; otherwise
    it is removed with a remark and received again. Ranks may share a directory, and a run may be killed at any time. Entries never
    expire, but the user may delete them.

    Attributes:
        remarks: notes for the user on damaged entries.
    """

    def __init__(self, root: Path, identity: str) -> None:
        """Create the cache directory. Raises UserError if that fails."""
        self.directory = root / identity[:16]
        self.identity = identity
        self.remarks: list[str] = []
        self._headers: dict[int, Mapping[str, StoredTensor]] = {}
        with write_errors(self.directory, _REMEDY):
            self.directory.mkdir(parents=True, exist_ok=True)

    def holds(self, layer: int, specs: Mapping[str, ListedTensor]) -> bool:
        """Whether the layer's entry is intact and has exactly these tensors. Reads it completely; removes an invalid entry."""

        def read(folder: Path, origin: Any) -> Mapping[str, StoredTensor]:
            header = read_header(folder / _NAME)
            if origin != [self.identity, layer]:
                raise ValueError("it belongs to another model or layer")
            if {n: (t.dtype, t.shape) for n, t in header.items()} != {n: (t.dtype, t.shape) for n, t in specs.items()}:
                raise ValueError("its tensors differ from the requested ones")
            return header

        header = load_sealed(self._entry(layer), read, self.remarks.append)
        if header is not None:
            self._headers[layer] = header
        return header is not None

    def read(self, layer: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Read tensors of a layer for which ``holds`` returned true."""
        return read_tensors({name: self._headers[layer][name] for name in names})

    def prepare(self, coming_bytes: int) -> None:
        """Check before any transfer that the layers can be stored. Raises UserError if the disk is read-only or too full."""
        with write_errors(self.directory, _REMEDY):
            write_atomic(self.directory / "trial", b"x")
        (self.directory / "trial").unlink(missing_ok=True)
        free = free_bytes(self.directory)
        if free < coming_bytes + SPARE_BYTES:
            raise UserError(
                "shard_cache.full",
                f"the shard cache {self.directory} needs {coming_bytes:,} bytes, but only {free:,} bytes are free: "
                f"delete old entries in {self.directory.parent}, or set another [model] shard_cache",
            )

    def add(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store a layer. Raises UserError if it cannot be written."""

        def fill(folder: Path) -> list[Any]:
            with write_errors(self.directory, _REMEDY):
                write_tensors(folder / _NAME, tensors)
            return [self.identity, layer]

        # No fsync: the seal reveals an entry that a power loss has damaged.
        store_folder(self._entry(layer), fill, _REMEDY, durable=False)

    def _entry(self, layer: int) -> Path:
        return self.directory / f"layer-{layer:05d}"


class Incoming:
    """``TensorSource`` of a rank without the model's files; as a context manager, it notifies rank 0 if loading fails."""

    def __init__(
        self, transport: Transport, contents: DirectoryContents, directory: Path, cache: ShardCache | None
    ) -> None:
        self.directory = directory
        self._transport, self._contents, self._cache = transport, contents, cache
        self._missing: deque[int] = deque()

    @property
    def names(self) -> Mapping[str, ListedTensor]:
        return self._contents.tensors

    def find_missing(self, lack: str, layers: Sequence[int], keys_of_layer: Mapping[int, Sequence[str]]) -> FilesReport:
        """Find the layers that are missing from the cache and check that the cache has space for them. Not collective."""
        remarks: Sequence[str] = ()
        missing = list(layers)
        if self._cache is not None:
            missing = [layer for layer in layers if not self._cache.holds(layer, self._listed(keys_of_layer[layer]))]
            remarks = self._cache.remarks
            if missing:
                coming = (tensor for layer in missing for tensor in self._listed(keys_of_layer[layer]).values())
                self._cache.prepare(sum(tensor.bytes for tensor in coming))
        self._missing = deque(missing)
        return FilesReport(lack, missing, len(layers) - len(missing), remarks)

    def read_layer(self, layer: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Implement ``TensorSource.read_layer``: layers that are not cached are received and then cached."""
        if layer not in self._missing:
            assert self._cache is not None
            return self._cache.read(layer, names)
        assert layer == self._missing[0], "layers must be loaded in rank 0's order"
        tensors = {}
        for name, listed in self._listed(names).items():
            tensors[name] = torch.empty(listed.shape, dtype=getattr(torch, listed.dtype))
        requests = [self._transport.post_receive(0, _TENSOR, host_bytes(tensor)) for tensor in tensors.values()]
        self._send_word(_GO)
        for request in requests:
            self._transport.wait(request)
        self._missing.popleft()
        if self._cache is not None:
            self._cache.add(layer, tensors)
        return tensors

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._missing and isinstance(error, UserError):
            self._missing.clear()
            self._send_word(_STOP)

    def _send_word(self, word: int) -> None:
        self._transport.wait(self._transport.send(0, _WORD, np.array([word], np.uint8)))

    def _listed(self, names: Sequence[str]) -> dict[str, ListedTensor]:
        return {name: self._contents.tensors[name] for name in names}


def _send_missing_layers(
    world: World,
    transport: Transport,
    files: ModelFiles,
    contents: DirectoryContents,
    keys_of_layer: Mapping[int, Sequence[str]],
    reports: Sequence[FilesReport],
) -> None:
    """Send missing layers from rank 0, one layer per rank in each round, and report progress. ``reports``: one per rank."""
    layer_bytes = {layer: sum(contents.tensors[key].bytes for key in keys) for layer, keys in keys_of_layer.items()}
    report_by_rank = dict(zip(world.numbers or range(world.size), reports, strict=True))
    for (rank, report), host in zip(report_by_rank.items(), world.hosts, strict=True):
        if report.lack is not None:
            size_bytes = sum(layer_bytes.get(layer, 0) for layer in report.missing)
            say(*_report_lines(f"rank {rank} ({host})", rank, report, size_bytes))
    turns = sorted((turn, rank, layer) for rank, r in report_by_rank.items() for turn, layer in enumerate(r.missing))
    if not turns:
        return
    total_bytes, sent_bytes = sum(layer_bytes.get(layer, 0) for _, _, layer in turns), 0
    start_s = shown_s = time.monotonic()
    stopped: set[int] = set()

    def rate() -> str:
        return units.bandwidth(sent_bytes / max(time.monotonic() - start_s, 1e-9))

    def messages() -> Iterator[tuple[int, int, Buffer]]:
        nonlocal sent_bytes, shown_s
        for _, rank, layer in turns:
            if rank in stopped or _receive_word(transport, rank) == _STOP:
                stopped.add(rank)
                continue
            for key in keys_of_layer.get(layer, ()):
                tensor = files.read(key)
                yield rank, _TENSOR, host_bytes(tensor)
                sent_bytes += tensor.nbytes
                if time.monotonic() - shown_s >= _LINE_EVERY_S and sent_bytes < total_bytes:
                    shown_s = time.monotonic()
                    say(f"sent {units.size(sent_bytes)} of {units.size(total_bytes)} ({rate()})")

    send_in_order(transport, messages())
    if not stopped:
        duration = units.seconds(time.monotonic() - start_s)
        say(f"sent {units.size(sent_bytes)} of the model in {duration} ({rate()})")


def _receive_word(transport: Transport, rank: int) -> int:
    word = np.empty(1, np.uint8)
    transport.wait(transport.post_receive(rank, _WORD, word))
    return int(word[0])


def _report_lines(who: str, rank: int, report: FilesReport, size_bytes: int) -> list[str]:
    """Describe for the user where a rank's layers come from; ``size_bytes``: size of its missing layers."""
    lines = [f"{who}: {remark}" for remark in report.remarks]
    sources = []
    if report.cached:
        sources.append(f"{report.cached} of its {report.cached + len(report.missing)} layers are in its shard cache")
    if report.missing:
        sources.append(f"sending {units.size(size_bytes)} to rank {rank}")
    return [*lines, f"{who}: {report.lack}; {', '.join(sources)}"]


def _local_files(directory: Path, contents: DirectoryContents) -> tuple[ModelFiles | None, str | None]:
    """Open the model on this rank's disk; returns None and a reason if it is missing, invalid or differs from rank 0's."""
    if not directory.is_dir():
        return None, f"no {directory}"
    try:
        files = ModelFiles(directory)
        difference = contents.difference(files.contents())
    except (UserError, OSError) as error:
        return None, f"{error} (not used)"
    if difference is not None:
        return None, f"its {directory} differs from rank 0's model ({difference})"
    return files, None
