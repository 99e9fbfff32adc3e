"""A run as text: its end, runs side by side (``compare``), a plan beside the best single device (``baseline``), and its job."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_mpi.planning.analysis.step_comparison import StepTimes
from hetero_mpi.planning.types.plan import Alone, PlanReport
from hetero_mpi.planning.types.profile import MEASURED, ClusterProfile
from hetero_mpi.report.past_run import PastRun
from hetero_mpi.report.plan_text import stages_text
from hetero_mpi.report.profile_text import place_text
from hetero_mpi.report.table import Table
from hetero_mpi.rundir.metrics import WARM_UP_STEPS, Evaluation, StepMetrics, by_plan, rewards_text
from hetero_mpi.util import units
from hetero_mpi.util.terminal import wrap_text

TOLERANCE = 0.15
"""Share by which a step may differ from its prediction without a reason being given."""
HARDLY = 1.1
"""Gains up to this factor are within the error of predictions and the variation of machines."""
_PROFILED = "when they were measured"
_WINDOW = 0.05
"""The loss after so many tokens is the mean over this share of them, the last ones."""
_FEW = "too few steps"
_OPTIMIZERS = {"adamw_8bit": "AdamW in 8 bits", "adafactor": "Adafactor", "muon": "Muon and AdamW"}
_IRRELEVANT = {("output", "run_dir")}
SpeedChanges = Sequence[tuple[int, int, float]]
"""(rank, number of the step from 0, share of the profile's speed) of emulated changes of speed."""


# The end of a run


def final_lines(
    report: PlanReport,
    profile: ClusterProfile,
    steps: Sequence[StepMetrics],
    evaluations: Sequence[Evaluation] = (),
    unigram_entropy: float | None = None,
    written: Mapping[str, Path] | None = None,
    speed_changes: SpeedChanges = (),
    compared: str = "",
    others: str = "",
) -> list[str]:
    """The summary as lines. ``steps`` and ``evaluations``: of this run, without those of the run it resumed.

    ``unigram_entropy``: of the training targets, nats per token. ``written``: what -> path, in the order to be shown.
    ``compared``: pair or answer, where preferences are learnt. ``others``: what other programs took of the cores, in words.
    """
    lines = time_lines(report, profile, steps, speed_changes, others)
    per = "nats per token" if units.unit_of(report.plan.sequence_length) == "tokens" else "per sample"
    lines += loss_lines(steps, evaluations, unigram_entropy, f"per {compared}" if compared else per)
    if written:
        width = max(len(what) for what in written)
        lines += ["Written:", *(f"  {what:<{width}}  {path}" for what, path in written.items())]
    return lines


def time_lines(
    report: PlanReport,
    profile: ClusterProfile,
    steps: Sequence[StepMetrics],
    speed_changes: SpeedChanges = (),
    others: str = "",
) -> list[str]:
    """Measured beside predicted step time, with the likely reason where they are far apart; then the earlier plans."""
    *before, last = by_plan(steps) or [[]]
    warm = last[WARM_UP_STEPS:]
    if warm:
        times = StepTimes(tuple(step.step_s for step in warm), report.expected_step_s)
        rate = f"{statistics.median(step.tokens_per_s for step in warm):,.0f} {units.unit_of(report.plan.sequence_length)}/s"
        line = f"Step time{', emulated' if profile.emulated else ''}: {units.seconds(times.step_s)} measured (median), {rate}"
        ratio = times.ratio
        if times.predicted_s > 0:
            line += f"; {units.seconds(report.predicted_step_s)} predicted"
            line += f", {units.seconds(report.tried_step_s)} when tried" if report.tried_step_s is not None else ""
        lines = [line + (f" (since the plan changed after step {last[0].step - 1})" if before else "")]
        if abs(ratio - 1) > TOLERANCE:
            word = f"{units.percent(abs(ratio - 1))} {'longer' if ratio > 1 else 'shorter'}"
            word = f"{ratio:.2g} times as long" if ratio >= 2 else word
            # A plan made during the run knows the changes of speed before it.
            begin = last[0].step - 1 if before else 0
            changes = [change for change in speed_changes if begin <= change[1] < last[-1].step]
            tried = _PROFILED if report.tried_step_s is None else "when the plan was tried"
            when = "when the plan was made" if before else tried
            lines.append(f"  {word}: {_difference_reason(profile, changes, ratio, others, when)}")
        elif others:
            lines.append(f"  {others}")
    else:
        lines = [f"Step time: {len(last)} steps are too few to measure it (the first {WARM_UP_STEPS} do not count)"]
    for former in before:
        measured = statistics.median(step.step_s for step in former[WARM_UP_STEPS:] or former)
        lines.append(
            f"  before, up to step {former[-1].step}: {units.seconds(measured)} measured, "
            f"{units.seconds(former[0].predicted_step_s)} predicted"
        )
    return lines


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


def loss_lines(
    steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation], unigram_entropy: float | None, per: str
) -> list[str]:
    """The first and the newest loss, the newest held-out one, and how they compare with the unigram entropy, if that is known."""
    lines = []
    if steps:
        first, last = steps[0], steps[-1]
        lines.append(
            f"Loss: {first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step} ({per}){rewards_text(last)}"
        )
    if evaluations:
        lines.append(
            f"Held-out loss: {evaluations[-1].loss:.4f} at step {evaluations[-1].step}{evaluations[-1].beside()}"
        )
    if unigram_entropy is not None:
        line = f"Unigram entropy of the training text: {unigram_entropy:.4f}"
        if (evaluations or steps) and not any(step.router_loss is not None for step in steps):
            reached = evaluations[-1].loss if evaluations else steps[-1].loss
            below = unigram_entropy - reached
            which, where = "held-out loss" if evaluations else "loss", "below" if below >= 0 else "above"
            line += f"; the {which} is {abs(below):.4f} {where} it"
        lines.append(line)
    return lines


