"""Check whether tensor parallelism supports a model and shares; each message states the rule, the values and the remedy."""

import math
from collections.abc import Sequence

from torch import nn

from hetero_mpi.model.group.division import (
    Trained,
    containers,
    divisions,
    experts_to_share,
    heads_of,
    is_of_experts,
    key_value_heads,
    norms_over_heads,
)
from hetero_mpi.model.group.tensor_division import Division
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.layer.quantize import BLOCK_SIZE
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.supported import DIVIDED_FAMILIES, UNDIVIDED_FAMILIES
from hetero_mpi.planning.types.moments import EIGHT_BIT
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.sizes import MOMENT_BLOCK_SIZE
from hetero_mpi.util.errors import UserError


def refusal(
    chain: LayerChain, tuning: Trained, shares: Sequence[int], experts: Sequence[int] | None = None
) -> str | None:
    """Explain why a group with these shares cannot train the model (rule, values, remedy); return None if it can."""
    if not isinstance(chain, TransformersChain):
        return (
            f"tensor parallelism supports language models of transformers only, and {chain.name} is a custom model: give each rank "
            f"its own stage"
        )
    if chain.name not in DIVIDED_FAMILIES:
        return (
            f"tensor parallelism does not support {chain.name} models: the family {UNDIVIDED_FAMILIES[chain.name]}; give each "
            f"rank its own stage, or use one of {', '.join(DIVIDED_FAMILIES)}"
        )
    return (
        _refused_tuning(chain, tuning)
        or _refused_idle_heads(chain, tuning, shares)
        or _refused_shares(chain, shares, experts)
        or _refused_cuts(chain, tuning, shares, experts)
    )


def require_divisible(chain: LayerChain, tuning: Trained, plan: Plan) -> None:
    """Check that the plan's tensor-parallel groups can train the model; raise UserError with the reason if one cannot."""
    for number, _, stage in plan.numbered:
        reason = refusal(chain, tuning, stage.shares, stage.experts) if stage.grouped else None
        if reason is not None:
            raise UserError(
                "plan.indivisible", f"plan: stage {number} of ranks {', '.join(map(str, stage.ranks))}: {reason}"
            )


def _refused_tuning(chain: TransformersChain, tuning: Trained) -> str | None:
    remedy = "or give each rank its own stage"
    drawn = {n: v for n, v in vars(chain.config).items() if chain.draws and ("drop" in n or "jitter" in n) and v}
    if tuning.adapter is not None and tuning.adapter.dropout > 0 and not _adapts_shares_only(chain, tuning):
        drawn["[adapter] dropout"] = tuning.adapter.dropout
    if drawn or chain.draws:
        rates = ", ".join(f"{name} = {value}" for name, value in drawn.items())
        return (
            f"random settings ({rates}) would differ between the ranks of a tensor-parallel group, which must compute the "
            f"same values: set them to 0, {remedy}"
        )
    if not {EIGHT_BIT}.issuperset(tuning.moments.values()):
        problem = f'updates full matrices, which tensor parallelism shards: set it to "adamw", {remedy}'
        return f'[train] optimizer = "{tuning.optimizer}" {problem}'
    if tuning.tokens:
        return (
            "[adapter] tokens: tensor parallelism cannot train single token embeddings: train the full modules "
            '([adapter] modules_to_save = ["embed_tokens", "lm_head"]), or give each rank its own stage'
        )
    return None


def _adapts_shares_only(chain: TransformersChain, tuning: Trained) -> bool:
    """Whether all adapters are in sharded modules, where dropout masks may differ between ranks."""
    prefixes = tuple(
        f"{chain.blocks_name}.{block}.{container}." for block in range(chain.blocks) for container in containers(chain)
    )
    return all(name.startswith(prefixes) for name in tuning.trainable)


def _refused_idle_heads(chain: TransformersChain, tuning: Trained, shares: Sequence[int]) -> str | None:
    reason = needs_heads(chain, tuning)
    if reason is None or 0 not in shares:
        return None
    return f"shares {', '.join(map(str, shares))} leave a rank without heads, and {reason}: give each rank at least one head"


def needs_heads(chain: TransformersChain, tuning: Trained) -> str | None:
    """Explain why every rank needs heads, as the end of a sentence; return None if a rank may have none."""
    if tuning.adapter is not None and tuning.adapter.dropout > 0:
        return "it would draw no dropout masks where other ranks do"
    if norms_over_heads(chain):
        return f"{chain.name} has norms over the heads of all ranks"
    if tuning.adapter is not None and tuning.adapter.dora:
        return "DoRA sums row norms over all ranks of the group"
    return None


