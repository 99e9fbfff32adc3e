"""The trained state as it is stored: the reader of versions, wherever their parts lie, and what a checkpoint or a local shard must
pass before a run goes on from it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_mpi.checkpoint import KINDS, CheckpointReader, newest_good, verify
from hetero_mpi.checkpoint.directory import Part
from hetero_mpi.checkpoint.opening import damage_named
from hetero_mpi.errors import UserError
from hetero_mpi.job.rules import as_toml
from hetero_mpi.job.schema import TrainTable
from hetero_mpi.model.layer.interface import LayerChain, ParameterSpec
from hetero_mpi.model.optimizer import learning_rate
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.state.peer_replicas import StateVersion
from hetero_mpi.state.redistribute import Parcel, held_as
from hetero_mpi.state.training_state import packed

LATEST = "latest"
"""``--resume latest``: from the newest state in the run directory."""
ANY = "any"
"""As ``LATEST``, or from the beginning where there is no state; the supervisor uses it."""
_RATE = ("steps", "learning_rate", "schedule", "warmup_steps")
"""Keys of ``[train]`` that determine the learning rate of a step."""


class VersionReader:
    """What one rank can read of a version, from files and from memory. A context manager that holds the files open."""

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
        """What the first part says besides tensors, JSON-able: ``state`` (``TrainingState.to_dict``), and of a file ``job`` and
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
        raise UserError(f"{path} is one rank's copy, not a checkpoint; `--resume` alone looks for those on all hosts")
    check_train(reader, path, train)
    check_tensors(reader, path, tuning, names)
    check_settings(reader, path, chain, sequence_length)


def check_tensors(reader: CheckpointReader, path: Path, tuning: Tuning, held: Collection[str] | None = None) -> None:
    """Refuse a stored state of another model, before any of its tensors is read. Raises UserError: with the first difference.
    ``held``: as ``names`` of ``check_fits``.
    """
    specs = {**tuning.trainable, **tuning.constants}
    names, own = set(reader.names("parameters")), set(specs if held is None else held)
    if names != own:
        extra, lacking = sorted(names - own), sorted(own - names)
        detail = f"it holds {extra[0]!r}, which this model does not have" if extra else f"it lacks {lacking[0]!r}"
        raise UserError(f"{path} is a checkpoint of another model: {detail}; resume with the job that wrote it")
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
                f"{path} is a checkpoint of another model: {kind}/{spec.name} has shape {found[0]} of {found[1]} there and "
                f"{tuple(there[0])} of {own} here"
            )


def check_train(reader: CheckpointReader, path: Path, train: TrainTable) -> None:
    """Refuse a stored state of a run that took its steps in another way. Raises UserError."""
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
    """Refuse a stored state of other sequences, or of a model with other values. Raises UserError."""
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
    """Refuse a stored state of sequences of another length. Raises UserError."""
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


def check_steps(path: Path, step: int, train: TrainTable) -> None:
    """Refuse a state of after the job's end. Raises UserError."""
    if step > train.steps:
        raise UserError(
            f"{path} was written after step {step}, and the job ends at [train] steps = {train.steps}: raise it, or resume from an "
            f"earlier checkpoint by its name"
        )


def rate_change(then: Mapping[str, Any], train: TrainTable, step: int) -> str | None:
    """A warning if the job has changed the learning rate of the next step; None if it is the same.

    Args:
        then: ``[train]`` when the state after ``step`` steps was written.
        train: ``[train]`` now.
    """
    old = learning_rate(train.model_copy(update={key: then[key] for key in _RATE}), step)
    new = learning_rate(train, step)
    if step >= train.steps or math.isclose(old, new, rel_tol=1e-9):
        return None
    changed = [f"{key} is {as_toml(getattr(train, key))}, was {as_toml(then[key])}" for key in _RATE]
    changed = [text for text, key in zip(changed, _RATE, strict=True) if getattr(train, key) != then[key]]
    kept = ", ".join(f"{key} = {as_toml(then[key])}" for key in _RATE if getattr(train, key) != then[key])
    remedy = f"set {kept} again to go on as before"
    share = new / train.learning_rate
    if share > 0:
        remedy += f", or learning_rate = {old / share:.4g} to begin this schedule at the old value"
    return (
        f"Warning: the learning rate jumps from {old:.4g} to {new:.4g} at step {step + 1}, since [train] {', '.join(changed)}: "
        f"it is a function of the step and of these; {remedy}"
    )
