"""A run as read from its directory: the input of reports and comparisons. Works during the run, and after a crash. ``anonymous``
makes of it a run that may be shown to anybody: hosts have numbers for names, paths only their last part, and no user is named.

``run.json`` holds the job with all overrides, versions, and each start with its step. ``profile.toml``, ``plan.toml``,
``metrics.jsonl``, ``steps.jsonl`` and ``events.jsonl`` hold what happened.
"""

from __future__ import annotations

import contextlib
import getpass
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from hetero_mpi.planning.schedule import Event
from hetero_mpi.planning.simulator import SimulatedStep, simulate
from hetero_mpi.planning.types.cluster_changes import with_slowness
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import load_profile, load_report
from hetero_mpi.rundir.line_files import EVENTS_NAME, METRICS_NAME, STEPS_NAME, lines, objects
from hetero_mpi.rundir.logs import write_line
from hetero_mpi.rundir.metrics import Metrics, StepMetrics, measured_step_s, read_metrics, warm_steps
from hetero_mpi.rundir.present import Present, read_present
from hetero_mpi.rundir.rank_steps import RankStep, newest_step, on_one_clock, read_rank_steps
from hetero_mpi.rundir.run_directory import RUN_NAME, SAMPLE_NAME, run_json, run_starts, run_table
from hetero_mpi.util.disk import require_regular
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.shipped import USED_PROFILE
from hetero_mpi.util.terminal import printable

_PATH = re.compile(r"""(?<![\w./~}-])~?/(?:[^\s'"`,;:()\[\]{}<>|]*/)*([^\s'"`,;:()\[\]{}<>|/]*)""")
"""An absolute path within a text, or one of a home; its last part."""
_NAMED = ("host", "hosts", "name")
"""Fields that may hold a host's name alone."""
_CHECKPOINT = re.compile(r"step-(\d{8,})\.h5")


@dataclass(frozen=True)
class Happening:
    """An event of a run: a start, a loss of machines, a change of plan."""

    unix_s: float
    event: str
    text: str
    step: int | None = None
    """Number of steps taken before it; None: not known."""
    ranks: tuple[int, ...] = ()
    """Those that died."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in the run directory."""

    step: int
    bytes: int
    unix_s: float


@dataclass(frozen=True)
class PastRun:
    """The facts known of a run; ``None`` and empty tuples where files are missing."""

    directory: Path
    name: str
    job: Mapping[str, Any]
    """The job with all overrides, as values; empty: not known."""
    versions: Mapping[str, str]
    report: PlanReport | None
    """The newest plan, with its prediction."""
    profile: ClusterProfile | None
    metrics: Metrics
    rank_steps: tuple[RankStep, ...] = ()
    happenings: tuple[Happening, ...] = ()
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    speeds: Mapping[int, float] = field(default_factory=dict)
    """rank -> its speed as a share of the profiled one, for which the newest plan was made; empty where it was made at a start."""
    sample: str = ""
    """``sample.txt``; empty: there is none."""
    place: str = ""
    """The directory as a person may type it."""
    job_file: str = ""
    present: Present | None = None
    """The ranks' work, now or when they were last heard of; None: not known."""
    last_step: int | None = None
    """The step after which training is over, as far as is known."""

    @property
    def plan(self) -> Plan | None:
        """The newest plan."""
        return self.report.plan if self.report is not None else None

    @property
    def over(self) -> bool:
        """Whether its last step is taken."""
        return bool(self.last_step and self.metrics.steps and self.metrics.steps[-1].step >= self.last_step)

    @property
    def lost(self) -> frozenset[int]:
        """The ranks that have died since it last went on."""
        found = frozenset[int]()
        for one in self.happenings:
            found = found | set(one.ranks) if one.event == "ranks-lost" else found if one.step is None else frozenset()
        return found

    @property
    def emulated(self) -> bool:
        """Whether its times are emulated."""
        return (self.profile is not None and self.profile.emulated) or any(step.emulated for step in self.metrics.steps)

    def setting(self, table: str, key: str) -> Any:
        """A key of the job; None where it is not known."""
        found = self.job.get(table, {})
        return found.get(key) if isinstance(found, Mapping) else None

    @property
    def warm_steps(self) -> Sequence[StepMetrics]:
        """The steps that count for times: those under the last plan, without its first two."""
        return warm_steps(self.metrics.steps)

    def median_step_s(self) -> float | None:
        """Median seconds per step; None where there are too few steps."""
        return measured_step_s(self.metrics.steps)

    def median_tokens_per_s(self) -> float | None:
        return statistics.median(step.tokens_per_s for step in self.warm_steps) if self.warm_steps else None

    def perplexity(self) -> float | None:
        """The exponential of the newest held-out loss; None where there is none, or where it is no loss of tokens alone."""
        of_text = self.setting("train", "preference") in (None, "none") and self.setting("model", "factory") is None
        routed = any(step.router_loss is not None for step in self.metrics.steps)
        held_out = self.metrics.evaluations
        return math.exp(min(held_out[-1].loss, 100.0)) if held_out and of_text and not routed else None

    @cached_property
    def predicted(self) -> SimulatedStep | None:
        """The simulated step of the newest plan, at the speeds for which it was made; None without plan or profile."""
        if self.plan is None or self.profile is None:
            return None
        ratios = {rank: 1 / speed for rank, speed in self.speeds.items() if speed > 0}
        return simulate(self.plan, with_slowness(self.profile, ratios))

    @cached_property
    def recorded(self) -> tuple[Event, ...]:
        """The events of the newest step that was recorded under the newest plan, by one clock."""
        return on_one_clock(newest_step(self.rank_steps, self.plan)) if self.plan is not None else ()


