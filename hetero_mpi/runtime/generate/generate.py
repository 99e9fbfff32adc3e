"""The command ``generate``: continues a prompt with a model that may be larger than any one rank's memory.

Every rank loads only its own layers of the chain. ``runtime/generate/writer.py`` produces the tokens.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.versions import MUST_MATCH, own_versions
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.placement import active_ranks
from hetero_mpi.errors import UserError
from hetero_mpi.job.load import AdapterTable, ClusterTable
from hetero_mpi.model.adapter_files import read_adapter
from hetero_mpi.model.decoding import Sampling
from hetero_mpi.model.host_weights import large_files_folder
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.streamed_stage import StreamedStage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.weights import SeededStart, Start
from hetero_mpi.model.tuning import Tuning, adapter_tuning, nothing_trained
from hetero_mpi.planning.memory import STREAMED_LAYERS
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.plan_report import RankMemory
from hetero_mpi.profiling.host_profiles import sharing_ranks
from hetero_mpi.report import units
from hetero_mpi.report.run_files.logs import say, setup_logging
from hetero_mpi.runtime.generate.source import GenerateSource, Opened, open_source, stop_tokens
from hetero_mpi.runtime.generate.writer import Spelling, Writer
from hetero_mpi.runtime.setup.device_test import Needs
from hetero_mpi.runtime.setup.setup import default_threads, open_device, settle_products, share_of_cores
from hetero_mpi.state.file_supply import open_files
from hetero_mpi.state.redistribute import Parcel, distribute, parcels

DEFAULT_TOKENS = 128
"""New tokens where the user gives no number. Fewer where the model has no positions for so many."""


@dataclass(frozen=True)
class GenerateOptions:
    """The command line of ``generate``."""

    source: Path
    prompt: str
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    raw: bool = False


@dataclass(frozen=True)
class Task:
    """What is to be generated: source, prompt tokens, stop tokens, limit and sampling. The same on every rank."""

    source: GenerateSource
    prompt: list[int]
    stops: list[int]
    limit: int
    sampling: Sampling

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Task:
        return cls(
            **{**values, "source": GenerateSource(**values["source"]), "sampling": Sampling(**values["sampling"])}
        )


@dataclass(frozen=True)
class GenerateSetup:
    """What loading and generating need on a rank."""

    world: World
    transport: Transport
    backend: Backend
    chain: TransformersChain
    tuning: Tuning
    plan: Plan
    task: Task
    opened: Opened | None
    """On rank 0 only."""


def generate(world: World, options: GenerateOptions) -> int:
    """Continue a prompt and print the text as it is produced. Collective; returns the exit code.

    Raises:
        UserError: an error the user can correct; the same on all ranks.
    """
    setup_logging(None, world.rank, world.size)
    transformers_logging.disable_progress_bar()
    world.check_versions(own_versions(world.library), MUST_MATCH)
    opened: Opened | None = None
    task: Task | None = None
    with world.led("reading the model's directory"):
        if world.rank == 0:
            check_options(options)
            opened = open_source(options.source)
            task = task_of(opened, options)
    task = Task.from_dict(world.broadcast_json(asdict(task) if task is not None else None))
    cluster = ClusterTable(**task.source.cluster)
    backend = open_device(world, cluster.device, Needs(task.source.dtype, task.source.nf4))
    cores = share_of_cores(world, backend)
    torch.set_num_threads(cluster.threads if isinstance(cluster.threads, int) else default_threads(cores))
    settle_products(world, backend, task.source.dtype)
    with world.together("reading the model's configuration"):
        chain = TransformersChain(read_config(task.source.config))
        tuning = _tuning(task.source, chain)
    plan, memory = _plan(world, backend, chain, tuning, task, cluster.memory_bytes)
    if opened is not None:
        _say_task(opened, options, task, chain, plan, memory, world.size)
    with MpiTransport(world.comm, threaded=cluster.communication_thread) as transport:
        run_task(GenerateSetup(world, transport, backend, chain, tuning, plan, task, opened))
    return 0


def check_options(options: GenerateOptions) -> None:
    """Refuse numbers that are out of range.

    Raises:
        UserError: names the option, its value and the accepted range.
    """
    rules = (
        ("--max-new-tokens", options.max_new_tokens, options.max_new_tokens is None or options.max_new_tokens >= 1, "1 or more"),
        ("--temperature", options.temperature, 0 <= options.temperature < math.inf, "0 (greedy) or more"),
        ("--top-p", options.top_p, 0 < options.top_p <= 1, "more than 0, at most 1"),
        ("--seed", options.seed, 0 <= options.seed < 2**63, "0 or more, below 2**63"),
    )  # fmt: skip
    for name, value, good, rule in rules:
        if not good:
            raise UserError(f"{name} {value}: must be {rule}")


def task_of(opened: Opened, options: GenerateOptions) -> Task:
    """The prompt as tokens, checked against the model's positions.

    Raises:
        UserError: an empty prompt, or one that leaves too little room.
    """
    prompt = opened.prompt_tokens(options.prompt, options.raw)
    positions = getattr(read_config(opened.source.config), "max_position_embeddings", None)
    room = positions - len(prompt) if positions is not None else sys.maxsize
    wanted = options.max_new_tokens if options.max_new_tokens is not None else min(DEFAULT_TOKENS, max(1, room))
    if wanted > room:
        raise UserError(
            f"the model has positions for {positions} tokens (max_position_embeddings); the prompt has {len(prompt)}, and "
            f"{wanted} new ones are asked for: shorten the prompt, or give --max-new-tokens {max(room, 0)} or less"
        )
    source = opened.source
    directory = Path(source.base) if source.base is not None else None
    stops = stop_tokens(source.config, directory, opened.tokenizer)
    return Task(source, prompt, stops, wanted, Sampling(options.temperature, options.top_p, options.seed))


def share_out(layer_bytes: Sequence[int], memory_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """Layers ``[first, last)`` of each rank, in rank order; ``first == last``: the rank idles.

    The largest ratio (bytes of a rank's layers) / (its memory) is made as small as possible. Among equal divisions the one with the
    fewest stages is taken: the ranks compute one after the other, so a further stage only adds a message.

    Args:
        layer_bytes: parameter bytes of each layer of the chain.
        memory_bytes: usable memory of each rank; 0: it can hold nothing.
    """
    total = [0, *accumulate(layer_bytes)]
    layers = len(layer_bytes)
    # best[last]: (how full the fullest rank is, stages, cuts) of the layers before ``last`` on the ranks so far
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, (0,))}
    for memory in memory_bytes:
        found = {last: (full, stages, (*cuts, last)) for last, (full, stages, cuts) in best.items()}
        for first, (full, stages, cuts) in best.items():
            for last in range(first + 1, layers + 1):
                share = (total[last] - total[first]) / memory if memory > 0 else math.inf
                option = (max(full, share), stages + 1, (*cuts, last))
                if last not in found or option[:2] < found[last][:2]:
                    found[last] = option
        best = found
    cuts = best[layers][2]
    return list(pairwise(cuts))


def run_task(setup: GenerateSetup) -> list[int]:
    """Load the model and generate; ranks that the plan leaves idle sleep. Collective; returns the new tokens (on active ranks)."""
    world, plan, task = setup.world, setup.plan, setup.task
    active = active_ranks(plan)
    members = world.subset(active)
    if members is None:
        world.doing = "idle: other ranks hold the model"
        world.sleep_until_released()
        return []
    problem: CollectiveUserError | None = None
    tokens: list[int] = []
    try:
        stage = _load(setup, members)
        world.doing = "generating"
        ranks = [stage.ranks[0] for stage in plan.pipelines[0].stages]
        writer = Writer(world.rank, ranks, active, setup.transport, setup.chain, stage)
        coming = writer.tokens(task.prompt, task.sampling, task.stops, task.limit)
        tokens = list(coming if setup.opened is None else _told(coming, setup.opened, task))
    except CollectiveUserError as error:
        problem = error
    world.release([rank for rank in range(world.size) if rank not in active], problem)
    if problem is not None:
        raise problem
    return tokens


def _tuning(source: GenerateSource, chain: TransformersChain) -> Tuning:
    if source.adapter is None:
        return nothing_trained()
    return adapter_tuning(chain, AdapterTable(**source.adapter), source.nf4, source.double)


def _plan(
    world: World, backend: Backend, chain: TransformersChain, tuning: Tuning, task: Task, memory_bytes: int | None
) -> tuple[Plan, tuple[RankMemory, ...]]:
    """A plan of one pipeline with a stage per rank that takes part, and each rank's memory. The KV cache is not counted: it is
    small beside the parameters. Collective.

    Raises:
        UserError: the model does not fit.
    """
    sharing = sharing_ranks(world, backend)
    memory = memory_bytes if memory_bytes is not None else backend.memory(sharing).usable_bytes
    dtype = task.source.dtype
    usable = [int(bytes_) for bytes_ in world.all_gather_json(memory if dtype in backend.dtypes() else 0)]
    cost = model_cost(chain, tuning, dtype, 1, dict.fromkeys(chain.kinds, 0.0))
    sizes = [layer.parameter_bytes for layer in cost.layers]
    shares = share_out(sizes, usable)
    held = [sum(sizes[first:last]) for first, last in shares]
    streamed = any(bytes_ > limit for bytes_, limit in zip(held, usable, strict=True))
    if streamed:  # of which every rank holds a few layers at a time
        at_once = STREAMED_LAYERS * max(sizes)
        shares = share_out(sizes, [limit if limit >= at_once else 0 for limit in usable])
        held = [at_once if first < last else 0 for first, last in shares]
    if any(bytes_ > limit for bytes_, limit in zip(held, usable, strict=True)):
        has = ", ".join(f"rank {rank} {units.size(limit)}" for rank, limit in enumerate(usable))
        raise CollectiveUserError(
            f"the model's parameters need {units.size(sum(sizes))} in {dtype}, and {STREAMED_LAYERS} layers at a time do not "
            f"fit the usable memory either ({has}; 0 B: cannot compute in {dtype}): use ranks with more memory"
        )
    stages = tuple(
        StagePlan((rank,), first, last, 0, streamed=streamed)
        for rank, (first, last) in enumerate(shares)
        if first < last
    )
    fill = tuple(RankMemory(stage.ranks[0], held[stage.ranks[0]], usable[stage.ranks[0]]) for stage in stages)
    return Plan((PipelinePlan(stages, 1, 1),), 1, len(task.prompt) + task.limit, chain.layer_count), fill


def _say_task(
    opened: Opened, options: GenerateOptions, task: Task, chain: TransformersChain, plan: Plan,
    fill: tuple[RankMemory, ...], ranks: int,
) -> None:  # fmt: skip
    say(f"model: {chain.config.model_type}, {chain.blocks} blocks, {task.source.dtype}" + ", NF4" * task.source.nf4)
    stages = plan.pipelines[0].stages
    for stage, memory in zip(stages, fill, strict=True):
        of = f"{units.size(memory.peak_bytes)} of parameters, {units.size(memory.usable_bytes)} of memory"
        streamed = ", streamed layer by layer" * stage.streamed
        say(f"  rank {memory.rank}: layers {stage.first}-{stage.last - 1} of {chain.layer_count}, {of}{streamed}")
    idle = ranks - len(stages)
    if ranks > 1:
        others = f"; {idle} rank{'s' if idle > 1 else ''} idle" if idle else ""
        say(f"  parameters follow memory, so that the fullest rank is as little full as can be{others}")
    reason = "continued as it is: --raw" if options.raw else opened.reason
    say(f"prompt: {len(task.prompt)} tokens, {reason}", "")


def _load(setup: GenerateSetup, members: World) -> Stage | None:
    """This rank's layers, with their adapters. ``members``: the active ranks."""
    source, rank = setup.task.source, setup.world.rank
    if source.base is None:
        stage = _stage(setup, SeededStart(source.seed))
    else:
        supply = open_files(members, rank, setup.transport, setup.chain, setup.plan, Path(source.base), cache_root=None)
        members.doing = "sending the model's files to ranks without them"
        supply.serve()
        with members.together("loading weights"), supply:
            stage = _stage(setup, supply.start)
    if source.adapter is not None:
        _load_adapter(setup, stage)
    return stage


def _stage(setup: GenerateSetup, start: Start) -> Stage | None:
    source, rank = setup.task.source, setup.world.rank
    for own in setup.plan.pipelines[0].stages:
        if rank in own.ranks:
            backend, tuning = setup.backend, setup.tuning
            given = setup.chain, own.first, own.last, backend, source.dtype, start, source.seed, tuning
            return StreamedStage(*given, folder=large_files_folder()) if own.streamed else Stage(*given)
    return None


def _load_adapter(setup: GenerateSetup, stage: Stage | None) -> None:
    """Bring the adapter's tensors from rank 0 to the ranks that need them. Collective."""
    directory = setup.opened.adapter if setup.opened is not None else None
    stored = read_adapter(directory, setup.tuning) if directory is not None else {}

    def keep(parcel: Parcel, value: torch.Tensor) -> None:
        assert stage is not None
        stage.parameters[parcel.name].data.copy_(value)

    listed = parcels(setup.tuning, setup.plan, ("parameters",))
    distribute(setup.world.rank, setup.transport, listed, lambda parcel: stored[parcel.name], keep)


def _told(coming: Iterator[int], opened: Opened, task: Task) -> Iterator[int]:
    """Yields the tokens; prints their text as it is produced, and the speed at the end."""
    spelling = Spelling(opened.tokenizer, task.prompt)
    begin = first = time.perf_counter()
    count = 0
    for token in coming:
        count += 1
        first = time.perf_counter() if count == 1 else first
        _print(spelling.add(token))
        yield token
    _print(spelling.end() + "\n")
    end = time.perf_counter()
    rate = f", then {(count - 1) / (end - first):.1f} tokens/s" if count > 1 else ""
    say("", f"{count} tokens in {units.seconds(end - begin)}: the first after {units.seconds(first - begin)}{rate}")


def _print(text: str) -> None:
    """Print to stdout and flush; characters that its encoding lacks become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
