"""``inspect CHECKPOINT``: the contents of a checkpoint, and whether every byte of it is as it was written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_mpi.planning.types.sizes import BLOCK_KEYS
from hetero_mpi.planning.types.toml_files import plan_from_dict
from hetero_mpi.report.plan_text import stages_text
from hetero_mpi.report.run_text import job_rows
from hetero_mpi.rundir.run_directory import run_table
from hetero_mpi.state.reader import CheckpointReader
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.terminal import wrap_text


def checkpoint_lines(path: Path) -> list[str]:
    """A checkpoint's contents as lines. Reads the whole file, to compare its checksums and to look for numbers that are not finite.

    Raises CheckpointError: it is damaged; names the dataset where that is known.
    """
    with CheckpointReader(path) as reader:
        found, metadata, writer = reader.check_all(), reader.metadata, reader.writer
    size = units.size(path.stat().st_size)
    return [
        f"Checkpoint after step {metadata['step']} of {run_table(run_table(metadata, 'job'), 'train').get('steps', '?')}, {size}",
        *_progress(metadata),
        *_origin(metadata),
        f"  sizes: {found.parameters:,} trained tensors, {found.numbers:,} numbers, and their moments; "
        f"stored as {', '.join(sorted(found.dtypes))}",
        f"  written by {writer}; all {found.tensors:,} checksums match",
    ]


def _progress(metadata: Mapping[str, Any]) -> list[str]:
    losses = [float(loss) for loss in metadata["losses"]]
    lines = []
    if losses:
        lines.append(
            f"  loss: {losses[-1]:.4f} at the last step, {losses[0]:.4f} at the first, {min(losses):.4f} at best"
        )
    held_out = metadata.get("held_out_loss")
    if held_out is not None:
        lines.append(f"  held-out loss: {held_out:.4f}")
    skipped = metadata["step"] - metadata["updates"]
    if skipped:
        lines.append(f"  {skipped} steps were skipped, since their gradients were not finite")
    return lines


def _origin(metadata: Mapping[str, Any]) -> list[str]:
    """Model, job, data, plan and software that the checkpoint comes from."""
    config = run_table(metadata, "model_config")
    blocks = next((config[key] for key in BLOCK_KEYS if key in config), "?")
    model = f"{config.get('model_type', '?')}, {blocks} blocks"
    if "factory" in config:
        layers = config.get("layers")
        model = f"{config['factory']}, {len(layers) if isinstance(layers, list) else '?'} layers"
    facts = dict(job_rows(run_table(metadata, "job")))
    facts["model"] = ", ".join(filter(None, (model, facts.get("model"))))
    if metadata.get("base_model"):
        facts["base"] = str(metadata["base_model"])
    if "data_fingerprint" in metadata:
        fingerprint = f"fingerprint {metadata['data_fingerprint']}"
        facts["data"] = ", ".join(filter(None, (facts.get("data"), fingerprint)))
    if "plan" in metadata:
        facts["plan"] = _plan_text(metadata["plan"])
    if versions := run_table(metadata, "versions"):
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [line for what, text in facts.items() for line in wrap_text(f"  {what}: ", text)]


def _plan_text(values: Any) -> str:
    try:
        plan = plan_from_dict(values)
    except UserError:
        return "of another version of this program"
    on = f" on {units.plural(len(plan.ranks), 'rank')}"
    return f"{stages_text(plan, on)} (a run may be resumed under any other)"
