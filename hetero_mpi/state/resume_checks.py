"""Checks of a stored state before a run resumes from it, and warnings about changed settings."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero_mpi.job.plan_request import micro_batch_choices
from hetero_mpi.job.rules import as_toml, field_metadata
from hetero_mpi.job.schema import JobConfig
from hetero_mpi.job.training_tables import AdapterTable, OnResume, TrainTable
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.optimizer import learning_rate
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.state.hdf5 import KINDS, damage_named
from hetero_mpi.state.reader import CheckpointReader
from hetero_mpi.state.redistribute import held_as
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError


def _keys(table: type[AdapterTable | TrainTable], rule: str) -> tuple[str, ...]:
    """List the keys of a table that have the given ``OnResume`` rule."""
    return tuple(key for key, rules in field_metadata(table, OnResume).items() if rule in rules)


_FIXED, _FIXED_OF_ADAPTER = _keys(TrainTable, "same"), _keys(AdapterTable, "same")
"""Keys that a resumed run may not change; for adapters, only those that names and shapes of tensors do not reveal."""
_SHAPING_KEYS = _keys(AdapterTable, "shapes")
_CHANGEABLE, _OF_RATE, _OF_SOME_RATES = (_keys(TrainTable, rule) for rule in ("reported", "rate", "rates"))
MAX_PEAK_RATIO = 10.0
"""Do not suggest a learning rate of more than this many times the job's."""


def check_fits(
    reader: CheckpointReader,
    path: Path,
    chain: LayerChain,
    tuning: Tuning,
    train: TrainTable,
    sequence_length: int,
    names: Collection[str] | None = None,
) -> None:
    """Reject a stored state from which this job would not continue the run. Raises UserError with the first difference.

    ``names``: names of the model's tensors in a shard; None for a checkpoint, which has all tensors.
    """
    if names is None and "version_id" in reader.metadata:
        raise UserError(
            "checkpoint.copy",
            f"{path} is one rank's shard, not a complete checkpoint; `--resume` without a path finds the shards on all hosts",
        )
    check_train(reader, path, train)
    _check_adapter(reader, path, tuning)
    check_tensors(reader, path, tuning, names)
    check_length(reader, path, sequence_length)
    described = reader.required("model_config")
    with damage_named(path, "metadata/model_config"):
        changed = chain.changed_since(described)
    if changed is not None:
        raise UserError(
            "resume.setting",
            f"{path} was written with different values of {changed}, which are not stored in checkpoints, so the run would "
            f"not continue where it left off. Restore the original values, or start without resuming",
        )


def check_train(reader: CheckpointReader, path: Path, train: TrainTable) -> None:
    """Reject a stored state whose training settings differ in a key that must not change. Raises UserError."""
    then = reader.metadata["job"]
    for key, value in then["train"].items():
        if value and key not in TrainTable.model_fields:
            raise UserError(
                "resume.setting",
                f"{path} was written with [train] {key} = {as_toml(value)}, which this version does not support: start without "
                f"resuming, or resume with {reader.writer.partition(',')[0]}",
            )
    for key, was in _values(then["train"], _FIXED).items():
        if getattr(train, key) != "auto":  # the dtype may still be unresolved
            _require_equal(path, f"[train] {key}", was, getattr(train, key))


def check_length(reader: CheckpointReader, path: Path, sequence_length: int) -> None:
    """Reject a stored state with a different sequence length, since its samples would differ. Raises UserError."""
    was = reader.metadata["job"]["data"].get("sequence_length")
    _require_equal(path, "[data] sequence_length", was, sequence_length)


