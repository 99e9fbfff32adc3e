"""The cases of the equality tests, and the files that their jobs are made of.

Their plans are in ``case_plans.py``, the plain loop that they are held against in ``plain_training.py``.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_mpi.data.tokenizer import save_tokenizer, train_bpe
from tests.support.family_configs import tiny_keys

STEPS, GLOBAL_BATCH, SEQUENCE, BLOCKS, SEED = 3, 8, 24, 4, 7
LAYERS = BLOCKS + 2
CLIP_NORM = 0.5
GROUPED = ("group", "groups")
LORA = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
PATTERNS = {
    "layers_to_transform": [1, 2, 3],
    "rank_pattern": {"down_proj": 8, r"layers\.[23]\..*\.q_proj": 2},
    "alpha_pattern": {"v_proj": 32, "nothing": 1},
}
TOKENS = [0, 72, 90, 300]
"""The end, which is also padding, some of the corpus, and one that never occurs."""
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TRAIN = {
    "steps": STEPS,
    "global_batch": GLOBAL_BATCH,
    "seed": SEED,
    "learning_rate": 3e-3,
    "schedule": "cosine",
    "warmup_steps": 1,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "clip_norm": CLIP_NORM,
}
KEYS: dict[str, dict[str, object]] = {
    "frozen": {"freeze": [0, 2, "embed_tokens", "layers.3.*norm"]},
    "rates": {"learning_rates": {"q_proj": 1e-3, "_proj|lm_head": 2e-3}},
    "plus": {"lora_plus_ratio": 16.0},
    "noise": {"neftune_noise_alpha": 5.0},
}
"""Further keys of ``[train]``, by what they do."""


@dataclass(frozen=True)
class Case:
    """One way to train: a model, how its data is cut, and how it is split."""

    name: str
    family: str
    tied: bool = False
    dropout: float = 0.0
    packing: bool = True
    """False: one document per sequence, so the targets of the sequences are of very unequal length."""
    micro_batch: int = 2
    split: str = "even"
    """``even``, ``uneven``, ``ends`` (embedding and head alone), ``reversed`` (rank 0 last), ``planner``; or with several stages
    per rank ``looped`` or ``V``."""
    reference_micro_batch: int = 0
    """Micro-batch of the reference where it is to differ; 0: the same."""
    tuning: str = "full"
    """``full``, one of ``STARTS`` (LoRA that begins so), ``lora``, ``rslora``, ``patterns`` (rsLoRA with ranks and alphas of its
    own on some layers, and none in the first block), ``dora``, ``nf4`` (LoRA over 4-bit weights) or ``nf4-dora``; ``tokens`` or
    ``saved`` in it (``lora-saved``): and rows of some tokens, or both ends and the norms of the model."""
    recompute: bool = False
    dtype: str = "fp32"
    pipelines: str = "one"
    """``one`` (cut as ``split`` says), ``each`` (every rank is one), ``two`` (unlike cuts), or ``tail`` (the last rank alone); or
    one whose stages groups of ranks hold: ``group`` (all ranks the whole chain), ``groups`` (two ranks a stage)."""
    shares: str = "whole"
    """Of the batch: ``whole`` (all pipelines have micro-batches of ``micro_batch``), or ``unequal`` (and unlike micro-batches)."""
    schedule: str = "1f1b"
    """``1f1b``, ``gpipe`` or ``split`` (1F1B with split backward); of several stages per rank a name of ``INTERLEAVINGS``."""
    changing: bool = False
    """Batches are short and of changing length (``changed``)."""
    streamed: bool = False
    """Every other stage of a pipeline, beginning with the first, is streamed."""
    slice_sequences: int | None = None
    """Of all stages' slices."""
    optimizer: str = "adamw"
    routers: bool = False
    """The model's routers have a loss."""
    further: tuple[str, ...] = ()
    """Names of ``KEYS``."""

    @property
    def train(self) -> dict[str, object]:
        """Further keys of ``[train]``."""
        return {key: value for name in self.further for key, value in KEYS[name].items()}

    @property
    def config(self) -> dict[str, object]:
        keys = {
            "model_type": self.family,
            "vocab_size": 320,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": BLOCKS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "initializer_range": 0.2,  # large enough that every gradient is far from rounding noise
        }
        if self.optimizer == "adamw_8bit":
            keys |= {"intermediate_size": 200}  # matrices of 4096 numbers and more, with a last block that is not whole
        if self.pipelines in GROUPED:
            keys |= {"num_attention_heads": 8, "num_key_value_heads": 4}
            if self.tuning.startswith("nf4"):  # cuts fall between blocks of 64 weights
                keys |= {"hidden_size": 64, "head_dim": 32, "intermediate_size": 256, "initializer_range": 0.1}
        if self.family in ("gpt_oss", "mixtral") or self.routers:
            keys = {**tiny_keys(self.family), **keys}  # experts
        if self.routers:
            keys |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
        if self.family == "gpt_neox":
            keys |= {"hidden_dropout": self.dropout, "attention_dropout": self.dropout}
        elif self.dropout:
            keys["attention_dropout"] = self.dropout
        return keys


