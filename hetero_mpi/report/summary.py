"""The summary at the end of a run: predicted and measured step times, losses, and where the files are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from hetero_mpi import units
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.profile import MEASURED, ClusterProfile
from hetero_mpi.report.run_files.metrics import Evaluation, StepMetrics

WARM_UP_STEPS = 2
"""Number of first steps under a plan that do not count for times, while caches, allocators and links warm up."""
TOLERANCE = 0.15
"""Share by which a step may differ from its prediction without a reason being given."""
_PROFILED = "when they were measured"
SpeedChanges = Sequence[tuple[int, int, float]]
"""(rank, number of the step from 0, share of the profile's speed) of emulated changes of speed."""


def final_lines(
    report: PlanReport,
    profile: ClusterProfile,
    steps: Sequence[StepMetrics],
    evaluations: Sequence[Evaluation] = (),
    unigram_entropy: float | None = None,
    written: Mapping[str, Path] | None = None,
    speed_changes: SpeedChanges = (),
    preference: bool = False,
    others: str = "",
) -> list[str]:
    """The summary as lines. ``steps`` and ``evaluations``: of this run, without those of the run it resumed.

    ``unigram_entropy``: of the training targets, nats per token. ``written``: what -> path, in the order to be shown.
    ``others``: what other programs took of the cores, in words.
    """
    lines = time_lines(report, profile, steps, speed_changes, others)
    per = "nats per token" if units.unit_of(report.plan.sequence_length) == "tokens" else "per sample"
    lines += _loss_lines(steps, evaluations, unigram_entropy, "per pair" if preference else per)
    if written:
        width = max(len(what) for what in written)
        lines += ["Written:", *(f"  {what:<{width}}  {path}" for what, path in written.items())]
    return lines


def measured_step_s(steps: Sequence[StepMetrics]) -> float | None:
    """Median seconds per step under the last plan, without its first two; None where no step is left."""
    warm = [step.step_s for step in warm_steps(steps)]
    return statistics.median(warm) if warm else None


def warm_steps(steps: Sequence[StepMetrics]) -> Sequence[StepMetrics]:
    """The steps of a run that count for its times: those under its last plan, without the first two."""
    under = by_plan(steps)
    return under[-1][WARM_UP_STEPS:] if under else ()


def by_plan(steps: Sequence[StepMetrics]) -> list[list[StepMetrics]]:
    """The steps of a run under each of its plans, which are told apart by their predictions."""
    return [list(group) for _, group in groupby(steps, lambda step: step.predicted_step_s)]


def time_lines(
    report: PlanReport,
    profile: ClusterProfile,
    steps: Sequence[StepMetrics],
    speed_changes: SpeedChanges = (),
    others: str = "",
) -> list[str]:
    """Measured beside predicted step time, with the likely reason where they are far apart; then the earlier plans."""
    *before, last = by_plan(steps) or [[]]
    changes = _since(last, bool(before), speed_changes)
    lines = _last_plan_lines(report, profile, last, changes, others, _when_told(report, bool(before)))
    if before and len(last) > WARM_UP_STEPS:
        lines[0] += f" (since the plan changed after step {last[0].step - 1})"
    for former in before:
        measured = statistics.median(step.step_s for step in former[WARM_UP_STEPS:] or former)
        lines.append(
            f"  before, up to step {former[-1].step}: {units.seconds(measured)} measured, "
            f"{units.seconds(former[0].predicted_step_s)} predicted"
        )
    return lines


def _when_told(report: PlanReport, replanned: bool) -> str:
    """When the times were measured that the last plan is expected to take."""
    if replanned:
        return "when the plan was made"
    return _PROFILED if report.tried_step_s is None else "when the plan was tried"


def _since(last: Sequence[StepMetrics], replanned: bool, changes: SpeedChanges) -> list[tuple[int, int, float]]:
    """The speed changes not known when the plan of the steps ``last`` was made; one made during the run knows earlier ones."""
    if not last:
        return []
    begin = last[0].step - 1 if replanned else 0
    return [change for change in changes if begin <= change[1] < last[-1].step]


def _last_plan_lines(
    report: PlanReport,
    profile: ClusterProfile,
    steps: Sequence[StepMetrics],
    changes: SpeedChanges,
    others: str,
    when: str,
) -> list[str]:
    """The lines about the last plan. ``changes``: speed changes that it did not know. ``when``: as ``_when_told``."""
    measured = measured_step_s(steps)
    if measured is None:
        return [f"Step time: {len(steps)} steps are too few to measure it (the first {WARM_UP_STEPS} do not count)"]
    tokens_per_s = statistics.median(step.tokens_per_s for step in steps[WARM_UP_STEPS:])
    what = f"Step time{', emulated' if profile.emulated else ''}"
    rate = f"{tokens_per_s:,.0f} {units.unit_of(report.plan.sequence_length)}/s"
    line = f"{what}: {units.seconds(measured)} measured (median), {rate}"
    if report.expected_step_s <= 0:
        return [line, *([f"  {others}"] if others else [])]
    line += f"; {units.seconds(report.predicted_step_s)} predicted"
    line += f", {units.seconds(report.tried_step_s)} when tried" if report.tried_step_s is not None else ""
    ratio = measured / report.expected_step_s
    if abs(ratio - 1) <= TOLERANCE:
        return [line, *([f"  {others}"] if others else [])]
    word = f"{units.percent(abs(ratio - 1))} {'longer' if ratio > 1 else 'shorter'}"
    word = f"{ratio:.2g} times as long" if ratio >= 2 else word
    return [line, f"  {word}: {_difference_reason(profile, changes, ratio, others, when)}"]


def _difference_reason(profile: ClusterProfile, changes: SpeedChanges, ratio: float, others: str, when: str) -> str:
    if changes:
        told = ", ".join(f"rank {rank} at {share:g} from step {step + 1}" for rank, step, share in changes)
        return f"devices changed their speed as [cluster] emulate_changes asks ({told}), which no prediction knows"
    if profile.emulated:
        return "the ranks did not keep the emulated times (see the line Emulation): raise [cluster] time_scale"
    if others and ratio > 1:
        return others
    if ratio < 1 and any(host.other_threads for host in profile.hosts):
        return "other programs took more of the cores when the plan was tried"
    than = f"{'not as fast as' if ratio > 1 else 'faster than'} {when}"
    if when != _PROFILED:
        return f"the machines are {than}"
    if profile.source != MEASURED:
        return f"the profile was not measured here ({profile.source}): measure these machines (profile.path empty)"
    return f"the machines are {than}: measure again (--reprofile)"


def _loss_lines(
    steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation], unigram_entropy: float | None, per: str
) -> list[str]:
    lines = []
    if steps:
        first, last = steps[0], steps[-1]
        lines.append(f"Loss: {first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step} ({per})")
    if evaluations:
        lines.append(f"Held-out loss: {evaluations[-1].loss:.4f} at step {evaluations[-1].step}")
    if unigram_entropy is not None:
        line = f"Unigram entropy of the training text: {unigram_entropy:.4f}"
        if (evaluations or steps) and not any(step.router_loss is not None for step in steps):
            reached = evaluations[-1].loss if evaluations else steps[-1].loss
            below = unigram_entropy - reached
            which, where = "held-out loss" if evaluations else "loss", "below" if below >= 0 else "above"
            line += f"; the {which} is {abs(below):.4f} {where} it"
        lines.append(line)
    return lines
