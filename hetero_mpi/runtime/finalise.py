"""What a run leaves behind when its last step is taken: the model or adapter, a sample, and what is said of it."""

from __future__ import annotations

from pathlib import Path

from hetero_mpi.emulation.pace import punctuality_lines
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.model.files.hub import is_hub_id
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.profiling.time_cache import device_key, forget_times
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.summary import final_lines, measured_step_s, misled
from hetero_mpi.runtime.generate.sample import write_sample
from hetero_mpi.runtime.loop import Books, LoopResult
from hetero_mpi.runtime.reconfigure import Share
from hetero_mpi.runtime.result import TrainResult
from hetero_mpi.runtime.run_report import files_of
from hetero_mpi.runtime.setup.material import model_directory
from hetero_mpi.runtime.setup.setup import Setting, subject_of
from hetero_mpi.state.checkpointing import save_adapter, save_model


def leave_result(setting: Setting, share: Share, profile: ClusterProfile, result: LoopResult) -> None:
    """What the run leaves behind. Collective over the active ranks."""
    assert share.members is not None and share.trainer is not None
    if share.emulation is not None:
        say(*punctuality_lines(share.members, share.emulation))
    share.members.doing = "writing the result"
    result_directory = _write_result(setting, share.trainer)
    if setting.world.rank == 0:
        _say_end(setting, share.plan, profile, result, result_directory)


def outcome(setting: Setting, profile: ClusterProfile, plan: Plan, books: Books) -> TrainResult:
    """What rank 0 knows of the end, on every rank, which keeps no device times that misled the planner. Collective over all
    ranks of the job."""
    result, world = books.result, setting.world
    found = TrainResult(
        run_dir=setting.run_dir,
        losses=tuple(books.state.losses),
        evaluations=tuple(result.evaluations),
        step_s=measured_step_s(result.steps),
        plan=plan,
        profile=profile,
        result=_result_directory(setting),
        checkpoint=result.last_checkpoint,
        skipped=result.skipped,
    )
    found = TrainResult.from_dict(world.broadcast_json(found.to_dict() if world.rank == 0 else None))
    if found.profile.source == "measured" and misled(found.step_s, found.plan.predicted_step_s):
        subject, _ = subject_of(setting)
        forget_times(device_key(world, setting.backend, subject, setting.job.profile.repeats))
    return found


def _write_result(setting: Setting, trainer: Trainer) -> Path:
    """The model or the adapter, and a sample where the job asks for one. Collective; returns the directory."""
    job, tokenizer = setting.job, setting.material.tokenizer if setting.material is not None else None
    directory = _result_directory(setting)
    if setting.tuning.full:
        save_model(trainer, directory, job.output.shard_bytes, tokenizer)
    else:
        save_adapter(trainer, directory, _base_model(setting), tokenizer)
    write_sample(trainer, setting.loaded, tokenizer, setting.run_dir)
    return directory


def _result_directory(setting: Setting) -> Path:
    return setting.run_dir / ("model" if setting.tuning.full else "adapter")


def _base_model(setting: Setting) -> str | None:
    """What an adapter is said to belong to: the hub id where the job gives one, which travels, else the directory."""
    path = setting.job.model.path
    if path is not None and is_hub_id(path, setting.loaded.resolve(path)):
        return path
    directory = model_directory(setting.loaded)
    return str(directory) if directory is not None else None


def _say_end(setting: Setting, plan: Plan, profile: ClusterProfile, result: LoopResult, result_directory: Path) -> None:
    assert setting.material is not None
    written = {result_directory.name: result_directory}
    if result.last_checkpoint is not None:
        written["checkpoint"] = result.last_checkpoint
    written |= files_of(setting) | {"metrics": setting.run_dir / "metrics.jsonl", "logs": setting.run_dir / "logs"}
    entropy = setting.material.dataset.unigram_entropy()
    changes = setting.job.cluster.speed_changes()
    say(*final_lines(plan, profile, result.steps, result.evaluations, entropy, written, changes))
    if result.skipped:
        say(f"{result.skipped} steps were skipped, since their gradients were not finite")
