"""Read a run from its directory, for reports and comparisons. This also works during the run and after a crash.

``run.json`` contains the job with all overrides, the versions, and the step of each start. ``profile.toml``, ``plan.toml``,
``metrics.jsonl``, ``steps.jsonl`` and ``events.jsonl`` record the run. ``anonymous`` prepares a run for sharing: it replaces host
names by numbers, shortens paths to their last component, and removes user names.
"""

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

from hetero_mpi.job.load import LoadedJob, stored_job
from hetero_mpi.planning.orders import ORDERS
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
from hetero_mpi.util.display import Displayed
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.shipped import USED_PROFILE
from hetero_mpi.util.terminal import printable

_PATH = re.compile(r"""(?<![\w./~}-])~?/(?:[^\s'"`,;:()\[\]{}<>|]*/)*([^\s'"`,;:()\[\]{}<>|/]*)""")
"""Matches an absolute path, or a path in a home directory, within a string; the group is its last component."""
_HOST_FIELDS = ("host", "hosts", "name")
"""Fields whose value may be a host name and nothing else."""
_CHECKPOINT = re.compile(r"step-(\d{8,})\.h5")


@dataclass(frozen=True)
class Happening:
    """An event in a run, such as a start, the loss of a rank or a change of plan."""

    unix_s: float
    event: str
    text: str
    step: int | None = None
    """Number of steps completed before the event; None if unknown."""
    ranks: tuple[int, ...] = ()
    """Ranks lost in the event."""


@dataclass(frozen=True)
class SavedCheckpoint:
    step: int
    bytes: int
    unix_s: float


@dataclass(frozen=True, repr=False)
class PastRun(Displayed):
    """The data of a run. Fields whose files are missing are None or empty."""

    directory: Path
    name: str
    job: Mapping[str, Any]
    """The job's values with all overrides; empty if unknown."""
    versions: Mapping[str, str]
    report: PlanReport | None
    """The latest plan, with its prediction."""
    profile: ClusterProfile | None
    metrics: Metrics
    rank_steps: tuple[RankStep, ...] = ()
    happenings: tuple[Happening, ...] = ()
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Speed of each rank, relative to the profile, that the latest plan assumes; empty if the plan was made at a start."""
    sample: str = ""
    """Content of ``sample.txt``; empty if there is no such file."""
    typed_directory: str = ""
    """The directory as the user typed it."""
    job_file: str = ""
    present: Present | None = None
    """Latest status of the ranks; None if unknown."""
    last_step: int | None = None
    """Number of the last step to train; None if unknown."""

    @property
    def plan(self) -> Plan | None:
        return self.report.plan if self.report is not None else None

    @property
    def over(self) -> bool:
        """Whether the last step has been completed."""
        return bool(self.last_step and self.metrics.steps and self.metrics.steps[-1].step >= self.last_step)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks lost since the last start or recovery."""
        lost_ranks = frozenset[int]()
        for happening in self.happenings:
            if happening.event == "ranks-lost":
                lost_ranks |= set(happening.ranks)
            elif happening.step is not None:
                lost_ranks = frozenset()
        return lost_ranks

    @property
    def emulated(self) -> bool:
        """Whether step times are emulated."""
        return (self.profile is not None and self.profile.emulated) or any(step.emulated for step in self.metrics.steps)

    def setting(self, table: str, key: str) -> Any:
        """Return the value of a job key, or None if it is unknown."""
        values = self.job.get(table, {})
        return values.get(key) if isinstance(values, Mapping) else None

    @property
    def warm_steps(self) -> Sequence[StepMetrics]:
        """Steps that count for timing: those under the last plan, except the first two."""
        return warm_steps(self.metrics.steps)

    def median_step_s(self) -> float | None:
        """Return the median seconds per step, or None if there are too few steps."""
        return measured_step_s(self.metrics.steps)

    def median_tokens_per_s(self) -> float | None:
        return statistics.median(step.tokens_per_s for step in self.warm_steps) if self.warm_steps else None

    def perplexity(self) -> float | None:
        """Return the perplexity at the latest evaluation, or None if there is none or its loss is not a pure token loss."""
        of_text = self.setting("train", "preference") in (None, "none") and self.setting("model", "factory") is None
        routed = any(step.router_loss is not None for step in self.metrics.steps)
        evaluations = self.metrics.evaluations
        return math.exp(min(evaluations[-1].loss, 100.0)) if evaluations and of_text and not routed else None

    @cached_property
    def predicted(self) -> SimulatedStep | None:
        """The step of the latest plan, simulated at the speeds that it assumes; None if the plan or profile is missing."""
        if self.plan is None or self.profile is None:
            return None
        ratios = {rank: 1 / speed for rank, speed in self.speeds.items() if speed > 0}
        return simulate(self.plan, with_slowness(self.profile, ratios))

    @cached_property
    def recorded(self) -> tuple[Event, ...]:
        """Events of the most recent recorded step under the latest plan, on a common clock."""
        return on_one_clock(newest_step(self.rank_steps, self.plan)) if self.plan is not None else ()


