"""An x86-64 and an aarch64 machine in one job: another processor, torch, Python and place of MPI, and the same numbers.

The second machine is emulated, in a network of its own (``tests/arm_host.py`` says how it is made).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.toml_files import save_plan
from hetero_mpi.rundir.metrics import read_metrics
from tests import arm_host
from tests.support.jobs import GLOBAL_BATCH, SEQUENCE, Workshop
from tests.support.mpi import ROOT, launcher_or_skip, require_success, run_bounded
from tests.support.rack import Rack

pytestmark = pytest.mark.slow

PATIENCE_S = 1800
STEPS = 3
TOLERANCE = 1e-5
"""Relative: another processor, and another torch, add in another order."""


class Pair:
    """This machine's processor and another, each in a host of its own; ``agent`` logs in to both."""

    def __init__(self, rack: Rack, directory: Path, root: Path) -> None:
        self.x86, self.arm = rack.addresses["x86"], rack.addresses["arm"]
        self.agent = directory / "agent-of-both"
        inside = f'{shlex.join(arm_host.login(root))} $(printf %q "$command")'
        self.agent.write_text(
            "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nhost=$1; shift; command=$*\n"
            f'[[ $host == {self.arm} ]] && command="{inside}"\nexec {rack.agent} $host "$command"\n'
        )
        self.agent.chmod(0o755)
        same_place = f"mkdir -p {root}{sys.prefix} && mount --bind {root}{arm_host.prefix()} {root}{sys.prefix}"
        mount = f"{arm_host.mount_command(root, ROOT)} && {same_place}"
        require_success(run_bounded([str(rack.agent), self.arm, mount], os.environ, 60))

    def on(self, host: str, command: str) -> subprocess.CompletedProcess[str]:
        return run_bounded([str(self.agent), host, command], os.environ, PATIENCE_S)

    def hosts_file(self, directory: Path, python: str) -> Path:
        variables = '{ PYTHONPATH = "/code", XDG_CACHE_HOME = "/tmp", OMP_NUM_THREADS = "1" }'
        path = directory / "hosts.toml"
        path.write_text(
            f'[[host]]\naddress = "{self.x86}"\n'
            f'[[host]]\naddress = "{self.arm}"\npython = "{python}"\ndirectory = "/tmp"\nenvironment = {variables}\n'
        )
        return path


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    folder = os.environ.get(arm_host.VARIABLE)
    if not folder:
        pytest.skip(f"{arm_host.VARIABLE} names no prepared machine: python -m tests.arm_host FOLDER")
    if problem := arm_host.why_not(Path(folder)):
        pytest.skip(problem)
    with Rack(tmp_path / "rack", ("x86", "arm")) as rack:
        yield Pair(rack, tmp_path, Path(folder) / "root")


def half_each() -> Plan:
    """Embedding and the first block on rank 0, the second block and the head on rank 1."""
    stages = (StagePlan((0,), 0, 2, 1), StagePlan((1,), 2, 4, 0))
    return Plan((PipelinePlan(stages, 1, GLOBAL_BATCH),), GLOBAL_BATCH, SEQUENCE, 4)


@pytest.mark.long
@pytest.mark.parametrize(
    "python", [f"{arm_host.prefix()}/bin/python", f"{sys.prefix}/bin/python"], ids=["elsewhere", "same path"]
)
def test_unlike_processors_train_one_model(pair: Pair, tmp_path: Path, python: str) -> None:
    """Losses and the written model are those of one process on x86-64, wherever the other machine has its environment."""
    launcher = launcher_or_skip()
    assert pair.on(pair.arm, f"{python} -c 'import os; print(os.uname().machine)'").stdout == "aarch64\n"
    agent = {"Open MPI": f"--mca plm_rsh_agent {pair.agent}", "MPICH": f"-launcher ssh -launcher-exec {pair.agent}"}[
        launcher.family
    ]
    workshop = Workshop(tmp_path)
    job = workshop.job("job", workshop.values(workshop.model()), train={"steps": STEPS})
    save_plan(half_each(), tmp_path / "plan.toml")
    variables = f"PYTHONPATH={ROOT} OMP_NUM_THREADS=1 XDG_CACHE_HOME={tmp_path}"
    start = [sys.executable, "-m", "hetero_mpi"]
    launch = [*start, "launch", "--hosts", str(pair.hosts_file(tmp_path, python)), f"--mpirun-args={agent}", "--"]
    train = ["train", str(job), "--run-dir"]
    together = [*launch, *train, str(tmp_path / "together"), "--plan", str(tmp_path / "plan.toml")]
    require_success(pair.on(pair.x86, f"cd {ROOT}; env {variables} {shlex.join(together)}"))
    require_success(
        pair.on(pair.x86, f"cd {ROOT}; env {variables} {shlex.join([*start, *train, str(tmp_path / 'alone')])}")
    )

    losses = [
        [step.loss for step in read_metrics(tmp_path / run / "metrics.jsonl").steps] for run in ("together", "alone")
    ]
    assert len(losses[0]) == STEPS and losses[0] == pytest.approx(losses[1], rel=TOLERANCE)
    assert losses[1][-1] < losses[1][0]
    models = [load_file(tmp_path / run / "model" / "model.safetensors") for run in ("together", "alone")]
    assert models[0].keys() == models[1].keys()
    for name, array in models[1].items():
        assert np.linalg.norm(models[0][name] - array) <= TOLERANCE * np.linalg.norm(array), name