def _check_adapter(reader: CheckpointReader, path: Path, tuning: Tuning) -> None:
    """Reject an adapter with different settings, or one trained on a differently quantized base. Raises UserError."""
    with damage_named(path, "metadata/job"):
        then, model = (dict(reader.metadata["job"][table]) for table in ("adapter", "model"))
    if tuning.adapter is None or then.get("method") != "lora":
        return
    for key in _FIXED_OF_ADAPTER:
        was = then.get(key, AdapterTable.model_fields[key].default)
        _require_equal(path, f"[adapter] {key}", was or None, getattr(tuning.adapter, key) or None)
    base = model.get("quantization", "none"), "nf4" if tuning.nf4 else "none"
    _require_equal(path, "[model] quantization", *base)
    if tuning.nf4:
        _require_equal(path, "[model] double_quantization", model.get("double_quantization", True), tuning.double)


def _require_equal(path: Path, key: str, was: Any, now: Any) -> None:
    if was != now:
        raise UserError(
            "resume.setting",
            f"{path} was written with {key} = {as_toml(was)}, but this job has {as_toml(now)}: the run would not continue "
            f"where it left off; restore the old value, or start without resuming",
        )


def check_tensors(reader: CheckpointReader, path: Path, tuning: Tuning, names: Collection[str] | None = None) -> None:
    """Reject a stored state of another model before reading its tensors. Raises UserError with the first difference.

    ``names``: as in ``check_fits``.
    """
    specs = {**tuning.trainable, **tuning.constants}
    stored, model_names = set(reader.names("parameters")), set(specs if names is None else names)
    differences = [f"it contains {name!r}, which this model does not have" for name in sorted(stored - model_names)]
    differences += [f"it lacks {name!r}" for name in sorted(model_names - stored)]
    for name in [] if differences else sorted(model_names & set(specs)):
        for kind in KINDS:
            if (expected := held_as(tuning, specs[name], kind)) is not None:
                was = reader.shape(kind, name), reader.dtype(kind, name)
                now = tuple(expected[0]), str(expected[1]).removeprefix("torch.")
                if was != now:
                    differences.append(f"{kind}/{name} is {was[1]} {was[0]} in the checkpoint, not {now[1]} {now[0]}")
    if differences:
        changed = ", ".join(_changed_adapter_keys(reader, tuning))
        what = f"was written with {changed}" if changed else "is a checkpoint of another model"
        raise UserError(
            "resume.other_model",
            f"{path} {what}: {differences[0]}; resume with the job that wrote it, or start without resuming",
        )


def _changed_adapter_keys(reader: CheckpointReader, tuning: Tuning) -> Iterator[str]:
    """Yield the adapter settings that changed names and shapes of tensors, with both values."""
    now, then = tuning.adapter or AdapterTable(), reader.metadata["job"].get("adapter", {})
    for key in _SHAPING_KEYS:
        was = then.get(key, AdapterTable.model_fields[key].default)
        if was != getattr(now, key):
            yield f"[adapter] {key} = {as_toml(was)} (this job: {as_toml(getattr(now, key))})"


def check_steps(path: Path, step: int, train: TrainTable) -> None:
    """Reject a state later than the job's last step. Raises UserError."""
    if step > train.steps:
        raise UserError(
            "resume.steps",
            f"{path} was written after step {step}, but the job ends at [train] steps = {train.steps}: raise it, or resume from an "
            f"earlier checkpoint by path",
        )


def check_data(then: str | None, path: Path, fingerprint: str, allowed: bool) -> str | None:
    """Compare the data with the checkpoint's. Returns a note if they differ and the user allows it; otherwise raises UserError.

    Args:
        then: fingerprint of the checkpoint's data; None if it is unknown.
        fingerprint: fingerprint of the current data (``Dataset.fingerprint``).
        allowed: whether the user allows the data to differ.
    """
    if then is None or then == fingerprint:
        return None
    if not allowed:
        raise UserError(
            "resume.data",
            f"{path} was written with different data: its files, tokenizer or split have changed, so the run would not "
            "continue where it left off; restore the data, start without resuming, or continue with the new data: "
            "checkpoint.allow_other_data=true (--set, or set= in Python)",
        )
    return "The data has changed since the checkpoint was written; the run uses the new data, as the job allows"


