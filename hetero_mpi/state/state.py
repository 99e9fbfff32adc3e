"""The state of a run, wherever its tensors lie: the class, its sources, and its readers."""

from __future__ import annotations

import base64
import contextlib
import logging
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_mpi.device.backend import DTYPES
from hetero_mpi.model.optimizer import LossScale
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.metrics import Evaluation, StepMetrics
from hetero_mpi.state.directory import Source, keep_versions, shard_path
from hetero_mpi.state.reader import CheckpointReader
from hetero_mpi.state.writer import CheckpointWriter
from hetero_mpi.util.errors import UserError

if TYPE_CHECKING:
    from hetero_mpi.comm.ranks.world import World
    from hetero_mpi.state.redistribute import TensorShard

_RUN_NUMBER = re.compile(r"(\d{12})-")

_LOG = logging.getLogger(__name__)


@dataclass
class State:
    """The state of a run after ``step`` steps: numbers, and named tensors. It passes from plan to plan, and from start to start.

    The **numbers** are the fields below. They are complete on rank 0. Other active ranks have what they need to go on; on idle
    ranks they are out of date. Random numbers and the position in the data follow from the seed and ``step``, without a field.

    The **tensors** are the trained parameters, their moments, and the model's constants. Each has a kind, a name and, under a plan,
    one owner (``redistribute.TensorShard``). All ranks' tensors after one step are a *version*. They lie in one of four places:

        the trainers      on devices, while steps are taken (``redistribute.LiveState``)
        a checkpoint      one file on rank 0's disk, which holds the whole version
        shards            files on the hosts' own disks: what a rank owns, and what it keeps as a peer of other ranks
        ranks' memory     the same as copies in ``tensors``, for ranks that outlive others

    The last three are ``Source``s of a state that is stored. Three verbs work on all of them:

        store    ``saving.Saver`` writes checkpoints; ``peer_replicas.PeerReplicas`` makes copies in memory and shards
        fetch    ``gather_sources`` lists what each rank can read, ``newest_version`` chooses, ``StateReader`` reads
        move     ``redistribute.move`` makes the transfers from ranks that have a tensor to ranks that need it
    """

    loss_scale: LossScale
    step: int = 0
    """Steps taken. The next step has this number, and the position in the data follows from it."""
    updates: int = 0
    """Updates by the optimizer: fewer than ``step`` when some steps were skipped."""
    losses: list[float] = field(default_factory=list)
    """Loss of every step so far, nats per token."""
    skipped: int = 0
    """Steps of this run without an update, since gradients were not finite."""
    skips_in_a_row: int = 0
    lowest_loss: float | None = None
    """The least of the held-out losses so far; None: there is none."""
    higher_in_a_row: int = 0
    """Evaluations since the one with the lowest loss."""
    newest_checkpoint: Path | None = None
    """On other ranks than 0 its writing may have failed."""
    good_checkpoint: Path | None = None
    """The newest checkpoint after which a step with finite gradients has followed."""
    reference: NDArray[np.float32] | None = None
    """[N, R], the reference model's log-likelihood of each answer of each row of the dataset, NaN where no step needs it."""
    metrics: list[StepMetrics] = field(default_factory=list)
    """The steps that this process has taken."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """The evaluations that this process has taken part in."""
    version_id: str = ""
    """Of a copy in memory: equal on all ranks, and in the shards that are written from it."""
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Of a copy in memory: (kind, name) -> host tensor, of each name all kinds or none."""
    sources: tuple[Source, ...] = ()
    """Of a state that was found: where its tensors can be read, the same on all ranks."""

    @classmethod
    def initial(cls, dtype: str) -> State:
        """The state before the first step of a run that computes in ``dtype``."""
        return cls(LossScale.of(DTYPES[dtype]))

    def add_step(self, line: StepMetrics, finite: bool) -> None:
        """Record a step. ``finite``: it has updated the parameters."""
        self.step = line.step
        self.losses.append(line.loss)
        self.metrics.append(line)
        if finite:
            self.updates += 1
            self.skips_in_a_row, self.good_checkpoint = 0, self.newest_checkpoint
        else:
            self.skipped += 1
            self.skips_in_a_row += 1

    def add_evaluation(self, loss: float, **beside: Any) -> None:
        """Record the held-out loss after the latest step, and what else ``Evaluation`` holds."""
        self.evaluations.append(Evaluation(self.step, loss, **beside))
        if self.lowest_loss is None or loss < self.lowest_loss:
            self.lowest_loss, self.higher_in_a_row = loss, 0
        else:
            self.higher_in_a_row += 1

    def set_newest_checkpoint(self, path: Path | None) -> None:
        self.newest_checkpoint = path

    def set_reference(self, reference: NDArray[np.float32]) -> None:
        self.reference = reference

    # --------------------------------------------------------------------------------------------- copies, files, other ranks
    def copy(self, version_id: str, tensors: dict[tuple[str, str], torch.Tensor]) -> State:
        """The numbers of this moment, with copies of tensors."""
        scale, losses = replace(self.loss_scale), list(self.losses)
        own = replace(self, loss_scale=scale, losses=losses, metrics=[], evaluations=[])
        return replace(own, version_id=version_id, tensors=tensors)

    @property
    def names(self) -> frozenset[str]:
        """Parameters and constants of which ``tensors`` holds every tensor."""
        return frozenset(name for _, name in self.tensors)

    def metadata(self, shard: bool = False) -> dict[str, Any]:
        """The numbers as a checkpoint of this moment holds them, or a ``shard``, which leaves nothing out."""
        newest, good = (
            str(path) if path is not None else None for path in (self.newest_checkpoint, self.good_checkpoint)
        )
        more = {"skipped": self.skipped, "skips_in_a_row": self.skips_in_a_row}
        return {
            "step": self.step,
            "updates": self.updates,
            "losses": np.array(self.losses, dtype=np.float64),
            "loss_scale": [self.loss_scale.value, self.loss_scale.good_steps],
            "lowest_loss": self.lowest_loss,
            "higher_in_a_row": self.higher_in_a_row,
            **({} if self.reference is None else {"reference": self.reference}),
            **({**more, "newest_checkpoint": newest, "good_checkpoint": good} if shard else {}),
        }

    @classmethod
    def from_metadata(cls, found: dict[str, Any]) -> State:
        """The inverse of ``metadata``."""
        numbers: dict[str, Any] = {key: found.get(key) for key in ("step", "updates", "lowest_loss", "reference")}
        numbers |= {key: found.get(key) or 0 for key in ("skipped", "skips_in_a_row", "higher_in_a_row")}
        for key in ("newest_checkpoint", "good_checkpoint"):
            numbers[key] = Path(found[key]) if found.get(key) is not None else None
        return cls(LossScale(*found["loss_scale"]), losses=[float(loss) for loss in found["losses"]], **numbers)

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON-able values, for another rank. An array as a list of numbers would take ten times the memory."""
        found = {**self.metadata(shard=True), "losses": self.losses}
        if self.reference is not None:
            found["reference"] = [self.reference.shape, base64.b64encode(self.reference.tobytes()).decode()]
        return found

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> State:
        """The inverse of ``to_dict``."""
        if "reference" in found:
            shape, coded = found["reference"]
            found = {**found, "reference": np.frombuffer(base64.b64decode(coded), np.float32).reshape(shape)}
        return cls.from_metadata(found)

    def after(self, seen: State | None) -> State:
        """The same with the metrics up to this step that ``seen``, an earlier state of this process, holds."""
        if seen is None:
            return self
        metrics = [line for line in seen.metrics if line.step <= self.step]
        return replace(self, metrics=metrics, evaluations=[one for one in seen.evaluations if one.step <= self.step])

    # ------------------------------------------------------------------------------------------------------------ sources
    def source(self, rank: int, begun: str) -> Source:
        """A copy in memory, as ``rank`` of the run ``begun`` tells other ranks of it."""
        return Source(rank, None, self.version_id, self.step, begun, rank, self.names)

    def readers(self) -> dict[str, tuple[int, ...]]:
        """Name of a parameter or constant -> the ranks that can read its tensors."""
        found: dict[str, dict[int, None]] = {}
        for source in self.sources:
            for name in source.names:
                found.setdefault(name, {})[source.rank] = None
        return {name: tuple(ranks) for name, ranks in found.items()}


class StateReader:
    """A version as one rank reads it, from files and from memory. A context manager that holds the files open."""

    def __init__(self, rank: int, sources: Sequence[Source], in_memory: Sequence[State]) -> None:
        self._sources = [source for source in sources if source.rank == rank]
        self._in_memory = {version.version_id: version for version in in_memory}
        self._open: dict[Path, CheckpointReader] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tensor(self, shard: TensorShard) -> torch.Tensor:
        """A tensor that this rank has, on the host."""
        source = next(source for source in self._sources if shard.name in source.names)
        if source.path is None:
            return self._in_memory[source.version_id].tensors[shard.kind, shard.name]
        array, _ = self._reader(source.path).read(shard.kind, shard.name)
        return torch.from_numpy(np.ascontiguousarray(array))

    def state(self) -> State:
        """The numbers of the version."""
        path, version_id = self._sources[0].path, self._sources[0].version_id
        return self._in_memory[version_id] if path is None else State.from_metadata(self._reader(path).metadata)

    def origin(self) -> dict[str, Any]:
        """The job that took the steps, and the fingerprint of its data; {}: they are those of this run."""
        path = self._sources[0].path
        metadata = {} if path is None else self._reader(path).metadata
        return {key: metadata[key] for key in ("job", "data_fingerprint") if key in metadata}

    def _reader(self, path: Path) -> CheckpointReader:
        if path not in self._open:
            self._open[path] = self._stack.enter_context(CheckpointReader(path))
        return self._open[path]


def share_state(world: World, own: State | None, root: int = 0) -> State:
    """The numbers of ``root``'s state, on all ranks. Collective."""
    return State.from_dict(world.broadcast_json(own.to_dict() if own is not None else None, root=root))


