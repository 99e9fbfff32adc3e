"""The commands that need no cluster: ``inspect``, ``plan`` and ``simulate``. Neither torch nor MPI is imported.

Costs of the model come from the profile, so a laptop answers for any cluster whose profile it has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hetero_mpi.job.load import LoadedJob, job_from_tables, load_job, run_directory
from hetero_mpi.job.plan_request import build_plan_request, micro_batch_choices, timed_choices, with_memory_budget
from hetero_mpi.job.rules import EIGHT_BIT
from hetero_mpi.planning.analysis.idle_time import idling
from hetero_mpi.planning.decision.alternatives import losses, what_ifs
from hetero_mpi.planning.decision.planner import complete_plan, differences, make_plan
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.cluster_changes import with_optimizer, with_wire
from hetero_mpi.planning.types.codec import encode
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest, with_shared_nics
from hetero_mpi.planning.types.sizes import BLOCK_KEYS
from hetero_mpi.planning.types.toml_files import load_plan, load_plan_file, load_profile, plan_to_dict, save_plan
from hetero_mpi.report.plan_text import costed_plan_lines, idling_lines, plan_lines, shared_nic_lines, what_if_lines
from hetero_mpi.report.profile_text import inspection_lines
from hetero_mpi.util import toml, units
from hetero_mpi.util.disk import require_regular, write_errors
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.shipped import profile_file
from hetero_mpi.util.terminal import wrap_text

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
SEQUENCES_PER_RANK = 4
LEAST_BATCH = 32
"""Sequences per step where no job says how many: so many for each rank, and this many at least."""


@dataclass(frozen=True)
class PlanQuestion:
    """A job, on the cluster of a profile."""

    loaded: LoadedJob
    profile: ClusterProfile
    request: PlanRequest
    remarks: tuple[str, ...]
    """Sentences for a person about what was taken for granted."""


def inspect(file: Path, output: Path | None, every: bool = False) -> list[str]:
    """A profile (also a shipped one, by its name), a plan or a checkpoint as lines, told apart by content; a profile is drawn, too.

    Of a run directory: its profile, without a picture, its plan, and its newest checkpoint.

    Args:
        output: of the picture.
        every: of a cluster of many ranks, a row for each of them.

    Raises:
        UserError: it is none of them, or damaged.
    """
    if file.is_dir():
        return _inspect_run(file, output, every)
    place = profile_file(file)
    try:
        require_regular(place)
        with place.open("rb") as opened:
            is_hdf5 = opened.read(len(HDF5_MAGIC)) == HDF5_MAGIC
        if is_hdf5:
            from hetero_mpi.commands.checkpoint_text import checkpoint_lines

            return checkpoint_lines(file)
        content = toml.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("inspect.unreadable", f"{file}: cannot be read ({error.strerror}); check the path") from error
    except (toml.TomlError, UnicodeDecodeError) as error:
        raise UserError(
            "inspect.format",
            f"{file}: neither an HDF5 nor a TOML file ({error}); give a profile, a plan or a checkpoint",
        ) from error
    if "pipelines" in content:
        decision, report = load_plan_file(file)
        return plan_lines(report or decision, None, every)
    if "devices" not in content:
        hint = "; it looks like a job: ask with `plan` or `simulate`" if "train" in content or "data" in content else ""
        raise UserError(
            "inspect.unknown_file",
            f"{file}: neither a profile ([[devices]]), nor a plan ([[pipelines]]), nor a checkpoint{hint}",
        )
    profile = load_profile(file)
    from hetero_mpi.report.figures.profile_curves import profile_picture
    from hetero_mpi.report.figures.style import save

    drawn = save(profile_picture(profile), output or file.with_suffix(".png"), f"profile {file.stem}")
    return [*inspection_lines(profile, every), "", f"Picture: {drawn}"]


def _inspect_run(directory: Path, picture: Path | None, every: bool) -> list[str]:
    if picture is not None:
        raise UserError("inspect.output", f"-o draws a profile: name the file, such as {profile_file(directory)}")
    lines = [str(file := profile_file(directory)), *inspection_lines(load_profile(file), every)]
    newest = max((directory / "checkpoints").glob("step-*.h5"), default=None)
    for file in filter(None, (directory / "plan.toml", newest)):
        if file.exists():
            lines += ["", str(file), *inspect(file, None, every)]
    return lines


def plan(
    job: Path | None,
    overrides: Sequence[str],
    profile: Path,
    given: Path | None,
    output: Path | None,
    explain: bool,
    as_json: bool,
) -> str | list[str]:
    """The planner's plan for a job, or the given one, with everything that is known about it: as lines, or as one JSON object."""
    question = ask(job, overrides, profile)
    chosen = chosen_plan(question, given)
    own, none = (chosen, "") if given is None else _own_plan(question, chosen)
    result = outlined(chosen.plan, question.profile)
    lost = losses(chosen, own, question.profile, question.request)
    answers = list(what_ifs(own, question.profile, question.request, lost.free_links_s)) if explain else []
    otherwise = differences(chosen.plan, question.request) if given is not None else []
    if output is not None:
        with write_errors(output):
            save_plan(chosen, output)
    if as_json:
        tokens = chosen.plan.global_batch * chosen.plan.sequence_length
        figures: dict[str, Any] = {
            "plan": plan_to_dict(chosen),
            "step_s": chosen.predicted_step_s,
            "tokens_per_s": tokens / chosen.predicted_step_s if chosen.predicted_step_s > 0 else float("inf"),
            "bound_step_s": chosen.bound_step_s,
            "gap": chosen.predicted_step_s / chosen.bound_step_s - 1 if chosen.bound_step_s > 0 else 0.0,
            "utilisation": result.use,
            "limit": lost.limit,
            "lost": asdict(lost),
            "planner_step_s": None if none else own.predicted_step_s,
            "what_if": [asdict(answer) for answer in answers],
            "differences": otherwise,
            "remarks": question.remarks,
        }
        return json.dumps(encode(figures, infinity_as_text=True), indent=1)
    lines = costed_plan_lines(chosen, question.profile, result.use, lost)
    lines += [line for text in otherwise for line in wrap_text("The given plan differs from the job: ", text)]
    if none:
        lines += wrap_text("The planner has no plan of its own: ", none)
    elif given is not None:
        lines.append(f"The planner's own plan: {units.seconds(own.predicted_step_s)} per step")
        lines += [line for reason in own.reasons for line in wrap_text("  ", reason)]
    lines += [*what_if_lines(answers, own.predicted_step_s), *_said(question)]
    if output is not None:
        lines.append(f"Written: {output}")
    return lines


