"""The training state, independent of where its tensors are stored, and the classes that read and write it."""

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
    """The state of a run after ``step`` steps: numbers and named tensors. It outlives plans and restarts of the run.

    The **numbers** are the fields below. They are complete on rank 0. Other active ranks have the numbers they need to continue; on
    idle ranks they are out of date. Random numbers and the position in the data follow from the seed and ``step``.

    The **tensors** are the trained parameters, their moments, and the model's constants. Each has a kind, a name and, under a plan,
    one owner (``redistribute.TensorShard``). A *version* is the tensors of all ranks after one step, stored in one of four places:

        the trainers      on devices, during training (``redistribute.LiveState``)
        a checkpoint      one file on rank 0's disk with the complete version
        shards            files on the hosts' own disks, each with a rank's own part and the parts that it keeps as a peer
        ranks' memory     the same parts in ``tensors``, for ranks that survive the loss of others

    The last three are ``Source``s of a stored state. Three operations apply to all of them:

        store    ``saving.Saver`` writes checkpoints; ``peer_replicas.PeerReplicas`` makes copies in memory and shards
        fetch    ``gather_sources`` lists the sources that each rank can read, ``newest_version`` chooses, ``StateReader`` reads
        move     ``redistribute.move`` transfers tensors from ranks that have them to ranks that need them
    """

    loss_scale: LossScale
    step: int = 0
    """Number of completed steps, which determines the position in the data."""
    updates: int = 0
    """Number of optimizer updates, less than ``step`` if steps were skipped."""
    losses: list[float] = field(default_factory=list)
    """Loss of every completed step in nats per token."""
    skipped: int = 0
    """Number of steps in this run that were skipped because of non-finite gradients."""
    skips_in_a_row: int = 0
    lowest_loss: float | None = None
    """Lowest evaluation loss; None before the first evaluation."""
    higher_in_a_row: int = 0
    """Number of evaluations since the one with the lowest loss."""
    newest_checkpoint: Path | None = None
    """The newest checkpoint; ranks other than 0 do not know whether writing it succeeded."""
    good_checkpoint: Path | None = None
    """The newest checkpoint that was followed by a step with finite gradients."""
    reference: NDArray[np.float32] | None = None
    """[N, R]: log-probability of each answer in each dataset row under the reference model; NaN if unused."""
    metrics: list[StepMetrics] = field(default_factory=list)
    """Metrics of the steps that this process has run."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """Evaluations that this process has run."""
    version_id: str = ""
    """Id of a copy in memory, equal on all ranks and in the shards written from it."""
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Maps (kind, name) to the host tensor of a copy in memory; a name has either all of its kinds or none."""
    sources: tuple[Source, ...] = ()
    """Sources of the tensors of a stored state, the same on all ranks."""

    @classmethod
    def initial(cls, dtype: str) -> State:
        """Create the state before the first step of a run with compute dtype ``dtype``."""
        return cls(LossScale.for_dtype(DTYPES[dtype]))

    def add_step(self, line: StepMetrics, finite: bool) -> None:
        """Record a step. ``finite``: whether its gradients were finite, so that it updated the parameters."""
        self.step = line.step
        self.losses.append(line.loss)
        self.metrics.append(line)
        if finite:
            self.updates += 1
            self.skips_in_a_row, self.good_checkpoint = 0, self.newest_checkpoint
        else:
            self.skipped += 1
            self.skips_in_a_row += 1

    def add_evaluation(self, loss: float, **fields: Any) -> None:
        """Record an evaluation after the latest step. ``fields``: the other fields of ``Evaluation``."""
        self.evaluations.append(Evaluation(self.step, loss, **fields))
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
        """Copy the current numbers, with ``tensors`` as the tensors of the copy."""
        scale, losses = replace(self.loss_scale), list(self.losses)
        numbers = replace(self, loss_scale=scale, losses=losses, metrics=[], evaluations=[])
        return replace(numbers, version_id=version_id, tensors=tensors)

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters and constants in ``tensors``."""
        return frozenset(name for _, name in self.tensors)

    def metadata(self, shard: bool = False) -> dict[str, Any]:
        """Return the numbers as stored in a checkpoint, or in a ``shard``, which has some additional ones."""
        newest, good = (
            str(path) if path is not None else None for path in (self.newest_checkpoint, self.good_checkpoint)
        )
        skip_counts = {"skipped": self.skipped, "skips_in_a_row": self.skips_in_a_row}
        return {
            "step": self.step,
            "updates": self.updates,
            "losses": np.array(self.losses, dtype=np.float64),
            "loss_scale": [self.loss_scale.value, self.loss_scale.good_steps],
            "lowest_loss": self.lowest_loss,
            "higher_in_a_row": self.higher_in_a_row,
            **({} if self.reference is None else {"reference": self.reference}),
            **({**skip_counts, "newest_checkpoint": newest, "good_checkpoint": good} if shard else {}),
        }

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> State:
        numbers: dict[str, Any] = {key: metadata.get(key) for key in ("step", "updates", "lowest_loss", "reference")}
        numbers |= {key: metadata.get(key) or 0 for key in ("skipped", "skips_in_a_row", "higher_in_a_row")}
        for key in ("newest_checkpoint", "good_checkpoint"):
            numbers[key] = Path(metadata[key]) if metadata.get(key) is not None else None
        return cls(LossScale(*metadata["loss_scale"]), losses=[float(loss) for loss in metadata["losses"]], **numbers)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON values for other ranks. ``reference`` is encoded compactly, since a list needs more memory."""
        values = {**self.metadata(shard=True), "losses": self.losses}
        if self.reference is not None:
            values["reference"] = [self.reference.shape, base64.b64encode(self.reference.tobytes()).decode()]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        if "reference" in values:
            shape, coded = values["reference"]
            values = {**values, "reference": np.frombuffer(base64.b64decode(coded), np.float32).reshape(shape)}
        return cls.from_metadata(values)

    def after(self, earlier: State | None) -> State:
        """Return this state with the metrics of ``earlier``, a previous state of this process, up to this state's step."""
        if earlier is None:
            return self
        metrics = [line for line in earlier.metrics if line.step <= self.step]
        return replace(self, metrics=metrics, evaluations=[e for e in earlier.evaluations if e.step <= self.step])

    # ------------------------------------------------------------------------------------------------------------ sources
    def source(self, rank: int, run_id: str) -> Source:
        """Describe this copy in the memory of ``rank`` in the run ``run_id`` to other ranks."""
        return Source(rank, None, self.version_id, self.step, run_id, rank, self.names)

    def readers(self) -> dict[str, tuple[int, ...]]:
        """Map each name of a parameter or constant to the ranks that can read its tensors."""
        ranks_by_name: dict[str, dict[int, None]] = {}
        for source in self.sources:
            for name in source.names:
                ranks_by_name.setdefault(name, {})[source.rank] = None
        return {name: tuple(ranks) for name, ranks in ranks_by_name.items()}


