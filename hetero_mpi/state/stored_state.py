"""The trained state as it is stored, in parts of versions (``state.checkpoint.directory``): the reader of versions, wherever their
parts lie; the writer of local shards; and the checks that a checkpoint or a shard must pass before a run goes on from it.

While a supervisor may have to start the run again, a rank writes one shard of each version to its host's disk: its own part, and
the parts it keeps as a peer. So if a machine is lost with its disk, checkpoints included, its ranks' parts are on the disks of
their peers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.job.rules import REMOVED_KEYS, as_toml
from hetero_mpi.job.training_tables import AdapterTable, TrainTable
from hetero_mpi.model.layer.interface import LayerChain, ParameterSpec
from hetero_mpi.model.optimizer import learning_rate
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import START_VARIABLE
from hetero_mpi.state.checkpoint import KINDS, CheckpointReader, CheckpointWriter, newest_good, verify
from hetero_mpi.state.checkpoint.directory import Part, keep_versions, shard_path
from hetero_mpi.state.checkpoint.opening import damage_named
from hetero_mpi.state.redistribute import Parcel, held_as
from hetero_mpi.state.saving import lack_of_space
from hetero_mpi.state.training_state import packed
from hetero_mpi.util.disk import free_bytes
from hetero_mpi.util.errors import UserError

_LOG = logging.getLogger(__name__)
DISK_SHARE = 0.5
"""Largest share of a host's free disk, when training begins, that copies may take."""
VERSIONS_ON_DISK = 2
"""One that is whole everywhere, and one that is being written."""
SHARD_METADATA = (
    "job",
    "plan",
    "model_config",
    "generation_config",
    "base_model",
    "seed",
    "versions",
    "data_fingerprint",
    "run",
    "begun",
)
"""Keys of a checkpoint's metadata that a shard has too."""
LATEST = "latest"
"""``--resume latest``: from the newest state in the run directory."""
ANY = "any"
"""Like ``LATEST``, or from the beginning where there is no state; the supervisor uses it."""
_KEPT = ("seed", "global_batch", "last_batch", "dtype", "optimizer", "freeze", "preference")
"""Keys of ``[train]`` that a resumed run has as it began with them."""
_OF_ADAPTER = ("start", "alpha", "rslora", "alpha_pattern", "tokens")
"""The same of ``[adapter]``: what shapes and names of tensors do not tell."""
_TOLD = (
    *("preference_beta", "preference_smoothing", "preference_margin", "desirable_weight", "undesirable_weight"),
    *("neftune_noise_alpha", "weight_decay", "beta1", "beta2", "epsilon", "clip_norm", "dropout"),
)
"""Keys that it may change, which is told."""
_RATE = (
    *("steps", "learning_rate", "schedule", "warmup_steps", "max_warmup_steps"),
    *("min_learning_rate_ratio", "decay_steps", "decay", "cycles"),
)
"""Keys of ``[train]`` that determine the learning rate of a step."""
_SHARES = ("learning_rates", "lora_plus_ratio")
"""The same, of some parameters."""


@dataclass
class StateVersion:
    """This process's part of one version: the trained state after one step."""

    version_id: str
    state: dict[str, Any]
    """The training state, as ``TrainingState.to_dict`` returns it."""
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """(kind, name) -> host tensor."""
    names: set[str] = field(default_factory=set)
    """Parameters and constants of which every tensor is here."""

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def part(self, rank: int, begun: str) -> Part:
        """The same as it is told to other ranks, by ``rank`` of the run ``begun``."""
        return Part(rank, None, self.version_id, self.step, begun, rank, frozenset(self.names))


