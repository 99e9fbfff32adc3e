"""Copies of the trained state on disks: what a run that was killed has left, damaged in many ways, and gone on from.

Whole hosts with disks of their own are lost in launch/test_elastic.py; here everything that is left is on one disk.
"""

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_mpi.comm.ranks.mpi_start import LostRanks
from hetero_mpi.rundir.run_directory import START_VARIABLE, describe_run
from hetero_mpi.state import state
from hetero_mpi.state.directory import Source, checkpoint_path, keep_versions, shards_on_disk
from hetero_mpi.state.reader import CheckpointReader, verify
from hetero_mpi.state.state import new_run_id, newest_version
from hetero_mpi.training import start_state
from hetero_mpi.training.recovery import RunHistory
from tests.runtime.test_recovery import outliving_or_skip
from tests.support.checkpoint_samples import told, write_checkpoint
from tests.support.equality import losses
from tests.support.jobs import GLOBAL_BATCH, Outcome, newest_copy_step
from tests.support.long_run import LongRun, newest_step
from tests.support.plans import pipeline, write_plan

pytestmark = pytest.mark.slow


def source(rank: int, version_id: str, step: int, names: str, begun: str = "run") -> Source:
    path = Path(f"{version_id}-{rank}") if version_id else None
    return Source(rank, path, version_id, step, begun, rank, frozenset(names))


def test_only_shards_of_one_moment_make_a_version() -> None:
    newer = [source(0, "bb", 8, "ab"), source(1, "bb", 8, "b")]
    other_time = [source(2, "cc", 8, "c")]
    older = [source(0, "aa", 6, "a"), source(2, "aa", 6, "bc")]
    assert newest_version([*newer, *other_time, *older], set("abc")) == older
    assert newest_version([*newer, *other_time, *older], set("ab")) == newer
    assert newest_version([*newer, *other_time], set("abc")) == []
    assert newest_version([], {"a"}) == []


def test_the_newest_version_is_of_the_run_that_began_last_wherever_it_lies() -> None:
    checkpoint = [source(0, "", 12, "abc")]
    copies = [source(1, "aa", 12, "abc")]
    later_run = [source(1, "bb", 3, "ab", "run2"), source(2, "bb", 3, "c", "run2")]
    assert newest_version([*checkpoint, *copies], set("abc")) == checkpoint, "of equals the first"
    assert newest_version([*copies, *checkpoint], set("abc")) == copies
    assert newest_version([*checkpoint, *copies, *later_run], set("abc")) == later_run
    assert newest_version([*checkpoint, *copies, *later_run[:1]], set("abc")) == checkpoint


