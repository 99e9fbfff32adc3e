"""Render the page of a run: as a file (``report.html``), or part by part for the live page.

The page has one column, and is light or dark depending on the reader's system setting (``page.css``).
"""

import datetime
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from markupsafe import Markup

import hetero_mpi
from hetero_mpi.planning.memory import shared_parameters
from hetero_mpi.report.figures.style import palette_css
from hetero_mpi.report.page import sections
from hetero_mpi.report.past_run import PastRun
from hetero_mpi.report.profile_text import place_text
from hetero_mpi.report.table import unbroken
from hetero_mpi.util import units
from hetero_mpi.util.disk import write_atomic, write_errors

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("hetero_mpi.report", "page"), autoescape=True, undefined=jinja2.StrictUndefined
)
"""The page templates. All text is escaped, so that names of devices and jobs cannot become markup."""
_TEMPLATES.filters["unbroken"] = unbroken
_TEMPLATES.globals.update(units=units, moment=sections.moment, place_text=place_text)
SECTIONS = (
    sections.job, sections.learning, sections.sample, sections.next_commands, sections.usage, sections.memory, sections.step,
    sections.links, sections.topology, sections.plan, sections.checkpoints, sections.happenings,
)  # fmt: skip


def draw_part(macro: str, *values: Any) -> Markup:
    """Render a part of the page by calling a macro of ``page.html``."""
    return Markup(getattr(_TEMPLATES.get_template("page.html").module, macro)(*values))


def page_parts(run: PastRun, drawn: Mapping[str, Markup] = MappingProxyType({})) -> dict[str, Markup]:
    """Render the parts of the page, in order, by name. A part with no data is empty.

    ``drawn`` contains parts that are already rendered and can be reused, since rendering is slow.
    """
    parts = {
        "header": draw_part("header", run, about(run)),
        "tiles": draw_part("tiles", key_figures(run)),
        "now": draw_part("now", run),
    }
    for make in SECTIONS:
        name = make.__name__
        parts[name] = drawn[name] if name in drawn else draw_part("section", make(run), run.emulated)
    return parts


def live_page() -> str:
    """Render the page without its parts, which its script fetches and inserts."""
    return draw_part("page", "a run", {}, True, Markup(palette_css()), "")


def report_html(run: PastRun, linked: bool = False) -> str:
    """Render the page of a run as self-contained HTML. If ``linked``, it links to the files in the run directory."""
    parts = page_parts(run)
    now = time_now()
    if run.present is not None and run.present.alive and not run.over:
        parts["header"] += draw_part("as_of", now)
    parts["files"] = draw_part("section", sections.files(run, linked), run.emulated)
    written = f"Written by hetero_mpi {hetero_mpi.__version__}, {now}."
    trained_with = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    written += f" Trained with {trained_with}." if trained_with else ""
    return draw_part("page", f"{run.name}: run report", parts, False, Markup(palette_css()), written)


def time_now() -> str:
    return datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")


def write_report(run: PastRun, path: Path) -> Path:
    """Write the page of a run atomically. Raises UserError if the file cannot be written."""
    return write_page(report_html(run, linked=path.resolve().parent == run.directory.resolve()), path)


def write_page(page: str, path: Path) -> Path:
    """Write a page atomically. Raises UserError if the file cannot be written."""
    with write_errors(path):  # JSON text may contain a lone surrogate
        write_atomic(path, page.encode(errors="backslashreplace"))
    return path


def about(run: PastRun) -> str:
    facts = []
    if run.profile is not None:
        model = run.profile.model
        all_layers = 0, len(model.layers)
        parameters = sum(layer.parameters for layer in model.layers) - shared_parameters(model, *all_layers)
        adapter = "" if model.trained_whole else " with the adapter"
        facts.append(f"{model.model_type}, {units.count(parameters)} parameters{adapter}, {model.dtype}")
    if run.plan is not None and run.profile is not None:
        facts.append(f"{len(run.plan.ranks)} of {units.plural(len(run.profile.devices), 'rank')}")
    done = run.metrics.steps[-1].step if run.metrics.steps else 0
    total = run.setting("train", "steps")
    is_known = type(total) is int and total
    facts.append(f"{done:,} of {units.plural(total, 'step')}" if is_known else units.plural(done, "step"))
    text = ", ".join(facts)
    if run.emulated:
        text += (
            ". Times, speeds and links are of an emulated cluster that trains this model; losses and training tokens are of the "
            "small stand-in model."
        )
    return text


def key_figures(run: PastRun) -> list[tuple[str, str, str]]:
    """Return the key figures at the top of the page, as (name, value, remark)."""
    figures = []
    steps, evaluations = run.metrics.steps, run.metrics.evaluations
    if steps and run.last_step and not run.over:
        step_s, scale = run.median_step_s(), run.setting("cluster", "time_scale") if run.emulated else 1.0
        left_s = (run.last_step - steps[-1].step) * (step_s or 0.0) * (scale or 1.0)
        figures.append(
            ("step", f"{steps[-1].step:,} of {run.last_step:,}", f"about {units.clock(left_s)} left" if left_s else "")
        )
    if steps:
        figures.append(("loss", f"{steps[-1].loss:.4f}", f"from {steps[0].loss:.4f} at step {steps[0].step}"))
    if evaluations:
        figures.append(("evaluation loss", f"{evaluations[-1].loss:.4f}", f"at step {evaluations[-1].step}"))
    if (perplexity := run.perplexity()) is not None:
        perplexity_text = f"{perplexity:.2f}" if perplexity < 100 else units.count(perplexity)
        figures.append(("perplexity", perplexity_text, "per token, on the evaluation set"))
    if evaluations and (accuracy := evaluations[-1].token_accuracy) is not None:
        figures.append(("token accuracy", f"{100 * accuracy:.1f} %", "on the evaluation set"))
    seconds, speed = run.median_step_s(), run.median_tokens_per_s()
    kind, unit = "emulated" if run.emulated else "median", units.unit_of(run.setting("data", "sequence_length"))
    if speed is not None:
        figures.append((f"{unit} per second", f"{speed:,.0f}", kind))
    if seconds is not None:
        remark = kind
        if run.report is not None:
            predicted_s = run.report.predicted_step_s
            remark = f"{units.seconds(predicted_s)} predicted ({units.change(seconds / predicted_s - 1)})"
            tried_s = run.report.tried_step_s
            remark += f", {units.seconds(tried_s)} calibrated" if tried_s is not None else ""
        figures.append(("time per step", units.seconds(seconds), remark))
    if steps:
        total_s = sum(step.step_s for step in steps)
        tokens = sum(step.tokens for step in steps)
        remark = f"in {units.seconds(total_s)} of steps"
        if run.emulated:  # times are of the profile's model, tokens of the stand-in
            emulated_tokens = sum(step.tokens_per_s * step.step_s for step in steps)
            remark = f"of the stand-in model; for {units.count(emulated_tokens)} {remark}, emulated"
        figures.append(("target tokens" if unit == "tokens" else "samples", units.count(tokens), remark))
    return figures
