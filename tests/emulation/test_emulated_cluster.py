"""Emulated clusters: a run on other machines' times has the numbers of a plain run, and the times it was promised."""

import json
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hetero_mpi.comm.links import compare_clocks
from hetero_mpi.emulation.emulated_cluster import PacedTransport
from hetero_mpi.emulation.paced_stage import ActionPacer, Sleeper
from hetero_mpi.planning.durations import finished_layers_s
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes, LinkProfile
from hetero_mpi.planning.types.request import with_shared_nics
from hetero_mpi.planning.types.toml_files import load_profile, save_plan, save_profile
from hetero_mpi.rundir.metrics import StepMetrics, read_metrics
from tests.support import plans
from tests.support.jobs import SEQUENCE, Outcome, Workshop
from tests.support.message_cases import CASES
from tests.support.mpi import ROOT, launcher_or_skip
from tests.support.pages import follow, write_files
from tests.support.planning_samples import make_model, make_plan_of, make_profile
from tests.support.plans import pipeline
from tests.support.ranks import LoopbackNetwork, LoopbackTransport, play_ranks

pytestmark = pytest.mark.slow

TOKENS, BATCH, STEPS = 256, 6, 7
"""Of the emulated model: tokens per sequence. Its sequences of one micro-batch each; optimizer steps."""
CUTS, RANKS = [0, 2, 3, 4], [0, 2, 1]
BYTES_PER_S = 256 * 4096 / 0.040
"""40 ms for one sequence's activations."""


def three_ranks(tied: bool = False, speed: float = 1.0) -> ClusterProfile:
    """Ranks 0 and 1 on one host, rank 2 on another; a block takes 10 ms forward and 20 ms backward."""

    def device(rank: int, host: str, slowness: float) -> DeviceProfile:
        def times(seconds: float) -> LayerTimes:
            one = Curve((TOKENS,), (seconds * slowness,))
            return LayerTimes(one, Curve((TOKENS,), (2 * seconds * slowness,)), input_s=one, weight_s=one)

        layers = {"embedding": times(0.002), "block": times(0.010), "head": times(0.012)}
        return replace(
            make_profile().devices[0],
            rank=rank,
            host=host,
            backend="cuda",
            name=f"card {rank}",
            memory_bytes=10**9,
            layers=layers,
            optimizer_fixed_s=0.012,
        )

    model = replace(make_model(2, tied, 4096), sequence_length=TOKENS, tied_bytes=600_000 if tied else 0)
    hosts = ["left", "left", "right"]
    devices = tuple(device(rank, host, 1 / speed) for rank, host in enumerate(hosts))
    links = tuple(
        LinkProfile(a, b, 0.001, BYTES_PER_S * speed, hosts[a] == hosts[b])
        for a in range(3)
        for b in range(3)
        if a != b
    )
    return replace(make_profile(), model=model, devices=devices, links=links)


def large(profile: ClusterProfile) -> ClusterProfile:
    """With so many parameters that summing the gradients of a layer takes as long as its backward."""
    size = {"parameters": 400_000, "trainable_parameters": 400_000, "parameter_bytes": 1_600_000}
    layers = tuple(replace(layer, **size) for layer in profile.model.layers)
    return replace(profile, model=replace(profile.model, layers=layers))


def pipelines_of(sequence_length: int) -> Plan:
    """Ranks 0 and 2 (two hosts) hold one copy of the model, rank 1 another; unequal shares, backward split."""
    copies = pipeline([0, 2], [0, 3, 4], 1, 4, "split"), pipeline([1], [0, 4], 1, 2)
    return plans.plan_of(*copies, length=sequence_length)


def several_of(sequence_length: int) -> Plan:
    """Rank 0 holds both ends, a block each is on the others; backward is split."""
    return plans.plan_of(pipeline([0, 2, 1, 0], range(5), 1, BATCH, "zbv"), length=sequence_length)


