"""The job file tables that the models and the engine read, ``[adapter]`` and ``[train]``; ``schema`` defines the others."""

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


def _checked_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_checked_pattern), Field(description="a regular expression")]


class Unit(str):
    """Field metadata (``rules.field_metadata``): the unit of a numeric key."""


class Example(str):
    """Field metadata: an example value, in TOML, of a key without a default."""


class OnlyIf(str):
    """Field metadata: the condition under which the key has an effect; otherwise only its default is accepted.

    Its form is ``KEY is set``, ``KEY is empty``, ``KEY = "a" or "b"``, ``KEY is not 0``, or several joined by "or" or "and".
    """


class OnResume(str):
    """Field metadata: how a resumed run handles a changed value of the key.

    "same", "shapes" (which tensors show): reject it; "reported": log it; "rate": warn if the learning rate jumps; "rates": warn if
    it does for some parameters.
    """


LANGUAGE = OnlyIf("model.factory is empty")
ADAPTER = OnlyIf('adapter.method = "lora"')
NEW_ADAPTER = OnlyIf("adapter.path is empty and adapter.parameters = [] and adapter.dora = false")
RECORDS = OnlyIf("data.records is set")
NO_PREFERENCE = OnlyIf('train.preference = "none"')
EVALUATED = OnlyIf("data.evaluation_fraction is not 0 or data.evaluation is set")
STABLE = OnlyIf('train.schedule = "warmup_stable_decay"')
MOMENTS = OnlyIf('train.optimizer is not "adafactor"')
SAME, SHAPES, REPORTED, RATE, RATES = map(OnResume, ("same", "shapes", "reported", "rate", "rates"))


class JobTable(BaseModel):
    """A table of the job file: rejects unknown keys and never coerces values."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # ``model.config`` may hold any values, and all ranks must see the same
    )


class AdapterTable(JobTable):
    """LoRA fine-tuning: small trainable adapters on top of frozen weights."""

    method: Annotated[Literal["none", "lora"], LANGUAGE, SHAPES] = "none"
    """"none": full fine-tuning, or training from scratch; "lora": train LoRA adapters and write a PEFT adapter directory."""
    path: Annotated[str | None, LANGUAGE, Example('"runs/first/adapter"')] = None
    """PEFT adapter directory to continue from; its rank, alpha and targets must match. Empty: train a new adapter."""
    start: Annotated[str, ADAPTER, NEW_ADAPTER, SAME] = "default"
    """Initialisation of a new adapter, as in peft. "default": zero change; "pissa": principal singular values of the weights (Meng
    et al., 2024); "pissa_niter_4": the same by fast SVD with 4 iterations; "olora": QR decomposition (Büyükakyüz, 2024). All but
    "default" subtract the initial adapter from the base weights and save an adapter of twice the rank that fits the original
    weights."""
    rank: Annotated[Positive, SHAPES] = 16
    """LoRA rank (r): inner dimension of the adapters."""
    alpha: Annotated[AboveZero, SAME] = 32.0
    """LoRA alpha: adapter outputs are scaled by alpha / rank."""
    rslora: Annotated[bool, SAME] = False
    """Rank-stabilised LoRA: scale by alpha / sqrt(rank), so that high ranks learn as fast as low ranks (Kalajdzievski, 2023)."""
    dora: Annotated[bool, OnlyIf("adapter.parameters = []"), SHAPES] = False
    """DoRA: train the magnitude and direction of weights separately (Liu et al., 2024), which is closer to full fine-tuning but
    slower."""
    dropout: Annotated[Fraction, Unit("share")] = 0.0
    """Dropout probability on the adapters' inputs."""
    targets: Annotated[Literal["all-linear", "family"] | list[str], SHAPES] = "all-linear"
    """Target modules: names of the linear layers in blocks that get an adapter, such as ["q_proj", "v_proj"]. "all-linear": all
    linear layers; "family": peft's default for the model family."""
    parameters: Annotated[list[str], OnlyIf("adapter.dropout = 0"), SHAPES] = []
    """Fused expert weights that get an adapter, such as ["experts.gate_up_proj", "experts.down_proj"] (peft's
    ``target_parameters``)."""
    layers: Annotated[
        Annotated[list[NotNegative], Field(min_length=1)] | None, Unit("blocks"), Example("[2, 3]"), SHAPES
    ] = None
    """Blocks, counted from 0, whose linear layers get an adapter (peft's ``layers_to_transform``). Empty: the blocks of the adapter
    in ``path``, or all blocks."""
    rank_pattern: Annotated[dict[Pattern, Positive] | None, Example("{ down_proj = 32 }"), SHAPES] = None
    """Per-layer ranks: a table that maps suffixes of layer names, or regular expressions, to ranks. Empty: the pattern of the
    adapter in ``path``, or none."""
    alpha_pattern: Annotated[dict[Pattern, AboveZero] | None, Example("{ down_proj = 64.0 }"), SAME] = None
    """Per-layer alphas, in the same form as ``rank_pattern``."""
    modules_to_save: Annotated[list[Name] | None, Example('["embed_tokens", "lm_head"]'), ADAPTER, SHAPES] = None
    """Name suffixes of the modules to fully fine-tune and save along with the adapters (peft's ``modules_to_save``;
    docs/models.md). Empty: the modules of the adapter in ``path``, or none."""
    tokens: Annotated[list[NotNegative | str] | None, Example('["<tool>"]'), ADAPTER, SAME] = None
    """Tokens, or token ids, whose embedding and LM head rows are trained along with the adapters (peft's
    ``trainable_token_indices``). Empty: the tokens of the adapter in ``path``, or the tokens that ``[tokenizer]`` adds. Matrices in
    ``modules_to_save`` are trained in full anyway."""
    tokens_in: Annotated[Literal["both", "embedding", "head"] | None, Example('"embedding"'), ADAPTER, SHAPES] = None
    """Matrices in which the rows of ``tokens`` are trained. Empty: as in the adapter in ``path``, or "both". With tied embeddings,
    there is only one matrix."""


