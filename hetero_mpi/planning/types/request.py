"""What planning needs to know of a job, as plain values: planning never sees ``Job``."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_GIVEN = "given as [cluster] memory_bytes"
"""Why a device may use so much memory, when the job says so."""


@dataclass(frozen=True)
class PlanRequest:
    """The decisions left to the planner, as finite sets, and what the job fixes."""

    global_batch: int
    """Sequences per optimizer step."""
    sequence_length: int
    """Tokens per sequence."""
    micro_batch_choices: tuple[int, ...]
    """Sequences per micro-batch the planner may choose from; each divides ``global_batch``."""
    alone_micro_batch_choices: tuple[int, ...] = ()
    """The same for a rank by itself, which may take larger ones than a rank of many; empty: ``micro_batch_choices``."""
    max_pipelines: int = 1
    """How many pipelines may hold the model side by side."""
    recompute_choices: tuple[bool, ...] = (False,)
    split_choices: tuple[bool, ...] = (False,)
    """May a pipeline split its backward? Full training only."""
    streaming: str = "never"
    """May stages be streamed: ``never``, where nothing fits otherwise or a step gets clearly shorter (``auto``), or wherever it
    gets ``shorter``?"""
    schedule: str = "auto"
    """``auto`` leaves depth and splitting to the planner; a name of ``orders.SCHEDULES`` fixes them."""
    stages_per_rank: int = 1
    """Stages of its pipeline that a rank may hold, at most."""
    groups: bool = False
    """May ranks of one host hold a stage together, each a share of its layers?"""
    allow_idle: bool = True
    """May ranks be left out when that is faster (or when there are more ranks than layers)?"""
    indifference: float = 0.0
    """Plans within this share of the fastest are as good: of these, the one whose ranks follow one another is taken."""
    thorough: bool = False
    """Look longer for the fastest plan: several times as long (``search``)."""
    brief: bool = False
    """Look at the most promising number of pipelines alone: for what is told beside a plan, not for a plan to be run."""
    memory_reserve: float = 0.05
    """Share of every device's usable memory that is kept free."""
    copy_bytes_per_trainable_parameter: float = 0.0
    """Host memory for copies of the trained state (snapshots of checkpoints, copies for and of peers) that the run makes where
    there is room."""
