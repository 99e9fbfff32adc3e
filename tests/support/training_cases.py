"""The cases of the equality tests, and the plain transformers loop they are held against.

The reference knows nothing of stages, transports or our optimizer: one process, ``AutoModelForCausalLM``, torch's AdamW,
transformers' scheduler. It takes from us only the batches and, for dropout, the seeds.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import bitsandbytes
import numpy as np
import torch
import torch.nn.functional as F
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, Trainer, get_scheduler

from hetero_mpi.data.sequences import IGNORED, Batch, Dataset, build_sequences
from hetero_mpi.data.tokenizer import load_tokenizer, save_tokenizer, train_bpe
from hetero_mpi.model.layer.quantize import fused_experts
from hetero_mpi.model.stage import MicroBatch, dropout_seed
from hetero_mpi.planning.orders import ORDERS
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.toml_files import save_plan
from tests.support.changing_batches import changed
from tests.support.family_configs import tiny_keys

STEPS, GLOBAL_BATCH, SEQUENCE, BLOCKS, SEED = 3, 8, 24, 4, 7
LAYERS = BLOCKS + 2
CLIP_NORM = 0.5
GROUPED = ("group", "groups")
LORA = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
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


@dataclass(frozen=True)
class Case:
    """One way to train: a model, how its data is cut, and how it is split."""

    name: str
    family: str
    tied: bool
    dropout: float
    packing: bool
    """False: one document per sequence, so the targets of the sequences are of very unequal length."""
    micro_batch: int
    split: str
    """``even``, ``uneven``, ``ends`` (embedding and head alone), ``reversed`` (rank 0 last), ``planner``; or with several stages
    per rank ``looped`` or ``V``."""
    reference_micro_batch: int = 0
    """Micro-batch of the reference where it is to differ; 0: the same."""
    tuning: str = "full"
    """``full``, ``lora``, ``rslora``, ``dora``, ``nf4`` (LoRA over 4-bit weights) or ``nf4-dora``."""
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
            if self.tuning == "nf4":  # cuts fall between blocks of 64 weights
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


NORMAL = (
    Case("llama-even", "llama", False, 0.0, True, 2, "even"),
    Case("qwen3-tied-unequal", "qwen3", True, 0.0, False, 1, "uneven"),
    Case("gemma2-tied-ends", "gemma2", True, 0.0, True, 4, "ends"),
    Case("gpt_neox-dropout-reversed", "gpt_neox", False, 0.1, False, 2, "reversed"),
    Case("phi3-planner", "phi3", False, 0.0, False, 2, "planner"),
    Case("llama-tied-dropout", "llama", True, 0.1, True, 2, "reversed"),
    Case("llama-other-micro-batch", "llama", False, 0.0, False, 1, "uneven", reference_micro_batch=8),
    Case("gemma2-recompute", "gemma2", True, 0.0, True, 4, "uneven", recompute=True),
    Case("llama-lora-dropout-recompute", "llama", False, 0.1, False, 2, "ends", tuning="lora", recompute=True),
    Case("qwen3-tied-lora", "qwen3", True, 0.0, True, 1, "reversed", tuning="lora"),
    Case("llama-dora-recompute", "llama", False, 0.0, True, 2, "uneven", tuning="dora", recompute=True),
    Case("qwen3-nf4-dora-streamed", "qwen3", True, 0.0, True, 2, "even", tuning="nf4-dora", streamed=True),
    Case("gemma2-rslora-two", "gemma2", True, 0.0, True, 1, "even", tuning="rslora", pipelines="two"),
    Case("phi3-nf4", "phi3", False, 0.0, True, 2, "even", tuning="nf4"),
    Case("gpt_neox-nf4-recompute", "gpt_neox", False, 0.0, False, 4, "uneven", tuning="nf4", recompute=True),
    Case("llama-nf4-planner", "llama", True, 0.0, False, 2, "planner", tuning="nf4"),
    Case("llama-bf16", "llama", False, 0.0, True, 2, "uneven", dtype="bf16"),
    Case("llama-lora-fp16", "llama", False, 0.0, True, 2, "even", tuning="lora", dtype="fp16"),
    Case("gemma2-nf4-bf16", "gemma2", True, 0.0, True, 2, "even", tuning="nf4", dtype="bf16"),
    Case("llama-gpipe-changing", "llama", False, 0.0, True, 2, "uneven", schedule="gpipe", changing=True),
    Case("qwen3-tied-split", "qwen3", True, 0.0, True, 1, "uneven", schedule="split"),
    Case("gemma2-split-recompute", "gemma2", True, 0.0, False, 2, "reversed", schedule="split", recompute=True),
    Case("llama-bf16-split", "llama", False, 0.1, True, 2, "even", schedule="split", dtype="bf16"),
    Case("phi3-each-unequal", "phi3", False, 0.0, True, 2, "even", pipelines="each", shares="unequal"),
    Case("gpt_neox-dropout-each", "gpt_neox", False, 0.1, False, 2, "even", pipelines="each"),
    Case(
        "qwen3-tied-two-split-unequal",
        "qwen3",
        True,
        0.0,
        True,
        1,
        "even",
        pipelines="two",
        shares="unequal",
        schedule="split",
    ),
    Case(
        "gemma2-tail-changing",
        "gemma2",
        True,
        0.0,
        False,
        2,
        "even",
        pipelines="tail",
        shares="unequal",
        changing=True,
        recompute=True,
    ),
    Case("llama-lora-two-gpipe", "llama", True, 0.0, True, 1, "even", tuning="lora", pipelines="two", schedule="gpipe"),
    Case("llama-dropout-streamed", "llama", False, 0.1, False, 4, "uneven", 2, streamed=True, slice_sequences=2),
    Case("llama-tied-two-streamed", "llama", True, 0.0, True, 2, "uneven", pipelines="two", streamed=True),
    Case(
        "qwen3-tied-lora-streamed",
        "qwen3",
        True,
        0.0,
        True,
        4,
        "reversed",
        1,
        tuning="lora",
        streamed=True,
        slice_sequences=1,
    ),
    Case("gemma2-nf4-bf16-streamed", "gemma2", True, 0.0, True, 2, "even", tuning="nf4", dtype="bf16", streamed=True),
    Case("llama-8bit", "llama", False, 0.0, True, 2, "uneven", optimizer="adamw_8bit"),
    Case(
        "qwen3-tied-8bit-two-streamed",
        "qwen3",
        True,
        0.0,
        True,
        2,
        "even",
        pipelines="two",
        streamed=True,
        optimizer="adamw_8bit",
    ),
    Case("llama-lora-8bit", "llama", False, 0.0, True, 2, "reversed", tuning="lora", optimizer="adamw_8bit"),
    Case("gpt_oss-wide-biases", "gpt_oss", False, 0.0, True, 2, "uneven"),
    Case(
        "mixtral-routers-streamed",
        "mixtral",
        False,
        0.0,
        False,
        4,
        "uneven",
        streamed=True,
        slice_sequences=1,
        routers=True,
    ),
    Case(
        "gpt_oss-routers-two-split-changing",
        "gpt_oss",
        False,
        0.0,
        True,
        1,
        "even",
        pipelines="two",
        shares="unequal",
        schedule="split",
        recompute=True,
        changing=True,
        routers=True,
    ),
    Case("llama-tied-V-dropout", "llama", True, 0.1, True, 2, "V", schedule="zbv"),
    Case("qwen3-looped-recompute", "qwen3", False, 0.0, False, 1, "looped", schedule="dualpipev", recompute=True),
    Case("mixtral-routers-looped", "mixtral", False, 0.0, True, 2, "looped", schedule="zbv", routers=True),
    Case("gemma2-nf4-bf16-V", "gemma2", True, 0.0, True, 2, "V", tuning="nf4", dtype="bf16", schedule="dualpipev"),
    Case("llama-tied-group-recompute", "llama", True, 0.0, True, 2, "even", pipelines="group", recompute=True),
    Case("qwen3-groups-changing", "qwen3", False, 0.0, False, 1, "even", pipelines="groups", changing=True),
    Case("llama-lora-groups", "llama", True, 0.0, True, 2, "even", tuning="lora", pipelines="groups"),
    Case("mixtral-groups", "mixtral", False, 0.0, True, 2, "even", pipelines="groups"),
    Case("qwen3-nf4-group", "qwen3", False, 0.0, True, 2, "even", tuning="nf4", pipelines="group"),
    Case("mixtral-nf4-groups", "mixtral", True, 0.0, False, 1, "even", tuning="nf4", pipelines="groups"),
    Case("llama-bf16-group", "llama", False, 0.0, True, 2, "even", pipelines="group", dtype="bf16"),
    Case("llama-tied-bf16-tail", "llama", True, 0.0, True, 2, "even", pipelines="tail", shares="unequal", dtype="bf16"),
)
"""Pairwise: every value of every field meets most values of the others."""


def cuts(split: str, ranks: int) -> list[int]:
    """Boundaries of the stages along the chain of ``LAYERS`` layers."""
    if ranks == 1:
        return [0, LAYERS]
    if split in ("looped", "V"):
        stages = len(_several(split, ranks))
        return [round(i * LAYERS / stages) for i in range(stages + 1)]
    if split in ("even", "reversed"):
        return [round(i * LAYERS / ranks) for i in range(ranks + 1)]
    if split == "uneven":
        return {2: [0, 5, 6], 3: [0, 1, 4, 6], 4: [0, 1, 2, 5, 6]}[ranks]
    return {2: [0, 1, 6], 3: [0, 1, 5, 6], 4: [0, 1, 3, 5, 6]}[ranks]


def write_plan(
    path: Path, case: Case, ranks: int, split: str | None = None, pipelines: str | None = None
) -> Path | None:
    """The case's hand-written plan for so many ranks; None where the planner decides."""
    split, pipelines = split or case.split, pipelines or case.pipelines
    if split == "planner":
        return None
    if pipelines in GROUPED and ranks > 1:
        save_plan(_of_groups(case, _member_shares(pipelines, ranks)), path)
        return path
    groups = grouped("one" if pipelines in GROUPED else pipelines, split, ranks)
    shares = SHARES[case.shares][len(groups)]
    made = []
    for number, (order, edges) in enumerate(groups):
        micro_batch = min(shares[number], (1 + number if case.shares == "unequal" else case.micro_batch))
        if len(groups) == 1:
            micro_batch = case.micro_batch
        made.append(_pipeline(case, order, edges, micro_batch, shares[number]))
    save_plan(Plan(tuple(made), GLOBAL_BATCH, SEQUENCE, LAYERS), path)
    return path


