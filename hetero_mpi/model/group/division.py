"""Sharding of a model's tensors for tensor parallelism (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053) with unequal shards.

    8 key/value heads, shares (5, 3):   q, k, v (colwise)   rows of heads 0-4       | rows of heads 5-7
                                        o (rowwise)         columns of heads 0-4    | columns of heads 5-7
                                        MLP                 5/8 of its columns      | 3/8
                                        embedding, head     5/8 of the vocabulary   | 3/8

transformers' table (``base_model_tp_plan``) names the column-parallel (colwise) and row-parallel (rowwise) linear layers of a
block. Fused experts are sharded by whole experts. A rank with experts may have no heads; it then has no MLP columns or vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from torch import nn

from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.group.tensor_division import Division, Holding
from hetero_mpi.model.layer.interface import WRAPPED, ParameterSpec
from hetero_mpi.model.layer.quantize import BLOCK_SIZE
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.planning.types.moments import EIGHT_BIT
from hetero_mpi.planning.types.sizes import MOMENT_BLOCK_SIZE

_COLWISE, _ROWWISE, _EXPERTS = "colwise", "rowwise", "moe_tp_experts"
_HEAD_NORM = "norm over heads"
"""A style that is not in transformers' table: a norm over all heads."""
_FUSED_PAIR = "two colwise"
"""A style that is not in transformers' table: two stacked matrices, each column-parallel."""
_LATENT = dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"), _COLWISE)
_LATENT["self_attn.o_proj"] = _ROWWISE
"""Latent attention: heads are sharded, and every rank computes the latents."""
_SHARED = dict.fromkeys(("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), _COLWISE)
_SHARED["mlp.shared_experts.down_proj"] = _ROWWISE
_ATTENTION = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.sinks"), _COLWISE)
_ATTENTION["self_attn.o_proj"] = _ROWWISE
_HEAD_NORMS = _ATTENTION | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), _HEAD_NORM)
_FUSED_MLP = {"mlp.gate_up_proj": _FUSED_PAIR, "mlp.down_proj": _ROWWISE}
_GATED = _ATTENTION | {"self_attn.gate_proj": _COLWISE}
_FAMILY_STYLES = {
    **dict.fromkeys(("deepseek_v3", "sarvam_mla", "youtu"), _LATENT),
    **dict.fromkeys(("exaone_moe", "solar_open"), _SHARED),
    **dict.fromkeys(("flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmo_hybrid"), _HEAD_NORMS),
    **dict.fromkeys(("glm", "glm4"), _FUSED_MLP),
    "afmoe": _GATED | _SHARED,
    "flint": _ATTENTION,
    "glm4_moe_lite": _SHARED | _LATENT,
    "gpt_oss": _ATTENTION | {"mlp.experts": _EXPERTS, "mlp.experts.down_proj": _ROWWISE},
    "minimax_m3_vl_text": _ATTENTION
    | _FUSED_MLP
    | {n.replace("mlp.", "mlp.shared_experts."): s for n, s in _FUSED_MLP.items()},
    "qwen2_moe": {name.replace("experts", "expert"): style for name, style in _SHARED.items()},
}
"""Maps each family to the entries missing from its table."""
_ALIGNED_COLUMN_COUNT = 64
"""Shard bounds at multiples of this number of columns are fast on all devices."""
_MIN_UNITS = 64
"""Minimum number of units in an MLP or a vocabulary, so that shards are within 1 % of the requested proportion."""


class Trained(Protocol):
    """The attributes of a ``Tuning`` that sharding depends on."""

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
    """Return the number of key/value heads of a block with sharded attention; 0 if the model has no such block."""
    return next((heads for block in range(chain.blocks) if (heads := heads_of(chain, block)) is not None), 0)


