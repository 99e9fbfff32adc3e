"""Plans whose heads compute logits and losses of some tokens at a time, and again in backward, where memory asks for it.

The searches know nothing of that: they are given a cluster whose heads have that memory and those times.
"""

from __future__ import annotations

from dataclasses import replace

from hetero_mpi.planning.memory import sliced_costs
from hetero_mpi.planning.types.cost import HEAD
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest

TOKENS = 1024
"""Of a slice: few enough that logits of 150,000 words take less than a gigabyte, enough for a device to be as fast as it can."""


def head_sliced(profile: ClusterProfile, request: PlanRequest) -> ClusterProfile:
    """The profile where heads compute in slices; ``profile`` itself where they cannot, have no more than one, or backward is asked
    for in two parts."""
    model, splits = sliced_costs(profile.model, TOKENS), request.schedule not in ("auto", "1f1b", "gpipe")
    if model is profile.model or splits or request.sequence_length * max(request.micro_batch_choices) <= TOKENS:
        return profile
    devices = (
        replace(
            one,
            layers=_repeating(one.layers),
            halved=_repeating(one.halved),
            without_experts=_repeating(one.without_experts),
        )
        for one in profile.devices
    )
    return replace(profile, model=model, devices=tuple(devices))


def with_sliced_heads(plan: Plan) -> Plan:
    """A plan for ``head_sliced`` as one for the cluster as it is."""
    stages = (stage for _, _, stage in plan.numbered)
    return plan.with_stages(replace(one, head_tokens=TOKENS) if one.last == plan.layers else one for one in stages)


def _repeating(layers: dict[str, LayerTimes]) -> dict[str, LayerTimes]:
    """The times with the head's forward in its backward."""
    if HEAD not in layers:
        return layers
    forward, backward = layers[HEAD].forward_s, layers[HEAD].backward_s
    counts = tuple(sorted({*forward.tokens, *backward.tokens}))
    both = Curve(counts, tuple(forward.at(count) + backward.at(count) for count in counts))
    return {**layers, HEAD: LayerTimes(forward, both)}