class VersionReader:
    """A version as one rank reads it, from files and from memory. A context manager that holds the files open."""

    def __init__(self, rank: int, parts: Sequence[Part], in_memory: list[StateVersion]) -> None:
        self._parts = [part for part in parts if part.rank == rank]
        self._in_memory = {version.version_id: version for version in in_memory}
        self._open: dict[Path, CheckpointReader] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> VersionReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tensor(self, parcel: Parcel) -> torch.Tensor:
        """A tensor that this rank has, on the host."""
        part = next(part for part in self._parts if parcel.name in part.names)
        if part.path is None:
            return self._in_memory[part.version_id].tensors[parcel.kind, parcel.name]
        array, _ = self._reader(part.path).read(parcel.kind, parcel.name)
        return torch.from_numpy(np.ascontiguousarray(array))

    def metadata(self) -> dict[str, Any]:
        """The first part's content besides tensors, JSON-able: ``state`` (``TrainingState.to_dict``), and of a file ``job`` and
        ``data_fingerprint``.
        """
        part = self._parts[0]
        if part.path is None:
            return {"state": self._in_memory[part.version_id].state}
        found = self._reader(part.path).metadata
        keys = "step", "updates", "lowest_loss", "higher_in_a_row"
        state = {key: found.get(key) for key in keys} | {"reference": packed(found.get("reference"))}
        state |= found.get("training_state", {})
        state |= {"losses": found["losses"].tolist(), "loss_scale": found["loss_scale"]}
        return {"state": state, "job": found["job"], "data_fingerprint": found.get("data_fingerprint")}

    def _reader(self, path: Path) -> CheckpointReader:
        if path not in self._open:
            self._open[path] = self._stack.enter_context(CheckpointReader(path))
        return self._open[path]


def supervised() -> bool:
    """Was this run started by a supervisor (``launch --elastic``) that can start it again?"""
    return START_VARIABLE in os.environ


class ShardWriter:
    """Writes this rank's shards.

    Args:
        run_dir: on this host's own disk, or on one that hosts share.
        described: metadata that all checkpoints of the run share (``SHARD_METADATA``), on every rank.
        kept: id of the version on disk that the run goes on from, if any: it stays until a new one is whole.
    """

    def __init__(self, world: World, run_dir: Path, described: Mapping[str, Any], kept: str | None) -> None:
        self._world, self._run_dir, self._described, self._kept = world, run_dir, described, kept
        self._newest: str | None = None
        self.trouble: str | None = None
        """Why this rank's newest shard could not be written; None: it could."""
        self._told = False

    def write(
        self,
        version_id: str,
        state: Mapping[str, Any],
        listed: Sequence[Parcel],
        tensors: Mapping[tuple[str, str], torch.Tensor],
    ) -> None:
        """Write this rank's shard of a version. An error is kept in ``trouble``, and training goes on. Runs in the background.

        Args:
            version_id: in all ranks' shards of this version.
            state: the training state, as ``TrainingState.to_dict`` returns it.
            listed: all tensors of the shard.
            tensors: (kind, name) -> host tensor.
        """
        self._newest, self.trouble = version_id, None
        keep_versions(self._run_dir, [one for one in (self._kept, version_id) if one is not None])
        if not listed:
            return
        said = dict(state)
        losses = np.array(said.pop("losses"), dtype=np.float64)
        metadata = {**self._described, "step": said["step"], "updates": said["updates"], "losses": losses}
        metadata |= {"loss_scale": said["loss_scale"], "training_state": said, "version_id": version_id}
        metadata |= {"rank": self._world.rank, "names": sorted({parcel.name for parcel in listed})}
        path = shard_path(self._run_dir, self._world.rank, said["step"], version_id)
        try:
            with contextlib.ExitStack() as alone, CheckpointWriter(path, metadata) as writer:
                for parcel in self._world.marked(listed):
                    array = tensors[parcel.kind, parcel.name].numpy()
                    writer.write(parcel.kind, parcel.name, array, parcel.dtype_name)
                alone.enter_context(self._world.busy())  # nobody sees how far a slow disk is
        except (UserError, OSError) as error:
            _LOG.warning("step %d: no copy on disk: %s", said["step"], error)
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

    def lack_of_disk(self, own_bytes: int) -> str | None:
        """The hosts without room for their ranks' shards, in words; None: all have it. Collective. ``own_bytes``: this rank's."""
        free = 0
        with contextlib.suppress(OSError):
            free = free_bytes(self._run_dir)
        return lack_of_space(self._world, VERSIONS_ON_DISK * own_bytes, free, DISK_SHARE)


