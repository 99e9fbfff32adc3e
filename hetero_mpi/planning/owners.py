"""The owners of the optimizer's state (fp32 masters and moments) of each trained parameter that several pipelines hold.

Whole parameters are dealt, the largest first, to the holder that is furthest from its share: that of its weight among the holders
of each layer. A function of the plan and of the parameters' sizes, so every rank, a checkpoint and a later start deal alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from hetero_mpi.planning.schedule import held_by
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import Plan, StagePlan

Key = TypeVar("Key")
_UNITS_PER_BLOCK = 8
"""Where only a layer's trained numbers are known, a block counts as so many parameters; embedding and head are one each."""
_MIN_STATE_WEIGHT = 0.01
"""Least share of the optimizer's state that a rank owns, against the largest one."""


def owners(plan: Plan, sizes: Mapping[Key, tuple[int, int]]) -> dict[Key, int]:
    """The rank that owns each parameter, in the order of ``sizes``.

    Args:
        sizes: parameter -> (its layer, how many numbers it has).
    """
    return _owners(plan.holders, plan.state_weights, sizes)


def _owners(
    holders: Sequence[tuple[int, ...]], weight: Mapping[int, float], sizes: Mapping[Key, tuple[int, int]]
) -> dict[Key, int]:
    """``owners``. ``holders``: the ranks of each layer; ``weight``: of each rank."""
    deficits = dict.fromkeys(weight, 0.0)
    layer_weights = [sum(weight[rank] for rank in ranks) for ranks in holders]
    for layer, size in sizes.values():
        for rank in holders[layer]:
            deficits[rank] += size * weight[rank] / layer_weights[layer]
    owner_by_key: dict[Key, int] = {}
    for key, (layer, size) in sorted(sizes.items(), key=lambda entry: -entry[1][1]):  # stable
        owner_by_key[key] = max(holders[layer], key=deficits.__getitem__)
        deficits[owner_by_key[key]] -= size
    return {key: owner_by_key[key] for key in sizes}


def owned_share(plan: Plan, model: ModelCost, number: int) -> float:
    """Trained numbers of a stage that its rank owns, if parameters could be divided: what it takes to step them."""
    stage, weight, owned = plan.numbered[number][2], plan.state_weights, 0.0
    for layer in range(stage.first, stage.last):
        layer_weight = sum(weight[rank] for rank in held_by(plan, layer))
        owned += model.layers[layer].trainable_parameters * weight[stage.ranks[0]] / layer_weight
    return owned


def owned_state_bytes(plan: Plan, model: ModelCost, part: ModelCost | None = None) -> dict[int, float]:
    """Rank -> bytes of moments and masters that it owns, of whole parameters as far as a model's cost tells their sizes; or of a
    ``part`` of them, which a member of a group holds."""
    owned, cost = dict.fromkeys(plan.state_weights, 0.0), part or model
    ratios = [cost.owned_bytes(i, i + 1) / max(1, layer.trainable_parameters) for i, layer in enumerate(model.layers)]
    for (layer, _), (rank, count) in owned_units(plan, model).items():
        owned[rank] += count * ratios[layer]
    return owned


def owned_units(plan: Plan, model: ModelCost) -> Mapping[tuple[int, int], tuple[int, int]]:
    """(layer, unit) -> the rank that owns its state, and its trained numbers. A model's cost tells no sizes of parameters: units
    stand for them."""
    trained = tuple(layer.trainable_parameters for layer in model.layers)
    return _owned_units(plan.holders, tuple(plan.state_weights.items()), trained)


def weighted(plan: Plan, free: Mapping[int, float]) -> Plan:
    """The plan with ranks owning optimizer state by the bytes that it leaves ``free`` when they own none."""
    max_free = max(1.0, *free.values())

    def reweighted(stage: StagePlan) -> StagePlan:
        return replace(stage, state_weight=max(_MIN_STATE_WEIGHT, round(free[stage.ranks[0]] / max_free, 2)))

    return plan.with_stages(reweighted(stage) for _, _, stage in plan.numbered)


@lru_cache(maxsize=512)
def _owned_units(
    holders: tuple[tuple[int, ...], ...], weights: tuple[tuple[int, float], ...], trained: tuple[int, ...]
) -> Mapping[tuple[int, int], tuple[int, int]]:
    """``owned_units`` by what decides it: plans that differ in depths or recompute share the answer."""
    sizes = {}
    for layer, count in enumerate(trained):
        units = _UNITS_PER_BLOCK if 0 < layer < len(trained) - 1 else 1
        for unit in range(units):
            sizes[layer, unit] = layer, (unit + 1) * count // units - unit * count // units
    return {key: (rank, sizes[key][1]) for key, rank in _owners(holders, dict(weights), sizes).items()}