MEANINGS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "dropout": {"dropout": 0.1},
    **{word: {"split": word} for word in ("uneven", "ends", "reversed", "planner", "looped", "V")},
    **{word: {"pipelines": word} for word in ("each", "two", "tail", *GROUPED)},
    **{word: {"schedule": word} for word in ("gpipe", "split")},
    **{word: {"dtype": word} for word in ("bf16", "fp16")},
    **{word: {word: True} for word in ("recompute", "changing", "streamed", "routers")},
    **{word: {"optimizer": word} for word in ("adafactor", "muon")},
    "8bit": {"optimizer": "adamw_8bit"},
    "unequal": {"shares": "unequal"},
}
"""Word of a case's name -> the fields that it stands for."""
TUNINGS = ("lora", "rslora", "patterns", "dora", "nf4", "pissa", "olora", "tokens", "saved")
"""Words of a case's name that make up its ``tuning``."""


def named(name: str, **others: Any) -> Case:
    """The case that a name describes: ``FAMILY-WORD-WORD``; ``others``: fields that it does not tell."""
    family, *words = name.split("-")
    fields: dict[str, Any] = {"further": tuple(word for word in words if word in KEYS)}
    fields["tuning"] = "-".join(word for word in words if word in TUNINGS) or "full"
    for word in words:
        fields |= MEANINGS.get(word, {})
    return Case(name, family, **{**fields, **others})


