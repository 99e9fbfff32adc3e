"""Why a group of ranks does not train a model, or not with such shares: the rule, the values, the next step."""

from __future__ import annotations

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
from hetero_mpi.model.layer.quantize import BLOCK
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.supported import DIVIDED_FAMILIES, UNDIVIDED_FAMILIES
from hetero_mpi.planning.types.moments import EIGHT_BIT
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.sizes import MOMENT_BLOCK
from hetero_mpi.util.errors import UserError


def refusal(
    chain: LayerChain, tuning: Trained, shares: Sequence[int], experts: Sequence[int] | None = None
) -> str | None:
    """Why the model cannot be trained by a group with such shares: rule, values, next step. None: it can."""
    if not isinstance(chain, TransformersChain):
        return (
            f"a group of ranks divides the layers of language models of transformers, and {chain.name} is made of layers of its "
            f"own: give each rank a stage of its own"
        )
    if chain.name not in DIVIDED_FAMILIES:
        return (
            f"the layers of {chain.name} models cannot be divided within a group of ranks: the family "
            f"{UNDIVIDED_FAMILIES[chain.name]}; give each rank a stage of its own, or take one of {', '.join(DIVIDED_FAMILIES)}"
        )
    return (
        _refused_tuning(chain, tuning)
        or _refused_idle_heads(chain, tuning, shares)
        or _refused_shares(chain, shares, experts)
        or _refused_cuts(chain, tuning, shares, experts)
    )


def require_divisible(chain: LayerChain, tuning: Trained, plan: Plan) -> None:
    """:raises UserError: groups cannot train the model as the plan divides it, with the setting that stands in the way."""
    for number, _, stage in plan.numbered:
        reason = refusal(chain, tuning, stage.shares, stage.experts) if stage.grouped else None
        if reason is not None:
            raise UserError(
                "plan.indivisible", f"plan: stage {number} of ranks {', '.join(map(str, stage.ranks))}: {reason}"
            )


def _refused_tuning(chain: TransformersChain, tuning: Trained) -> str | None:
    alone = "or give each rank a stage of its own"
    drawn = {n: v for n, v in vars(chain.config).items() if chain.draws and ("drop" in n or "jitter" in n) and v}
    if tuning.adapter is not None and tuning.adapter.dropout > 0 and not _adapts_shares_only(chain, tuning):
        drawn["[adapter] dropout"] = tuning.adapter.dropout
    if drawn or chain.draws:
        found = ", ".join(f"{name} = {value}" for name, value in drawn.items())
        return (
            f"the random numbers of dropout ({found}) would be others on each rank of a group, where all must compute the same: "
            f"set it to 0, {alone}"
        )
    if not {EIGHT_BIT}.issuperset(tuning.moments.values()):
        how = f'steps whole matrices, which a group of ranks cuts: set it to "adamw", {alone}'
        return f'[train] optimizer = "{tuning.optimizer}" {how}'
    if tuning.tokens:
        return (
            "[adapter] tokens: rows of single tokens are not divided within a group of ranks: train the whole modules "
            '([adapter] modules_to_save = ["embed_tokens", "lm_head"]), or give each rank a stage of its own'
        )
    return None


def _adapts_shares_only(chain: TransformersChain, tuning: Trained) -> bool:
    """Whether adapters are within what each member computes a share of, where unlike masks of unlike devices do no harm."""
    prefixes = tuple(
        f"{chain.blocks_name}.{block}.{own}." for block in range(chain.blocks) for own in containers(chain)
    )
    return all(name.startswith(prefixes) for name in tuning.trainable)


def _refused_idle_heads(chain: TransformersChain, tuning: Trained, shares: Sequence[int]) -> str | None:
    reason = needs_heads(chain, tuning)
    if reason is None or 0 not in shares:
        return None
    return f"shares {', '.join(map(str, shares))} leave a rank without heads, and {reason}: give each rank one at least"