def read_run(directory: Path) -> PastRun:
    """The run in a directory, as far as its files can be understood. Raises UserError: it is not the directory of a run."""
    if not any((directory / name).exists() for name in (METRICS_NAME, "plan.toml", RUN_NAME)):
        raise UserError(
            "run.not_a_run",
            f"{directory}: not the directory of a run (it has neither {RUN_NAME} nor plan.toml nor metrics.jsonl); "
            f"give the one that `train` wrote, such as runs/quickstart",
        )
    told = run_json(directory / RUN_NAME)
    last_step = told.get("last_step")
    report, profile = _report_and_profile(directory)
    return PastRun(
        directory=directory,
        place=str(directory),
        job_file=str(told.get("job_file") or "JOB"),
        name=printable(str(told.get("name") or directory.resolve().name)),
        job=run_table(told, "job"),
        versions=run_table(told, "versions"),
        report=report,
        profile=profile,
        metrics=read_metrics(directory / METRICS_NAME),
        rank_steps=read_rank_steps(directory / STEPS_NAME),
        happenings=tuple(sorted(_happenings(directory, told), key=lambda one: one.unix_s)),
        speeds=_speeds(directory, told),
        checkpoints=_checkpoints(directory / "checkpoints"),
        sample="".join(lines(directory / SAMPLE_NAME)),
        present=read_present(directory),
        last_step=last_step if type(last_step) is int else None,
    )


