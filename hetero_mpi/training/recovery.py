"""A run that outlives its ranks: where the launcher allows it (``comm.ulfm``), survivors go on in the same processes.

    attempt 1    set up | profile | plan | build | steps ...        rank 2 dies
    all others   give up what they do | meet | are numbered anew | restrict the profile to themselves
    attempt 2                       plan | build | bring the state from copies in memory | steps ...

An attempt is the whole run, as it begins; ``Past`` is what a process takes from one to the next, so that it skips what need
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetero_mpi.checkpoint import CheckpointError, CheckpointReader, newest_good
from hetero_mpi.comm import ulfm
from hetero_mpi.comm.survivors import Loss, settled, survivors
from hetero_mpi.comm.transport import Transport
from hetero_mpi.comm.world import CollectiveUserError, World
from hetero_mpi.data.documents import matching_files
from hetero_mpi.errors import UserError
from hetero_mpi.job import LoadedJob
from hetero_mpi.launch.journal import append_event
from hetero_mpi.model.hub import is_hub_id
from hetero_mpi.planning.changes import restricted
from hetero_mpi.planning.files import profile_from_dict, profile_to_dict
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.report import units
from hetero_mpi.report.logs import say
from hetero_mpi.report.tables import plan_lines
from hetero_mpi.training.buddy import Buddies
from hetero_mpi.training.changing import Share, build_share, hand_over
from hetero_mpi.training.copies import Copies, newest_whole
from hetero_mpi.training.loop import Books
from hetero_mpi.training.material import prepare
from hetero_mpi.training.planned import Given, obtain_plan
from hetero_mpi.training.redistribute import deliveries, parcels
from hetero_mpi.training.request import micro_batch_choices, request_of
from hetero_mpi.training.saving import KINDS
from hetero_mpi.training.setup import Setting
from hetero_mpi.training.trainer import Trainer

_LOG = logging.getLogger(__name__)


@dataclass
class Past:
    """What this process has from earlier attempts. What some ranks have and others lack counts as not there (``shared``)."""

    losses: list[Loss] = field(default_factory=list)
    noticed_s: float = 0.0
    """When the last death was noticed, by ``time.perf_counter``."""
    job: tuple[LoadedJob, Path] | None = None
    """The job and the run directory."""
    setting: Setting | None = None
    fingerprint: str | None = None
    """Of the data that the first leader read."""
    token: str | None = None
    """What checkpoints of this run, and no others, bear; None: without fault tolerance."""
    profile: ClusterProfile | None = None
    """Of the ranks as they are numbered now."""
    profiled_ranks: int = 0
    """Ranks when it was made: the micro-batches that were measured follow from it."""
    books: Books | None = None
    copies: Copies = field(default_factory=Copies)
    told: bool = True
    """Has the first step since the last death been told?"""
    gone: str = ""
    """Who died last, in words."""
    launched_as: tuple[int, ...] = ()
    """Each rank's number at the start of the job."""

    def shared(self, world: World, thing: object) -> bool:
        """Do all ranks have ``thing`` from an earlier attempt? Collective."""
        return bool(self.losses) and all(world.all_gather_json(thing is not None))

    def lost(self, loss: Loss) -> None:
        """Ranks have died."""
        self.launched_as = self.launched_as or tuple(range(len(loss.before) + len(loss.gone)))
        self.gone = ", ".join(
            f"rank {rank} on {host}{_aside(rank, self.launched_as[rank], 'launched as')}" for rank, host in loss.gone
        )
        self.launched_as = tuple(self.launched_as[old] for old in loss.before)
        self.losses.append(loss)
        self.noticed_s, self.told = time.perf_counter(), False
        if self.profile is not None:
            self.profile = restricted(self.profile, loss.before)


