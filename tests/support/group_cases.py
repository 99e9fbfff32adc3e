"""Models, starts and a micro-batch for stages that a group holds."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.layer.interface import seed_from
from hetero_mpi.model.layer.loss import IGNORED, Routed
from hetero_mpi.model.layer.quantize import fused_experts
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.tuning import Tuning
from tests.support.family_configs import VOCABULARY, tiny_keys
from tests.support.stages import stage_of

HEADS = 6
"""Key/value heads of every model here."""
EXPERTS = 8
"""Of every layer that has some."""
WITH_EXPERTS = (
    "afmoe",
    "aria_text",
    "beam",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flint",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "hy_v3",
    "kolibri1",
    "laguna",
    "lara_mini",
    "mellum",
    "minimax_m3_vl_text",
    "mixtral",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "sarvam_mla",
    "sarvam_moe",
    "solar_open",
)
"""Those of the divided families that have experts to share, and whose members need no heads."""
LAYERS = 6
CUTS = ((0, 2), (2, 5), (5, LAYERS))
"""Embedding and a block; blocks; the head by itself."""
PACKABLE = {"hidden_size": 192, "num_key_value_heads": 3, "num_attention_heads": 6, "intermediate_size": 384}
"""Every cut of (2, 1) falls between blocks of 64 weights, if heads have 64 columns."""
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu")
FP32 = ("gpt_oss",)
"""Families whose experts as they are written, which fp64 needs, take no choice of a foreign one."""
_ONE_HEAD_EACH = ("gpt_neox", "gptj")
_FURTHER: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True},
    "helium": {"head_dim": 4},
    "phi": {"qk_layernorm": True},
    "qwen3_moe": {"attention_bias": True},
}


def group_chain(family: str, **changed: Any) -> TransformersChain:
    keys = tiny_keys(family)
    each = family in _LATENT + _ONE_HEAD_EACH
    sizes = {"hidden_size": 48, "num_key_value_heads": HEADS, "num_attention_heads": HEADS if each else 2 * HEADS}
    sizes |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS)
    known = {name: size for name, size in sizes.items() if name in keys}
    return TransformersChain(read_config({**keys, **known, **_FURTHER.get(family, {}), **changed}))


class NamedStart:
    """Start values by a tensor's name, for every family; none of them is 0 or 1. ``spread``: of matrices."""

    def __init__(self, spread: float = 0.2) -> None:
        self.spread = spread

    def fill(self, chain: TransformersChain, model: nn.Module, layer: int) -> None:
        chain.vacate(model, layer)
        for root in chain.module_names(layer):
            for name, parameter in model.get_submodule(root).named_parameters(prefix=root):
                generator = torch.Generator().manual_seed(seed_from("start", name))
                noise = torch.randn(parameter.shape, generator=generator)
                if name in chain.constants:
                    parameter.data.fill_(0.5)
                elif name in chain.parameters:
                    parameter.data = (
                        self.spread * noise if parameter.ndim > 1 else (1.0 if "norm" in name else 0.3) + 0.1 * noise
                    )


def lora(chain: TransformersChain, nf4: bool = False, double: bool = False, **changed: Any) -> Tuning:
    targets: Any = "all-linear"
    if next(fused_experts(chain.model), None) is not None:  # which are not to be adapted
        linears = [name for name, module in chain.model.named_modules() if isinstance(module, nn.Linear)]
        targets = sorted({name.rpartition(".")[2] for name in linears if "attn" in name} - {"gate_proj"})
    table = AdapterTable(**{"method": "lora", "rank": 4, "alpha": 8, "targets": targets, **changed})
    return adapter_tuning(chain, table, nf4, double)


def whole_stages(
    chain: TransformersChain,
    tuning: Tuning | None = None,
    dtype: str = "fp32",
    cuts: Iterable[tuple[int, int]] = CUTS,
    spread: float = 0.2,
) -> list[Stage]:
    return [stage_of(chain, first, last, Backend(), dtype, NamedStart(spread), tuning=tuning) for first, last in cuts]


def widen(stages: Sequence[Stage]) -> None:
    """Compute in fp64, so that what is left of a difference is no rounding. (Norms and losses round to fp32, and only one of the
    forms of experts takes fp64.)"""
    for stage in stages:
        if stage.chain.name not in FP32:
            stage.model.double()
            stage.model.config._experts_implementation = "eager"


def set_adapters(stages: Sequence[Stage], spread: float = 0.3) -> None:
    """Give adapters values by their names, of which a member has its part: at their start B is 0, and A has no gradient."""
    for stage in stages:
        for name, parameter in stage.parameters.items():
            generator = torch.Generator().manual_seed(seed_from("adapter", name))
            value = spread * torch.randn(stage.tuning.trainable[name].shape, generator=generator)
            parameter.data = value if stage.divided is None else stage.divided.shard(name, value)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences of 24 tokens, some of them padding, some at the ends of members' words; the second one's last 15 targets do
    not count."""
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, VOCABULARY, (2, 24), generator=generator)
    targets = torch.randint(0, VOCABULARY, (2, 24), generator=generator)
    tokens[0, :2], targets[1, 9:] = 0, IGNORED
    tokens[1, :6] = torch.tensor([107, 108, 159, 160, 212, 268])
    return tokens, targets


def run(stages: Sequence[Stage]) -> list[torch.Tensor]:
    """Forward and backward; the output of every stage (the last one is the loss), then its input gradients."""
    tokens, targets = batch()
    routed = Routed(torch.tensor([24, 9]), 0.5) if stages[0].chain.routers is not None else None
    position = MicroBatch(0, 0, 0, int((targets != IGNORED).sum()), routed=routed)
    seen, x = [], tokens
    for stage in stages:
        x = stage.forward(position, x, targets if stage.is_last else None)
        seen.append(x)
    gradient = None
    for stage in reversed(stages):
        gradient = stage.backward(0, gradient)
        if gradient is not None:
            seen.append(gradient)
    return seen