def is_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in (METRICS_NAME, "plan.toml", RUN_NAME))


def runs_in(directory: Path) -> list[Path]:
    """List the runs in a directory, by name, without dry runs. Empty if the directory is a run itself or contains no runs."""
    if is_run(directory) or not directory.is_dir():
        return []
    return sorted(run for run in directory.iterdir() if any((run / name).exists() for name in (METRICS_NAME, RUN_NAME)))


def job_of_run(directory: Path, overrides: Sequence[str] = ()) -> LoadedJob | None:
    """Read the job of a run directory, with overrides from ``--set``; None if ``directory`` does not hold a run's job."""
    if not (directory / RUN_NAME).is_file():
        return None
    run_values = run_json(directory / RUN_NAME)
    job_file, tables = Path(str(run_values.get("job_file"))), run_table(run_values, "job")
    if not tables:
        text = f"{directory / RUN_NAME} is damaged: instead of the run, pass its model with --data, or its profile.toml"
        raise UserError("run.damaged", text)
    return stored_job(tables, str(run_values.get("name")), job_file.parent, overrides)


def read_run(directory: Path) -> PastRun:
    """Read the run in a directory, skipping unreadable files. Raises UserError if it is not a run directory."""
    if not is_run(directory):
        raise UserError(
            "run.not_a_run",
            f"{directory}: not a run directory ({RUN_NAME}, plan.toml and metrics.jsonl are missing); "
            f"pass a directory that `train` wrote, such as runs/quickstart",
        )
    run_values = run_json(directory / RUN_NAME)
    last_step = run_values.get("last_step")
    report, profile = _report_and_profile(directory)
    return PastRun(
        directory=directory,
        typed_directory=str(directory),
        job_file=str(run_values.get("job_file") or "JOB"),
        name=printable(str(run_values.get("name") or directory.resolve().name)),
        job=run_table(run_values, "job"),
        versions=run_table(run_values, "versions"),
        report=report,
        profile=profile,
        metrics=read_metrics(directory / METRICS_NAME),
        rank_steps=read_rank_steps(directory / STEPS_NAME),
        happenings=tuple(sorted(_happenings(directory, run_values), key=lambda happening: happening.unix_s)),
        speeds=_speeds(directory, run_values),
        checkpoints=_checkpoints(directory / "checkpoints"),
        sample="".join(lines(directory / SAMPLE_NAME)),
        present=read_present(directory),
        last_step=last_step if type(last_step) is int else None,
    )


def _report_and_profile(directory: Path) -> tuple[PlanReport | None, ClusterProfile | None]:
    """Read the plan and the profile, if present. The profile is omitted if its ranks or model do not match the plan."""
    used = directory / USED_PROFILE
    paths = directory / "plan.toml", used if used.exists() else directory / "profile.toml"
    for path in paths:
        require_regular(path)
    versions = [(p.stat().st_ino, p.stat().st_size, p.stat().st_mtime_ns) if p.exists() else () for p in paths]
    loads: tuple[Callable[[Path], Any], ...] = _report_in_order, load_profile
    report, profile = map(_load_cached, loads, paths, versions)
    if report is not None and profile is not None:
        plan = report.plan
        ranks = plan.ranks + [idle.rank for idle in report.idle]
        if max(ranks) >= len(profile.devices) or plan.layers != len(profile.model.layers):
            return report, None
    return report, profile


def _report_in_order(path: Path) -> PlanReport:
    """Read a plan whose times and memory can be computed. Raises UserError also if the file of its order is gone."""
    report = load_report(path)
    if lost := {pipeline.order for pipeline in report.plan.pipelines} - ORDERS.keys():
        text = f"{path}: order = {', '.join(sorted(lost))}: not in hetero_mpi/planning/orders; restore its file to see the plan"
        raise UserError("plan.order_missing", text)
    return report


@lru_cache(8)  # the live page reads these files repeatedly
def _load_cached(load: Callable[[Path], Any], path: Path, version: tuple[int, ...]) -> Any:
    try:
        return load(path) if version else None
    except UserError as error:  # such as a file truncated by a power loss
        write_line(f"{str(error).splitlines()[0]}; skipping this file")
        return None


