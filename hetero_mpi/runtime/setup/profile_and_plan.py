"""The profile of the cluster (loaded, reused or measured) and the plan (given or made)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.device.backend import Backend
from hetero_mpi.errors import UserError
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.job.plan_request import with_memory
from hetero_mpi.job.rules import EIGHT_BIT
from hetero_mpi.planning.analysis.plausible import profile_doubts
from hetero_mpi.planning.dry_run import validate
from hetero_mpi.planning.schedule import schedule_of
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.plan_report import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
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
from hetero_mpi.profiling.cluster import profile_cluster, profile_key
from hetero_mpi.profiling.subject import Subject
from hetero_mpi.report.run_files.line_files import unharmed


def obtain_profile(
    world: World,
    transport: Transport,
    backend: Backend,
    loaded: LoadedJob,
    subject: Subject,
    run_dir: Path,
    given: Path | ClusterProfile | None,
    reprofile: bool,
    say: Callable[[str], None],
) -> ClusterProfile:
    """The profile: the one named by the user, else the run directory's if its key matches, else a measurement. Collective.

    A measurement reuses the cached times of devices that were measured before.

    Args:
        given: a path or profile from the command line or a Python program (rank 0's view).
        reprofile: measure everything again.

    Raises:
        UserError: the named profile is damaged or is of another cluster or model; or it is named and ``reprofile`` is set.
    """
    settings = loaded.job.profile
    named = given or (loaded.profile_file(settings.path) if settings.path else None)
    if named is not None and reprofile:
        raise CollectiveUserError(f"--reprofile measures, but {named} is to be used: leave one of them out")
    cached = named if isinstance(named, Path) else run_dir / "profile.toml"
    reuses = settings.reuse and not reprofile
    reads = given is not None or (cached.exists() and (named is not None or reuses))
    key = profile_key(world, backend, subject)
    found: ClusterProfile | None = None
    with world.led("reading the profile"):
        if world.rank == 0 and isinstance(named, ClusterProfile):
            found = _fitting(named, "the given profile", subject, world.size, True, key, say)
        elif world.rank == 0 and reads:
            found = _fitting(load_profile(cached), str(cached), subject, world.size, named is not None, key, say)
    known = world.broadcast_json(profile_to_dict(found) if found is not None else None)
    if known is not None:
        return profile_from_dict(known)
    profile = profile_cluster(world, transport, backend, subject, settings, say, reprofile)
    if world.rank == 0:
        with unharmed(cached.name):
            save_profile(profile, cached)
    return profile


def obtain_plan(
    world: World, profile: ClusterProfile, request: PlanRequest, run_dir: Path, given: Path | Plan | None
) -> PlanReport:
    """The user's plan ``given`` (rank 0's view), completed; or the planner's. Its schedule has passed a dry run. Collective.

    Raises:
        UserError: no plan fits the memory, or the given plan does not.
    """
    report: PlanReport | None = None
    with world.led("planning"):
        if world.rank == 0:
            from hetero_mpi.planning.decision.planner import make_plan  # 50 modules that no other rank needs

            if given is not None:
                report = _given_plan(given, profile, request)
            else:
                report = make_plan(profile, request)
            validate(schedule_of(report.plan, profile.model), report.plan, profile.model)
            with unharmed("plan.toml"):
                save_plan(report, run_dir / "plan.toml")
    return report_from_dict(world.broadcast_json(plan_to_dict(report) if report is not None else None))


def _given_plan(given: Path | Plan, profile: ClusterProfile, request: PlanRequest) -> PlanReport:
    from hetero_mpi.planning.decision.planner import complete_plan

    plan = given if isinstance(given, Plan) else load_plan(given)
    try:
        return complete_plan(plan, profile, request)
    except UserError as error:
        which = "the given plan" if isinstance(given, Plan) else given
        raise UserError(
            f"{which} does not fit this job on these ranks:\n{error}\nCorrect it, or leave --plan out to plan anew"
        ) from None


def _fitting(
    profile: ClusterProfile,
    path: str,
    subject: Subject,
    ranks: int,
    named: bool,
    key: str,
    say: Callable[..., None],
) -> ClusterProfile | None:
    """``profile`` if it is of this job; None if it is not, or if its times are implausible, and the user did not name it.

    Raises:
        UserError: the user named it, and it is of another model or number of ranks.
    """
    if profile.key == key and not named and profile_doubts(profile):
        say(f"Profile: {path} has implausible times: measured again", *profile_doubts(profile))
        return None
    if profile.key == key:
        say(f"Profile: {path} (measured {profile.date}, same devices, model and versions)")
        return profile
    if not named:
        return None
    if len(profile.devices) != ranks:
        raise UserError(
            f"{path} describes {len(profile.devices)} ranks, this job has {ranks}: start {len(profile.devices)} ranks, or "
            f"leave the profile out to measure"
        )
    kinds = tuple(layer.kind for layer in profile.model.layers)
    parameters = sum(layer.trainable_parameters for layer in profile.model.layers)
    own = sum(spec.count for spec in subject.tuning.trainable.values())
    if kinds != subject.chain.kinds or parameters != own:
        raise UserError(
            f"{path} was made for {parameters:,} trained parameters in {len(kinds)} layers, this job trains {own:,} in "
            f"{subject.chain.layer_count}: use a profile of this model and adapter, or leave it out to measure"
        )
    if (profile.model.dtype, profile.model.sequence_length) != (subject.train.dtype, subject.sequence_length):
        raise UserError(
            f"{path} was made for {profile.model.dtype} and {profile.model.sequence_length} tokens per sequence, this job has "
            f"{subject.train.dtype} and {subject.sequence_length}: leave the profile out to measure"
        )
    if profile.model.eight_bit != bool(subject.tuning.eight_bit):
        then = EIGHT_BIT if profile.model.eight_bit else "adamw"
        raise UserError(
            f"{path} was made for [train] optimizer = {then!r}, this job has {subject.train.optimizer!r}: leave the profile out to "
            f"measure"
        )
    say(f"Profile: {path} ({profile.source}, {profile.date}; not measured on exactly these ranks, used as you asked)")
    return with_memory(profile, subject.memory_bytes)
