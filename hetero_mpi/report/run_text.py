"""Describe runs as text: the final summary, comparisons with one device (``baseline``), and the job."""

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
from hetero_mpi.report.profile_text import place_text
from hetero_mpi.report.table import Table
from hetero_mpi.rundir.metrics import WARM_UP_STEPS, Evaluation, StepMetrics, by_plan, rewards_text
from hetero_mpi.util import units
from hetero_mpi.util.terminal import wrap_text

MAX_UNEXPLAINED_RATIO = 0.15
"""Relative difference between measured and predicted step time below which no reason is given."""
MAX_HARDLY_FACTOR = 1.1
"""Speedup below which the answer is "Hardly", since it is within the prediction error and the variation between runs."""
_PROFILED = "when they were measured"
_OPTIMIZERS = {"adamw_8bit": "8-bit AdamW", "adafactor": "Adafactor", "muon": "Muon and AdamW"}
SpeedChanges = Sequence[tuple[int, int, float]]
"""Emulated speed changes: (rank, step counted from 0, speed relative to the profile)."""


# The end of a run


def final_lines(
    report: PlanReport,
    profile: ClusterProfile,
    steps: Sequence[StepMetrics],
    evaluations: Sequence[Evaluation] = (),
    unigram_entropy: float | None = None,
    paths: Mapping[str, Path] | None = None,
    speed_changes: SpeedChanges = (),
    compared: str = "",
    cpu_text: str = "",
) -> list[str]:
    """Summarise a run at its end.

    ``steps`` and ``evaluations`` are those since the last start. ``unigram_entropy`` is that of the training targets, in nats per
    token. ``paths`` maps descriptions to output paths. ``compared`` is the unit of a preference loss, "pair" or "answer".
    ``cpu_text`` describes the CPU use of other programs.
    """
    lines = time_lines(report, profile, steps, speed_changes, cpu_text)
    per = "nats per token" if units.unit_of(report.plan.sequence_length) == "tokens" else "per sample"
    lines += loss_lines(steps, evaluations, unigram_entropy, f"per {compared}" if compared else per)
    if paths:
        width = max(len(description) for description in paths)
        lines += ["Written:", *(f"  {description:<{width}}  {path}" for description, path in paths.items())]
    return lines


def time_lines(
    report: PlanReport,
    profile: ClusterProfile,
    steps: Sequence[StepMetrics],
    speed_changes: SpeedChanges = (),
    cpu_text: str = "",
) -> list[str]:
    """Compare measured and predicted step times, for earlier plans too, and give the likely reason for a large difference."""
    *before, last = by_plan(steps) or [[]]
    warm = last[WARM_UP_STEPS:]
    if warm:
        times = StepTimes(tuple(step.step_s for step in warm), report.expected_step_s)
        rate = f"{statistics.median(step.tokens_per_s for step in warm):,.0f} {units.unit_of(report.plan.sequence_length)}/s"
        line = f"Step time{', emulated' if profile.emulated else ''}: {units.seconds(times.step_s)} measured (median), {rate}"
        ratio = times.ratio
        if times.predicted_s > 0:
            line += f"; {units.seconds(report.predicted_step_s)} predicted"
            line += f", {units.seconds(report.tried_step_s)} calibrated" if report.tried_step_s is not None else ""
        lines = [line + (f" (since the plan changed after step {last[0].step - 1})" if before else "")]
        if abs(ratio - 1) > MAX_UNEXPLAINED_RATIO:
            difference = f"{units.percent(abs(ratio - 1))} {'longer' if ratio > 1 else 'shorter'}"
            difference = f"{ratio:.2g} times as long" if ratio >= 2 else difference
            # A plan made during the run accounts for earlier speed changes.
            begin = last[0].step - 1 if before else 0
            changes = [change for change in speed_changes if begin <= change[1] < last[-1].step]
            measured_when = _PROFILED if report.tried_step_s is None else "in the calibration run"
            when = "when the plan was made" if before else measured_when
            lines.append(f"  {difference}: {_difference_reason(profile, changes, ratio, cpu_text, when)}")
        elif cpu_text:
            lines.append(f"  {cpu_text}")
    else:
        done = units.plural(len(last), "step")
        lines = [f"Step time: not measured in {done}, as the first {WARM_UP_STEPS} do not count"]
    for earlier_steps in before:
        measured = statistics.median(step.step_s for step in earlier_steps[WARM_UP_STEPS:] or earlier_steps)
        lines.append(
            f"  before, up to step {earlier_steps[-1].step}: {units.seconds(measured)} measured, "
            f"{units.seconds(earlier_steps[0].predicted_step_s)} predicted"
        )
    return lines


