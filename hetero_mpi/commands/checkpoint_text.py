"""The command ``inspect CHECKPOINT``: describe a checkpoint and verify its checksums."""

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
    """Describe a checkpoint, after reading the whole file to verify its checksums and find non-finite values.

    Raises CheckpointError if the file is corrupted; the message names the damaged dataset if it is known.
    """
    with CheckpointReader(path) as reader:
        contents, metadata, writer = reader.check_all(), reader.metadata, reader.writer
    size = units.size(path.stat().st_size)
    return [
        f"Checkpoint after step {metadata['step']} of {run_table(run_table(metadata, 'job'), 'train').get('steps', '?')}, {size}",
        *_progress(metadata),
        *_origin(metadata),
        f"  sizes: {contents.parameters:,} trained tensors with {contents.numbers:,} elements, and their optimizer states; "
        f"stored as {', '.join(sorted(contents.dtypes))}",
        f"  written by {writer}; all {contents.tensors:,} checksums match",
    ]


def _progress(metadata: Mapping[str, Any]) -> list[str]:
    losses = [float(loss) for loss in metadata["losses"]]
    lines = []
    if losses:
        named = {"last": losses[-1], "first": losses[0], "best": min(losses)}
        lines.append("  loss: " + ", ".join(f"{loss:.4f} ({name} step)" for name, loss in named.items()))
    evaluation_loss = metadata.get("held_out_loss")
    if evaluation_loss is not None:
        lines.append(f"  evaluation loss: {evaluation_loss:.4f}")
    skipped = metadata["step"] - metadata["updates"]
    if skipped:
        lines.append(f"  {skipped} steps were skipped because of non-finite gradients")
    return lines


def _origin(metadata: Mapping[str, Any]) -> list[str]:
    """Describe the checkpoint's model, job, data, plan and software versions."""
    config = run_table(metadata, "model_config")
    blocks = next((config[key] for key in BLOCK_KEYS if key in config), "?")
    model = f"{config.get('model_type', '?')}, {blocks} blocks"
    if "factory" in config:
        layers = config.get("layers")
        model = f"{config['factory']}, {len(layers) if isinstance(layers, list) else '?'} layers"
    text_by_topic = dict(job_rows(run_table(metadata, "job")))
    text_by_topic["model"] = ", ".join(filter(None, (model, text_by_topic.get("model"))))
    if metadata.get("base_model"):
        text_by_topic["base"] = str(metadata["base_model"])
    if "data_fingerprint" in metadata:
        fingerprint = f"fingerprint {metadata['data_fingerprint']}"
        text_by_topic["data"] = ", ".join(filter(None, (text_by_topic.get("data"), fingerprint)))
    if "plan" in metadata:
        text_by_topic["plan"] = _plan_text(metadata["plan"])
    if versions := run_table(metadata, "versions"):
        text_by_topic["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [line for topic, text in text_by_topic.items() for line in wrap_text(f"  {topic}: ", text)]


def _plan_text(values: Any) -> str:
    try:
        plan = plan_from_dict(values)
    except UserError:
        return "written by an incompatible version of hetero_mpi"
    suffix = f" on {units.plural(len(plan.ranks), 'rank')}"
    return f"{stages_text(plan, suffix)} (a run can resume with any other plan)"
