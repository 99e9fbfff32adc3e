"""Recovery from lost ranks: if the launcher supports it (``comm.ranks.ulfm``), the remaining processes continue the run.

    attempt 1    set up | profile | plan | build | steps ...        rank 2 is lost
    remaining    abort the attempt | shrink the communicator | renumber ranks | restrict the profile
    attempt 2                       plan | build | load the state from copies in memory | steps ...

An *attempt* executes the run from its start. ``RunHistory`` carries finished work to the next attempt, while communicators,
transports, trainers and threads are recreated. Losses during profiling, saving or recovery therefore need no special code.
"""

import contextlib
import gc
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.mpi_start import LostRanks, all_ranks_succeeded, shrink_to_survivors
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.data.source_files import matching_files
from hetero_mpi.device.shortage import memory_kills, memory_kills_text
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.model.files.hub import is_hub_id
from hetero_mpi.planning.types.cluster_changes import restricted
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import profile_from_dict, profile_to_dict
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import append_event
from hetero_mpi.state.directory import supervised
from hetero_mpi.state.peer_replicas import PeerReplicas
from hetero_mpi.state.saving import Snapshots
from hetero_mpi.state.state import ShardWriter, State
from hetero_mpi.training.setup.context import RunContext
from hetero_mpi.training.setup.data_setup import prepare
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass
class RunHistory:
    """Results of earlier attempts in this process, used only where all ranks have them (``all_ranks_have``)."""

    losses: list[LostRanks] = field(default_factory=list)
    noticed_s: float = 0.0
    """Time (``time.perf_counter``) at which the last loss was detected."""
    job: tuple[LoadedJob, Path] | None = None
    """The job and the run directory."""
    context: RunContext | None = None
    fingerprint: str | None = None
    """Fingerprint of the data that the first attempt read."""
    token: str | None = None
    """Random id in all checkpoints of this run; None if the run cannot recover from lost ranks."""
    run_id: str | None = None
    """Id of this run, which restarts keep (``state.state.new_run_id``); None until the initial state has been chosen."""
    kept_version: str | None = None
    """Id of the version on disk to keep until a newer one is complete."""
    profile: ClusterProfile | None = None
    """Profile of the current ranks, in the order of their current numbers."""
    profiled_ranks: int = 0
    """Number of ranks at the time of profiling, which determines the micro-batch sizes that were measured."""
    state: State | None = None
    """The training state, which the steps update."""
    versions: list[State] = field(default_factory=list)
    """Copies of the trained state in this process's memory, oldest first."""
    recovery_reported: bool = True
    """Whether the first step since the last loss has been reported."""
    lost_ranks_text: str = ""
    """Description of the ranks that were lost last."""
    memory_kills: int = field(default_factory=memory_kills)
    """Most recent count of out-of-memory kills by this machine's kernel."""
    launched_as: tuple[int, ...] = ()
    """Original number of each current rank; empty before the first loss."""

    def resume_text(self) -> str:
        """Explain how to continue a run that ends before its last step; "" if no step can have been taken."""
        if self.state is None or self.job is None:
            return ""
        return f"`train --resume any` continues from the newest state in {self.job[1]}, or from the beginning if there is none"

    def all_ranks_have(self, world: World, value: object) -> bool:
        """Whether all ranks have ``value`` from an earlier attempt. Collective."""
        return bool(self.losses) and all(world.all_gather_json(value is not None))

    def record_loss(self, loss: LostRanks, noticed_s: float) -> None:
        """Record lost ranks. ``noticed_s``: time (``time.perf_counter``) at which the loss was detected."""
        self.launched_as = self.launched_as or tuple(range(len(loss.old_ranks) + len(loss.gone)))
        self.lost_ranks_text = ", ".join(
            f"rank {rank} on {host}{_numbered(rank, self.launched_as[rank], 'launched as')}" for rank, host in loss.gone
        )
        self.launched_as = tuple(self.launched_as[old] for old in loss.old_ranks)
        self.losses.append(loss)
        self.noticed_s, self.recovery_reported = noticed_s, False
        if self.profile is not None:
            self.profile = restricted(self.profile, loss.old_ranks)

    def job_of(self, world: World, read: Callable[[], tuple[LoadedJob, Path]]) -> tuple[LoadedJob, Path]:
        """Return the job and the run directory from an earlier attempt, or read them. Collective."""
        from_earlier = self.all_ranks_have(world, self.job)
        self.job = self.job if from_earlier and self.job is not None else read()
        return self.job

    def context_of(self, world: World, transport: Transport, make: Callable[[], RunContext]) -> RunContext:
        """Adapt the context of an earlier attempt to the remaining ranks, or make a new one. Collective.

        Raises:
            CollectiveUserError: ``make`` fails, or the new rank 0 cannot read the data or finds different data.
        """
        if self.all_ranks_have(world, self.context) and self.context is not None:
            return self._renewed(self.context, world, transport)
        context = make()
        if ulfm.active():
            material = context.material
            identity = [material.dataset.fingerprint(), secrets.token_hex(8)] if material is not None else None
            self.fingerprint, self.token = world.broadcast_json(identity)
        self.context = context
        return context

    def known_profile(self, world: World) -> ClusterProfile | None:
        """Return the profile of an earlier attempt if any rank has it, else None. Collective."""
        if not self.losses:
            return None
        holders = [rank for rank, has in enumerate(world.all_gather_json(self.profile is not None)) if has]
        if not holders:
            return None
        profile_and_ranks = [profile_to_dict(self.profile), self.profiled_ranks] if self.profile is not None else None
        shared = world.broadcast_json(profile_and_ranks, root=holders[0])
        self.profile, self.profiled_ranks = profile_from_dict(shared[0]), int(shared[1])
        return self.profile

    def tell_loss(self, world: World, run_dir: Path) -> None:
        """Report the lost ranks, out-of-memory kills, and the remaining ranks. Collective."""
        for loss in self.losses[-1:]:
            now = memory_kills()
            killed = dict(zip(world.hosts, world.all_gather_json(now - self.memory_kills), strict=True))
            self.memory_kills = now
            kills_text = memory_kills_text({host: killed.get(host, 0) for _, host in loss.gone})
            numbering = ", ".join(f"{new}{_numbered(new, old, 'was')}" for new, old in enumerate(loss.old_ranks))
            ranks_text = f"{units.plural(world.size, 'rank')}, numbered {numbering}"
            text = f"Lost {self.lost_ranks_text}. Continuing with {ranks_text}"
            if not self.lost_ranks_text:
                text = f"MPI connections failed, but no rank was lost. Restarting with all {ranks_text}"
            if kills_text:
                text += f". {kills_text[0].upper()}{kills_text[1:]}"
            say(text)
            if world.rank == 0:
                append_event(run_dir, "ranks-lost", text, ranks=[rank for rank, _ in loss.gone], left=world.size)

    def tell_first_step(self, context: RunContext, step: int) -> None:
        """Report how long the interruption was if this is the first step since a loss."""
        if not self.recovery_reported:
            self.recovery_reported = True
            seconds = time.perf_counter() - self.noticed_s
            text = f"step {step}: first step after the loss, {units.seconds(seconds)} after its detection"
            say(text)
            if context.world.rank == 0:
                append_event(context.run_dir, "recovered", text, step=step, seconds=round(seconds, 3))

    def _renewed(self, context: RunContext, world: World, transport: Transport) -> RunContext:
        material = context.material
        fingerprint = next((f for f in world.all_gather_json(self.fingerprint) if f is not None), None)
        with world.on_leader("preparing the data"):
            if world.rank == 0 and material is None:
                who = f"Rank 0 was lost, and the first remaining rank, on {world.host}, cannot replace it"
                remedy = "restart with a rank 0 that can read the data and the run directory"
                try:
                    material = prepare(context.loaded)
                except (UserError, OSError) as error:
                    raise UserError("recovery.data_unreadable", f"{who}: {error}; {remedy}") from None
                if fingerprint is not None and material.dataset.fingerprint() != fingerprint:
                    raise UserError(
                        "recovery.data_differ", f"{who}: it reads different data under the same names; {remedy}"
                    )
        self.fingerprint = fingerprint
        return replace(context, world=world, transport=transport, material=material if world.rank == 0 else None)


