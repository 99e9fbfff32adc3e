"""Supplies start weights from one copy of the files: ranks without the model directory get their layers' tensors from rank 0.

Each rank reads its own disk if the model is there and equals rank 0's, else its shard cache. What it still lacks comes over the
transport: raw bytes, in the files' own dtype and under their own names (the receiver converts them). The missing layers are
gathered once, before anything is sent. All messages follow from them, the plan and the names:

    receiver, per layer   post receives for the layer's tensors; send GO
    rank 0, in turns     layer by layer, one of each receiver: wait for GO, read and send tensor by tensor

So a receiver holds one layer and rank 0 three tensors, and ranks that read their own disks wait for nobody. A receiver that fails
sends STOP instead, and rank 0 skips the rest of its layers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Request, Transport
from hetero_mpi.device.backend import host_bytes
from hetero_mpi.errors import UserError
from hetero_mpi.model.files.model_files import DirectoryContents, ListedTensor, ModelFiles
from hetero_mpi.model.files.shard_cache import ShardCache
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.weights import FileStart, TensorSource
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.report import units
from hetero_mpi.report.run_files.logs import say

_WORD, _TENSOR = 1 << 13, (1 << 13) + 1
_STOP, _GO = 0, 1
_AHEAD = 2
"""Tensors under way at once: enough to keep the link busy, few enough to bound memory."""
_LINE_EVERY_S = 5.0


@dataclass(frozen=True)
class FilesReport:
    """What a rank has of the model's files, and what it lacks."""

    lack: str | None = None
    """Why it cannot read the model from its own disk; None: it can."""
    missing: Sequence[int] = ()
    """Layers that rank 0 must send it, in the order in which they are loaded."""
    cached: int = 0
    """Layers that its shard cache holds."""
    remarks: Sequence[str] = ()
    """Entries of the cache that did not match."""


class FileSupply:
    """The start weights of an active rank. A context manager around the loading; if that fails, rank 0 is told.

    Attributes:
        start: fills modules with the weights.
    """

    def __init__(self, start: FileStart, outgoing: Outgoing | None = None, incoming: Incoming | None = None) -> None:
        self.start, self._outgoing, self._incoming = start, outgoing, incoming

    def serve(self) -> None:
        """On rank 0 send what others lack, and return when they have it. On other ranks do nothing.

        Raises:
            UserError: a file has become shorter meanwhile. The receivers still wait then: the caller must let it end the whole job.
        """
        if self._outgoing is not None:
            self._outgoing.send_all()

    def __enter__(self) -> FileSupply:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._incoming is not None and isinstance(error, UserError):
            self._incoming.stop()


def open_files(
    world: World,
    rank: int,
    transport: Transport,
    chain: TransformersChain,
    plan: Plan,
    directory: Path,
    cache_root: Path | None,
    kept: Collection[int] = (),
) -> FileSupply:
    """Find out which ranks have the files, and who sends what to whom. Collective over the active ranks.

    Args:
        world: the active ranks.
        rank: this rank's number in the plan.
        directory: the model's directory; it must exist on rank 0.
        cache_root: where ranks without the model keep what they receive; None: they keep nothing.
        kept: layers that this rank has in memory and will not load.

    Raises:
        UserError: rank 0's files are missing or damaged, or a rank's shard cache cannot be used.
    """
    files: ModelFiles | None = None
    listed: dict[str, Any] | None = None
    with world.together("opening the model's files"):
        if rank == 0:
            files = ModelFiles(directory)
            files.check()
            listed = files.contents().to_dict() if world.size > 1 else None
    if world.size == 1:
        assert files is not None
        return FileSupply(FileStart(files, chain))
    contents = DirectoryContents.from_dict(world.broadcast_json(listed))
    incoming: Incoming | None = None
    report = FilesReport()
    with world.together("looking for the model's files"):
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
    if files is None or rank != 0:
        return FileSupply(start, incoming=incoming)
    reports = dict(zip(world.numbers or range(world.size), rows, strict=True))
    hosts = dict(zip(reports, world.hosts, strict=True))
    return FileSupply(start, Outgoing(transport, files, contents, start.keys_of_layer, reports, hosts))


def needed_layers(chain: TransformersChain, plan: Plan, rank: int) -> list[int]:
    """Layers whose tensors a rank loads, in that order: its stages', each with the embedding first where its head is tied to it."""
    layers: list[int] = []
    for _, _, stage in plan.numbered:
        if rank in stage.ranks:
            layers += [0] if stage.last == chain.layer_count and chain.tied is not None else []
            layers += range(stage.first, stage.last)
    return list(dict.fromkeys(layers))


