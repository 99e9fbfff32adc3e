"""Supplies start weights from one copy of the files: ranks without the model directory get their layers' tensors from rank 0.

Each rank reads its own disk if the model is there and equals rank 0's, else its shard cache. What it still lacks comes over the
transport: raw bytes, in the files' own dtype and under their own names (the receiver converts them). The missing layers are
gathered once, before anything is sent. All messages follow from them, the plan and the names:

    receiver, per layer   post receives for the layer's tensors; send GO
    rank 0, in turns     layer by layer, one of each receiver: wait for GO, read and send tensor by tensor

So a receiver holds one layer and rank 0 two tensors, and ranks that read their own disks wait for nobody. A receiver that fails
sends STOP instead, and rank 0 skips the rest of its layers.
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
_REMEDY = "choose another [model] shard_cache, or leave it empty to keep nothing"


@dataclass(frozen=True)
class FilesReport:
    """The model's files on a rank, and those that it lacks."""

    lack: str | None = None
    """Why it cannot read the model from its own disk; None: it can."""
    missing: Sequence[int] = ()
    """Layers that rank 0 must send it, in the order in which they are loaded."""
    cached: int = 0
    """Layers that its shard cache holds."""
    remarks: Sequence[str] = ()
    """Entries of the cache that did not match."""


def open_start(
    world: World,
    rank: int,
    transport: Transport,
    model: LayerChain,
    plan: Plan,
    directory: Path | None,
    seed: int,
    cache_root: Path | None = None,
    kept: Collection[int] = (),
) -> tuple[Start, contextlib.AbstractContextManager[object]]:
    """The start weights, and a context for the loading: if that fails, rank 0 is told. Collective over the
    active ranks; rank 0 returns when the others have what they lack. Raises UserError: rank 0's files are missing or damaged, or a
    rank's shard cache cannot be used; on rank 0 alone: a file has become shorter meanwhile. The receivers still wait then: the
    caller must let it end the whole job.

    Args:
        rank: this rank's number in the plan.
        directory: the model's directory; it must exist on rank 0. None: the weights are initialised from ``seed``.
        cache_root: where ranks without the model keep what they receive; None: they keep nothing.
        kept: layers that this rank has in memory and will not load.
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
        lack: str | None = None
        if rank != 0:
            source, lack = _own_files(directory, contents)
            if lack is not None:
                cache = ShardCache(cache_root, contents.identity) if cache_root is not None else None
                source = incoming = Incoming(transport, contents, directory, cache)
        assert source is not None
        start = FileStart(source, chain)
        if incoming is not None and lack is not None:
            needed = [layer for layer in needed_layers(chain, plan, rank) if layer not in kept]
            report = incoming.look(lack, needed, start.keys_of_layer)
    rows = [FilesReport(**row) for row in world.all_gather_json(asdict(report))]
    if files is not None:
        world.current_action = "sending the model's files to ranks without them"
        _send_all(world, transport, files, contents, start.keys_of_layer, rows)
    return start, incoming if incoming is not None else contextlib.nullcontext()


def needed_layers(chain: TransformersChain, plan: Plan, rank: int) -> list[int]:
    """Layers whose tensors a rank loads, in that order: its stages', each with the embedding first where its head is tied to it."""
    layers: list[int] = []
    for _, _, stage in plan.numbered:
        if rank in stage.ranks:
            layers += [0] if stage.last == chain.layer_count and chain.tied is not None else []
            layers += range(stage.first, stage.last)
    return list(dict.fromkeys(layers))


