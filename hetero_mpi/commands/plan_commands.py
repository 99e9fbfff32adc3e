"""The offline commands ``inspect``, ``plan`` and ``simulate``. This module imports neither torch nor MPI.

A profile contains the measured costs of the model, so a laptop can plan for any cluster, given its profile.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hetero_mpi.job.load import LoadedJob, job_from_tables, load_job, run_directory
from hetero_mpi.job.other_names import KEYS
from hetero_mpi.job.plan_request import build_plan_request, micro_batch_choices, timed_choices, with_memory_budget
from hetero_mpi.job.rules import EIGHT_BIT
from hetero_mpi.planning.analysis.idle_time import idling
from hetero_mpi.planning.decision.alternatives import losses, what_ifs
from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.decision.rules import chain_problems, difference_lines, request_differences
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.cluster_changes import is_packed, with_optimizer, with_wire
from hetero_mpi.planning.types.codec import encode, raise_all
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest, with_shared_nics
from hetero_mpi.planning.types.sizes import BLOCK_KEYS
from hetero_mpi.planning.types.toml_files import load_plan, load_plan_file, load_profile, plan_to_dict, save_plan
from hetero_mpi.report.past_run import job_of_run
from hetero_mpi.report.plan_text import costed_plan_lines, idling_lines, plan_lines, shared_nic_lines, what_if_lines
from hetero_mpi.report.profile_text import inspection_lines
from hetero_mpi.util import toml, units
from hetero_mpi.util.disk import require_regular, write_errors
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.shipped import profile_file, shipped_profiles
from hetero_mpi.util.terminal import wrap_text

OTHER_PROFILE = (
    "Plan with a profile of this job (`profile JOB -o FILE`; in Python, profile(job)), or change these keys of the job."
)
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
DEFAULT_SEQUENCES_PER_RANK = 4
MIN_BATCH = 32
"""Without a job, the global batch has ``DEFAULT_SEQUENCES_PER_RANK`` sequences per rank, but at least ``MIN_BATCH``."""
_MEASURED = (
    "model.", "adapter.", "tokenizer.", "train.freeze", "train.preference", "cluster.device", "cluster.threads",
)  # fmt: skip
"""Keys, or tables, that determine what a profile measures."""
_DROPOUT_WORDS = ("drop", "jitter")
"""Parts of the names of rates in a model's configuration; dropout changes the choice of micro-batches, not their times."""


@dataclass(frozen=True)
class PlanQuestion:
    """Input to the planner: a job, and the profile of the cluster to run it on."""

    loaded: LoadedJob
    profile: ClusterProfile
    request: PlanRequest
    remarks: tuple[str, ...]
    """Assumptions made for the request, to show to the user."""


def inspect(file: Path, output: Path | None, every: bool = False) -> list[str]:
    """Describe a profile, plan or checkpoint, whose type is detected from its content; also draw a figure of a profile.

    For a run directory, describe its profile (without a figure), its plan and its newest checkpoint.

    Args:
        file: a path, or the name of a shipped profile.
        output: path of the figure of a profile.
        every: print a row for every rank, even of a large cluster.

    Raises:
        UserError: If the file is corrupted or has an unknown format.
    """
    if file.is_dir():
        return _inspect_run(file, output, every)
    path = profile_file(file)
    try:
        require_regular(path)
        with path.open("rb") as opened:
            is_hdf5 = opened.read(len(HDF5_MAGIC)) == HDF5_MAGIC
        if is_hdf5:
            from hetero_mpi.commands.checkpoint_text import checkpoint_lines

            return checkpoint_lines(file)
        content = toml.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("inspect.unreadable", f"{file}: cannot be read ({error.strerror}); check the path") from error
    except (toml.TomlError, UnicodeDecodeError) as error:
        text = f"{file}: neither HDF5 nor TOML ({error}); pass a profile, a plan or a checkpoint"
        raise UserError("inspect.format", text) from error
    if "pipelines" in content:
        decision, report = load_plan_file(file)
        raise_all(str(file), [*chain_problems(decision)])
        return plan_lines(report or decision, None, every)
    if "devices" not in content:
        hint = "; for a job file, use `plan` or `simulate`" if "train" in content or "data" in content else ""
        text = f"{file}: not a profile ([[devices]]), a plan ([[pipelines]]) or a checkpoint{hint}"
        raise UserError("inspect.unknown_file", text)
    profile = load_profile(file)
    from hetero_mpi.report.figures.profile_curves import profile_picture
    from hetero_mpi.report.figures.style import save

    picture = save(profile_picture(profile), output or file.with_suffix(".png"), f"profile {file.stem}")
    return [*inspection_lines(profile, every), "", f"Picture: {picture}"]


