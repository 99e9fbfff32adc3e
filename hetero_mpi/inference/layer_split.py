"""Split a model's layers over the ranks for inference in proportion to their memory; each rank loads only its own layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.device.backend import DTYPES, Backend
from hetero_mpi.engine.placement import active_ranks
from hetero_mpi.inference.adapter_switch import add_adapter
from hetero_mpi.inference.source import GenerateSource, Opened
from hetero_mpi.inference.writer import Writer
from hetero_mpi.job.schema import ClusterTable
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_files import read_adapter
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.host_weights import large_files_folder
from hetero_mpi.model.layer.interface import Start
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.stage import Stage, StageSpec
from hetero_mpi.model.streamed_stage import StreamedStage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.tuning import Tuning, nothing_trained
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, RankMemory, StagePlan
from hetero_mpi.planning.types.sizes import OFFLOADED_LAYER_COUNT
from hetero_mpi.profiling.host_profiles import sharing_ranks
from hetero_mpi.rundir.logs import say
from hetero_mpi.state.file_supply import open_start
from hetero_mpi.state.redistribute import TensorShard, move, tensor_shards, transfers
from hetero_mpi.training.setup.setup import open_rank, settle_products
from hetero_mpi.util import units

T = TypeVar("T")


@dataclass(frozen=True)
class GenerateSetup:
    """Everything that a rank needs to load its layers and to generate."""

    world: World
    backend: Backend
    chain: TransformersChain
    tuning: Tuning
    plan: Plan
    memory: tuple[RankMemory, ...]
    """Parameter bytes and memory budget of each rank that has a stage."""
    source: GenerateSource
    opened: Opened | None
    """None on ranks other than 0."""
    further: Mapping[str, Tuning]
    """Maps names to adapters, in addition to the one of ``tuning``."""


def set_up(world: World, opened: Opened | None) -> GenerateSetup:
    """Open the devices and split the model's layers over the ranks without reading weights. Collective.

    ``opened``: the model on rank 0, None on other ranks. Raises UserError if the model exceeds the memory.
    """
    source = GenerateSource(**world.broadcast_json(asdict(opened.source) if opened is not None else None))
    cluster = ClusterTable(**source.cluster)
    backend, _, _ = open_rank(world, cluster)
    settle_products(world, backend, source.dtype)
    with world.collective_errors("reading the model's configuration"):
        chain = TransformersChain(read_config(source.config))
        tuning = _tuning(source, chain, source.adapter)
        further = {name: _tuning(source, chain, adapter) for name, adapter in source.further.items()}
    plan, memory = _plan(world, backend, chain, [tuning, *further.values()], source)
    setup = GenerateSetup(world, backend, chain, tuning, plan, memory, source, opened, further)
    _print_split(setup)
    return setup


def with_writer(
    setup: GenerateSetup, work: Callable[[World, Writer], T], ended: Callable[[], bool] = lambda: False
) -> T | None:
    """Load the model and run ``work`` on the active ranks with their world and writer; idle ranks return None. Collective.

    ``ended``: as in ``World.sleep_until_released``.
    """
    world, plan = setup.world, setup.plan
    active = active_ranks(plan)
    with MpiTransport(world.comm, threaded=ClusterTable(**setup.source.cluster).communication_thread) as transport:
        members = world.subset(active)
        if members is None:
            world.current_action = "idle: other ranks hold the model"
            world.sleep_until_released(ended)
            return None
        problem: CollectiveUserError | None = None
        result = None
        try:
            own_stage = _load(setup, members, transport)
            ranks = [stage.ranks[0] for stage in plan.pipelines[0].stages]
            stages = [own_stage] if own_stage is not None else []
            result = work(members, Writer(world.rank, ranks, active, transport, setup.chain, stages))
        except CollectiveUserError as error:
            problem = error
        world.release([rank for rank in range(world.size) if rank not in active], problem)
        if problem is not None:
            raise problem
        return result


def share_out(layer_bytes: Sequence[int], memory_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the layers ``[first, last)`` of each rank, in rank order; an idle rank has ``first == last``.

    The split minimises the largest ratio of a rank's layer bytes to its memory. Among equal splits, it has the fewest stages,
    since ranks compute one after the other and a further stage only adds a message.

    Args:
        layer_bytes: parameter bytes of each layer of the chain.
        memory_bytes: usable memory of each rank; 0 if it cannot hold layers.
    """
    total = [0, *accumulate(layer_bytes)]
    layers = len(layer_bytes)
    # best[last]: (largest ratio, stages, cuts) of the layers before ``last`` on the ranks considered
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, (0,))}
    for memory in memory_bytes:
        extended = {last: (full, stages, (*cuts, last)) for last, (full, stages, cuts) in best.items()}
        for first, (full, stages, cuts) in best.items():
            for last in range(first + 1, layers + 1):
                share = (total[last] - total[first]) / memory if memory > 0 else math.inf
                option = (max(full, share), stages + 1, (*cuts, last))
                if last not in extended or option[:2] < extended[last][:2]:
                    extended[last] = option
        best = extended
    cuts = best[layers][2]
    return list(pairwise(cuts))


