"""The plain transformers loop that the equality tests' cases are held against.

It knows nothing of stages, transports or our optimizer: one process, ``AutoModelForCausalLM``, torch's AdamW, transformers'
scheduler. It takes from us only the batches and, for dropout, the seeds.
"""

import math
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import torch
import torch.nn.functional as F
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, get_scheduler
from transformers.optimization import Adafactor

from hetero_mpi.data.batch import IGNORED, Batch
from hetero_mpi.data.dataset import Dataset, SequenceSettings
from hetero_mpi.data.text_sequences import build_sequences
from hetero_mpi.data.tokenizer import load_tokenizer
from hetero_mpi.model.layer.interface import seed_from
from hetero_mpi.model.layer.quantize import correct_unpacking, fused_experts
from hetero_mpi.model.stage import MicroBatch, dropout_seed
from tests.support.changing_batches import changed
from tests.support.training_cases import (
    CLIP_NORM,
    DTYPES,
    GLOBAL_BATCH,
    LORA,
    NF4,
    SEED,
    SEQUENCE,
    STARTS,
    STEPS,
    TRAIN,
    Case,
    lora_targets,
)


@dataclass
class Reference:
    """What the plain loop computed."""

    losses: list[float]
    first_moments: dict[str, torch.Tensor]
    """AdamW's first moment after step 1: the clipped gradient times (1 - beta1); where it is in 8 bits, its codes. Of others what
    they keep like it."""
    evaluation_loss: float
    parameters: dict[str, torch.Tensor]
    frozen: set[str]
    """Those of them that the case freezes."""


def dataset_of(case: Case, tokenizer: Path, text: Path) -> Dataset:
    """The sequences that our program trains on."""
    documents = [line for line in text.read_text().split("\n") if line.strip()]
    settings = SequenceSettings(SEQUENCE, case.packing, 0.1, SEED)
    return build_sequences(documents, load_tokenizer(tokenizer), settings)


def load_reference(case: Case, model_path: Path, adapter: Path | None) -> torch.nn.Module:
    """The case's start in a plain process: transformers, peft and bitsandbytes by themselves."""
    # A plain fp16 loop without loss scaling would be no reference: fp16 is held against fp32.
    dtype = DTYPES["fp32" if case.dtype == "fp16" else case.dtype]
    quantization = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=dtype) if "nf4" in case.tuning else None
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, quantization_config=quantization)
    for _, holder, name, _ in list(fused_experts(model)) if quantization is not None else []:
        replace_parameter_4bit(holder, name, compress_statistics=True, quant_type="nf4", blocksize=64)
    model = with_right_products(model)
    if adapter is None and case.tuning in STARTS:
        return _begun(case, model_path, dtype)
    if adapter is None:
        return model
    adapted = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # peft itself leaves adapters in fp32
    return adapted


