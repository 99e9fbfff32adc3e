"""``launch --hosts``: the file, the command for both MPIs, and unlike Python environments that train together."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_mpi.comm.ranks.library import MpiLibrary
from hetero_mpi.commands.options import parser
from hetero_mpi.device.choice import DEVICE_VARIABLE, Cores, DeviceSpec, VisibleDevices, cores_of, device_spec, gpu_of
from hetero_mpi.launch import launch
from hetero_mpi.launch.hosts.agent import launch_agent
from hetero_mpi.launch.hosts.hostfile import HostEntry
from hetero_mpi.launch.hosts.hosts_toml import Host, ranks_of, read_hosts
from hetero_mpi.launch.hosts.interface import LocalAddress
from hetero_mpi.launch.launcher import command_line as building
from hetero_mpi.launch.launcher.command_line import hosts_command, relay_script, write_cached
from hetero_mpi.launch.launcher.launcher import Launcher
from hetero_mpi.launch.supervisor import watched_hosts
from hetero_mpi.launch.supervisor.elastic import Supervisor
from hetero_mpi.launch.supervisor.elastic_options import ElasticOptions
from hetero_mpi.rundir.run_directory import START_VARIABLE
from tests.support.elastic import Cluster, Elastic, environment, hosts_of_starts, supervised
from tests.support.environments import second_environment
from tests.support.equality import losses
from tests.support.errors import refuses
from tests.support.jobs import Workshop
from tests.support.mpi import ROOT, launcher_or_skip, run_bounded
from tests.support.rack import Rack

pytestmark = pytest.mark.slow

OPEN_MPI = Launcher(Path("/opt/bin/mpirun"), "Open MPI", MpiLibrary("Open MPI", "Open MPI", "5.0.11"))
MPICH = Launcher(Path("/opt/bin/mpiexec"), "MPICH", MpiLibrary("MPICH", "MPICH", "5.0.2"))
LOCAL = (LocalAddress("eth0", "10.77.0.1", "255.255.255.0"), LocalAddress("lo", "127.0.0.1", "255.0.0.0"))
PATIENCE_S = 240

TWO_CARDS = """
[[host]]
name = "box, NVIDIA"
address = "10.77.0.1"
python = "/a/bin/python"
device = "cuda"

[[host]]
name = "box, AMD"
address = "10.77.0.1"
python = "/b/bin/python"
device = "rocm"
environment = { HSA_OVERRIDE_GFX_VERSION = "11.0.0" }

[[host]]
address = "10.77.0.2"
slots = 2
directory = "/srv/it"
python = "/c/bin/python"
"""


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment in which nothing is chosen, on a host with one interface."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "SLURM_", "FI_TCP", "UCX_", "HYDRA")) or name == "PYTHONPATH":
            monkeypatch.delenv(name)
    monkeypatch.setattr(watched_hosts, "resolve", lambda name: name)
    monkeypatch.setattr(building, "local_addresses", lambda: LOCAL)
    monkeypatch.setattr(building, "resolve", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, text: str) -> Path:
    path = folder / "hosts.toml"
    path.write_text(text)
    return path


def test_every_problem_of_a_hosts_file_is_told_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        x = 1
        [[host]]
        adress = "10"
        slots = 0
        [[host]]
        address = "-oProxyCommand=x"
        device = "gpu"
        python = "~/x"
        environment = { "A B" = "x" }
        [[host]]
        address = "a"
        name = ""
        slots = 2
        device = "cuda:1"
        [[host]]
        address = "a"
        environment = { A = 1 }
        """,
    )
    expected = ["x = 1", "1: address", "1: slots = 0", "1: adress", "2: address", "2: device", "2: python", "2: environment",
                "3: device", "4: environment"]  # fmt: skip
    with refuses("hosts.invalid", "'address'", "cuda:1", "'A B'") as refusal:
        read_hosts(path)
    lines = [line.removeprefix(f"{path}: ").removeprefix("[[host]] ") for line in str(refusal.value).splitlines()]
    assert len(lines) == len(expected) and all(map(str.startswith, lines, expected)), lines


