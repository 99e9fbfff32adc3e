"""A run that loses ranks goes on in the processes that are left, and its losses are those of a run that lost none.

Real ranks under a launcher with fault tolerance, and real SIGKILLs at moments that nobody chooses.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from hetero_mpi.cli import main
from hetero_mpi.comm.ranks.library import MPICH, MpiLibrary
from hetero_mpi.commands.plan_commands import ask
from hetero_mpi.launch.launcher.launcher import Launcher, recovery_options
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.types.cluster_changes import restricted
from hetero_mpi.planning.types.plan import PipelinePlan
from hetero_mpi.planning.types.toml_files import load_plan, save_plan
from hetero_mpi.state.directory import checkpoint_path
from hetero_mpi.state.peer_replicas import CopyCosts, peers, steps_between
from hetero_mpi.util.errors import ExitCode
from tests.support.elastic import Cluster, Elastic, events
from tests.support.equality import assert_same_run, losses, tensors
from tests.support.errors import refuses
from tests.support.long_run import LongRun, kill, kill_until_one_is_left, newest_step
from tests.support.mpi import finish_mpi, outliving_or_skip, require_success
from tests.support.plans import pipeline, plan_of, write_plan

pytestmark = pytest.mark.slow

STEPS = 150


# ---------------------------------------------------------------------------------------------- who keeps what, and how often
@pytest.mark.parametrize(
    ("sizes", "hosts", "expected"),
    [
        ([8, 8], "ab", {0: 1, 1: 0}),
        ([8, 8, 8, 8], "aabb", {0: 2, 1: 3, 2: 0, 3: 1}),  # never on the own host, and evenly
        ([8, 8, 8], "aaa", {0: 1, 1: 2, 2: 0}),  # one host: better than nothing
        ([0, 8, 8], "abc", {1: 0, 2: 0}),  # rank 0 leads without a stage, and has room for both
        ([9, 1, 1], "aab", {0: 2, 1: 2, 2: 1}),
        ([8], "a", {}),
    ],
)
def test_a_peer_is_on_another_host_and_has_room(sizes: list[int], hosts: str, expected: dict[int, int]) -> None:
    assert peers(sizes, list(hosts)) == expected


def test_copies_take_at_most_two_per_cent_of_the_time() -> None:
    for cost_s, step_s in [(0.001, 1.0), (0.02, 1.0), (0.05, 1.0), (3.0, 0.2)]:
        every = steps_between(cost_s, step_s)
        assert cost_s / (every * step_s) <= 0.02 + 1e-12
        assert every == 1 or cost_s / ((every - 1) * step_s) > 0.02, "no rarer than that"
    costs = CopyCosts()
    costs.start_transfer(0.0)
    for beside in (False, False, False, True, True):
        time.sleep(0.05 if beside else 0.01)
        costs.step(beside)
    assert costs.quiet_steps == 3 and costs.step_s < 0.05 < costs.cost_s


TO_THE_BIT = ("plan.pipelines=1", "plan.tensor_parallel=false", "train.micro_batch=2")
"""What docs/recovery.md fixes, so that sums keep their order whoever dies."""


def orders_of_sums(name: str, settings: tuple[str, ...]) -> set[tuple[int, tuple[int, ...], bool]]:
    """(pipelines, sizes of their micro-batches, are there groups?) of the plans for all ranks of a profile, and without each."""
    question = ask(None, settings, Path(name))
    ranks = range(len(question.profile.devices))
    found = set()
    for gone in (None, *ranks):
        profile = restricted(question.profile, tuple(rank for rank in ranks if rank != gone))
        plan = make_plan(profile, replace(question.request, thorough=False)).plan
        micro_batches = tuple(pipeline.micro_batch for pipeline in plan.pipelines)
        found.add((len(plan.pipelines), micro_batches, any(stage.grouped for _, _, stage in plan.numbered)))
    return found


@pytest.mark.parametrize(("name", "changes"), [("zorse-2xl4-a6000-p40", False), ("homelab-5090-strix-halo", True)])
def test_what_a_job_fixes_stays_as_it_is_whoever_dies(name: str, changes: bool) -> None:
    if changes:
        assert len(orders_of_sums(name, ())) > 1, "left to the planner, other survivors sum in another order"
    assert orders_of_sums(name, TO_THE_BIT) == {(1, (2,), False)}


def test_a_planned_run_that_fixes_its_sums_keeps_every_bit_np3(tmp_path: Path) -> None:
    job, run, calm = LongRun(tmp_path, 3), tmp_path / "run", tmp_path / "calm" / "run"
    options = [
        word for value in (*TO_THE_BIT, "train.steps=60", "checkpoint.replicate_every=2") for word in ("--set", value)
    ]
    arguments, environment = start(job, run, *options)
    place = arguments.index("--plan")
    del arguments[place : place + 2]
    with job.started(arguments, environment, run) as running:
        running.wait_for_steps(5)
        kill(running, 0)
        running.finish()
    entry = {"job": job.file, "run_dir": calm, "set": options[1::2]}
    job.finish_entries(1, {"calm": entry})
    assert_same_run(run, calm, tensors_apart=None)


# --------------------------------------------------------------------------------------------------------- real ranks that die
@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> LongRun:
    return LongRun(tmp_path_factory.mktemp("recovery"), 4)


@pytest.fixture(scope="module")
def undisturbed(job: LongRun) -> list[float]:
    """Losses of all steps of a run in one process."""
    return alone(job)


def alone(job: LongRun) -> list[float]:
    run = job.directory / "one-process" / "run"  # deeper than where the other runs look for a profile
    entry = {"job": job.file, "run_dir": run, "set": [f"train.steps={STEPS}"]}
    job.finish_entries(1, {"alone": entry})
    return losses(run)


def start(job: LongRun, run: Path, *more: str, planned: bool = True) -> tuple[list[str], dict[str, str]]:
    arguments, environment = job.command(run, "--set", f"train.steps={STEPS}", *more, planned=planned)
    return [arguments[0], *outliving_or_skip(), *arguments[1:]], environment


def printed_by_survivors(job: LongRun, run: Path, steps: int, victims: Sequence[int], *options: str) -> str:
    """Of a run that loses ranks after so many steps and ends well."""
    with job.started(*start(job, run, *options), run) as running:
        running.wait_for_steps(steps)
        kill(running, *victims)
        return running.finish()


def test_launch_says_what_it_adds_and_what_cannot_be(capfd: pytest.CaptureFixture[str]) -> None:
    outliving_or_skip()
    assert main(["launch", "-np", "2", "--recover", "--verbose", "--print", "--", "train", "job.toml"]) == 0
    shown = capfd.readouterr()
    assert " --with-ft ulfm " in shown.out and "loss of ranks" in shown.err
    other = Launcher(Path("mpiexec"), MPICH, MpiLibrary(MPICH, MPICH, "5.0.2"))
    with refuses("launch.recovery_unsupported"):
        recovery_options(other)


@pytest.mark.parametrize("way", ["any", pytest.param("tcp,self", marks=pytest.mark.long)])
def test_survivors_meet_and_go_on_np4(way: str) -> None:
    """All that ranks wait in (messages, sums, collectives, sleep, heartbeats), one death after the other, until one is left."""
    arguments = ["tests/programs/comm_survivors.py", "1"]
    environment = {} if way == "any" else {"OMPI_MCA_btl": way, "OMPI_MCA_pml": "ob1"}
    result = finish_mpi(4, arguments, 120, env=environment, options=outliving_or_skip())
    assert [line.split(" ")[3:5] for line in result.stdout.splitlines() if "died" in line] == [
        ["4", "died;"],
        ["3", "died;"],
        ["2", "died;"],
    ]
    assert "the last one 0 1" in result.stdout


def test_the_leader_dies_and_the_other_rank_goes_on_np2(tmp_path: Path) -> None:
    job, run = LongRun(tmp_path, 2), tmp_path / "run"
    expected = alone(job)
    told = printed_by_survivors(job, run, 5, [0], "--set", "checkpoint.replicate_every=2")
    assert losses(run) == expected
    assert "Lost rank 0 on " in told and told.count("from copies in memory") == 1, told
    assert checkpoint_path(run / "checkpoints", STEPS).exists() and (run / "model" / "model.safetensors").exists()


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True], ids=["held", "streamed"])
def test_state_that_only_the_dead_rank_owned_comes_from_its_peer_np2(tmp_path: Path, streams: bool) -> None:
    """Of two pipelines each rank owns a part of masters and moments. The survivor's further steps are those of one rank that
    resumes from a checkpoint of the version's step, to the bit."""
    steps = 80
    job, run, resumed = LongRun(tmp_path, 2), tmp_path / "run", tmp_path / "resumed"
    write_plan(job.plan, *(pipeline([rank], [0, 4], 1, 2, recompute=streams, streamed=streams) for rank in range(2)))
    sets = [f"plan.offload={str(streams).lower()}", f"train.steps={steps}"]
    options = [word for value in [*sets, "checkpoint.replicate_every=4"] for word in ("--set", value)]
    told = printed_by_survivors(job, run, 6, [1], *options)
    version = re.search(r"Continuing after step (\d+), from copies in memory", told)
    assert version is not None and ("streamed" in told) == streams, told
    entry = {"job": job.file, "run_dir": resumed, "set": sets}
    until = {"plan": job.plan, "profile": job.made_up(*sets), "set": [*sets, f"train.steps={version[1]}"]}
    for ranks, more in ((2, until), (1, {"resume": "latest"})):
        job.finish_entries(ranks, {"one": {**entry, **more}})
    plans = [load_plan(one / "plan.toml") for one in (run, resumed)]
    assert plans[0] == plans[1]
    assert_same_run(run, resumed, step=steps)
    assert {kind for kind, _ in tensors(run, steps)} == {"parameters", "moments1", "moments2"}


