"""The model card that ``export`` writes: base, data, method, hyperparameters, losses, devices and plan, versions, licence.

It may be shown to anybody: hosts have numbers for names, and of paths only the last part is told.
"""

from __future__ import annotations

import contextlib
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_mpi.model.files.hub import is_hub_id
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.toml_files import plan_from_dict, profile_from_dict
from hetero_mpi.report.past_run import PastRun, anonymous
from hetero_mpi.report.plan_text import plan_title, stage_table
from hetero_mpi.report.run_text import job_rows, loss_lines
from hetero_mpi.rundir.line_files import METRICS_NAME
from hetero_mpi.rundir.metrics import Metrics, read_metrics
from hetero_mpi.util.terminal import printable

CARD = "README.md"
_OURS = "<!-- Written by `hetero_mpi export`, which replaces this file while this line is in it. -->"
_LICENCE = ("license", "license_name", "license_link")
"""Keys of the base's card that hold for what is made of it."""


def write_card(
    target: Path, former: Path, checkpoint: Path, told: Mapping[str, Any], base: Path | None, kind: str
) -> None:
    """Write the card into ``target``, unless ``former``, the directory that it replaces, has one of somebody else's.

    Args:
        checkpoint: file that was exported; losses are in its run's directory, if that is still around it.
        told: the checkpoint's metadata.
        base: directory of the weights that were tuned.
        kind: ``model``, ``adapter``, or ``merged``: an adapter that was added to its base.
    """
    from huggingface_hub import ModelCard, ModelCardData

    if (former / CARD).is_file() and _OURS not in (former / CARD).read_text(encoding="utf-8", errors="replace"):
        return
    name, library = told["base_model"], "peft" if kind == "adapter" else "transformers"
    known: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["hetero_mpi"]}
    if name and is_hub_id(name, Path(name)):
        known |= {"base_model": name, "base_model_relation": "adapter" if kind == "adapter" else "finetune"}
    unclear = False
    if base is not None and (base / CARD).is_file():
        with contextlib.suppress(Exception):  # somebody else's file, of any form
            said = ModelCard.load(base / CARD).data.to_dict()
            known |= {key: said[key] for key in _LICENCE if said.get(key) and _is_text(said[key])}
            unclear = bool(said.get("license")) and "license" not in known
    facts = {
        "base": known.get("base_model") or (Path(name).name if name else "none: trained from scratch"),
        "licence of the base": _licence(known.get("license"), unclear) if name else "",
        "adapter": "added to the weights of the base" if kind == "merged" else "",
    }
    lines = [f"---\n{ModelCardData(**known).to_yaml()}\n---", _OURS, f"# {_cell(former.name)}"]
    ModelCard("\n\n".join([*lines, *_body(_run_of(checkpoint, told), facts)]) + "\n").save(target / CARD)


def _is_text(value: Any) -> bool:
    """A text, or some, as the hub takes them for a licence, without characters that no card shows."""
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(one, str) and printable(one) == one for one in texts)


def _licence(found: Any, unclear: bool) -> str:
    if unclear:
        return "not understood: read the card of the base"
    return ", ".join(found) if isinstance(found, list) else found or "not known"


def _run_of(checkpoint: Path, told: Mapping[str, Any]) -> PastRun:
    """The run up to the checkpoint, fit to be shown to anybody."""
    folder, step = checkpoint.absolute().parent.parent, told["step"]
    found = read_metrics(folder / METRICS_NAME)
    evaluations = tuple(one for one in found.evaluations if one.step <= step)
    metrics = Metrics(tuple(one for one in found.steps if one.step <= step), evaluations)
    report, profile = PlanReport(plan_from_dict(told["plan"]), 0.0, 0.0), profile_from_dict(told["profile"])
    return anonymous(PastRun(folder, "", told["job"], told["versions"], report, profile, metrics))


def _body(run: PastRun, facts: dict[str, str]) -> list[str]:
    """The paragraphs below the title."""
    assert run.report is not None
    job = {what: text for what, text in job_rows(run.job) if what != "model" or not facts["licence of the base"]}
    per = "per pair" if run.setting("train", "preference") != "none" else "nats per token"
    headings, stages = stage_table(run.report.plan, run.profile, ()).html()
    perplexity = run.perplexity()
    return [
        _table(("", ""), [row for row in (facts | job).items() if row[1]]),
        *(f"{_cell(line)}." for line in loss_lines(run.metrics.steps, run.metrics.evaluations, None, per)),
        *([f"Perplexity of the held-out text: {perplexity:,.2f} per token."] if perplexity is not None else []),
        f"{plan_title(run.report.plan, run.profile)}.",
        _table([name for name, _ in headings], stages),
        f"Versions: {', '.join(f'{name} {version}' for name, version in run.versions.items())}.",
    ]


def _table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(map(_cell, row))} |" for row in ([*headings], *rows))
    return "\n".join([first, "|" + " --- |" * (first.count(" | ") + 1), *others])


def _cell(text: str) -> str:
    """A text as Markdown shows it: no markup, one line."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