class Incoming:
    """A ``TensorSource`` on a rank without the files: its shard cache, and rank 0 for the rest."""

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

    def stop(self) -> None:
        """Tell rank 0 to send no more."""
        if self._missing:
            self._missing.clear()
            self._say(_STOP)

    def _say(self, word: int) -> None:
        self._transport.wait(self._transport.send(0, _WORD, np.array([word], np.uint8)))

    def _listed(self, names: Sequence[str]) -> dict[str, ListedTensor]:
        return {name: self._contents.tensors[name] for name in names}


class Outgoing:
    """Rank 0's side: which rank lacks which layers, and sending them."""

    def __init__(
        self,
        transport: Transport,
        files: ModelFiles,
        contents: DirectoryContents,
        keys_of_layer: Mapping[int, Sequence[str]],
        reports: Mapping[int, FilesReport],
        hosts: Mapping[int, str],
    ) -> None:
        """
        Args:
            reports, hosts: of each active rank, by its number.
        """
        self._transport, self._files, self._keys_of_layer = transport, files, keys_of_layer
        self._layer_bytes = {
            layer: sum(contents.tensors[key].bytes for key in keys) for layer, keys in keys_of_layer.items()
        }
        self._reports, self._hosts = reports, hosts
        self._under_way: deque[tuple[torch.Tensor, Request]] = deque()

    def send_all(self) -> None:
        """Send every rank's missing layers, one of each rank in turn, and report it."""
        for rank, report in self._reports.items():
            if report.lack is not None:
                say(*self._lines(rank, report))
        turns = sorted((turn, rank, layer) for rank, r in self._reports.items() for turn, layer in enumerate(r.missing))
        if not turns:
            return
        progress = _Progress(sum(self._layer_bytes.get(layer, 0) for _, _, layer in turns))
        stopped: set[int] = set()
        for _, rank, layer in turns:
            if rank in stopped:
                continue
            if self._hear(rank) == _STOP:
                stopped.add(rank)
                continue
            for key in self._keys_of_layer.get(layer, ()):
                progress.add(self._send(rank, key))
        while self._under_way:
            self._transport.wait(self._under_way.popleft()[1])
        if not stopped:
            progress.end()

    def _send(self, rank: int, key: str) -> int:
        if len(self._under_way) == _AHEAD:
            self._transport.wait(self._under_way.popleft()[1])
        tensor = self._files.read(key)
        self._under_way.append((tensor, self._transport.send(rank, _TENSOR, host_bytes(tensor))))
        return tensor.nbytes

    def _hear(self, rank: int) -> int:
        word = np.empty(1, np.uint8)
        self._transport.wait(self._transport.post_receive(rank, _WORD, word))
        return int(word[0])

    def _lines(self, rank: int, report: FilesReport) -> list[str]:
        who = f"rank {rank} ({self._hosts[rank]})"
        lines = [f"{who}: {remark}" for remark in report.remarks]
        sources = []
        if report.cached:
            sources.append(
                f"{report.cached} of its {report.cached + len(report.missing)} layers are in its shard cache"
            )
        if report.missing:
            size = units.size(sum(self._layer_bytes.get(layer, 0) for layer in report.missing))
            sources.append(f"sending {size} to rank {rank}")
        return [*lines, f"{who}: {report.lack}; {', '.join(sources)}"]


class _Progress:
    """Reports every few seconds how much is sent, and the rate at the end."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes, self.sent_bytes = total_bytes, 0
        self._started_s = self._shown_s = time.monotonic()

    def add(self, more_bytes: int) -> None:
        self.sent_bytes += more_bytes
        now_s = time.monotonic()
        if now_s - self._shown_s >= _LINE_EVERY_S and self.sent_bytes < self.total_bytes:
            self._shown_s = now_s
            say(f"sent {units.size(self.sent_bytes)} of {units.size(self.total_bytes)} ({self._rate()})")

    def end(self) -> None:
        elapsed_s = time.monotonic() - self._started_s
        say(f"sent {units.size(self.sent_bytes)} of the model in {units.seconds(elapsed_s)} ({self._rate()})")

    def _rate(self) -> str:
        return units.bandwidth(self.sent_bytes / max(time.monotonic() - self._started_s, 1e-9))


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
