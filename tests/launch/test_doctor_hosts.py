"""``doctor`` at work: probes, connections, and hosts with real defects."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.device import device_probe
from hetero_mpi.launch.doctor import host_facts
from hetero_mpi.launch.host_agent import connect, listen
from hetero_mpi.launch.hosts.agent import AgentError, HostAgent
from hetero_mpi.util.shipped import REQUIRED
from tests.support.mpi import ROOT, launcher_or_skip, run_bounded, run_mpi
from tests.support.rack import NETWORK, Rack

pytestmark = pytest.mark.slow

PATIENCE_S = 240


def test_required_modules_are_those_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]")[0]
    named = set(re.findall(r'^\s+"([A-Za-z0-9_-]+)', text, re.MULTILINE))
    assert {name.replace("-", "_") for name in named} - {"pyyaml"} == set(REQUIRED), "no run imports YAML"


def test_a_connection_counts_where_the_host_itself_answers() -> None:
    door = {"address": "127.0.0.1", **listen()}
    with socket.create_server(("127.0.0.1", 0)) as shut:
        port = shut.getsockname()[1]
    stranger, refused = {**door, "word": "0" * 32}, {**door, "port": port}
    errors = connect([door, stranger, refused], 10.0)["errors"]
    assert errors == ["", "its port is in use by another program", "connection refused"]


def test_what_ends_badly_is_told_by_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that cannot be imported, and one that takes its process with it."""
    package = tmp_path / "torch"
    package.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (package / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    assert host_facts.try_torch() == {"error": "OSError: libcudart.so.12: cannot open shared object file"}
    (package / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert host_facts.try_torch() == {"error": "it ended with exit code -11"}
    (tmp_path / "mpi4py.py").write_text("rc = None; raise RuntimeError('cannot load MPI library')")
    assert host_facts.try_mpi()["error"] == "RuntimeError: cannot load MPI library"


def test_a_gpu_inside_wsl_is_nvidias_where_windows_has_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libcuda.so.1"
    monkeypatch.setattr(device_probe, "_WSL_CUDA", library)
    had = "nvidia" in device_probe.drivers()
    library.touch()
    assert not had or Path("/sys/module/nvidia").exists()
    assert "nvidia" in device_probe.drivers()


def test_an_agent_answers_behind_a_talkative_login_and_its_end_is_told(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nshift\necho Welcome to this machine\nexec sh -c "$*"\n')
    agent.chmod(0o755)
    with HostAgent([str(agent)], "rtx", False) as asked:
        assert abs(asked.ask("clock", 60)["unix_s"] - time.time()) < 60
    agent.write_text("#!/bin/sh\necho 'ssh: Could not resolve hostname rtx' >&2; exit 255\n")
    with (
        HostAgent([str(agent)], "rtx", False) as asked,
        pytest.raises(AgentError, match="Could not resolve hostname rtx"),
    ):
        asked.ask("clock", 60)


def examine(command: list[str]) -> tuple[int, dict[str, Any]]:
    result = run_bounded(command, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, PATIENCE_S)
    assert result.stdout.startswith("{"), result.stderr[-4000:]
    return result.returncode, json.loads(result.stdout)


def test_hosts_with_real_defects(tmp_path: Path) -> None:
    """A Python without packages, a Python that is not there, another MPI, another commit, and a route that swallows packets."""
    launcher_or_skip()
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    older = tmp_path / "older"
    shutil.copytree(ROOT / "hetero_mpi", older / "hetero_mpi", ignore=shutil.ignore_patterns("__pycache__"))
    (older / "hetero_mpi" / "of_yesterday.py").touch()
    with Rack(tmp_path / "rack", ("hA", "hB", "hC")) as rack:
        first, second = rack.addresses["hA"], rack.addresses["hB"]
        hosts = tmp_path / "hosts.toml"
        pythons = {"hB": sys.executable, "bare": f"{bare}/bin/python", "gone": "/nowhere/bin/python"}
        if other := os.environ.get("HETERO_MPI_OTHER_PYTHON"):
            pythons["other MPI"] = other
        entries = "".join(
            f'[[host]]\nname = "{name}"\naddress = "{second}"\npython = "{python}"\ndirectory = "/srv/{name}"\n'
            for name, python in pythons.items()
        )
        entries += f'[[host]]\nname = "older"\naddress = "{rack.addresses["hC"]}"\ndirectory = "{older}"\n'
        hosts.write_text(f'[[host]]\nname = "hA"\naddress = "{first}"\n{entries}')
        words = [sys.executable, "-m", "hetero_mpi", "doctor", "--hosts", str(hosts), "--json"]
        words += [f"--mpirun-args=--mca plm_rsh_agent {rack.agent} -launcher-exec {rack.agent}"]
        swallow = run_bounded([str(rack.agent), second, f"ip route add blackhole {first}/32"], os.environ, PATIENCE_S)
        assert swallow.returncode == 0
        inner = f"cd {ROOT}; exec env PYTHONPATH={ROOT} {shlex.join(words)}"
        code, report = examine([str(rack.agent), first, inner])
    assert code == 1 and report["would_fail"]
    failed = {
        (finding["subject"], *finding["where"]): finding
        for finding in report["findings"]
        if finding["severity"] == "FAIL"
    }
    expected = {
        ("directory", "hB"),
        ("hosts", "gone"),
        ("packages", "bare"),
        ("MPI", "bare"),
        ("connections",),
        ("hetero_mpi",),
    }
    assert expected | ({("MPI library",)} if other else set()) <= failed.keys()
    assert "/nowhere/bin/python" in failed["hosts", "gone"]["text"]
    assert f"{bare}/bin/python -m pip install torch mpi4py" in failed["packages", "bare"]["remedy"]
    cut = [finding["text"] for finding in report["findings"] if finding["subject"] == "connections"]
    assert any("hA cannot open a TCP connection to hB: timed out" in text for text in cut), cut
    assert f"`sudo ufw allow from {NETWORK}.0/24`" in failed["connections",]["remedy"]
    assert "on older" in failed["hetero_mpi",]["remedy"]
    assert not any("older" in text for text in cut), "it may know no such requests"
    (links,) = [finding for finding in report["findings"] if finding["subject"] == "links"]
    assert links["remedy"] == f"python -m hetero_mpi launch --hosts {hosts} -- doctor"
    assert {"hA", "hB", "bare", "older"} <= report["facts"].keys()
    good = [finding for finding in report["findings"] if finding["severity"] == "ok"]
    assert any(finding["subject"] == "interfaces" and "cable0" in finding["text"] for finding in good)
    assert any(finding["subject"] == "clocks" for finding in good)


def test_ranks_examine_themselves_np2(tmp_path: Path) -> None:
    """The hosts file has a mesh, which is not up here: all that is found is that."""
    hosts = tmp_path / "hosts.toml"
    hosts.write_text('[mesh]\nnetwork = "10.233.7.0/24"\n[[host]]\naddress = "10.233.7.1"\nslots = 2\n')
    result = run_mpi(2, ["-m", "hetero_mpi", "doctor", "--json", "--hosts", str(hosts)], PATIENCE_S)
    assert result.returncode == 1, result.stderr[-4000:]
    report = json.loads(result.stdout)
    findings = report["findings"]
    assert [finding["subject"] for finding in findings if finding["severity"] == "FAIL"] == ["mesh"]
    assert "started 2 connected ranks" in findings[0]["text"]
    links = [finding["text"] for finding in findings if finding["subject"] == "links"]
    assert [text.split(" (")[0] for text in links] == ["rank 0", "rank 1"] and "MPI messages" in links[0]
    assert any(finding["subject"] == "devices" for finding in findings), "one rank has looked at torch"


def test_a_host_whose_mesh_is_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The launch agent gives up, as ssh does after ten seconds."""
    from hetero_mpi.cli import main

    hosts, agent = tmp_path / "hosts.toml", tmp_path / "agent"
    hosts.write_text('[mesh]\nnetwork = "10.233.7.0/24"\n[[host]]\naddress = "10.233.7.2"\n')
    agent.write_text("#!/bin/sh\necho 'ssh: connect to host 10.233.7.2 port 22: Connection timed out' >&2; exit 255\n")
    agent.chmod(0o755)
    given = f"--mpirun-args=--mca plm_rsh_agent {agent} -launcher-exec {agent}"
    assert main(["doctor", "--json", "--hosts", str(hosts), given]) == 1
    failed = {
        finding["subject"]: finding
        for finding in json.loads(capsys.readouterr().out)["findings"]
        if finding["severity"] == "FAIL"
    }
    assert "Connection timed out" in failed["hosts"]["text"]
    assert (
        "`sudo wg-quick up hetero0` on each" in failed["hosts"]["remedy"] and "cable" not in failed["hosts"]["remedy"]
    )
    assert failed["mesh"]["where"][0].endswith(" (here)") and "wg-quick up" in failed["mesh"]["remedy"]


def test_a_hosts_file_that_breaks_rules_is_a_users_error(tmp_path: Path) -> None:
    from hetero_mpi.cli import main

    path = tmp_path / "hosts.toml"
    path.write_text("[[host]]\nslots = 1\n")
    assert main(["doctor", "--hosts", str(path)]) == 2


def test_a_machine_without_any_package_is_told_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    code, report = examine([f"{bare}/bin/python", "-m", "hetero_mpi", "doctor", "--json"])
    assert code == 1
    remedies = [finding["remedy"] for finding in report["findings"] if finding["subject"] == "packages"]
    assert remedies and f"{bare}/bin/python -m pip install torch mpi4py" in remedies[0]


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("host_agent", ("torch", "mpi4py", "psutil", "pydantic", "numpy")),
        ("doctor.examine", ("torch", "mpi4py", "psutil", "pydantic", "numpy")),
        ("doctor.rank_checks", ("torch", "pydantic")),
    ],
)
def test_what_the_doctor_does_not_import(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, hetero_mpi.launch.{module}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"
