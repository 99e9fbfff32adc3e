"""The page of a run: its parts in order, as a file (``report.html``) and for the live page, which asks for them one by one.

One column, light or dark as the reader's system (``page.css``).
"""

from __future__ import annotations

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
"""Every text is escaped, so names of devices and jobs cannot become markup."""
_TEMPLATES.filters["unbroken"] = unbroken
_TEMPLATES.globals.update(units=units, moment=sections.moment, place_text=place_text)
SECTIONS = (
    sections.job, sections.learning, sections.sample, sections.next_commands, sections.usage, sections.memory, sections.step,
    sections.links, sections.topology, sections.plan, sections.checkpoints, sections.happenings,
)  # fmt: skip


def draw_part(macro: str, *values: Any) -> Markup:
    """A part of the page, by the macro of ``page.html`` that draws it."""
    return Markup(getattr(_TEMPLATES.get_template("page.html").module, macro)(*values))


def page_parts(run: PastRun, drawn: Mapping[str, Markup] = MappingProxyType({})) -> dict[str, Markup]:
    """Name -> markup of the page's parts, in their order; empty of those that the run has nothing for.

    ``drawn``: parts that are taken as they are, since drawing them takes long.
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
    """The page without its parts, which its script asks for and puts into it."""
    return draw_part("page", None, {}, True, Markup(palette_css()), "")


def report_html(run: PastRun, linked: bool = False) -> str:
    """The page of a run, as self-contained HTML. ``linked``: it lies beside the run's files."""
    parts = page_parts(run)
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    if run.present is not None and run.present.alive and not run.over:
        parts["header"] += draw_part("as_of", now)
    parts["files"] = draw_part("section", sections.files(run, linked), run.emulated)
    written = f"Written by hetero_mpi {hetero_mpi.__version__}, {now}."
    trained_with = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    written += f" Trained with {trained_with}." if trained_with else ""
    return draw_part("page", run, parts, False, Markup(palette_css()), written)


def write_report(run: PastRun, path: Path) -> Path:
    """Write the page atomically. Raises UserError: the file cannot be written."""
    page = report_html(run, linked=path.resolve().parent == run.directory.resolve())
    with write_errors(path):  # a text of JSON may hold half a character (a lone surrogate)
        write_atomic(path, page.encode(errors="backslashreplace"))
    return path


def about(run: PastRun) -> str:
    facts = []
    if run.profile is not None:
        model = run.profile.model
        whole = 0, len(model.layers)
        parameters = sum(layer.parameters for layer in model.layers) - shared_parameters(model, *whole)
        facts.append(f"{model.model_type}, {units.count(parameters)} parameters, {model.dtype}")
    if run.plan is not None and run.profile is not None:
        facts.append(f"{len(run.plan.ranks)} of {len(run.profile.devices)} ranks")
    done = run.metrics.steps[-1].step if run.metrics.steps else 0
    wanted = run.setting("train", "steps")
    facts.append(f"{done:,} of {wanted:,} steps" if type(wanted) is int and wanted else f"{done:,} steps")
    said = ", ".join(facts)
    if run.emulated:
        said += (
            ". Times, speeds and links are those of an emulated cluster that trains this model; the losses, and the tokens learnt "
            "from, are those of the small model that stands in for it."
        )
    return said


def key_figures(run: PastRun) -> list[tuple[str, str, str]]:
    """(what, figure, remark) of the figures at the top."""
    found = []
    steps, evaluations = run.metrics.steps, run.metrics.evaluations
    if steps and run.last_step and not run.over:
        step_s, scale = run.median_step_s(), run.setting("cluster", "time_scale") if run.emulated else 1.0
        left_s = (run.last_step - steps[-1].step) * (step_s or 0.0) * (scale or 1.0)
        found.append(
            ("step", f"{steps[-1].step:,} of {run.last_step:,}", f"about {units.clock(left_s)} left" if left_s else "")
        )
    if steps:
        found.append(("loss", f"{steps[-1].loss:.4f}", f"from {steps[0].loss:.4f} at step {steps[0].step}"))
    if evaluations:
        found.append(("held-out loss", f"{evaluations[-1].loss:.4f}", f"at step {evaluations[-1].step}"))
    if (perplexity := run.perplexity()) is not None:
        shown = f"{perplexity:.2f}" if perplexity < 100 else units.count(perplexity)
        found.append(("perplexity", shown, "of the held-out text, per token"))
    if evaluations and (accuracy := evaluations[-1].token_accuracy) is not None:
        found.append(("token accuracy", f"{accuracy:.1%}", "of the held-out text"))
    seconds, speed = run.median_step_s(), run.median_tokens_per_s()
    kind = "emulated" if run.emulated else "median"
    if speed is not None:
        found.append(("tokens per second", f"{speed:,.0f}", kind))
    if seconds is not None:
        remark = kind
        if run.report is not None:
            predicted_s = run.report.predicted_step_s
            remark = f"{units.seconds(predicted_s)} predicted ({units.change(seconds / predicted_s - 1)})"
            tried_s = run.report.tried_step_s
            remark += f", {units.seconds(tried_s)} tried" if tried_s is not None else ""
        found.append(("time per step", units.seconds(seconds), remark))
    if steps:
        total_s = sum(step.step_s for step in steps)
        tokens = sum(step.tokens for step in steps)
        remark = f"in {units.seconds(total_s)} of steps"
        if run.emulated:  # what a second is worth is told of the profile's model, what was learnt of the stand-in
            stood_for = sum(step.tokens_per_s * step.step_s for step in steps)
            remark = f"the stand-in's; for {units.count(stood_for)} {remark}, emulated"
        found.append(("tokens learnt from", units.count(tokens), remark))
    return found