@pytest.mark.parametrize("trace", ["run.json", "copy", "none"])
def test_the_later_run_is_the_newer_one_whatever_the_hosts_clocks_say(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's directory or another host knows of the earlier run, which began where the clock is fast. Else clocks decide."""
    monkeypatch.setattr(state.time, "time", lambda: 2_000_000_000.0)
    earlier = new_run_id([new_run_id()])
    if trace == "run.json":
        describe_run(tmp_path, "a", "a.toml", {}, {}, 1, 0, run_id=earlier)
    monkeypatch.setattr(state.time, "time", lambda: 1_000_000_000.0)
    elsewhere = [earlier] if trace == "copy" else []
    hosts: Any = SimpleNamespace(rank=0, local_rank=0, all_gather_json=lambda own: [own, elsewhere])
    later = new_run_id(start_state._earlier_runs(hosts, tmp_path))
    versions = [source(0, "aa", 9, "a", earlier), source(0, "bb", 2, "a", later)]
    assert newest_version(versions, {"a"}) == [versions[trace != "none"]]


@pytest.mark.parametrize(
    ("resume", "begun", "lost", "found"),
    [
        ("latest", None, 0, True),
        ("latest", "run2", 1, True),
        ("latest", "run1", 1, False),  # of a later run, on the disk of a rank that leads after a death
        (None, "run1", 1, False),
        (None, None, 0, False),
    ],
)
def test_a_checkpoint_of_another_run_is_not_taken_after_a_death(
    resume: str | None, begun: str | None, lost: int, found: bool, tmp_path: Path
) -> None:
    path = write_checkpoint(checkpoint_path(tmp_path / "checkpoints", 3), told(3, begun="run2", run="t2"), {"a": (2,)})
    tuning = SimpleNamespace(trainable={"a": None}, constants={})
    context: Any = SimpleNamespace(run_dir=tmp_path, tuning=tuning)
    history = RunHistory(losses=[LostRanks(gone=((1, "box"),), old_ranks=(0,))] * lost, token="t1")
    sources = start_state._checkpoint(context, history, resume, begun)
    assert sources == [Source(0, path, "", 3, "run2", 0, frozenset("a"))] * found
    if lost:
        (own,) = start_state._checkpoint(context, RunHistory(losses=history.losses, token="t2"), None, "run2")
        assert own.path == path


@dataclass
class Left:
    """What a killed run of two ranks has left."""

    job: LongRun
    run: Path
    step: int
    outcomes: dict[str, Outcome]
    """How runs ended that were to go on from it, each from a copy of its directory, on one rank."""

    def losses(self, name: str) -> list[float]:
        return losses(self.job.directory / name)


def damage(path: Path) -> None:
    """Change a bit of a tensor."""
    with CheckpointReader(path) as reader:
        offset = reader._file["parameters"]["model.norm.weight"].id.get_offset()
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def killed(job: LongRun, run: Path) -> None:
    """A run as under a supervisor, of which nothing but disks is left."""
    arguments, environment = job.command(run, "--set", "checkpoint.replicate_every=2")
    with job.started(arguments, {**environment, START_VARIABLE: "test.1"}, run) as running:
        running.wait_for("copies", lambda: newest_copy_step(run) >= 6)
        running.find_ranks()
        for rank in running.ranks.values():
            rank.send_signal(signal.SIGKILL)
        assert running.end() != 0
    assert not (run / "checkpoints").exists()
    found = [shard.version_id for shard in shards_on_disk(run)[0]]
    assert len(set(found)) <= 2
    keep_versions(run, [next(one for one in found if found.count(one) == 2)], sweep=True)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    job = LongRun(tmp_path_factory.mktemp("copies"), 2)
    run = job.directory / "run"
    killed(job, run)
    shards = shards_on_disk(run)[0]
    step, (first, second) = shards[0].step, sorted(shard.path.relative_to(run) for shard in shards)
    more = [f"train.steps={step + 4}"]

    def entry(name: str, resume: str | None = "latest", *sets: str) -> dict[str, Any]:
        directory = job.directory / name
        if resume is not None:
            shutil.copytree(run, directory)
        return {"job": str(job.file), "run_dir": str(directory), "resume": resume, "set": [*more, *sets]}

    entries = {
        "straight": entry("straight", None),
        "whole": entry("whole"),
        "again": entry("whole-again"),
        "one-damaged": entry("one-damaged"),
        "anew": {**entry("anew"), "resume": None},
        "both-damaged": entry("both-damaged"),
        "both-damaged-any": entry("both-damaged-any", "any"),
        "named": entry("named", str(run / first)),
        "other-seed": entry("other-seed", "latest", "train.seed=8"),
        "other-data": entry("other-data", "latest", "data.max_bytes=2000"),
        "too-late": entry("too-late", "latest", f"train.steps={step - 1}"),
    }
    damage(job.directory / "one-damaged" / first)
    for name in ("both-damaged", "both-damaged-any"):
        damage(job.directory / name / first)
        (job.directory / name / second).write_bytes(b"not a checkpoint")
    return Left(job, run, step, job.run_entries(1, entries, 400))


def test_a_run_goes_on_from_the_copies_alone_np2(left: Left) -> None:
    outcome = left.outcomes["whole"]
    assert outcome.codes == (0,), outcome.texts
    assert f"Continuing after step {left.step}, from copies on the disks of " in outcome.printed, outcome.printed
    straight = left.losses("straight")
    assert left.losses("whole")[-4:] == straight[-4:] and len(straight) == left.step + 4
    assert newest_copy_step(left.job.directory / "whole") == 0, "what a finished run needs no more"
    assert newest_copy_step(left.run) == left.step
    assert left.losses("anew") == straight and "Continuing" not in left.outcomes["anew"].printed


def test_damaged_shards_are_named_and_passed_over_np2(left: Left) -> None:
    one, both, anew = (left.outcomes[name] for name in ("one-damaged", "both-damaged", "both-damaged-any"))
    assert one.codes == (0,) and f"Continuing after step {left.step}, from copies" in one.printed, one.printed
    named = [line for line in one.printed.splitlines() if "skipped " in line]
    assert len(named) == 1 and "rank-0000" in named[0] and "model.norm.weight: damaged" in named[0], named
    assert left.losses("one-damaged")[-4:] == left.losses("straight")[-4:]
    assert both.codes == (2,) and "no valid checkpoint to resume from" in both.texts[0]
    assert "rank-0000" in both.printed and "rank-0001" in both.printed and "not an HDF5 file" in both.printed
    assert anew.codes == (0,) and "no complete copy of the trained state: starting from" in anew.printed
    assert left.losses("both-damaged-any") == left.losses("straight")


def test_copies_of_another_job_or_other_data_are_refused_np2(left: Left) -> None:
    named, seed, data, late = (left.outcomes[name] for name in ("named", "other-seed", "other-data", "too-late"))
    assert named.codes == (2,) and "is one rank's shard, not a complete checkpoint" in named.texts[0]
    assert seed.codes == (2,) and "[train] seed = 7, but this job has 8" in seed.printed
    kept = [newest_copy_step(left.job.directory / name) for name in ("named", "other-seed", "other-data", "too-late")]
    assert kept == [left.step] * 4, "a mistake in the job costs nothing"
    assert data.codes == (2,) and "was written with different data" in data.texts[0]
    assert late.codes == (2,) and f"written after step {left.step}, but the job ends at" in late.texts[0]


def test_what_a_shard_says_of_itself_np2(left: Left) -> None:
    """Each of two ranks is the other's peer: its shard holds both parts."""
    shards, remarks = shards_on_disk(left.run)
    assert remarks == [] and [shard.writer for shard in shards] == [0, 1]
    assert len({shard.names for shard in shards}) == 1 and len({p.version_id for p in shards}) == 1
    assert [verify(shard.path) for shard in shards] == [None, None]
    with CheckpointReader(shards[1].path) as reader:
        assert len(reader.metadata["losses"]) == left.step and reader.metadata["job"]["train"]["seed"] == 7


# ---------------------------------------------------------------------------------------------------------------- a minute each
def assert_goes_on(job: LongRun, run: Path, steps: int, apart: float = 0.0) -> None:
    """What a run left goes on for four steps on one rank, with the numbers of a run in one go."""
    straight, more = job.directory / "straight", [f"train.steps={steps + 4}"]
    common = {"job": job.file, "set": more}
    resumed = {**common, "run_dir": run, "resume": "latest"}
    outcomes = job.finish_entries(1, {"straight": {**common, "run_dir": straight}, "on": resumed}, 400)
    assert f"Continuing after step {steps}, from copies on the disks of " in outcomes["on"].printed, outcomes[
        "on"
    ].printed
    found, expected = losses(run), losses(straight)
    assert found[-4:] == pytest.approx(expected[-4:], rel=apart, abs=0) and len(expected) == steps + 4


@pytest.mark.long
def test_copies_of_several_pipelines_np2(tmp_path: Path) -> None:
    """Both ranks hold the whole model: what they leave is enough for one, and its numbers are those of a run in one go."""
    job = LongRun(tmp_path, 2)
    write_plan(job.plan, *(pipeline([rank], [0, 4], 1, GLOBAL_BATCH // 2) for rank in range(2)))
    run = tmp_path / "run"
    killed(job, run)
    shards = shards_on_disk(run)[0]
    assert len(shards) == 2 and shards[0].names == shards[1].names, "each owns a part and keeps the other's"
    step = shards[0].step
    assert_goes_on(job, run, steps=step, apart=1e-6)  # sums of two parts are not those of one


@pytest.mark.long
def test_copies_on_disk_of_ranks_that_outlived_another_np4(tmp_path: Path) -> None:
    """A rank dies, the others go on by themselves; then all die. What the survivors left is of after the first death."""
    job, run = LongRun(tmp_path, 4), tmp_path / "run"
    arguments, environment = job.command(run, "--set", "checkpoint.replicate_every=2")
    arguments = [arguments[0], *outliving_or_skip(), *arguments[1:]]
    with job.started(arguments, {**environment, START_VARIABLE: "test.2"}, run) as running:
        running.wait_for_steps(5)
        before = newest_step(run)
        running.ranks[1].send_signal(signal.SIGKILL)
        running.wait_for("copies after a death", lambda: newest_copy_step(run) >= before + 6)
        for rank in (0, 2, 3):
            running.ranks[rank].send_signal(signal.SIGKILL)
        running.end()  # with 0: a launcher that lets ranks die sees nothing wrong
        assert running.text().count("from copies in memory") == 1, running.text()
    versions = {shard.version_id for shard in shards_on_disk(run)[0] if shard.step > before}
    assert versions, "shards of after the death"
    assert_goes_on(job, run, steps=newest_copy_step(run))
