"""The tables of a job file that models and engine read: ``[adapter]`` and ``[train]``. The others are in ``schema``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from hetero_mpi import objectives

Name = Annotated[str, Field(min_length=1)]
if TYPE_CHECKING:
    PreferenceName = str
else:
    PreferenceName = Literal[("none",) + objectives.names()]  # noqa: RUF005  Python 3.10 knows no star here
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
AboveZero = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiled), Field(description="a regular expression")]


class Unit(str):
    """Metadata of a field (``rules.facts``): what its number counts."""


class Example(str):
    """Metadata of a field without a default: a value, as TOML."""


class OnlyIf(str):
    """Metadata of a field: a condition without which the key has no effect, and any value but the default is refused:
    ``KEY is set``, ``KEY is empty``, ``KEY = "a" or "b"``, ``KEY is not 0``, or some of these joined by "or" or by "and"."""


class OnResume(str):
    """Metadata of a field: what a run does that is resumed with another value. "same": it is refused; "reported": it says so;
    "rate": it warns where the learning rate jumps; "rates": the same, of the rates of some parameters."""


LANGUAGE = OnlyIf("model.factory is empty")
ADAPTER = OnlyIf('adapter.method = "lora"')
NEW_ADAPTER = OnlyIf("adapter.path is empty and adapter.parameters = [] and adapter.dora = false")
RECORDS = OnlyIf("data.records is set")
NO_PREFERENCE = OnlyIf('train.preference = "none"')
HELD_OUT = OnlyIf("data.held_out is not 0 or data.evaluation is set")
STABLE = OnlyIf('train.schedule = "warmup_stable_decay"')
MOMENTS = OnlyIf('train.optimizer is not "adafactor"')
SAME, REPORTED, RATE, RATES = map(OnResume, ("same", "reported", "rate", "rates"))


class JobTable(BaseModel):
    """A table of the job file: unknown keys are refused, values are not coerced silently."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # ``model.config`` may hold any values, and all ranks must see the same
    )


class AdapterTable(JobTable):
    """LoRA: small trained tensors beside frozen weights."""

    method: Annotated[Literal["none", "lora"], LANGUAGE] = "none"
    """"none" trains the model's own weights; "lora" trains adapters and writes a PEFT adapter directory."""
    path: Annotated[str | None, LANGUAGE, Example('"runs/first/adapter"')] = None
    """PEFT adapter directory to start from, with the same rank, alpha and targets; empty: a new adapter."""
    start: Annotated[str, ADAPTER, NEW_ADAPTER, SAME] = "default"
    """What a new adapter begins with, as peft has it: "default": nothing; "pissa": the weights' largest singular values (Meng et
    al., 2024), "pissa_niter_4": nearly these, in seconds instead of minutes; "olora": a QR decomposition (Büyükakyüz, 2024). It
    learns beside what is left of the weights, and is written for the weights as they were, with twice the rank."""
    rank: Positive = 16
    """Width of the adapters (r)."""
    alpha: Annotated[AboveZero, SAME] = 32.0
    """Scale of the adapters: their output counts alpha / rank."""
    rslora: Annotated[bool, SAME] = False
    """Scale by alpha / sqrt(rank) (rsLoRA, Kalajdzievski, 2023): higher ranks then learn as fast as lower ones."""
    dora: Annotated[bool, OnlyIf("adapter.parameters = []")] = False
    """Train the length of each output's weights apart from their direction (DoRA, Liu et al., 2024): closer to training of all
    weights, in a longer step."""
    dropout: Annotated[Fraction, Unit("share")] = 0.0
    """Dropout before the adapters."""
    targets: Literal["all-linear", "family"] | list[str] = "all-linear"
    """Linear layers inside the blocks that get an adapter, by name such as ["q_proj", "v_proj"], or "all-linear"; "family": those
    that peft takes for the model's family where none are named."""
    parameters: Annotated[list[str], OnlyIf("adapter.dropout = 0")] = []
    """Fused experts that get an adapter, such as ["experts.gate_up_proj", "experts.down_proj"] (peft's ``target_parameters``)."""
    layers: Annotated[Annotated[list[NotNegative], Field(min_length=1)] | None, Unit("blocks"), Example("[2, 3]")] = (
        None
    )
    """Blocks, counted from 0, whose linear layers get an adapter (peft's ``layers_to_transform``). Empty: those of the adapter in
    ``path``, or all."""
    rank_pattern: Annotated[dict[Pattern, Positive] | None, Example("{ down_proj = 32 }")] = None
    """Other ranks for some layers: the end of a layer's name, or a regular expression -> rank. Empty: those of the adapter in
    ``path``, or none."""
    alpha_pattern: Annotated[dict[Pattern, AboveZero] | None, Example("{ down_proj = 64.0 }"), SAME] = None
    """Other alphas for some layers, as ``rank_pattern``."""
    modules_to_save: Annotated[list[Name] | None, Example('["embed_tokens", "lm_head"]'), ADAPTER] = None
    """Modules that are trained whole beside the adapters, by the ends of their names, such as ["embed_tokens", "lm_head"] (peft's
    key of that name; docs/models.md). Empty: those of the adapter in ``path``, or none."""
    tokens: Annotated[list[NotNegative | str] | None, Example('["<tool>"]'), ADAPTER, SAME] = None
    """Tokens, or their ids, whose rows of embedding and head are trained beside the adapters, where these are not trained whole
    (peft's ``trainable_token_indices``). Empty: those of the adapter in ``path``, or those that ``[tokenizer]`` adds."""
    tokens_in: Annotated[Literal["both", "embedding", "head"] | None, Example('"embedding"'), ADAPTER] = None
    """Where: "both" by default; a tied model has one matrix. Empty: as the adapter in ``path`` has it."""