SHARES = {
    "whole": {1: [8], 2: [4, 4], 3: [4, 2, 2], 4: [2, 2, 2, 2]},
    "unequal": {1: [8], 2: [5, 3], 3: [4, 3, 1], 4: [1, 4, 1, 2]},
}
"""Sequences of each pipeline, by their number; with micro-batches of 1, 2, ... where unequal, so that some are short."""


def _member_shares(pipelines: str, ranks: int) -> list[tuple[int, ...]]:
    """Of each stage's ranks."""
    if pipelines == "group":
        return [{2: (3, 1), 3: (2, 1, 1), 4: (1, 1, 1, 1)}[ranks]]
    return {2: [(1, 3)], 3: [(3, 1), ()], 4: [(3, 1), (2, 2)]}[ranks]


def _of_groups(case: Case, shares: list[tuple[int, ...]]) -> Plan:
    edges, stages, rank = cuts("uneven", len(shares)), [], 0
    for place, own in enumerate(shares):
        ranks, depth = tuple(range(rank, rank + max(1, len(own)))), len(shares) - 1 - place
        stage = StagePlan(ranks, edges[place], edges[place + 1], depth, case.recompute, shares=own)
        experts = {
            (1, 3): (0, 4),
            (3, 1): (1, 3),
            (2, 2): (4, 0),
        }  # more of the heads on one rank, of the experts on the other
        stages.append(replace(stage, experts=experts[own]) if own and case.family == "mixtral" else stage)
        rank += len(ranks)
    return Plan((PipelinePlan(tuple(stages), case.micro_batch, GLOBAL_BATCH),), GLOBAL_BATCH, SEQUENCE, LAYERS)