# Runs beside each other


def comparison_lines(runs: Sequence[PastRun]) -> list[str]:
    """A table with a column per run: differences between the jobs, plans, speed, and the loss after equally many tokens."""
    tokens = min(sum(step.tokens for step in run.metrics.steps) for run in runs)
    speeds = [run.median_tokens_per_s() for run in runs]
    held_out = [run.metrics.evaluations[-1].loss if run.metrics.evaluations else math.nan for run in runs]
    rows = [(key, *values) for key, values in job_differences([run.job for run in runs])]
    rows += [
        ("devices", *(_devices(run.profile) for run in runs)),
        ("plan", *(_plan(run.report) for run in runs)),
        ("steps done", *(f"{run.metrics.steps[-1].step:,}" if run.metrics.steps else "none" for run in runs)),
        ("step, predicted", *(units.seconds(run.report.predicted_step_s) if run.report else "" for run in runs)),
        ("step, median", *(units.seconds(run.median_step_s() or 0) if run.warm_steps else _FEW for run in runs)),
        ("tokens/s, median", *(f"{speed:,.0f}" if speed is not None else _FEW for speed in speeds)),
        ("speed", *(f"{speed / speeds[0]:.2f}x" if speed and speeds[0] else "" for speed in speeds)),
        (f"loss after {units.count(tokens)} tokens", *(_loss(loss_after(run.metrics.steps, tokens)) for run in runs)),
        ("held-out loss, last", *map(_loss, held_out)),
        ("energy", *("not measured" for _ in runs)),
    ]  # fmt: skip
    by_job = len({run.name for run in runs}) == len(runs)
    names = [run.name if by_job else str(run.directory) for run in runs]
    names = [f"{name}{' (emulated)' if run.emulated else ''}" for name, run in zip(names, runs, strict=True)]
    lines = Table.of_texts(("", *names), rows).lines()
    if any(run.emulated for run in runs):
        lines += wrap_text(
            "  ",
            "emulated: times and speeds are those of a profile's devices, imitated; losses are of the model that stood in",
        )
    if len({_model(run.profile) for run in runs}) > 1:
        lines += wrap_text("  ", "the models differ: neither losses nor tokens per second can be compared")
    return lines


def loss_after(steps: Sequence[StepMetrics], tokens: int) -> float:
    """Mean training loss over the last twentieth of the first ``tokens`` tokens (at least one step); NaN without any."""
    seen, recent = 0, []
    for step in steps:
        if seen >= tokens:
            break
        seen += step.tokens
        recent.append((seen, step.loss))
    kept = [loss for at, loss in recent if at > (1 - _WINDOW) * tokens]
    return statistics.fmean(kept) if kept else math.nan