def _begun(case: Case, model_path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """peft's adapters over what their start leaves of the weights, which in 4 bits are packed then."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    keys = {**LORA, "use_rslora": "rslora" in case.tuning, "target_modules": lora_targets(case)}
    begun = get_peft_model(model, LoraConfig(**keys, init_lora_weights=STARTS[case.tuning]))
    if "nf4" not in case.tuning:
        return begun
    with tempfile.TemporaryDirectory() as folder:
        begun.peft_config[
            "default"
        ].init_lora_weights = True  # the weights that it is opened beside are changed already
        begun.save_pretrained(f"{folder}/adapter")
        begun.unload().save_pretrained(f"{folder}/model")
        quantization = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=dtype)
        packed = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=dtype, quantization_config=quantization)
        return PeftModel.from_pretrained(with_right_products(packed), f"{folder}/adapter", is_trainable=True)


def with_right_products(model: Any) -> Any:
    """``model``, whose matrices in 4 bits with rows of no multiple of 64 weights bitsandbytes' CPU kernel unpacks wrongly."""
    correct_unpacking()  # as DoRA of peft unpacks matrices, too
    for layer in (module for module in model.modules() if isinstance(module, Linear4bit) and module.in_features % 64):
        weight = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        layer.forward = partial(F.linear, weight=weight, bias=layer.bias)
    return model


def set_training(model: torch.nn.Module, training: bool) -> None:
    """Call ``model.train(training)``, but leave NF4 layers in training mode.

    In evaluation mode bitsandbytes repacks their bytes in place on CPUs with AVX512-BF16; it has no other effect on them.
    """
    model.train(training)
    for module in model.modules():
        if type(module).__module__.partition(".")[0] == "bitsandbytes":
            module.training = True


def run_reference(case: Case, model_path: Path, adapter: Path | None, tokenizer: Path, text: Path) -> Reference:
    """Train the case in this process."""
    torch.set_num_threads(1)
    dataset = dataset_of(case, tokenizer, text)
    model = load_reference(case, model_path, adapter)
    model.train()
    position: dict[str, MicroBatch] = {}
    if case.dropout:
        _seed_before_layers(model, position)
    if "neftune_noise_alpha" in case.train:
        _add_noise(model, float(case.train["neftune_noise_alpha"]), position)  # type: ignore[arg-type]
    trained = {short(n): p for n, p in model.named_parameters() if p.requires_grad}
    for entry in case.train.get("freeze", ()):  # type: ignore[attr-defined]
        for name in [n for n in trained if re.search(entry if isinstance(entry, str) else rf"layers\.{entry}\.", n)]:
            trained[name].requires_grad_(False)
    decayed = {short(name) for name in Trainer.get_decay_parameter_names(None, model)}  # type: ignore[arg-type]
    decay = [p for name, p in trained.items() if name in decayed]
    rest = [p for name, p in trained.items() if name not in decayed]
    groups = [{"params": decay, "weight_decay": TRAIN["weight_decay"]}]
    groups += [{"params": rest, "weight_decay": 0.0}] if rest else []
    for pattern, rate in case.train.get("learning_rates", {}).items():  # type: ignore[attr-defined]
        for group in [group for group in groups if "lr" not in group]:
            own = [
                p for p in group["params"] if any(p is q and re.search(pattern, name) for name, q in trained.items())
            ]
            group["params"] = [p for p in group["params"] if all(p is not q for q in own)]
            groups.append({**group, "params": own, "lr": rate})
    optimizers = optimizers_of(case, model, [group for group in groups if group["params"]])
    warm_up = case.train.get("warmup_steps", TRAIN["warmup_steps"])
    schedulers = [get_scheduler("cosine", one, warm_up, STEPS) for one in optimizers]
    rows = case.reference_micro_batch or case.micro_batch
    losses, first_moments = [], {}
    for step in range(STEPS):
        batch = dataset.batch(step, GLOBAL_BATCH)
        batch = changed(batch, step) if case.changing else batch
        model.zero_grad()
        total = 0.0
        for first in range(0, len(batch.tokens), rows):
            position["now"] = MicroBatch(0, step, first, batch.target_tokens)
            tokens, targets = batch.tokens[first : first + rows], batch.targets[first : first + rows]
            loss = _summed_loss(model, tokens, targets, batch) / batch.target_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), CLIP_NORM)
        for one in (*optimizers, *schedulers):
            one.step()
        losses.append(total)
        if step == 0:
            held = {p: state for one in optimizers for p, state in one.state.items()}
            first_moments = {name: _first_kept(held.get(p, {}), p) for name, p in trained.items()}
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()  # what optimizers_of set is not for later tests
    held_out_mode(model)
    held_out = next(dataset.held_out_batches(10_000, 64))
    with torch.no_grad():
        evaluation = _summed_loss(model, held_out.tokens, held_out.targets, held_out).item() / held_out.target_tokens
    parameters = {n: p.detach().clone() for n, p in trained.items()}
    frozen = {name for name, parameter in trained.items() if not parameter.requires_grad}
    return Reference(losses, first_moments, evaluation, parameters, frozen)


