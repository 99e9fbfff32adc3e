"""``launch --elastic``: real jobs whose ranks and whole hosts are killed, and that end as if nothing had happened."""

import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from hetero_mpi.cli import main
from hetero_mpi.launch.hosts.agent import launch_agent, remote_command
from hetero_mpi.launch.supervisor.elastic import without_option
from hetero_mpi.launch.supervisor.elastic_options import ElasticOptions
from hetero_mpi.launch.supervisor.host_reports import RunDirectory
from hetero_mpi.rundir.metrics import read_metrics
from tests.support.elastic import (
    PATIENCE_S,
    STEPS,
    Cluster,
    Elastic,
    environment,
    events,
    hosts_of_starts,
    losses,
    ranks_under,
    supervised,
    tell,
)
from tests.support.errors import refuses
from tests.support.jobs import newest_copy_step
from tests.support.long_run import is_alive
from tests.support.mpi import launcher_or_skip, run_bounded
from tests.support.processes import wait_until
from tests.support.rack import Rack

pytestmark = pytest.mark.slow


def test_a_killed_rank_on_one_host_then_no_restart_left_np2(tmp_path: Path) -> None:
    """SIGKILL of a rank: started again from the newest checkpoint; a second one is one too many."""
    launcher_or_skip()
    job, run = Elastic(tmp_path, steps=100_000), tmp_path / "run"
    with supervised(job.command(run, 2, "--max-restarts", "1"), run) as running:
        for start in (1, 2):
            running.until_step(3, start)
            step = len(losses(run))
            killed_s = time.time()
            ranks = ranks_under(running.process)
            assert len(ranks) == 2
            ranks[1].kill()
            running.wait_for("the end", lambda start=start: len(events(run, "ended")) == start)
            assert alive(ranks) == []
            if start == 1:
                running.until_step(step, 2)
                tell(run, "a killed rank", killed_s)
        assert running.end() == 75
    assert "--max-restarts 1 reached: giving up (exit code 75)" in running.text()
    names = [event["event"] for event in events(run) if event["event"] != "copies"]  # where they beat the checkpoint
    once = ["hosts", "start", "first-step", "broken", "ended"]
    assert names == [*once, *once, "given-up"]
    first, second = events(run, "start")
    assert first["resume"] == 0 and second["resume"] >= 1
    steps = [step.step for step in read_metrics(run / "metrics.jsonl").steps]
    assert steps == list(range(1, len(steps) + 1))


def test_a_mistake_of_the_user_is_not_tried_again(tmp_path: Path) -> None:
    launcher_or_skip()
    job, run = Elastic(tmp_path), tmp_path / "run"
    wrong = [*job.command(run, 1), "--set", 'data.text=["absent.txt"]']
    result = run_bounded(wrong, environment(), PATIENCE_S)
    assert result.returncode == 2, result.stderr
    assert "absent.txt" in result.stderr
    assert [event["event"] for event in events(run)] == ["hosts", "start", "ended", "end"]


@pytest.mark.parametrize("name", ["events.jsonl", ".lock", "checkpoints"])
def test_nothing_is_written_through_a_link_out_of_the_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    launcher_or_skip()
    (tmp_path / "job.toml").write_text(
        "[model]\npath='m'\n[data]\ntext=['t']\nsequence_length=8\n[train]\nsteps=1\nglobal_batch=1\n"
    )
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    if name == "checkpoints":
        outside.mkdir()
    else:
        outside.write_text("mine\n")
    (run / name).symlink_to(outside)
    words = ["launch", "-np", "1", "--elastic", "--", "train", str(tmp_path / "job.toml"), "--run-dir", str(run)]
    assert main(words) == 2
    assert f"{run / name} is a link to {outside}, outside it" in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == [name]
    assert list(outside.iterdir()) == [] if outside.is_dir() else outside.read_text() == "mine\n"
    assert not RunDirectory(run).locked()