def _inspect_run(directory: Path, picture: Path | None, every: bool) -> list[str]:
    if picture is not None:
        raise UserError("inspect.output", f"-o needs a profile file, such as {profile_file(directory)}")
    lines = [str(file := profile_file(directory)), *inspection_lines(load_profile(file), every)]
    newest = sorted((directory / "checkpoints").glob("step-*.h5"))[-1:]
    for file in (*directory.glob("plan.toml"), *newest):
        try:
            lines += ["", str(file), *inspect(file, None, every)]
        except UserError as error:
            if file in newest:
                raise
            lines += ["", *wrap_text("", str(error))]  # such as of a schedule whose file is gone
    return lines


def plan(
    job: Path | None, overrides: Sequence[str], profile: Path | None, plan_source: Path | None, output: Path | None,
    explain: bool, as_json: bool
) -> str | list[str]:  # fmt: skip
    """Analyse the planner's plan for a job, or a given plan. Returns lines to print or, with ``as_json``, a JSON object.

    Without a job and a profile, list the profiles.
    """
    if job is profile is None and not as_json:
        return profile_list("plan [JOB]")
    question = ask(job, overrides, profile)
    report = chosen_plan(question, plan_source)
    best, no_plan_reason = (report, "") if plan_source is None else _planner_report(question, report)
    result = outlined(report.plan, question.profile)
    lost = losses(report, best, question.profile, question.request)
    answers = list(what_ifs(best, question.profile, question.request, lost.free_links_s)) if explain else []
    if output is not None:
        with write_errors(output):
            save_plan(report, output)
    if as_json:
        tokens = report.plan.global_batch * report.plan.sequence_length
        figures: dict[str, Any] = {
            "plan": plan_to_dict(report),
            "step_s": report.predicted_step_s,
            "tokens_per_s": tokens / report.predicted_step_s if report.predicted_step_s > 0 else float("inf"),
            "bound_step_s": report.bound_step_s,
            "gap": report.predicted_step_s / report.bound_step_s - 1 if report.bound_step_s > 0 else 0.0,
            "utilisation": result.use,
            "limit": lost.limit,
            "lost": asdict(lost),
            "planner_step_s": None if no_plan_reason else best.predicted_step_s,
            "what_if": [asdict(answer) for answer in answers],
            "differences": request_differences(report.plan, question.request) if plan_source is not None else [],
            "remarks": question.remarks,
        }
        return json.dumps(encode(figures, infinity_as_text=True), indent=1)
    lines = costed_plan_lines(report, question.profile, result.use, lost)
    lines += difference_lines(report.plan, question.request) if plan_source is not None else []
    if no_plan_reason:
        lines += wrap_text("The planner found no plan: ", no_plan_reason)
    elif plan_source is not None:
        lines.append(f"The planner's plan: {units.seconds(best.predicted_step_s)} per step")
        lines += [line for reason in best.reasons for line in wrap_text("  ", reason)]
    lines += what_if_lines(answers, best.predicted_step_s)
    lines += [line for remark in question.remarks for line in wrap_text("", remark)]
    return lines + ([f"Written: {output}"] if output is not None else [])


def _planner_report(question: PlanQuestion, fallback: PlanReport) -> tuple[PlanReport, str]:
    """Return the planner's plan and ""; if the planner finds none, return ``fallback`` and the reason."""
    try:
        return make_plan(question.profile, question.request), ""
    except UserError as error:
        return fallback, str(error).splitlines()[0].partition(". ")[0]