class NotingSleeper(Sleeper):
    """Notes until when it was asked to sleep: when it wakes is the busy machine's affair."""

    def __init__(self, spare_core: bool) -> None:
        super().__init__(spare_core)
        self.moments: list[float] = []

    def until(self, moment_s: float) -> None:
        self.moments.append(moment_s)
        super().until(moment_s)


def test_layers_of_the_last_backward_count_as_finished_while_it_runs() -> None:
    """Not all at its end: their all-reduces are to start one after the other."""
    profile, plan, sleeper = three_ranks(), pipelines_of(TOKENS), NotingSleeper(spare_core=False)
    pace, told = ActionPacer(plan, profile, 1.0, sleeper), []
    last, begin, now = Action(Op.B, 2, 1), time.perf_counter(), time.perf_counter  # the pipeline that is one rank
    pace.pace_action(last, begin, lambda layer: told.append((layer, sleeper.moments[-1] - begin, now() - begin)))
    expected = finished_layers_s(last, plan, profile)
    assert [layer for layer, _, _ in told] == [3, 2, 1, 0]
    for layer, asked_s, after_s in told:
        assert asked_s == pytest.approx(expected[layer]) and after_s >= asked_s - 1e-3
    # The head is 24 ms, a block 20 ms.
    assert expected[3] == pytest.approx(0.024) and pace.duration_s_of(last) > 0.024 + 0.040


def first_two(profile: ClusterProfile) -> ClusterProfile:
    links = tuple(link for link in profile.links if 2 not in (link.source, link.destination))
    return replace(profile, devices=profile.devices[:2], links=links)


def plan_of(sequence_length: int) -> Plan:
    """Ranks 0, 2, 1 in this order: all messages cross between the hosts; warm-up hides the links."""
    return replace(make_plan_of(CUTS, RANKS, BATCH, warm_up=[5, 3, 0]), sequence_length=sequence_length)


@dataclass(frozen=True)
class Runs:
    """One mpirun of all jobs: outcomes, and where each wrote."""

    directory: Path
    outcomes: dict[str, Outcome]

    def metrics(self, name: str) -> tuple[StepMetrics, ...]:
        assert self.outcomes[name].raised[0] == "", self.outcomes[name].texts[0]
        return read_metrics(self.directory / name / "metrics.jsonl").steps

    def measured_s(self, name: str) -> float:
        return statistics.median(step.step_s for step in self.metrics(name)[2:])