@pytest.mark.long
def test_a_host_without_power_whose_disk_held_the_checkpoints(tmp_path: Path) -> None:
    """Every host has a run directory of its own. The one that leads is gone for good, and no connection is closed towards the
    others: they go on from the copies that it and they have left on the disks of peers, and end as an undisturbed run."""
    job, runs = Elastic(tmp_path, replicate_every=2), tmp_path / "runs"
    with (
        Cluster(tmp_path / "rack", ("hB", "hA", "hC"), own=runs) as rack,
        rack.start(job, runs / "run", "--heartbeat-timeout", "4") as running,
    ):
        lost, kept = rack.disks["hB"] / "run", [rack.disks[name] / "run" for name in ("hA", "hC")]
        running.wait_for("copies", lambda: events(running.run, "first-step") != [] and newest_copy_step(kept[0]) >= 6)
        assert list((lost / "checkpoints").glob("step-*.h5")) != []
        killed_s = time.time()
        rack.lose("hB")
        running.finish()
        assert rack.orphans() == []
        run = running.run
        tell(run, "a host without power (--heartbeat-timeout 4)", killed_s)
        assert hosts_of_starts(run, rack) == [["hB", "hA", "hC"], ["hA", "hC"]]
        assert [event["hosts"] for event in events(run, "silent")] == [[rack.addresses["hB"]]]
        assert [(event["ranks"], event["resume"]) for event in events(run, "start")] == [(3, 0), (2, 0)]
        (found,) = events(run, "copies")
        assert found["step"] >= 4 and found["step"] % 2 == 0 and found["hosts"] == ["hA", "hC"]
        assert "from copies on the disks of hA, hC; there is no local checkpoint" in running.text()
        steps = read_metrics(run / "metrics.jsonl").steps
        assert [step.step for step in steps] == list(range(found["step"] + 1, STEPS + 1))
        assert losses(run) == job.straight_losses()[found["step"] :]
        assert [newest_copy_step(folder) for folder in kept] == [0, 0], "the run is over"


def test_a_host_whose_temporary_folder_is_full_takes_no_part(tmp_path: Path) -> None:
    job, run = Elastic(tmp_path, steps=4), tmp_path / "run"
    with Cluster(tmp_path / "rack", full=["hB"]) as rack, rack.start(job, run) as running:
        running.finish()
        assert hosts_of_starts(run, rack) == [["hA", "hC"]]
        (found,) = events(run, "hosts")
        assert (
            list(found["missing"]) == [rack.addresses["hB"]] and "free space" in found["missing"][rack.addresses["hB"]]
        )


def test_hosts_that_all_lack_room_are_refused_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher_or_skip()
    job, run = Elastic(tmp_path), tmp_path / "run"
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    result = run_bounded(job.command(run, 1), environment(), PATIENCE_S)
    assert result.returncode == 2 and str(tmp_path / "none") in result.stderr, result.stderr
    assert [path.name for path in run.iterdir()] == [".lock"]


@pytest.mark.long
def test_hosts_that_cannot_read_the_data_do_not_lead(tmp_path: Path) -> None:
    """The data is on the disk that is lost: each host that is left is tried, and then the run ends and says what is amiss."""
    runs = tmp_path / "runs"
    job = Elastic(tmp_path, steps=100_000, replicate_every=2, text=runs / "text.txt")
    with Cluster(tmp_path / "rack", ("hB", "hA", "hC"), own=runs) as rack:
        shutil.copy(job.text, rack.disks["hB"] / "text.txt")
        with rack.start(job, runs / "run", "--heartbeat-timeout", "4") as running:
            running.wait_for("the first step", lambda: events(running.run, "first-step") != [])
            rack.lose("hB")
            assert running.end() == 2, running.text()
            assert rack.orphans() == []
        told = running.text()
        assert hosts_of_starts(running.run, rack) == [["hB", "hA", "hC"], ["hA", "hC"], ["hC", "hA"]]
        names = {host: name for name, host in rack.addresses.items()}
        assert [names[event["host"]] for event in events(running.run, "unfit")] == ["hA", "hC"]
        assert "nor could any other remaining host" in told and "text.txt" in told, told[-3000:]