def _refused_shares(chain: TransformersChain, shares: Sequence[int], experts: Sequence[int] | None) -> str | None:
    heads = key_value_heads(chain)
    reason = _refused_experts(chain, shares, experts)
    if reason is not None:
        return reason
    expert_counts = experts if experts is not None else [0] * len(shares)
    idle = any(share == count == 0 for share, count in zip(shares, expert_counts, strict=True))
    if sum(shares) != heads or min(shares, default=0) < 0 or idle:
        experts_text = f"; experts {', '.join(map(str, experts))}" if experts is not None else ""
        return (
            f"the shares of a group must be numbers of key/value heads, at least 1 for each rank without experts, that add up to "
            f"the model's {heads}; found {', '.join(map(str, shares))}{experts_text}: choose others"
        )
    for block in range(chain.blocks):
        if heads_of(chain, block) not in (None, heads):
            return (
                f"tensor parallelism needs the same number of key/value heads in every block; block {block} has "
                f"{heads_of(chain, block)}, block 0 has {heads}: give each rank its own stage"
            )
    return None


def _refused_experts(chain: TransformersChain, shares: Sequence[int], experts: Sequence[int] | None) -> str | None:
    if experts is None:
        return None
    count = experts_to_share(chain)
    if count is None:
        return f"experts = {', '.join(map(str, experts))}: {chain.name} models have no fused experts: remove `experts`"
    if sum(experts) != count or len(experts) != len(shares) or min(experts) < 0:
        return (
            f"the experts of a group must be one number for each of its {len(shares)} ranks, and add up to the model's {count}; "
            f"found {', '.join(map(str, experts))}: choose others"
        )
    return None


def _refused_cuts(
    chain: TransformersChain, tuning: Trained, shares: Sequence[int], experts: Sequence[int] | None
) -> str | None:
    for name, division in divisions(chain, tuning, shares, range(chain.layer_count), experts).items():
        size = chain.parameters[name].shape[division.dim] if name in chain.parameters else None
        if division.cut and size is not None and division.pieces * division.bounds[-1] != size:
            return (
                f"NF4 packs {BLOCK_SIZE} weights at a time, and {name} has {size} columns or rows to shard, not a multiple: give "
                f'each rank its own stage, or set [model] quantization to "none"'
            )
        if tuning.moments.get(name) == EIGHT_BIT and division.cuts_blocks(
            tuning.trainable[name].shape, MOMENT_BLOCK_SIZE
        ):
            return (
                f"8-bit optimizer states have blocks of {MOMENT_BLOCK_SIZE}, and a shard bound lies within a block of {name}, "
                f"{' x '.join(map(str, tuning.trainable[name].shape))}, at {', '.join(map(str, division.bounds))}: choose other "
                f'shares, or set [train] optimizer to "adamw"'
            )
        of_experts = is_of_experts(chain, name)
        # A rank is left without experts or heads only on request.
        may_be_empty = (of_experts and experts is not None) or not division.cut
        if not may_be_empty and any(not division.exists(member) for member, share in enumerate(shares) if share > 0):
            return (
                f"shares {', '.join(map(str, shares))} leave a rank without a shard of {name}, which is sharded at "
                f"{', '.join(map(str, division.bounds))}: use fewer ranks, or shares that differ less"
            )
        if tuning.nf4 and name in chain.parameters and 0 < chain.parameters[name].layer < chain.layer_count - 1:
            reason = _refused_packing(chain, name, division, of_experts)
            if reason is not None:
                return reason
    return None


def _refused_packing(chain: TransformersChain, name: str, division: Division, of_experts: bool) -> str | None:
    module, _, leaf = name.rpartition(".")
    linear = leaf == "weight" and isinstance(chain.model.get_submodule(module), nn.Linear)
    if not division.cut or not (linear or of_experts):
        return None
    shape = chain.parameters[name].shape
    row = math.prod(shape[1:])
    ends = [bound * (row if division.dim == 0 else 1) for bound in division.bounds]
    if any(end % BLOCK_SIZE for end in (*ends, row)):
        unit = "experts" if of_experts else "columns" if division.dim else "rows"
        return (
            f"NF4 packs {BLOCK_SIZE} weights at a time, and blocks cross shards of {name}, {' x '.join(map(str, shape))}, at "
            f'the {unit} {", ".join(map(str, division.bounds))}: choose other shares, or set [model] quantization to "none"'
        )
    return None