def simulation(
    job: Path | None, overrides: Sequence[str], profile: Path | None, plan_source: Path | None, output: Path | None,
    shared_nic: bool
) -> list[str]:  # fmt: skip
    """Simulate a step, write ``timeline.png``, ``timeline.svg`` and ``trace.json``, and return the lines to print."""
    from hetero_mpi.report.figures.style import save
    from hetero_mpi.report.figures.timeline import Panel, timeline
    from hetero_mpi.report.trace import save_trace

    question = ask(job, overrides, profile)
    report = chosen_plan(question, plan_source)
    result = simulate(report.plan, with_shared_nics(question.profile) if shared_nic else question.profile)
    home = profile if job is None and profile and profile.is_dir() else run_directory(question.loaded)
    folder = output or home / "simulation"
    labels = {device.rank: device.name for device in question.profile.devices}
    used_ranks, ranks = len(result.busy_s), len(question.profile.devices)
    title = f"predicted step: {units.seconds(result.step_s)}, {used_ranks} of {units.plural(ranks, 'rank')}, {question.loaded.name}"
    figure = timeline([Panel(title, result.events)], labels)
    with write_errors(folder):
        paths = [save(figure, folder / f"timeline.{kind}", title) for kind in ("png", "svg")]
        paths.append(save_trace({"": result.events}, folder / "trace.json", labels))
    length = report.plan.sequence_length
    tokens = units.amount(report.plan.global_batch * length, length)
    return [
        *plan_lines(report, question.profile),
        *(difference_lines(report.plan, question.request) if plan_source is not None else []),
        *(line for remark in question.remarks for line in wrap_text("", remark)),
        *(shared_nic_lines(result.step_s, report.predicted_step_s) if shared_nic else []),
        f"Simulated step: {units.seconds(result.step_s)}, {len(result.events):,} events, {tokens}",
        *idling_lines(result, idling(result.events, report.plan), report.memory),
        "Written (trace.json opens in https://ui.perfetto.dev):",
        *(f"  {path}" for path in paths),
    ]


def profile_list(command: str) -> list[str]:
    """List the shipped profiles and those in the working directory, ``profiles/`` and ``runs/``, one per line."""
    shipped = shipped_profiles()
    files = sorted([*Path().glob("*.toml"), *Path("profiles").glob("*.toml"), *Path("runs").glob("*/profile.toml")])
    saved = [f.parent if f.parts[0] == "runs" else f for f in files if f.resolve() not in shipped.values()]
    paths = {str(path): path for path in saved} | shipped
    lines = [f"Profiles (hetero-mpi {command} --profile NAME):"]
    for name, path in paths.items():
        with contextlib.suppress(UserError):  # another kind of file
            profile = load_profile(path)
            kinds = units.join_with_counts((device.name for device in profile.devices), ", ")
            lines.append(f"  {name}: {kinds}; {_model_text(profile)}")
    return [*lines, "Measure your machines: hetero-mpi launch -np N -- profile JOB -o FILE"]


def ask(job: Path | None, overrides: Sequence[str], profile_path: Path | None) -> PlanQuestion:
    """Read a profile and a job that matches it. If no job is given, take the run's, or plan for the profile's model.

    Raises UserError if no profile is given, if a file is invalid, or if the profile was made for another model, dtype or sequence
    length.
    """
    if profile_path is None:
        raise UserError("plan.no_profile", "\n".join(["--profile is required", *profile_list("... [JOB]")]))
    if job is not None:
        loaded, profile = load_job(job, overrides), load_profile(profile_path)
        command = f"plan --profile {profile_path} --set train.global_batch={loaded.job.train.global_batch}"
        alternative = f"To plan for the profile's model instead, leave out the job:\n  python -m hetero_mpi {command}"
        return plan_question(loaded, profile, str(profile_path), f"{OTHER_PROFILE}\n{alternative}")
    profile, keys = load_profile(profile_path), (override.partition("=")[0].strip() for override in overrides)
    if fixed := [key for key in keys if _is_fixed(key)]:
        text = f"--set {', '.join(fixed)}: without a job, the plan is for the model and devices that {profile_path} describes. "
        text += "Leave this out, or give a job with these keys and a profile of that job (`profile JOB -o FILE`)"
        raise UserError("plan.fixed_by_profile", text, keys=fixed)
    run_job, subject = job_of_run(profile_path, overrides), "the run's job"
    if run_job is None:
        run_job = _job_for_profile(profile, profile_path.stem, overrides)
        subject = f"the profile's model ({_model_text(profile)})"
    advice = "Leave these --set options out, or measure a profile with them (`profile JOB -o FILE`)."
    question = plan_question(run_job, profile, str(profile_path), advice)
    rows = f"{run_job.job.train.global_batch} {units.rows_of(profile.model.sequence_length)}"
    remark = f"No job given: planning {rows} per step of {subject}; change with --set train.global_batch=N"
    return replace(question, remarks=(remark, *question.remarks))