@pytest.mark.long
def test_a_cut_link_a_host_that_returns_and_one_that_crashes(tmp_path: Path) -> None:
    """A cable that stays out, with the leading rank behind it: that ends itself, and lets go of the run directory. Its host is
    back at the next start; then another one crashes."""
    job, run = Elastic(tmp_path, steps=200), tmp_path / "run"
    with Cluster(tmp_path / "rack", ("hB", "hA", "hC")) as rack, rack.start(job, run) as running:
        running.until_step(3, start=1)
        cut = rack.ranks("hB")
        assert len(cut) == 1
        killed_s = time.time()
        rack.pull_cable("hB")
        running.wait_for("the second start's first step", lambda: len(events(run, "first-step")) == 2)
        tell(run, "a cable pulled out", killed_s)
        running.wait_for("the end of the rank that was cut off", lambda: not alive(cut))
        rack.plug_in("hB")
        killed_s = time.time()
        rack.ranks("hC")[0].kill()
        running.wait_for("the third start's first step", lambda: len(events(run, "first-step")) == 3)
        tell(run, "a killed rank on another host", killed_s)
        killed_s = time.time()
        rack.crash("hC")
        running.finish()
        assert rack.orphans() == []
    tell(run, "a crashed host", killed_s)
    assert hosts_of_starts(run, rack) == [["hB", "hA", "hC"], ["hA", "hC"], ["hB", "hA", "hC"], ["hB", "hA"]]
    # Had the rank that was cut off not let go of the directory, the second start would have been refused. It ends itself at about
    # the time of that start, so whether its lock had to be waited for is a matter of a second.
    assert len(events(run, "locked")) <= 1
    assert losses(run) == job.straight_losses()


@pytest.mark.long
def test_hosts_lost_one_after_the_other_of_which_two_come_back(tmp_path: Path) -> None:
    """The one that leads loses power and is switched on again; the next one crashes, and comes back too; then the first one loses
    power for good. Each loss is met by a start on the hosts that answer, and the end is that of an undisturbed run."""
    job, run = Elastic(tmp_path, steps=400), tmp_path / "run"
    lose = {"power": Rack.cut_power, "crash": Rack.crash}
    losses_of_hosts = (("power", "hB", True), ("crash", "hC", True), ("power", "hB", False))
    with (
        Cluster(tmp_path / "rack", ("hB", "hA", "hC")) as rack,
        rack.start(job, run, "--heartbeat-timeout", "4") as running,
    ):
        for start, (how, name, comes_back) in enumerate(losses_of_hosts, start=1):
            running.until_step(len(losses(run)) + 3 if start > 1 else 3, start)
            killed_s = time.time()
            lose[how](rack, name)
            running.wait_for(f"start {start + 1}", lambda start=start: len(events(run, "first-step")) == start + 1)
            tell(run, f"{name}, {how}", killed_s)
            if comes_back:
                rack.power_on(name)
        running.finish()
        assert rack.orphans() == []
    assert hosts_of_starts(run, rack) == [["hB", "hA", "hC"], ["hA", "hC"], ["hB", "hA"], ["hA", "hC"]]
    assert [event["resume"] > 0 for event in events(run, "start")] == [False, True, True, True]
    assert losses(run) == job.straight_losses()


@pytest.mark.long
def test_an_outage_of_twelve_seconds_is_ridden_out(tmp_path: Path) -> None:
    job, run = Elastic(tmp_path, steps=200), tmp_path / "run"
    with Cluster(tmp_path / "rack") as rack, rack.start(job, run) as running:
        running.until_step(3, start=1)
        rack.pull_cable("hB")
        time.sleep(12)
        rack.plug_in("hB")
        running.finish()
        told = [event["event"] for event in events(run)]
        assert told == ["hosts", "start", "first-step", "ended", "end"], running.text()
    assert losses(run) == job.straight_losses()


