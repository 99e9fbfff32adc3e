"""The user's intent: ``job.toml`` -> ``Job``, validated. Never derived values.

Every key is a field here, with its unit and meaning below it; ``jobs/reference.toml`` shows them all with their defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Table(BaseModel):
    """A table of the job file: unknown keys are refused, values are not coerced silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True)


class ModelTable(Table):
    """Which model. Exactly one of ``path`` and ``config``."""

    path: str | None = None
    """Local Hugging Face model directory (config.json, *.safetensors) to start from."""
    config: str | dict[str, Any] | None = None
    """A ``config.json`` file, or its keys inline as ``[model.config]`` with ``model_type``: weights start from ``train.seed``."""


class TokenizerTable(Table):
    """Which tokenizer. Both empty: the one in ``model.path``."""

    path: str | None = None
    """Directory with ``tokenizer.json`` / ``tokenizer_config.json``."""
    train_vocab_size: Positive | None = None
    """Train a byte-level BPE tokenizer of this many entries on the corpus and save it with the model."""


class DataTable(Table):
    """What to learn from. Only rank 0 needs these files."""

    text: list[str] = Field(min_length=1)
    """Text files (UTF-8), as glob patterns; ``{stdlib}`` is the running Python's standard library, relative paths start at the job file."""
    documents: Literal["file", "line"] = "file"
    """What one document is: a whole file, or a non-empty line."""
    packing: bool = True
    """true: documents are joined (an end token between them) and cut to full sequences; false: one document per sequence, cut or padded."""
    sequence_length: Positive = 256
    """Tokens per sequence."""
    held_out: Fraction = 0.02
    """Share of the sequences that is never trained on and measures the evaluation loss."""
    max_bytes: Positive | None = None
    """Read at most this many bytes of text (files in sorted order); empty: everything."""


class TrainTable(Table):
    """How to learn."""

    steps: Positive = 100
    """Optimizer steps."""
    global_batch: Positive = 8
    """Sequences per optimizer step, over all ranks."""
    micro_batch: Positive | Literal["auto"] = "auto"
    """Sequences per micro-batch; must divide ``global_batch``. "auto": the planner chooses."""
    seed: NotNegative = 0
    """Seed of initial weights, order of samples and dropout."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Compute dtype of the whole job. bf16 keeps fp32 master weights, gradients and moments."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after warm-up."""
    warmup_steps: NotNegative = 0
    """Optimizer steps of linear warm-up from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay; not applied to biases and norms."""
    beta1: Fraction = 0.9
    """AdamW: decay of the first moment."""
    beta2: Fraction = 0.95
    """AdamW: decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW: added to the denominator."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this global norm; empty: never."""
    evaluate_every: NotNegative = 0
    """Steps between evaluations on the held-out share; 0: at the end only."""
    evaluate_sequences: Positive = 64
    """Held-out sequences per evaluation, at most."""


class CheckpointTable(Table):
    """When to save."""

    every: NotNegative = 0
    """Steps between checkpoints; 0: at the end only."""
    keep: Positive = 3
    """Newest checkpoints to keep."""


class OutputTable(Table):
    """Where results go."""

    run_dir: str = "runs/{name}"
    """Run directory, relative to the working directory; ``{name}`` is the job file's name without ``.toml``."""
    shard_bytes: Positive = 1_000_000_000
    """Largest safetensors file of the model directory, in bytes; also bounds rank 0's memory while it is written."""


class PlanTable(Table):
    """What the planner may decide."""

    allow_idle: bool = True
    """May ranks be left out when that is faster?"""
    memory_reserve: Fraction = 0.05
    """Share of every rank's usable memory to keep free."""


class ProfileTable(Table):
    """How the machines are measured."""

    path: str | None = None
    """Use this profile file instead of measuring (as ``--profile``)."""
    reuse: bool = True
    """Reuse the profile in the run directory when its key matches."""
    repeats: Positive = 5
    """Timed repetitions of each measurement (the median counts)."""
    largest_message_bytes: Positive = 4_194_304
    """Largest message used to fit a link's bandwidth."""


class ClusterTable(Table):
    """The ranks."""

    device: Literal["auto", "cpu", "cuda", "rocm", "xpu", "mps"] = "auto"
    """Device of every rank; "auto": the local rank's accelerator where there is one, else the CPU."""
    threads: Positive | Literal["auto"] = "auto"
    """CPU threads per rank; "auto": the host's cores divided by its ranks."""
    memory_bytes: Positive | None = None
    """Usable memory per rank, instead of the measured one."""
    communication_thread: bool = True
    """Move messages from a thread of their own, so that they overlap with computing; false: single-threaded, for debugging."""


class Job(Table):
    """A whole job file."""

    model: ModelTable
    tokenizer: TokenizerTable = TokenizerTable()
    data: DataTable
    train: TrainTable = TrainTable()
    checkpoint: CheckpointTable = CheckpointTable()
    output: OutputTable = OutputTable()
    plan: PlanTable = PlanTable()
    profile: ProfileTable = ProfileTable()
    cluster: ClusterTable = ClusterTable()
