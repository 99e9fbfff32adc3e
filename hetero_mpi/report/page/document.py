"""The page as a whole: what is on it, in which order, and how it looks. One column, calm, light or dark as the reader's system."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

import hetero_mpi
from hetero_mpi.errors import UserError
from hetero_mpi.planning.memory import shared_parameters
from hetero_mpi.planning.schedule import Event
from hetero_mpi.planning.simulator import Simulation
from hetero_mpi.report import units
from hetero_mpi.report.drawing import palette_css
from hetero_mpi.report.measured import newest_step, on_one_clock
from hetero_mpi.report.page import sections
from hetero_mpi.report.page.html import section, tiles
from hetero_mpi.report.past_run import PastRun

REPORT_NAME = "report.html"
_STYLE = """
*{box-sizing:border-box}html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;line-height:1.2;margin:0}h2{font-size:17px;margin:0 0 6px}h3{font-size:14px;margin:18px 0 4px}
section{margin-top:38px}.note,.sub{color:var(--soft);margin:0 0 12px;max-width:78ch}.sub{margin-top:4px}
.tag{display:inline-block;font-size:12px;font-weight:600;color:var(--warm);border:1px solid var(--warm);
border-radius:10px;padding:0 8px;vertical-align:2px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin-top:20px}
.tile{background:var(--card);border:1px solid var(--faint);border-radius:10px;padding:10px 14px}
.what,.remark{color:var(--soft);font-size:13px}.figure{font-size:21px;font-weight:600;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:26px 30px}
.chart svg{width:100%;height:auto;display:block}.wide{overflow-x:auto;padding-bottom:4px}.wide svg{display:block}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;min-width:60%}
th{font-weight:500;color:var(--soft);text-align:left;white-space:nowrap}td{vertical-align:top;white-space:nowrap}
td:last-child{white-space:normal;min-width:34ch}td.n:last-child{min-width:0}
th,td{padding:5px 18px 5px 0;border-bottom:1px solid var(--faint)}.n{text-align:right}
ul{margin:6px 0;padding-left:20px;max-width:90ch}li{margin:2px 0}
.ranks{display:grid;grid-template-columns:minmax(120px,max-content) 1fr;gap:9px 16px;align-items:center;font-size:13.5px}
.who{line-height:1.25}.who small{display:block;color:var(--soft);font-size:12px}
.pair small{color:var(--soft);font-size:12px}
.bar{display:flex;height:13px;border-radius:4px;overflow:hidden;background:var(--faint)}
.bar.thin{height:6px}.bar span{display:block;height:100%}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:12.5px;color:var(--soft);margin:0 0 12px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
footer{margin-top:50px;color:var(--soft);font-size:12.5px;border-top:1px solid var(--faint);padding-top:12px}
@media(max-width:600px){main{padding:18px 14px 40px}section{margin-top:30px}
.ranks{grid-template-columns:1fr;gap:2px}.pair{margin-bottom:10px}
.tiles{grid-template-columns:1fr 1fr}.figure{font-size:18px}}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The browser itself holds the page to its promise: nothing is fetched, nothing is run."""


def report_html(run: PastRun) -> str:
    """The page of a run, complete in itself."""
    predicted = run.predicted()
    records = newest_step(run.rank_steps, run.plan) if run.plan is not None else ()
    measured = on_one_clock(records)
    body = "".join(_body(run, predicted, measured, records[0].step if records else 0))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{escape(run.name)}: run report</title>'
        f"<style>{palette_css()}{_STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def write_report(run: PastRun, path: Path) -> Path:
    """Write the page in one piece. :raises UserError: the file cannot be written."""
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_text(report_html(run), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name another place with -o") from error
    return path


def _body(run: PastRun, predicted: Simulation | None, measured: Sequence[Event], step: int) -> list[str]:
    emulated = run.emulated
    return [
        _header(run),
        tiles(sections.key_figures(run)),
        section("Learning", sections.learning(run)),
        section("Speed", sections.speed(run), emulated=emulated),
        section("What the ranks do", sections.usage(run, predicted), sections.USAGE_NOTE, emulated),
        section("Memory", sections.memory(run), sections.MEMORY_NOTE, emulated),
        section("A step", sections.step(run, predicted, measured, step), sections.STEP_NOTE, emulated),
        section("Links", sections.links(run, predicted, measured), sections.LINKS_NOTE, emulated),
        section("Where everything is", sections.topology(run, predicted), emulated=emulated),
        section("The plan, and why", sections.plan(run), emulated=emulated),
        section("Checkpoints", sections.checkpoints(run)),
        section("What happened", sections.happenings(run)),
        _footer(run),
    ]


def _header(run: PastRun) -> str:
    tag = ' <span class="tag">emulated</span>' if run.emulated else ""
    facts = []
    if run.profile is not None:
        model = run.profile.model
        whole = 0, len(model.layers)
        parameters = sum(layer.parameters for layer in model.layers) - shared_parameters(model, *whole)
        facts.append(f"{model.model_type}, {units.count(parameters)} parameters, {model.dtype}")
    if run.plan is not None and run.profile is not None:
        used = sum(len(stage.ranks) for _, _, stage in run.plan.numbered)
        facts.append(f"{used} of {len(run.profile.devices)} ranks")
    done = run.metrics.steps[-1].step if run.metrics.steps else 0
    wanted = run.steps_wanted
    facts.append(f"{done:,} of {wanted:,} steps" if wanted else f"{done:,} steps")
    said = escape(", ".join(facts))
    if run.emulated:
        said += (
            ". Times, speeds and links are those of an emulated cluster that trains this model; the losses, and the tokens learnt "
            "from, are those of the small model that stands in for it."
        )
    return f"<header><h1>{escape(run.name)}{tag}</h1><p class=sub>{said}</p></header>"


def _footer(run: PastRun) -> str:
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    trained = f" Trained with {escape(versions)}." if versions else ""
    return f"<footer>Written by hetero_mpi {escape(hetero_mpi.__version__)}, {escape(now)}.{trained}</footer>"
