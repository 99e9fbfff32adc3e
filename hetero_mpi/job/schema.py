"""Tables of the job file. Every key is a field here or in ``training_tables``, followed by its description.

``jobs/reference.toml`` lists all keys with their defaults. An optional key that is omitted or set to ``""`` is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from hetero_mpi.job.rules import speed_change
from hetero_mpi.job.training_tables import (
    ADAPTER,
    EVALUATED,
    LANGUAGE,
    NO_PREFERENCE,
    RECORDS,
    AboveZero,
    AdapterTable,
    Example,
    Fraction,
    JobTable,
    Name,
    NotNegative,
    OnlyIf,
    Positive,
    TrainTable,
    Unit,
)
from hetero_mpi.planning.orders import SCHEDULES
from hetero_mpi.util.display import short_repr
from hetero_mpi.util.plug_ins import plug_in_names

if TYPE_CHECKING:
    ScheduleName = str
    TrackerName = str
    DeviceName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]
    TrackerName = Literal[plug_in_names("hetero_mpi.rundir.trackers")]
    DeviceName = Literal[("auto", "cpu") + plug_in_names("hetero_mpi.device.backends")]  # noqa: RUF005  as PreferenceName
TEXT, RECORD_FILES = OnlyIf("data.text is set"), OnlyIf('data.records is set or data.documents = "record"')
EMULATED = OnlyIf("cluster.emulate is set")
Weights = Annotated[list[AboveZero], Field(min_length=1)]
RecordKey = Literal[
    "text", "prompt", "completion", "instruction", "input", "output", "messages", "conversations", "system", "history", "tools",
    "chosen", "rejected", "label", "weight",
]  # fmt: skip
"""Record keys that ``[data] keys`` can map to other column names."""
Patterns = Annotated[list[str], Field(min_length=1)]
"""Glob patterns of files."""
SetName = Annotated[
    str, Field(pattern=r"^[\w.-]{1,40}$", description="a name of at most 40 letters, digits, periods, - and _")
]


class ModelTable(JobTable):
    """The model to train. Set exactly one of ``path``, ``config`` and ``factory``."""

    path: Annotated[str | None, Example('"models/SmolLM2-135M"')] = None
    """Model to start from: a Hugging Face model directory (config.json, *.safetensors) or a Hub model ("org/name"). Only rank 0
    needs the files."""
    download: bool = True
    """Allow rank 0 to download a Hub model that is not in its cache."""
    shard_cache: Annotated[str | None, LANGUAGE, Example('"~/.cache/hetero_mpi"')] = None
    """Directory where ranks without the model files cache the tensors that they receive from rank 0, so that later runs start
    faster. You may delete it at any time."""
    config: Annotated[str | dict[str, Any] | None, Example('{ model_type = "llama", num_hidden_layers = 8 }')] = None
    """Model configuration for training from scratch: a ``config.json`` file, or its keys inline as ``[model.config]``, including
    ``model_type``. Weights are initialised randomly, seeded by ``train.seed``."""
    factory: Annotated[str | None, Example('"cnn_model:cnn"')] = None
    """Custom model: "package.module:function", a Python function that returns a ``hetero_mpi.LayeredModel`` (docs/python.md). Every
    rank runs it with your permissions. Keys for text and language models do not apply; "sequences" then means samples, and
    ``train.dtype`` is fp32."""
    quantization: Annotated[Literal["none", "nf4"], ADAPTER] = "none"
    """"nf4" (QLoRA): quantise the linear layers and fused experts of all blocks to 4 bits; the embedding, norms and LM head stay in
    the compute dtype."""
    double_quantization: bool = True
    """Double quantisation: also quantise the scales of NF4 weights, which takes 0.516 instead of 0.5625 bytes per weight."""


class TokenizerTable(JobTable):
    """The tokenizer. If ``path`` and ``train_vocab_size`` are empty, the tokenizer in ``model.path`` is used."""

    path: Annotated[str | None, LANGUAGE, Example('"models/llama"'), OnlyIf("tokenizer.train_vocab_size is empty")] = (
        None
    )
    """Tokenizer directory, with ``tokenizer.json`` or ``tokenizer_config.json``."""
    train_vocab_size: Annotated[Annotated[int, Field(ge=257)] | None, LANGUAGE, Unit("entries"), Example("4096")] = None
    """Train a byte-level BPE tokenizer with this vocabulary size on the corpus and save it with the model. The minimum, 257, covers
    the 256 bytes and the end-of-text token."""
    add: Annotated[list[Name], LANGUAGE] = []
    """Tokens to add, such as "<tool>"; they stay visible in generated text (transformers' ``add_tokens``). The embedding and LM
    head of ``model.path`` are resized if they have no spare rows; new rows start as the mean of the old rows (docs/models.md)."""
    add_special: Annotated[list[Name], LANGUAGE] = []
    """Special tokens to add, such as "<|tool|>". They work like ``add``, but are removed from generated text."""


class DataTable(JobTable):
    """Training data: text or instruction records. Set exactly one of ``text`` and ``records``. Only rank 0 needs the files."""

    text: Annotated[Patterns | None, LANGUAGE, Example('["{stdlib}/**/*.py", "notes/*.txt"]')] = None
    """Glob patterns of UTF-8 text files, or of files as in ``records`` if ``documents = "record"``. ``{stdlib}`` expands to the
    directory of Python's standard library. A leading ``!`` excludes files, as in ``!{stdlib}/site-packages/**``."""
    records: Annotated[Patterns | None, LANGUAGE, Example('["data/*.jsonl", "chat.parquet", "hf:org/name:train"]')] = (
        None
    )
    """Instruction records (docs/data.md): glob patterns of JSON Lines, JSON or Parquet files, or "hf:org/name/config:split" for a
    dataset on the Hugging Face Hub (by default its default config and the split "train")."""
    keys: Annotated[
        dict[RecordKey, str] | None, Example('{ prompt = "query", completion = "reply" }'), RECORD_FILES
    ] = None
    """Column mapping: ``prompt = "query"`` reads the record's key ``query`` as ``prompt`` (docs/data.md)."""
    weights: Annotated[Weights | None, Unit("shares"), Example("[3, 1]"), RECORDS] = None
    """Mixing weights: relative share of each entry of ``records`` in an epoch (docs/data.md). Empty: treat all as one dataset."""
    evaluation: Annotated[Patterns | None, LANGUAGE, Example('["evaluation/*.jsonl"]')] = None
    """Evaluation set: files of the same kind as the training data, to use instead of ``evaluation_fraction``."""
    evaluation_sets: Annotated[
        dict[SetName, Patterns] | None,
        LANGUAGE,
        Example('{ wiki = ["wiki/*.jsonl"], code = ["code/*.jsonl"] }'),
        NO_PREFERENCE,
        EVALUATED,
    ] = None
    """Additional evaluation sets by name, each with its own loss. Early stopping and the best checkpoint depend only on the main
    evaluation loss."""
    skip_bad: Annotated[NotNegative, Unit("records"), RECORD_FILES] = 0
    """Maximum number of malformed records to skip. Each is logged; if there are more, the job aborts (docs/data.md)."""
    documents: Annotated[Literal["file", "line", "record"], TEXT] = "file"
    """Unit of a document in ``text``: a file, a non-empty line, or the key ``text`` of a record (files as in ``records``)."""
    template: Annotated[Literal["auto", "chat", "plain", "none"], RECORDS] = "auto"
    """How to render records. "chat": with the tokenizer's chat template; "plain": with the headings ``## Task`` and ``## Answer``;
    "none": the completion directly follows the prompt; "auto": "chat" if the tokenizer has a chat template, otherwise "plain", or
    an error for chat records."""
    train_on_prompt: Annotated[bool | Literal["chats"], RECORDS, NO_PREFERENCE] = False
    """Include the prompt tokens of records in the loss. true: for all records; "chats": only for records with ``messages``, as in
    TRL; false: train on answers only."""
    packing: Annotated[bool, LANGUAGE] = True
    """true: concatenate documents (with an end-of-text token between them) and split them into full sequences; pack records without
    splitting them. false: one document or record per sequence, truncated or padded."""
    isolate: Annotated[bool | Literal["auto"], RECORDS] = "auto"
    """Prevent attention between records packed into one sequence. "auto": if the model family supports it (docs/models.md), or else
    use one record per sequence; true: require it; false: let records attend to earlier records, as packed documents do."""
    pad: Annotated[Literal["full", "longest"], LANGUAGE] = "full"
    """Padding of short sequences. "full": to ``sequence_length``; "longest": to the longest sequence of the step, rounded up to a
    multiple of 8 tokens, which saves computation without changing the result. Packed text needs no padding."""
    sequence_length: Annotated[Positive, Unit("tokens")] = 256
    """Context length for training, in tokens per sequence."""
    evaluation_fraction: Annotated[Fraction, Unit("share")] = 0.02
    """Fraction of the sequences to reserve for evaluation; they are never trained on."""
    max_bytes: Annotated[Positive | None, Unit("bytes"), Example("30_000_000"), TEXT] = None
    """Maximum number of bytes to read from the files of ``text``, in sorted order. Empty: no limit."""
    cache: bool = True
    """Cache token ids on rank 0's machine, so that later runs with the same data, tokenizer and settings skip tokenisation. The
    command ``cache`` shows and clears the cache."""


class CheckpointTable(JobTable):
    """Checkpoints and copies of the training state."""

    every: Annotated[NotNegative | Fraction, Unit("steps or share")] = 0
    """Steps between checkpoints, or a fraction of the run if below 1. 0: save a checkpoint only at the end."""
    keep: Annotated[Positive | Literal["all"], Unit("files")] = 3
    """Number of most recent checkpoints to keep, or "all"."""
    keep_best: Annotated[NotNegative, Unit("files")] = 1
    """Number of checkpoints with the lowest evaluation loss to keep as well (see ``train.evaluate_every``)."""
    background: bool = True
    """Asynchronous checkpointing: copy the trained state to host memory and write the copy while training continues; false:
    training waits for the write."""
    replicate_every: Annotated[NotNegative | Literal["auto"], Unit("steps")] = "auto"
    """Steps between copies of the training state to other ranks' memory (``launch --recover``) and other hosts' disks (``launch
    --elastic``; docs/recovery.md). "auto": the shortest interval that costs at most 2 % of the run time; 0: never."""
    allow_other_data: bool = False
    """Allow a run to resume with different data. The sample order then starts over at that step."""


class OutputTable(JobTable):
    """Output files."""

    run_dir: str = "runs/{name}"
    """Run directory, relative to the working directory; ``{name}`` is the job file's name without ``.toml``."""
    shard_bytes: Annotated[Positive, Unit("bytes")] = 1_000_000_000
    """Maximum size of each safetensors file in the model directory. It also limits rank 0's memory use while writing the model."""


class SampleTable(JobTable):
    """Sample text that the trained model generates at the end of a run, printed and saved in the run directory."""

    prompt: Annotated[str | None, LANGUAGE, Example('"def main("')] = None
    """Prompt to generate from (the user's message if the job trains on records). Empty: generate no sample."""
    max_new_tokens: Annotated[Positive, Unit("tokens")] = 64
    """Maximum number of tokens to generate."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature. 0: greedy decoding; 1: the model's own probabilities. Sampling is seeded by ``train.seed``."""
    top_p: Annotated[float, Field(gt=0, le=1), Unit("share")] = 1.0
    """Nucleus sampling: sample from the smallest set of tokens whose probabilities sum to at least this value."""


class PlanTable(JobTable):
    """The planner's choices: pipeline schedule, parallelism, offloading, rebalancing."""

    allow_idle: bool = True
    """Allow the plan to leave ranks idle if that is faster."""
    thorough: bool = False
    """Search up to four times as long, for a step that is usually less than 1 % faster. Replanning during a run never
    does."""
    memory_reserve: Annotated[Fraction, Unit("share")] = 0.05
    """Fraction of each rank's usable memory to keep free."""
    schedule: ScheduleName = "auto"
    """Pipeline schedule. "gpipe": all forward passes, then all backward passes; "1f1b": one forward, one backward; "split":
    1f1b with deferred weight gradients (zero bubble; requires full fine-tuning); "auto": the planner chooses the warm-up depth and
    whether to defer. "interleaved", "zbv" (ZB-V) and "dualpipev" use virtual pipeline stages, several per rank."""
    stages_per_rank: Annotated[Positive, Unit("stages")] = 4
    """Maximum number of virtual pipeline stages per rank. Several are used only if they shorten the step by at least 2 %, or if
    ``schedule`` requires at least 2."""
    tensor_parallel: bool = True
    """Tensor parallelism: allow ranks of one host to share a stage, each with a shard of its layers, if this shortens the step by
    at least 2 % or no other plan fits. Requires a transformers language model without dropout, and ``schedule = "auto"``."""
    pipelines: Annotated[Positive | Literal["auto"], Unit("pipelines")] = "auto"
    """Data parallelism: maximum number of pipelines, each a replica of the model, that share the global batch. "auto": the planner
    chooses the fastest number."""
    offload: bool | Literal["auto"] = "auto"
    """Offloading: keep a stage's weights in host memory (or on disk) and load them layer by layer, so that the stage can exceed its
    device's memory (docs/offloading.md). "auto": if no other plan fits, or if it shortens the step by at least 2 %; true: whenever
    it shortens the step; false: never."""
    rebalance: bool = True
    """Move layers between ranks during the run if the speed of a rank changes (stragglers) and the move shortens the step by at
    least 5 % (docs/recovery.md). ``--plan`` turns this off."""


class ProfileTable(JobTable):
    """Profiling of devices and links."""

    path: Annotated[str | None, Example('"profiles/homelab.toml"')] = None
    """Profile to use instead of measuring: a file, or the name of a shipped profile (like ``--profile``)."""
    save_as: Annotated[str | None, Example('"profiles/homelab.toml"'), OnlyIf("cluster.emulate is empty")] = None
    """Also write the measured profile to this file, for use as ``path`` in other jobs. An absolute path may be anywhere."""
    reuse: bool = True
    """Reuse the profile in the run directory if it matches the cluster and the job. ``--reprofile`` always measures again."""
    cache: bool = True
    """Cache device measurements on each host, so that only new ranks are measured after the cluster changes. Links and free memory
    are always measured."""
    repeats: Annotated[Positive, Unit("times")] = 5
    """Number of repetitions of each measurement; slow measurements are repeated less often."""
    largest_message_bytes: Annotated[int, Field(ge=1024), Unit("bytes")] = 16_777_216
    """Largest message size in link measurements, which start at 1 KiB and quadruple each time."""
    calibrate: bool | Literal["auto"] = "auto"
    """Calibration run: first run a few steps with randomly initialised weights, to detect out-of-memory errors, calibrate the
    profile and possibly choose another plan (docs/planning.md). "auto": if it takes at most 5 % of the run (15 % of a run over a
    minute), unless there is one rank, the profile is of another machine, or a resumed run's plan is already calibrated; true:
    always; false: never."""


class ClusterTable(JobTable):
    """Devices, threads and memory of the ranks; emulation of another cluster."""

    emulate: Annotated[str | None, LANGUAGE, Example('"homelab-5090-strix-halo"')] = None
    """Emulate the cluster of this profile (a file, or the name of a shipped profile) with one rank per device; the job's model
    replaces the profile's model (docs/emulated.md)."""
    time_scale: Annotated[AboveZero, Unit("s per s"), EMULATED] = 1.0
    """Emulation: real seconds per emulated second. Set it above 1 if this machine is too slow to keep up."""
    emulate_first: Annotated[bool, EMULATED] = False
    """Emulation: allow fewer ranks than the profile has; they emulate the profile's first ranks."""
    emulate_changes: Annotated[list[str], EMULATED] = []
    """Emulation: speed changes of devices (stragglers), relative to the profile, such as "rank 1 runs at 0.34 from step 20" and
    "rank 1 runs at 1 from step 60". Steps are counted from 1."""
    device: DeviceName = "auto"
    """Device type of every rank. "auto": the accelerator whose index is the local rank, or the CPU if there is none."""
    threads: Annotated[Positive | Literal["auto"], Unit("threads")] = "auto"
    """CPU threads per rank. "auto": the host's cores (or its cgroup quota) divided by its number of ranks; a GPU rank uses at most
    two threads if the host also has CPU ranks."""
    memory_bytes: Annotated[Positive | None, Unit("bytes"), Example("8_000_000_000")] = None
    """Memory budget per rank, instead of the measured one. It does not include weights that GPU stages offload to host memory."""
    watchdog_s: Annotated[Annotated[float, Field(ge=0)] | Literal["auto"], Unit("s")] = "auto"
    """Hang timeout: abort the job after this time without progress on any rank, and report where each rank is stuck. "auto": 20
    times the predicted step time, but at least 60 s; 0: off. Requires ``communication_thread``."""
    communication_thread: bool = True
    """Send and receive messages in a separate thread, so that communication overlaps with computation; false: single-threaded, for
    debugging."""

    def speed_changes(self) -> list[tuple[int, int, float]]:
        """Parse ``emulate_changes`` into tuples (rank, step counted from 0, speed relative to the profile)."""
        return [change for text in self.emulate_changes if (change := speed_change(text)) is not None]


class ReportTable(JobTable):
    """Reports, the live page and experiment trackers."""

    write: bool = True
    """Write ``architecture.png`` and ``.svg`` before the first step, and ``report.html`` and ``trace.json`` after the last step.
    The command ``report`` writes the report of any run at any time."""
    watch: bool | Annotated[int, Field(ge=0, lt=2**16)] = False
    """Serve a live page of the run on rank 0's machine to local clients. true: on port 8642, or on a free port if 8642 is in use;
    a number: on that port. ``watch RUN`` serves the page of any run."""
    trackers: list[TrackerName] = []
    """Experiment trackers to which rank 0 logs metrics: "tensorboard" (event files in ``tensorboard/`` of the run directory),
    "trackio", "wandb". Each needs the package of its name and reads its own environment variables (such as ``WANDB_MODE``)."""


class JobConfig(JobTable):
    """A complete job file."""

    model: ModelTable
    adapter: AdapterTable = AdapterTable()
    tokenizer: TokenizerTable = TokenizerTable()
    data: DataTable
    train: TrainTable = TrainTable()
    checkpoint: CheckpointTable = CheckpointTable()
    output: OutputTable = OutputTable()
    sample: SampleTable = SampleTable()
    plan: PlanTable = PlanTable()
    profile: ProfileTable = ProfileTable()
    cluster: ClusterTable = ClusterTable()
    report: ReportTable = ReportTable()

    def __repr__(self) -> str:
        return short_repr(self, type(self).model_fields)


TABLES: dict[str, type[JobTable]] = {
    name: field.annotation
    for name, field in JobConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, JobTable)
}
"""Maps table names to their pydantic models, in the order of the job file."""