@pytest.mark.long
def test_signals_reach_the_job_and_end_the_supervisor_np2(tmp_path: Path) -> None:
    """SIGTERM is passed on; a supervisor that is killed itself leaves nothing running either."""
    launcher_or_skip()
    job = Elastic(tmp_path, steps=100_000)
    for number, name in ((signal.SIGTERM, "asked"), (signal.SIGKILL, "killed")):
        run = tmp_path / name
        with supervised(job.command(run, 2), run) as running:
            running.until_step(1, 1)
            below = running.process.children(recursive=True)
            running.process.send_signal(number)
            assert running.end() != 0
            wait_until(lambda below=below: not alive(below), "the end of the job", 20)
        told = [event["event"] for event in events(run)][3:]
        assert told == (["signal", "ended", "end"] if name == "asked" else [])


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if is_alive(process)]


@pytest.mark.parametrize(
    ("family", "given", "variables", "agent"),
    [
        ("Open MPI", "--mca plm_rsh_agent /opt/agent --mca pml ob1", {}, "/opt/agent"),
        ("Open MPI", "--prtemca plm_ssh_agent '/opt/agent -v : rsh'", {}, "/opt/agent -v"),
        ("Open MPI", "", {"OMPI_MCA_plm_rsh_agent": "/opt/other"}, "/opt/other"),
        (
            "Open MPI",
            "--mca pml ob1",
            {"PRTE_MCA_plm_ssh_agent": "ssh : rsh"},
            "ssh -o BatchMode=yes -o ConnectTimeout=10",
        ),
        ("MPICH", "-launcher ssh -launcher-exec /opt/agent", {}, "/opt/agent"),
        ("MPICH", "", {"HYDRA_LAUNCHER_EXEC": "/opt/other"}, "/opt/other"),
        ("MPICH", "", {}, "ssh -o BatchMode=yes -o ConnectTimeout=10"),
    ],
)
def test_hosts_are_reached_as_the_launcher_reaches_them(
    family: str, given: str, variables: dict[str, str], agent: str
) -> None:
    assert shlex.join(launch_agent(family, shlex.split(given), variables)[0]) == agent


def test_commands_survive_the_way_through_a_login(tmp_path: Path) -> None:
    """ssh joins its words with spaces, and a shell there takes them apart."""
    words = [sys.executable, "-c", "import os, sys; print(os.getcwd(), os.environ['A'], sys.argv[1])", "it's $HOME; *"]
    command = remote_command(["agent"], "host", str(tmp_path), {"A": "x y"}, *words)
    assert command[:2] == ["agent", "host"]
    result = subprocess.run(["sh", "-c", " ".join(command[2:])], capture_output=True, text=True, check=True)
    assert result.stdout == f"{tmp_path} x y it's $HOME; *\n"


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("train job.toml --plan p.toml --resume", "train job.toml"),
        ("train --plan=p.toml job.toml --resume c.h5 --set a.b=1", "train job.toml --set a.b=1"),
        ("train job.toml --resume --plan p.toml --run-dir r", "train job.toml --run-dir r"),
    ],
)
def test_options_are_taken_out_of_a_command_line(words: str, left: str) -> None:
    without_plan = without_option(words.split(), "--plan")
    assert without_option(without_plan, "--resume", needs_value=False) == left.split()


def test_where_a_supervisor_cannot_help_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with refuses("elastic.min_ranks"):
        ElasticOptions(2, None, min_ranks=3).check()
    hosts = tmp_path / "hosts"
    hosts.write_text("hA slots=2\nhB\n")
    with refuses("elastic.slots", "hB slots=1"):
        ElasticOptions(2, str(hosts)).hosts()
    assert main(["launch", "-np", "2", "--elastic", "profile", "job.toml", "-o", "p.toml"]) == 2
    assert "--elastic is for `train`" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with refuses("elastic.slurm"):
        ElasticOptions(2, None).check()
