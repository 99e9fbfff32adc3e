"""A run that outlives its ranks: where the launcher allows it (``comm.ranks.ulfm``), survivors go on in the same processes.

    attempt 1    set up | profile | plan | build | steps ...        rank 2 dies
    all others   give up what they do | meet | are numbered anew | restrict the profile to themselves
    attempt 2                       plan | build | bring the state from copies in memory | steps ...

An attempt is the whole run, as it begins; ``RunHistory`` is what a process takes from one to the next, so that it skips what need
not be done again. Nothing else survives: communicators, transports, trainers and threads are made anew. So deaths while
profiling, saving or recovering are no special cases.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.shrink import Loss, settled, survivors
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.data.documents import matching_files
from hetero_mpi.device.memory_kills import memory_kills, memory_kills_text
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.errors import UserError
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.launch.supervisor.event_log import append_event
from hetero_mpi.model.files.hub import is_hub_id
from hetero_mpi.planning.types.cluster_changes import restricted
from hetero_mpi.planning.types.plan_report import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import profile_from_dict, profile_to_dict
from hetero_mpi.report import units
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.tables import plan_lines
from hetero_mpi.runtime.setup.material import prepare
from hetero_mpi.runtime.setup.profile_and_plan import obtain_plan
from hetero_mpi.runtime.setup.setup import RunSetup, planning_request
from hetero_mpi.state.copies import Copies
from hetero_mpi.state.local_checkpoint import SAID, LocalCheckpoint, supervised
from hetero_mpi.state.peer_replicas import PeerReplicas
from hetero_mpi.state.redistribute import Parcel
from hetero_mpi.state.training_state import TrainingState

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass
class RunHistory:
    """What this process has from earlier attempts. What some ranks have and others lack counts as not there (``shared``)."""

    losses: list[Loss] = field(default_factory=list)
    noticed_s: float = 0.0
    """When the last death was noticed, by ``time.perf_counter``."""
    job: tuple[LoadedJob, Path] | None = None
    """The job and the run directory."""
    setup: RunSetup | None = None
    fingerprint: str | None = None
    """Of the data that the first leader read."""
    token: str | None = None
    """What checkpoints of this run, and no others, bear; None: without fault tolerance."""
    begun: str | None = None
    """Which run this is, over all its starts (``checkpoint.local_shards.new_lineage``); not known to all ranks."""
    shelved: str | None = None
    """Id of the copies on disk that stay until newer ones are whole."""
    profile: ClusterProfile | None = None
    """Of the ranks as they are numbered now."""
    profiled_ranks: int = 0
    """Ranks when it was made: the micro-batches that were measured follow from it."""
    state: TrainingState | None = None
    copies: Copies = field(default_factory=Copies)
    told: bool = True
    """Has the first step since the last death been told?"""
    gone: str = ""
    """Who died last, in words."""
    memory_kills: int = field(default_factory=memory_kills)
    """Processes that this machine's kernel had killed for lack of memory when it was last looked."""
    launched_as: tuple[int, ...] = ()
    """Each rank's number at the start of the job."""

    def shared(self, world: World, thing: object) -> bool:
        """Do all ranks have ``thing`` from an earlier attempt? Collective."""
        return bool(self.losses) and all(world.all_gather_json(thing is not None))

    def lost(self, loss: Loss, noticed_s: float) -> None:
        """Ranks have died, which was noticed then (``time.perf_counter``)."""
        self.launched_as = self.launched_as or tuple(range(len(loss.before) + len(loss.gone)))
        self.gone = ", ".join(
            f"rank {rank} on {host}{_aside(rank, self.launched_as[rank], 'launched as')}" for rank, host in loss.gone
        )
        self.launched_as = tuple(self.launched_as[old] for old in loss.before)
        self.losses.append(loss)
        self.noticed_s, self.told = noticed_s, False
        if self.profile is not None:
            self.profile = restricted(self.profile, loss.before)

    def job_of(self, world: World, read: Callable[[], tuple[LoadedJob, Path]]) -> tuple[LoadedJob, Path]:
        """The job and the run directory: known, or read now. Collective."""
        known = self.shared(world, self.job)
        self.job = self.job if known and self.job is not None else read()
        return self.job

    def setup_of(self, world: World, transport: Transport, make: Callable[[], RunSetup]) -> RunSetup:
        """The set-up of an earlier attempt, renewed for the ranks that are left, or one that is made now. Collective.

        Raises:
            CollectiveUserError: as ``make``; or the first rank led not before, and cannot read the data, or reads other data.
        """
        if self.shared(world, self.setup) and self.setup is not None:
            return self._renewed(self.setup, world, transport)
        setup = make()
        if ulfm.active():
            material = setup.material
            own = [material.dataset.fingerprint(), secrets.token_hex(8)] if material is not None else None
            self.fingerprint, self.token = world.broadcast_json(own)
        self.setup = setup
        return setup

    def measured(self, profile: ClusterProfile, ranks: int) -> None:
        """The profile that this attempt's plans are made for, of so many ranks."""
        self.profile, self.profiled_ranks = profile, ranks

    def stands_at(self, state: TrainingState) -> None:
        """Where the run stands, and will be kept up to date by its steps."""
        self.state = state

    def belongs_to(self, begun: str | None) -> None:
        """Which run this is."""
        self.begun = begun

    def keeps_on_disk(self, shelved: str | None) -> None:
        """The copies on disk that stay until newer ones are whole."""
        self.shelved = shelved

    def known_profile(self, world: World) -> ClusterProfile | None:
        """The profile of an earlier attempt, if any rank has it. Collective."""
        if not self.losses:
            return None
        having = [rank for rank, has in enumerate(world.all_gather_json(self.profile is not None)) if has]
        if not having:
            return None
        own = [profile_to_dict(self.profile), self.profiled_ranks] if self.profile is not None else None
        shared = world.broadcast_json(own, root=having[0])
        self.profile, self.profiled_ranks = profile_from_dict(shared[0]), int(shared[1])
        return self.profile

    def tell_loss(self, world: World, run_dir: Path) -> None:
        """Who has died, where the kernel has killed for lack of memory, and who goes on. Collective."""
        for loss in self.losses[-1:]:
            now = memory_kills()
            killed = dict(zip(world.hosts, world.all_gather_json(now - self.memory_kills), strict=True))
            self.memory_kills = now
            where = memory_kills_text({host: killed.get(host, 0) for _, host in loss.gone})
            going = ", ".join(f"{new}{_aside(new, old, 'was')}" for new, old in enumerate(loss.before))
            text = (
                f"Died: {self.gone or 'nobody after all'}. Going on without: "
                f"{world.size} rank{'s' if world.size > 1 else ''}, numbered {going}"
            )
            if where:
                text += f". {where[0].upper()}{where[1:]}"
            say(text)
            if world.rank == 0:
                append_event(run_dir, "ranks-lost", text, ranks=[rank for rank, _ in loss.gone], left=world.size)

    def tell_first_step(self, setup: RunSetup, step: int) -> None:
        """How long the run stood still, if this is the first step since a death."""
        if not self.told:
            self.told = True
            seconds = time.perf_counter() - self.noticed_s
            text = f"step {step}: the first one since the death, {units.seconds(seconds)} after it was noticed"
            say(text)
            if setup.world.rank == 0:
                append_event(setup.run_dir, "recovered", text, step=step, seconds=round(seconds, 3))

    def _renewed(self, setup: RunSetup, world: World, transport: Transport) -> RunSetup:
        material = setup.material
        fingerprint = next((f for f in world.all_gather_json(self.fingerprint) if f is not None), None)
        with world.led("preparing the data"):
            if world.rank == 0 and material is None:
                who = f"The rank that led has died, and the first of those that are left, on {world.host}, cannot take its place"
                remedy = "start again with --resume where the data and the run directory can be read"
                try:
                    material = prepare(setup.loaded)
                except (UserError, OSError) as error:
                    raise UserError(f"{who}: {error}; {remedy}") from None
                if fingerprint is not None and material.dataset.fingerprint() != fingerprint:
                    raise UserError(f"{who}: it reads other data under the same names; {remedy}")
        self.fingerprint = fingerprint
        return replace(setup, world=world, transport=transport, material=material if world.rank == 0 else None)


