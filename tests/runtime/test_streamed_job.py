"""A job whose model is larger than its ranks' memory is streamed, and gives the bits of one that is not."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.planning.types.cluster_changes import restricted, with_slowness
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.toml_files import load_plan, load_profile, load_report, save_plan, save_profile
from hetero_mpi.state.directory import checkpoint_path
from hetero_mpi.util.errors import ExitCode
from tests.runtime.test_reconfigure import EMULATED_BLOCKS, three_alike
from tests.runtime.test_recovery import start
from tests.stand_in_gpu import THROUGH, build
from tests.support.equality import assert_same_run, losses
from tests.support.jobs import Workshop, write_profile
from tests.support.long_run import LongRun, kill, kill_until_one_is_left
from tests.support.mpi import ROOT, require_success, run_bounded
from tests.support.plans import pipeline, write_plan

pytestmark = pytest.mark.slow

MEMORY = 3_000_000
"""Bytes of each of two ranks: too few for half of the model's 5 MB."""
ADAPTER = {"method": "lora", "rank": 2, "dropout": 0.1}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("streamed"))


def entry(workshop: Workshop, name: str, memory_bytes: int, table: dict[str, Any], **more: Any) -> dict[str, Any]:
    values = workshop.values(workshop.model("wide", 8, hidden_size=128, intermediate_size=384))
    tables = {"adapter": ADAPTER, "cluster": {"memory_bytes": memory_bytes}, "plan": table}
    return workshop.entry(name, values, more, **tables)


def without_streaming(plan: Plan, path: Path) -> Path:
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, streamed=False, on_disk=0, kept_slices=0) for stage in pipeline.stages)
    save_plan(replace(plan, pipelines=(replace(pipeline, stages=stages),)), path)
    return path


def test_a_model_that_fits_in_no_other_way(workshop: Workshop) -> None:
    measured = workshop.directory / "streamed" / "profile.toml"
    refused = entry(workshop, "refused", MEMORY, {"offload": False}, profile=measured)
    found = workshop.run_entries(2, {"streamed": entry(workshop, "streamed", MEMORY, {}), "refused": refused})
    assert found["streamed"].codes == (0, 0), found["streamed"].texts[0]
    assert "does not fit in memory" in found["refused"].texts[0]
    plan = load_plan(workshop.directory / "streamed" / "plan.toml")
    assert any(stage.streamed for stage in plan.pipelines[0].stages)
    told = " ".join(load_report(workshop.directory / "streamed" / "plan.toml").reasons)
    assert "streams" in told and "from mapped files" in told

    resident = without_streaming(plan, workshop.directory / "resident.plan.toml")
    given = {"plan": resident, "profile": measured}
    roomy = {name: entry(workshop, name, 100 * MEMORY, {}, **given) for name in ("resident", "resumed")}
    roomy["resumed"]["resume"] = checkpoint_path(workshop.directory / "streamed" / "checkpoints", 2)
    workshop.finish_entries(2, roomy)
    for name in roomy:
        assert_same_run(workshop.directory / name, workshop.directory / "streamed")


# ------------------------------------------------------------------------------------------ all weights, in host memory of GPUs
GPU_MEMORY, CHANGING_STEPS, BATCH = 36_000_000, 24, 3


def two_gpus() -> ClusterProfile:
    """Two GPUs, neither of which holds half of a model of 8 million parameters with its state. Slow ones: the processor of the test
    imitates them, and may be busy."""
    profile = with_slowness(restricted(three_alike(), range(2)), {0: 2.0, 1: 2.0})
    size = {"parameters": 10**6, "trainable_parameters": 10**6, "parameter_bytes": 4 * 10**6}
    layers = tuple(replace(layer, **size) for layer in profile.model.layers)
    own = {"backend": "cuda", "memory_bytes": GPU_MEMORY, "shares_host_memory": False}
    speeds = {
        "host_to_device_bytes_per_s": 1e9,
        "device_to_host_bytes_per_s": 1e9,
        "host_optimizer_s_per_parameter": 1e-8,
    }
    devices = tuple(replace(device, **own, **speeds) for device in profile.devices)
    hosts = tuple(HostProfile(device.host, 10**9, "made up") for device in devices)
    return replace(profile, model=replace(profile.model, layers=layers), devices=devices, hosts=hosts)


