"""Decide which ranks compile their blocks (``[train] compile``), before anything is measured."""

from __future__ import annotations

from dataclasses import replace

from hetero_mpi.profiling.bench import CompileTrial, try_compiled_block
from hetero_mpi.profiling.benchmark_spec import device_key, key_of, load_cached, store_cached
from hetero_mpi.rundir.logs import say
from hetero_mpi.training.setup.context import RunContext
from hetero_mpi.training.setup.profile_and_plan import subject_of
from hetero_mpi.util import units


def settle_compile_mode(context: RunContext) -> RunContext:
    """Return the context with ``[train] compile`` resolved and ``compiled`` set for this rank. Collective."""
    world, mode = context.world, context.job.train.compile
    compiles = mode is True or (mode is not False and context.backend.compiles_by_default)
    trials: list[CompileTrial] = []
    if any(world.all_gather_json(compiles)):
        world.current_action = "compiling a block"
        trial = _trial(context, mode == "auto") if compiles else CompileTrial()
        world.sleeping_barrier()
        trials = [CompileTrial(*fields) for fields in world.all_gather_json(trial)]
        compiles = compiles and not trial.failure
    for failure in dict.fromkeys(result.failure for result in trials if result.failure):
        ranks = [rank for rank, result in enumerate(trials) if result.failure == failure]
        say(f"{units.ranks(ranks)}: blocks are eager, not compiled: {failure}")
    if mode == "auto":
        compared = [result for result in trials if result.compiled_s]
        mode = "accelerators" if compared and all(result.faster for result in compared) else False
        for _, compiled_s, eager_s, _ in compared[:1]:
            say(f"a block takes {units.seconds(compiled_s)} compiled, {units.seconds(eager_s)} eager: compile = {mode}")
    compiles = compiles and mode is not False
    train = context.job.train.model_copy(update={"compile": any(world.all_gather_json(compiles)) and mode})
    loaded = replace(context.loaded, job=context.job.model_copy(update={"train": train}))
    return replace(context, loaded=loaded, compiled=compiles)


def _trial(context: RunContext, compares: bool) -> CompileTrial:
    """Try a compiled block on this rank, or reuse an earlier comparison, so that a resumed run decides in the same way."""
    data, (subject, _) = context.job.data, subject_of(context)
    if context.job.train.preference != "none" or (data.records and data.packing and data.isolate is not False):
        return CompileTrial("packed records are computed one by one")
    key = key_of(["compiled", device_key(context.world, context.backend, subject, 0)])
    earlier = load_cached(key) if compares and context.job.profile.cache else None
    trial = CompileTrial(*earlier) if earlier else try_compiled_block(subject, context.backend, compares)
    if trial.compiled_s:
        store_cached(key, trial)
    context.backend.free_unused()
    return trial
