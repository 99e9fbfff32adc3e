"""Assign the sharded optimizer state (fp32 master weights and moments) of replicated parameters to owner ranks.

Parameters are assigned, largest first, to the holder furthest below its weighted share. The result depends only on the plan and
the parameter sizes, so all ranks, checkpoints and later runs agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import Plan, StagePlan

Key = TypeVar("Key")
_BLOCK_UNIT_COUNT = 8
"""Number of equal units that stand for a block's parameters of unknown sizes; embedding and head are one unit each."""
_MIN_STATE_WEIGHT = 0.01
"""Minimum share of optimizer state relative to the largest one."""


def owners(plan: Plan, sizes: Mapping[Key, tuple[int, int]]) -> dict[Key, int]:
    """Return the owner rank of each parameter; ``sizes`` maps each parameter to (its layer, number of elements)."""
    return _owners(plan.holders, plan.state_weights, sizes)


def _owners(
    holders: Sequence[tuple[int, ...]], weight: Mapping[int, float], sizes: Mapping[Key, tuple[int, int]]
) -> dict[Key, int]:
    """Like ``owners``, given the ranks that hold each layer and the weight of each rank."""
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
    """Trainable elements of a stage that its rank would own if parameters were divisible, to time the optimizer step."""
    stage, weight, owned = plan.numbered[number][2], plan.state_weights, 0.0
    for layer in range(stage.first, stage.last):
        layer_weight = sum(weight[rank] for rank in plan.holders[layer])
        owned += model.layers[layer].trainable_parameters * weight[stage.ranks[0]] / layer_weight
    return owned


def owned_state_bytes(plan: Plan, model: ModelCost, part: ModelCost | None = None) -> dict[int, float]:
    """Map each rank to its bytes of owned moments and master weights, of ``model`` or a tensor-parallel ``part``."""
    owned, cost = dict.fromkeys(plan.state_weights, 0.0), part or model
    ratios = [cost.owned_bytes(i, i + 1) / max(1, layer.trainable_parameters) for i, layer in enumerate(model.layers)]
    for (layer, _), (rank, count) in owned_units(plan, model).items():
        owned[rank] += count * ratios[layer]
    return owned


def owned_units(plan: Plan, model: ModelCost) -> Mapping[tuple[int, int], tuple[int, int]]:
    """Map (layer, unit) to (owner rank, trainable elements); units stand for parameters of unknown sizes."""
    trained = tuple(layer.trainable_parameters for layer in model.layers)
    return _owned_units(plan.holders, tuple(plan.state_weights.items()), trained)


def weighted(plan: Plan, free: Mapping[int, float]) -> Plan:
    """Weight each rank's share of optimizer state by the bytes it would have ``free`` without any state."""
    max_free = max(1.0, *free.values())

    def reweighted(stage: StagePlan) -> StagePlan:
        return replace(stage, state_weight=max(_MIN_STATE_WEIGHT, round(free[stage.ranks[0]] / max_free, 2)))

    return plan.with_stages(reweighted(stage) for _, _, stage in plan.numbered)


@lru_cache(maxsize=512)
def _owned_units(
    holders: tuple[tuple[int, ...], ...], weights: tuple[tuple[int, float], ...], trained: tuple[int, ...]
) -> Mapping[tuple[int, int], tuple[int, int]]:
    """Cached ``owned_units``: plans that differ only in depth or recomputation share the result."""
    sizes = {}
    for layer, count in enumerate(trained):
        units = _BLOCK_UNIT_COUNT if 0 < layer < len(trained) - 1 else 1
        for unit in range(units):
            sizes[layer, unit] = layer, (unit + 1) * count // units - unit * count // units
    return {key: (rank, sizes[key][1]) for key, rank in _owners(holders, dict(weights), sizes).items()}
