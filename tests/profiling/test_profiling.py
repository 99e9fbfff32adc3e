"""What is measured and how: token counts, stages, rounds, the clock inside a stage, kept tables, hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig

from hetero_mpi.comm.links import HostFlows, flow_pairs, round_robin, round_robin_per_host
from hetero_mpi.device import backend
from hetero_mpi.device.backend import Backend
from hetero_mpi.job.plan_request import with_memory_budget
from hetero_mpi.job.training_tables import AdapterTable, TrainTable
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.tuning import full_training
from hetero_mpi.planning.types.codec import encode
from hetero_mpi.planning.types.profile import LayerTimes
from hetero_mpi.profiling import bench, benchmark_spec, device
from hetero_mpi.profiling.bench import Bench
from hetero_mpi.profiling.benchmark_spec import BenchmarkSpec, DeviceTimes, exceeds_caches, layer_groups, sampled_rows
from hetero_mpi.profiling.cluster import _model_cost
from hetero_mpi.profiling.device import DeviceBenchmark
from hetero_mpi.profiling.host_profiles import MeasuredMemory, _read_per_s, host_profiles
from hetero_mpi.profiling.timings import TimedPart, TimingSamples, layer_times
from hetero_mpi.util.disk import cache_folder
from tests.support.errors import refuses
from tests.support.planning_samples import make_device, make_profile

BLOCKS, HIDDEN, SEQUENCE = 5, 16, 8
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def chain() -> TransformersChain:
    config = AutoConfig.for_model("llama", **SIZES)
    return TransformersChain(config)


@pytest.fixture
def subject(chain: TransformersChain) -> BenchmarkSpec:
    train = TrainTable(dtype="fp32", steps=3)
    return BenchmarkSpec(chain, full_training(chain), train, SEQUENCE, (1, 2, 4), 1.0, 1, None)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ((1,), (1,)),  # nothing larger will ever run
        ((2,), (1, 2)),
        ((1, 2), (1, 2)),
        ((1, 2, 4), (1, 2, 3, 4)),
        ((8,), (2, 4, 6, 8)),
        ((1, 2, 4, 8), (1, 2, 4, 8)),
        ((1, 2, 4, 8, 16), (1, 2, 4, 8, 16)),
        ((1, 2, 3, 4, 6, 8, 12), (1, 3, 4, 6, 12)),
    ],
)
def test_four_or_five_token_counts_up_to_the_largest_choice(
    choices: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert sampled_rows(choices) == expected


@pytest.mark.parametrize(
    ("kinds", "one_by_one", "expected"),
    [
        ("E a a a a a a H", False, [[(0, 3), (5, 8)]]),  # E a a | . . | a a H
        ("E a a a a H", False, [[(0, 3), (3, 6)]]),
        ("E a H", False, [[(0, 2), (2, 3)]]),
        ("E a b a b a b H", False, [[(0, 3), (5, 8)]]),
        ("E a a a b a a a H", False, [[(0, 5), (5, 9)]]),  # b stands in the middle
        ("E a b a b H", True, [[(0, 1)], [(1, 2)], [(2, 3)], [(5, 6)]]),
    ],
)
def test_stages_that_are_timed_show_every_kind(
    kinds: str, one_by_one: bool, expected: list[list[tuple[int, int]]]
) -> None:
    chain = kinds.split()
    groups = layer_groups(chain, one_by_one)
    assert groups == expected
    assert {kind for group in groups for first, last in group for kind in chain[first:last]} == set(chain)


def test_blocks_larger_than_caches_are_timed_one_by_one(subject: BenchmarkSpec) -> None:
    assert not exceeds_caches(subject)
    wide = TransformersChain(
        AutoConfig.for_model(
            "llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
        )
    )
    assert exceeds_caches(replace(subject, chain=wide, tuning=full_training(wide)))


def test_no_two_pairs_of_a_round_use_one_network_card() -> None:
    assert round_robin_per_host(("a", "b", "c", "d")) == round_robin(4), "a rank per host: as many pairs as possible"
    hosts = ("a", "a", "b", "b", "b", "c")
    pairs = [pair for group in round_robin_per_host(hosts) for pair in group]
    assert sorted(pairs) == [(a, b) for a in range(6) for b in range(a + 1, 6)]
    for group in round_robin_per_host(hosts):
        assert len({rank for pair in group for rank in pair}) == 2 * len(group)
        between = [host for a, b in group if hosts[a] != hosts[b] for host in (hosts[a], hosts[b])]
        assert len(between) == len(set(between))


def test_flows_have_partners_of_their_own_where_there_are_enough() -> None:
    hosts = ("a", "a", "b", "b", "c")
    assert flow_pairs(hosts, "a") == [(0, 2), (1, 4)]
    assert flow_pairs(hosts, "c") == [(4, 0)]
    assert flow_pairs(("a", "a", "b"), "a") == [(0, 2), (1, 2)]
    assert flow_pairs(("a", "a"), "a") == []


@pytest.mark.parametrize(
    ("together", "shared"), [((100.0, 100.0), True), ((190.0, 195.0), False), ((190.0, 110.0), True)]
)
def test_a_card_is_shared_when_all_flows_are_hardly_faster_than_one(
    together: tuple[float, float], shared: bool
) -> None:
    assert HostFlows("a", (100.0, 100.0), together).shares_nic is shared


def test_memory_of_a_host_counts_once() -> None:
    cpu, gpu = MeasuredMemory(50, "free", True, 50, "free"), MeasuredMemory(24, "on the card", False, 49, "free")
    alone = MeasuredMemory(8, "free", True, 8, "free")
    shared = HostFlows("a", (10.0, 10.0), (11.0, 12.0))
    first, second = host_profiles(("a", "a", "b", "a"), (cpu, gpu, alone, cpu), (1.0, 0.0, 1.5, 0.5), [shared])
    assert (first.name, first.memory_bytes, first.shared_nic, first.flows_bytes_per_s) == ("a", 49, True, 11.0)
    assert (second.name, second.memory_bytes, second.shared_nic) == ("b", 8, False)
    assert (first.cores, second.cores) == (1.5, 1.5), "of its ranks on CPUs, together"
    given = "given as [cluster] memory_bytes"
    devices = tuple(replace(make_device(i), host=host, shares_host_memory=host != "c") for i, host in enumerate("aabc"))
    hosts = (first, second, replace(second, name="c"))
    profile = with_memory_budget(replace(make_profile(), devices=devices, hosts=hosts), 5)
    assert {(device.memory_bytes, device.memory_reason) for device in profile.devices} == {(5, given)}
    memories = [(host.memory_bytes, host.memory_reason) for host in profile.hosts]
    assert memories == [(10, f"{given} to each of 2"), (5, given), (8, "free")], "on c only a GPU's is given"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory here")
def test_a_folder_in_memory_is_no_disk(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    assert _read_per_s(Path("/dev/shm")) is None and _read_per_s(tmp_path / "link") is None


def test_the_clock_gives_every_layer_its_own_time(subject: BenchmarkSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block i takes 10 + i s forward and 100 + i s backward of a made-up time, the head's matrix 7 s and 70 s."""
    now = [0.0]
    monkeypatch.setattr(backend, "time", SimpleNamespace(thread_time=lambda: now[0]))
    timed = Bench(subject, Backend(), 1, BLOCKS + 2, split=True)
    model = timed.stage.model

    def passes(name: str, forward_s: float, backward_s: float) -> None:
        def ran(module: Any, arguments: Any, output: torch.Tensor) -> None:
            now[0] += forward_s
            output.register_hook(lambda gradient: now.__setitem__(0, now[0] + backward_s))

        model.get_submodule(name).register_forward_hook(ran)

    for block in range(BLOCKS):
        passes(f"model.layers.{block}.mlp", 10 + block, 100 + block)
    passes("lm_head", 7, 70)
    layers = range(1, BLOCKS + 1)
    head = BLOCKS + 1
    assert timed.forward(2)[0] == {**{layer: 9.0 + layer for layer in layers}, head: 7.0}
    assert timed.backward(2)[0] == {**{layer: 99.0 + layer for layer in layers}, head: 70.0}
    assert timed.forward(2)[1] == 0.0
    assert timed.backward_input(2, 0)[0] == {**{layer: 99.0 + layer for layer in layers}, head: 70.0}
    assert set(timed.backward_weights(0)) == {*layers, head}