def run_with_recovery(world: World, attempt: Callable[[RunHistory], _T]) -> _T:
    """Repeat attempts until one ends without losing a rank, and return its result or raise its shared error. Collective."""
    history = RunHistory()
    world.activity.resume_text = history.resume_text
    try:
        result = _attempts(world, attempt, history) if ulfm.active() else attempt(history)
    except CollectiveUserError as error:
        text = world.with_resume_hint(str(error))
        values = {"exit_code": error.exit_code, "problems": error.problems, **error.values}
        raise CollectiveUserError(error.kind, text, **values) from error.__cause__
    world.activity.resume_text = str
    if history.context is not None:
        history.context.backend.free_unused()  # a notebook keeps this process
    return result


def _attempts(world: World, attempt: Callable[[RunHistory], _T], history: RunHistory) -> _T:
    while True:
        problem: CollectiveUserError | None = None
        results: list[_T] = []
        succeeded, noticed_s = True, 0.0
        try:
            results.append(attempt(history))
        except CollectiveUserError as error:
            problem = error
        except ulfm.RankLost as error:
            succeeded = False
            _LOG.warning("while %s: %s", world.current_action, error)
        noticed_s = time.perf_counter()
        if all_ranks_succeeded(world, succeeded):
            break
        world.current_action = "recovering from a lost rank"
        gc.collect()  # modules and hooks of the attempt refer to each other
        history.record_loss(shrink_to_survivors(world, _may_lead(history)), noticed_s)
    if problem is not None:
        raise problem
    return results[0]


