"""docs/getting-started.md as a reader follows it: its commands, between two hosts with networks of their own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_mpi.rundir.metrics import read_metrics
from tests.support.environments import second_environment
from tests.support.mpi import ROOT, launcher_or_skip, require_success, run_bounded
from tests.support.rack import Rack

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "getting-started.md").read_text()
BLOCK = re.compile(r"<!-- (.*?) -->\n```(?:sh|toml)\n(.*?)```", re.DOTALL)
PATIENCE_S = 300


def test_every_block_of_the_page_says_where_it_belongs() -> None:
    assert len(BLOCK.findall(PAGE)) == PAGE.count("```") // 2
    places = [place for place, _ in BLOCK.findall(PAGE)]
    assert places.count("first machine") == 5 and places.count("file: hosts.toml") == 1


@pytest.mark.long
def test_the_commands_of_the_page_work_in_their_order(tmp_path: Path) -> None:
    if launcher_or_skip().family != "Open MPI":
        pytest.skip("the page is about Open MPI")
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for directory in (home, elsewhere):
        directory.mkdir()
        for name in ("hetero_mpi", "jobs"):
            (directory / name).symlink_to(ROOT / name)
    (home / ".venv").symlink_to(sys.prefix)
    second_environment(elsewhere / ".venv")
    with Rack(tmp_path / "rack", ("hA", "hB")) as rack:
        names = {
            "192.168.1.10": rack.addresses["hA"],
            "192.168.1.11": rack.addresses["hB"],
            "/home/me/hetero_mpi": str(home),
            "/opt/training": str(elsewhere),
        }

        def ours(text: str) -> str:
            return re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], text)

        # The network of the test in place of ssh, and no memory shared between its hosts.
        variables = {"PRTE_MCA_plm_ssh_agent": str(rack.agent), "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_pml": "ob1"}
        variables |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        assignments = shlex.join([f"{name}={value}" for name, value in variables.items()])

        def follow(commands: str) -> subprocess.CompletedProcess[str]:
            script = f"cd {home} && export {assignments} && set -e\n{commands}"
            return run_bounded([str(rack.agent), rack.addresses["hA"], script], dict(os.environ), PATIENCE_S)

        printed = ""
        for place, text in BLOCK.findall(PAGE):
            if place.startswith("file: "):
                (home / place.removeprefix("file: ")).write_text(ours(text))
            elif place == "first machine":
                result = require_success(follow(ours(text)))
                printed += result.stdout
    assert "No problems found." in printed or "A run would work" in printed
    assert [len(read_metrics(home / "runs" / run / "metrics.jsonl").steps) for run in ("first", "second")] == [10, 10]
    assert f"{elsewhere}/.venv/bin/python -m hetero_mpi train jobs/quickstart.toml" in printed
    assert not (elsewhere / "runs").exists()