def grouped(pipelines: str, split: str, ranks: int) -> list[tuple[list[int], list[int]]]:
    """(ranks in chain order, boundaries) of every pipeline."""
    if split in ("looped", "V") and ranks > 1:
        return [(_several(split, ranks), cuts(split, ranks))]
    if pipelines == "one" or ranks == 1:
        return [(list(range(ranks))[:: -1 if split == "reversed" else 1], cuts(split, ranks))]
    if pipelines == "each" or ranks == 2:
        return [([rank], [0, LAYERS]) for rank in range(ranks)]
    if pipelines == "two" and ranks == 4:
        return [([3, 0], [0, 4, LAYERS]), ([1, 2], [0, 1, LAYERS])]
    *most, alone = range(ranks)
    first = (most, cuts("uneven", ranks - 1))
    return [first, ([alone], [0, LAYERS])] if pipelines == "tail" else [([alone], [0, LAYERS]), first]


def _several(split: str, ranks: int) -> list[int]:
    """The ranks of the stages in chain order: each rank twice, as far as the layers go."""
    order = list(range(ranks))
    return (order + (order if split == "looped" else order[::-1]))[:LAYERS]


def _pipeline(case: Case, order: list[int], edges: list[int], micro_batch: int, sequences: int) -> PipelinePlan:
    count = -(-sequences // micro_batch)
    depths = [count if case.schedule == "gpipe" else min(len(order) - 1 - i, count) for i in range(len(order))]
    stages = tuple(
        StagePlan(
            (rank,),
            edges[i],
            edges[i + 1],
            depths[i],
            case.recompute,
            case.streamed and i % 2 == 0,
            case.slice_sequences,
        )
        for i, rank in enumerate(order)
    )
    split = case.schedule == "split" or (case.schedule in ORDERS and ORDERS[case.schedule].SPLITS)
    split = split and case.slice_sequences is None  # which goes back in one part
    several = len(set(order)) < len(order)
    return PipelinePlan(stages, micro_batch, sequences, split, case.schedule if several else WARM_UP)


def adapter_directory(directory: Path, case: Case) -> Path:
    """A start adapter whose B is random: with B at its usual zero, A has no gradient and a comparison proves nothing."""
    target = directory / f"{case.name}-adapter"
    if not target.exists():
        keys = dict(case.config)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys))
        lora = {
            **LORA,
            "target_modules": lora_targets(case),
            "use_dora": "dora" in case.tuning,
            "use_rslora": case.tuning == "rslora",
        }
        adapted = get_peft_model(model, LoraConfig(**lora))
        torch.manual_seed(5)
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name or ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(target)
    return target