def gather_sources(world: World, own: Iterable[Source]) -> list[Source]:
    """The sources of all ranks, on all ranks: copies in memory first, then checkpoints, then shards. Collective.

    Hosts that share a disk list the same shards: each counts once, for the first rank.
    """
    rows = [{**vars(one), "path": str(one.path or ""), "names": sorted(one.names)} for one in own]
    found: dict[tuple[Any, ...], Source] = {}
    for row in (row for of_rank in world.all_gather_json(rows) for row in of_rank):
        path = Path(row["path"]) if row["path"] else None
        source = Source(**{**row, "path": path, "names": frozenset(row["names"])})
        key = (source.version_id, source.writer) if source.is_shard else (source.version_id, source.rank, "")
        found.setdefault(key, source)
    return sorted(found.values(), key=lambda source: (source.is_shard, source.path is not None))


def newest_version(sources: Sequence[Source], needed: Collection[str]) -> list[Source]:
    """The sources of the newest version that together hold all ``needed`` names; empty: no version is whole.

    Newest is the latest step of the run that began last; of versions of one step, the first in ``sources``.
    """
    versions: dict[tuple[str, int, str], list[Source]] = {}
    for source in sources:
        versions.setdefault((source.begun, source.step, source.version_id), []).append(source)
    for key in sorted(versions, key=lambda key: key[:2], reverse=True):
        if set(needed) <= set().union(*(source.names for source in versions[key])):
            return versions[key]
    return []


