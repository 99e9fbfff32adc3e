"""A plan: who holds which layers of the chain, and how a step is run; and what is predicted of it, and why it is the plan.

Kept as TOML, accepted back with ``--plan``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

SCHEMA_VERSION = 3
"""Version of the plan file's layout."""
FROM_DISK = "read from the disk in every pass"
"""Words of a reason that is told before a run in any case."""
WARM_UP = "warm_up"
"""The order that the planner makes plans for (``orders.warm_up``)."""


@dataclass(frozen=True)
class StagePlan:
    """Layers ``[first, last)`` of the chain, held by one rank, or by a group of ranks of one host, each with its share of every
    layer (tensor parallelism). The first rank of a group leads: it alone exchanges messages with other stages."""

    ranks: tuple[int, ...]
    first: int
    last: int
    warm_up: int
    """Micro-batches sent forward before the first backward; 1F1B's classic depth is ``stages - 1 - index``."""
    recompute: bool = False
    streamed: bool = False
    """Layer by layer, each on all slices of a micro-batch: weights (and in full training gradients, masters and moments) are in
    host memory or mapped files, and on the device only while they are needed. Backward repeats forward."""
    slice_sequences: int | None = None
    """A micro-batch is computed in slices of so many sequences; None: at once."""
    kept_slices: int = 0
    """Of a streamed stage: so many slices of every micro-batch, the first ones, keep their activations and are not repeated."""
    on_disk: int = 0
    """Of a streamed stage: so many blocks, evenly spread, which host memory has no room for: each pass reads them from files."""
    state_weight: float = 1.0
    """The part of the optimizer's state, of layers that several ranks hold, that each owns is in proportion to this
    (``owners``)."""
    shares: tuple[int, ...] = ()
    """The whole key/value heads that each rank of a group holds, perhaps none of one that has experts; columns of MLPs and words
    of the vocabulary are divided in the same proportion. Of one rank: empty."""
    experts: tuple[int, ...] | None = None
    """How many experts each rank of a group holds, where layers have some, perhaps none; None: in proportion to the shares."""

    @property
    def grouped(self) -> bool:
        """True where several ranks hold it."""
        return len(self.ranks) > 1

    def disk_layers(self, layers: int) -> tuple[int, ...]:
        """Which layers of a chain of so many are ``on_disk``."""
        blocks = self.blocks(layers)
        count = min(self.on_disk, len(blocks))
        return tuple(blocks[(2 * i + 1) * len(blocks) // (2 * count)] for i in range(count))

    def blocks(self, layers: int) -> range:
        """Its layers but for both ends of that chain."""
        return range(max(1, self.first), min(self.last, layers - 1))

    @property
    def idles(self) -> bool:
        """True where some rank of a group has neither heads nor experts."""
        experts = self.experts or (0,) * len(self.shares)
        return any(heads == count == 0 for heads, count in zip(self.shares, experts, strict=False))

    def share(self, member: int) -> float:
        """The share of one of its ranks of what a group divides, but for experts."""
        return self.shares[member] / sum(self.shares) if self.grouped else 1.0

    def expert_share(self, member: int) -> float:
        """The same of the experts."""
        return self.experts[member] / sum(self.experts) if self.experts else self.share(member)

    def slices(self, micro_batch: int) -> int:
        """How many slices a micro-batch of so many sequences is computed in."""
        return -(-micro_batch // max(1, self.slice_sequences or micro_batch))


@dataclass(frozen=True)
class PipelinePlan:
    """Stages in chain order, together holding every layer once. A rank may hold several of them, computed in an order made for
    that (``orders``): ranks 0, 1, 0, 1 are looped, 0, 1, 1, 0 a V."""

    stages: tuple[StagePlan, ...]
    micro_batch: int
    """Sequences per micro-batch."""
    sequences: int
    """Sequences per step: this pipeline's share of the global batch. The last micro-batch holds what is left over."""
    split_backward: bool = False
    """Backward in two parts: the gradient of the input first, which the stage before waits for; those of the weights
    when there is time (full training only)."""
    order: str = WARM_UP
    """The order of what each stage computes: a name of ``orders.ORDERS``."""

    @cached_property
    def held(self) -> dict[int, tuple[int, ...]]:
        """Rank -> the places of its stages in the pipeline."""
        indices: dict[int, tuple[int, ...]] = {}
        for index, stage in enumerate(self.stages):
            for rank in stage.ranks:
                indices[rank] = (*indices.get(rank, ()), index)
        return indices

    @property
    def interleaved(self) -> bool:
        """True where some rank holds several stages."""
        return any(len(places) > 1 for places in self.held.values())

    def together(self, index: int) -> bool:
        """True where stages ``index`` and ``place + 1`` are on one rank: no message passes between them."""
        return self.stages[index].ranks == self.stages[index + 1].ranks

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return -(-self.sequences // self.micro_batch)

    def size(self, micro_batch: int) -> int:
        """Sequences in one micro-batch of the step."""
        return min(self.micro_batch, self.sequences - micro_batch * self.micro_batch)


@dataclass(frozen=True)
class Plan:
    """The decision, and nothing that is predicted of it (``PlanReport``).

    Pipelines hold the whole model each and share the global batch: the first takes its first ``sequences`` rows, and so
    on. A rank takes part in one pipeline. A pipeline may be a single rank: many such make plain data parallelism.
    """

    pipelines: tuple[PipelinePlan, ...]
    global_batch: int
    sequence_length: int
    layers: int
    """Length of the chain: the embedding, the blocks, the head."""

    def with_stages(self, stages: Iterable[StagePlan]) -> Plan:
        """This plan with other stages, as many in each pipeline. ``stages``: in the order of ``numbered``."""
        rest = iter(stages)
        pipelines = (replace(pipeline, stages=tuple(islice(rest, len(pipeline.stages)))) for pipeline in self.pipelines)
        return replace(self, pipelines=tuple(pipelines))

    @cached_property
    def state_weights(self) -> dict[int, float]:
        """Rank -> ``state_weight`` of its stages."""
        return {stage.ranks[0]: stage.state_weight for _, _, stage in self.numbered}

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each layer, one per pipeline (of a group its first), in plan order."""
        ranks_by_layer: list[list[int]] = [[] for _ in range(self.layers)]
        for _, _, stage in self.numbered:
            for layer in range(max(0, stage.first), min(stage.last, self.layers)):
                ranks_by_layer[layer].append(stage.ranks[0])
        return tuple(map(tuple, ranks_by_layer))

    @cached_property
    def leader_of(self) -> dict[int, int]:
        """Each rank of a group that does not lead -> the one that does."""
        return {rank: stage.ranks[0] for _, _, stage in self.numbered for rank in stage.ranks[1:]}

    @property
    def ranks(self) -> list[int]:
        """Those that hold a stage, increasing."""
        return sorted(self._numbers_by_rank)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The numbers of the rank's stages; none: it is idle."""
        return self._numbers_by_rank.get(rank, ())

    @cached_property
    def _numbers_by_rank(self) -> dict[int, tuple[int, ...]]:
        numbers_by_rank: dict[int, tuple[int, ...]] = {}
        for number, _, stage in self.numbered:
            for rank in stage.ranks:
                numbers_by_rank[rank] = (*numbers_by_rank.get(rank, ()), number)
        return numbers_by_rank

    @cached_property
    def numbered(self) -> tuple[tuple[int, int, StagePlan], ...]:
        """All stages as (number, index of the pipeline, stage), in plan order: the numbers used by actions."""
        flat = [(index, stage) for index, pipeline in enumerate(self.pipelines) for stage in pipeline.stages]
        return tuple((number, index, stage) for number, (index, stage) in enumerate(flat))


@dataclass(frozen=True)
class IdleRank:
    rank: int
    reason: str


@dataclass(frozen=True)
class Alone:
    """One rank by itself, with the same tokens per step."""

    rank: int
    step_s: float | None = None
    """Predicted; None: it cannot, for the reason ``problem``."""
    problem: str = ""
    """Also why it does not train alone although it would be faster."""


@dataclass(frozen=True)
class RankMemory:
    """Predicted peak of one rank, against what it has."""

    rank: int
    peak_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class HostMemory:
    """Predicted peak of all ranks that compute in one host's memory, against what it has."""

    host: str
    peak_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class PlanReport:
    """A plan with its prediction, bound and reasons, as ``planner.make_plan`` and ``planner.complete_plan`` work them out."""

    plan: Plan
    predicted_step_s: float
    bound_step_s: float
    """No plan for this instance can be faster than this: the fluid bound (``bounds``), often far below what is possible."""
    alone: Alone | None = None
    """The rank that is fastest by itself; None: not known."""
    tried_step_s: float | None = None
    """A step as it was measured before the run, with made-up weights and data; None: not tried."""
    memory: tuple[RankMemory, ...] = ()
    hosts: tuple[HostMemory, ...] = ()
    idle: tuple[IdleRank, ...] = ()
    reasons: tuple[str, ...] = ()
    """Sentences for a person: why this plan, what was beaten and by how much."""

    @property
    def expected_step_s(self) -> float:
        """As tried, else as predicted."""
        return self.predicted_step_s if self.tried_step_s is None else self.tried_step_s
