"""hetero_mpi trains and fine-tunes language models on heterogeneous machines in one MPI job.

On the command line, run ``python -m hetero_mpi launch -np 3 -- train jobs/quickstart.toml``. Python programs under mpirun use
:class:`Job`, :func:`profile`, :func:`plan`, :func:`simulate`, :func:`train` and :func:`steps` (docs/python.md).

Importing the package is cheap, because public names, torch, mpi4py and transformers are imported on first use (PEP 562). Planning
needs none of these three packages.
"""

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_mpi.api import Job as Job
    from hetero_mpi.api import Simulation as Simulation
    from hetero_mpi.api import load_run as load_run
    from hetero_mpi.api import plan as plan
    from hetero_mpi.api import profile as profile
    from hetero_mpi.api import simulate as simulate
    from hetero_mpi.api import steps as steps
    from hetero_mpi.api import train as train
    from hetero_mpi.interop.dataset_trainer import DPOTrainer as DPOTrainer
    from hetero_mpi.interop.dataset_trainer import KTOTrainer as KTOTrainer
    from hetero_mpi.interop.dataset_trainer import ORPOTrainer as ORPOTrainer
    from hetero_mpi.interop.dataset_trainer import SFTTrainer as SFTTrainer
    from hetero_mpi.interop.dataset_trainer import Trainer as Trainer
    from hetero_mpi.model.custom.custom_chain import LayeredModel as LayeredModel
    from hetero_mpi.planning.types.plan import Plan as Plan
    from hetero_mpi.planning.types.plan import PlanReport as PlanReport
    from hetero_mpi.planning.types.profile import ClusterProfile as ClusterProfile
    from hetero_mpi.planning.types.toml_files import load_plan as load_plan
    from hetero_mpi.planning.types.toml_files import load_profile as load_profile
    from hetero_mpi.planning.types.toml_files import load_report as load_report
    from hetero_mpi.planning.types.toml_files import save_plan as save_plan
    from hetero_mpi.planning.types.toml_files import save_profile as save_profile
    from hetero_mpi.report.past_run import PastRun as PastRun
    from hetero_mpi.step_iterator import Step as Step
    from hetero_mpi.step_iterator import StopTraining as StopTraining
    from hetero_mpi.training.result import TrainResult as TrainResult
    from hetero_mpi.util.errors import UserError as UserError

__version__ = "0.1.0"

_PASSIVE_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
"""OpenMP settings that make waiting threads sleep rather than spin. GCC's OpenMP then spins for about 10 microseconds instead of
a few milliseconds, which make steps 2 to 15 times as long as soon as anything else runs, and count as computing. LLVM's and Intel's
OpenMP sleep at once instead of after 200 ms. These libraries read the variables when torch loads them."""
if not any(name in os.environ for name in (*_PASSIVE_WAITING, "KMP_BLOCKTIME")):
    os.environ.update(_PASSIVE_WAITING)
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # hints at kernels that are never called

_NAMES = {
    "api": "Job Simulation load_run plan profile simulate steps train",
    "interop.dataset_trainer": "Trainer SFTTrainer DPOTrainer KTOTrainer ORPOTrainer",
    "util.errors": "UserError",
    "model.custom.custom_chain": "LayeredModel",
    "planning.types.toml_files": "load_plan load_profile load_report save_plan save_profile",
    "planning.types.plan": "Plan PlanReport",
    "planning.types.profile": "ClusterProfile",
    "report.past_run": "PastRun",
    "step_iterator": "Step StopTraining",
    "training.result": "TrainResult",
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Maps each public name to the module that defines it."""

__all__ = ["__version__", *_MODULE_BY_NAME]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'hetero_mpi' has no attribute {name!r}")
    value = getattr(import_module(f"hetero_mpi.{_MODULE_BY_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_BY_NAME})
