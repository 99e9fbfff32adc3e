"""Obtain the cluster's profile (load, reuse or measure it) and the plan (the user's or the planner's)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetero_mpi.emulation.emulated_cluster import emulated_profile
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.job.plan_request import (
    build_plan_request,
    limit_to_timed,
    micro_batch_choices,
    timed_micro_batches,
    with_memory_budget,
)
from hetero_mpi.model.group.refusals import require_divisible
from hetero_mpi.model.host_weights import large_files_folder
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.planning.dry_run import validate
from hetero_mpi.planning.schedule import schedule_of
from hetero_mpi.planning.types.cluster_changes import with_wire
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.profile import MEASURED, ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import (
    load_plan,
    load_profile,
    plan_to_dict,
    profile_from_dict,
    profile_to_dict,
    report_from_dict,
    save_plan,
    save_profile,
)
from hetero_mpi.profiling.benchmark_spec import BenchmarkSpec
from hetero_mpi.profiling.cluster import profile_cluster, profile_key
from hetero_mpi.report.plan_text import plan_lines, planned_lines
from hetero_mpi.report.profile_text import measured_lines, profile_lines
from hetero_mpi.rundir.logs import note, say
from hetero_mpi.state.peer_replicas import versions_in_memory
from hetero_mpi.training.setup.context import Pending, RunContext, TrainOptions
from hetero_mpi.util import units
from hetero_mpi.util.background import warn_on_failure
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.shipped import profile_file


def subject_of(context: RunContext) -> tuple[BenchmarkSpec, str]:
    """Return what to profile, and a text on why the planner may choose from certain micro-batch sizes."""
    job = context.job
    dropout = context.tuning.uses_dropout(context.chain)
    micro_batch_settings = job.train.global_batch, job.train.micro_batch, context.world.size, dropout
    reason = micro_batch_choices(*micro_batch_settings)[1]
    subject = BenchmarkSpec(
        context.chain,
        context.tuning,
        job.train,
        job.data.sequence_length,
        timed_micro_batches(*micro_batch_settings),
        context.cores,
        context.threads,
        job.cluster.memory_bytes,
        job.plan.tensor_parallel and job.plan.schedule == "auto" and _can_sum_in_groups(context),
        None if job.plan.offload is False or context.tuning.full else stream_folder(context),
        context.compiled,
    )
    return subject, reason


def stream_folder(context: RunContext) -> Path:
    """Return the folder for the frozen weights of this rank's offloaded stages."""
    return cache_root(context) or large_files_folder()


def cache_root(context: RunContext) -> Path | None:
    """Return the folder of the job's shard cache; None if it has none."""
    cache = context.job.model.shard_cache
    return context.loaded.resolve(cache) if cache is not None else None


def planning_request(context: RunContext, profile: ClusterProfile, ranks: int = 0) -> PlanRequest:
    """Build the request to the planner. ``ranks``: number of ranks at the time of profiling; 0 for the current number."""
    versions = versions_in_memory(context.job.checkpoint.replicate_every)
    dropout = context.tuning.uses_dropout(context.chain)
    request = build_plan_request(context.loaded, ranks or context.world.size, dropout, versions)
    groups = request.groups and _can_sum_in_groups(context)
    request = replace(request, sequence_length=profile.model.sequence_length, groups=groups)
    return limit_to_timed(request, profile)


def _can_sum_in_groups(context: RunContext) -> bool:
    """Whether the ranks of tensor-parallel groups may call MPI while the communication thread does."""
    return not context.job.cluster.communication_thread or context.world.thread_level == "multiple"


@dataclass(frozen=True)
class Profiled:
    profile: ClusterProfile
    is_measured_here: bool
    """Whether the profile was measured on exactly these ranks."""
    micro_batches: str
    """Text on why the planner may choose from certain micro-batch sizes."""


@dataclass(frozen=True)
class Planned(Profiled):
    """A profile and the plan made for it, before calibration."""

    report: PlanReport
    planning_s: float
    """Time that planning took, in seconds."""


