"""The tables of a job file: every key is a field here or in ``training_tables``, with its unit and meaning below it.

``jobs/reference.toml`` shows them all with their defaults. An optional key is empty when it is left out or set to ``""``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from hetero_mpi.job.rules import speed_change
from hetero_mpi.job.training_tables import (
    ADAPTER,
    HELD_OUT,
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
"""Keys of records that a job may name otherwise."""
Patterns = Annotated[list[str], Field(min_length=1)]
"""Files, as glob patterns."""
SetName = Annotated[
    str, Field(pattern=r"^[\w.-]{1,40}$", description="a name of at most 40 letters, digits, points, - and _")
]


class ModelTable(JobTable):
    """Which model. Exactly one of ``path``, ``config`` and ``factory``."""

    path: Annotated[str | None, Example('"models/SmolLM2-135M"')] = None
    """Hugging Face model directory (config.json, *.safetensors) to start from, or a model of the hub, "org/name", in the local
    Hugging Face cache. Only rank 0 needs it."""
    download: bool = True
    """May rank 0 fetch a model of the hub that is not in its Hugging Face cache?"""
    shard_cache: Annotated[str | None, LANGUAGE, Example('"~/.cache/hetero_mpi"')] = None
    """Where ranks without the model directory keep the tensors that rank 0 sends them, for the next start (checked by CRC-32);
    may be deleted at any time."""
    config: Annotated[str | dict[str, Any] | None, Example('{ model_type = "llama", num_hidden_layers = 8 }')] = None
    """A ``config.json`` file, or its keys inline as ``[model.config]`` with ``model_type``: weights start from
    ``train.seed``."""
    factory: Annotated[str | None, Example('"cnn_model:cnn"')] = None
    """A model of your own: "package.module:function", Python that every rank imports and runs with your rights. The function
    returns a ``hetero_mpi.LayeredModel`` (docs/python.md); keys of text and language models are then left out, "sequences" are
    samples, and ``train.dtype`` is fp32."""
    quantization: Annotated[Literal["none", "nf4"], ADAPTER] = "none"
    """"nf4" holds the linear layers and fused experts of blocks in 4 bits (needs an adapter); embedding, norms and head stay in the
    compute dtype."""
    double_quantization: bool = True
    """Quantise the scales of NF4 weights too: 0.516 instead of 0.5625 bytes per weight."""


class TokenizerTable(JobTable):
    """Which tokenizer. Both empty: the one in ``model.path``."""

    path: Annotated[str | None, LANGUAGE, Example('"models/llama"'), OnlyIf("tokenizer.train_vocab_size is empty")] = (
        None
    )
    """Directory with ``tokenizer.json`` / ``tokenizer_config.json``."""
    train_vocab_size: Annotated[Annotated[int, Field(ge=257)] | None, LANGUAGE, Unit("entries"), Example("4096")] = None
    """Train a byte-level BPE tokenizer of this many entries on the corpus and save it with the model. 257 hold the 256
    bytes and the end token."""
    add: Annotated[list[Name], LANGUAGE] = []
    """New tokens, which written text shows, such as "<tool>" (transformers' ``add_tokens``). Embedding and head of ``model.path``
    grow where they have no spare rows, and new rows begin as the mean of the old ones (docs/models.md)."""
    add_special: Annotated[list[Name], LANGUAGE] = []
    """The same of special tokens, such as "<|tool|>", which written text does not show."""


class DataTable(JobTable):
    """The data to learn from: text, or instruction records. Exactly one of ``text`` and ``records``. Only rank 0 needs these
    files."""

    text: Annotated[Patterns | None, LANGUAGE, Example('["{stdlib}/**/*.py", "notes/*.txt"]')] = None
    """Text files (UTF-8), as glob patterns, or with ``documents = "record"`` files as in ``records``; ``{stdlib}`` is the running
    Python's standard library. A pattern that begins with ``!`` takes files away again: ``!{stdlib}/site-packages/**``."""
    records: Annotated[Patterns | None, LANGUAGE, Example('["data/*.jsonl", "chat.parquet", "hf:org/name:train"]')] = (
        None
    )
    """Instruction records (docs/data.md has their shapes): glob patterns of files with JSON lines, one JSON array, or parquet; or
    "hf:org/name/config:split", a data set of the Hugging Face hub, from the local cache or fetched by rank 0. Config and split may
    be left out (the default one, "train")."""
    keys: Annotated[
        dict[RecordKey, str] | None, Example('{ prompt = "query", completion = "reply" }'), RECORD_FILES
    ] = None
    """Own names of a record's keys: ``prompt = "query"`` reads the key ``query`` as ``prompt``. Keys that can be named so: those of
    docs/data.md, and ``text`` (of ``documents = "record"``)."""
    weights: Annotated[Weights | None, Unit("shares"), Example("[3, 1]"), RECORDS] = None
    """Records: how much of an epoch comes from each entry of ``records``, relative to the others; few sequences are repeated, many
    go on in the next epoch (docs/data.md). Each entry holds out its own ``held_out``. Empty: all are one data set."""
    evaluation: Annotated[Patterns | None, LANGUAGE, Example('["evaluation/*.jsonl"]')] = None
    """Files of the same kind that measure the evaluation loss and are never trained on; then ``held_out`` does not
    apply."""
    evaluation_sets: Annotated[
        dict[SetName, Patterns] | None,
        LANGUAGE,
        Example('{ wiki = ["wiki/*.jsonl"], code = ["code/*.jsonl"] }'),
        NO_PREFERENCE,
        HELD_OUT,
    ] = None
    """Further sets of such files, by name: each has its own loss at every evaluation, beside the
    held-out loss, which alone decides about patience and the best checkpoint."""
    skip_bad: Annotated[NotNegative, Unit("records"), RECORD_FILES] = 0
    """So many records that are broken, or that the chat template refuses, are skipped and named; one more ends the job. A file
    that breaks off or cannot be read always ends it."""
    documents: Annotated[Literal["file", "line", "record"], TEXT] = "file"
    """Text: what one document is: a whole file, a non-empty line, or the ``text`` of a record in files as in ``records``."""
    template: Annotated[Literal["auto", "chat", "plain", "none"], RECORDS] = "auto"
    """Records: "chat": by the tokenizer's chat template; "plain": under the headings ``## Task`` and ``## Answer``; "auto": by the
    chat template where there is one, else plain (never of chat records); "none": a prompt with its completion right behind it."""
    train_on_prompt: Annotated[bool | Literal["chats"], RECORDS, NO_PREFERENCE] = False
    """Records: true learns the prompts too; "chats": those of ``messages`` only, as TRL does; false learns the answers only."""
    packing: Annotated[bool, LANGUAGE] = True
    """true: documents are joined (an end token between them) and cut to full sequences, records are joined whole.
    false: one document or record per sequence, cut or padded."""
    isolate: Annotated[bool | Literal["auto"], RECORDS] = "auto"
    """Records packed into one sequence do not see each other. "auto": where the model's family can do that (docs/models.md), else
    each gets a sequence; true: refused where it cannot; false: a record sees those before it, as documents always do."""
    pad: Annotated[Literal["full", "longest"], LANGUAGE] = "full"
    """Shorter sequences are padded: "full": to ``sequence_length``; "longest": to the longest one of the step, rounded up to 8
    tokens, which computes less and learns the same. Packed text has nothing to pad."""
    sequence_length: Annotated[Positive, Unit("tokens")] = 256
    """Tokens per sequence."""
    held_out: Annotated[Fraction, Unit("share")] = 0.02
    """Share of the sequences that is never trained on and measures the evaluation loss."""
    max_bytes: Annotated[Positive | None, Unit("bytes"), Example("30_000_000"), TEXT] = None
    """Text: read at most this many bytes (files in sorted order); empty: everything."""
    cache: bool = True
    """Token ids are kept in the user's cache directory on rank 0's machine, so that another start with the same data, tokenizer and
    keys tokenises nothing; `hetero_mpi cache` shows and empties it."""


class CheckpointTable(JobTable):
    """When to save."""

    every: Annotated[NotNegative | Fraction, Unit("steps or share")] = 0
    """Steps between checkpoints; 0: at the end only. Below 1: a share of the run."""
    keep: Annotated[Positive, Unit("files")] = 3
    """Newest checkpoints to keep."""
    keep_best: Annotated[NotNegative, Unit("files")] = 1
    """Checkpoints to keep beside these: those with the lowest held-out loss, of steps after which it was measured
    (``train.evaluate_every``)."""
    background: bool = True
    """Write while training goes on, from a copy in host memory (as much as a rank's trained parameters and moments);
    false: training waits."""
    replicate_every: Annotated[NotNegative | Literal["auto"], Unit("steps")] = "auto"
    """Steps between copies of the trained state in other ranks' memory (``launch --recover``) and on other hosts' disks
    (``launch --elastic``; docs/recovery.md); "auto": as few as cost at most 2 % of the time; 0: never."""
    allow_other_data: bool = False
    """May a run be resumed with other data than it was written with? The order of samples then starts afresh at that step."""


class OutputTable(JobTable):
    """Where results go."""

    run_dir: str = "runs/{name}"
    """Run directory, relative to the working directory; ``{name}`` is the job file's name without ``.toml``."""
    shard_bytes: Annotated[Positive, Unit("bytes")] = 1_000_000_000
    """Largest safetensors file of the model directory, in bytes; also bounds rank 0's memory while it is written."""


class SampleTable(JobTable):
    """A text that the trained model writes at the end of a run, to be looked at; also kept in the run directory."""

    prompt: Annotated[str | None, LANGUAGE, Example('"def main("')] = None
    """Its beginning (for a job with records: what is asked). Empty: no sample."""
    max_new_tokens: Annotated[Positive, Unit("tokens")] = 64
    """Tokens to write at most."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 always takes the most likely token; 1 draws by the model's own probabilities, seeded by ``train.seed``."""
    top_p: Annotated[float, Field(gt=0, le=1), Unit("share")] = 1.0
    """Draw from the fewest tokens that together have this probability."""


class PlanTable(JobTable):
    """Choices that are left to the planner."""

    allow_idle: bool = True
    """May ranks be left out when that is faster?"""
    thorough: bool = False
    """Look for the fastest plan for seconds to minutes instead of a second or so before the first step, for steps that are mostly
    less than 1 % shorter. Plans in the middle of a run are found quickly all the same."""
    memory_reserve: Annotated[Fraction, Unit("share")] = 0.05
    """Share of every rank's usable memory to keep free."""
    schedule: ScheduleName = "auto"
    """Order of forwards and backwards. "gpipe": all forwards, then all backwards; "1f1b": in turn, after as many forwards as
    stages follow; "split": 1f1b with the gradients of the weights put off (needs training of all weights); "auto": depths and
    splitting as the planner finds best. For several stages per rank: "interleaved", "zbv", "dualpipev"."""
    stages_per_rank: Annotated[Positive, Unit("stages")] = 4
    """Stages that a rank may hold, at most, where a step gets 2 % shorter by it. A ``schedule`` for several stages takes at least
    2."""
    groups: bool = True
    """May ranks of one host hold a stage together, each a share of its layers (tensor parallelism), where a step gets 2 % shorter
    by it or nothing fits otherwise? For language models of transformers without dropout; ``schedule`` is "auto"."""
    pipelines: Annotated[Positive | Literal["auto"], Unit("pipelines")] = "auto"
    """Pipelines that may hold the model side by side, at most, and share the global batch; "auto": as many as help."""
    stream: bool | Literal["auto"] = "auto"
    """Stream weights from host memory (or disk), layer by layer, so that a stage may hold more than its device has room for
    (docs/offloading.md). "auto": where nothing fits otherwise, or a step gets 2 % shorter; true: wherever it gets shorter; false:
    never."""
    rebalance: bool = True
    """Move layers between ranks while the run goes on, when their speeds change and a step would become 5 % shorter at least
    (docs/recovery.md). Not with ``--plan``."""


class ProfileTable(JobTable):
    """How the machines are measured."""

    path: Annotated[str | None, Example('"profiles/homelab.toml"')] = None
    """Use this profile, a file or the name of a shipped one, instead of measuring (as ``--profile``). It must exist."""
    save_as: Annotated[str | None, Example('"profiles/homelab.toml"'), OnlyIf("cluster.emulate is empty")] = None
    """Write what is measured to this file, too, for other jobs to name as their ``path``. An absolute path may be anywhere."""
    reuse: bool = True
    """Reuse the profile in the run directory when its key matches; ``--reprofile`` measures again all the same."""
    cache: bool = True
    """Keep what each device was measured to do in ``~/.cache/hetero_mpi/profiles`` of its host (or ``$XDG_CACHE_HOME``), so that
    only new ranks are measured when the cluster changes. Links and free memory are always measured."""
    repeats: Annotated[Positive, Unit("times")] = 5
    """Timed repetitions of each measurement, fewer where they are long."""
    largest_message_bytes: Annotated[int, Field(ge=1024), Unit("bytes")] = 16_777_216
    """Links are measured with messages of 1 KiB up to this, each four times as large as the one before."""
    trial: bool | Literal["auto"] = "auto"
    """Run a few steps with made-up weights first: what does not fit is found, the profile is corrected, perhaps another plan taken
    (docs/planning.md). "auto": where it takes at most 5 % of the run (15 % of one over a minute), but not of one rank, with a
    profile of another machine, or where a run goes on with a plan that it has tried; true: whatever it takes; false: never."""


class ClusterTable(JobTable):
    """The ranks."""

    emulate: Annotated[str | None, LANGUAGE, Example('"homelab-5090-strix-halo"')] = None
    """Profile (a file, or the name of a shipped one) whose devices and links the ranks imitate, a rank each; the job's model
    stands in for the profile's (docs/emulated.md)."""
    time_scale: Annotated[AboveZero, Unit("s per s"), EMULATED] = 1.0
    """Emulation: seconds that a second of the emulated cluster takes here; above 1 where the stand-in is too slow."""
    emulate_first: Annotated[bool, EMULATED] = False
    """Emulation: may fewer ranks than the profile has imitate its first ones?"""
    emulate_changes: Annotated[list[str], EMULATED] = []
    """Emulation: devices that change their speed, such as "rank 1 runs at 0.34 from step 20" (of the profile's speed; the first
    step is 1) and "rank 1 runs at 1 from step 60"."""
    device: DeviceName = "auto"
    """Device of every rank; "auto": the local rank's accelerator where there is one, else the CPU."""
    threads: Annotated[Positive | Literal["auto"], Unit("threads")] = "auto"
    """CPU threads per rank; "auto": the host's cores, or a control group's quota of them, divided by its ranks, of which those with
    a GPU leave all but two to those without."""
    memory_bytes: Annotated[Positive | None, Unit("bytes"), Example("8_000_000_000")] = None
    """Usable memory per rank, instead of the measured one. What streamed stages of GPUs keep in their host's memory is not part of
    it."""
    watchdog_s: Annotated[Annotated[float, Field(ge=0)] | Literal["auto"], Unit("s")] = "auto"
    """Seconds without progress of any rank, after which the job ends and says where each stands; "auto": 20 predicted steps and at
    least 60 s; 0: never. Needs ``communication_thread``."""
    communication_thread: bool = True
    """Move messages from a thread of their own, so that they overlap with computing; false: single-threaded, for
    debugging."""

    def speed_changes(self) -> list[tuple[int, int, float]]:
        """``emulate_changes`` as (rank, number of the step from 0, share of the profile's speed)."""
        return [change for text in self.emulate_changes if (change := speed_change(text)) is not None]


class ReportTable(JobTable):
    """Files that a run leaves to be looked at."""

    write: bool = True
    """Write ``architecture.png`` and ``.svg`` before the first step, ``report.html`` and ``trace.json`` after the last one.
    The command ``report`` writes the report of any run at any time."""
    watch: bool | Annotated[int, Field(ge=0, lt=2**16)] = False
    """Serve the live page of the run on rank 0's machine, to its user: true, on port 8642, or where that is taken any; or on this
    port. ``watch RUN`` serves the page of any run."""
    trackers: list[TrackerName] = []
    """Programs that get the metrics, too, on rank 0: "tensorboard" (event files in ``tensorboard/`` of the run directory),
    "trackio", "wandb". Each needs the package of its name; their own environment variables (such as ``WANDB_MODE``) hold."""


class JobConfig(JobTable):
    """A whole job file."""

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


TABLES: dict[str, type[JobTable]] = {
    name: field.annotation
    for name, field in JobConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, JobTable)
}
"""Table name -> its model, in the order of the job file."""