def lora_targets(case: Case) -> str | list[str]:
    # "all-linear" would be fused experts, too.
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


def job_text(case: Case, model: Path, tokenizer: Path, text: Path, adapter: Path | None) -> str:
    """The case as a job file."""
    tuned = ""
    if adapter is not None:
        quantization = "nf4" if "nf4" in case.tuning else "none"
        tuned = f"""quantization = "{quantization}"
[adapter]
method = "lora"
path = "{adapter}"
targets = {json.dumps(lora_targets(case))}
rank = {LORA["r"]}
alpha = {LORA["lora_alpha"]}
rslora = {str(case.tuning == "rslora").lower()}
dora = {str("dora" in case.tuning).lower()}"""
    train = "\n".join(f"{key} = {value!r}".replace("'", '"') for key, value in TRAIN.items())
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
held_out = 0.1
[train]
micro_batch = {case.micro_batch}
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


@dataclass
class Reference:
    """What the plain loop computed."""

    losses: list[float]
    first_moments: dict[str, torch.Tensor]
    """AdamW's first moment after step 1: the clipped gradient times (1 - beta1); where it is in 8 bits, its codes."""
    evaluation_loss: float
    parameters: dict[str, torch.Tensor]


def dataset_of(case: Case, tokenizer: Path, text: Path) -> Dataset:
    """The sequences that our program trains on."""
    documents = [line for line in text.read_text().split("\n") if line.strip()]
    return build_sequences(documents, load_tokenizer(tokenizer), SEQUENCE, case.packing, 0.1, SEED)


def load_reference(case: Case, model_path: Path, adapter: Path | None) -> torch.nn.Module:
    """The case's start in a plain process: transformers, peft and bitsandbytes by themselves."""
    # A plain fp16 loop without loss scaling would be no reference: fp16 is held against fp32.
    dtype = DTYPES["fp32" if case.dtype == "fp16" else case.dtype]
    quantization = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=dtype) if "nf4" in case.tuning else None
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, quantization_config=quantization)
    for _, holder, name, _ in list(fused_experts(model)) if quantization is not None else []:
        replace_parameter_4bit(holder, name, compress_statistics=True, quant_type="nf4", blocksize=64)
    if adapter is None:
        return model
    adapted = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # peft itself leaves adapters in fp32
    return adapted