ALONE: dict[str, Any] = {"packing": False}
"""One document per sequence."""
NORMAL = (
    named("llama-even"),
    named("qwen3-tied-unequal", split="uneven", shares="whole", micro_batch=1, **ALONE),
    named("gemma2-tied-ends", micro_batch=4),
    named("gpt_neox-dropout-reversed", **ALONE),
    named("phi3-planner", **ALONE),
    named("llama-other-micro-batch", split="uneven", micro_batch=1, reference_micro_batch=8, **ALONE),
    named("gemma2-recompute", tied=True, split="uneven", micro_batch=4),
    named("llama-lora-dropout-recompute", split="ends", **ALONE),
    named("llama-dora-recompute", split="uneven"),
    named("qwen3-nf4-dora-streamed", tied=True),
    named("gemma2-rslora-two", tied=True, micro_batch=1),
    named("llama-patterns"),
    named("phi3-nf4"),
    named("llama-lora-fp16"),
    named("llama-gpipe-changing", split="uneven"),
    named("qwen3-tied-split", split="uneven", micro_batch=1),
    named("llama-bf16-split", dropout=0.1),
    named("phi3-each-unequal"),
    named("gpt_neox-dropout-each", **ALONE),
    named("qwen3-tied-two-split-unequal", micro_batch=1),
    named("gemma2-tail-changing", tied=True, shares="unequal", recompute=True, **ALONE),
    named("llama-lora-two-gpipe", tied=True, micro_batch=1),
    named("llama-dropout-streamed", split="uneven", micro_batch=4, reference_micro_batch=2, slice_sequences=2, **ALONE),
    named("qwen3-tied-lora-streamed", split="reversed", micro_batch=4, reference_micro_batch=1, slice_sequences=1),
    named("gemma2-nf4-bf16-streamed", tied=True),
    named("llama-8bit", split="uneven"),
    named("qwen3-tied-8bit-two-streamed"),
    named("gpt_oss-wide-biases", split="uneven"),
    named("mixtral-routers-streamed", split="uneven", micro_batch=4, slice_sequences=1, **ALONE),
    named("gpt_oss-routers-two-split-changing", micro_batch=1, shares="unequal", recompute=True),
    named("llama-tied-V-dropout", schedule="zbv"),
    named("qwen3-looped-recompute", micro_batch=1, schedule="dualpipev", **ALONE),
    named("gemma2-nf4-bf16-V", tied=True, schedule="dualpipev"),
    named("llama-tied-group-recompute"),
    named("qwen3-groups-changing", micro_batch=1, **ALONE),
    named("llama-lora-groups", tied=True),
    named("mixtral-groups"),
    named("qwen3-nf4-group"),
    named("mixtral-nf4-groups", tied=True, micro_batch=1, **ALONE),
    named("llama-frozen-rates-two", micro_batch=1),
    named("qwen3-tied-noise-streamed", slice_sequences=1, **ALONE),
    named("llama-lora-plus", split="uneven"),
    named("llama-adafactor", split="uneven", further=("frozen",)),
    named("qwen3-tied-adafactor-two-streamed"),
    named("qwen3-tied-muon", split="uneven"),
    named("gpt_oss-muon-two-split", micro_batch=1),
    named("llama-lora-muon-streamed"),
    named("qwen3-frozen-noise-groups"),
    named("llama-pissa", split="uneven"),
    named("qwen3-tied-olora-two-streamed"),
    named("phi3-nf4-pissa"),
    named("llama-pissa-groups", tied=True),
    named("llama-lora-tokens"),
    named("gemma2-lora-tokens-streamed", tied=True, split="uneven", micro_batch=4, reference_micro_batch=1,
          slice_sequences=1, **ALONE),
    named("qwen3-tied-nf4-saved-V", schedule="zbv"),
    named("llama-lora-saved-groups"),
    named("llama-bf16-group"),
    named("llama-8bit-V", schedule="zbv"),
    named("llama-tied-bf16-tail", shares="unequal"),
)  # fmt: skip
"""Pairwise: every value of every field meets most values of the others."""
FURTHER = (
    named("llama-tied-dropout", split="reversed"),
    named("llama-frozen-split", further=("frozen", "noise")),
    named("llama-frozen-streamed", split="uneven", further=("frozen", "rates")),
    named("llama-rates-groups"),
    named("llama-frozen-8bit", further=("frozen", "rates")),
    named("llama-frozen-bf16", further=("frozen", "rates")),
    named("gemma2-dora-plus-noise", tied=True),
    named("llama-lora-plus-groups", tied=True),
    named("llama-pissa-rslora", split="reversed"),
    named("qwen3-tied-lora", split="reversed", micro_batch=1),
    named("gpt_neox-nf4-recompute", split="uneven", micro_batch=4, **ALONE),
    named("llama-nf4-planner", tied=True, **ALONE),
    named("llama-bf16", split="uneven"),
    named("gemma2-nf4-bf16", tied=True),
    named("gemma2-split-recompute", tied=True, split="reversed", **ALONE),
    named("llama-tied-two-streamed", split="uneven"),
    named("llama-lora-8bit", split="reversed"),
    named("mixtral-routers-looped", schedule="zbv"),
)
"""Other values of these fields together: the long suite has them."""