def _is_fixed(key: str) -> bool:
    """Whether a key of the measured tables exists and changes what a profile measures."""
    free = key == "adapter.method" or any(word in key for word in _DROPOUT_WORDS)
    return not free and key.startswith(_MEASURED) and ".".join(key.split(".")[:2]) in KEYS


def _model_text(profile: ClusterProfile) -> str:
    model, count = profile.model, len(profile.model.layers)
    size = units.plural(count, "layer") if model.sequence_length == 1 else units.plural(count - 2, "block")
    return f"{model.model_type}, {size}, {model.dtype}"


def _job_for_profile(profile: ClusterProfile, name: str, overrides: Sequence[str]) -> LoadedJob:
    """Build a job for the profile's model. It is complete enough for planning, but not for training."""
    model, batch = profile.model, max(MIN_BATCH, DEFAULT_SEQUENCES_PER_RANK * len(profile.devices))
    tables: dict[str, dict[str, Any]] = {
        "model": {"config": {"model_type": model.model_type, BLOCK_KEYS[0]: len(model.layers) - 2}},
        "adapter": {"method": "none" if model.trained_whole else "lora"},
        "tokenizer": {"path": "."},
        "data": {"text": ["*.txt"], "sequence_length": model.sequence_length},
        "train": {"global_batch": batch, "dtype": model.dtype, "optimizer": model.optimizer},
    }
    tables["adapter"] |= {"rank": model.adapter_rank} if model.adapter_rank is not None else {}
    loaded = job_from_tables(tables, name, ".", overrides=overrides)
    table = loaded.job.model.model_copy(update={"quantization": _quantization(profile)})
    return replace(loaded, job=loaded.job.model_copy(update={"model": table}), path=Path("these settings"))


def plan_question(
    loaded: LoadedJob, profile: ClusterProfile, profile_name: str = "the given profile", advice: str = OTHER_PROFILE
) -> PlanQuestion:
    """Build the planner's input from a job and a profile that matches it.

    Args:
        profile_name: the name to use for the profile in messages.
        advice: end of the error message if the job and the profile do not match.

    Raises:
        UserError: If the profile was made for another model, dtype or sequence length than the job's, which emulates no cluster.
    """
    config = _model_keys(loaded)
    problems = _differences(loaded, config, profile) if loaded.job.cluster.emulate is None else []
    if problems:
        problem_lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError("plan.other_job", f"{profile_name} was not made for {loaded.path}:\n{problem_lines}\n{advice}")
    train = loaded.job.train
    train_table = train.model_copy(update={"dtype": profile.model.dtype})
    loaded = replace(loaded, job=loaded.job.model_copy(update={"train": train_table}))
    profile = with_wire(with_memory_budget(profile, loaded.job.cluster.memory_bytes), train.wire)
    remarks = [f"Profile: {profile_name} ({profile.source}, {profile.date})"]
    if config is None and loaded.job.model.factory is None:
        remarks.append("The model's config.json is not on this machine; assuming the profile's model, without dropout")
    if train.optimizer != profile.model.optimizer:
        assumption = "uses AdamW's bytes and times"
        if profile.model.trained_whole:
            profile = replace(profile, model=with_optimizer(profile.model, train.optimizer))
            assumption = "estimates bytes, but uses AdamW's times; 8-bit updates on a CPU may take longer"
        remarks.append(f"{train.optimizer}: the profile was made with AdamW. The plan {assumption}")
    mps_ranks = [device.rank for device in profile.devices if device.backend == "mps"]
    if train.optimizer == EIGHT_BIT and mps_ranks:
        remarks.append(f"{EIGHT_BIT}: bitsandbytes has no kernel for mps ({units.ranks(mps_ranks)}), so a run fails")
    ranks, dropout = len(profile.devices), uses_dropout(loaded, config or {})
    _, reason = micro_batch_choices(train.global_batch, train.micro_batch, ranks, dropout)
    request = replace(build_plan_request(loaded, ranks, dropout), sequence_length=profile.model.sequence_length)
    request, untimed = timed_choices(request, profile)
    return PlanQuestion(loaded, profile, request, (*remarks, reason, *untimed))