def _own_plan(question: PlanQuestion, chosen: PlanReport) -> tuple[PlanReport, str]:
    """The planner's plan; or, where it finds none, the chosen one, and why there is none."""
    try:
        return make_plan(question.profile, question.request), ""
    except UserError as error:
        return chosen, str(error).splitlines()[0].partition(". ")[0]


def simulation(
    job: Path | None,
    overrides: Sequence[str],
    profile: Path,
    given: Path | None,
    output: Path | None,
    shared_nic: bool,
) -> list[str]:
    """Simulate a step; writes ``timeline.png``, ``timeline.svg`` and ``trace.json``. Returns the lines to print."""
    from hetero_mpi.report.figures.style import save
    from hetero_mpi.report.figures.timeline import Panel, timeline
    from hetero_mpi.report.trace import save_trace

    question = ask(job, overrides, profile)
    chosen = chosen_plan(question, given)
    result = simulate(chosen.plan, with_shared_nics(question.profile) if shared_nic else question.profile)
    folder = output if output is not None else run_directory(question.loaded) / "simulation"
    labels = {device.rank: device.name for device in question.profile.devices}
    used, ranks = len(result.busy_s), len(question.profile.devices)
    title = f"predicted step: {units.seconds(result.step_s)}, {used} of {ranks} ranks, {question.loaded.name}"
    figure = timeline([Panel(title, result.events)], labels)
    with write_errors(folder):
        written = [save(figure, folder / f"timeline.{kind}", title) for kind in ("png", "svg")]
        written.append(save_trace({"": result.events}, folder / "trace.json", labels))
    length = chosen.plan.sequence_length
    tokens = units.amount(chosen.plan.global_batch * length, length)
    return [
        *plan_lines(chosen, question.profile),
        *_said(question),
        *(shared_nic_lines(result.step_s, chosen.predicted_step_s) if shared_nic else []),
        f"Simulated step: {units.seconds(result.step_s)}, {len(result.events):,} events, {tokens}",
        *idling_lines(result, idling(result.events, chosen.plan), chosen.memory),
        "Written (trace.json opens in https://ui.perfetto.dev):",
        *(f"  {path}" for path in written),
    ]