@pytest.mark.long
def test_all_weights_are_trained_streamed_on_gpus_and_layers_move_from_a_slow_one_np2(tmp_path: Path) -> None:
    if (reason := build.missing()) is not None:
        pytest.skip(reason)
    shop = Workshop(tmp_path, THROUGH)
    save_profile(two_gpus(), tmp_path / "two.toml")
    write_plan(tmp_path / "resident.toml", pipeline([0], [0, EMULATED_BLOCKS + 2], 1, BATCH))
    values = shop.values(shop.model("six", EMULATED_BLOCKS))
    train, checkpoint = {"steps": CHANGING_STEPS, "global_batch": BATCH}, {"every": 0}
    cluster = {"emulate": "two.toml", "emulate_changes": ["rank 1 runs at 0.333 from step 5"]}
    changing = shop.job(
        "changing", values, train=train, checkpoint=checkpoint, cluster=cluster, plan={"rebalance": True}
    )
    still = shop.job("still", values, train=train, checkpoint=checkpoint)
    large = shop.values(shop.model("large", 10, hidden_size=256, intermediate_size=768))
    given = shop.job("given", large, train={"steps": 2}, cluster={"memory_bytes": GPU_MEMORY})
    jobs = {"changing": changing, "still": still, "given": given}
    found = {name: {"job": job, "run_dir": tmp_path / name} for name, job in jobs.items()}
    found["still"]["plan"] = tmp_path / "resident.toml"
    shop.finish_entries(2, found, timeout_s=400)
    # Memory that is given is the GPU's: what is streamed has the host's.
    plan = load_plan(tmp_path / "given" / "plan.toml")
    assert any(stage.streamed for stage in plan.pipelines[0].stages)

    (change,) = [json.loads(line) for line in (tmp_path / "changing" / "events.jsonl").read_text().splitlines()]
    assert change["event"] == "rebalanced" and change["step"] >= 4 + 5
    assert {(move["from"], move["to"]) for move in change["moved"]} == {(1, 0)}
    streaming = {name: " streams " in "\n".join(load_report(tmp_path / name / "plan.toml").reasons) for name in found}
    assert streaming == {"changing": True, "still": False, "given": True}
    assert_same_run(tmp_path / "changing", tmp_path / "still", tensors_apart=None)
    assert len(losses(tmp_path / "still")) == len(losses(tmp_path / "changing")) == CHANGING_STEPS


# ------------------------------------------------------------------------------------- more than the memory of a GPU's host
BLOCKS_ON_CARD = 10


def small_box(path: Path, job: Path) -> Path:
    """The profile of a host with two GPUs, whose memory holds neither the model nor what they would stream of it."""
    profile = load_profile(write_profile(path, job, 2))
    streamed = sum(map(profile.model.streamed_bytes, range(len(profile.model.layers))))
    own = {"backend": "cuda", "memory_bytes": int(0.45 * streamed), "shares_host_memory": False}
    devices = tuple(replace(device, **own, host_to_device_bytes_per_s=1e9) for device in profile.devices)
    host = HostProfile("host", int(0.8 * streamed), "made up", disk_bytes_per_s=1e7)
    save_profile(replace(profile, devices=devices, hosts=(host,)), path)
    return path