def needs_heads(chain: TransformersChain, tuning: Trained) -> str | None:
    """Why every member needs heads, as the end of a sentence; None: it does not."""
    if tuning.adapter is not None and tuning.adapter.dropout > 0:
        return "it would draw no masks of dropout where others do"
    if norms_over_heads(chain):
        return f"{chain.name} has norms over the heads of all"
    if tuning.adapter is not None and tuning.adapter.dora:
        return "DoRA adds up the lengths of rows over all members"
    return None


def _refused_shares(chain: TransformersChain, shares: Sequence[int], experts: Sequence[int] | None) -> str | None:
    heads = key_value_heads(chain)
    reason = _refused_experts(chain, shares, experts)
    if reason is not None:
        return reason
    own = experts if experts is not None else [0] * len(shares)
    idle = any(share == count == 0 for share, count in zip(shares, own, strict=True))
    if sum(shares) != heads or min(shares, default=0) < 0 or idle:
        found = f"; experts {', '.join(map(str, experts))}" if experts is not None else ""
        return (
            f"the shares of a group are whole key/value heads, one at least for each rank that is given no experts, and add up to "
            f"the model's {heads}; found {', '.join(map(str, shares))}{found}: choose others"
        )
    for block in range(chain.blocks):
        if heads_of(chain, block) not in (None, heads):
            return (
                f"a group of ranks shares the key/value heads, as many in each block; block {block} has "
                f"{heads_of(chain, block)}, block 0 has {heads}: give each rank a stage of its own"
            )
    return None


def _refused_experts(chain: TransformersChain, shares: Sequence[int], experts: Sequence[int] | None) -> str | None:
    if experts is None:
        return None
    count = experts_to_share(chain)
    if count is None:
        return f"experts = {', '.join(map(str, experts))}: {chain.name} models have no fused experts to share: leave it out"
    if sum(experts) != count or len(experts) != len(shares) or min(experts) < 0:
        return (
            f"the experts of a group are a number for each of its {len(shares)} ranks, and add up to the model's {count}; found "
            f"{', '.join(map(str, experts))}: choose others"
        )
    return None


def _refused_cuts(
    chain: TransformersChain, tuning: Trained, shares: Sequence[int], experts: Sequence[int] | None
) -> str | None:
    for name, division in divisions(chain, tuning, shares, range(chain.layer_count), experts).items():
        whole = chain.parameters[name].shape[division.dim] if name in chain.parameters else None
        if division.cut and whole is not None and division.pieces * division.bounds[-1] != whole:
            return (
                f"NF4 packs {BLOCK} weights at a time, and {name} has {whole} columns or rows to divide, no multiple of that: give "
                f'each rank a stage of its own, or set [model] quantization to "none"'
            )
        if tuning.moments.get(name) == EIGHT_BIT and division.cuts_blocks(tuning.trainable[name].shape, MOMENT_BLOCK):
            return (
                f"moments in 8 bits are blocks of {MOMENT_BLOCK}, and a group of ranks cuts within one of {name}, "
                f"{' x '.join(map(str, tuning.trainable[name].shape))}, at {', '.join(map(str, division.bounds))}: choose other "
                f'shares, or set [train] optimizer to "adamw"'
            )
        of_experts = is_of_experts(chain, name)
        # Only who asks for a rank without experts, or without heads, gets one.
        asked = (of_experts and experts is not None) or not division.cut
        if not asked and any(not division.exists(member) for member, share in enumerate(shares) if share > 0):
            return (
                f"shares {', '.join(map(str, shares))} leave a rank without a part of {name}, which is cut at "
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
    if any(end % BLOCK for end in (*ends, row)):
        what = "experts" if of_experts else "columns" if division.dim else "rows"
        return (
            f"NF4 packs {BLOCK} weights at a time, and a group of ranks cuts {name}, {' x '.join(map(str, shape))}, at the {what} "
            f'{", ".join(map(str, division.bounds))}: choose other shares, or set [model] quantization to "none"'
        )
    return None
