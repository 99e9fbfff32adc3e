"""A plan: which ranks hold which layers and how a step runs, with its prediction and reasons.

Plans are saved as TOML and can be passed back with ``--plan``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise

from hetero_mpi.util.display import Displayed

SCHEMA_VERSION = 3
"""Version of the plan file's layout."""
FROM_DISK = "read from the disk in every pass"
"""Phrase that marks a reason to show before every run."""
WARM_UP = "warm_up"
"""The planner's default order (``orders.warm_up``)."""


@dataclass(frozen=True)
class StagePlan:
    """Layers ``[first, last)`` of the chain, on one rank or sharded over a tensor-parallel group of ranks on one host.

    The first rank of a group is its leader, which alone exchanges messages with other stages.
    """

    ranks: tuple[int, ...]
    first: int
    last: int
    warm_up: int
    """Micro-batches sent forward before the first backward; 1F1B's classic depth is ``stages - 1 - index``."""
    recompute: bool = False
    streamed: bool = False
    """Whether the stage is offloaded: weights (in full fine-tuning also gradients, master weights and moments) stay in host
    memory or mapped files, and are on the device only while their layer computes a micro-batch. Backward recomputes forward."""
    slice_sequences: int | None = None
    """Sequences per slice of a micro-batch; None if it is not sliced."""
    kept_slices: int = 0
    """Number of leading slices of a micro-batch whose activations an offloaded stage keeps instead of recomputing."""
    on_disk: int = 0
    """Number of evenly spread blocks of an offloaded stage that exceed host memory and are read from files in each pass."""
    state_weight: float = 1.0
    """Weight for sharding optimizer state among a layer's holders (``owners``)."""
    shares: tuple[int, ...] = ()
    """Key/value heads of each tensor-parallel rank (0 possible with experts); MLP columns and vocabulary are sharded in the
    same proportion. Empty for a single rank."""
    experts: tuple[int, ...] | None = None
    """Experts of each tensor-parallel rank (0 possible) in layers that have experts; None: in proportion to ``shares``."""

    @property
    def grouped(self) -> bool:
        return len(self.ranks) > 1

    def disk_layers(self, layers: int) -> tuple[int, ...]:
        """Indices of the ``on_disk`` layers in a chain of ``layers`` layers."""
        blocks = self.blocks(layers)
        count = min(self.on_disk, len(blocks))
        return tuple(blocks[(2 * i + 1) * len(blocks) // (2 * count)] for i in range(count))

    def blocks(self, layers: int) -> range:
        """Return the stage's layers without the ends of the chain."""
        return range(max(1, self.first), min(self.last, layers - 1))

    @property
    def idles(self) -> bool:
        """Whether any tensor-parallel rank has neither heads nor experts."""
        experts = self.experts or (0,) * len(self.shares)
        return any(heads == count == 0 for heads, count in zip(self.shares, experts, strict=False))

    def share(self, member: int) -> float:
        """Fraction of the tensor-parallel layers, without experts, on one member."""
        return self.shares[member] / sum(self.shares) if self.grouped else 1.0

    def expert_share(self, member: int) -> float:
        """Fraction of the experts on one member."""
        return self.experts[member] / sum(self.experts) if self.experts else self.share(member)

    def slices(self, micro_batch: int) -> int:
        """Number of slices in a micro-batch of ``micro_batch`` sequences."""
        return -(-micro_batch // max(1, self.slice_sequences or micro_batch))


@dataclass(frozen=True, repr=False)
class PipelinePlan(Displayed):
    """Stages in chain order that together hold every layer once.

    A rank may hold several stages if the order allows it (``orders``): ranks 0, 1, 0, 1 are interleaved, 0, 1, 1, 0 V-shaped.
    """

    stages: tuple[StagePlan, ...]
    micro_batch: int
    """Sequences per micro-batch."""
    sequences: int
    """Sequences per step: this replica's share of the global batch. The last micro-batch holds the remainder."""
    split_backward: bool = False
    """Whether backward is split: first the input gradient, for which the previous stage waits; later the weight gradients (full
    fine-tuning only)."""
    order: str = WARM_UP
    """Order of a stage's operations: a name in ``orders.ORDERS``."""

    @cached_property
    def stages_of(self) -> dict[int, tuple[int, ...]]:
        """Rank -> indices of its stages in the pipeline."""
        indices: dict[int, tuple[int, ...]] = {}
        for index, stage in enumerate(self.stages):
            for rank in stage.ranks:
                indices[rank] = (*indices.get(rank, ()), index)
        return indices

    @property
    def cuts(self) -> list[int]:
        """First layer of each stage, then the end of the chain."""
        return [0, *(stage.last for stage in self.stages)]

    def with_cuts(self, cuts: Sequence[int]) -> PipelinePlan:
        stages = zip(self.stages, pairwise(cuts), strict=True)
        return replace(self, stages=tuple(replace(stage, first=first, last=last) for stage, (first, last) in stages))

    @property
    def interleaved(self) -> bool:
        return any(len(places) > 1 for places in self.stages_of.values())

    def is_local_boundary(self, index: int) -> bool:
        """Whether stages ``index`` and ``index + 1`` are on one rank and so exchange no message."""
        return self.stages[index].ranks == self.stages[index + 1].ranks

    @property
    def micro_batches(self) -> int:
        return -(-self.sequences // self.micro_batch)

    def size(self, micro_batch: int) -> int:
        """Number of sequences in one micro-batch of the step."""
        return min(self.micro_batch, self.sequences - micro_batch * self.micro_batch)


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """A plan without its prediction (see ``PlanReport``).

    Each pipeline is a replica of the full model. The replicas split the global batch: the first takes the first ``sequences``
    rows, and so on. A rank belongs to one pipeline. Single-rank pipelines are plain data parallelism.
    """

    pipelines: tuple[PipelinePlan, ...]
    global_batch: int
    sequence_length: int
    layers: int
    """Number of layers in the chain: the embedding, the blocks and the head."""

    def with_stages(self, stages: Iterable[StagePlan]) -> Plan:
        """Replace all stages, in the order of ``numbered``; every pipeline keeps its number of stages."""
        rest = iter(stages)
        pipelines = (replace(pipeline, stages=tuple(islice(rest, len(pipeline.stages)))) for pipeline in self.pipelines)
        return replace(self, pipelines=tuple(pipelines))

    @property
    def undivided(self) -> bool:
        """Whether every pipeline is a single stage and so holds a copy of the whole model."""
        return all(len(pipeline.stages) == 1 for pipeline in self.pipelines)

    @property
    def replicas(self) -> str:
        """The pipelines' number and name: "copies" if at least one of them is a single stage."""
        copies = any(len(pipeline.stages) == 1 for pipeline in self.pipelines)
        return f"{len(self.pipelines)} {'copies of the model' if copies else 'pipelines'}"

    @cached_property
    def state_weights(self) -> dict[int, float]:
        return {stage.ranks[0]: stage.state_weight for _, _, stage in self.numbered}

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold each layer, one per pipeline (the leader of a tensor-parallel group), in plan order."""
        ranks_by_layer: list[list[int]] = [[] for _ in range(self.layers)]
        for _, _, stage in self.numbered:
            for layer in range(max(0, stage.first), min(stage.last, self.layers)):
                ranks_by_layer[layer].append(stage.ranks[0])
        return tuple(map(tuple, ranks_by_layer))

    @cached_property
    def leader_of(self) -> dict[int, int]:
        """Map each non-leading rank of a tensor-parallel group to its leader."""
        return {rank: stage.ranks[0] for _, _, stage in self.numbered for rank in stage.ranks[1:]}

    @property
    def ranks(self) -> list[int]:
        return sorted(self._numbers_by_rank)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Numbers of the rank's stages; empty if the rank is idle."""
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


ALL_RANKS_WORK = "plan.allow_idle = false"
"""Reason why a single rank is not used although it would be faster."""


@dataclass(frozen=True)
class Alone:
    """One rank that trains alone, with the same number of tokens per step."""

    rank: int
    step_s: float | None = None
    """Predicted step time; None if the rank cannot train alone, for the reason in ``problem``."""
    problem: str = ""
    """Why the rank cannot train alone, or should not although it would be faster."""


@dataclass(frozen=True)
class RankMemory:
    rank: int
    peak_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class HostMemory:
    """Predicted peak and usable bytes of one host, over all ranks that compute in its memory."""

    host: str
    peak_bytes: int
    usable_bytes: int


@dataclass(frozen=True, repr=False)
class PlanReport(Displayed):
    """A plan with its prediction, bound and reasons, from ``planner.make_plan`` or ``planner.complete_plan``."""

    plan: Plan
    predicted_step_s: float
    bound_step_s: float
    """Lower bound for this instance: the fluid bound (``bounds``), often far below the attainable time."""
    alone: Alone | None = None
    """The fastest single rank; None if unknown."""
    tried_step_s: float | None = None
    """Step time of the calibration run, with randomly initialised weights and random data; None if there was none."""
    memory: tuple[RankMemory, ...] = ()
    hosts: tuple[HostMemory, ...] = ()
    idle: tuple[IdleRank, ...] = ()
    reasons: tuple[str, ...] = ()
    """Sentences for the user: why this plan, its alternatives and their step times."""
    similar: tuple[Plan, ...] = field(default=(), compare=False)
    """Good plans for other pipeline counts, if searched; not saved."""

    @property
    def expected_step_s(self) -> float:
        """Step time of the calibration run, or the predicted one if there was none."""
        return self.predicted_step_s if self.tried_step_s is None else self.tried_step_s
