"""The end of a run after its last step: the model or adapter is written, a sample is generated, and the summary is printed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from hetero_mpi.emulation.pace import punctuality_lines
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.model.files.hub import is_hub_id
from hetero_mpi.planning.types.plan_report import PlanReport
from hetero_mpi.profiling.time_cache import device_key, forget_times
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.metrics import Evaluation
from hetero_mpi.report.summary import final_lines, measured_step_s, misled
from hetero_mpi.runtime.build import Share
from hetero_mpi.runtime.generate.sample import write_sample
from hetero_mpi.runtime.result import TrainResult
from hetero_mpi.runtime.run_report import files_of
from hetero_mpi.runtime.setup.material import model_directory
from hetero_mpi.runtime.setup.setup import RunContext, subject_of
from hetero_mpi.state.checkpointing import save_adapter, save_model
from hetero_mpi.state.training_state import TrainingState


def leave_result(context: RunContext, share: Share, state: TrainingState) -> None:
    """Write the result and print the summary. Collective over the active ranks."""
    assert share.members is not None and share.trainer is not None
    if share.emulation is not None:
        say(*punctuality_lines(share.members, share.emulation))
    share.members.doing = "writing the result"
    result_directory = _write_result(context, share.trainer)
    if context.world.rank == 0:
        _say_end(context, share.report, state, result_directory)


def outcome(context: RunContext, report: PlanReport, state: TrainingState) -> TrainResult:
    """The run's ``TrainResult``, broadcast from rank 0. Collective over all ranks of the job.

    Device times that misled the planner are removed from the cache.
    """
    world = context.world
    own = {
        "losses": state.losses,
        "evaluations": [asdict(one) for one in state.evaluations],
        "step_s": measured_step_s(state.metrics),
        "checkpoint": str(state.newest_checkpoint) if state.newest_checkpoint is not None else None,
        "skipped": state.skipped,
    }
    told = world.broadcast_json(own if world.rank == 0 else None)
    found = TrainResult(
        run_dir=context.run_dir,
        losses=tuple(told["losses"]),
        evaluations=tuple(Evaluation(**one) for one in told["evaluations"]),
        step_s=told["step_s"],
        report=report,
        profile=context.profile,
        result=_result_directory(context),
        checkpoint=Path(told["checkpoint"]) if told["checkpoint"] is not None else None,
        skipped=told["skipped"],
    )
    if found.profile.source == "measured" and misled(found.step_s, found.report.predicted_step_s):
        subject, _ = subject_of(context)
        forget_times(device_key(world, context.backend, subject, context.job.profile.repeats))
    return found


def _write_result(context: RunContext, trainer: Trainer) -> Path:
    """Write the model or the adapter, and a sample where the job asks for one. Collective; returns the result's directory."""
    job, tokenizer = context.job, context.material.tokenizer if context.material is not None else None
    directory = _result_directory(context)
    if context.tuning.full:
        save_model(trainer, directory, job.output.shard_bytes, tokenizer)
    else:
        save_adapter(trainer, directory, _base_model(context), tokenizer)
    write_sample(trainer, context.loaded, tokenizer, context.run_dir)
    return directory


def _result_directory(context: RunContext) -> Path:
    return context.run_dir / ("model" if context.tuning.full else "adapter")


def _base_model(context: RunContext) -> str | None:
    """The base model that the adapter's files name: the hub id where the job gives one, as it means the same on every machine; else
    the directory.
    """
    path = context.job.model.path
    if path is not None and is_hub_id(path, context.loaded.resolve(path)):
        return path
    directory = model_directory(context.loaded)
    return str(directory) if directory is not None else None


def _say_end(context: RunContext, report: PlanReport, state: TrainingState, result_directory: Path) -> None:
    assert context.dataset is not None
    written = {result_directory.name: result_directory}
    if state.newest_checkpoint is not None:
        written["checkpoint"] = state.newest_checkpoint
    written |= files_of(context) | {"metrics": context.run_dir / "metrics.jsonl", "logs": context.run_dir / "logs"}
    entropy = context.dataset.unigram_entropy()
    changes = context.job.cluster.speed_changes()
    shown = state.metrics, state.evaluations, entropy, written, changes, context.job.train.preference != "none"
    say(*final_lines(report, context.profile, *shown))
    if context.material is not None and context.material.skipped_records:
        say(
            f"{context.material.skipped_records} bad records were skipped (data.skip_bad); the start of the log names them"
        )
    if state.skipped:
        say(f"{state.skipped} steps were skipped, since their gradients were not finite")