def new_run_id(earlier: Iterable[str] = ()) -> str:
    """The id of a run that begins now, larger than those of the ``earlier`` runs. ``--resume`` passes it from start to start.

    It counts runs, since clocks of hosts differ. They decide only between runs that have seen nothing of each other.
    """
    numbers = [int(found[1]) for one in earlier if (found := _RUN_NUMBER.match(one))]
    return f"{1 + max(numbers, default=0):012d}-{int(time.time()):012d}-{token_hex(4)}"


def new_version_id() -> str:
    """A random id for the copies and shards of one version."""
    return token_hex(4)


class ShardWriter:
    """Writes this rank's shards.

    Args:
        run_dir: on this host's own disk, or on one that hosts share.
        described: metadata that all shards of the run share.
        kept: id of the version on disk that the run goes on from, if any: it stays until a new one is whole.
    """

    def __init__(self, world: World, run_dir: Path, described: Mapping[str, Any], kept: str | None) -> None:
        self._world, self.run_dir, self._described, self._kept = world, run_dir, described, kept
        self._newest: str | None = None
        self.trouble: str | None = None
        """Why this rank's newest shard could not be written; None: it could."""
        self._told = False

    def write(self, version: State) -> None:
        """Write this rank's shard of a version. An error is kept in ``trouble``, and training goes on. Runs in the background."""
        version_id, rank = version.version_id, self._world.rank
        self._newest, self.trouble = version_id, None
        keep_versions(self.run_dir, [one for one in (self._kept, version_id) if one is not None])
        if not version.tensors:
            return
        metadata = {**self._described, **version.metadata(shard=True)}
        metadata |= {"version_id": version_id, "rank": rank, "names": sorted(version.names)}
        path = shard_path(self.run_dir, rank, version.step, version_id)
        try:
            with contextlib.ExitStack() as alone, CheckpointWriter(path, metadata) as writer:
                for (kind, name), tensor in self._world.marked(version.tensors.items()):
                    writer.write(kind, name, tensor.numpy(), str(tensor.dtype).removeprefix("torch."))
                alone.enter_context(self._world.busy())  # nobody sees how far a slow disk is
        except (UserError, OSError) as error:
            _LOG.warning("step %d: no copy on disk: %s", version.step, error)
            self.trouble = str(error)

    def settle(self, troubles: Sequence[str | None]) -> None:
        """Called when all ranks have reported on the newest version: if it is whole, older ones are no longer kept. Local.
        ``troubles``: every rank's ``trouble``.
        """
        if self._newest is None:
            return
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text is not None]
        if not failed:
            self._kept = self._newest
        elif not self._told:
            say(f"Training goes on, but copies on disk are not renewed, and those of before stay: {failed[0]}")
        self._told = bool(failed)
        self._newest = None
