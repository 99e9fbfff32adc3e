"""Lower bounds on the step time: of a plan, and of an instance (no plan of a single pipeline can be faster)."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.memory import GRADIENT_BYTES, usable_bytes
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.profile import ClusterProfile, DeviceProfile
from hetero_mpi.planning.request import PlanRequest
from hetero_mpi.planning.schedule import Action, Op, one_f_one_b, stages
from hetero_mpi.planning.simulator import duration

PIVOTS = 2000
"""The simplex method stops here at the latest; what it has then is still a valid bound."""


def usable_devices(profile: ClusterProfile) -> list[DeviceProfile]:
    """The devices that offer the model's compute dtype."""
    return [device for device in profile.devices if profile.model.dtype in device.dtypes]


def plan_bound_s(plan: Plan, profile: ClusterProfile) -> float:
    """``max over s of [ sum over j < s (F_j + B_j + C_j + C'_j) + M (F_s + B_s) ]``, then REDUCE and the longest STEP.

    The first micro-batch has to reach stage s, which then computes M forwards and backwards, and the last gradient has
    to travel back. C and C' are the messages from j to j + 1 and back. Links are taken to carry any number at once.
    """
    longest = 0.0
    for index, pipeline in enumerate(plan.pipelines):
        numbers = [number for number, of, _ in stages(plan) if of == index]
        before = 0.0
        for number in numbers:
            compute = sum(duration(Action(op, number, 0), plan, profile) for op in (Op.F, Op.B))
            longest = max(longest, before + pipeline.micro_batches * compute)
            if number != numbers[-1]:
                out = duration(Action(Op.SEND_F, number, 0), plan, profile)
                back = duration(Action(Op.SEND_B, number + 1, 0), plan, profile)
                before += compute + out + back
    lists = one_f_one_b(plan, profile.model.tied).values()
    end = {op: [duration(a, plan, profile) for actions in lists for a in actions if a.op is op] for op in Op}
    return longest + max(end[Op.REDUCE], default=0.0) + max(end[Op.STEP])


def fluid_bound_s(profile: ClusterProfile, request: PlanRequest) -> float:
    """Total work over total speed under memory: no single pipeline over these ranks is faster.

    Items are taken to be divisible at will among the ranks, messages and the filling of the pipeline to cost nothing;
    every rank holds, per share of an item, its parameters, state and the activations of one micro-batch. The best over
    the micro-batch choices. Infinite: the model does not fit even so.
    """
    return min(_fluid_s(profile, request, micro_batch) for micro_batch in request.micro_batch_choices)


def _fluid_s(profile: ClusterProfile, request: PlanRequest, micro_batch: int) -> float:
    """The linear program: least T such that every kind of item is dealt out, and no rank works longer than T or holds
    more than it can."""
    devices = usable_devices(profile)
    if not devices:
        return float("inf")
    tokens = micro_batch * request.sequence_length
    micro_batches = request.global_batch // micro_batch
    kinds = [(layer, len(list(same))) for layer, same in groupby(profile.model.layers)]
    work = np.zeros((len(devices), len(kinds)))
    held = np.zeros(len(kinds))
    keeps = not any(request.recompute_choices)
    shared = profile.model.tied_bytes // GRADIENT_BYTES if profile.model.tied else 0
    for k, (layer, _) in enumerate(kinds):
        # A rank that holds both ends of a tied model keeps their matrix once: the relaxation never counts it twice.
        twice = shared if k == len(kinds) - 1 else 0
        trainable = max(0, layer.trainable_parameters - twice)
        parameter_bytes = layer.parameter_bytes * (layer.parameters - twice) / max(1, layer.parameters)
        activations = layer.activation_bytes_per_token * tokens if keeps else 0.0
        held[k] = (
            max(0.0, parameter_bytes) + trainable * profile.model.state_bytes_per_trainable_parameter + activations
        )
        for r, device in enumerate(devices):
            times = device.layers[layer.kind]
            compute = times.forward_s.at(tokens) + times.backward_s.at(tokens)
            work[r, k] = micro_batches * compute + device.optimizer_s_per_parameter * trainable
    usable = np.array([usable_bytes(device.memory_bytes, request.memory_reserve) for device in devices], dtype=float)
    counts = np.array([count for _, count in kinds], dtype=float)
    # Every used rank also spends its optimizer's fixed time, and at least one rank is used.
    return float(_deal_out_s(work, held, usable, counts) + min(device.optimizer_fixed_s for device in devices))


def _deal_out_s(
    work: NDArray[np.float64], held: NDArray[np.float64], usable: NDArray[np.float64], counts: NDArray[np.float64]
) -> float:
    """A lower bound on T by linear programming duality; optimal but for rounding.

    For any prices y, z >= 0 of the ranks' time and memory with sum(y) = 1, dealing out item kind k costs at least
    ``min over r (y_r work_rk + z_r held_k)`` per item, so ``T >= sum_k count_k min_r(...) - sum_r z_r usable_r``. The
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
    return max(0.0, float(counts @ cheapest - z @ usable) * time_unit)


def _simplex(
    rows: NDArray[np.float64], right: NDArray[np.float64], gain: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Maximises gain.x where rows.x <= right (right >= 0), x >= 0; None when unbounded. Bland's rule: never cycles."""
    count, variables = rows.shape
    table = np.hstack([rows, np.eye(count), right[:, None]])
    price = np.concatenate([gain, np.zeros(count + 1)])
    basis = np.arange(variables, variables + count)
    tiny = 1e-11
    for _ in range(PIVOTS):
        entering = np.flatnonzero(price[:-1] > tiny)
        if entering.size == 0:
            break
        column = entering[0]
        positive = np.flatnonzero(table[:, column] > tiny)
        if positive.size == 0:
            return None
        ratios = table[positive, -1] / table[positive, column]
        ties = positive[ratios <= ratios.min() + tiny]
        row = ties[np.argmin(basis[ties])]
        table[row] /= table[row, column]
        others = np.arange(count) != row
        table[others] -= np.outer(table[others, column], table[row])
        price -= price[column] * table[row]
        basis[row] = column
    solution = np.zeros(variables + count)
    solution[basis] = table[:, -1]
    return solution[:variables]
