"""SLURM: the scripts in ``jobs/`` on a real controller with two nodes (``slurm_lab``), and what they rest on."""

import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hetero_mpi.launch import slurm
from hetero_mpi.launch.slurm import Component, components, entries, step_command, tasks_per_node
from hetero_mpi.util import host_limits
from tests.support.environments import second_environment
from tests.support.equality import losses
from tests.support.errors import refuses
from tests.support.long_run import LongRun
from tests.support.mpi import ROOT, launcher_or_skip, require_success
from tests.support.slurm_lab import SlurmLab

pytestmark = pytest.mark.slow

SCRIPTS = sorted((ROOT / "jobs").glob("*.sbatch"))
PATIENCE_S = 300.0
TWO_KINDS = (Component(("n1",), (2,)), Component(("n2", "n3"), (1, 1)))
HETEROGENEOUS = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"}
for group, (nodes, tasks) in {
    "": ("n1", "2"),
    "_HET_GROUP_0": ("n1", "2"),
    "_HET_GROUP_1": ("n[2-3]", "1(x2)"),
}.items():
    HETEROGENEOUS |= {f"SLURM_JOB_NODELIST{group}": nodes, f"SLURM_TASKS_PER_NODE{group}": tasks}


def test_tasks_per_node() -> None:
    assert tasks_per_node("4") == (4,)
    assert tasks_per_node("2(x3),1,3(x2)") == (2, 2, 2, 1, 3, 3)
    with refuses("slurm.tasks_per_node"):
        tasks_per_node("2(x)")


def test_components_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_expand", lambda nodes: {"n[2-3]": ("n2", "n3")}.get(nodes, (nodes,)))
    assert components({}) == ()
    plain = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[2-3]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    assert components(plain) == (Component(("n2", "n3"), (1, 1)),)
    assert components(HETEROGENEOUS) == TWO_KINDS
    assert components(HETEROGENEOUS | {"SLURM_NTASKS_HET_GROUP_0": "1"}) == (Component(("n1",), (1,)), TWO_KINDS[1])
    for most, asked, tasks in (("2(x2)", 3, (2, 1)), ("2(x2)", 2, (1, 1)), ("3,1", 1, (1, 0)), ("1,2", 9, (1, 2))):
        limited = plain | {"SLURM_TASKS_PER_NODE": most, "SLURM_NTASKS": str(asked)}
        assert components(limited) == (Component(("n2", "n3"), tasks),)
    with refuses("slurm.nodes"):
        components(plain | {"SLURM_TASKS_PER_NODE": "1"})
    with refuses("slurm.variables", 7, "SLURM_TASKS_PER_NODE"):
        components({name: value for name, value in plain.items() if name != "SLURM_TASKS_PER_NODE"})


def test_each_component_has_its_python() -> None:
    hosts = entries(TWO_KINDS, ["/cuda/bin/python", "/rocm/bin/python"])
    assert [(host.address, host.slots, host.python) for host in hosts] == [
        ("n1", 2, "/cuda/bin/python"),
        ("n2", 1, "/rocm/bin/python"),
        ("n3", 1, "/rocm/bin/python"),
    ]
    assert [host.python for host in entries(TWO_KINDS, ["/one"])] == ["/one"] * 3
    assert [host.python for host in entries(TWO_KINDS, [])] == [None] * 3
    with refuses("slurm.pythons"):
        entries(TWO_KINDS, ["a", "b", "c"])


def test_the_agent_starts_a_step_in_the_node_s_component() -> None:
    words = step_command("n3", ["prted", "--flag", "&&", "true"], TWO_KINDS)
    assert words[:2] == ["srun", "--het-group=1"] and "--nodelist=n3" in words
    assert words[-3:] == ["sh", "-c", "prted --flag && true"]
    with refuses("slurm.foreign_node"):
        step_command("n9", ["prted"], TWO_KINDS)


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / "jobs" / "slurm.sh"], ids=lambda path: path.name)
def test_scripts_are_short_and_valid(script: Path) -> None:
    text = script.read_text()
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert len(text.splitlines()) < 80 and max(map(len, text.splitlines())) <= 132
    if script.suffix == ".sbatch":
        assert "source jobs/slurm.sh\n" in text and "sbatch " in text.split("#SBATCH")[0], (
            "how to submit it stands on top"
        )
        below = subprocess.run(["bash", script.name, "job.toml"], cwd=ROOT / "jobs", env={"SLURM_JOB_ID": "1"})
        assert below.returncode == 2, "it says from where it is submitted"
        assert f"`{script.name}`" in (ROOT / "docs" / "slurm.md").read_text()


