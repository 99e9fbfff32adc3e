"""What is said at the end: predicted against measured, what was learnt, where everything is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.report import units
from hetero_mpi.report.metrics import Evaluation, StepMetrics

WARM_UP_STEPS = 2
"""First steps of a run, left out of the measured step time: caches, allocators and links are cold."""
TOLERANCE = 0.15
"""Share by which a step may differ from its prediction before the reason is said."""


def final_lines(
    plan: Plan,
    profile: ClusterProfile,
    steps: Sequence[StepMetrics],
    evaluations: Sequence[Evaluation] = (),
    unigram_entropy: float | None = None,
    written: Mapping[str, Path] | None = None,
) -> list[str]:
    """The end of a run in a few lines. ``steps`` and ``evaluations``: of this run, not of those it resumed.

    ``unigram_entropy``: of the training targets, nats per token. ``written``: what -> where, in the order to be shown.
    """
    lines = time_lines(plan, profile, steps)
    lines += _loss_lines(steps, evaluations, unigram_entropy, _per(plan))
    if written:
        width = max(len(what) for what in written)
        lines += ["Written:", *(f"  {what:<{width}}  {path}" for what, path in written.items())]
    return lines


def measured_step_s(steps: Sequence[StepMetrics]) -> float | None:
    """Median seconds per step after the first two; None when no step is left."""
    warm = [step.step_s for step in steps[WARM_UP_STEPS:]]
    return statistics.median(warm) if warm else None


def time_lines(plan: Plan, profile: ClusterProfile, steps: Sequence[StepMetrics]) -> list[str]:
    """Predicted beside measured step time, and the likely reason when they are far apart."""
    measured = measured_step_s(steps)
    if measured is None:
        return [f"Step time: {len(steps)} steps are too few to measure it (the first {WARM_UP_STEPS} do not count)"]
    tokens_per_s = statistics.median(step.tokens_per_s for step in steps[WARM_UP_STEPS:])
    what = f"Step time{', emulated' if profile.emulated else ''}"
    rate = f"{tokens_per_s:,.0f} {units.unit_of(plan.sequence_length)}/s"
    line = f"{what}: {units.seconds(measured)} measured (median), {rate}"
    if plan.predicted_step_s <= 0:
        return [line]
    difference = measured / plan.predicted_step_s - 1
    word = "longer" if difference >= 0 else "shorter"
    line += (
        f"; {units.seconds(plan.predicted_step_s)} predicted, so {units.percent(abs(difference))} {word} than predicted"
    )
    if abs(difference) <= TOLERANCE:
        return [line]
    return [line, f"  {_difference_reason(plan, profile)}"]


def _difference_reason(plan: Plan, profile: ClusterProfile) -> str:
    used = {rank for pipeline in plan.pipelines for stage in pipeline.stages for rank in stage.ranks}
    sharing = [device for device in profile.devices if device.rank in used and device.cores < 1]
    if profile.emulated:
        return "the ranks did not keep the emulated times (see the line Emulation): raise [cluster] time_scale"
    if sharing:
        hosts = ", ".join(sorted({device.host for device in sharing}))
        return (
            f"ranks share cores on {hosts} ({min(device.cores for device in sharing):.2g} cores per rank): "
            "they compute by turns, in an order that no prediction knows"
        )
    if profile.source != "measured":
        return f"the profile was not measured here ({profile.source}): measure these machines (profile.path empty)"
    return "the machines are not as fast as when they were measured: measure again (profile.reuse = false)"


def _per(plan: Plan) -> str:
    return "nats per token" if units.unit_of(plan.sequence_length) == "tokens" else "per sample"


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
        if evaluations or steps:
            reached = evaluations[-1].loss if evaluations else steps[-1].loss
            below = unigram_entropy - reached
            which, where = "held-out loss" if evaluations else "loss", "below" if below >= 0 else "above"
            line += f"; the {which} is {abs(below):.4f} {where} it"
        lines.append(line)
    return lines
