"""Lower bounds on the step time of an instance, and of an instance that one pipeline must carry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.memory import usable_bytes
from hetero_mpi.planning.types.cost import GRADIENT_BYTES
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest

PIVOTS = 2000
"""The simplex method stops here at the latest; what it has then is still a valid bound."""


def usable_devices(profile: ClusterProfile) -> list[DeviceProfile]:
    """The devices that offer the model's compute dtype."""
    return [device for device in profile.devices if profile.model.dtype in device.dtypes]


def fluid_bound_s(profile: ClusterProfile, request: PlanRequest) -> float:
    """Total work over total speed under memory: no plan over these ranks is faster.

    Layers are taken to be divisible at will among the ranks, messages and the filling of the pipeline to cost nothing;
    every rank holds, per share of a layer, its parameters, state and the activations of one micro-batch. The best over
    the micro-batch choices, of every rank by itself where several pipelines may choose differently. Infinite: the model
    does not fit even so.
    """
    sizes = sorted(set(request.micro_batch_choices))
    if request.max_pipelines > 1:
        return _fluid_s(profile, request, sizes)
    return min(_fluid_s(profile, request, [micro_batch]) for micro_batch in sizes)


def least_s(times: LayerTimes, tokens: int, request: PlanRequest) -> float:
    """Forward and backward of one micro-batch, in whichever way the request leaves to choose from."""
    backward = times.backward_s.at(tokens)
    may_split = request.schedule == "split" or (request.schedule == "auto" and True in request.split_choices)
    if may_split and times.input_s is not None and times.weight_s is not None:
        backward = min(backward, times.input_s.at(tokens) + times.weight_s.at(tokens))
    return times.forward_s.at(tokens) + backward


def _fluid_s(profile: ClusterProfile, request: PlanRequest, micro_batches: Sequence[int]) -> float:
    """The linear program: least T such that every kind of layer is dealt out, and no rank works longer than T or holds
    more than it can. Equal ranks share one row: dealing out evenly among them is as good as any other way."""
    devices = usable_devices(profile)
    if not devices:
        return float("inf")
    tokens = min(micro_batches) * request.sequence_length
    kinds = list(dict.fromkeys((layer, place == 0) for place, layer in enumerate(reversed(profile.model.layers))))
    keeps = not any(request.recompute_choices)
    shared = profile.model.tied_bytes // GRADIENT_BYTES if profile.model.tied else 0
    held, trained = [], []
    for layer, is_head in kinds:
        # A rank that holds both ends of a tied model keeps their matrix once: the relaxation never counts it twice.
        twice = shared if is_head else 0
        trainable = max(0, layer.trainable_parameters - twice)
        parameter_bytes = layer.parameter_bytes * (layer.parameters - twice) / max(1, layer.parameters)
        activations = layer.activation_bytes_per_token * tokens if keeps else 0.0
        state = trainable * profile.model.state_bytes_per_trainable_parameter - layer.eight_bit_saving_bytes
        held.append(max(0.0, parameter_bytes) + state + activations)
        trained.append(trainable)
    ranks: dict[tuple[float, ...], int] = {}
    for device in devices:
        compute = [
            request.global_batch
            * min(
                least_s(device.layers[layer.kind], size * request.sequence_length, request) / size
                for size in micro_batches
            )
            for layer, _ in kinds
        ]
        work = [s + device.optimizer_s_per_parameter * n for s, n in zip(compute, trained, strict=True)]
        row = (*work, float(usable_bytes(device.memory_bytes, request.memory_reserve)))
        ranks[row] = ranks.get(row, 0) + 1
    table = np.array(sorted(ranks))
    many = np.array([ranks[row] for row in sorted(ranks)], dtype=float)
    counts = [
        sum((other, place == 0) == kind for place, other in enumerate(reversed(profile.model.layers))) for kind in kinds
    ]
    # A group of n equal ranks works n times as fast and holds n times as much.
    dealt = _deal_out_s(
        table[:, :-1] / many[:, None], np.array(held), table[:, -1] * many, np.array(counts, dtype=float)
    )
    # Every used rank also spends its optimizer's fixed time, and at least one rank is used.
    return float(dealt + min(device.optimizer_fixed_s for device in devices))


def _deal_out_s(
    work: NDArray[np.float64], held: NDArray[np.float64], usable: NDArray[np.float64], counts: NDArray[np.float64]
) -> float:
    """A lower bound on T by linear programming duality; optimal but for rounding.

    For any prices y, z >= 0 of the ranks' time and memory with sum(y) = 1, dealing out layer kind k costs at least
    ``min over r (y_r work_rk + z_r held_k)`` per layer, so ``T >= sum_k count_k min_r(...) - sum_r z_r usable_r``. The
    simplex method finds the best prices; the formula is then evaluated as it stands, so that rounding cannot break the
    bound.
    """
    ranks, kinds = work.shape
    time_unit, byte_unit = max(work.max(), 1e-30), max(held.max(), usable.max(), 1.0)
    work, held, usable = work / time_unit, held / byte_unit, usable / byte_unit
    # Maximise counts.u - usable.z subject to u_k <= y_r work_rk + z_r held_k for all r, k and sum(y) <= 1; all >= 0.
    rows = np.zeros((ranks * kinds + 1, kinds + 2 * ranks))
    for r in range(ranks):
        for k in range(kinds):
            row = r * kinds + k
            rows[row, k], rows[row, kinds + r], rows[row, kinds + ranks + r] = 1.0, -work[r, k], -held[k]
    rows[-1, kinds : kinds + ranks] = 1.0
    right = np.zeros(len(rows))
    right[-1] = 1.0
    solution = _simplex(rows, right, np.concatenate([counts, np.zeros(ranks), -usable]))
    if solution is None:
        return float("inf")
    y, z = np.maximum(solution[kinds : kinds + ranks], 0.0), np.maximum(solution[kinds + ranks :], 0.0)
    y = y / y.sum() if y.sum() > 0 else np.full(ranks, 1.0 / ranks)
    cheapest = (y[:, None] * work + z[:, None] * held[None, :]).min(axis=0)
    return max(0.0, float((counts @ cheapest - z @ usable) * time_unit))


def _simplex(
    rows: NDArray[np.float64], right: NDArray[np.float64], gain: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """The x >= 0 that maximises gain.x where rows.x <= right (right >= 0); None when unbounded.

    Dantzig's rule (the variable with the most to gain) first, since it needs few pivots; then Bland's, which never cycles.
    """
    count, variables = rows.shape
    table = np.hstack([rows, np.eye(count), right[:, None]])
    price = np.concatenate([gain, np.zeros(count + 1)])
    basis = np.arange(variables, variables + count)
    tiny = 1e-11
    for pivot in range(PIVOTS):
        entering = np.flatnonzero(price[:-1] > tiny)
        if entering.size == 0:
            break
        column = entering[0] if pivot >= PIVOTS // 2 else int(price[:-1].argmax())
        positive = np.flatnonzero(table[:, column] > tiny)
        if positive.size == 0:
            return None
        ratios = table[positive, -1] / table[positive, column]
        ties = positive[ratios <= ratios.min() + tiny]
        row = ties[np.argmin(basis[ties])]
        table[row] /= table[row, column]
        # Most rows of this table are zero in most columns: only the others change.
        touched = np.flatnonzero(table[:, column])
        touched = touched[touched != row]
        table[touched] -= np.outer(table[touched, column], table[row])
        price -= price[column] * table[row]
        basis[row] = column
    solution = np.zeros(variables + count)
    solution[basis] = table[:, -1]
    return solution[:variables]
