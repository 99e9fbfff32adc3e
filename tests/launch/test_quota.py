"""A real control group with a processor quota: what a process in it counts on."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT_GROUP = Path("/sys/fs/cgroup")
ASK = """\
import os
open(GROUP, "w").write(str(os.getpid()))
from hetero_mpi.util.host_limits import core_quota, usable_cores
from hetero_mpi.training.setup.setup import default_threads
print(core_quota(), usable_cores(), default_threads(core_quota()))
"""


@pytest.fixture
def quota_of_one_core() -> Iterator[Path]:
    version_2 = (ROOT_GROUP / "cgroup.controllers").exists()
    group = (ROOT_GROUP if version_2 else ROOT_GROUP / "cpu") / f"hetero-quota-{os.getpid()}"
    if os.geteuid() != 0:
        pytest.skip("a control group with a quota needs root")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if version_2 and not (group / "cpu.max").exists():
            pytest.skip(f"{ROOT_GROUP} has no processor controller for its groups")
        (group / "cpu.max" if version_2 else group / "cpu.cfs_quota_us").write_text(
            "100000 100000" if version_2 else "100000"
        )
        yield group
    finally:
        group.rmdir()


def test_a_process_under_a_quota_counts_on_its_cores_only(quota_of_one_core: Path) -> None:
    program = ASK.replace("GROUP", repr(str(quota_of_one_core / "cgroup.procs")))
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120
    )
    assert answer.stdout.split() == ["1.0", "1", "1"], answer.stdout + answer.stderr


def test_of_a_list_of_threads_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero_mpi.training.setup.setup import default_threads

    for text, threads in (("4,2", 4), ("4", 4), ("", 3), ("0", 3), ("all", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert default_threads(3.5) == threads, text
