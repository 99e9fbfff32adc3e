"""Objects of the Python API have a short ``repr`` and an escaped table, and docs/notebooks runs."""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from pydantic import BaseModel

import hetero_mpi
from hetero_mpi.notebook import VIEWS
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.report.plan_text import MAX_STAGE_ROWS
from hetero_mpi.util.display import MAX_REPR, Displayed
from tests.support.mpi import ROOT
from tests.support.past_runs import WHOLE_JOB, cluster, make_run, planned

NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"
NAME = "<i>&name"


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An object of each displayed class, of 64 ranks, whose texts contain markup."""
    folder = tmp_path_factory.mktemp("objects") / NAME
    profile = cluster(64, source=NAME)
    report = replace(planned(profile, 60), reasons=(NAME,))
    job = hetero_mpi.Job.build(
        {"model": {"factory": "models:make"}, "output": {"run_dir": folder / "{name}"}}, name=NAME
    )
    step = simulate(report.plan, profile)
    simulation = hetero_mpi.Simulation(**vars(step), tokens_per_s=1.0, memory=report.memory, hosts=(), report=report)
    run = hetero_mpi.load_run(make_run(folder, report, profile, job=WHOLE_JOB))
    losses = tuple(line.loss for line in run.metrics.steps)
    result = hetero_mpi.TrainResult(
        folder, losses, run.metrics.evaluations, None, report, profile, folder / "model", None, 2
    )
    return {type(one).__name__: one for one in (profile, report, report.plan, job, simulation, run, result)}


def reachable(value: Any) -> Iterator[Any]:
    """An object and its fields, at any depth; of a collection, the first and last items."""
    yield value
    if is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, BaseModel):
        parts = [getattr(value, name) for name in type(value).model_fields]
    else:
        items = [*value.values()] if isinstance(value, Mapping) else [*value] if isinstance(value, tuple | list) else []
        parts = [*items[:2], *items[-1:]]
    for part in parts:
        yield from reachable(part)


@pytest.mark.parametrize("name", VIEWS)
def test_objects_have_a_short_repr_and_an_escaped_table(name: str, objects: dict[str, Any]) -> None:
    value = objects[name]
    shipped = [hetero_mpi.load_profile("moe-5090-strix-halo")] if name == "ClusterProfile" else []
    texts = {repr(one) for part in (value, *shipped) for one in reachable(part) if is_dataclass(one)}
    texts |= {repr(one) for one in reachable(value) if isinstance(one, BaseModel)}
    assert max(map(len, texts)) <= 1.1 * MAX_REPR, max(texts, key=len)
    assert repr(value).startswith(f"{name}(") and all(
        f"{field.name}=" in repr(value) for field in fields(value) if field.repr
    )
    html = value._repr_html_()
    assert NAME not in html and ("&lt;i&gt;&amp;name" in html or name == "Plan")
    assert 1 < html.count("<tr>") <= MAX_STAGE_ROWS + 1 and ("more" in html) == (html.count("<tr>") > MAX_STAGE_ROWS)


def test_all_public_results_have_a_table() -> None:
    public = {name: getattr(hetero_mpi, name) for name in hetero_mpi.__all__}
    assert set(public) <= set(dir(hetero_mpi)) and all(value.__doc__ for value in public.values())
    assert not hasattr(hetero_mpi, "trian")
    shown = {name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, Displayed)}
    assert (
        shown - {"LayeredModel"} == set(VIEWS) and hetero_mpi.load_profile("sailor-6-gpus").model._repr_html_() is None
    )


class Kernel(NotebookClient):
    """Counts the updates of displays, and interrupts a cell that begins with ``# interrupt TEXT`` once it has printed TEXT."""

    updates = 0

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        self.updates += msg["msg_type"] == "update_display_data"
        mark, _, awaited = cell.source.partition("\n")[0].partition("# interrupt ")
        if awaited and not mark and awaited in msg["content"].get("text", ""):
            os.kill(self.km.provisioner.pid, signal.SIGINT)
        return super().process_message(msg, cell, cell_index)


@pytest.mark.slow
def test_the_notebook_runs_and_draws_while_it_trains(tmp_path: Path) -> None:
    assert NOTEBOOK.stat().st_size < 10_000
    notebook = nbformat.read(NOTEBOOK, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    client = Kernel(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert client.updates >= 20
    shown = [output.data for cell in code for output in cell.outputs if "data" in output]
    titles = [data["text/plain"].partition("(")[0] for data in shown if "text/html" in data]
    assert titles == ["Job", "ClusterProfile", "PlanReport", "TrainResult", "PastRun", "Simulation"]
    assert [len(data["image/png"]) > 10_000 for data in shown if "image/png" in data] == [True]
    assert code[-1].outputs[-1].text.startswith("def __init__(self")
    assert (tmp_path / "runs" / "first" / "report.html").is_file()


CELLS = """
import time
from pathlib import Path
import hetero_mpi
from tests.programs.python_api import job_in
out = Path({out!r})
job = job_in(out, **{{"train.steps": 6}})
result = hetero_mpi.train(job)
# %%
def fail(step):
    raise KeyError("of mine")
hetero_mpi.train(job, run_dir=out / "failed", on_step=fail)
# %%
run = hetero_mpi.steps(job, run_dir=out / "half")
for step in run:
    if step.step == 2:
        raise ValueError("half way")
# %%
run = hetero_mpi.steps(job, run_dir=out / "half", resume="latest")
print("begins with", next(run).step)
# %%
# interrupt asleep beside it
print("asleep beside it")
time.sleep(60)
# %%
# interrupt asleep in step 4
for step in run:
    print("asleep in step", step.step)
    time.sleep(60)
# %%
print("under way:", run.under_way)
run = hetero_mpi.steps(job, run_dir=out / "half", resume="latest")
print("the rest", [step.step for step in run], run.result.losses == result.losses)
# %%
run = hetero_mpi.steps(job, run_dir=out / "open")
next(run)
"""


@pytest.mark.slow
def test_a_kernel_outlives_errors_and_interrupts(tmp_path: Path) -> None:
    """Errors are the cell's; an interrupt in the body ends the run with a checkpoint, as its end with the kernel does."""
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS.format(out=str(tmp_path)).split("# %%\n")]
    place = {"metadata": {"path": str(ROOT)}}
    Kernel(nbformat.v4.new_notebook(cells=cells), timeout=300, allow_errors=True, resources=place).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    errors = [[output.ename for output in cell.outputs if output.output_type == "error"] for cell in cells]
    assert errors == [[], ["KeyError"], ["ValueError"], [], *[["KeyboardInterrupt"]] * 2, [], []]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "begins with 3" in printed and "the rest [5, 6] True" in printed and "under way: False" in printed
    left = re.findall(r"Stopped after step (\d) \(the program left its loop\): \S+ is complete", printed)
    assert left == ["2", "4"]
    assert (tmp_path / "open" / "checkpoints" / "step-00000001.h5").is_file()