def ask(job: Path | None, overrides: Sequence[str], profile_path: Path) -> PlanQuestion:
    """Read a profile, and a job that it fits; None: the profile's own model is what is trained.

    Raises UserError: one of them is damaged, or the profile was made for another model, dtype or sequence length.
    """
    if job is not None:
        loaded, profile = load_job(job, overrides), load_profile(profile_path)
        command = f"plan --profile {profile_path} --set train.global_batch={loaded.job.train.global_batch}"
        own = f"To plan the profile's own model instead, leave the job out:\n  python -m hetero_mpi {command}"
        return plan_question(loaded, profile, str(profile_path), own)
    profile = load_profile(profile_path)
    loaded = _job_of(profile, profile_path.stem, overrides)
    asked = plan_question(loaded, profile, str(profile_path))
    train, model = loaded.job.train, profile.model
    taken = f"No job given: {train.global_batch} {units.rows_of(model.sequence_length)} per step of the profile's own "
    taken += f"model ({model.model_type}, {len(model.layers) - 2} blocks, {model.dtype}); --set train.global_batch=N changes that"
    return replace(asked, remarks=(taken, *asked.remarks))


def _job_of(profile: ClusterProfile, name: str, overrides: Sequence[str]) -> LoadedJob:
    """A job that trains the profile's model, as far as planning asks."""
    model, ranks = profile.model, len(profile.devices)
    tables: dict[str, dict[str, Any]] = {
        "model": {"config": {"model_type": model.model_type, BLOCK_KEYS[0]: len(model.layers) - 2}},
        "adapter": {"method": "lora" if _frozen(profile) else "none"},
        "tokenizer": {"path": "."},
        "data": {"text": ["*.txt"], "sequence_length": model.sequence_length},
        "train": {"global_batch": max(LEAST_BATCH, SEQUENCES_PER_RANK * ranks), "dtype": model.dtype},
    }
    tables["train"]["optimizer"] = model.optimizer
    loaded = job_from_tables(tables, name, ".", overrides=overrides)
    return replace(loaded, path=Path("a job of its own model"))


def plan_question(
    loaded: LoadedJob, profile: ClusterProfile, named: str = "the given profile", otherwise: str = ""
) -> PlanQuestion:
    """The planner's question about a job and a profile that fits it.

    Args:
        named: what the profile is called in texts.
        otherwise: what else one may do where they do not fit.

    Raises:
        UserError: the profile was made for another model, dtype or sequence length.
    """
    config = _model_keys(loaded)
    problems = _differences(loaded, config, profile)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(
            "plan.other_job",
            f"{named} was not made for {loaded.path}:\n{listed}\n"
            f"Plan with a profile of this job (`profile JOB -o FILE`), or change the job (--set table.key=value)."
            + (f"\n{otherwise}" if otherwise else ""),
        )
    train = loaded.job.train
    settled = train.model_copy(update={"dtype": profile.model.dtype})
    loaded = replace(loaded, job=loaded.job.model_copy(update={"train": settled}))
    profile = with_wire(with_memory_budget(profile, loaded.job.cluster.memory_bytes), train.wire)
    remarks = [f"Profile: {named} ({profile.source}, {profile.date})"]
    if config is None:
        remarks.append("The model's configuration is not here: taken to be the profile's, without dropout")
    if train.optimizer != profile.model.optimizer:
        what = "bytes and times are those of AdamW"
        if profile.model.trained_whole:
            profile = replace(profile, model=with_optimizer(profile.model, train.optimizer))
            what = "bytes are estimated; its times are those of AdamW, and may be longer, in 8 bits where a CPU steps"
        remarks.append(f"{train.optimizer}: the profile was made with AdamW. The optimizer's {what}")
    without = [device.rank for device in profile.devices if device.backend == "mps"]
    if train.optimizer == EIGHT_BIT and without:
        remarks.append(
            f"{EIGHT_BIT}: bitsandbytes has no kernel for mps ({units.ranks(without)}): a run refuses it there"
        )
    ranks, dropout = len(profile.devices), uses_dropout(loaded, config or {})
    _, reason = micro_batch_choices(train.global_batch, train.micro_batch, ranks, dropout)
    request, untimed = timed_choices(build_plan_request(loaded, ranks, dropout), profile)
    return PlanQuestion(loaded, profile, request, (*remarks, reason, *untimed))