def _difference_reason(profile: ClusterProfile, changes: SpeedChanges, ratio: float, cpu_text: str, when: str) -> str:
    if changes:
        changed = ", ".join(f"rank {rank} at {share:g} from step {step + 1}" for rank, step, share in changes)
        return f"devices changed speed because of [cluster] emulate_changes ({changed}), which the prediction does not include"
    if profile.emulated:
        return "the ranks were slower than the emulated times (see the line Emulation): raise [cluster] time_scale"
    if cpu_text and ratio > 1:
        return cpu_text
    if ratio < 1 and any(host.other_threads for host in profile.hosts):
        return "other programs used more of the cores during the calibration run"
    comparison = f"{'slower than' if ratio > 1 else 'faster than'} {when}"
    if when != _PROFILED:
        return f"the machines are {comparison}"
    if profile.source != MEASURED:
        return f"the profile is from elsewhere ({profile.source}): measure these machines (leave profile.path empty)"
    return f"the machines are {comparison}: to measure again, use --reprofile"


def loss_lines(
    steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation], unigram_entropy: float | None, per: str
) -> list[str]:
    """Report the first and last loss, the last evaluation loss, and the difference from the unigram entropy if it is known."""
    lines = []
    if steps:
        first, last = steps[0], steps[-1]
        losses = [f"{step.loss:.4f} at step {step.step}" for step in ([first, last] if first is not last else [last])]
        lines.append(f"Loss: {', '.join(losses)} ({per}){rewards_text(last)}")
    for evaluation in evaluations[-1:]:
        lines.append(f"Evaluation loss: {evaluation.loss:.4f} at step {evaluation.step}{evaluation.beside()}")
    if unigram_entropy is not None:
        line = f"Unigram entropy of the training text (loss by token frequencies alone): {unigram_entropy:.4f}"
        if (evaluations or steps) and not any(step.router_loss is not None for step in steps):
            final_loss = evaluations[-1].loss if evaluations else steps[-1].loss
            below = unigram_entropy - final_loss
            loss_name, side = "evaluation loss" if evaluations else "loss", "below" if below >= 0 else "above"
            line += f"; the {loss_name} is {abs(below):.4f} {side} it"
        lines.append(line)
    return lines


# Comparison of devices


def baseline_lines(
    singles: Sequence[Alone], report: PlanReport, profile: ClusterProfile, tokens: int, run: PastRun | None, remarks: Sequence[str]
) -> list[str]:  # fmt: skip
    """Compare each kind of device alone with all devices together, and conclude whether the other devices help.

    ``singles`` has a prediction for each kind of device. If ``run`` is given, its measured step time is shown as well.
    """
    kind = ", emulated" if profile.emulated else ""
    timed = []
    for single in singles:
        how, device = single.problem or f"predicted{kind}", place_text(profile, single.rank)
        timed.append((f"rank {single.rank} alone", device, single.step_s, how))
    together = f"{len(report.plan.ranks)} of {units.plural(len(profile.devices), 'rank')}"
    timed.append((together, devices_text(profile), report.predicted_step_s, f"predicted{kind}"))
    measured = run.median_step_s() if run is not None else None
    if run is not None and measured is not None:
        how = f"measured{kind}, median of {units.plural(len(run.warm_steps), 'step')}"
        timed.append((together, f"run {run.typed_directory or run.directory}", measured, how))
    rows = [
        (who, device, *((units.seconds(step_s), f"{tokens / step_s:,.0f}") if step_s else ("", "")), how)
        for who, device, step_s, how in timed
    ]
    table = Table.of_texts(("", "device", "step", f"{units.unit_of(report.plan.sequence_length)}/s", ""), rows)
    lines = [f"For {units.amount(tokens, report.plan.sequence_length)} per step{kind}:", *table.lines(), ""]
    lines += ["Do the other devices help?", *wrap_text("  ", worth_adding(singles, report, profile, measured)), ""]
    return [*lines, *(line for remark in remarks for line in wrap_text("", remark))]