class StateReader:
    """Reads a version on one rank from files and memory. As a context manager, it closes the files at the end."""

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
        """Return a tensor that this rank can read, on the host."""
        source = next(source for source in self._sources if shard.name in source.names)
        if source.path is None:
            return self._in_memory[source.version_id].tensors[shard.kind, shard.name]
        array, _ = self._reader(source.path).read(shard.kind, shard.name)
        return torch.from_numpy(np.ascontiguousarray(array))

    def state(self) -> State:
        path, version_id = self._sources[0].path, self._sources[0].version_id
        return self._in_memory[version_id] if path is None else State.from_metadata(self._reader(path).metadata)

    def origin(self) -> dict[str, Any]:
        """Return the job that wrote the state and its data's fingerprint; {} if the state is in this process's memory."""
        path = self._sources[0].path
        metadata = {} if path is None else self._reader(path).metadata
        return {key: metadata[key] for key in ("job", "data_fingerprint") if key in metadata}

    def _reader(self, path: Path) -> CheckpointReader:
        if path not in self._open:
            self._open[path] = self._stack.enter_context(CheckpointReader(path))
        return self._open[path]


def share_state(world: World, state: State | None, root: int = 0) -> State:
    """Broadcast the numbers of ``root``'s state to all ranks. Collective."""
    return State.from_dict(world.broadcast_json(state.to_dict() if state is not None else None, root=root))