def outlive(world: World, attempt: Callable[[Past], int]) -> int:
    """Make attempts until one comes to its end on every rank that is left, well or with an error that all share. Collective;
    returns what the attempt returned.

    Raises:
        CollectiveUserError: what the attempt ended with, on all ranks.
    """
    past = Past()
    if not ulfm.active():
        return attempt(past)
    while True:
        problem: CollectiveUserError | None = None
        code, well, noticed_s = 0, True, 0.0
        try:
            code = attempt(past)
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
        past.lost(survivors(world, _may_lead(past)))
        past.noticed_s = noticed_s
    if problem is not None:
        raise problem
    return code


def _may_lead(past: Past) -> bool:
    """Could this rank read the data and write the run directory, as far as that can be seen at a glance?"""
    if past.job is None or (past.setting is not None and past.setting.material is not None):
        return True
    loaded, run_dir = past.job
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


def tell(world: World, past: Past, run_dir: Path) -> None:
    """Who has died, and who goes on."""
    for loss in past.losses[-1:]:
        going = ", ".join(f"{new}{_aside(new, old, 'was')}" for new, old in enumerate(loss.before))
        text = (
            f"Died: {past.gone or 'nobody after all'}. Going on without: "
            f"{world.size} rank{'s' if world.size > 1 else ''}, numbered {going}"
        )
        say(text)
        if world.rank == 0:
            append_event(run_dir, "ranks-lost", text, ranks=[rank for rank, _ in loss.gone], left=world.size)


def _aside(number: int, other: int, word: str) -> str:
    return f" ({word} {other})" if number != other else ""


def remember(past: Past, setting: Setting) -> None:
    """What later attempts need of a setting that has just been made. Collective."""
    if ulfm.active():
        material = setting.material
        own = [material.dataset.fingerprint(), secrets.token_hex(8)] if material is not None else None
        past.fingerprint, past.token = setting.world.broadcast_json(own)
    past.setting = setting


def renewed(past: Past, world: World, transport: Transport) -> Setting:
    """The setting of an earlier attempt, for the ranks that are left. Collective.

    Raises:
        CollectiveUserError: the first rank led not before, and cannot read the data, or reads other data.
    """
    assert past.setting is not None
    material = past.setting.material
    fingerprint = next((f for f in world.all_gather_json(past.fingerprint) if f is not None), None)
    with world.led("preparing the data"):
        if world.rank == 0 and material is None:
            who = f"The rank that led has died, and the first of those that are left, on {world.host}, cannot take its place"
            remedy = "start again with --resume where the data and the run directory can be read"
            try:
                material = prepare(past.setting.loaded)
            except (UserError, OSError) as error:
                raise UserError(f"{who}: {error}; {remedy}") from None
            if fingerprint is not None and material.dataset.fingerprint() != fingerprint:
                raise UserError(f"{who}: it reads other data under the same names; {remedy}")
    past.fingerprint = fingerprint
    return replace(past.setting, world=world, transport=transport, material=material if world.rank == 0 else None)


def known_profile(past: Past, world: World) -> ClusterProfile | None:
    """The profile of an earlier attempt, if any rank has it. Collective."""
    if not past.losses:
        return None
    having = [rank for rank, has in enumerate(world.all_gather_json(past.profile is not None)) if has]
    if not having:
        return None
    own = [profile_to_dict(past.profile), past.profiled_ranks] if past.profile is not None else None
    shared = world.broadcast_json(own, root=having[0])
    past.profile, past.profiled_ranks = profile_from_dict(shared[0]), int(shared[1])
    return past.profile


def plan_again(setting: Setting, past: Past, profile: ClusterProfile) -> Plan:
    """A plan for the ranks that are left, from the profile they have. Collective.

    Raises:
        CollectiveUserError: the model does not fit into their memory.
    """
    job, dropout = setting.job, setting.tuning.uses_dropout(setting.chain)
    choices, _ = micro_batch_choices(job.train.global_batch, job.train.micro_batch, past.profiled_ranks, dropout)
    request = replace(request_of(setting.loaded, choices), sequence_length=profile.model.sequence_length)
    plan, _ = obtain_plan(setting.world, profile, request, setting.run_dir, Given(None, None))
    say(*plan_lines(plan, profile))
    return plan