def run_reference(case: Case, model_path: Path, adapter: Path | None, tokenizer: Path, text: Path) -> Reference:
    """Train the case in this process."""
    torch.set_num_threads(1)
    dataset = dataset_of(case, tokenizer, text)
    model = load_reference(case, model_path, adapter)
    model.train()
    position: dict[str, MicroBatch] = {}
    if case.dropout:
        _seed_before_layers(model, position)
    trained = {short(n): p for n, p in model.named_parameters() if p.requires_grad}
    decayed = {short(name) for name in Trainer.get_decay_parameter_names(None, model)}  # type: ignore[arg-type]
    decay = [p for name, p in trained.items() if name in decayed]
    rest = [p for name, p in trained.items() if name not in decayed]
    groups = [{"params": decay, "weight_decay": TRAIN["weight_decay"]}]
    groups += [{"params": rest, "weight_decay": 0.0}] if rest else []
    optimizer = optimizer_of(case, model, groups)
    scheduler = get_scheduler("cosine", optimizer, TRAIN["warmup_steps"], STEPS)
    rows = case.reference_micro_batch or case.micro_batch
    losses, first_moments = [], {}
    for step in range(STEPS):
        batch = dataset.batch(step, GLOBAL_BATCH)
        batch = changed(batch, step) if case.changing else batch
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, len(batch.tokens), rows):
            position["now"] = MicroBatch(0, step, first, batch.target_tokens)
            tokens, targets = batch.tokens[first : first + rows], batch.targets[first : first + rows]
            loss = _summed_loss(model, tokens, targets, batch) / batch.target_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), CLIP_NORM)
        optimizer.step()
        scheduler.step()
        losses.append(total)
        if step == 0:
            first = "exp_avg" if case.optimizer == "adamw" else "state1"
            first_moments = {n: optimizer.state[p][first].clone() for n, p in trained.items()}
    held_out_mode(model)
    held_out = next(dataset.held_out_batches(10_000, 64))
    with torch.no_grad():
        evaluation = _summed_loss(model, held_out.tokens, held_out.targets, held_out).item() / held_out.target_tokens
    parameters = {n: p.detach().clone() for n, p in trained.items()}
    return Reference(losses, first_moments, evaluation, parameters)


def optimizer_of(case: Case, model: torch.nn.Module, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    """As transformers' Trainer makes it: embeddings keep 32 bits."""
    settings = {"lr": TRAIN["learning_rate"], "betas": (TRAIN["beta1"], TRAIN["beta2"]), "eps": TRAIN["epsilon"]}
    if case.optimizer == "adamw":
        return torch.optim.AdamW(groups, **settings)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()  # there is one for the whole process
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    return bitsandbytes.optim.AdamW(groups, optim_bits=8, **settings)


def held_out_mode(model: torch.nn.Module) -> None:
    """No dropout. Packed layers stay as they are: in eval mode bitsandbytes repacks their bytes on some CPUs."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        if hasattr(config, "attention_dropout"):
            config.attention_dropout = 0.0
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def short(name: str) -> str:
    """A parameter's name in adapter files, of peft's own."""
    plain = name.replace("base_model.model.", "").replace(".default.", ".")
    return plain.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def _summed_loss(model: torch.nn.Module, tokens: np.ndarray, targets: np.ndarray, whole: Batch) -> torch.Tensor:
    """Of some rows of a batch. The loss of routers is transformers' own of each row, whose mean the batch's loss has once."""
    outputs = model(input_ids=torch.from_numpy(tokens).long(), use_cache=False)
    logits, words = outputs.logits.float(), torch.from_numpy(targets).long()
    loss = F.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="sum")
    if not getattr(model.config, "output_router_logits", False):
        return loss
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    function = sys.modules[type(plain).__module__].load_balancing_loss_func
    own = []
    for row, learnt in enumerate((words != IGNORED).int().flip(1).argmax(1)):
        chosen = (layer.view(*words.shape, -1)[row, : words.shape[1] - learnt] for layer in outputs.router_logits)
        own.append(function(tuple(chosen), plain.num_experts, plain.num_experts_per_tok))
    if len(words) == 1 and words[0, -1] != IGNORED:
        assert torch.equal(own[0], outputs.aux_loss)
    return loss + plain.router_aux_loss_coef * sum(own) * whole.target_tokens / len(whole.tokens)


def _seed_before_layers(model: torch.nn.Module, position: dict[str, MicroBatch]) -> None:
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    embedding, base = plain.get_input_embeddings(), plain.base_model
    for layer, module in enumerate([embedding, *base.layers]):

        def seed(module: torch.nn.Module, arguments: object, layer: int = layer) -> None:
            torch.manual_seed(dropout_seed(SEED, position["now"], layer))

        module.register_forward_pre_hook(seed)