def _said(question: PlanQuestion) -> list[str]:
    return [line for remark in question.remarks for line in wrap_text("", remark)]


def uses_dropout(loaded: LoadedJob, config: dict[str, Any]) -> bool:
    """Whether the job has dropout, as far as its files say. (A family's own defaults are not seen.)"""
    words = ("drop", "jitter") if loaded.job.train.dropout else ("jitter",)
    rates = [value for key, value in config.items() if isinstance(value, float) and any(word in key for word in words)]
    return any(rate > 0 for rate in rates) or (loaded.job.adapter.method != "none" and loaded.job.adapter.dropout > 0)


def chosen_plan(question: PlanQuestion, given: Plan | str | Path | None) -> PlanReport:
    """The given plan, or that of a file, checked and costed; else the planner's."""
    if given is None:
        return make_plan(question.profile, question.request)
    plan = given if isinstance(given, Plan) else load_plan(given)
    return complete_plan(plan, question.profile, question.request)


def _model_keys(loaded: LoadedJob) -> dict[str, Any] | None:
    """Keys of the job's ``config.json``, as far as they are on this machine."""
    model = loaded.job.model
    if isinstance(model.config, dict):
        return model.config
    path = (
        loaded.resolve(model.config) if model.config is not None else loaded.resolve(model.path or "") / "config.json"
    )
    require_regular(path)
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return keys if isinstance(keys, dict) else None


def _differences(loaded: LoadedJob, config: dict[str, Any] | None, profile: ClusterProfile) -> list[str]:
    """The differences between the job and the profile's model, in words."""
    job, model = loaded.job, profile.model
    found = []
    if job.data.sequence_length != model.sequence_length:
        found.append(f"data.sequence_length = {job.data.sequence_length}: the profile has {model.sequence_length}")
    if job.train.dtype not in ("auto", model.dtype):
        found.append(f'train.dtype = "{job.train.dtype}": the profile has "{model.dtype}"')
    if model.optimizer not in ("adamw", job.train.optimizer):
        found.append(f'train.optimizer = "{job.train.optimizer}": the profile has "{model.optimizer}"')
    kind = (config or {}).get("model_type")
    if kind is not None and kind != model.model_type:
        found.append(f'model_type = "{kind}": the profile has "{model.model_type}"')
    blocks = next((config[key] for key in BLOCK_KEYS if config and key in config), None)
    if blocks is not None and blocks != len(model.layers) - 2:
        found.append(f"{blocks} blocks: the profile has {len(model.layers) - 2}")
    if model.layers[1:-1] and not job.train.freeze and _frozen(profile) != (job.adapter.method != "none"):
        measured = "an adapter over frozen weights" if _frozen(profile) else "training of all weights"
        found.append(f'adapter.method = "{job.adapter.method}": the profile has {measured}')
    return found


def _frozen(profile: ClusterProfile) -> bool:
    """Whether the profile's model trains an adapter over frozen weights."""
    inside = profile.model.layers[1:-1]
    return sum(layer.trainable_parameters for layer in inside) < sum(layer.parameters for layer in inside) / 2