def goes_on_without(directory: Path, victim: int, *pipelines: PipelinePlan) -> None:
    """A run with groups loses a rank: those that are left go on from copies in memory, with the same numbers but for the rounding
    of sums in another order."""
    plan, steps = plan_of(*pipelines), 60
    job, run = LongRun(directory, len(plan.ranks)), directory / "run"
    expected = alone(job)[:steps]
    save_plan(plan, job.plan)
    options = ("--set", "checkpoint.replicate_every=2", "--set", f"train.steps={steps}")
    told = printed_by_survivors(job, run, 5, [victim], *options)
    np.testing.assert_allclose(losses(run), expected, rtol=1e-3)
    assert f"Lost rank {victim} on " in told and told.count("from copies in memory") == 1, told


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_group_that_loses_a_rank_is_a_dead_stage_np3(tmp_path: Path, victim: int) -> None:
    """Ranks 0 and 1 hold the first stage together."""
    goes_on_without(tmp_path, victim, pipeline([{0: 1, 1: 1}, 2], [0, 2, 4]))


@pytest.mark.long
@pytest.mark.parametrize("victim", [1, 2])
def test_a_member_of_a_group_in_one_of_two_pipelines_dies_np4(tmp_path: Path, victim: int) -> None:
    """The state of a tensor is that of one pipeline, cut as there: copies of its parts are whole tensors again."""
    goes_on_without(tmp_path, victim, *(pipeline([dict.fromkeys(pair, 1)], [0, 4], 1, 2) for pair in ((0, 1), (2, 3))))