def worth_adding(
    singles: Sequence[Alone], report: PlanReport, profile: ClusterProfile, measured_s: float | None
) -> str:
    """Describe the gain over the best single device. ``measured_s`` is the step time of all devices together, if known."""
    if len(singles) == 1 and len(report.memory) + len(report.idle) <= 1:
        return "There is only one device."
    capable = [single for single in singles if single.step_s is not None]
    if not capable:
        return "Yes: no single device can run this job."
    best = min(capable, key=lambda single: (single.step_s or 0.0, single.rank))
    assert best.step_s is not None
    if len(report.plan.ranks) == 1:
        return f"No: the plan uses only rank {report.plan.ranks[0]}, as the other ranks would slow it down."
    predicted_gain = best.step_s / report.predicted_step_s if report.predicted_step_s > 0 else math.nan
    # The time alone is only predicted. If steps were much faster than predicted, other programs may have slowed both predictions.
    slowdown = measured_s / report.predicted_step_s if measured_s and report.predicted_step_s > 0 else 1.0
    is_measured = measured_s and slowdown >= 1 - MAX_UNEXPLAINED_RATIO
    gain = best.step_s / measured_s if measured_s and is_measured else predicted_gain
    answer = "No" if gain < 1 else "Hardly" if gain < MAX_HARDLY_FACTOR else "Yes"
    source = "measured" if is_measured else "predicted"
    text = f"{answer}: all devices together are {gain:.2f} times as fast ({source}) as "
    text += f"{place_text(profile, best.rank)} alone (predicted)"
    if is_measured and math.isfinite(predicted_gain):
        text += f"; the prediction was {predicted_gain:.2f} times"
    if abs(slowdown - 1) > MAX_UNEXPLAINED_RATIO:
        text += f". Steps took {slowdown:.2g} times as long as predicted, for example because the load of other programs differed; "
        text += "the time alone was not measured (run with -np 1)"
    return text + "."


def next_steps(run: PastRun) -> list[tuple[str, str]]:
    """Suggest next commands, as (command, description), depending on the state of the run."""
    run_dir, program = shlex.quote(run.typed_directory), "python -m hetero_mpi"
    has_model = any((run.directory / name).is_dir() for name in ("model", "adapter"))
    done, total_steps = run.metrics.steps[-1].step if run.metrics.steps else 0, run.setting("train", "steps")
    commands = []
    is_running = run.present is not None and run.present.alive and not run.over
    if isinstance(total_steps, int) and done < total_steps and run.checkpoints and not is_running:
        resume = f"{program} train {shlex.quote(run.job_file)} --run-dir {run_dir} --resume"
        description = f"with mpirun or launch, on any ranks: resume after step {run.checkpoints[-1].step:,}"
        commands.append((resume, description))
    if has_model and run.setting("model", "factory") is None:
        commands.append((f'{program} generate {run_dir} --prompt "..."', "generate text with the trained model"))
        commands.append((f"{program} serve {run_dir}", "serve an OpenAI-compatible API"))
        merge = " --merge" if run.setting("adapter", "method") == "lora" else ""
        commands.append((f"{program} export {run_dir} OUT{merge}", "export a Hugging Face directory with a model card"))
    if run.profile is not None and len(run.profile.devices) > 1:
        commands.append((f"{program} baseline --profile {run_dir}", "compare each kind of device with all devices"))
    if run.metrics.steps:
        commands.append((f"{program} compare {run_dir} OTHER", "compare this run with another run"))
    return commands


def devices_text(profile: ClusterProfile | None) -> str:
    return units.join_with_counts((device.name for device in profile.devices), ", ") if profile is not None else ""


# The job