def heads_of(chain: TransformersChain, block: int) -> int | None:
    """Return a block's number of key/value heads; None if every rank computes the whole attention (linear attention)."""
    modules = dict(chain.model.get_submodule(f"{chain.blocks_name}.{block}").named_children())
    attention_modules = [modules[name] for name in containers(chain) if is_attention(name) and name in modules]
    if not attention_modules:
        return None
    keys = next((module for module in attention_modules if hasattr(module, "k_proj")), None)
    if keys is None:  # one fused matrix, or latent attention: one key per query head
        return int(chain.config.num_attention_heads)
    return int(keys.k_proj.out_features // keys.head_dim)


def divisions(
    chain: TransformersChain,
    tuning: Trained,
    shares: Sequence[int],
    layers: Iterable[int],
    experts: Sequence[int] | None = None,
) -> dict[str, Division]:
    """Map the tensors of the model and its adapter in ``layers`` to their sharding; ``refusal`` must return None."""
    requested, rules = set(layers), _Rules(chain, tuning, shares, experts)
    specs = {**chain.parameters, **chain.constants, **tuning.trainable}
    return {name: rules.division(spec) for name, spec in specs.items() if spec.layer in requested}


class _Rules:
    def __init__(
        self, chain: TransformersChain, tuning: Trained, shares: Sequence[int], experts: Sequence[int] | None
    ) -> None:
        self._chain, self._shares, self._experts = chain, shares, experts
        self._unit = BLOCK_SIZE if tuning.nf4 else None
        self._of_moments = EIGHT_BIT in tuning.moments.values()
        self._styles = styles(chain)
        self._containers = containers(chain)
        model = chain.model
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        self._ends = {name for name, module in model.named_modules() if module in ends}
        """Names of the embedding and output projection modules."""

    def division(self, spec: ParameterSpec) -> Division:
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
            pieces = 2 if style == _FUSED_PAIR else 1
            return Division(Holding.CUT, dim, self._inner_bounds(container, spec.shape[dim] // pieces), pieces)
        alone = self._styles.get(local) == _ROWWISE and leaf == "bias"
        return Division(Holding.LEADER if alone else Holding.SUMMED)

    def _cut_dimension(self, spec: ParameterSpec, module: str, style: str | None, leaf: str) -> int | None:
        """Return the sharded dimension, or None. ``leaf`` is "weight", "bias", or, for an adapter, "A" or "B"."""
        if style in (_COLWISE, _HEAD_NORM, _FUSED_PAIR):
            return None if leaf == "A" else 0
        if style == _ROWWISE:
            return 1 if leaf in ("weight", "A") else None
        norm = not isinstance(self._chain.model.get_submodule(module), nn.Linear)
        of_heads = norm and len(spec.shape) == 2 and is_attention(module.rpartition(".")[0].rpartition(".")[2])
        return 0 if of_heads else None

    def _inner_bounds(self, container: str, width: int) -> tuple[int, ...]:
        if not is_attention(container):
            whole_blocks = self._of_moments and width % MOMENT_BLOCK_SIZE == 0
            return self._in_proportion(width, self._unit or (MOMENT_BLOCK_SIZE if whole_blocks else _unit(width)))
        of_a_head = width // sum(self._shares)
        return tuple(of_a_head * heads for heads in (0, *accumulate(self._shares)))

    def _of_experts(self, spec: ParameterSpec, module: str, adapter: str) -> Division:
        """Shard a fused parameter, an adapter's A (experts x r, in) or an adapter's B (out, r x experts) by whole experts."""
        count = next(
            spec_of_experts.shape[0]
            for name, spec_of_experts in self._chain.parameters.items()
            if name.startswith(f"{module}.")
        )
        bounds = (0, *accumulate(self._experts)) if self._experts is not None else self._in_proportion(count, 1)
        if adapter == "B":
            return Division(Holding.CUT, 1, bounds, spec.shape[1] // count)
        return Division(Holding.CUT, 0, tuple(spec.shape[0] // count * bound for bound in bounds))

    def _in_proportion(self, width: int, unit: int) -> tuple[int, ...]:
        """Return bounds at multiples of ``unit``, in proportion to the shares."""
        return (0, *(unit * round(width * end / sum(self._shares) / unit) for end in accumulate(self._shares)))


def _unit(width: int) -> int:
    unit = _ALIGNED_COLUMN_COUNT
    while unit > 1 and (width % unit or width < unit * _MIN_UNITS):
        unit //= 2
    return unit


def styles(chain: TransformersChain) -> dict[str, str]:
    """Map each module within a block ("mlp.up_proj") to its tensor-parallel style."""
    prefix = f"{chain.blocks_name}.*."
    table = {name: style for name, style in (chain.model._tp_plan or {}).items() if name.startswith(prefix)}
    return {name[len(prefix) :]: style for name, style in table.items()} | _FAMILY_STYLES.get(chain.name, {})


def rowwise(chain: TransformersChain) -> list[str]:
    """Return the names of a block's row-parallel linear layers, which end its sharded attention and MLPs."""
    return [name for name, style in styles(chain).items() if style == _ROWWISE]


def containers(chain: TransformersChain) -> set[str]:
    """Return the names of a block's sharded modules: attention and MLP."""
    return {name.partition(".")[0] for name in rowwise(chain)}


def expert_modules(chain: TransformersChain) -> list[str]:
    """Return the names of the modules within a block that hold fused experts."""
    return [name for name, style in styles(chain).items() if style == _EXPERTS]


def is_of_experts(chain: TransformersChain, name: str) -> bool:
    """Return whether a parameter or adapter tensor belongs to its layer's fused experts."""
    module = name.rpartition(".")[0].partition(".lora_")[0].replace(WRAPPED, "")
    return module.endswith(tuple(f".{path}" for path in expert_modules(chain)))


def experts_to_share(chain: TransformersChain) -> int | None:
    """Return the number of experts in a layer that has experts; None if the model has none."""
    counts = (spec.shape[0] for name, spec in chain.parameters.items() if is_of_experts(chain, name))
    return max(counts, default=None)


def norms_over_heads(chain: TransformersChain) -> list[str]:
    """Return the names of the norms within a block that are sharded by heads."""
    return [name for name, style in styles(chain).items() if style == _HEAD_NORM]


def is_attention(container: str) -> bool:
    """Return whether a module of a block, given by name, is attention."""
    return "attn" in container or "attention" in container