def job_differences(jobs: Sequence[Mapping[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
    """(``table.key``, its value in each job) of the keys that are not the same in all."""
    keys = dict.fromkeys(
        (name, key) for job in jobs for name, values in job.items() if isinstance(values, Mapping) for key in values
    )
    found = []
    for name, key in keys:
        tables = (job.get(name) for job in jobs)
        values = tuple(_value(table.get(key) if isinstance(table, Mapping) else None) for table in tables)
        if len(set(values)) > 1 and (name, key) not in _IRRELEVANT:
            found.append((f"{name}.{key}", values))
    return found


def baseline_lines(
    singles: Sequence[Alone], report: PlanReport, profile: ClusterProfile, tokens: int, run: PastRun | None, remarks: Sequence[str]
) -> list[str]:  # fmt: skip
    """A table of each kind of device alone and of all together, and a sentence that says whether the others were worth adding.

    ``singles``: a prediction for each kind of device. ``run``: one under the plan, whose measured times are shown too.
    """
    kind = ", emulated" if profile.emulated else ""
    timed = [
        (f"rank {one.rank} alone", place_text(profile, one.rank), one.step_s, one.problem or f"predicted{kind}")
        for one in singles
    ]
    together = f"{len(report.plan.ranks)} of {len(profile.devices)} ranks"
    timed.append((together, _devices(profile), report.predicted_step_s, f"predicted{kind}"))
    measured = run.median_step_s() if run is not None else None
    if run is not None and measured is not None:
        how = f"measured{kind}, median of {len(run.warm_steps)} steps"
        timed.append((together, f"run {run.name}", measured, how))
    rows = [
        (who, device, *((units.seconds(step_s), f"{tokens / step_s:,.0f}") if step_s else ("", "")), how)
        for who, device, step_s, how in timed
    ]
    table = Table.of_texts(("", "device", "step", "tokens/s", ""), rows)
    lines = [f"The same {units.amount(tokens, report.plan.sequence_length)} per step{kind}:", *table.lines(), ""]
    lines += ["Was it worth adding the others?", *wrap_text("  ", worth_adding(singles, report, profile, measured)), ""]
    return [*lines, *(line for remark in remarks for line in wrap_text("", remark))]


def worth_adding(
    singles: Sequence[Alone], report: PlanReport, profile: ClusterProfile, measured_s: float | None
) -> str:
    """A sentence about the gain over the best single device. ``measured_s``: per step of all devices together, where known."""
    if len(singles) == 1 and len(report.memory) + len(report.idle) <= 1:
        return "There is one device only: nothing was added."
    able = [one for one in singles if one.step_s is not None]
    if not able:
        return "Yes: no single device can do this job at all."
    best = min(able, key=lambda one: (one.step_s or 0.0, one.rank))
    assert best.step_s is not None
    if len(report.plan.ranks) == 1:
        return f"No: the plan itself uses rank {report.plan.ranks[0]} alone, since the others would only slow it down."
    promised = best.step_s / report.predicted_step_s if report.predicted_step_s > 0 else math.nan
    gain = best.step_s / measured_s if measured_s else promised
    answer = "No" if gain < 1 else "Hardly" if gain < HARDLY else "Yes"
    what = "measured" if measured_s else "predicted"
    text = f"{answer}: together they are {gain:.2f} times as fast ({what}) as "
    text += f"{place_text(profile, best.rank)} alone would be (predicted)"
    if measured_s and math.isfinite(promised):
        text += f"; the prediction was {promised:.2f} times"
    return text + "."


def next_steps(run: PastRun) -> list[tuple[str, str]]:
    """(command, what it does) that a person may type next: they depend on what the run has left."""
    place, program = shlex.quote(run.place), "python -m hetero_mpi"
    written = any((run.directory / name).is_dir() for name in ("model", "adapter"))
    done, wanted = run.metrics.steps[-1].step if run.metrics.steps else 0, run.setting("train", "steps")
    found = []
    goes_on = run.present is not None and run.present.alive and not run.over
    if isinstance(wanted, int) and done < wanted and run.checkpoints and not goes_on:
        resume = f"{program} train {shlex.quote(run.job_file)} --run-dir {place} --resume"
        what = f"behind mpirun or launch, on any ranks: goes on after step {run.checkpoints[-1].step:,}"
        found.append((resume, what))
    if written and run.setting("model", "factory") is None:
        found.append((f'{program} generate {place} --prompt "..."', "the trained model goes on with a text"))
        found.append((f"{program} serve {place}", "answers any OpenAI client"))
        merge = " --merge" if run.setting("adapter", "method") == "lora" else ""
        found.append((f"{program} export {place} OUT{merge}", "a directory for other programs, with a model card"))
    if run.profile is not None and len(run.profile.devices) > 1:
        found.append((f"{program} baseline --profile {place}", "each kind of device alone beside all together"))
    if run.metrics.steps:
        found.append((f"{program} compare {place} OTHER", "this run beside another one"))
    return found


def _devices(profile: ClusterProfile | None) -> str:
    return units.join_with_counts((device.name for device in profile.devices), ", ") if profile is not None else ""


def _plan(report: PlanReport | None) -> str:
    if report is None:
        return ""
    return f"{stages_text(report.plan)}{f', {len(report.idle)} idle' if report.idle else ''}"


def _model(profile: ClusterProfile | None) -> tuple[object, ...]:
    if profile is None:
        return ()
    return profile.model.model_type, tuple(layer.parameters for layer in profile.model.layers)


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not known"


def _value(value: Any) -> str:
    return "empty" if value is None else str(value)


# The job


def job_rows(job: Mapping[str, Any], used_dtype: str = "") -> list[tuple[str, str]]:
    """(what, setting) of a job: method, model, data, optimizer. What it does not say is left out. ``used_dtype``: where known."""

    def setting(name: str) -> Any:
        table, key = name.split(".")
        found = job.get(table)
        return found.get(key) if isinstance(found, Mapping) else None

    def told(form: str, name: str) -> str:
        text = _setting_text(setting(name))
        return form.format(text) if text else ""

    lora, packed = setting("adapter.method") == "lora", setting("data.packing")
    method = "LoRA" if lora else "full training of all weights" if setting("adapter.method") == "none" else ""
    if lora and setting("model.quantization") == "nf4":
        method += f" on NF4 weights{', double quantization' if setting('model.double_quantization') else ''}"
    of_adapter = (("rank {}", "rank"), ("alpha {}", "alpha"), ("dropout {}", "dropout"), ("targets {}", "targets"))
    config, held_out, asked = setting("model.config"), setting("data.held_out"), told("{}", "train.dtype")
    is_share = isinstance(held_out, (int, float)) and 0 < held_out < 1
    own_held_out = f"{units.percent(held_out)} of the sequences held out" if is_share else ""
    new = f"a new {config.get('model_type', '')} model" if isinstance(config, Mapping) else _setting_text(config)
    by_plan = setting("train.micro_batch") == "auto"
    warm_up = told("{} steps of warm-up", "train.warmup_steps")
    if isinstance(share := setting("train.warmup_steps"), float) and 0 < share < 1:
        warm_up = f"warm-up in {units.percent(share)} of the steps{told(', at most {}', 'train.max_warmup_steps')}"
    betas = [_setting_text(beta) for key in ("beta1", "beta2") if (beta := setting(f"train.{key}")) is not None]
    rows = {
        "method": [
            method,
            *(told(form, f"adapter.{key}") for form, key in of_adapter if lora),
            *(key for key in ("rslora", "dora") if lora and setting(f"adapter.{key}")),
            told("from {}", "adapter.path") if lora else "",
            told("preferences by {}", "train.preference") if setting("train.preference") != "none" else "",
        ],
        "model": [told("{}", "model.path"), told("made by {}", "model.factory"), " ".join(new.split())],
        "data": [
            told("text {}", "data.text"),
            told("records {}", "data.records"),
            units.rows_of(length) if (length := setting("data.sequence_length")) else "",
            "packed" if packed is True else "one document per sequence" if packed is False else "",
            told("evaluated on {}", "data.evaluation") or own_held_out,
        ],
        "steps": [
            told("{} steps", "train.steps"),
            told("{} sequences per step", "train.global_batch"),
            "micro-batches as the plan has them" if by_plan else told("micro-batches of {}", "train.micro_batch"),
        ],
        "optimizer": [
            _OPTIMIZERS.get(str(setting("train.optimizer")), "AdamW"),
            told("peak learning rate {}", "train.learning_rate"),
            told("schedule {}", "train.schedule"),
            warm_up,
            f"betas {' and '.join(betas)}" if betas else "",
            told("epsilon {}", "train.epsilon"),
            told("weight decay {}", "train.weight_decay"),
            told("gradients clipped to norm {}", "train.clip_norm"),
        ],
        "dtype": [f"{used_dtype} ({asked})" if asked and used_dtype not in ("", asked) else asked or used_dtype],
        "seed": [told("{}", "train.seed")],
    }  # fmt: skip
    joined = {what: ", ".join(filter(None, parts)) for what, parts in rows.items()}
    return [(what, text) for what, text in joined.items() if text and job]


def _setting_text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_setting_text, value))
    if value is None:
        return ""
    return format(value, {int: ",", float: "g"}.get(type(value), ""))