@pytest.mark.long
def test_two_deaths_in_one_run_one_of_them_the_leader_np4(job: LongRun, undisturbed: list[float]) -> None:
    """Rank 1 holds a stage; rank 0 leads, reads the data and writes the files; ranks 2 and 3 were idle by the first plan."""
    run = job.directory / "two-deaths"
    with job.started(*start(job, run, "--set", "checkpoint.replicate_every=2"), run) as running:
        running.wait_for_steps(5)
        kill(running, 1)
        running.wait_for("more steps", lambda: newest_step(run) >= 60)
        kill(running, 0)
        told = running.finish()
    assert losses(run) == undisturbed
    assert "Lost rank 1 on " in told and "Lost rank 0 on " in told, told
    assert told.count("from copies in memory") == 2, told
    assert told.count("first step after the loss") == 2
    assert "3 ranks, numbered 0, 1 (was 2), 2 (was 3)" in told
    assert checkpoint_path(run / "checkpoints", STEPS).exists() and (run / "model" / "model.safetensors").exists()
    assert not [p for p in psutil.process_iter() if p.pid in {r.pid for r in running.ranks.values()}]


# ---------------------------------------------------------------------------------------------------------------- minutes each
@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_any_ranks_at_any_moment_until_one_is_left_np4(job: LongRun, undisturbed: list[float], seed: int) -> None:
    """The planner's plans, checkpoints after every few steps, copies as often as it thinks right."""
    chance = random.Random(seed)
    run = job.directory / f"any-{seed}"
    arguments, environment = start(job, run, "--set", f"checkpoint.every={chance.choice([0, 1, 4])}")
    place = arguments.index("--plan")
    del arguments[place : place + 2]
    with job.started(arguments, environment, run) as running:
        kill_until_one_is_left(running, 4, chance, steps_between=40)
        running.finish()
    assert losses(run) == undisturbed


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "victims", "resumes"),
    [("every=10", [0, 1], True), ("replicate_every=0", [1], False)],
    ids=["both", "nothing"],
)
def test_without_a_living_copy_the_newest_checkpoint_serves_np4(
    job: LongRun, undisturbed: list[float], key: str, victims: list[int], resumes: bool
) -> None:
    """The two ranks with stages are each other's peers, and die together. With nothing left the run begins anew."""
    run = job.directory / key.partition("=")[0]
    told = printed_by_survivors(job, run, 25 if resumes else 10, victims, "--set", f"checkpoint.{key}")
    assert ("Resuming from " in told) == resumes and "from copies in memory" not in told, told
    assert resumes or not any(text in told for text in ("Copies of", "Continuing after", "Resuming")), told
    assert losses(run) == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_while_a_plan_is_tried_np2(tmp_path: Path, victim: int) -> None:
    """The other rank plans anew, tries nothing, and trains with the numbers of one process."""
    job, run = LongRun(tmp_path, 2, module="tests.programs.stuck_trial"), tmp_path / "run"
    arguments, environment = start(job, run, "--set", "profile.calibrate=true")
    with job.started(arguments, environment, run) as running:
        running.wait_for("the trial", lambda: "Calibration run of the plan" in running.text())
        running.find_ranks()
        running.ranks[victim].send_signal(signal.SIGKILL)
        told = running.finish()
    assert (
        f"Lost rank {victim} on " in told and "Calibration result: " not in told and told.count("Calibration run") == 1
    ), told
    np.testing.assert_allclose(losses(run), alone(job), rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_death_while_profiling_np4(job: LongRun, undisturbed: list[float], seed: int) -> None:
    chance = random.Random(seed)
    run = job.directory / "profiling" / str(seed)
    arguments, environment = start(job, run, "--reprofile", planned=False)
    with job.started(arguments, environment, run) as running:
        running.wait_for("profiling", lambda: "Profiling 4 ranks" in running.text())
        time.sleep(chance.random() * 2)
        running.find_ranks()
        running.ranks[chance.randrange(4)].send_signal(signal.SIGKILL)
        told = running.finish()
    assert told.count("Lost rank ") == 1, told
    assert losses(run) == undisturbed


@pytest.mark.long
def test_who_cannot_read_the_data_does_not_lead_np4(job: LongRun) -> None:
    """The data is gone when the leader dies: nobody can take its place, and the run ends cleanly and says so."""
    run = job.directory / "no-data"
    hidden = job.text.with_suffix(".hidden")
    with job.started(*start(job, run), run) as running:
        running.wait_for_steps(5)
        job.text.rename(hidden)
        try:
            running.ranks[0].send_signal(signal.SIGKILL)
            code = running.end()
        finally:
            hidden.rename(job.text)
        told = running.text()
    assert code == ExitCode.USER_ERROR, told
    assert "Rank 0 was lost, and the first remaining rank" in told and "--resume" in told


@pytest.mark.long
def test_an_adapter_goes_on_with_the_same_numbers_np4(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Frozen weights are read again, packed ones packed again; what is trained comes from the copies."""
    job = LongRun(tmp_path_factory.mktemp("adapter"), 4)
    more = ["--set", "adapter.method=lora"]
    calm, run = job.directory / "calm" / "run", job.directory / "disturbed"
    require_success(job.finish(calm, STEPS, *more))
    with job.started(*start(job, run, *more), run) as running:
        running.wait_for_steps(10)
        kill(running, 1)
        kill(running, 0)
        told = running.finish()
        assert told.count("from copies in memory") == 2, told
    assert losses(run) == losses(calm)
    assert (run / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.long
def test_a_rank_on_another_host_and_then_a_whole_host(tmp_path: Path) -> None:
    """``--recover`` and ``--elastic`` together: the first death costs no start, the second one does."""
    outliving_or_skip()
    job, run = Elastic(tmp_path, steps=200), tmp_path / "run"
    with Cluster(tmp_path / "rack") as rack, rack.start(job, run, "--recover", "--heartbeat-timeout", "4") as running:
        running.until_step(5, start=1)
        began = time.monotonic()
        rack.ranks("hB")[0].kill()
        running.wait_for("the first step without hB's rank", lambda: len(events(run, "recovered")) == 1)
        print(f"a rank on another host: next step {time.monotonic() - began:.1f} s after its death")
        assert len(events(run, "start")) == 1
        rack.cut_power("hC")
        running.finish()
        assert rack.orphans() == []
    assert [event["ranks"] for event in events(run, "start")] == [3, 2]
    assert losses(run) == job.straight_losses()