def _report_and_profile(directory: Path) -> tuple[PlanReport | None, ClusterProfile | None]:
    """The plan and the profile, as far as there are files; no profile if the plan does not fit its ranks and model."""
    used = directory / USED_PROFILE
    paths = directory / "plan.toml", used if used.exists() else directory / "profile.toml"
    for path in paths:
        require_regular(path)
    there = [
        (path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else () for path in paths
    ]
    report, profile = _loaded(load_report, paths[0], there[0]), _loaded(load_profile, paths[1], there[1])
    if report is not None and profile is not None:
        plan = report.plan
        ranks = plan.ranks + [idle.rank for idle in report.idle]
        if max(ranks) >= len(profile.devices) or plan.layers != len(profile.model.layers):
            return report, None
    return report, profile


@lru_cache(8)  # for the page of a run, which looks at them again and again
def _loaded(load: Callable[[Path], Any], path: Path, there: tuple[int, ...]) -> Any:
    try:
        return load(path) if there else None
    except UserError as error:  # such as after a power loss
        write_line(f"{str(error).splitlines()[0]}; it is left out")
        return None


def _happenings(directory: Path, told: Mapping[str, Any]) -> list[Happening]:
    found = []
    for start in run_starts(told):
        what = "training started" if start["step"] == 0 else f"training resumed after step {start['step']}"
        ranks = f"{start['ranks']} rank{'s' if start['ranks'] != 1 else ''}"
        skipped = f", {start['skipped_records']} bad records skipped" if start.get("skipped_records") else ""
        found.append(Happening(start["unix_s"], "training", f"{what} on {ranks}{skipped}", start["step"]))
    for values in _events(directory):
        step, listed = values.get("step"), values.get("ranks")
        dead = tuple(rank for rank in listed if type(rank) is int) if isinstance(listed, list) else ()
        known = step if type(step) is int else None
        found.append(Happening(values["unix_s"], values["event"], values["text"], known, dead))
    return found


def _speeds(directory: Path, told: Mapping[str, Any]) -> dict[int, float]:
    """Speeds for which the newest plan was made during the run; empty if it was made at a start or after a death."""
    began_s = max((start["unix_s"] for start in run_starts(told)), default=0.0)
    speeds: dict[int, float] = {}
    for values in _events(directory):
        if values["unix_s"] < began_s or values["event"] == "ranks-lost":
            speeds = {}
        elif values["event"] == "rebalanced":
            said = run_table(values, "speeds").items()
            speeds = {
                int(rank): float(speed) for rank, speed in said if rank.isdecimal() and type(speed) in (int, float)
            }
    return speeds


def _events(directory: Path) -> list[dict[str, Any]]:
    found = []
    for _, values in objects(directory / EVENTS_NAME):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):  # not an event
            known = {"unix_s": float(values["unix_s"]), "event": str(values["event"]), "text": str(values["text"])}
            found.append({**values, **known})
    return found


def _checkpoints(directory: Path) -> tuple[SavedCheckpoint, ...]:
    named = [(path.stat(), _CHECKPOINT.fullmatch(path.name)) for path in sorted(directory.glob("step-*.h5"))]
    return tuple(SavedCheckpoint(int(name[1]), file.st_size, file.st_mtime) for file, name in named if name)


# For anybody


def anonymous(run: PastRun) -> PastRun:
    """The run without names of hosts and users, and without absolute paths. What a model wrote (``sample``) stays."""
    hosts = _hosts(run)
    users = {getpass.getuser(), *(path.parts[2] for path in _homes(run))}
    known = {name: f"host {number}" for number, name in enumerate(hosts)} | {
        user: "user" for user in users if user not in hosts
    }
    words = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
    named = re.compile(rf"(?<![\w.-])(?:{words})(?![\w-])")

    def of_text(text: str, field: str) -> str:
        if field in _NAMED and text in hosts:
            return known[text]
        if text.startswith(("/", "~")):  # a path alone may have spaces
            return f".../{Path(text).name}"
        if " " not in text and "/" not in text:
            return text  # a word of ours, such as "cpu", or a host's field
        text = _PATH.sub(lambda found: f".../{found[1]}", text)
        return named.sub(lambda found: known[found[0]], text)

    def of(value: Any, field: str) -> Any:
        if isinstance(value, str):
            return of_text(value, field)
        if isinstance(value, Mapping):
            return {key: of(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(of(inner, field) for inner in value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value, **{one.name: of(getattr(value, one.name), one.name) for one in fields(value) if one.init}
            )
        return value

    shown = ("place", "name", "job_file", "job", "report", "profile", "happenings", "present")
    return replace(run, **{name: of(getattr(run, name), "") for name in shown})


def _hosts(run: PastRun) -> list[str]:
    """The hosts of the run in the order of their ranks, then those that its events name."""
    found = [device.host for device in run.profile.devices] if run.profile is not None else []
    for _, event in objects(run.directory / EVENTS_NAME):
        for key in ("host", "hosts", "present", "missing"):
            told = event.get(key, ())
            names = told if isinstance(told, list) else [told]
            found += [name for name in names if isinstance(name, str)]
    # "titan#2" is another machine of the same name.
    return list(dict.fromkeys([*found, *(name.partition("#")[0] for name in found)]))


def _homes(run: PastRun) -> list[Path]:
    """Folders of users under which the run or its job's files lie."""
    texts = [str(run.directory.absolute()), *(word for word in re.split(r"""[\s'",\[\]]+""", str(run.job)))]
    paths = [Path(text) for text in texts if text.startswith(("/home/", "/Users/"))]
    return [path for path in paths if len(path.parts) > 2]