def obtain_profile(context: RunContext, options: TrainOptions, pending: Pending) -> Profiled:
    """Measure or read the profile, and print it completely or in summary. Collective."""
    world = context.world
    subject, reason = subject_of(context)
    if context.job.cluster.emulate is not None:
        profile = emulated_profile(world, context.loaded, language(context.chain), context.tuning)
        keep_run_profile(context, pending, profile)
    else:
        profile = _profile_of_cluster(context, subject, options, pending)
    profile = with_wire(profile, context.job.train.wire)
    say(*(profile_lines if options.verbose or options.dry_run else measured_lines)(profile))
    measured_here = profile.source == MEASURED and profile.key == profile_key(world, context.backend, subject)
    return Profiled(profile, measured_here, reason)


def say_plan(
    context: RunContext, options: TrainOptions, profile: ClusterProfile, report: PlanReport, micro_batches: str
) -> None:
    """Print the plan completely or in summary; rank 0's log always contains the complete plan."""
    if options.verbose or options.dry_run:
        say(*plan_lines(report, profile), micro_batches)
    else:
        say(*planned_lines(report, profile, context.run_dir))
        note(*profile_lines(profile), *plan_lines(report, profile), micro_batches)


def _save_later(
    context: RunContext, pending: Pending, save: Callable[[Any, Path], None], value: Any, *paths: Path
) -> None:
    """Defer saving a file on rank 0 until the startup checks have passed; the last write to a path wins."""

    def write(path: Path) -> None:
        with warn_on_failure(f"writing {path}"):
            save(value, path)

    for path in paths if context.world.rank == 0 else ():
        pending.add(partial(write, path))


def keep_plan(context: RunContext, pending: Pending, report: PlanReport) -> None:
    """Defer saving a plan in the run directory, on rank 0, until the startup checks have passed."""
    _save_later(context, pending, save_plan, report, context.run_dir / "plan.toml")


def keep_run_profile(context: RunContext, pending: Pending, profile: ClusterProfile) -> None:
    """Save a profile in the run directory and at the job's ``save_as`` path on rank 0 once the start is accepted."""
    elsewhere = context.job.profile.save_as
    paths = [context.loaded.resolve(elsewhere)] if elsewhere else []
    _save_later(context, pending, save_profile, profile, context.run_dir / "profile.toml", *paths)


def named_profile(loaded: LoadedJob, options: TrainOptions) -> Path | ClusterProfile | None:
    """Return the profile named by the command line or the job, or None. Raises UserError if it is missing or options conflict."""
    settings, named = loaded.job.profile, options.profile
    if named is None and settings.path:
        named = loaded.profile_file(settings.path)
    elif isinstance(named, Path):
        named = profile_file(named)
    conflicts = (
        (options.reprofile, "--reprofile"),
        (settings.save_as, "save_as"),
        (loaded.job.cluster.emulate, "emulate"),
    )
    setting = next((name for is_set, name in conflicts if is_set), None)
    if named is not None and setting is not None:
        which = named if isinstance(named, Path) else "the given one"
        raise UserError(
            "profile.two_named", f"a profile is given ({which}), which {setting} excludes: omit one of the two"
        )
    return named


def _profile_of_cluster(
    context: RunContext, subject: BenchmarkSpec, options: TrainOptions, pending: Pending
) -> ClusterProfile:
    """Return the profile that the user names, else the run directory's if its key matches, else a new one. Collective.

    Measuring reuses the cached times of devices that were measured before. Raises UserError if the named profile is damaged,
    belongs to another cluster or model, or conflicts with another option.
    """
    world, settings = context.world, context.job.profile
    key = profile_key(world, context.backend, subject)
    with world.on_leader("reading the profile"):
        known_profile = _known_profile(context, subject, options, key) if world.rank == 0 else None
    profile_fields = world.broadcast_json(profile_to_dict(known_profile) if known_profile is not None else None)
    if profile_fields is None:
        profile = profile_cluster(world, context.transport, context.backend, subject, settings, say, options.reprofile)
    else:
        profile = profile_from_dict(profile_fields)
    if profile_fields is None or settings.save_as:  # with a named one there is no save_as
        keep_run_profile(context, pending, profile)
    return profile


