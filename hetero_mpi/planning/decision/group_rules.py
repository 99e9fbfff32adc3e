"""What a stage that several ranks hold must keep to."""

from __future__ import annotations

from collections.abc import Iterator

from hetero_mpi.planning.types.plan import WARM_UP, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile


def group_problems(number: int, stage: StagePlan, plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    """What is wrong with the ranks and shares of a stage, each with the rule and the values. Ranks that the profile lacks are
    named elsewhere."""
    where, ranks = f"stage {number}", list(stage.ranks)
    if not stage.grouped:
        if stage.shares:
            yield f"{where} has shares = {list(stage.shares)} and one rank: shares are for several ranks; leave them out"
        if stage.experts is not None:
            yield f"{where} has experts = {list(stage.experts)} and one rank: experts are for several ranks; leave them out"
        return
    yield from _share_problems(where, stage, profile)
    if profile.emulated:
        yield f"{where} names ranks {ranks}: with [cluster] emulate a stage is held by exactly one rank"
    hosts = list(dict.fromkeys(profile.devices[rank].host for rank in ranks if 0 <= rank < len(profile.devices)))
    if len(hosts) > 1:
        yield f"{where} names ranks {ranks} of the hosts {', '.join(hosts)}: the ranks of a stage are of one host"
    if ranks != sorted(ranks):
        yield f"{where} names ranks {ranks}: the ranks of a stage are listed in increasing order"
    if len(plan.pipelines) > 1:
        yield f"{where} names ranks {ranks} in a plan of {len(plan.pipelines)} pipelines: stages of several ranks need one pipeline"
    if stage.streamed or stage.slice_sequences is not None:
        what = "streamed = true" if stage.streamed else f"slice_sequences = {stage.slice_sequences}"
        yield f"{where} names ranks {ranks} and has {what}: only a stage of one rank has; leave it out"
    pipeline = next(one for one in plan.pipelines if stage in one.stages)
    if pipeline.split_backward or pipeline.order != WARM_UP:
        settings = [f'order = "{pipeline.order}"'] if pipeline.order != WARM_UP else []
        settings += ["split_backward = true"] if pipeline.split_backward else []
        yield (
            f"{where} names ranks {ranks}, and its pipeline has {' and '.join(settings)}: a stage of several ranks goes back in "
            f"one part, in the order {WARM_UP}; leave it out"
        )
    ends = pipeline.stages[0], pipeline.stages[-1]
    tied = profile.model.tied and profile.model.layers[0].trainable_parameters > 0
    if tied and len(pipeline.stages) > 1 and any(end.grouped for end in ends):
        yield (
            f"{where} names ranks {ranks}: where embedding and head share a trained matrix, a first or last stage of several ranks "
            f"holds the whole chain; make it the only stage, or give the ends to one rank each"
        )


def _share_problems(where: str, stage: StagePlan, profile: ClusterProfile) -> Iterator[str]:
    ranks, shares, heads = list(stage.ranks), list(stage.shares), profile.model.heads
    if len(shares) != len(ranks) or min(shares) < 0 or stage.idles:
        experts = f" and experts = {list(stage.experts)}" if stage.experts is not None else ""
        yield (
            f"{where} has shares = {shares}{experts} for ranks {ranks}: every rank needs its share, a whole number of at least 1, "
            f"or 0 where it has experts"
        )
    elif heads is None:
        yield (
            f"{where} names ranks {ranks}: this model cannot be divided among ranks as the job trains it (in the way are other "
            f"families than plain ones of transformers, dropout, [adapter] dora or parameters, an 8-bit [train] optimizer, and "
            f"matrices that NF4 packs across a cut; `train --plan` says which); give the stage one rank"
        )
    elif sum(shares) != heads:
        yield (
            f"{where} has shares = {shares}, in all {sum(shares)}: they are key/value heads, of which the model has {heads}; "
            f"make them add up to {heads}"
        )
    yield from _expert_problems(where, stage, profile.model.experts)


def _expert_problems(where: str, stage: StagePlan, experts: int | None) -> Iterator[str]:
    if stage.experts is None:
        return
    found = list(stage.experts)
    if experts is None:
        yield f"{where} has experts = {found}: the model has no experts that ranks can share; leave them out"
    elif len(found) != len(stage.ranks) or min(found) < 0 or sum(found) != experts:
        yield (
            f"{where} has experts = {found} for ranks {list(stage.ranks)}: each rank has a number of them, perhaps 0, and they add "
            f"up to the model's {experts}"
        )