def job_rows(job: Mapping[str, Any], used_dtype: str = "") -> list[tuple[str, str]]:
    """Summarise a job as (topic, settings), omitting unset keys. ``used_dtype`` is the actual compute dtype, if known."""

    def setting(name: str) -> Any:
        table, key = name.split(".")
        values = job.get(table)
        return values.get(key) if isinstance(values, Mapping) else None

    def formatted(form: str, name: str) -> str:
        text = _setting_text(setting(name))
        return form.format(text) if text else ""

    lora, packed = setting("adapter.method") == "lora", setting("model.factory") is None and setting("data.packing")
    new_model = setting("model.config") is not None or setting("model.factory") is not None
    full = "training from scratch" if new_model else "full fine-tuning"
    method = "LoRA" if lora else full if setting("adapter.method") == "none" else ""
    if lora and setting("model.quantization") == "nf4":
        method += f" on NF4 weights{', double quantization' if setting('model.double_quantization') else ''}"
    of_adapter = (("rank {}", "rank"), ("alpha {}", "alpha"), ("dropout {}", "dropout"), ("targets {}", "targets"))
    config, held_out = setting("model.config"), setting("data.evaluation_fraction")
    job_dtype = formatted("{}", "train.dtype")
    is_share = isinstance(held_out, (int, float)) and 0 < held_out < 1 and setting("model.factory") is None
    kind = f"{units.row(setting('data.sequence_length'))}s"
    held_out_text = f"{units.percent(held_out)} of the {kind} for evaluation" if is_share else ""
    new = f"a new {config.get('model_type', '')} model" if isinstance(config, Mapping) else _setting_text(config)
    by_plan = setting("train.micro_batch") == "auto"
    warm_up = formatted("{} steps of warm-up", "train.warmup_steps")
    if isinstance(share := setting("train.warmup_steps"), float) and 0 < share < 1:
        warm_up = f"warm-up over {units.percent(share)} of steps{formatted(', at most {}', 'train.max_warmup_steps')}"
    betas = [_setting_text(beta) for key in ("beta1", "beta2") if (beta := setting(f"train.{key}")) is not None]
    rows = {
        "method": [
            method,
            *(formatted(form, f"adapter.{key}") for form, key in of_adapter if lora),
            *(key for key in ("rslora", "dora") if lora and setting(f"adapter.{key}")),
            formatted("from {}", "adapter.path") if lora else "",
            formatted("preferences by {}", "train.preference") if setting("train.preference") != "none" else "",
        ],
        "model": [formatted("{}", "model.path"), formatted("built by {}", "model.factory"), " ".join(new.split())],
        "data": [
            formatted("text {}", "data.text"),
            formatted("records {}", "data.records"),
            units.rows_of(length) if (length := setting("data.sequence_length")) else "",
            "packed" if packed is True else "one document per sequence" if packed is False and kind == "sequences" else "",
            formatted("evaluated on {}", "data.evaluation") or held_out_text,
        ],
        "steps": [
            "1 step" if setting("train.steps") == 1 else formatted("{} steps", "train.steps"),
            formatted(f"{{}} {kind} per step", "train.global_batch"),
            "micro-batches chosen by the plan" if by_plan else formatted("micro-batches of {}", "train.micro_batch"),
        ],
        "optimizer": [
            _OPTIMIZERS.get(str(setting("train.optimizer")), "AdamW"),
            formatted("peak learning rate {}", "train.learning_rate"),
            formatted("schedule {}", "train.schedule"),
            warm_up,
            f"betas {' and '.join(betas)}" if betas else "",
            formatted("epsilon {}", "train.epsilon"),
            formatted("weight decay {}", "train.weight_decay"),
            formatted("gradients clipped to norm {}", "train.clip_norm"),
        ],
        "dtype": [f"{used_dtype} ({job_dtype})" if job_dtype and used_dtype not in ("", job_dtype) else job_dtype or used_dtype],
        "seed": [formatted("{}", "train.seed")],
    }  # fmt: skip
    text_by_topic = {topic: ", ".join(filter(None, parts)) for topic, parts in rows.items()}
    return [(topic, text) for topic, text in text_by_topic.items() if text and job]


def _setting_text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_setting_text, value))
    if value is None:
        return ""
    return format(value, {int: ",", float: "g"}.get(type(value), ""))