def _first_kept(held: dict[str, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    """What an optimizer keeps of a parameter after the first step: the first of AdamW's moments, or what others have like it."""
    names = ("exp_avg", "state1", "momentum_buffer", "exp_avg_sq_row", "exp_avg_sq")
    return next((held[name] for name in names if name in held), torch.zeros_like(parameter)).clone()


def optimizers_of(case: Case, model: torch.nn.Module, groups: list[dict[str, object]]) -> list[torch.optim.Optimizer]:
    """As transformers' Trainer makes them: embeddings keep 32 bits. Muon: for matrices in blocks, and AdamW for the rest."""
    if case.optimizer == "adafactor":
        return [Adafactor(groups, lr=TRAIN["learning_rate"], scale_parameter=False, relative_step=False)]
    if case.optimizer == "muon":
        plain = model.get_base_model() if isinstance(model, PeftModel) else model
        named = plain.base_model.layers.named_parameters()
        matrices = {id(p) for name, p in named if p.ndim == 2 and not name.endswith("bias")}  # experts' biases are wide
        parted: list[list[dict[str, object]]] = [[], []]
        for group in groups:
            for rest in (False, True):
                own = [p for p in group["params"] if (id(p) not in matrices) == rest]  # type: ignore[attr-defined]
                parted[rest] += [{**group, "params": own}] if own else []
        muon = torch.optim.Muon(parted[0], lr=TRAIN["learning_rate"], adjust_lr_fn="match_rms_adamw")
        return [muon, *([_adamw(parted[1])] if parted[1] else [])]
    return [_adamw_of(case, model, groups)]


def _adamw(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    settings = {"lr": TRAIN["learning_rate"], "betas": (TRAIN["beta1"], TRAIN["beta2"]), "eps": TRAIN["epsilon"]}
    return torch.optim.AdamW(groups, **settings)


def _adamw_of(case: Case, model: torch.nn.Module, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    settings = {"lr": TRAIN["learning_rate"], "betas": (TRAIN["beta1"], TRAIN["beta2"]), "eps": TRAIN["epsilon"]}
    if "lora_plus_ratio" in case.train:
        keys = {"loraplus_lr_ratio": case.train["lora_plus_ratio"], "loraplus_weight_decay": TRAIN["weight_decay"]}
        return create_loraplus_optimizer(model, torch.optim.AdamW, **settings, **keys)  # type: ignore[arg-type]
    if case.optimizer == "adamw":
        return _adamw(groups)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()  # there is one for the whole process
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    return bitsandbytes.optim.AdamW(groups, optim_bits=8, **settings)


def held_out_mode(model: torch.nn.Module) -> None:
    """No dropout. Packed layers stay as they are: in eval mode bitsandbytes repacks their bytes on some CPUs."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout | torch.nn.Embedding):
            module.eval()
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        if hasattr(config, "attention_dropout"):
            config.attention_dropout = 0.0
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def short(name: str) -> str:
    """A parameter's name in adapter files, of peft's own."""
    plain = name.replace("base_model.model.", "").replace(".modules_to_save.default.", ".").replace(".default.", ".")
    return plain.removesuffix(".default").replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


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


def _add_noise(model: torch.nn.Module, alpha: float, position: dict[str, MicroBatch]) -> None:
    """As ``neftune_post_forward_hook`` of transformers; but each sequence draws by a seed of its own."""

    def add(module: torch.nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        most, now = alpha / math.sqrt(output.size(1) * output.size(2)), position["now"]
        for row in range(len(output)):
            torch.manual_seed(seed_from(SEED, "noise", now.step, now.first_sample + row))
            output = output + torch.nn.functional.pad(
                torch.zeros_like(output[row : row + 1]).uniform_(-most, most), (0, 0, 0, 0, row, len(output) - row - 1)
            )
        return output

    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    plain.get_input_embeddings().register_forward_hook(add)