@pytest.fixture(scope="module")
def np3(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    shop = Workshop(tmp_path_factory.mktemp("emulated"))
    directory = shop.directory
    profiles = {"untied": three_ranks(), "tied": three_ranks(tied=True), "fast": three_ranks(speed=1000)}
    profiles["four"] = replace(three_ranks(), model=replace(make_model(4, False, 4096), sequence_length=TOKENS))
    profiles["large"], profiles["large-tied"] = large(three_ranks()), large(three_ranks(tied=True))
    profiles["two"], profiles["shared-nics"] = first_two(three_ranks()), with_shared_nics(three_ranks())
    for name, profile in profiles.items():
        save_profile(profile, directory / f"like-{name}.toml")
    for name, make in (("plan", plan_of), ("pipelines", pipelines_of), ("several", several_of)):
        for whose, length in (("own", SEQUENCE), ("emulated", TOKENS)):
            save_plan(make(length), directory / f"{whose}-{name}.toml")
    entries: dict[str, dict[str, object]] = {}

    def entry(name: str, model: str, plan: str | None, **cluster: object) -> None:
        values = shop.values(shop.model(model, 2, tied=model == "tied"))
        train = {"steps": STEPS, "global_batch": BATCH, "micro_batch": 1}
        job = shop.job(name, values, train=train, cluster=cluster, checkpoint={"every": 0})
        entries[name] = {"job": job, "run_dir": str(directory / name)}
        if plan is not None:
            entries[name]["plan"] = directory / plan

    entry("untied-plain", "untied", "own-plan.toml")
    entry("untied", "untied", "emulated-plan.toml", emulate="like-untied.toml")
    entry("shared-nics", "untied", "emulated-plan.toml", emulate="like-shared-nics.toml")
    entry("tied-plain", "tied", "own-plan.toml")
    entry("tied", "tied", "emulated-plan.toml", emulate="like-tied.toml", time_scale=1.25)
    entry("pipelines-plain", "untied", "own-pipelines.toml")
    entry("pipelines", "untied", "emulated-pipelines.toml", emulate="like-large.toml")
    entry("tied-pipelines-plain", "tied", "own-pipelines.toml")
    entry("tied-pipelines", "tied", "emulated-pipelines.toml", emulate="like-large-tied.toml")
    entry("several-plain", "tied", "own-several.toml")
    entry("several", "tied", "emulated-several.toml", emulate="like-tied.toml", time_scale=1.25)
    entry("too-fast", "untied", "emulated-plan.toml", emulate="like-fast.toml")
    entry("too-few-blocks", "untied", None, emulate="like-four.toml")
    entry("too-many-ranks", "untied", None, emulate="like-two.toml", emulate_first=True)
    entry("tied-differently", "tied", None, emulate="like-untied.toml")
    entry("two-profiles", "untied", None, emulate="like-untied.toml")
    entries["two-profiles"]["profile"] = directory / "like-untied.toml"
    return Runs(directory, shop.run_entries(3, entries, timeout_s=300))


EMULATED = ["untied", "tied", "pipelines", "tied-pipelines", "several"]


@pytest.mark.parametrize("name", EMULATED)
def test_losses_have_the_bits_of_a_run_without_emulation(np3: Runs, name: str) -> None:
    emulated, plain = np3.metrics(name), np3.metrics(f"{name}-plain")
    assert [step.loss for step in emulated] == [step.loss for step in plain]
    assert [step.grad_norm for step in emulated] == [step.grad_norm for step in plain]
    assert len(emulated) == STEPS


def test_a_run_whose_arithmetic_takes_longer_than_it_is_to_last_says_so_at_its_end(np3: Runs) -> None:
    assert np3.metrics("too-fast")[-1].loss == np3.metrics("untied-plain")[-1].loss
    assert "raise [cluster] time_scale" in np3.outcomes["too-fast"].printed


@pytest.mark.parametrize("name", EMULATED)
def test_steps_are_not_shorter_than_predicted(np3: Runs, name: str) -> None:
    """All waiting is done. That they are not longer either, up to 5 %, is for benchmarks/emulated.py: here others may compute."""
    assert np3.measured_s(name) > 0.95 * np3.metrics(name)[0].predicted_step_s


def test_a_nic_that_ranks_share_is_neither_planned_for_nor_emulated_and_the_run_says_so(np3: Runs) -> None:
    own = simulate(plan_of(TOKENS), three_ranks()).step_s
    assert simulate(plan_of(TOKENS), with_shared_nics(three_ranks())).step_s > 1.3 * own
    for name, shared in (("untied", False), ("shared-nics", True)):
        assert np3.metrics(name)[0].predicted_step_s == pytest.approx(own)
        assert ("NICs that its hosts share are not emulated" in " ".join(np3.outcomes[name].printed.split())) is shared
        assert not any(host.shared_nic for host in load_profile(np3.directory / name / "profile.toml").hosts)


def test_sums_of_gradients_last(np3: Runs) -> None:
    """Were they not delayed, the step would be so much shorter that the test above would notice."""
    summed_s, free_s = (
        simulate(pipelines_of(TOKENS), profile).step_s for profile in (large(three_ranks()), three_ranks())
    )
    assert summed_s > 1.3 * free_s
    assert np3.metrics("pipelines")[0].predicted_step_s == pytest.approx(summed_s)


def test_everything_a_person_sees_says_emulated(np3: Runs) -> None:
    printed, plain = np3.outcomes["untied"].printed, np3.outcomes["untied-plain"].printed
    for text in ("Emulated, made up: 3 ranks; ", "on emulated devices", "cuda card 2"):
        assert text in printed
    assert "Step time, emulated: " in printed and "Emulation: " in printed
    assert all(step.emulated for step in np3.metrics("untied"))
    assert not any(step.emulated for step in np3.metrics("untied-plain"))
    assert "emulated" not in (np3.directory / "untied-plain" / "metrics.jsonl").read_text()
    assert load_profile(np3.directory / "untied" / "profile.toml").source == "emulated, made up"
    assert "Emulated" not in plain and "on emulated" not in plain and "Step time: " in plain


def test_rates_are_those_of_the_emulated_model(np3: Runs) -> None:
    step, plain = np3.metrics("untied")[3], np3.metrics("untied-plain")[3]
    assert step.tokens == plain.tokens
    assert step.tokens_per_s == pytest.approx(BATCH * TOKENS / step.step_s)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("too-few-blocks", ["has 4, this job's model has 2", "Set num_hidden_layers = 4"]),
        ("too-many-ranks", ["like-two.toml describes 2 ranks, this job has 3: start 2 ranks"]),
        ("tied-differently", ["tie embedding and head", "Set tie_word_embeddings = false"]),
        ("two-profiles", ["a profile is given", "emulate"]),
    ],
)
def test_what_cannot_be_emulated_is_refused_on_all_ranks(np3: Runs, name: str, texts: list[str]) -> None:
    outcome = np3.outcomes[name]
    assert outcome.raised == ("CollectiveUserError",) * 3
    assert all(text in outcome.texts[0] for text in texts), outcome.texts[0]