def test_recomputing_is_part_of_a_blocks_backward(subject: BenchmarkSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(backend, "time", SimpleNamespace(thread_time=lambda: now[0]))
    timed = Bench(subject, Backend(), 0, 3)
    for block in (0, 1):
        timed.stage.model.get_submodule(f"model.layers.{block}.self_attn").register_forward_hook(
            lambda *_: now.__setitem__(0, now[0] + 1)
        )
    timed.recompute(True)
    assert timed.forward(1) == ({0: 0.0, 1: 1.0, 2: 1.0}, 0.0)
    assert timed.backward(1) == ({0: 0.0, 1: 1.0, 2: 1.0}, 0.0)
    timed.recompute(False)
    assert timed.forward(1)[0][1] == 1.0
    assert timed.backward(1)[0] == {0: 0.0, 1: 0.0, 2: 0.0}


def test_a_device_is_measured_in_every_way_planning_asks_for(subject: BenchmarkSpec) -> None:
    times = DeviceBenchmark(subject, Backend(), 1).run("today")
    tokens = tuple(rows * SEQUENCE for rows in (1, 2, 3, 4))
    assert times.rows == (1, 2, 3, 4)
    block = next(kind for kind in times.layers if kind not in ("embedding", "head"))
    of_block = times.layers[block]
    for curve in (of_block.forward_s, of_block.backward_s):
        assert curve.sample_tokens == tokens and min(curve.seconds) > 0 and all(curve.samples)
    for curve in (of_block.recompute_s, of_block.input_s, of_block.weight_s):
        assert curve is not None and curve.sample_tokens == (tokens[0], tokens[-1]) and min(curve.seconds) > 0
    assert times.layers["head"].recompute_s is None, "only blocks are computed again"
    assert times.layers["embedding"].input_s is None, "the first stage has no input to give a gradient to"
    assert times.optimizer_s_per_parameter > 0
    # Inputs and output gradients of seven matrices: x of q, k, v; of o; of gate, up; of down, and seven dy.
    values = HIDDEN + HIDDEN + HIDDEN + 32 + (4 * HIDDEN + 2 * 32 + HIDDEN)
    assert times.deferred_bytes[block] == 4 * values
    assert times.activation_bytes[block] > times.deferred_bytes[block] / 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_half_of_the_heads_is_timed_where_a_group_can_hold_the_model(
    subject: BenchmarkSpec, dtype: Literal["fp32", "bf16"]
) -> None:
    subject = replace(subject, train=TrainTable(dtype=dtype, steps=3))

    def of_members(subject: BenchmarkSpec) -> tuple[dict[str, LayerTimes], dict[str, LayerTimes]]:
        times = DeviceBenchmark(subject, Backend(), 1).run("today", members=True)
        return times.halved, times.without_experts

    halved, without = of_members(replace(subject, groups=True))
    assert halved.keys() == set(subject.chain.kinds) and without == {}
    for times in halved.values():
        assert times.forward_s.sample_tokens == (SEQUENCE, 4 * SEQUENCE)
        assert min(times.forward_s.seconds) > 0 and min(times.backward_s.seconds) > 0
    assert of_members(subject) == ({}, {}), "nobody has asked for groups"
    config = AutoConfig.for_model("llama", **{**SIZES, "attention_dropout": 0.5})
    dropping = TransformersChain(config)
    unable = replace(subject, groups=True, chain=dropping, tuning=full_training(dropping))
    assert of_members(unable) == ({}, {})


def test_a_member_without_experts_is_timed_where_layers_have_some(
    subject: BenchmarkSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SIZES, "num_hidden_layers": 1, "num_local_experts": 5, "num_experts_per_tok": 2}
    chain = TransformersChain(AutoConfig.for_model("mixtral", **sizes))
    subject = replace(subject, groups=True, chain=chain, tuning=full_training(chain))
    held = []

    class NotedBench(Bench):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            if keywords.get("group") is not None:
                held.extend(len(p) for name, p in self.stage.parameters.items() if name.endswith("experts.down_proj"))

    monkeypatch.setattr(device, "Bench", NotedBench)
    times = DeviceBenchmark(subject, Backend(), 1).run("today", members=True)
    assert times.without_experts.keys() == times.halved.keys() == set(chain.kinds)
    assert held == [2], "half of five experts, then none at all"


def test_what_one_device_keeps_more_is_its_own(subject: BenchmarkSpec) -> None:
    """Attention without a fused kernel keeps its scores."""
    times = DeviceBenchmark(subject, Backend(), 1).run("today")
    with sdpa_kernel(SDPBackend.MATH):
        unfused = DeviceBenchmark(subject, Backend(), 1).run("today")
    block = subject.chain.kinds[1]
    cost, ratios = _model_cost(subject, [unfused, times, times])
    assert ratios == [unfused.activation_bytes[block] / times.activation_bytes[block], 1.0, 1.0] and ratios[0] > 1.02
    assert cost.layers[1].activation_bytes_per_token == times.activation_bytes[block]


def test_adapters_are_measured_without_splitting(chain: TransformersChain, subject: BenchmarkSpec) -> None:
    from hetero_mpi.job.schema import JobConfig
    from hetero_mpi.model.adapters.adapter_tuning import tuning_of

    job = JobConfig.model_validate(
        {"model": {"path": "x"}, "data": {"text": ["x"]}, "adapter": AdapterTable(method="lora")}
    )
    adapted = replace(subject, tuning=tuning_of(job, chain), micro_batches=(1,))
    times = DeviceBenchmark(adapted, Backend(), 1).run("today")
    assert all(layer.input_s is None and layer.weight_s is None for layer in times.layers.values())
    assert times.layers["embedding"].backward_s.seconds == (0.0,), "nothing is trained there"
    assert times.layers["head"].backward_s.seconds[0] > 0, "the gradient passes through the frozen head"


def test_token_counts_without_memory_are_left_out(subject: BenchmarkSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    most, forward = 2, Bench.forward

    def short(self: Bench, rows: int, index: int = 0) -> Any:
        if rows > most:
            raise torch.OutOfMemoryError
        return forward(self, rows, index)

    monkeypatch.setattr(bench.Bench, "forward", short)
    times = DeviceBenchmark(subject, Backend(), 1).run("today")
    assert times.rows == (1, 2)
    assert all(layer.forward_s.sample_tokens == (SEQUENCE, 2 * SEQUENCE) for layer in times.layers.values())
    most = 0
    with refuses("memory.exceeded"):
        DeviceBenchmark(subject, Backend(), 1).run("today")


def test_a_device_whose_first_pass_takes_too_long_is_timed_once(
    subject: BenchmarkSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = DeviceBenchmark(replace(subject, micro_batches=(1,)), Backend(), 1).run("today")
    passes, forward = [], Bench.forward

    def counted(self: Bench, rows: int, index: int = 0) -> Any:
        passes.append(rows)
        return forward(self, rows, index)

    monkeypatch.setattr(bench.Bench, "forward", counted)
    monkeypatch.setattr(device, "_MAX_FIRST_PASS_S", 0.0)
    times = DeviceBenchmark(replace(subject, groups=True), Backend(), 5).run("today", members=True)
    assert passes == [1, 1], "the front and the back of the chain, once each"
    assert times.slow_s > 0 == whole.slow_s and times.rows == (1,) and times.halved == {}
    for layer in times.layers.values():
        assert layer.forward_s.tokens == layer.backward_s.tokens == (SEQUENCE,)
        assert layer.recompute_s is layer.input_s is layer.weight_s is None
    assert times.activation_bytes == whole.activation_bytes and times.optimizer_s_per_parameter > 0


def kept_times() -> DeviceTimes:
    samples = TimingSamples()
    for part in (TimedPart.FORWARD, TimedPart.BACKWARD, TimedPart.INPUT):
        samples.add(part, "a", 1, 0.5)
    layers = {"a": layer_times(samples, "a", 8)}
    return DeviceTimes("today", (1,), layers, 0.1, 0.2, {"a": 1.0}, {"a": 0.0}, 1e-9, 0.0, float("inf"), 1e9)


def test_device_tables_are_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told: list[str] = []
    assert benchmark_spec.load_times("key", told.append) is None and not told
    benchmark_spec.store_cached("key", {**encode(kept_times(), infinity_as_text=True), "lines": 3})
    assert benchmark_spec.load_times("key", told.append) is None and len(told) == 1, "another layout is measured again"
    benchmark_spec.store_cached("key", encode(kept_times(), infinity_as_text=True))
    assert benchmark_spec.load_times("key", told.append) == kept_times() and len(told) == 1
    (file,) = (tmp_path / "hetero_mpi" / "profiles").iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # a file stands where the folder should: no cache, no error
    benchmark_spec.store_cached("key", encode(kept_times(), infinity_as_text=True))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("profiles") == tmp_path / ".cache" / "hetero_mpi" / "profiles"


def test_a_table_belongs_to_device_model_dtype_and_company(subject: BenchmarkSpec) -> None:
    def key(world: dict[str, Any] | None = None, repeats: int = 5, **changes: Any) -> str:
        place = {"host": "a", "local_rank": 0, "local_size": 1, "library": "Open MPI 5.0.11", **(world or {})}
        return benchmark_spec.device_key(SimpleNamespace(**place), Backend(), replace(subject, **changes), repeats)  # type: ignore[arg-type]

    others = [
        key({"host": "b"}),
        key({"local_size": 2}),
        key(repeats=6),
        key(threads=2),
        key(cores=0.5),
        key(compiled=True),
        key(sequence_length=16),
        key(micro_batches=(1, 2)),
        key(train=TrainTable(dtype="bf16", steps=3)),
    ]
    assert len({key(), *others}) == 1 + len(others)
    # Ranks elsewhere, the length of the run and the learning rate change nothing.
    assert key({"rank": 3, "size": 9}, train=TrainTable(dtype="fp32", steps=7, learning_rate=1.0)) == key()