def gather_sources(world: World, own_sources: Iterable[Source]) -> list[Source]:
    """Gather the sources of all ranks on all ranks: copies in memory first, then checkpoints, then shards. Collective.

    A shard that several ranks can read, because their hosts share a disk, is listed once, for the first of these ranks.
    """
    rows = [{**vars(s), "path": str(s.path or ""), "names": sorted(s.names)} for s in own_sources]
    source_by_key: dict[tuple[Any, ...], Source] = {}
    for row in (row for of_rank in world.all_gather_json(rows) for row in of_rank):
        path = Path(row["path"]) if row["path"] else None
        source = Source(**{**row, "path": path, "names": frozenset(row["names"])})
        key = (source.version_id, source.writer) if source.is_shard else (source.version_id, source.rank, "")
        source_by_key.setdefault(key, source)
    return sorted(source_by_key.values(), key=lambda source: (source.is_shard, source.path is not None))


def newest_version(sources: Sequence[Source], names: Collection[str]) -> list[Source]:
    """Return the sources of the newest version that together contain all ``names``; empty if no version is complete.

    The newest version has the latest step of the latest run; among versions of the same step, the first in ``sources`` wins.
    """
    versions: dict[tuple[str, int, str], list[Source]] = {}
    for source in sources:
        versions.setdefault((source.run_id, source.step, source.version_id), []).append(source)
    for key in sorted(versions, key=lambda key: key[:2], reverse=True):
        if set(names) <= set().union(*(source.names for source in versions[key])):
            return versions[key]
    return []


def new_run_id(earlier: Iterable[str] = ()) -> str:
    """Create an id for a new run that sorts after those of the ``earlier`` runs. Resumed runs keep their id.

    Ids start with a run counter, since the hosts' clocks may differ; the time only orders runs that are unaware of each other.
    """
    numbers = [int(match[1]) for run_id in earlier if (match := _RUN_NUMBER.match(run_id))]
    return f"{1 + max(numbers, default=0):012d}-{int(time.time()):012d}-{token_hex(4)}"


def new_version_id() -> str:
    """Create a random id for the copies and shards of a version."""
    return token_hex(4)


class ShardWriter:
    """Writes this rank's shards.

    Args:
        run_dir: the run directory, on the host's own disk or on a shared one.
        described: metadata common to all shards of the run.
        retained_id: id of the version on disk from which the run resumed, if any; it is kept until a new version is complete.
    """

    def __init__(self, world: World, run_dir: Path, described: Mapping[str, Any], retained_id: str | None) -> None:
        self._world, self.run_dir, self._described, self._retained_id = world, run_dir, described, retained_id
        self._newest: str | None = None
        self.trouble: str | None = None
        """Why this rank's newest shard could not be written; None if it was written."""
        self._reported = False

    def write(self, version: State) -> None:
        """Write this rank's shard of a version. An error is stored in ``trouble`` so that training continues."""
        version_id, rank = version.version_id, self._world.rank
        self._newest, self.trouble = version_id, None
        keep_versions(self.run_dir, [entry for entry in (self._retained_id, version_id) if entry is not None])
        if not version.tensors:
            return
        metadata = {**self._described, **version.metadata(shard=True)}
        metadata |= {"version_id": version_id, "rank": rank, "names": sorted(version.names)}
        path = shard_path(self.run_dir, rank, version.step, version_id)
        try:
            with contextlib.ExitStack() as stack, CheckpointWriter(path, metadata) as writer:
                for (kind, name), tensor in self._world.marked(version.tensors.items()):
                    writer.write(kind, name, tensor.numpy(), str(tensor.dtype).removeprefix("torch."))
                stack.enter_context(self._world.busy())  # a slow disk shows no progress
        except (UserError, OSError) as error:
            _LOG.warning("step %d: no copy on disk: %s", version.step, error)
            self.trouble = str(error)

    def settle(self, troubles: Sequence[str | None]) -> None:
        """Stop retaining the older version if the newest one is complete on all ranks. Not collective.

        ``troubles``: the value of ``trouble`` on every rank.
        """
        if self._newest is None:
            return
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text is not None]
        if not failed:
            self._retained_id = self._newest
        elif not self._reported:
            say(f"Training continues, but copies on disk are not updated; the previous ones remain: {failed[0]}")
        self._reported = bool(failed)
        self._newest = None