def test_a_model_larger_than_the_memory_of_a_gpus_host_np2(tmp_path: Path) -> None:
    if (reason := build.missing()) is not None:
        pytest.skip(reason)
    shop = Workshop(tmp_path, THROUGH)
    values = shop.values(shop.model("wide", BLOCKS_ON_CARD, hidden_size=128, intermediate_size=384))
    job = shop.job("card", values, adapter=ADAPTER, train={"dtype": "fp32"})
    box = small_box(tmp_path / "box.toml", job)

    def entry(name: str, **more: Any) -> dict[str, Any]:
        return {"job": job, "run_dir": tmp_path / name, "profile": box, **more}

    found = shop.run_entries(2, {"planned": entry("planned")})
    assert found["planned"].codes == (0, 0), found["planned"].texts
    report = load_report(tmp_path / "planned" / "plan.toml")
    assert any(stage.on_disk for stage in report.plan.pipelines[0].stages)
    assert "read from the disk in every pass at 10.0 MB/s: a step waits" in " ".join(report.reasons)
    assert "read from the disk in every pass" in " ".join(found["planned"].printed.split()), "told before the run"

    resident = without_streaming(report.plan, tmp_path / "resident.plan.toml")
    roomy = write_profile(tmp_path / "roomy.toml", job, 2)
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    full = {"set": [f"model.shard_cache={blocked / 'folder'}"]}
    found = shop.run_entries(
        2,
        {
            "resident": entry("resident", plan=resident, profile=roomy),
            "resumed": entry("resumed", resume=checkpoint_path(tmp_path / "planned" / "checkpoints", 2)),
            "refused": entry("refused", **full),
        },
    )
    assert [one.codes for one in found.values()] == [(0, 0), (0, 0), (2, 2)], found
    assert (
        "offloaded layers cannot be stored there" in found["refused"].texts[0]
        and "shard_cache" in found["refused"].texts[0]
    )
    assert not list((tmp_path / "refused").glob("*.toml")), "nothing was written"
    for name in ("resident", "resumed"):
        assert_same_run(tmp_path / name, tmp_path / "planned")


# ------------------------------------------------------------------------------------------------------------ ranks that die
BLOCKS, DEEP_MEMORY, STEPS = 20, 4_000_000, 60
"""Of a model whose 14 MB no three ranks of so much memory hold, and one of them can stream."""