class ShardCache:
    """Tensors of one model that a rank without its directory has received, kept on the rank's own disk for the next start.

        PATH/3f9a.../layer-00004/tensors.safetensors      the tensors of layer 4, as they came

    The sub-directory's name begins the model's identity (``Contents.identity``). Each layer is a sealed folder (``sealed.py``). It
    is used only if it is whole, of this model, and has the tensors that are wanted; else it is removed, with a remark, and the
    tensors are received again. Ranks may share a directory, and a run may be ended at any time. Nothing is ever removed for being
    old: a person may delete anything here.

    Attributes:
        remarks: entries that were damaged, in words.
    """

    def __init__(self, root: Path, identity: str) -> None:
        """:raises UserError: ``root`` cannot be a directory."""
        self.directory = root / identity[:16]
        self.identity = identity
        self.remarks: list[str] = []
        self._headers: dict[int, Mapping[str, StoredTensor]] = {}
        with write_errors(self.directory, _REMEDY):
            self.directory.mkdir(parents=True, exist_ok=True)

    def holds(self, layer: int, wanted: Mapping[str, ListedTensor]) -> bool:
        """True: there is a sound entry with exactly these tensors. Reads all of it; what does not match is removed."""

        def read(place: Path, origin: Any) -> Mapping[str, StoredTensor]:
            header = read_header(place / _NAME)
            if origin != [self.identity, layer]:
                raise ValueError("it is of another model or layer")
            if {n: (t.dtype, t.shape) for n, t in header.items()} != {n: (t.dtype, t.shape) for n, t in wanted.items()}:
                raise ValueError("it holds other tensors than are needed now")
            return header

        header = load_sealed(self._place(layer), read, self.remarks.append)
        if header is not None:
            self._headers[layer] = header
        return header is not None

    def read(self, layer: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The tensors of an entry that ``holds`` has found sound."""
        return read_tensors({name: self._headers[layer][name] for name in names})

    def prepare(self, coming_bytes: int) -> None:
        """Make sure, before anything is sent, that so much can be kept.

        :raises UserError: the directory is not writable, or the disk too full.
        """
        with write_errors(self.directory, _REMEDY):
            write_atomic(self.directory / "trial", b"x")
        (self.directory / "trial").unlink(missing_ok=True)
        free = free_bytes(self.directory)
        if free < coming_bytes + SPARE_BYTES:
            raise UserError(
                "shard_cache.full",
                f"the shard cache {self.directory} is to keep {coming_bytes:,} bytes, and {free:,} bytes are free there: "
                f"delete what is old in {self.directory.parent}, or set another [model] shard_cache",
            )

    def keep(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write an entry.

        :raises UserError: it cannot be written.
        """

        def fill(folder: Path) -> list[Any]:
            with write_errors(self.directory, _REMEDY):
                write_tensors(folder / _NAME, tensors)
            return [self.identity, layer]

        # Nothing is forced to the disk: what a power loss damages is found by its seal.
        store_folder(self._place(layer), fill, _REMEDY, durable=False)

    def _place(self, layer: int) -> Path:
        return self.directory / f"layer-{layer:05d}"


class Incoming:
    """A ``TensorSource`` on a rank without the files: its shard cache, and rank 0 for the rest. A context manager around the
    loading.
    """

    def __init__(
        self, transport: Transport, contents: DirectoryContents, directory: Path, cache: ShardCache | None
    ) -> None:
        self.directory = directory
        self._transport, self._contents, self._cache = transport, contents, cache
        self._missing: deque[int] = deque()

    @property
    def names(self) -> Mapping[str, ListedTensor]:
        return self._contents.tensors

    def look(self, lack: str, needed: Sequence[int], keys_of_layer: Mapping[int, Sequence[str]]) -> FilesReport:
        """Check which of the needed layers the cache holds, and that the rest can be kept. Local."""
        remarks: Sequence[str] = ()
        missing = list(needed)
        if self._cache is not None:
            missing = [layer for layer in needed if not self._cache.holds(layer, self._listed(keys_of_layer[layer]))]
            remarks = self._cache.remarks
            if missing:
                coming = (tensor for layer in missing for tensor in self._listed(keys_of_layer[layer]).values())
                self._cache.prepare(sum(tensor.bytes for tensor in coming))
        self._missing = deque(missing)
        return FilesReport(lack, missing, len(needed) - len(missing), remarks)

    def read_layer(self, layer: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """See ``TensorSource.read_layer``. Receives what is not in the cache, and keeps it there."""
        if layer not in self._missing:
            assert self._cache is not None
            return self._cache.read(layer, names)
        assert layer == self._missing[0], "layers are loaded in the order that rank 0 knows"
        tensors = {}
        for name, listed in self._listed(names).items():
            tensors[name] = torch.empty(listed.shape, dtype=getattr(torch, listed.dtype))
        requests = [self._transport.post_receive(0, _TENSOR, host_bytes(tensor)) for tensor in tensors.values()]
        self._say(_GO)
        for request in requests:
            self._transport.wait(request)
        self._missing.popleft()
        if self._cache is not None:
            self._cache.keep(layer, tensors)
        return tensors

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._missing and isinstance(error, UserError):
            self._missing.clear()
            self._say(_STOP)

    def _say(self, word: int) -> None:
        self._transport.wait(self._transport.send(0, _WORD, np.array([word], np.uint8)))

    def _listed(self, names: Sequence[str]) -> dict[str, ListedTensor]:
        return {name: self._contents.tensors[name] for name in names}


def _send_all(
    world: World,
    transport: Transport,
    files: ModelFiles,
    contents: DirectoryContents,
    keys_of_layer: Mapping[int, Sequence[str]],
    reports: Sequence[FilesReport],
) -> None:
    """Rank 0: send every rank's missing layers, one of each rank in turn, and report it. ``reports``: of each rank of ``world``."""
    layer_bytes = {layer: sum(contents.tensors[key].bytes for key in keys) for layer, keys in keys_of_layer.items()}
    by_number = dict(zip(world.numbers or range(world.size), reports, strict=True))
    for (rank, report), host in zip(by_number.items(), world.hosts, strict=True):
        if report.lack is not None:
            size_bytes = sum(layer_bytes.get(layer, 0) for layer in report.missing)
            say(*_lines(f"rank {rank} ({host})", rank, report, size_bytes))
    turns = sorted((turn, rank, layer) for rank, r in by_number.items() for turn, layer in enumerate(r.missing))
    if not turns:
        return
    total_bytes, sent_bytes = sum(layer_bytes.get(layer, 0) for _, _, layer in turns), 0
    begun_s = shown_s = time.monotonic()
    stopped: set[int] = set()

    def rate() -> str:
        return units.bandwidth(sent_bytes / max(time.monotonic() - begun_s, 1e-9))

    def messages() -> Iterator[tuple[int, int, Buffer]]:
        nonlocal sent_bytes, shown_s
        for _, rank, layer in turns:
            if rank in stopped or _hear(transport, rank) == _STOP:
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
        took = units.seconds(time.monotonic() - begun_s)
        say(f"sent {units.size(sent_bytes)} of the model in {took} ({rate()})")


def _hear(transport: Transport, rank: int) -> int:
    word = np.empty(1, np.uint8)
    transport.wait(transport.post_receive(rank, _WORD, word))
    return int(word[0])


def _lines(who: str, rank: int, report: FilesReport, size_bytes: int) -> list[str]:
    """``size_bytes``: of what is missing."""
    lines = [f"{who}: {remark}" for remark in report.remarks]
    sources = []
    if report.cached:
        sources.append(f"{report.cached} of its {report.cached + len(report.missing)} layers are in its shard cache")
    if report.missing:
        sources.append(f"sending {units.size(size_bytes)} to rank {rank}")
    return [*lines, f"{who}: {report.lack}; {', '.join(sources)}"]


def _own_files(directory: Path, contents: DirectoryContents) -> tuple[ModelFiles | None, str | None]:
    """(the model on this rank's disk, None); or (None, why rank 0's is used instead)."""
    if not directory.is_dir():
        return None, f"no {directory}"
    try:
        files = ModelFiles(directory)
        difference = contents.difference(files.contents())
    except (UserError, OSError) as error:
        return None, f"{error} (not used)"
    if difference is not None:
        return None, f"its {directory} is not rank 0's model ({difference})"
    return files, None