def _tuning(source: GenerateSource, chain: TransformersChain, adapter: dict[str, Any] | None) -> Tuning:
    if adapter is None:
        return nothing_trained()
    return adapter_tuning(chain, AdapterTable(**adapter), source.nf4, source.double)


def _plan(
    world: World, backend: Backend, chain: TransformersChain, tunings: Sequence[Tuning], source: GenerateSource
) -> tuple[Plan, tuple[RankMemory, ...]]:
    """Plan one pipeline with one stage per active rank; returns the plan and the memory of these ranks. Collective.

    The KV cache is ignored because it is small compared with the parameters. Raises UserError if the model exceeds the memory.
    """
    sharing = sharing_ranks(world, backend)
    configured_bytes = ClusterTable(**source.cluster).memory_bytes
    memory = configured_bytes if configured_bytes is not None else backend.memory(sharing).usable_bytes
    dtype = source.dtype
    usable = [int(bytes_) for bytes_ in world.all_gather_json(memory if dtype in backend.dtypes() else 0)]
    cost = model_cost(chain, tunings[0], dtype, 1, dict.fromkeys(chain.kinds, 0.0))
    sizes = [layer.parameter_bytes for layer in cost.layers]
    for spec in (spec for tuning in tunings[1:] for spec in tuning.trainable.values()):
        sizes[spec.layer] += spec.count * DTYPES[dtype].itemsize
    shares = share_out(sizes, usable)
    # A rank with both ends holds a tied matrix once.
    tied_bytes = DTYPES[dtype].itemsize * chain.parameters[chain.tied[1]].count if chain.tied is not None else 0
    rank_bytes = [sum(sizes[first:last]) - tied_bytes * (last - first == len(sizes)) for first, last in shares]
    streamed = any(bytes_ > limit for bytes_, limit in zip(rank_bytes, usable, strict=True))
    if streamed:  # each rank holds a few layers at a time
        at_once = OFFLOADED_LAYER_COUNT * max(sizes)
        shares = share_out(sizes, [limit if limit >= at_once else 0 for limit in usable])
        rank_bytes = [at_once if first < last else 0 for first, last in shares]
    if any(bytes_ > limit for bytes_, limit in zip(rank_bytes, usable, strict=True)):
        has = ", ".join(f"rank {rank} {units.size(limit)}" for rank, limit in enumerate(usable))
        raise CollectiveUserError(
            "memory.exceeded",
            f"the model's parameters need {units.size(sum(sizes))} in {dtype}, and even {OFFLOADED_LAYER_COUNT} layers at a "
            f"time do not fit in the usable memory ({has}; 0 B: cannot compute in {dtype}): use ranks with more memory",
        )
    stages = tuple(
        StagePlan((rank,), first, last, 0, streamed=streamed)
        for rank, (first, last) in enumerate(shares)
        if first < last
    )
    fill = tuple(RankMemory(stage.ranks[0], rank_bytes[stage.ranks[0]], usable[stage.ranks[0]]) for stage in stages)
    return Plan((PipelinePlan(stages, 1, 1),), 1, 1, chain.layer_count), fill


