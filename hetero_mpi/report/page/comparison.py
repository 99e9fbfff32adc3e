"""Render a page that compares runs: a table, and the curves of all runs in the same charts."""

import os
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

from markupsafe import Markup

import hetero_mpi
from hetero_mpi.report.comparison_text import comparison_remarks, comparison_rows, comparison_table, run_names
from hetero_mpi.report.figures.curves import Series, line_chart
from hetero_mpi.report.figures.style import palette_css
from hetero_mpi.report.page.document import draw_part, time_now
from hetero_mpi.report.page.sections import Section
from hetero_mpi.report.past_run import PastRun
from hetero_mpi.report.table import Column, Table
from hetero_mpi.rundir.run_directory import REPORT_NAME
from hetero_mpi.util import units

_COLOURS = ("accent", "warm", "good", "violet", "alert", "exchange", "backward", "send")
"""Colour roles of the runs' curves. Further runs have the same colours in dashed lines."""


def comparison_html(runs: Sequence[PastRun], path: Path) -> str:
    """Render the comparison of ``runs`` as self-contained HTML, with links that are valid for a page at ``path``."""
    names = run_names(runs)
    rows = [("", *(_key(index, names[index], run, path) for index, run in enumerate(runs))), *comparison_rows(runs)]
    headings, *cells = comparison_table(rows)
    columns = [Column(heading, itemgetter(index), align_left=True) for index, heading in enumerate(headings)]
    table = Section("Runs", table=Table(columns, cells), remarks=comparison_remarks(runs))
    curves = Section("Loss and speed", charts=_charts(runs, names))
    parts = {
        "header": Markup("<h1>Comparison of {} runs</h1>").format(len(runs)),
        "runs": draw_part("section", table, False),
        "learning": draw_part("section", curves, False),
    }
    written = f"Written by hetero_mpi {hetero_mpi.__version__}, {time_now()}."
    return draw_part("page", "comparison of runs", parts, False, Markup(palette_css()), written)


def _key(index: int, name: str, run: PastRun, path: Path) -> Markup:
    """Return a run's name with the form of its curves, and a link to its report if that exists."""
    report = run.directory / REPORT_NAME
    link = os.path.relpath(report.resolve(), path.resolve().parent) if report.is_file() else ""
    text = Markup('<a href="{}">{}</a>').format(link, name) if link else Markup("{}").format(name)
    mark = Markup('<span style="color:var(--{})">{}</span>\N{NO-BREAK SPACE}{}')
    return mark.format(_COLOURS[index % len(_COLOURS)], "– –" if index >= len(_COLOURS) else "——", text)


def _charts(runs: Sequence[PastRun], names: Sequence[str]) -> list[Markup]:
    training, evaluation, speed, norms = list[Series](), list[Series](), list[Series](), list[Series]()
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        colour, dashed = _COLOURS[index % len(_COLOURS)], index >= len(_COLOURS)
        steps = run.metrics.steps
        tokens = dict(zip((step.step for step in steps), accumulate(step.tokens for step in steps), strict=True))
        points = tuple((tokens[e.step], e.loss) for e in run.metrics.evaluations if e.step in tokens)
        evaluation.append(Series(name, points, colour, dots=True, dashed=dashed))
        for series, x_of, key in (
            (training, tokens.__getitem__, "loss"),
            (speed, int, "tokens_per_s"),
            (norms, int, "grad_norm"),
        ):
            points = tuple((x_of(step.step), getattr(step, key)) for step in steps)
            series.append(Series(name, points, colour, dashed=dashed, noisy=True))
    charts = [
        line_chart("training loss", training, x_name="tokens", x_text=units.count),
        line_chart("evaluation loss", evaluation, x_name="tokens", x_text=units.count),
        line_chart("tokens per second", speed, units.count),
        line_chart("gradient norm before clipping", norms),
    ]
    return [chart for chart in charts if chart]