def test_scripts_choose_the_run_directory(tmp_path: Path) -> None:
    """A ``--run-dir`` of the user's wins, only a run of the same job file is resumed, and files of one name do not share a run."""
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    groups(tmp_path, dict.fromkeys(("a/job.toml", "b/job.toml", "runs/job/checkpoints/step-1.h5"), ""))
    (tmp_path / "runs/job/run.json").write_text('{\n "job_file": "a/job.toml",\n "x": 1}')
    for words, expected, names in (
        ("one_node ./a/job.toml", "./a/job.toml --run-dir runs/job --resume", {}),
        ("one_node b/job.toml", "b/job.toml --run-dir runs/job", {}),
        ("requeue b/job.toml --run-dir runs/job", "b/job.toml --run-dir runs/job --run-dir runs/job --resume",
         {"SLURM_RESTART_COUNT": "1"}),
        ("array a/job.toml b/job.toml", "b/job.toml --run-dir runs/b/job", {"SLURM_ARRAY_TASK_ID": "2"}),
        ("array a/job.toml b/job.toml", "", {"SLURM_ARRAY_TASK_ID": "0"}),
        ("one_node a/job.toml", "", {"SLURM_JOB_ID": ""}),
    ):  # fmt: skip
        script, *arguments = words.split()
        environment = {"PATH": "/usr/bin:/bin", "PYTHONS": "/bin/echo", "SLURM_JOB_ID": "1", **names}
        command = ["bash", f"jobs/{script}.sbatch", *arguments]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ended.stdout.strip().partition(" train ")[2] == expected, words
        assert ended.returncode == (0 if expected else 2), ended.stderr


def groups(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = root / "self"
    return own


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        # Version 2: the job's limit stands above the task's group, which has none.
        ("0::/slurm/job_1/step_0/task_0\n",
         {"slurm/job_1/memory.max": "4000", "slurm/job_1/memory.current": "1500", "slurm/job_1/step_0/memory.max": "max",
          "slurm/job_1/memory.stat": "anon 400\ninactive_file 1000\n", "slurm/job_1/step_0/memory.current": "1500"}, 3500),
        # Version 1: the step has less than the job.
        ("4:memory:/slurm/job_1/step_0\n3:cpuset:/\n0::/elsewhere\n",
         {f"memory/{place}memory.{what}_in_bytes": number
          for place, limit, usage in (("slurm/job_1/", "4000", "100"), ("slurm/job_1/step_0/", "2000", "500"),
                                      ("", str(2**63 - 4096), "9999"))
          for what, number in (("limit", limit), ("usage", usage))}, 1500),
        # A container sees its own group at the top.
        ("0::/../../pod\n", {"memory.max": "800", "memory.current": "900"}, 0),
        ("0::/\n", {"memory.max": "max", "memory.current": "900"}, None),
    ],
    ids=["version 2", "version 1", "container", "no limit"],
)  # fmt: skip
def test_memory_limits_of_control_groups(tmp_path: Path, own: str, files: dict[str, str], free: int | None) -> None:
    assert host_limits.free_bytes(tmp_path, groups(tmp_path, {**files, "self": own})) == free


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("1:cpu,cpuacct:/job\n",
         {f"cpu,cpuacct/{place}cpu.cfs_{what}_us": number
          for place, quota in (("job/", "50000\n"), ("", "-1\n"))
          for what, number in (("quota", quota), ("period", "100000\n"))}, 0.5),
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a\n", {"a/cpu.max": "max 100000"}, None),
    ],
    ids=["version 2", "version 1", "container", "no quota"],
)  # fmt: skip
def test_processor_quotas_of_control_groups(
    tmp_path: Path, own: str, files: dict[str, str], cores: float | None
) -> None:
    assert host_limits.core_quota(tmp_path, groups(tmp_path, {**files, "self": own})) == cores


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    launcher_or_skip()
    with SlurmLab(tmp_path_factory.mktemp("slurm") / "lab") as started:
        yield started