def _may_lead(history: RunHistory) -> bool:
    """Whether this rank can probably read the data and write the run directory, judging by paths and permissions."""
    if history.job is None or (history.context is not None and history.context.material is not None):
        return True
    loaded, run_dir = history.job
    job = loaded.job
    named = [(text, loaded.resolve(text)) for text in (job.model.path, job.tokenizer.path) if text is not None]
    existing = next(directory for directory in (run_dir, *run_dir.parents) if directory.exists())
    try:
        for patterns in (loaded.patterns("text"), loaded.patterns("records"), loaded.patterns("evaluation")):
            if patterns:
                matching_files("data", patterns)
    except (UserError, OSError):
        return False
    return os.access(existing, os.W_OK) and all(path.exists() or is_hub_id(text, path) for text, path in named)


def _numbered(number: int, old_number: int, word: str) -> str:
    return f" ({word} {old_number})" if number != old_number else ""


@contextlib.contextmanager
def replicate_state(
    context: RunContext,
    history: RunHistory,
    world: World,
    snapshots: Snapshots,
    state: State,
    checkpoint_metadata: dict[str, Any],
) -> Iterator[Callable[[], None]]:
    """Replicate the trained state if the run can recover from lost ranks or machines. Collective over the active ranks.

    Yields a function to call after each step. Only rank 0 uses ``checkpoint_metadata``.
    """
    interval = context.job.checkpoint.replicate_every
    if not (ulfm.active() or supervised()) or interval == 0:
        yield lambda: history.tell_first_step(context, state.step)
        return
    local: ShardWriter | None = None
    if supervised():
        metadata = {key: value for key, value in checkpoint_metadata.items() if key != "profile"}
        local = ShardWriter(world, context.run_dir, world.broadcast_json(metadata), history.kept_version)
    threaded = context.job.cluster.communication_thread and world.thread_level == "multiple"
    fixed_interval = interval if isinstance(interval, int) else None
    with PeerReplicas(world, snapshots, history.versions, fixed_interval, threaded, local) as peers:
        peers.make_first_version(state)

        def after_step() -> None:
            history.tell_first_step(context, state.step)
            peers.after(state)

        yield after_step