def test_files_that_are_no_hosts_files(tmp_path: Path) -> None:
    for text, kind in (
        ("", "hosts.invalid"),
        ('[host]\naddress = "a"\n', "hosts.invalid"),
        ("rtx slots=2\n", "hosts.toml"),
        ('[[host]]\naddress = "a"\ngpus = 2\n', "hosts.invalid"),
    ):
        with refuses(kind, tmp_path):
            read_hosts(write(tmp_path, text))
    with refuses("hosts.unreadable", "absent.toml"):
        read_hosts(tmp_path / "absent.toml")


def test_ranks_fill_the_entries_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, TWO_CARDS)
    hosts = read_hosts(path)
    assert [count for _, count in ranks_of(hosts, None, path)] == [1, 1, 2]
    assert [(host.title, count) for host, count in ranks_of(hosts, 3, path)] == [
        ("box, NVIDIA", 1),
        ("box, AMD", 1),
        ("10.77.0.2", 1),
    ]
    with refuses("hosts.too_many_ranks"):
        ranks_of(hosts, 5, path)


def test_the_command_of_open_mpi(network: None, tmp_path: Path) -> None:
    path = write(tmp_path, TWO_CARDS.replace('python = "/c/bin/python"', ""))
    command = hosts_command(OPEN_MPI, ranks_of(read_hosts(path), None, path), ["train", "job.toml"], ["-q"])
    program = "-m hetero_mpi train job.toml"
    assert shlex.join(command.arguments) == (
        "/opt/bin/mpirun --bind-to none --mca btl_tcp_if_include 10.77.0.0/24 --prtemca prte_if_include 10.77.0.0/24 "
        "--prtemca plm_ssh_no_tree_spawn 1 -q "
        f"--host 10.77.0.1:1 -np 1 env {DEVICE_VARIABLE}=cuda /a/bin/python {program} : "
        f"--host 10.77.0.1:1 -np 1 env {DEVICE_VARIABLE}=rocm HSA_OVERRIDE_GFX_VERSION=11.0.0 /b/bin/python {program} : "
        f"--host 10.77.0.2:2 -np 2 --wdir /srv/it {sys.executable} {program}"
    )


def test_the_command_of_mpich(network: None, tmp_path: Path) -> None:
    path = write(tmp_path, TWO_CARDS)
    command = hosts_command(MPICH, ranks_of(read_hosts(path), 3, path), ["train", "job.toml"])
    program = "-m hetero_mpi train job.toml"
    assert shlex.join(command.arguments) == (
        "/opt/bin/mpiexec -iface eth0 -hosts 10.77.0.1:2,10.77.0.2:1 "
        f"-np 1 -env {DEVICE_VARIABLE} cuda /a/bin/python {program} : "
        f"-np 1 -env {DEVICE_VARIABLE} rocm -env HSA_OVERRIDE_GFX_VERSION 11.0.0 /b/bin/python {program} : "
        f"-np 1 -wdir /srv/it /c/bin/python {program}"
    )