def _print_split(setup: GenerateSetup) -> None:
    chain, source, stages = setup.chain, setup.source, setup.plan.pipelines[0].stages
    dtype = source.dtype + ", NF4" * source.nf4
    say(f"model: {chain.config.model_type}, {units.plural(chain.blocks, 'block')}, {dtype}")
    for stage, memory in zip(stages, setup.memory, strict=True):
        sizes = f"{units.size(memory.peak_bytes)} of parameters, {units.size(memory.usable_bytes)} of memory"
        streamed = ", offloaded layer by layer" * stage.streamed
        say(f"  rank {memory.rank}: layers {stage.first}-{stage.last - 1} of {chain.layer_count}, {sizes}{streamed}")
    idle = setup.world.size - len(stages)
    if setup.world.size > 1:
        idle_text = f"; {idle} rank{'s' if idle > 1 else ''} idle" if idle else ""
        say(f"  split in proportion to memory, to minimise the largest share of a rank's memory{idle_text}")


def _load(setup: GenerateSetup, members: World, transport: Transport) -> Stage | None:
    """Load this rank's layers and their adapters. ``members``: the active ranks."""
    source, rank = setup.source, setup.world.rank
    start, files = open_start(members, rank, transport, setup.chain, setup.plan, source.directory, source.seed)
    with members.collective_errors("loading weights"), files:
        stage = _stage(setup, start)
    opened = setup.opened
    if source.adapter is not None:
        parameters = stage.parameters if stage is not None else {}
        tied_head = stage.tied_head if stage is not None else None
        directory = opened.adapter if opened is not None else None
        _load_adapter(setup, setup.tuning, parameters, directory, transport, tied_head)
    for name, tuning in setup.further.items():
        parameters = add_adapter(stage, name, tuning) if stage is not None else {}
        _load_adapter(setup, tuning, parameters, opened.further[name] if opened is not None else None, transport)
    return stage


def _stage(setup: GenerateSetup, start: Start) -> Stage | None:
    source, rank = setup.source, setup.world.rank
    for part in setup.plan.pipelines[0].stages:
        if rank in part.ranks:
            spec = StageSpec(setup.chain, part.first, part.last, setup.backend, source.dtype, source.seed, setup.tuning)
            return StreamedStage(spec, start, folder=large_files_folder()) if part.streamed else Stage(spec, start)
    return None


def _load_adapter(
    setup: GenerateSetup,
    tuning: Tuning,
    parameters: Mapping[str, nn.Parameter],
    directory: Path | None,
    transport: Transport,
    tied_head: nn.Parameter | None = None,
) -> None:
    """Send an adapter's tensors from rank 0, which has its ``directory``, into the ``parameters`` of the ranks. Collective."""
    stored = read_adapter(directory, tuning) if directory is not None else {}

    tied, last = tuning.tied(setup.chain), setup.plan.pipelines[0].stages[-1].ranks[0]

    def store(shard: TensorShard, value: torch.Tensor) -> None:
        for parameter in (parameters.get(shard.name), tied_head if shard.name == tied else None):
            if parameter is not None:
                parameter.data.copy_(value)

    listed = tensor_shards(tuning, setup.plan, ("parameters",))
    listed = [replace(s, receivers=(last,)) if s.name == tied and s.owner != last else s for s in listed]
    move(setup.world.rank, transport, transfers(listed, lambda _: (0,)), lambda shard: stored[shard.name], store)