def _happenings(directory: Path, run_values: Mapping[str, Any]) -> list[Happening]:
    happenings = []
    for start in run_starts(run_values):
        start_text = "training started" if start["step"] == 0 else f"training resumed after step {start['step']}"
        ranks = f"{start['ranks']} rank{'s' if start['ranks'] != 1 else ''}"
        skipped = f", {start['skipped_records']} malformed records skipped" if start.get("skipped_records") else ""
        happenings.append(Happening(start["unix_s"], "training", f"{start_text} on {ranks}{skipped}", start["step"]))
    for values in _events(directory):
        step, rank_list = values.get("step"), values.get("ranks")
        lost_ranks = tuple(rank for rank in rank_list if type(rank) is int) if isinstance(rank_list, list) else ()
        known_step = step if type(step) is int else None
        happenings.append(Happening(values["unix_s"], values["event"], values["text"], known_step, lost_ranks))
    return happenings


def _speeds(directory: Path, run_values: Mapping[str, Any]) -> dict[int, float]:
    """Return the speeds assumed by the latest plan, empty unless the plan was made by rebalancing."""
    last_start_s = max((start["unix_s"] for start in run_starts(run_values)), default=0.0)
    speeds: dict[int, float] = {}
    for values in _events(directory):
        if values["unix_s"] < last_start_s or values["event"] == "ranks-lost":
            speeds = {}
        elif values["event"] == "rebalanced":
            items = run_table(values, "speeds").items()
            speeds = {int(rank): float(s) for rank, s in items if rank.isdecimal() and type(s) in (int, float)}
    return speeds


def _events(directory: Path) -> list[dict[str, Any]]:
    events = []
    for _, values in objects(directory / EVENTS_NAME):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):  # not an event
            checked = {"unix_s": float(values["unix_s"]), "event": str(values["event"]), "text": str(values["text"])}
            events.append({**values, **checked})
    return events


def _checkpoints(directory: Path) -> tuple[SavedCheckpoint, ...]:
    matches = [(path.stat(), _CHECKPOINT.fullmatch(path.name)) for path in sorted(directory.glob("step-*.h5"))]
    return tuple(SavedCheckpoint(int(name[1]), file.st_size, file.st_mtime) for file, name in matches if name)


# Anonymous runs


def anonymous(run: PastRun) -> PastRun:
    """Remove host names, user names and absolute paths from a run, except from the generated ``sample``."""
    hosts = _hosts(run)
    users = {getpass.getuser(), *(path.parts[2] for path in _homes(run))}
    replacements = {name: f"host {number}" for number, name in enumerate(hosts)} | {
        user: "user" for user in users if user not in hosts
    }
    words = "|".join(re.escape(name) for name in sorted(replacements, key=len, reverse=True))
    name_pattern = re.compile(rf"(?<![\w.-])(?:{words})(?![\w-])")

    def of_text(text: str, field: str) -> str:
        if field in _HOST_FIELDS and text in hosts:
            return replacements[text]
        if text.startswith(("/", "~")):  # a text that is one path may contain spaces
            return f".../{Path(text).name}"
        if " " not in text and "/" not in text:
            return text  # a keyword such as "cpu", or a value of a host's field
        text = _PATH.sub(lambda match: f".../{match[1]}", text)
        return name_pattern.sub(lambda match: replacements[match[0]], text)

    def anonymise(value: Any, field: str) -> Any:
        if isinstance(value, str):
            return of_text(value, field)
        if isinstance(value, Mapping):
            return {key: anonymise(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(anonymise(inner, field) for inner in value)
        if is_dataclass(value) and not isinstance(value, type):
            names = [part.name for part in fields(value) if part.init]
            return replace(value, **{name: anonymise(getattr(value, name), name) for name in names})
        return value

    anonymised_fields = ("typed_directory", "name", "job_file", "job", "report", "profile", "happenings", "present")
    return replace(run, **{name: anonymise(getattr(run, name), "") for name in anonymised_fields})


def _hosts(run: PastRun) -> list[str]:
    """Return the hosts of the run in rank order, followed by other hosts that its events name."""
    names = [device.host for device in run.profile.devices] if run.profile is not None else []
    for _, event in objects(run.directory / EVENTS_NAME):
        for key in ("host", "hosts", "present", "missing"):
            event_hosts = event.get(key, ())
            listed_hosts = event_hosts if isinstance(event_hosts, list) else [event_hosts]
            names += [name for name in listed_hosts if isinstance(name, str)]
    # "titan#2" is another machine named "titan".
    return list(dict.fromkeys([*names, *(name.partition("#")[0] for name in names)]))


def _homes(run: PastRun) -> list[Path]:
    """Return the paths of the run and in its job that are inside home directories."""
    texts = [str(run.directory.absolute()), *(word for word in re.split(r"""[\s'",\[\]]+""", str(run.job)))]
    paths = [Path(text) for text in texts if text.startswith(("/home/", "/Users/"))]
    return [path for path in paths if len(path.parts) > 2]