class Submitted:
    """A job without end on the lab, submitted by one of the scripts; ``LongRun`` is what it trains."""

    def __init__(self, lab: SlurmLab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.job = LongRun(directory, 2)
        self.run, self.output = directory / "job", directory / "output.txt"
        self.number = ""

    def submit(self, *options: str, pythons: Sequence[str | Path] = (sys.executable,)) -> None:
        """``sbatch OPTIONS JOB``. The machine has two processors, so what the scripts ask for is made smaller."""
        words = [*options, str(self.job.file), "--plan", str(self.job.plan)]
        shown = " ".join(map(str, pythons))
        environment = {"PYTHONS": shown, "RUNS": str(self.directory), "OMP_NUM_THREADS": "1"}
        self.number = self.lab.submit(*words, env=environment)

    def text(self) -> str:
        return (self.output.read_text(errors="replace") if self.output.exists() else "") + self.lab.logs()

    def losses(self) -> list[float]:
        return losses(self.run) if (self.run / "metrics.jsonl").exists() else []

    def wait_for_steps(self, count: int) -> None:
        self.lab.until(
            lambda: len(self.losses()) >= count or self.lab.fields(self.number)["JobState"] == "FAILED",
            f"{count} steps",
            self.text,
            PATIENCE_S,
        )
        assert len(self.losses()) >= count, self.text()

    def stopped_after(self) -> int:
        """Wait until the job is back in the queue; the step after which it stopped, with a checkpoint."""
        self.lab.until(lambda: self.lab.fields(self.number)["Restarts"] == "1", "requeue", self.text, PATIENCE_S)
        told = re.search(r"^Stopped after step (\d+) \(requested by a signal\): (\S+) is complete", self.text(), re.M)
        assert told is not None and Path(told[2]).is_file(), self.text()
        assert re.search(r"^launch: sbatch --chdir=\S+ \S+\.sbatch ", self.text(), re.M), self.text()
        return int(told[1])

    def let_it_end_after(self, steps: int) -> None:
        """Change the job file while the job is in the queue; wait for its end."""
        self.job.job("job", self.job.values(self.job.model()), train={"steps": steps}, checkpoint={"every": 0})
        fields = self.lab.wait_for(self.number, ("COMPLETED", "FAILED"), PATIENCE_S, self.text)
        assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("COMPLETED", "0:0", "1"), self.text()
        assert len(self.losses()) == steps and (self.run / "model").is_dir(), self.text()


def test_each_component_s_python_is_looked_for(lab: SlurmLab, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    first, second = (
        ("--nodes=1", "--ntasks-per-node=1", *SMALL, f"--partition={name}") for name in ("first", "second")
    )
    words = (*first, f"--output={output}", ":", *second, "jobs/unlike_nodes.sbatch", "jobs/letters.toml")
    job = lab.submit(*words, env={"PYTHONS": f"{sys.executable} {tmp_path}/absent"})
    assert lab.wait_for(job, ("COMPLETED", "FAILED"), 60.0, lab.logs)["ExitCode"] == "2:0", output.read_text()
    assert f"{tmp_path}/absent does not exist" in output.read_text()


SMALL = ("--cpus-per-task=1", "--mem=0", "--gres=none")


@pytest.mark.long
def test_unlike_nodes_stop_at_the_limit_and_go_on_np2(lab: SlurmLab, tmp_path: Path) -> None:
    """Two components of a heterogeneous job, each with its Python; told that the time is over, requeued, resumed, finished."""
    job = Submitted(lab, tmp_path)
    other = second_environment(tmp_path / "other")
    component = ("--nodes=1", "--ntasks-per-node=1", *SMALL)
    first = ("--partition=first", f"--output={job.output}", *component)
    job.submit(
        *first, ":", "--partition=second", *component, "jobs/unlike_nodes.sbatch", pythons=(sys.executable, other)
    )
    job.wait_for_steps(3)
    lab.command("scancel", "--signal=USR1", "--batch", job.number)
    steps = job.stopped_after()
    assert "rank 0: n1, cpu" in job.text() and "rank 1: n2, cpu" in job.text()
    assert f"MPI is installed elsewhere on n2 ({tmp_path / 'other'})" in job.text()
    job.let_it_end_after(steps + 2)
    assert re.search(rf"^Resuming from \S+/step-{steps:08d}\.h5, after step {steps}$", job.text(), re.M), job.text()


def test_nodes_copies_and_ranks(lab: SlurmLab, tmp_path: Path) -> None:
    """What the scripts have in common, without training: copies on every node's disk, Hugging Face off line, ranks by tasks."""
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    script, output = tmp_path / "script", tmp_path / "output.txt"
    script.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/bash
            SCRATCH={tmp_path}
            source jobs/slurm.sh
            to_scratch {model}
            each_node sh -c 'echo "on $(hostname): $(ls "$1")"' sh "$COPY"
            echo "offline: $HF_HUB_OFFLINE, copy: $COPY"
            "${{PYTHONS[0]}}" -m hetero_mpi launch --print -- train job.toml
            srun "${{PYTHONS[0]}}" -m hetero_mpi launch --print -- train job.toml || echo "srun: $?"
            """
        )
    )
    job = lab.submit(
        "--nodes=2",
        "--ntasks=3",
        "--ntasks-per-node=2",
        f"--output={output}",
        str(script),
        env={"PYTHONS": sys.executable},
    )
    fields = lab.wait_for(job, ("COMPLETED", "FAILED"), 60.0, lambda: output.read_text() + lab.logs())
    text = output.read_text()
    assert fields["JobState"] == "COMPLETED", text
    assert "on n1: config.json\n" in text and "on n2: config.json\n" in text
    assert f"offline: 1, copy: {tmp_path}/hetero-{job}/tiny\n" in text
    commands = re.findall(r"^(.*) -np (\d) .*-m hetero_mpi train job\.toml$", text, re.M)
    assert [count for _, count in commands] == ["3"] and "SLURM_TASKS_PER_NODE=2,1" in commands[0][0], text
    assert text.count("started 3 processes of `launch`") == 1 and "srun: 2\n" in text, "each task would train"


@pytest.mark.long
def test_the_time_limit_of_two_nodes_np2(lab: SlurmLab, tmp_path: Path) -> None:
    """SLURM itself announces the end of the time (it looks every half a minute), and the job comes back, with the losses of a
    run that nobody stopped."""
    job, began = Submitted(lab, tmp_path), time.monotonic()
    small = ("--nodes=2", "--ntasks-per-node=1", *SMALL, f"--output={job.output}")
    job.submit(*small, "--time=3", "--signal=B:USR1@60", "jobs/requeue.sbatch")
    job.wait_for_steps(1)
    steps = job.stopped_after()
    stopped_s = time.monotonic() - began
    job.let_it_end_after(steps + 2)
    assert re.search(rf"^Resuming from \S+, after step {steps}$", job.text(), re.M), job.text()
    ended_s = time.monotonic() - began
    print(
        f"seconds after sbatch: {stopped_s:.0f} stopped by the limit's signal, after step {steps}; {ended_s:.0f} done"
    )
    straight = tmp_path / "straight"
    require_success(job.job.finish(straight, steps + 2))
    assert job.losses() == losses(straight)


STUB = """#!/bin/bash
# Stands in for the Python of the environment: notes how it was called, and trains nothing.
echo "$SLURM_ARRAY_TASK_ID: $*" >> DIRECTORY/calls
case "$*" in
    *two.toml*) exit 3 ;;
    *--resume*) exit 0 ;;
