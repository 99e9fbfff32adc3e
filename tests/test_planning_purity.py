"""planning/ works where torch, mpi4py, pydantic, h5py and transformers are not installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

PROGRAM = """
import importlib, pkgutil, sys

for name in ("torch", "mpi4py", "pydantic", "h5py", "transformers"):
    sys.modules[name] = None  # importing it raises ImportError

import hetero_mpi
import hetero_mpi.planning

modules = [module.name for module in pkgutil.walk_packages(hetero_mpi.planning.__path__, "hetero_mpi.planning.")]
for name in modules:
    importlib.import_module(name)
wanted = {"decision.planner", "simulator", "types.toml_files", "bounds", "dry_run", "memory"}
assert {f"hetero_mpi.planning.{name}" for name in wanted} <= set(modules), modules

from tests.support.planning_samples import make_profile
from hetero_mpi.planning.types.toml_files import load_plan, load_profile, load_report, save_plan, save_profile
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.simulator import simulate

folder = sys.argv[1]
save_profile(make_profile((1.0, 2.0)), folder + "/profile.toml")
profile = load_profile(folder + "/profile.toml")
report = make_plan(profile, PlanRequest(8, 10, (1, 2)))
save_plan(report, folder + "/plan.toml")
assert load_report(folder + "/plan.toml") == report
assert simulate(load_plan(folder + "/plan.toml"), profile).step_s == report.predicted_step_s > 0
print("planned")
"""

CHEAP = """
import sys
import hetero_mpi
heavy = {"torch", "mpi4py", "pydantic", "h5py", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
print("cheap")
"""


def run(program: str, *arguments: str) -> str:
    """Standard output of ``program`` in a Python of its own that sees this checkout and the samples."""
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_planning_runs_without_the_heavy_libraries(tmp_path: Path) -> None:
    assert run(PROGRAM, str(tmp_path)) == "planned\n"


def test_importing_the_package_is_cheap() -> None:
    assert run(CHEAP) == "cheap\n"