class TrainTable(JobTable):
    """How to learn."""

    steps: Annotated[Positive, Unit("steps"), OnlyIf("train.epochs is empty"), RATE] = 100
    """Optimizer steps."""
    epochs: Annotated[AboveZero | None, Unit("epochs"), Example("3")] = None
    """Passes over the training sequences, in place of ``steps``; the last step is the one in which the last pass ends."""
    patience: Annotated[NotNegative, Unit("evaluations"), OnlyIf("train.evaluate_every is not 0"), HELD_OUT] = 0
    """Training ends after so many evaluations in a row without a lower held-out loss; 0: never. A checkpoint is written after each
    evaluation with the lowest loss so far, for ``export --best``."""
    global_batch: Annotated[Positive, Unit("sequences"), SAME] = 8
    """Sequences per optimizer step, over all ranks; at most 8192 micro-batches."""
    last_batch: Annotated[Literal["full", "smaller"], SAME] = "full"
    """Where an epoch leaves fewer sequences than ``global_batch``: "full": a step goes on with the next epoch's; "smaller": it has
    what is left, as transformers' Trainer has it."""
    micro_batch: Annotated[Positive | Literal["auto"], Unit("sequences")] = "auto"
    """Sequences per micro-batch; must divide ``global_batch``. "auto": the planner chooses; with dropout it is the largest divisor
    up to a quarter of the batch."""
    preference: Annotated[PreferenceName, RECORDS, SAME] = "none"
    """Learn from pairs of answers, or from single ones with a label ("kto"); docs/preferences.md has the formulas. All but
    "simpo" and "orpo" compare with the model as it is when the run begins."""
    preference_beta: Annotated[AboveZero, REPORTED] = 0.1
    """orpo: its weight; simpo (2 and more are usual): scale of the comparison; others: how closely the model stays with what
    the run begins with."""
    preference_smoothing: Annotated[float, Field(ge=0, lt=0.5), Unit("share"), REPORTED] = 0.0
    """Share of the pairs that are taken to be the wrong way round (conservative DPO)."""
    preference_margin: Annotated[float, Field(ge=0), REPORTED] = 0.5
    """simpo: by how much the chosen answer is to have the higher reward (gamma)."""
    desirable_weight: Annotated[AboveZero, REPORTED] = 1.0
    """kto: factor of the loss of desirable answers."""
    undesirable_weight: Annotated[AboveZero, REPORTED] = 1.0
    """kto: factor of the loss of the others."""
    seed: Annotated[Seed, SAME] = 0
    """Seed of initial weights, order of samples and dropout."""
    dtype: Annotated[Literal["auto", "fp32", "bf16", "fp16"], SAME] = "auto"
    """Compute dtype of the whole job; "auto": the best all ranks can do. Narrow ones keep fp32 masters, gradients, moments."""
    wire: Annotated[Literal["exact", "int8"], LANGUAGE] = "exact"
    """How activations and gradients travel from stage to stage. "exact": as they are computed; "int8": a byte for each number: the
    loss then depends on where the plan cuts the model, and is not that of one process (docs/reproducibility.md)."""
    recompute: bool | Literal["auto"] = "auto"
    """Compute a block's forward again in backward instead of keeping its activations; "auto": where memory is short."""
    optimizer: Annotated[Literal["adamw", "adamw_8bit", "adafactor", "muon"], SAME] = "adamw"
    """"adamw": both moments in fp32, 8 bytes of a parameter; "adamw_8bit": bitsandbytes' AdamW, 2 bytes; "adafactor":
    transformers', hardly any; "muon": torch's for matrices in blocks, 4 bytes, AdamW for the others (docs/optimizers.md)."""
    learning_rate: Annotated[AboveZero, RATE] = 3e-4
    """Peak learning rate."""
    learning_rates: Annotated[dict[Pattern, AboveZero] | None, Example("{ embed_tokens = 1e-5 }"), RATES] = None
    """Peak learning rates of some parameters: a regular expression that is found in a parameter's name -> rate; the first one
    counts."""
    lora_plus_ratio: Annotated[float, Field(ge=1), ADAPTER, RATES] = 1.0
    """Learning rate of an adapter's B (and of DoRA's lengths) by that of its A (LoRA+, Hayou et al., 2024)."""
    freeze: Annotated[list[NotNegative | Pattern], Unit("blocks"), OnlyIf('adapter.method = "none"'), SAME] = []
    """What is not trained where no adapter is: blocks by number, counted from 0, and parameters by regular expressions that are
    found in their names. They have neither gradients nor masters nor moments."""
    neftune_noise_alpha: Annotated[AboveZero | None, LANGUAGE, Example("5.0"), REPORTED] = None
    """Uniform noise on the embeddings in training, up to this by the root of (tokens x width) of a sequence (NEFTune, Jain et al.,
    2023)."""
    schedule: Annotated[
        Literal["cosine", "linear", "constant", "warmup_stable_decay", "cosine_with_restarts"], RATE
    ] = "cosine"
    """Learning rate after warm-up, as transformers has it under these names: down in a half cosine or a line; constant;
    "warmup_stable_decay": constant, and down in the last ``decay_steps``; "cosine_with_restarts": ``cycles`` half cosines."""
    warmup_steps: Annotated[NotNegative | Fraction, Unit("steps or share"), RATE] = 0
    """Optimizer steps of linear warm-up from 0 (of "warmup_stable_decay": from the minimum). Below 1: a share of the run."""
    max_warmup_steps: Annotated[Positive | None, Unit("steps"), Example("100"), RATE] = None
    """Longest warm-up, where ``warmup_steps`` is a share of the run; empty: no limit."""
    min_learning_rate_ratio: Annotated[Fraction, Unit("share"), OnlyIf('train.schedule is not "constant"'), RATE] = 0.0
    """The schedule ends at this share of the learning rate instead of 0."""
    decay_steps: Annotated[Positive | Annotated[float, Field(gt=0, lt=1)], Unit("steps or share"), STABLE, RATE] = 0.2
    """Last steps, in which the learning rate falls; at most those after warm-up. Below 1: a share of the run."""
    decay: Annotated[Literal["cosine", "linear", "1-sqrt"], STABLE, RATE] = "cosine"
    """How it falls in ``decay_steps``: in a half cosine, in a line, or as 1 less the square root of their share that is done."""
    cycles: Annotated[Positive, Unit("cycles"), OnlyIf('train.schedule = "cosine_with_restarts"'), RATE] = 1
    """Half cosines, each from the whole learning rate."""
    weight_decay: Annotated[float, Field(ge=0), REPORTED] = 0.1
    """Decoupled weight decay of all but biases and norms, as transformers' Trainer has it; in a model of your own, of parameters of
    two dimensions and more that are not called a bias."""
    beta1: Annotated[Fraction, MOMENTS, REPORTED] = 0.9
    """AdamW: decay of the first moment."""
    beta2: Annotated[Fraction, MOMENTS, REPORTED] = 0.95
    """AdamW: decay of the second moment."""
    epsilon: Annotated[AboveZero, MOMENTS, REPORTED] = 1e-8
    """AdamW: added to the denominator."""
    dropout: Annotated[bool, LANGUAGE, REPORTED] = True
    """Dropout of the model's own layers, at the rates of its ``config.json``; false: none."""
    clip_norm: Annotated[AboveZero | None, REPORTED] = 1.0
    """Gradients are scaled down to this global norm; empty: never."""
    evaluate_every: Annotated[NotNegative | Fraction, Unit("steps or share")] = 0
    """Steps between evaluations on the held-out share; 0: at the end only. Below 1: a share of the run."""
    evaluate_sequences: Annotated[Positive, Unit("sequences")] = 64
    """Held-out sequences per evaluation, at most."""