esac
trap 'mkdir -p DIRECTORY/one/checkpoints; touch DIRECTORY/one/checkpoints/step-00000005.h5; exit 76' USR1
while true; do sleep 0.1; done
"""


FILES_AND_OPTIONS = "one.toml", "two.toml", "--set", "train.steps=3"


@pytest.mark.long
def test_an_array_over_job_files(lab: SlurmLab, tmp_path: Path) -> None:
    """Each task has a file and a run directory of its own. The first is told to stop and comes back, the second one fails."""
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(STUB.replace("DIRECTORY", str(tmp_path)))
    stub.chmod(0o755)
    small = ("--nodes=1", "--ntasks-per-node=1", *SMALL, f"--output={tmp_path}/%a.txt")
    environment = {"PYTHONS": str(stub), "RUNS": str(tmp_path)}
    number = lab.submit("--array=1-2", *small, "jobs/array.sbatch", *FILES_AND_OPTIONS, env=environment)
    lab.until(lambda: calls.exists() and len(calls.read_text().splitlines()) == 2, "both began", lab.logs, 60.0)
    lab.command("scancel", "--signal=USR1", "--batch", f"{number}_1")
    first = lab.wait_for(f"{number}_1", ("COMPLETED", "FAILED"), 60.0, lab.logs)
    second = lab.wait_for(f"{number}_2", ("COMPLETED", "FAILED"), 60.0, lab.logs)
    assert (first["JobState"], first["Restarts"]) == ("COMPLETED", "1")
    assert (second["JobState"], second["Restarts"], second["ExitCode"]) == ("FAILED", "0", "3:0")
    began = "-m hetero_mpi launch --verbose -- train"
    assert sorted(calls.read_text().splitlines()) == [
        f"1: {began} one.toml --run-dir {tmp_path}/one --set train.steps=3",
        f"1: {began} one.toml --run-dir {tmp_path}/one --set train.steps=3 --resume",
        f"2: {began} two.toml --run-dir {tmp_path}/two --set train.steps=3",
    ]