@dataclass(frozen=True)
class Origin:
    """Where an attempt after a death begins."""

    step: int
    having: dict[int, tuple[int, ...]] | None = None
    """Item -> the ranks that have copies of it in memory."""
    checkpoint: Path | None = None


def origin(setting: Setting, past: Past) -> Origin | None:
    """The newest state of the run that is left: copies in memory, or a checkpoint where that is newer; None: there is none.

    Collective over all ranks.
    """
    if not past.losses:
        return None
    world, tuning = setting.world, setting.tuning
    needed = {spec.item for spec in (*tuning.trainable.values(), *tuning.constants.values())}
    found = newest_whole(world.all_gather_json(past.copies.inventory()), needed)
    saved: list[Any] | None = None
    if world.rank == 0:
        checkpoint = _checkpoint_of_this_run(setting.run_dir / "checkpoints", past.token)
        saved = [str(checkpoint[0]), checkpoint[1]] if checkpoint is not None else None
    saved = world.broadcast_json(saved)
    if saved is not None and (found is None or saved[1] > found[0]):
        return Origin(int(saved[1]), checkpoint=Path(saved[0]))
    return Origin(found[0], having=found[1]) if found is not None else None


def _checkpoint_of_this_run(directory: Path, token: str | None) -> tuple[Path, int] | None:
    """(path, step) of the newest whole checkpoint. A rank that has come to lead may find some of another run on its disk: this
    run's bear its token."""
    path, _ = newest_good(directory)
    if path is None or token is None:
        return None
    try:
        with CheckpointReader(path) as reader:
            return (path, int(reader.metadata["step"])) if reader.metadata.get("run") == token else None
    except CheckpointError:
        return None


def bring_back(setting: Setting, past: Past, profile: ClusterProfile, plan: Plan, begin: Origin) -> tuple[Share, Books]:
    """This rank's share of the new plan, with the state of ``begin``, from copies in memory. Collective over all ranks."""
    assert begin.having is not None
    world, having, step = setting.world, begin.having, begin.step
    tuning = setting.tuning
    item = {spec.name: spec.item for spec in (*tuning.trainable.values(), *tuning.constants.values())}
    first = min(rank for ranks in having.values() for rank in ranks)
    own_books = past.copies.books(step) if world.rank == first else None
    books = Books.from_dict(world.broadcast_json(own_books, root=first))
    if past.books is not None:  # what was told of earlier steps
        books.result.steps = [line for line in past.books.result.steps if line.step <= step]
        books.result.evaluations = [line for line in past.books.result.evaluations if line.step <= step]
    share = build_share(setting, profile, plan)
    listed = deliveries(parcels(tuning, plan, KINDS), lambda parcel: having[item[parcel.name]])
    received = hand_over(setting, share, listed, lambda parcel: past.copies.tensor(step, parcel), books)
    _LOG.info("the state after step %d is back; %d bytes received", step, received)
    say(f"Going on after step {step}, from copies in memory")
    return share, books


@contextlib.contextmanager
def beside_steps(setting: Setting, past: Past, trainer: Trainer, books: Books) -> Iterator[Callable[[], None]]:
    """What makes a run that may lose ranks ready for it, while steps are taken: to be called after each. Collective over the
    active ranks."""
    every = setting.job.checkpoint.buddy_every
    if not ulfm.active() or every == 0:
        yield lambda: _tell_first_step(setting, past, books.state.step)
        return
    with Buddies(trainer, past.copies, every if isinstance(every, int) else None) as buddies:
        buddies.begin(books)

        def after() -> None:
            _tell_first_step(setting, past, books.state.step)
            buddies.after(books)

        yield after


def _tell_first_step(setting: Setting, past: Past, step: int) -> None:
    """How long the run stood still, if this is the first step since a death."""
    if not past.told:
        past.told = True
        seconds = time.perf_counter() - past.noticed_s
        text = f"step {step}: the first one since the death, {units.seconds(seconds)} after it was noticed"
        say(text)
        if setting.world.rank == 0:
            append_event(setting.run_dir, "recovered", text, step=step, seconds=round(seconds, 3))
