"""What is not imported: a rank starts in two thirds of the time that way, and the light commands answer at once."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

from tests.support.mpi import ROOT
from tests.support.past_runs import cluster, make_run, planned

LIGHT = """
import contextlib, importlib, pkgutil, sys
import hetero_mpi.planning
from hetero_mpi.cli import main

def unwanted(*names):
    return sorted(set(names) & set(sys.modules))

with contextlib.suppress(SystemExit):
    main(["--help"])
found = unwanted("numpy", "pydantic", "psutil", "hetero_mpi.launch.launcher.launcher", "hetero_mpi.launch.supervisor.elastic")
assert not found, found
for module in pkgutil.walk_packages(hetero_mpi.planning.__path__, "hetero_mpi.planning."):
    importlib.import_module(module.name)
assert "hetero_mpi.planning.decision.planner" in sys.modules
found = unwanted("torch", "transformers", "mpi4py", "h5py", "pydantic", "psutil")
assert not found, found
"""

PLANNING = """
import importlib.util, sys
import hetero_mpi
from hetero_mpi.cli import main

assert not any(map(importlib.util.find_spec, ("torch", "mpi4py", "transformers", "h5py", "psutil")))
job, profile, run = sys.argv[1], "homelab-5090-strix-halo", sys.argv[2]
for words in (["plan", job, "--profile", profile, "-o", "plan.toml"], ["plan", "--profile", profile], ["inspect", profile],
              ["inspect", "plan.toml"], ["simulate", job, "--profile", profile], ["baseline", "--profile", profile],
              ["report", run], ["compare", run, run], ["init", "quickstart"]):
    assert main(words) == 0, words
report = hetero_mpi.plan(job, profile)
assert report == hetero_mpi.load_report("plan.toml")
step = hetero_mpi.simulate(job, report, profile)
assert step.step_s == report.predicted_step_s and step.events and set(step.use) == set(step.busy_s)
assert all(0 < share <= 1 for share in step.use.values()) and "<table>" in hetero_mpi.load_run(run)._repr_html_()
assert main(["train", job]) == 2
"""

RANK = """
import sys
from hetero_mpi.model.eager_imports import eager_imports

with eager_imports():
    import hetero_mpi.training.training_run

import torch
from transformers import LlamaConfig
from hetero_mpi.model.transformers.chain import build_on_meta

sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
model = build_on_meta(LlamaConfig(**sizes)).to_empty(device="cpu")
adamw = torch.optim.AdamW(model.parameters())
model(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
adamw.step()
from torch.utils.checkpoint import checkpoint
checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
unused = {"torch._dynamo.eval_frame", "torch.distributed.tensor", "torch._inductor", "peft", "bitsandbytes", "matplotlib"}
planner = {"hetero_mpi.planning.decision.planner", "hetero_mpi.planning.decision.decide", "hetero_mpi.launch.supervisor.elastic"}
found = sorted((unused | planner) & set(sys.modules))
assert not found, found

from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning

adapter_tuning(TransformersChain(model.config), AdapterTable(method="lora"), False, True)
assert {"peft", "bitsandbytes"} < set(sys.modules)
assert not {"torch._dynamo.eval_frame", "torch.distributed.tensor"} & set(sys.modules)
assert torch.distributed.is_available()
double = torch.compile(lambda tensor: 2 * tensor, backend="eager")  # as a user's own layers may
assert "torch._dynamo.eval_frame" not in sys.modules
assert double(torch.ones(2)).tolist() == double(torch.ones(2)).tolist() == [2.0, 2.0]
@torch.compile(backend="eager")
def half(tensor):
    return tensor / 2
assert half(torch.ones(2)).tolist() == [0.5, 0.5]
assert type(torch.compile(torch.nn.Linear(1, 1), backend="eager")).__name__ == "OptimizedModule"
from torch._dynamo.eval_frame import OptimizedModule
assert sys.modules["torch._dynamo"].config.cache_size_limit > 0
"""


def run(program: str, *arguments: str, python: str = sys.executable, place: Path = ROOT) -> None:
    done = subprocess.run([python, "-c", program, *arguments], capture_output=True, text=True, timeout=300, cwd=place)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_help_and_planning_import_nothing_of_the_ranks() -> None:
    run(LIGHT)


def required(names: set[str]) -> set[str]:
    """Distributions and all that they require."""
    found, waiting = set[str](), [*names]
    while waiting:
        if (name := re.sub(r"[-_.]+", "-", waiting.pop()).lower()) not in found:
            found.add(name)
            needs = map(Requirement, metadata.requires(name) or ())
            waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_its_group_is_all_that_planning_needs(tmp_path: Path) -> None:
    """In an environment that has this program and the group `planning`, as `pip install --group` leaves it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "program.pth").write_text(str(ROOT))
    group = tomli.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["planning"]
    for distribution in map(metadata.distribution, required({Requirement(entry).name for entry in group})):
        for top in {file.parts[0] for file in distribution.files or () if ".." not in file.parts} - {"__pycache__"}:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    profile = cluster(2)
    past = make_run(tmp_path / "past", planned(profile), profile)
    job = str(ROOT / "jobs" / "llama8b_alpaca.toml")
    run(PLANNING, job, str(past), python=str(tmp_path / "venv" / "bin" / "python"), place=tmp_path)
    assert (tmp_path / "homelab-5090-strix-halo.png").is_file(), "drawn here, not where the program is"


@pytest.mark.slow
def test_a_rank_imports_nothing_that_it_does_not_use_and_can_still_compile() -> None:
    run(RANK)