def uses_dropout(loaded: LoadedJob, config: dict[str, Any]) -> bool:
    """Return whether the job or its model config enables dropout. Defaults of the model family are not checked."""
    words = _DROPOUT_WORDS if loaded.job.train.dropout else _DROPOUT_WORDS[1:]
    rates = [value for key, value in config.items() if isinstance(value, float) and any(word in key for word in words)]
    return any(rate > 0 for rate in rates) or (loaded.job.adapter.method != "none" and loaded.job.adapter.dropout > 0)


def chosen_plan(question: PlanQuestion, plan_source: Plan | PlanReport | str | Path | None) -> PlanReport:
    """Return the given plan or plan file after checking it and predicting its cost, or the planner's plan if none is given."""
    if plan_source is None:
        return make_plan(question.profile, question.request)
    plan = load_plan(plan_source) if isinstance(plan_source, str | Path) else plan_source
    return complete_plan(plan.plan if isinstance(plan, PlanReport) else plan, question.profile, question.request)


def _model_keys(loaded: LoadedJob) -> dict[str, Any] | None:
    """Return the keys of the job's ``config.json``, or None if the file cannot be read on this machine."""
    model = loaded.job.model
    if isinstance(model.config, dict):
        return model.config
    path = loaded.resolve(model.config or model.path or "")
    path = path if model.config is not None else path / "config.json"
    require_regular(path)
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return keys if isinstance(keys, dict) else None


def _differences(loaded: LoadedJob, config: dict[str, Any] | None, profile: ClusterProfile) -> list[str]:
    """Describe each difference between the job and the model for which the profile was made."""
    job, model = loaded.job, profile.model
    kind = job.model.factory or (config or {}).get("model_type")
    key = next((name for name in ("model.factory", "model.path") if getattr(job.model, name[6:])), "model.config")
    if kind not in (None, model.model_type):
        return [f'{key}: a model of type "{kind}": the profile has "{model.model_type}"']
    problems = []
    if job.data.sequence_length != model.sequence_length:
        problems.append(f"data.sequence_length = {job.data.sequence_length}: the profile has {model.sequence_length}")
    if job.train.dtype not in ("auto", model.dtype):
        problems.append(f'train.dtype = "{job.train.dtype}": the profile has "{model.dtype}"')
    if model.optimizer not in ("adamw", job.train.optimizer):
        problems.append(f'train.optimizer = "{job.train.optimizer}": the profile has "{model.optimizer}"')
    blocks = next((config[key] for key in BLOCK_KEYS if config and key in config), None)
    if blocks is not None and blocks != len(model.layers) - 2:
        problems.append(f"{key}: a model of {units.plural(blocks, 'block')}: the profile has {len(model.layers) - 2}")
    if model.layers[1:-1] and not job.train.freeze and model.trained_whole != (job.adapter.method == "none"):
        measured = "full fine-tuning" if model.trained_whole else "an adapter over frozen weights"
        problems.append(f'adapter.method = "{job.adapter.method}": the profile has {measured}')
    elif model.adapter_rank not in (None, job.adapter.rank):
        problems.append(f"adapter.rank = {job.adapter.rank}: the profile has {model.adapter_rank}")
    if _quantization(profile) != job.model.quantization:
        problems.append(f'model.quantization = "{job.model.quantization}": the profile has "{_quantization(profile)}"')
    return problems


def _quantization(profile: ClusterProfile) -> str:
    return "nf4" if is_packed(profile.model) else "none"