def outlive(world: World, attempt: Callable[[RunHistory], _T]) -> _T:
    """Make attempts until one comes to its end on every rank that is left, well or with an error that all share. Collective;
    returns what the attempt returned.

    Raises:
        CollectiveUserError: what the attempt ended with, on all ranks.
    """
    history = RunHistory()
    if not ulfm.active():
        return attempt(history)
    while True:
        problem: CollectiveUserError | None = None
        ended: list[_T] = []
        well, noticed_s = True, 0.0
        try:
            ended.append(attempt(history))
        except CollectiveUserError as error:
            problem = error
        except ulfm.RankLost as error:
            well = False
            _LOG.warning("while %s: %s", world.doing, error)
        noticed_s = time.perf_counter()
        if settled(world, well):
            break
        world.doing = "recovering from a death"
        gc.collect()  # modules and hooks of the attempt refer to each other
        history.lost(survivors(world, _may_lead(history)), noticed_s)
    if problem is not None:
        raise problem
    return ended[0]


def _may_lead(history: RunHistory) -> bool:
    """Could this rank read the data and write the run directory, as far as that can be seen at a glance?"""
    if history.job is None or (history.setup is not None and history.setup.material is not None):
        return True
    loaded, run_dir = history.job
    job = loaded.job
    named = [(text, loaded.resolve(text)) for text in (job.model.path, job.tokenizer.path) if text is not None]
    existing = next(directory for directory in (run_dir, *run_dir.parents) if directory.exists())
    try:
        for patterns in (loaded.text_patterns(), loaded.record_patterns(), loaded.evaluation_patterns()):
            if patterns:
                matching_files("data", patterns)
    except (UserError, OSError):
        return False
    return os.access(existing, os.W_OK) and all(path.exists() or is_hub_id(text, path) for text, path in named)