def test_another_prefix_brings_our_own_agent_which_calls_the_users(
    network: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel's MPI lies in the environment of each host's Python; a prefix of the file goes before."""
    monkeypatch.setattr(sys, "prefix", "/opt")
    shares = [(Host(address="10.77.0.1"), 1), (Host(address="10.77.0.2", python="/c/bin/python"), 1)]
    given = ["--mca", "plm_rsh_agent", "/opt/agent -v", "--mca", "pml", "ob1"]
    command = hosts_command(OPEN_MPI, shares, ["train", "job.toml"], given)
    relay = Path(command.arguments[command.arguments.index("plm_ssh_agent") + 1])
    line = shlex.join(command.arguments)
    assert f"--prtemca plm_ssh_agent {relay} --prtemca plm_ssh_no_tree_spawn 1 --prefix /opt" in line
    assert line.count("no_tree_spawn") == 1
    assert "plm_rsh_agent" not in line and "--mca pml ob1 --host" in line and line.count("--prefix") == 1
    assert "10.77.0.2:1 -np 1 env OPAL_PREFIX=/c /c/bin/python" in line
    assert "10.77.0.2) there=/c ;;" in relay.read_text() and "exec /opt/agent -v" in relay.read_text()
    site = [(shares[0][0], 1), (Host(address="10.77.0.2", python="/c/bin/python", prefix="/opt"), 1)]
    assert "plm_ssh_agent" not in hosts_command(OPEN_MPI, site, ["train", "job.toml"]).arguments
    mpich = shlex.join(hosts_command(MPICH, shares, ["train", "job.toml"], ["-launcher-exec", "/opt/agent"]).arguments)
    assert "-launcher ssh -launcher-exec " in mpich and "/opt/agent" not in mpich


def test_the_agent_puts_each_hosts_prefix_into_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    there = "/somewhere/else & more"
    relay = write_cached("agent", ".sh", relay_script(["printf", "%s|"], "/opt/it.s", {"hB": there}), "for this test")
    sent = 'P=/opt/it.s;L=/opt/it.s/lib:$L;"/opt/it.s/bin/proxy" /opt/it.sx /opt/itxs/y --prefix /opt/it.s'

    def told(*words: str) -> list[str]:
        return subprocess.run([relay, *words], capture_output=True, text=True, check=True).stdout.split("|")[:-1]

    changed = f'P={there};L={there}/lib:$L;"{there}/bin/proxy" /opt/it.sx /opt/itxs/y --prefix {there} '
    assert told("-x", "hB", sent) == ["hB", changed]
    assert told("hA", *sent.split(" ")) == ["hA", sent]


def test_options_of_the_launch_agent_are_taken_out() -> None:
    words = ["--mca", "pml", "ob1", "--prtemca", "plm_ssh_agent", "x", "-q"]
    assert launch_agent("Open MPI", words, {})[1] == ["--mca", "pml", "ob1", "-q"]
    assert launch_agent("MPICH", ["-launcher", "ssh", "-launcher-exec", "x", "-q"], {})[1] == ["-q"]


def test_ranks_that_see_the_same_cards_take_different_ones() -> None:
    both = ((0, "n0"), (1, "n1"))
    nvidia, amd = VisibleDevices("box", "cuda", both, None), VisibleDevices("box", "rocm", ((0, "a0"),), None)
    told = VisibleDevices("box", "cuda", both, 1)
    bound = [
        VisibleDevices("node", "cuda", ((0, card),), None) for card in ("u0", "u1")
    ]  # as SLURM gives each task its own
    everyone = [nvidia, amd, nvidia, told, *bound, VisibleDevices("other", "cuda", both, None), nvidia]
    assert [gpu_of(rank, everyone) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 0, None]


def test_cores_of_ranks_that_feed_gpus_go_to_those_that_compute() -> None:
    whole, first, second = tuple(range(16)), (0, 1), (2, 3)
    box = [Cores("box", whole, None, gpu) for gpu in (False, False, False, True)]
    assert [cores_of(rank, box) for rank in range(4)] == [2, 2, 2, 10]
    gpus = [Cores("box", whole, None, False)] * 2
    assert [cores_of(rank, gpus) for rank in range(2)] == [8, 8], "nobody else wants them"
    small = [Cores("box", first, None, False), Cores("box", first, None, True), Cores("other", first, None, True)]
    assert [cores_of(rank, small) for rank in range(3)] == [1, 1, 2]
    bound = [Cores("box", first, None, False), Cores("box", second, None, True)]
    assert [cores_of(rank, bound) for rank in range(2)] == [2, 2]


def test_a_quota_is_shared_among_the_ranks_of_its_host() -> None:
    container = [Cores("box", tuple(range(64)), 2.0, True)] * 2
    assert [cores_of(rank, container) for rank in range(2)] == [1, 1]
    wide = [Cores("box", (0, 1), 8.0, True)]
    assert cores_of(0, wide) == 2, "no more than there are"
    bound = [Cores("box", (0, 1), 1.5, True), Cores("box", (2,), 1.5, True)]
    assert [cores_of(rank, bound) for rank in range(2)] == [1, 0.5]


def test_a_hosts_device_goes_before_the_jobs() -> None:
    assert device_spec("auto", {}) == DeviceSpec("auto")
    assert device_spec("cpu", {DEVICE_VARIABLE: "cuda:1"}) == DeviceSpec("cuda", 1)
    with refuses("device.environment"):
        device_spec("auto", {DEVICE_VARIABLE: "gpu"})


def test_without_ranks_and_hosts_launch_asks() -> None:
    arguments = parser().parse_args(["launch", "train", "job.toml"])
    with refuses("launch.ranks_unknown", "-np", "--hosts"):
        launch.main(arguments, parser().parse_args)


def test_a_supervisor_keeps_the_entries_of_the_hosts_that_answer(network: None, tmp_path: Path) -> None:
    """The host that leads comes first; both of its entries stay."""
    options = ElasticOptions(4, None, str(write(tmp_path, TWO_CARDS)))
    assert options.hosts() == (HostEntry("10.77.0.1", 2), HostEntry("10.77.0.2", 2))
    program = ["train", "job.toml", "--run-dir", "runs/x"]
    supervisor = Supervisor(options, OPEN_MPI, program, tmp_path / "run", trains=True)
    box, other = supervisor.watching.watched
    line = str(supervisor.command("name.1", [other, box], 3, resume=False, scratch=tmp_path))
    assert line.index("/c/bin/python") < line.index("/a/bin/python") and "/b/bin/python" not in line
    assert f"{START_VARIABLE}=name.1" in line and f"-x {START_VARIABLE}" in line
    assert line.count(f"train job.toml --run-dir {tmp_path}/run") == 2 and "runs/x" not in line
    line = str(supervisor.command("name.2", [box], 2, resume=True, scratch=tmp_path))
    assert "/a/bin/python" in line and "/b/bin/python" in line and "/c/bin/python" not in line
    assert line.count("--resume any") == 2


@pytest.mark.long
def test_two_environments_on_one_host_train_together_np2(tmp_path: Path) -> None:
    """As for an NVIDIA and an AMD card in one box: one address twice, two Pythons. Losses are those of one process."""
    launcher_or_skip()
    other = os.environ.get("HETERO_MPI_OTHER_TORCH") or str(second_environment(tmp_path / "other"))
    workshop = Workshop(tmp_path)
    job = workshop.job("job", workshop.values(workshop.model()), plan={"allow_idle": False, "pipelines": 1})
    hosts = write(
        tmp_path,
        f"""
        [[host]]
        address = "localhost"

        [[host]]
        address = "localhost"
        python = "{other}"
        device = "cpu"
        directory = "{tmp_path}"
        environment = {{ WHO = "the other one" }}
        """,
    )
    start = [sys.executable, "-m", "hetero_mpi"]
    train = ["train", str(job), "--run-dir", str(tmp_path / "together")]
    result = run_bounded([*start, "launch", "--hosts", str(hosts), *train], environment(), PATIENCE_S)
    assert result.returncode == 0, result.stderr[-4000:]
    alone = run_bounded([*start, "train", str(job), "--run-dir", str(tmp_path / "alone")], environment(), PATIENCE_S)
    assert alone.returncode == 0, alone.stderr[-4000:]
    assert len(losses(tmp_path / "alone")) == 4
    same_torch = "HETERO_MPI_OTHER_TORCH" not in os.environ
    assert losses(tmp_path / "together") == pytest.approx(losses(tmp_path / "alone"), rel=0 if same_torch else 1e-5)

    shown = json.dumps(str(tmp_path / "shown.json"))
    say = f"import json, os, sys; print(json.dumps([sys.executable, os.getcwd(), os.environ.get('WHO')]), file=open({shown}, 'a'))"
    (tmp_path / "sitecustomize.py").write_text(say)
    result = run_bounded(
        [*start, "launch", "--hosts", str(hosts), "--", "--version"],
        {**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        PATIENCE_S,
    )
    assert result.returncode == 0, result.stderr
    ranks = [json.loads(line) for line in (tmp_path / "shown.json").read_text().splitlines()]
    assert [sys.executable, str(ROOT), None] in ranks
    assert [other, str(tmp_path), "the other one"] in ranks


@pytest.mark.long
def test_a_host_with_mpi_in_another_place(tmp_path: Path) -> None:
    """The second host has no MPI where the first one has it."""
    launcher = launcher_or_skip()
    other = second_environment(tmp_path / "other")
    empty = tmp_path / "empty"
    empty.mkdir()
    own = Path(sys.prefix)
    files = " ".join(str(path) for pattern in ("bin/prte*", "bin/mpi*", "bin/hydra*") for path in own.glob(pattern))
    with Rack(tmp_path / "rack", ("hA", "hB")) as rack:

        def on(name: str, command: str) -> subprocess.CompletedProcess[str]:
            return run_bounded([str(rack.agent), rack.addresses[name], command], environment(), PATIENCE_S)

        hide = f"for file in {files}; do mount --bind /dev/null $file; done; mount --bind {empty} {own}/share"
        assert on("hB", hide).returncode == 0
        first, second = rack.addresses["hA"], rack.addresses["hB"]
        hosts = write(tmp_path, f'[[host]]\naddress = "{first}"\n[[host]]\naddress = "{second}"\npython = "{other}"\n')
        agent = {
            "Open MPI": f"--mca plm_rsh_agent {rack.agent} --mca btl tcp,self --mca pml ob1",
            "MPICH": f"-launcher ssh -launcher-exec {rack.agent}",
        }[launcher.family]
        workshop = Workshop(tmp_path)
        job = workshop.job("job", workshop.values(workshop.model()), plan={"allow_idle": False, "pipelines": 1})
        words = ["launch", "--hosts", str(hosts), f"--mpirun-args={agent}", "train", str(job)]
        variables = (
            f"PYTHONPATH={ROOT} OMP_NUM_THREADS=1 MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp XDG_CACHE_HOME={tmp_path}"
        )
        start = shlex.join([sys.executable, "-m", "hetero_mpi", *words, "--run-dir", str(tmp_path / "run")])
        result = on("hA", f"cd {ROOT}; env {variables} {start}")
        assert result.returncode == 0, result.stderr[-4000:]
        assert len(losses(tmp_path / "run")) == 4
        unreachable = hosts.read_text().replace("[[host]]\n", f'[[host]]\nprefix = "{own}"\n')
        hosts.write_text(unreachable)
        assert on("hA", f"cd {ROOT}; env {variables} {start}").returncode != 0, (
            "the test shows nothing: MPI was not hidden"
        )


@pytest.mark.long
def test_a_supervisor_over_unlike_environments_goes_on_when_a_host_dies(tmp_path: Path) -> None:
    job, run = Elastic(tmp_path), tmp_path / "run"
    other = second_environment(tmp_path / "other")
    with Cluster(tmp_path / "rack") as rack:
        pythons = {"hA": sys.executable, "hB": str(other), "hC": sys.executable}
        entries = [
            f'[[host]]\naddress = "{rack.addresses[name]}"\npython = "{path}"\n' for name, path in pythons.items()
        ]
        hosts = write(tmp_path, "".join(entries))
        options = ["--hosts", str(hosts), f"--mpirun-args={rack.mpirun_args}", "--heartbeat-timeout", "4"]
        variables = ["env", "OMP_NUM_THREADS=1", f"PYTHONPATH={ROOT}", "MPIR_CVAR_CH4_NETMOD=ofi", "FI_PROVIDER=tcp"]
        variables.append(f"XDG_CACHE_HOME={tmp_path}")
        words = shlex.join([*variables, *job.command(run, 3, *options)])
        with supervised([str(rack.agent), rack.addresses["hA"], f"cd {ROOT} && exec {words}"], run) as running:
            running.until_step(3, start=1)
            rack.cut_power("hC")
            running.finish()
            assert rack.orphans() == []
        assert hosts_of_starts(run, rack) == [["hA", "hB", "hC"], ["hA", "hB"]]
    assert losses(run) == job.straight_losses()