def _known_profile(
    context: RunContext, subject: BenchmarkSpec, options: TrainOptions, key: str
) -> ClusterProfile | None:
    """Return the named profile, or the run directory's if its key matches; None to measure. Called on rank 0."""
    named, of_run = named_profile(context.loaded, options), context.run_dir / "profile.toml"
    if named is None and (options.reprofile or not context.job.profile.reuse or not of_run.exists()):
        return None
    label = "the given profile" if isinstance(named, ClusterProfile) else str(named or of_run)
    try:
        profile = named if isinstance(named, ClusterProfile) else load_profile(label)
    except UserError as error:
        if named is not None:
            raise
        say(f"{str(error).splitlines()[0]}; measuring again")
        return None
    if named is not None:  # the key of an edited profile does not describe its content
        _check_fits(profile, label, subject, context.world.size)
    if profile.key == key:
        say(f"Profile: {label} (measured {profile.date}, same devices, model and versions)")
        return profile
    if named is None:
        return None
    say(f"Profile: {label} ({profile.source}, {profile.date}; not measured on exactly these ranks)")
    return with_memory_budget(profile, subject.memory_bytes)


def obtain_plan(
    context: RunContext,
    profile: ClusterProfile,
    request: PlanRequest,
    pending: Pending,
    user_plan: Path | Plan | None = None,
) -> PlanReport:
    """Return the completed ``user_plan`` or the planner's plan, after a dry run of its schedule. Collective.

    Only rank 0 uses ``user_plan``. Raises UserError if it does not suit the job, or if no plan fits the memory budgets.
    """
    report: PlanReport | None = None
    world = context.world
    with world.on_leader("planning"):
        if world.rank == 0:
            from hetero_mpi.planning.decision.planner import make_plan  # 50 modules that no other rank needs

            report = _given_plan(context, user_plan, profile, request) if user_plan is not None else None
            report = report or make_plan(profile, request)
            validate(schedule_of(report.plan, profile.model), report.plan, profile.model)
            keep_plan(context, pending, report)
    return report_from_dict(world.broadcast_json(plan_to_dict(report) if report is not None else None))


def _given_plan(
    context: RunContext, user_plan: Path | Plan, profile: ClusterProfile, request: PlanRequest
) -> PlanReport:
    from hetero_mpi.planning.decision.planner import complete_plan
    from hetero_mpi.planning.decision.rules import difference_lines

    plan = user_plan if isinstance(user_plan, Plan) else load_plan(user_plan)
    try:
        if profile.model.heads is None:  # no shares would do: the reason is a setting of the job, or the model
            require_divisible(context.chain, context.tuning, plan)
        report = complete_plan(plan, profile, request)
    except UserError as error:
        which = "the given plan" if isinstance(user_plan, Plan) else user_plan
        raise UserError(
            "plan.other_job",
            f"{which} does not fit this job on these ranks:\n{error}\nCorrect it, or omit it (--plan) to plan again",
        ) from None
    say(*difference_lines(plan, request))
    return report


def _check_fits(profile: ClusterProfile, path: str, subject: BenchmarkSpec, ranks: int) -> None:
    """Raise UserError if the user's profile was made for another model or another number of ranks."""
    if len(profile.devices) != ranks:
        profile_ranks = units.plural(len(profile.devices), "rank")
        text = f"{path} describes {profile_ranks}, this job has {ranks}: start {profile_ranks}, or omit the profile to measure"
        raise UserError("profile.ranks", text)
    kinds = tuple(layer.kind for layer in profile.model.layers)
    parameters = sum(layer.trainable_parameters for layer in profile.model.layers)
    trained_parameters = sum(spec.count for spec in subject.tuning.specs(0, subject.chain.layer_count))
    if kinds != subject.chain.kinds or parameters != trained_parameters:
        raise UserError(
            "profile.other_model",
            f"{path} was made for {parameters:,} trained parameters in {len(kinds)} layers, this job trains "
            f"{trained_parameters:,} in {subject.chain.layer_count}: use another profile, or omit the profile to measure again",
        )
    if (profile.model.dtype, profile.model.sequence_length) != (subject.train.dtype, subject.sequence_length):
        raise UserError(
            "profile.other_model",
            f"{path} was made for {profile.model.dtype} and {profile.model.sequence_length} tokens per sequence, this job has "
            f"{subject.train.dtype} and {subject.sequence_length}: omit the profile to measure again",
        )
    if profile.model.optimizer != subject.tuning.optimizer:
        raise UserError(
            "profile.other_model",
            f"{path} was made for [train] optimizer = {profile.model.optimizer!r}, this job has {subject.train.optimizer!r}: omit "
            f"the profile to measure again",
        )