def _aside(number: int, other: int, word: str) -> str:
    return f" ({word} {other})" if number != other else ""


def plan_again(setup: RunSetup, history: RunHistory, profile: ClusterProfile) -> PlanReport:
    """A plan for the ranks that are left, from the profile they have. Collective.

    Raises:
        CollectiveUserError: the model does not fit into their memory.
    """
    # Every rank waits for it.
    request = replace(planning_request(setup, profile, history.profiled_ranks), thorough=False)
    report = obtain_plan(setup.world, profile, request, setup.run_dir, None)
    say(*plan_lines(report, profile))
    return report


@contextlib.contextmanager
def beside_steps(
    setup: RunSetup, history: RunHistory, trainer: Trainer, state: TrainingState, described: dict[str, Any]
) -> Iterator[Callable[[], None]]:
    """What makes a run that may lose ranks or machines ready for it, while steps are taken: to be called after each. Collective
    over the active ranks.

    Args:
        described: what every checkpoint carries besides tensors; used on rank 0.
    """
    every, world = setup.job.checkpoint.replicate_every, trainer.world
    if not (ulfm.active() or supervised()) or every == 0:
        yield lambda: history.tell_first_step(setup, state.step)
        return
    shelf: Callable[[Sequence[Parcel]], LocalCheckpoint] | None = None
    if supervised():
        said = world.broadcast_json({key: described[key] for key in SAID if key in described})
        history.belongs_to(said["begun"])
        shelf = partial(LocalCheckpoint, world, setup.run_dir, said, kept=history.shelved)
    threaded = setup.job.cluster.communication_thread and world.thread_level == "multiple"
    fixed = every if isinstance(every, int) else None
    with PeerReplicas(trainer, history.copies, fixed, threaded, shelf, setup.run_dir) as peers:
        peers.begin(state)

        def after() -> None:
            history.tell_first_step(setup, state.step)
            peers.after(state)

        yield after
