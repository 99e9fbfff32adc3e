"""Data that the parts of a run share: options, context, a rank's share of a plan, and pending writes. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_mpi.rundir.logs import write_waiting_logs

if TYPE_CHECKING:
    from hetero_mpi.comm.ranks.world import World
    from hetero_mpi.comm.transport import Transport
    from hetero_mpi.data.dataset import DataSource
    from hetero_mpi.device.backend import Backend
    from hetero_mpi.emulation.emulated_cluster import Emulation
    from hetero_mpi.engine.trainer import Trainer
    from hetero_mpi.job.load import LoadedJob
    from hetero_mpi.job.schema import JobConfig
    from hetero_mpi.model.layer.interface import LayerChain
    from hetero_mpi.model.tuning import Tuning
    from hetero_mpi.planning.schedule import Schedule
    from hetero_mpi.planning.types.plan import Plan, PlanReport
    from hetero_mpi.planning.types.profile import ClusterProfile
    from hetero_mpi.training.setup.data_setup import Material


@dataclass(frozen=True)
class TrainOptions:
    """Options of ``train`` from the command line or a Python program."""

    job: Path | LoadedJob
    overrides: tuple[str, ...] = ()
    run_dir: str | None = None
    resume: str | None = None
    plan: Path | Plan | None = None
    profile: Path | ClusterProfile | None = None
    dry_run: bool = False
    reprofile: bool = False
    verbose: bool = False
    """Whether to print the complete profile and plan, with the reasons for the choice."""


@dataclass(frozen=True)
class RunContext:
    """Immutable facts about the run that are independent of the plan, as known to one rank."""

    world: World
    transport: Transport
    loaded: LoadedJob
    run_dir: Path
    material: Material | None
    """None on ranks other than 0."""
    chain: LayerChain
    tuning: Tuning
    backend: Backend
    cores: float
    """Number of CPU cores on which this rank can count; less than 1 if ranks share cores."""
    threads: int
    steps_per_epoch: float
    planned_for: ClusterProfile | None = None
    """The measured or emulated profile of the current ranks, for which plans are made; None until it is known."""
    compiled: bool = False
    """Whether blocks are compiled on this rank."""

    @property
    def profile(self) -> ClusterProfile:
        assert self.planned_for is not None, "nothing has been planned yet"
        return self.planned_for

    @property
    def job(self) -> JobConfig:
        return self.loaded.job

    @property
    def dataset(self) -> DataSource | None:
        """The training data; None on ranks other than 0."""
        return self.material.dataset if self.material is not None else None


@dataclass
class Share:
    """A rank's part in the run under one plan: the plan, its schedule, the active ranks, and the rank's trainer."""

    report: PlanReport
    schedule: Schedule
    emulation: Emulation | None
    members: World | None
    """The active ranks; None on an idle rank."""
    trainer: Trainer | None = None
    """None on an idle rank, before the stage is built, and after the trainer has been released."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that changing to this plan took, by phase: ``keep``, ``build``, ``move``; only ``build`` for the first plan."""

    @property
    def plan(self) -> Plan:
        """The plan as the planner made it; in an emulated run it differs from ``own_plan``."""
        return self.report.plan

    @property
    def own_plan(self) -> Plan:
        return self.emulation.stand_in_plan if self.emulation is not None else self.plan

    def release_trainer(self) -> None:
        """Free the trainer's memory after the last step under this plan."""
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = None


Write = Callable[[], object]


class Pending:
    """File operations of this rank that wait, in order, until the start of the run is accepted."""

    def __init__(self) -> None:
        self._writes: list[Write] = []

    def add(self, write: Write) -> None:
        self._writes.append(write)

    def add_first(self, write: Write) -> None:
        """Add a write that must precede all others, such as moving an earlier run out of the way."""
        self._writes.insert(0, write)

    def carry_out(self) -> None:
        """Carry out all pending writes, now that the start is accepted. Raises UserError if one of them does."""
        write_waiting_logs()
        writes, self._writes = self._writes, []
        for write in writes:
            write()
