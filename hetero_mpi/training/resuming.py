"""The checkpoint that a run goes on from: found, compared with the job and its data, and opened on rank 0."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hetero_mpi.checkpoint import CheckpointReader, set_aside
from hetero_mpi.comm.world import World
from hetero_mpi.errors import UserError
from hetero_mpi.report.logs import say
from hetero_mpi.training.saving import RunState, check_data, check_fits, find_checkpoint
from hetero_mpi.training.setup import Options, Setting


def open_checkpoint(
    setting: Setting, world: World, options: Options, stack: contextlib.ExitStack
) -> tuple[Path | None, CheckpointReader | None, RunState]:
    """(path, open file on rank 0, where the run stands) of the checkpoint to resume from; nothing when starting anew."""
    checkpoints = setting.run_dir / "checkpoints"
    if options.resume is None:
        if world.rank == 0:
            _set_aside(checkpoints, 0)
        return None, None, RunState(0, [], 0)
    reader, shared = None, None
    with world.led("opening the checkpoint"):
        if world.rank == 0:
            path, remarks = find_checkpoint(setting.run_dir, options.resume)
            say(*remarks)
            reader = stack.enter_context(CheckpointReader(path))
            check_fits(reader, path, setting.tuning, setting.job.train, setting.job.data.sequence_length)
            assert setting.material is not None
            fingerprint = setting.material.dataset.fingerprint()
            say(*filter(None, [check_data(reader, path, fingerprint, setting.job.checkpoint.allow_other_data)]))
            step, losses = int(reader.metadata["step"]), [float(loss) for loss in reader.metadata["losses"]]
            if step > setting.job.train.steps:
                raise UserError(
                    f"{path} was written after step {step}, and the job ends at [train] steps = {setting.job.train.steps}: "
                    f"raise it, or resume from an earlier checkpoint"
                )
            say(f"Resuming from {path}, after step {step}")
            _set_aside(checkpoints, step)
            shared = {"path": str(path), "step": step, "losses": losses, "updates": int(reader.metadata["updates"])}
            shared["loss_scale"] = reader.metadata["loss_scale"]
    shared = world.broadcast_json(shared)
    return (
        Path(shared["path"]),
        reader,
        RunState(
            shared["step"],
            list(shared["losses"]),
            shared["updates"],
            (shared["loss_scale"][0], shared["loss_scale"][1]),
        ),
    )


def _set_aside(checkpoints: Path, step: int) -> None:
    aside = set_aside(checkpoints, step)
    if aside is not None:
        say(f"Checkpoints of an earlier run from after step {step} are in {aside} now")