# ----------------------------------------------------------------------------------------------------------- checks
def find_checkpoint(run_dir: Path, wanted: str) -> tuple[Path, list[str]]:
    """The checkpoint to resume from, and remarks about damaged ones that were passed over. ``wanted``: ``LATEST`` (or ``ANY``), or
    the path of a checkpoint file. Raises UserError: no whole checkpoint is there.
    """
    if wanted not in (LATEST, ANY):
        path = Path(wanted)
        if not path.exists():
            raise UserError(
                "checkpoint.missing",
                f"{path}: no such checkpoint; `--resume latest` takes the newest one of the run directory",
            )
        damage = verify(path)
        if damage is not None:
            raise UserError("checkpoint.damaged", damage)
        return path, []
    directory = run_dir / "checkpoints"
    path_or_none, skipped = newest_good(directory)
    remarks = [f"passed over {path}: {reason}" for path, reason in skipped]
    if path_or_none is None:
        detail = "; ".join(remarks) if remarks else "it holds none"
        raise UserError(
            "checkpoint.none_whole",
            f"{directory}: no whole checkpoint to resume from ({detail}); start without --resume",
        )
    return path_or_none, remarks


def check_fits(
    reader: CheckpointReader,
    path: Path,
    chain: LayerChain,
    tuning: Tuning,
    train: TrainTable,
    sequence_length: int,
    names: Collection[str] | None = None,
) -> None:
    """Refuse a stored state of another model, or of a run whose steps this one would not continue. Raises UserError: with the first
    difference. ``names``: the model's tensors that a shard holds; None: it is a checkpoint, which holds all.
    """
    if names is None and "version_id" in reader.metadata:
        raise UserError(
            "checkpoint.copy",
            f"{path} is one rank's copy, not a checkpoint; `--resume` alone looks for those on all hosts",
        )
    check_train(reader, path, train)
    _check_adapter(reader, path, tuning)
    check_tensors(reader, path, tuning, names)
    check_settings(reader, path, chain, sequence_length)


def _check_adapter(reader: CheckpointReader, path: Path, tuning: Tuning) -> None:
    """Refuse the state of an adapter whose tensors would mean something else here, or that had learnt over the base in another
    form. Raises UserError.
    """
    with damage_named(path, "metadata/job"):
        then, model = (dict(reader.metadata["job"][table]) for table in ("adapter", "model"))
    if tuning.adapter is None or then.get("method") != "lora":
        return
    fields = AdapterTable.model_fields
    both = {
        f"[adapter] {key}": (then.get(key, fields[key].default), getattr(tuning.adapter, key)) for key in _OF_ADAPTER
    }
    both["[model] quantization"] = model.get("quantization", "none"), "nf4" if tuning.nf4 else "none"
    if tuning.nf4:
        both["[model] double_quantization"] = model.get("double_quantization", True), tuning.double
    for key, (was, now) in both.items():
        if (was or None) != (now or None):
            raise UserError(
                "resume.setting",
                f"{path} was written with {key} = {as_toml(was)}, this job says {as_toml(now)}: the run would not "
                f"continue where it stopped; set it back, or start without --resume",
            )


def check_tensors(reader: CheckpointReader, path: Path, tuning: Tuning, held: Collection[str] | None = None) -> None:
    """Refuse a stored state of another model, before any of its tensors is read. Raises UserError: with the first difference.
    ``held``: as ``names`` of ``check_fits``.
    """
    specs = {**tuning.trainable, **tuning.constants}
    names, own = set(reader.names("parameters")), set(specs if held is None else held)
    if names != own:
        extra, lacking = sorted(names - own), sorted(own - names)
        detail = f"it holds {extra[0]!r}, which this model does not have" if extra else f"it lacks {lacking[0]!r}"
        raise UserError(
            "resume.other_model",
            f"{path} is a checkpoint of another model: {detail}; resume with the job that wrote it",
        )
    for name, spec in specs.items():
        if name in own:
            _check_shapes(reader, path, tuning, spec)


def _check_shapes(reader: CheckpointReader, path: Path, tuning: Tuning, spec: ParameterSpec) -> None:
    """Refuse a tensor that is not this model's. Raises UserError."""
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
                "resume.other_model",
                f"{path} is a checkpoint of another model: {kind}/{spec.name} has shape {found[0]} of {found[1]} there and "
                f"{tuple(there[0])} of {own} here",
            )