class TrainTable(JobTable):
    """Optimizer, schedule, batch size and objective."""

    steps: Annotated[Positive, Unit("steps"), OnlyIf("train.epochs is empty"), RATE] = 100
    """Number of optimizer steps."""
    epochs: Annotated[AboveZero | None, Unit("epochs"), Example("3")] = None
    """Number of passes over the training sequences, instead of ``steps``."""
    early_stopping_patience: Annotated[
        NotNegative, Unit("evaluations"), OnlyIf("train.evaluate_every is not 0"), EVALUATED
    ] = 0
    """Early stopping: stop after this many consecutive evaluations without a lower evaluation loss; 0: off. A checkpoint is also
    written at each new lowest loss, for ``export --best``."""
    global_batch: Annotated[Positive, Unit("sequences"), SAME] = 8
    """Global batch size: sequences per optimizer step over all ranks, in at most 8192 micro-batches."""
    last_batch: Annotated[Literal["full", "smaller"], SAME] = "full"
    """What to do if fewer than ``global_batch`` sequences are left in an epoch. "full": fill the batch with sequences of the next
    epoch; "smaller": train on a smaller batch, as transformers' Trainer does."""
    micro_batch: Annotated[Positive | Literal["auto"], Unit("sequences")] = "auto"
    """Micro-batch size in sequences; must divide ``global_batch``. "auto": chosen by the planner, or with dropout the largest
    divisor up to a quarter of the batch."""
    preference: Annotated[PreferenceName, RECORDS, SAME] = "none"
    """Preference objective: learn from pairs of chosen and rejected answers, or from single labelled answers ("kto");
    docs/preferences.md has the formulas."""
    preference_beta: Annotated[AboveZero, REPORTED] = 0.1
    """Beta. orpo: weight of the odds-ratio term; simpo: scale of the reward (usually 2 or more); other objectives: how strongly
    the model is pulled towards the reference model."""
    preference_smoothing: Annotated[float, Field(ge=0, lt=0.5), Unit("share"), REPORTED] = 0.0
    """Label smoothing: assumed fraction of pairs with swapped labels (conservative DPO)."""
    preference_margin: Annotated[float, Field(ge=0), REPORTED] = 0.5
    """simpo: target margin (gamma) between the rewards of the chosen and the rejected answer."""
    desirable_weight: Annotated[AboveZero, REPORTED] = 1.0
    """kto: weight of desirable answers in the loss."""
    undesirable_weight: Annotated[AboveZero, REPORTED] = 1.0
    """kto: weight of undesirable answers in the loss."""
    seed: Annotated[Seed, SAME] = 0
    """Random seed for weight initialisation, sample order and dropout."""
    dtype: Annotated[Literal["auto", "fp32", "bf16", "fp16"], SAME] = "auto"
    """Compute dtype of all ranks (mixed precision). "auto": bf16 if there are GPUs (fp16 if a GPU lacks bf16), fp32 if there are
    only CPUs. With bf16 and fp16, master weights, gradients and optimizer states stay in fp32."""
    wire: Annotated[Literal["exact", "int8"], LANGUAGE] = "exact"
    """Encoding of activations and gradients sent between stages. "exact": the compute dtype; "int8": quantised to one byte per
    value, which makes the loss depend on the stage boundaries (docs/reproducibility.md)."""
    recompute: bool | Literal["auto"] = "auto"
    """Activation checkpointing: recompute a block's forward during backward instead of storing its activations. "auto": only in
    stages that would otherwise exceed their memory budget."""
    compile: Annotated[bool | Literal["auto", "accelerators"], REPORTED] = "auto"
    """Compile each block with torch.compile (docs/performance.md). "accelerators": on CUDA, ROCm and XPU devices; "auto": on those
    devices, if compiled blocks are faster in a trial; true: on CPUs too, where compiling takes long and gains little."""
    optimizer: Annotated[Literal["adamw", "adamw_8bit", "adafactor", "muon"], SAME] = "adamw"
    """"adamw": optimizer states in fp32, 8 bytes per parameter; "adamw_8bit": bitsandbytes' AdamW with 8-bit optimizer states, 2
    bytes; "adafactor": transformers' Adafactor, close to 0 bytes; "muon": torch's Muon for the matrices of blocks, 4 bytes, and
    AdamW for other parameters (docs/optimizers.md)."""
    learning_rate: Annotated[AboveZero, RATE] = 3e-4
    """Peak learning rate."""
    learning_rates: Annotated[dict[Pattern, AboveZero] | None, Example("{ embed_tokens = 1e-5 }"), RATES] = None
    """Per-parameter peak learning rates: a table of regular expressions for parameter names -> rates; the first match applies."""
    lora_plus_ratio: Annotated[float, Field(ge=1), ADAPTER, RATES] = 1.0
    """LoRA+: ratio of the learning rate of B matrices (and DoRA magnitudes) to that of A matrices (Hayou et al., 2024)."""
    freeze: Annotated[list[NotNegative | Pattern], Unit("blocks"), OnlyIf('adapter.method = "none"'), SAME] = []
    """What to freeze in full fine-tuning: blocks, by number from 0, and parameters, by regular expressions found in their names.
    Frozen parameters have no gradients, master weights or optimizer states."""
    neftune_noise_alpha: Annotated[AboveZero | None, LANGUAGE, Example("5.0"), REPORTED] = None
    """NEFTune: add uniform noise of magnitude alpha / sqrt(tokens x hidden size) to the embeddings during training (Jain et al.,
    2023)."""
    schedule: Annotated[
        Literal["cosine", "linear", "constant", "warmup_stable_decay", "cosine_with_restarts"], RATE
    ] = "cosine"
    """Learning rate schedule after warm-up, as in transformers. "cosine", "linear": decay until the end; "constant": no decay;
    "warmup_stable_decay" (WSD): constant, then decay over the last ``decay_steps``; "cosine_with_restarts": ``cycles`` cosine
    decays."""
    warmup_steps: Annotated[NotNegative | Fraction, Unit("steps or share"), RATE] = 0
    """Steps of linear warm-up from 0 ("warmup_stable_decay": from the minimum rate), or a fraction of the run if below 1."""
    max_warmup_steps: Annotated[Positive | None, Unit("steps"), Example("100"), RATE] = None
    """Maximum number of warm-up steps if ``warmup_steps`` is a fraction of the run. Empty: no limit."""
    min_learning_rate_ratio: Annotated[Fraction, Unit("share"), OnlyIf('train.schedule is not "constant"'), RATE] = 0.0
    """Minimum learning rate, reached at the end of the schedule, as a fraction of ``learning_rate``."""
    decay_steps: Annotated[Positive | Annotated[float, Field(gt=0, lt=1)], Unit("steps or share"), STABLE, RATE] = 0.2
    """Length of the final decay in steps (at most those after warm-up), or a fraction of the run if below 1."""
    decay: Annotated[Literal["cosine", "linear", "1-sqrt"], STABLE, RATE] = "cosine"
    """Shape of the final decay: cosine, linear, or 1 - sqrt(fraction of ``decay_steps`` completed)."""
    cycles: Annotated[Positive, Unit("cycles"), OnlyIf('train.schedule = "cosine_with_restarts"'), RATE] = 1
    """Number of cosine decays, each starting at the peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0), REPORTED] = 0.1
    """Decoupled weight decay. It applies to all parameters except biases and norms, as in transformers' Trainer; in a custom model,
    to parameters with two or more dimensions that are not named bias."""
    beta1: Annotated[Fraction, MOMENTS, REPORTED] = 0.9
    """AdamW beta1: decay of the first moment."""
    beta2: Annotated[Fraction, MOMENTS, REPORTED] = 0.95
    """AdamW beta2: decay of the second moment."""
    epsilon: Annotated[AboveZero, MOMENTS, REPORTED] = 1e-8
    """AdamW epsilon: added to the denominator."""
    dropout: Annotated[bool, LANGUAGE, REPORTED] = True
    """Apply the model's own dropout layers, with the probabilities in its ``config.json``."""
    clip_norm: Annotated[AboveZero | None, REPORTED] = 1.0
    """Gradient clipping: maximum global norm; empty: no clipping."""
    evaluate_every: Annotated[NotNegative | Fraction, Unit("steps or share")] = 0
    """Steps between evaluations on the evaluation set, or a fraction of the run if below 1. 0: evaluate only at the end."""
    evaluate_sequences: Annotated[Positive, Unit("sequences")] = 64
    """Maximum number of sequences per evaluation."""