def adapter_directory(directory: Path, case: Case) -> Path:
    """A start adapter whose B is random: with B at its usual zero, A has no gradient and a comparison proves nothing."""
    target = directory / f"{case.name}-adapter"
    if not target.exists():
        keys = dict(case.config)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys))
        lora = {**LORA, "target_modules": lora_targets(case), "use_dora": "dora" in case.tuning}
        lora["use_rslora"] = case.tuning in ("rslora", "patterns")
        if case.tuning == "patterns":
            lora |= PATTERNS
        ends = ["embed_tokens"] if case.tied else ["embed_tokens", "lm_head"]
        if "tokens" in case.tuning:
            lora["trainable_token_indices"] = dict.fromkeys(ends, TOKENS)
        if "saved" in case.tuning:
            lora |= {"modules_to_save": [*ends, "norm"], "ensure_weight_tying": case.tied}
        adapted = get_peft_model(model, LoraConfig(**lora))
        torch.manual_seed(5)
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name or ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(target)
    return target


STARTS = {"pissa": "pissa", "pissa-rslora": "pissa", "olora": "olora", "nf4-pissa": "pissa"}
"""Tuning -> the start of its adapters."""


def lora_targets(case: Case) -> str | list[str]:
    # "all-linear" would be fused experts, too.
    if case.tuning == "patterns":
        return ["q_proj", "v_proj", "down_proj"]
    return ["q_proj", "o_proj"] if case.routers or case.family == "mixtral" else "all-linear"


def corpus(directory: Path) -> Path:
    """A file of documents, one per line, from 3 to 40 words long."""
    rng = random.Random(1)
    words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(2, 7))) for _ in range(80)]
    lines = [" ".join(rng.choice(words) for _ in range(rng.choice((3, 5, 12, 40)))) for _ in range(60)]
    path = directory / "corpus.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def tokenizer_directory(directory: Path, text: Path) -> Path:
    """A small tokenizer trained on the corpus."""
    target = directory / "tokenizer"
    save_tokenizer(train_bpe(text.read_text().splitlines(), 320), target)
    return target


def model_directory(directory: Path, case: Case) -> Path:
    """Random start weights of the case's model, as transformers writes them."""
    target = directory / f"{case.name}-start"
    if not target.exists():
        torch.manual_seed(3)
        keys = dict(case.config)
        config = AutoConfig.for_model(keys.pop("model_type"), **keys)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)
    return target


def in_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{key}" = {inner}' for key, inner in value.items()) + " }"
    return json.dumps(value)


def job_text(case: Case, model: Path, tokenizer: Path, text: Path, adapter: Path | None) -> str:
    """The case as a job file."""
    tuned = ""
    if case.tuning != "full":
        quantization = "nf4" if "nf4" in case.tuning else "none"
        tuned = f"""quantization = "{quantization}"
[adapter]
method = "lora"
{f'path = "{adapter}"' if adapter is not None else f'start = "{STARTS[case.tuning]}"'}
targets = {json.dumps(lora_targets(case))}
rank = {LORA["r"]}
alpha = {LORA["lora_alpha"]}
rslora = {str(case.tuning in ("rslora", "patterns", "pissa-rslora")).lower()}
dora = {str("dora" in case.tuning).lower()}"""
    train = "\n".join(f"{key} = {in_toml(value)}" for key, value in (TRAIN | case.train).items())
    return f"""
[model]
path = "{model}"
{tuned}
[tokenizer]
path = "{tokenizer}"
[data]
text = ["{text}"]
documents = "line"
packing = {str(case.packing).lower()}
sequence_length = {SEQUENCE}
evaluation_fraction = 0.1
[train]
micro_batch = {(case.dropout and case.slice_sequences) or case.micro_batch}
dtype = "{case.dtype}"
recompute = {str(case.recompute).lower()}
optimizer = "{case.optimizer}"
{train}
[checkpoint]
every = 1
keep = 100
[cluster]
threads = 1  # bits may depend on the number of threads
[plan]
pipelines = 1  # several give the same losses, but not the same bits: those plans are written by hand
[profile]
repeats = 1
largest_message_bytes = 65536
[report]
write = false  # pictures of some hundred runs would take minutes
"""