def check_train(reader: CheckpointReader, path: Path, train: TrainTable) -> None:
    """Refuse a stored state of a run that took its steps in another way. Raises UserError."""
    then = reader.metadata["job"]
    for dotted in REMOVED_KEYS:
        table, _, key = dotted.partition(".")
        if value := then.get(table, {}).get(key):
            raise UserError(
                "resume.setting",
                f"{path} was written with [{table}] {key} = {as_toml(value)}, which this version does not have: start without "
                f"--resume, or resume with {reader.writer.partition(',')[0]}",
            )
    now = {key: getattr(train, key) for key in _KEPT}
    for key, value in now.items():
        if value == "auto":  # the dtype, before it is settled
            continue
        if then["train"].get(key, TrainTable.model_fields[key].default) != value:
            raise UserError(
                "resume.setting",
                f"{path} was written with [train] {key} = {then['train'].get(key)!r}, this job says {value!r}: the run would not "
                f"continue where it stopped; set it back, or start without --resume",
            )


def check_settings(reader: CheckpointReader, path: Path, chain: LayerChain, sequence_length: int) -> None:
    """Refuse a stored state of other sequences, or of a model with other values. Raises UserError."""
    check_length(reader, path, sequence_length)
    described = reader.told("model_config")
    with damage_named(path, "metadata/model_config"):
        changed = chain.changed_since(described)
    if changed is not None:
        raise UserError(
            "resume.setting",
            f"{path} was written when {changed} had other values, which are in no checkpoint: the run would not continue where it "
            f"stopped; give it the same values as then, or start without --resume",
        )


def check_length(reader: CheckpointReader, path: Path, sequence_length: int) -> None:
    """Refuse a stored state of sequences of another length. Raises UserError."""
    length = reader.metadata["job"]["data"].get("sequence_length")
    if length != sequence_length:
        raise UserError(
            "resume.setting",
            f"{path} was written with [data] sequence_length = {length}, this job says "
            f"{sequence_length}: the order of samples would differ; set it back, or start without --resume",
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
            "resume.data",
            f"{path} was written with other data: its files, tokenizer or shares have changed since, so the run would not "
            "continue where it stopped; restore the data, start without --resume, or go on with the new data: "
            "--set checkpoint.allow_other_data=true",
        )
    return "The data has changed since the checkpoint was written; the run goes on with the new data, as the job allows"


def check_steps(path: Path, step: int, train: TrainTable) -> None:
    """Refuse a state of after the job's end. Raises UserError."""
    if step > train.steps:
        raise UserError(
            "resume.steps",
            f"{path} was written after step {step}, and the job ends at [train] steps = {train.steps}: raise it, or resume from an "
            f"earlier checkpoint by its name",
        )


def step_change(then: Mapping[str, Any], train: TrainTable, step: int) -> str | None:
    """A remark if the job has changed what steps do, the learning rate aside; else None. Takes what ``rate_change`` does."""
    was = {key: then.get(key, TrainTable.model_fields[key].default) for key in _TOLD}
    changed = [
        f"{key} is {as_toml(getattr(train, key))}, was {as_toml(was[key])}"
        for key in _TOLD
        if getattr(train, key) != was[key]
    ]
    return f"From step {step + 1} on [train] {', '.join(changed)}" if changed and step < train.steps else None


def rate_change(then: Mapping[str, Any], train: TrainTable, step: int) -> str | None:
    """A warning if the job has changed the learning rate of the next step; None if it is the same.

    Args:
        then: ``[train]`` when the state after ``step`` steps was written.
        train: ``[train]`` now.
    """
    keys = (*_RATE, *_SHARES)
    then = {key: then.get(key, TrainTable.model_fields[key].default) for key in keys}
    others = [key for key in keys if getattr(train, key) != then[key]]
    if step >= train.steps or not others:
        return None
    old, new = (learning_rate(one, step) for one in (train.model_copy(update=then), train))
    changed = ", ".join(f"{key} is {as_toml(getattr(train, key))}, was {as_toml(then[key])}" for key in others)
    if math.isclose(old, new, rel_tol=1e-9):
        told = f"Warning: learning rates of some parameters jump at step {step + 1}, since [train] {changed}"
        return None if {*_SHARES}.isdisjoint(others) else told
    kept = ", ".join(f"{key} = {as_toml(then[key])}" for key in others)
    remedy = f"set {kept} again to go on as before"
    share = new / train.learning_rate
    if share > 0:
        remedy += f", or learning_rate = {old / share:.4g} to begin this schedule at the old value"
    return (
        f"Warning: the learning rate jumps from {old:.4g} to {new:.4g} at step {step + 1}, since [train] {changed}: "
        f"it is a function of the step and of these; {remedy}"
    )
