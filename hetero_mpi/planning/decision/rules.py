"""Rules for hand-written plans; each reported problem states the rule and the values that break it."""

import itertools
import math
from collections.abc import Iterator

from hetero_mpi.planning.orders import INTERLEAVINGS, ORDERS, follows, schedule_title
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util import units
from hetero_mpi.util.terminal import wrap_text


def plan_problems(plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    """Yield problems, other than memory, that prevent a plan from running."""
    layers = len(profile.model.layers)
    if plan.layers != layers:
        chain = units.layers(0, layers, layers, plan.sequence_length)
        yield f"layers = {plan.layers}: the model's chain has {layers} layers ({chain})"
    yield from chain_problems(plan, profile.model)
    yield from _rank_problems(plan, profile)


def chain_problems(plan: Plan, model: ModelCost | None = None) -> Iterator[str]:
    """Yield problems of a plan with any ranks; without ``model``, those with any model."""
    layers = plan.layers if model is None else len(model.layers)
    if not plan.pipelines:
        yield "pipelines = []: a plan needs at least one pipeline"
    for index, pipeline in enumerate(plan.pipelines):
        if pipeline.order not in ORDERS:
            depths = f"gpipe, 1f1b and split are order = {WARM_UP!r} with the stages' warm_up (and split_backward)"
            yield f"pipelines[{index}].order = {pipeline.order!r}: must be one of {', '.join(ORDERS)}; {depths}"
        elif pipeline.order in INTERLEAVINGS and not pipeline.interleaved:
            yield f"pipelines[{index}].order = {pipeline.order!r}: for several stages per rank; with one, use {WARM_UP!r}"
        expected, max_depth = 0, pipeline.micro_batches if pipeline.micro_batch > 0 else math.inf
        for number, stage in enumerate(pipeline.stages):
            where = f"pipelines[{index}].stages[{number}]"
            if stage.first != expected or stage.last <= stage.first:
                yield (
                    f"{where} holds layers [{stage.first}, {stage.last}): it must begin with layer {expected} and hold at least one"
                )
            if not 0 <= stage.warm_up <= max_depth:
                yield f"{where}.warm_up = {stage.warm_up}: must be 0 to {max_depth} (micro-batches of the pipeline)"
            if stage.slice_sequences is not None and stage.slice_sequences < 1:
                yield f"{where}.slice_sequences = {stage.slice_sequences}: must be at least 1"
            slices = stage.slices(pipeline.micro_batch) * stage.streamed
            if not 0 <= stage.kept_slices <= slices:
                yield f"{where}.kept_slices = {stage.kept_slices}: must be 0 to {slices} (slices of an offloaded stage)"
            max_on_disk = len(stage.blocks(layers)) * (stage.streamed and (model is None or not model.trained_whole))
            if not 0 <= stage.on_disk <= max_on_disk:
                yield f"{where}.on_disk = {stage.on_disk}: must be 0 to {max_on_disk} (blocks of an offloaded stage with adapters)"
            if not 0 < stage.state_weight < math.inf:
                yield f"{where}.state_weight = {stage.state_weight}: must be a number above 0"
            if pipeline.split_backward and number > 0 and (stage.streamed or stage.slice_sequences is not None):
                yield f"{where} is streamed or computed in slices, so its backward cannot be split: remove split_backward"
            expected = stage.last
        if expected != layers:
            yield f"pipelines[{index}] ends with layer {expected - 1}: the chain's last layer is {layers - 1}"
        if not 1 <= pipeline.micro_batch <= pipeline.sequences:
            yield (
                f"pipelines[{index}]: micro_batch = {pipeline.micro_batch} of sequences = {pipeline.sequences}: must be at "
                f"least 1 and no more than its sequences"
            )
    shares = [pipeline.sequences for pipeline in plan.pipelines]
    if sum(shares) != plan.global_batch:
        terms = " + ".join(map(str, shares))
        yield f"sequences = {terms}: the pipelines' shares must add up to global_batch = {plan.global_batch}"


def _rank_problems(plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    used: dict[int, tuple[int, StagePlan]] = {}
    for number, index, stage in plan.numbered:
        yield from group_problems(number, stage, plan, profile)
        splits = plan.pipelines[index].split_backward and stage.first > 0
        for rank in stage.ranks:
            where = f"stage {number} names rank {rank}"
            if not 0 <= rank < len(profile.devices):
                yield f"{where}: the profile has ranks 0 to {len(profile.devices) - 1}"
            elif rank in used:
                yield from _reuse(f"{where} again", plan.pipelines[index], used[rank][0] == index, stage, used[rank][1])
            elif profile.model.dtype not in profile.devices[rank].dtypes:
                yield f"{where}, whose device does not support {profile.model.dtype}"
            elif splits and all(times.input_s is None for times in profile.devices[rank].layers.values()):
                yield f"{where}, for which the profile has no times of a split backward (input_s, weight_s): remove split_backward"
            used[rank] = index, stage


def _reuse(where: str, pipeline: PipelinePlan, same: bool, stage: StagePlan, earlier: StagePlan) -> Iterator[str]:
    """Yield problems with a rank's second stage. ``same``: both stages are in the same pipeline."""
    if not same:
        yield f"{where}: a rank can be in one pipeline only"
    elif pipeline.order not in INTERLEAVINGS:
        orders = " or ".join(sorted(INTERLEAVINGS))
        yield f"{where}, and the pipeline's order is {pipeline.order!r}: several stages per rank need {orders}"
    if stage.streamed or earlier.streamed:
        yield f"{where}: a rank with an offloaded stage can hold no other stage"
    if stage.state_weight != earlier.state_weight:
        weights = f"{earlier.state_weight} and {stage.state_weight}"
        yield f"{where}: state_weight is {weights}, but a rank has only one: make them equal"


def batch_problems(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield batch sizes that differ from the job's."""
    if plan.global_batch != request.global_batch:
        remedy = "change [train] global_batch, or plan again"
        yield f"global_batch = {plan.global_batch}: the job has {request.global_batch}; {remedy}"
    if plan.sequence_length != request.sequence_length:
        remedy = f"the job has {request.sequence_length}; change [data] sequence_length, or plan again"
        yield f"sequence_length = {plan.sequence_length}: {remedy}"
    if request.mask_sequences is not None:
        yield from _mask_problems(plan, request.mask_sequences)


def _mask_problems(plan: Plan, sequences: int) -> Iterator[str]:
    """Yield pipelines whose dropout masks would differ: in every plan, masks must be drawn for ``sequences`` at a time."""
    for index, pipeline in enumerate(plan.pipelines):
        micro_batch, share = pipeline.micro_batch, pipeline.sequences
        sizes = {min(stage.slice_sequences or micro_batch, micro_batch) for stage in pipeline.stages}
        fitting = {size for size in sizes if len(sizes) == 1 and micro_batch % size == share % size == 0}
        if sequences not in fitting:
            change = f", or change the job: [train] micro_batch = {min(fitting)}" if fitting else ""
            yield (
                f"pipelines[{index}] computes {' and '.join(map(str, sorted(sizes)))} of its {share} sequences at a time: this "
                f"job draws dropout masks for {sequences} at a time, in every plan. Set micro_batch = {sequences} there, "
                f"without slice_sequences, and shares that are multiples of {sequences}{change}"
            )


def request_differences(plan: Plan, request: PlanRequest) -> list[str]:
    """List differences between a given plan and the request that do not prevent the plan from running."""
    sentences = []
    if len(plan.pipelines) > request.max_pipelines:
        sentences.append(f"{len(plan.pipelines)} pipelines: the job allows at most {request.max_pipelines}")
    stages = [stage for _, _, stage in plan.numbered]
    if request.streaming == "never" and any(stage.streamed for stage in stages):
        sentences.append("stages are streamed: the job has plan.offload = false")
    if not request.groups and plan.leader_of:
        sentences.append("ranks share stages: the job has plan.tensor_parallel = false")
    max_stages = max(len(plan.of_rank(rank)) for rank in plan.ranks)
    if max_stages > request.stages_per_rank:
        sentences.append(f"{max_stages} stages on a rank: the job allows at most {request.stages_per_rank}")
    sizes = micro_batch_sizes(plan, request)
    for index, pipeline in enumerate(plan.pipelines):
        where, choices = f"pipelines[{index}]", ", ".join(map(str, sizes))
        if pipeline.micro_batch not in sizes:
            sentences.append(f"{where}: micro_batch = {pipeline.micro_batch}: the job allows {choices}")
        if pipeline.split_backward and True not in request.split_choices:
            sentences.append(f"{where}: split_backward = true: the job does not allow it")
        if not follows(pipeline, request.schedule):
            sentences.append(f'{where}: {schedule_title(pipeline)}: the job has plan.schedule = "{request.schedule}"')
        unlike = [i for i, stage in enumerate(pipeline.stages) if stage.recompute not in request.recompute_choices]
        if unlike:
            stages_text = ", ".join(map(str, unlike))
            does = str(pipeline.stages[unlike[0]].recompute).lower()
            sentences.append(f"{where}: recompute = {does} of stages {stages_text}: unlike the job's train.recompute")
    return sentences


def difference_lines(plan: Plan, request: PlanRequest) -> list[str]:
    texts = request_differences(plan, request)
    return [line for text in texts for line in wrap_text("The given plan differs from the job: ", text)]


def micro_batch_sizes(plan: Plan, request: PlanRequest) -> list[int]:
    """Allowed micro-batch sizes, including larger ones for a single rank or with tensor-parallel groups."""
    larger = request.alone_micro_batch_choices if plan.leader_of or len(plan.ranks) == 1 else ()
    return sorted({*request.micro_batch_choices, *larger})


def group_problems(number: int, stage: StagePlan, plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    """Yield problems with a stage's ranks and shares, except ranks missing from the profile (``_rank_problems``)."""
    problems = _single_problems(stage, plan)
    if stage.grouped:
        problems = itertools.chain(_share_problems(stage, profile.model), _group_problems(stage, plan, profile))
    return (f"stage {number} of ranks {list(stage.ranks)}: {problem}" for problem in problems)


def _single_problems(stage: StagePlan, plan: Plan) -> Iterator[str]:
    if stage.streamed and plan.leader_of and len(plan.pipelines) > 1:
        yield f"streamed = true in a plan of {len(plan.pipelines)} pipelines: offloading with tensor parallelism needs one pipeline"
    if stage.shares:
        yield f"shares = {list(stage.shares)}: only stages of several ranks have shares; remove the key"
    if stage.experts is not None:
        yield f"experts = {list(stage.experts)}: only stages of several ranks have experts; remove the key"


def _group_problems(stage: StagePlan, plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    ranks, pipeline = list(stage.ranks), next(candidate for candidate in plan.pipelines if stage in candidate.stages)
    if profile.emulated:
        yield "with [cluster] emulate, a stage must have exactly one rank"
    hosts = list(dict.fromkeys(profile.devices[rank].host for rank in ranks if 0 <= rank < len(profile.devices)))
    if len(hosts) > 1:
        yield f"its ranks are on {', '.join(hosts)}: all ranks of a stage must be on one host"
    if ranks != sorted(ranks):
        yield "the ranks of a stage must be listed in increasing order"
    if stage.streamed or stage.slice_sequences is not None:
        setting = "streamed = true" if stage.streamed else f"slice_sequences = {stage.slice_sequences}"
        yield f"{setting}: only a stage of one rank can have this; remove it"
    if pipeline.split_backward or pipeline.order != WARM_UP:
        settings = [f'order = "{pipeline.order}"'] * (pipeline.order != WARM_UP)
        settings += ["split_backward = true"] * pipeline.split_backward
        requirement = f"supports only the order {WARM_UP}, without a split backward; remove these settings"
        yield f"its pipeline has {' and '.join(settings)}: a stage of several ranks {requirement}"
    ends = pipeline.stages[0], pipeline.stages[-1]
    tied = profile.model.tied and profile.model.layers[0].trainable_parameters > 0
    if tied and len(pipeline.stages) > 1 and any(end.grouped for end in ends):
        yield (
            "if embedding and head share a trained matrix, a first or last stage of several ranks must be the only stage; merge "
            "the stages, or give each end to one rank"
        )


def _share_problems(stage: StagePlan, model: ModelCost) -> Iterator[str]:
    shares, split = list(stage.shares), None if stage.experts is None else list(stage.experts)
    if len(shares) != len(stage.ranks) or min(shares) < 0 or stage.idles:
        experts = f" and experts = {split}" if split is not None else ""
        yield f"shares = {shares}{experts}: every rank needs a share, a whole number of at least 1, or 0 if the rank has experts"
    elif model.heads is None:
        yield (
            "the profile's [model] has no `heads`, so ranks cannot share layers: give the stage one rank. `profile` omits `heads` "
            "where tensor parallelism does not support the job (`train --plan` says why); a hand-written profile needs it, and the "
            "keys in docs/tensor-parallelism.md"
        )
    elif sum(shares) != model.heads:
        heads = f"and the model has {model.heads}; make them add up to {model.heads}"
        yield f"shares = {shares}, {sum(shares)} in total: shares count key/value heads, {heads}"
    if split is not None and model.experts is None:
        yield f"experts = {split}: the model has no experts that ranks can share; remove the key"
    elif split is not None and (len(split) != len(stage.ranks) or min(split) < 0 or sum(split) != model.experts):
        yield f"experts = {split}: must be one number for each rank, at least 0, and add up to the model's {model.experts}"