def pair(delay_s: float) -> list[PacedTransport]:
    """Two emulated transports that reach each other."""
    ends: tuple[LoopbackTransport, ...] = LoopbackNetwork(2).transports
    delay = lambda a, b, size: delay_s  # noqa: E731
    made = partial(PacedTransport, delay_of=lambda tag: delay, exchange_s=lambda number, sums: 0.0)
    return [made(end, rank, offsets_s=[0.0, 0.0], sleeper=Sleeper(False)) for rank, end in enumerate(ends)]


def test_messages_of_a_pair_queue_behind_each_other() -> None:
    sender, receiver = pair(0.02)
    buffers = [np.zeros(3, np.uint8) for _ in range(3)]
    receives = [receiver.post_receive(0, 1, buffer) for buffer in buffers]
    sends = [sender.send(1, 1, np.full(3, index, np.uint8)) for index in range(3)]
    assert not sends[0].completed and not receives[0].completed  # the bytes are there, their time is not
    for request in (*receives, *sends):
        (sender if request.kind == "send" else receiver).wait(request)
    moments = [request.moment_s for request in receives]  # type: ignore[attr-defined]
    assert np.diff(moments) == pytest.approx([0.02, 0.02])
    assert [int(buffer[0]) for buffer in buffers] == [0, 1, 2]
    assert [request.moment_s for request in sends] == moments  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", [name for name in CASES if "close" not in name])
def test_emulated_links_keep_the_contract_of_transports(case: str) -> None:
    ends = pair(0.0005)
    play_ranks(2, lambda rank: CASES[case](lambda: ends[rank], rank))


def test_clocks_of_two_hosts_are_compared() -> None:
    ends = LoopbackNetwork(2).transports
    clocks = {0: lambda: 100.0, 1: lambda: 142.0}
    play = lambda rank: compare_clocks(ends[rank], 1 - rank, "leads" if rank == 0 else "follows", clocks[rank])  # noqa: E731
    assert play_ranks(2, play) == [0.0, 42.0]


def test_a_metrics_line_of_an_emulated_step_says_so(np3: Runs) -> None:
    line = (np3.directory / "untied" / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["emulated"] is True


def test_the_job_of_the_document_runs_in_an_empty_folder(tmp_path: Path) -> None:
    launcher_or_skip()
    page = ROOT / "docs" / "emulated.md"
    assert write_files(page, tmp_path) == ["job.toml"]
    printed = follow(page, tmp_path, 300)
    assert "on emulated devices" in printed and "Step time, emulated: " in printed
    assert [line.step for line in read_metrics(tmp_path / "runs" / "job" / "metrics.jsonl").steps] == [1, 2, 3]