# ---------------------------------------------------------------------------------------------------------------- remarks
def _values(then: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of a stored ``[train]`` table, with defaults for missing keys."""
    return {key: then.get(key, TrainTable.model_fields[key].default) for key in keys}


def _changes(then: Mapping[str, Any], train: TrainTable, keys: Iterable[str]) -> dict[str, str]:
    """Map each changed key to a description of its change."""
    old = {key: was for key, was in _values(then, keys).items() if was not in (getattr(train, key), "auto")}
    return {key: f"{key} is {as_toml(getattr(train, key))}, was {as_toml(was)}" for key, was in old.items()}


def step_change(then: Mapping[str, Any], train: TrainTable, step: int) -> str | None:
    """Return a note on changed settings that ``rate_change`` does not report, else None. Arguments as there."""
    is_over = step >= train.steps
    changed = _changes(then, train, (*_OF_RATE, *_OF_SOME_RATES, *_CHANGEABLE) if is_over else _CHANGEABLE)
    when = "No step is left to which this change applies:" if is_over else f"From step {step + 1} on,"
    return f"{when} [train] {', '.join(changed.values())}" if changed else None


def rate_change(then: Mapping[str, Any], train: TrainTable, step: int) -> str | None:
    """Return a warning if changed settings alter the learning rate of the next step, else None.

    Args:
        then: ``[train]`` when the state was written.
        train: current ``[train]``.
        step: number of steps completed in that state.
    """
    keys = (*_OF_RATE, *_OF_SOME_RATES)
    changes, then = _changes(then, train, keys), _values(then, keys)
    if step >= train.steps or not changes:
        return None
    old, new = (learning_rate(table, step) for table in (train.model_copy(update=then), train))
    changed = ", ".join(changes.values())
    if math.isclose(old, new, rel_tol=1e-9):
        warning = f"Warning: learning rates of some parameters jump at step {step + 1}, since [train] {changed}"
        return None if {*_OF_SOME_RATES}.isdisjoint(changes) else warning
    is_finished = step >= then.get("steps", math.inf)
    former = ", ".join(f"{key} = {as_toml(then[key])}" for key in changes)
    remedies = [] if is_finished else [f"set {former} again to continue unchanged"]
    peak = old * train.learning_rate / new if new > 0 else 0.0
    if 0 < peak <= MAX_PEAK_RATIO * train.learning_rate and f"{peak:.4g}" != f"{then['learning_rate']:.4g}":
        remedies.append(f"set learning_rate = {peak:.4g} to start this schedule at the old value")
    return (
        f"Warning: the learning rate jumps from {old:.4g} to {new:.4g} at step {step + 1}, since [train] {changed}: "
        f"{', or '.join(remedies) or 'the former schedule has ended, and this one is entered at its place'}"
    )


def other_change(then: Mapping[str, Any], job: JobConfig, tuning: Tuning, chain: LayerChain, step: int) -> str | None:
    """Return a note if the adapter's dropout, its base model's path or the sequences per dropout mask have changed, else None.

    Checkpoints do not contain the base model's weights. ``then``: the job's tables when the state was written.
    """
    notes = []
    if job.adapter.method != "none":
        dropout, base = then["adapter"].get("dropout", 0.0), then["model"].get("path")
        if job.adapter.dropout != dropout:
            notes.append(f"[adapter] dropout is {as_toml(job.adapter.dropout)}, was {as_toml(dropout)}")
        if job.model.path != base and job.model.path is not None and base is not None:
            text = f'[model] path is "{job.model.path}", was "{base}"'
            notes.append(f"{text}: the run continues unchanged only if the weights are the same")
    if tuning.uses_dropout(chain):
        sizes = then["train"].get("micro_batch", "auto"), job.train.micro_batch
        before, now = (micro_batch_choices(job.train.global_batch, size, 1, True)[0][0] for size in sizes)
        if now != before:
            text = f"dropout masks are drawn for {units.plural(now, 'sequence')} at a time, previously {before}"
            notes.append(f"{text} ([train] micro_batch)")
    return f"From step {step + 1} on, {'; '.join(notes)}" if notes and step < job.train.steps else None
