"""How the tensors of a model are divided among the members of a group (tensor parallelism; Shoeybi et al. 2019, Megatron-LM,
arXiv:1909.08053, here with unequal shares), and which models can be.

transformers' own table (``base_model_tp_plan``) says which linear layers of a block are cut by rows (colwise) and which by
columns (rowwise). Attention is cut by whole key/value heads with the query heads that belong to them, an MLP by columns, fused
experts by whole experts, the embedding and the head by words. A member that has experts may have no heads: then it has no columns
and no words either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from torch import nn

from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.group.tensor_division import Division, Holding
from hetero_mpi.model.layer.interface import WRAPPED, ParameterSpec
from hetero_mpi.model.layer.quantize import BLOCK
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.planning.types.moments import EIGHT_BIT
from hetero_mpi.planning.types.sizes import MOMENT_BLOCK

_COLWISE, _ROWWISE, _EXPERTS = "colwise", "rowwise", "moe_tp_experts"
_OVER_HEADS = "norm over heads"
"""Not of the table: a norm over the numbers of all heads."""
_TWO = "two colwise"
"""Not of the table: two matrices in one, each cut by rows."""
_LATENT = dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"), _COLWISE)
_LATENT["self_attn.o_proj"] = _ROWWISE
"""Heads of latent attention, whose latents every member computes."""
_SHARED = dict.fromkeys(("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), _COLWISE)
_SHARED["mlp.shared_experts.down_proj"] = _ROWWISE
_ATTENTION = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.sinks"), _COLWISE)
_ATTENTION["self_attn.o_proj"] = _ROWWISE
_HEAD_NORMS = _ATTENTION | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), _OVER_HEADS)
_TWO_IN_ONE = {"mlp.gate_up_proj": _TWO, "mlp.down_proj": _ROWWISE}
_GATED = _ATTENTION | {"self_attn.gate_proj": _COLWISE}
_FURTHER = {
    "afmoe": _GATED | _SHARED,
    "deepseek_v3": _LATENT,
    "exaone_moe": _SHARED,
    "flex_olmo": _HEAD_NORMS,
    "flint": _ATTENTION,
    "glm": _TWO_IN_ONE,
    "glm4": _TWO_IN_ONE,
    "glm4_moe_lite": _SHARED | _LATENT,
    "gpt_oss": _ATTENTION | {"mlp.experts": _EXPERTS, "mlp.experts.down_proj": _ROWWISE},
    "minimax_m2": _HEAD_NORMS,
    "minimax_m3_vl_text": _ATTENTION
    | _TWO_IN_ONE
    | {n.replace("mlp.", "mlp.shared_experts."): s for n, s in _TWO_IN_ONE.items()},
    "olmo2": _HEAD_NORMS,
    "olmo3": _HEAD_NORMS,
    "olmo_hybrid": _HEAD_NORMS,
    "qwen2_moe": {name.replace("experts", "expert"): style for name, style in _SHARED.items()},
    "sarvam_mla": _LATENT,
    "solar_open": _SHARED,
    "youtu": _LATENT,
}
"""Family -> what its table leaves out."""
_ALIGNED = 64
"""Columns at multiples of this are fast on all devices."""
_FINENESS = 64
"""Into so many units at least an MLP or a vocabulary is cut, so that shares are within a percent of what was asked."""


class Trained(Protocol):
    """The attributes of a ``Tuning`` that are used here."""

    @property
    def trainable(self) -> Mapping[str, ParameterSpec]: ...
    @property
    def adapter(self) -> AdapterTable | None: ...
    @property
    def nf4(self) -> bool: ...
    @property
    def double(self) -> bool: ...
    @property
    def moments(self) -> Mapping[str, str]: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def still(self) -> frozenset[str]: ...


def key_value_heads(chain: TransformersChain) -> int:
    """How many of a block there are to share."""
    return next((heads for block in range(chain.blocks) if (heads := heads_of(chain, block)) is not None), 0)


def heads_of(chain: TransformersChain, block: int) -> int | None:
    """Key/value heads of a block. None: every member computes all of its attention, a linear one."""
    modules = dict(chain.model.get_submodule(f"{chain.blocks_name}.{block}").named_children())
    own = [modules[name] for name in containers(chain) if is_attention(name) and name in modules]
    if not own:
        return None
    keys = next((module for module in own if hasattr(module, "k_proj")), None)
    if keys is None:  # one matrix of all, or latent attention: each query head has its own
        return int(chain.config.num_attention_heads)
    return int(keys.k_proj.out_features // keys.head_dim)


def divisions(
    chain: TransformersChain,
    tuning: Trained,
    shares: Sequence[int],
    layers: Iterable[int],
    experts: Sequence[int] | None = None,
) -> dict[str, Division]:
    """Name -> division of every tensor of the model and of its adapter in ``layers``. ``refusal`` knows none against it."""
    wanted, rules = set(layers), _Rules(chain, tuning, shares, experts)
    specs = {**chain.parameters, **chain.constants, **tuning.trainable}
    return {name: rules.of(spec) for name, spec in specs.items() if spec.layer in wanted}


class _Rules:
    def __init__(
        self, chain: TransformersChain, tuning: Trained, shares: Sequence[int], experts: Sequence[int] | None
    ) -> None:
        self._chain, self._shares, self._experts = chain, shares, experts
        self._unit = BLOCK if tuning.nf4 else None
        self._of_moments = EIGHT_BIT in tuning.moments.values()
        self._styles = styles(chain)
        self._containers = containers(chain)
        model = chain.model
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        self._ends = {name for name, module in model.named_modules() if module in ends}
        """Names of the embedding and of the output projection."""

    def of(self, spec: ParameterSpec) -> Division:
        module, _, leaf = spec.name.rpartition(".")
        if not 0 < spec.layer < self._chain.layer_count - 1:
            if module in self._ends:
                return Division(Holding.CUT, 0, self._in_proportion(spec.shape[0], _unit(spec.shape[0])))
            return Division(Holding.WHOLE)
        module, _, adapter = module.partition(".lora_")
        local = module.replace(WRAPPED, "")[len(f"{self._chain.blocks_name}.{spec.layer - 1}.") :]
        container = local.partition(".")[0]
        if container not in self._containers or spec.name in self._chain.constants:
            return Division(Holding.WHOLE)
        if self._styles.get(local) == _EXPERTS:
            return self._of_experts(spec, module.replace(WRAPPED, ""), adapter)
        style = self._styles.get(f"{local}.{leaf}" if local == container else local)
        dim = self._cut_dimension(spec, module, style, adapter or leaf)
        if dim is not None:
            pieces = 2 if style == _TWO else 1
            return Division(Holding.CUT, dim, self._inner_bounds(container, spec.shape[dim] // pieces), pieces)
        alone = self._styles.get(local) == _ROWWISE and leaf == "bias"
        return Division(Holding.LEADER if alone else Holding.SUMMED)

    def _cut_dimension(self, spec: ParameterSpec, module: str, style: str | None, leaf: str) -> int | None:
        """``leaf``: "weight", "bias", or "A" and "B" of an adapter."""
        if style in (_COLWISE, _OVER_HEADS, _TWO):
            return None if leaf == "A" else 0
        if style == _ROWWISE:
            return 1 if leaf in ("weight", "A") else None
        norm = not isinstance(self._chain.model.get_submodule(module), nn.Linear)
        of_heads = norm and len(spec.shape) == 2 and is_attention(module.rpartition(".")[0].rpartition(".")[2])
        return 0 if of_heads else None

    def _inner_bounds(self, container: str, width: int) -> tuple[int, ...]:
        if not is_attention(container):
            whole_blocks = self._of_moments and width % MOMENT_BLOCK == 0
            return self._in_proportion(width, self._unit or (MOMENT_BLOCK if whole_blocks else _unit(width)))
        of_a_head = width // sum(self._shares)
        return tuple(of_a_head * heads for heads in (0, *accumulate(self._shares)))

    def _of_experts(self, spec: ParameterSpec, module: str, adapter: str) -> Division:
        """Whole experts of a fused parameter, or of an adapter's A (experts x r, in) or B (out, r x experts)."""
        count = next(one.shape[0] for name, one in self._chain.parameters.items() if name.startswith(f"{module}."))
        bounds = self._expert_bounds(count)
        if adapter == "B":
            return Division(Holding.CUT, 1, bounds, spec.shape[1] // count)
        return Division(Holding.CUT, 0, tuple(spec.shape[0] // count * bound for bound in bounds))

    def _expert_bounds(self, count: int) -> tuple[int, ...]:
        return (0, *accumulate(self._experts)) if self._experts is not None else self._in_proportion(count, 1)

    def _in_proportion(self, width: int, unit: int) -> tuple[int, ...]:
        """Whole units in proportion to the shares."""
        return (0, *(unit * round(width * end / sum(self._shares) / unit) for end in accumulate(self._shares)))


def _unit(width: int) -> int:
    unit = _ALIGNED
    while unit > 1 and (width % unit or width < unit * _FINENESS):
        unit //= 2
    return unit


def styles(chain: TransformersChain) -> dict[str, str]:
    """Module within a block ("mlp.up_proj") -> how the table cuts it."""
    prefix = f"{chain.blocks_name}.*."
    table = {name: style for name, style in (chain.model._tp_plan or {}).items() if name.startswith(prefix)}
    return {name[len(prefix) :]: style for name, style in table.items()} | _FURTHER.get(chain.name, {})


def rowwise(chain: TransformersChain) -> list[str]:
    """The linear layers within a block with which a share of attention or of an MLP ends: those cut by columns."""
    return [name for name, style in styles(chain).items() if style == _ROWWISE]


def containers(chain: TransformersChain) -> set[str]:
    """The modules of a block of which each member computes a share: attention and MLP."""
    return {name.partition(".")[0] for name in rowwise(chain)}


def expert_modules(chain: TransformersChain) -> list[str]:
    """The modules within a block that have all experts of it, in blocks that have some."""
    return [name for name, style in styles(chain).items() if style == _EXPERTS]


def is_of_experts(chain: TransformersChain, name: str) -> bool:
    """Has a parameter, or a tensor of its adapter, all experts of its layer?"""
    module = name.rpartition(".")[0].partition(".lora_")[0].replace(WRAPPED, "")
    return module.endswith(tuple(f".{own}" for own in expert_modules(chain)))


def experts_to_share(chain: TransformersChain) -> int | None:
    """Experts of each layer that has some; None: there are none."""
    counts = (spec.shape[0] for name, spec in chain.parameters.items() if is_of_experts(chain, name))
    return max(counts, default=None)


def norms_over_heads(chain: TransformersChain) -> list[str]:
    """The norms within a block of which each member has the numbers of its heads."""
    return [name for name, style in styles(chain).items() if style == _OVER_HEADS]


def is_attention(container: str) -> bool:
    """Whether a module of a block is attention."""
    return "attn" in container or "attention" in container
