"""Data shared by the parts of a run: options, context, a rank's share of one plan, and pending writes. No heavy imports."""

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
    """The options of ``train``, from the command line or a Python program."""

    job: Path | LoadedJob
    overrides: tuple[str, ...] = ()
    run_dir: str | None = None
    resume: str | None = None
    plan: Path | Plan | None = None
    profile: Path | ClusterProfile | None = None
    dry_run: bool = False
    reprofile: bool = False
    verbose: bool = False
    """Say all of the profile and the plan, with the reasons."""


@dataclass(frozen=True)
class RunContext:
    """The facts that every rank knows while the run lasts, whatever the plan. Never changed."""

    world: World
    transport: Transport
    loaded: LoadedJob
    run_dir: Path
    material: Material | None
    """On rank 0 only."""
    chain: LayerChain
    tuning: Tuning
    backend: Backend
    cores: float
    """CPU cores this rank can count on; below 1 where ranks share cores."""
    threads: int
    planned_for: ClusterProfile | None = None
    """The profile of the present ranks, measured or emulated, that plans are made for; None: not known yet."""
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
        """On rank 0 only."""
        return self.material.dataset if self.material is not None else None


@dataclass
class Share:
    """A rank's part of the run while one plan lasts: the plan, its schedule, the active ranks, and the trainer."""

    report: PlanReport
    """The plan with its predictions."""
    schedule: Schedule
    emulation: Emulation | None
    members: World | None
    """The active ranks; None on an idle one."""
    trainer: Trainer | None = None
    """None on an idle rank, before its stage is built, and once the plan has been given up."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the change to this plan, by part: ``keep``, ``build``, ``move``; at the start only ``build``."""

    @property
    def plan(self) -> Plan:
        """The plan as the planner made it. In an emulated run it differs from ``own_plan``."""
        return self.report.plan

    @property
    def own_plan(self) -> Plan:
        return self.emulation.stand_in_plan if self.emulation is not None else self.plan

    def release_trainer(self) -> None:
        """Free the trainer's memory. No step follows under this plan."""
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = None


Write = Callable[[], object]


class Pending:
    """The writes of this rank, in their order."""

    def __init__(self) -> None:
        self._writes: list[Write] = []

    def add(self, write: Write) -> None:
        self._writes.append(write)

    def add_first(self, write: Write) -> None:
        """Add a write that makes room for the others."""
        self._writes.insert(0, write)

    def carry_out(self) -> None:
        """The start is accepted: carry out all writes, once. Raises UserError: as they do."""
        write_waiting_logs()
        writes, self._writes = self._writes, []
        for write in writes:
            write()