HALVES = [0, BLOCKS // 2, BLOCKS + 2]


class LongStreamed(LongRun):
    """An adapter on that model."""

    def __init__(self, directory: Path, ranks: int, *module: str) -> None:
        super().__init__(directory, ranks, *module)
        values = self.values(self.model("deep", BLOCKS, hidden_size=128, intermediate_size=384))
        tables = {"train": {"steps": 100_000}, "cluster": {"memory_bytes": DEEP_MEMORY}}
        self.file = self.job("deep", values, adapter=ADAPTER, checkpoint={"every": 0}, **tables)

    def one_streams(self, place: int) -> None:
        """The plan for the first two ranks: the stage at ``place`` is streamed, the other one is not."""
        halves = pipeline([0, 1], HALVES)
        stages = tuple(replace(stage, streamed=stage.ranks == (place,)) for stage in halves.stages)
        write_plan(self.plan, replace(halves, stages=stages))

    def outliving(self, run: Path, *more: str, planned: bool = True) -> tuple[list[str], dict[str, str]]:
        return start(self, run, *more, "--set", f"train.steps={STEPS}", planned=planned)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> LongStreamed:
    return LongStreamed(tmp_path_factory.mktemp("deaths"), 3)


@pytest.fixture(scope="module")
def resident_losses(deep: LongStreamed) -> list[float]:
    return losses_in_one_process(deep, "one-process")


def losses_in_one_process(deep: LongStreamed, name: str, *more: str) -> list[float]:
    """Of a run that holds its weights."""
    run = deep.directory / name / "run"
    program = deep.command(run, "--set", f"train.steps={STEPS}", *more, planned=False)[0]
    words = [*program[program.index("-m") - 1 :], "--set", "cluster.memory_bytes=1000000000"]
    result = require_success(run_bounded(words, deep.environment(), 300))
    assert "streams" not in result.stdout
    return losses(run)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_any_streaming_ranks_die_until_one_is_left_np3(
    deep: LongStreamed, resident_losses: list[float], seed: int
) -> None:
    chance, run = random.Random(seed), deep.directory / f"any-{seed}"
    words, environment = deep.outliving(
        run, "--set", f"checkpoint.replicate_every={chance.choice([1, 5])}", planned=False
    )
    with deep.started(words, environment, run) as running:
        kill_until_one_is_left(running, 3, chance, steps_between=20)
        told = running.finish()
        assert told.count("streamed") >= 3, told  # the plan and both that followed
    assert losses(run) == resident_losses
    assert not list((run / "mapped").glob("*")), "mapped files have no names that could be left"


@pytest.mark.long
@pytest.mark.parametrize("streamed", [0, 1])
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_neighbours_streams_and_one_dies_np3(
    deep: LongStreamed, resident_losses: list[float], streamed: int, victim: int
) -> None:
    run = deep.directory / f"{streamed}-streams-{victim}-dies"
    deep.one_streams(streamed)
    words, environment = deep.outliving(run, "--set", "cluster.memory_bytes=14000000")
    with deep.started(words, environment, run) as running:
        running.wait_for_steps(5)
        kill(running, victim)
        told = running.finish()
        assert told.count("streamed") == 1, told
    assert losses(run) == resident_losses


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_gpus_with_layers_on_disk_dies_np2(tmp_path: Path, victim: int) -> None:
    """The other one goes on with layers on disk, by its own plan."""
    if (reason := build.missing()) is not None:
        pytest.skip(reason)
    card, run = LongStreamed(tmp_path, 2, THROUGH[1]), tmp_path / "run"
    write_plan(card.plan, pipeline([0, 1], HALVES, streamed=True, on_disk=6))
    fp32 = "--set", "train.dtype=fp32"
    words, environment = card.outliving(run, *fp32, "--set", "cluster.memory_bytes=14000000", planned=False)
    path = small_box(tmp_path / "box.toml", card.file)
    profile = load_profile(path)
    save_profile(replace(profile, hosts=(replace(profile.hosts[0], memory_bytes=9_000_000),)), path)
    words += ["--plan", str(card.plan), "--profile", str(path)]
    with card.started(words, environment, run) as running:
        running.wait_for_steps(5)
        kill(running, victim)
        told = running.finish()
        assert told.count("read from the disk") >= 2, told
    whole = tmp_path / "whole"
    write_plan(card.plan, pipeline([0], [0, BLOCKS + 2]))
    assert card.finish(whole, STEPS, *fp32, "--set", "cluster.memory_bytes=1000000000").returncode == 0
    assert_same_run(run, whole, tensors_apart=None)


@pytest.mark.long
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 1_000_000)], ids=["gone", "truncated"])
def test_the_models_files_go_while_they_are_streamed_np3(
    deep: LongStreamed, resident_losses: list[float], damage: Any, dies: bool
) -> None:
    """Nobody but a run that has to load layers anew notices, and that one says which file it is."""
    run = deep.directory / f"files-{damage.__name__.strip('<>')}-{dies}"
    model = shutil.copytree(deep.model("deep", BLOCKS), run.with_suffix(".model"))
    words, environment = deep.outliving(run, "--set", f"model.path={model}", planned=False)
    with deep.started(words, environment, run) as running:
        running.wait_for_steps(3)
        damage(model / "model.safetensors")
        if dies:
            running.ranks[1].kill()
        code, told = running.end(), running.text()
    if dies:
        assert code == ExitCode.USER_ERROR and str(model) in told and "model.safetensors" in told, told
        assert "Traceback" not in told and "us error" not in told, told
    else:
        assert code == 0 and (run / "adapter" / "adapter_model.safetensors").exists(), told
        assert losses(run) == resident_losses


@pytest.mark.long
def test_a_model_larger_than_its_control_group() -> None:
    if os.geteuid() != 0:
        pytest.skip("a control group with a limit needs root")
    options = ["--model-gb", "1.6", "--limit-gb", "1.0", "--steps", "2", "--check"]
    result = run_bounded(
        [sys.executable, str(ROOT / "benchmarks" / "memory_limit.py"), *options], dict(os.environ), 600
    )
    if "no control group can be made here" in result.stderr:
        pytest.skip(result.stderr)
    assert result.returncode == 0 and "2 steps, streamed: True" in result.stdout, result.stdout + result.stderr
