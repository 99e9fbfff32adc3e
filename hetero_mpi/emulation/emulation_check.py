"""A check before the first step of an emulated run: the stand-in model's own arithmetic must fit into the emulated times.

Two things are checked. Each action must fit by itself; the ranks try theirs one after the other. The ranks of a host together must
also leave its cores free often enough that an action that waits for a core still ends in time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

import torch

from hetero_mpi import units
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.emulation.emulated_cluster import Emulation
from hetero_mpi.emulation.paced_stage import PacedStage
from hetero_mpi.engine.placement import Placement
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.model.library_optimizers import LibraryOptimizers
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.types.moments import TWO

_REPEATS = 5
OVERRUN = 0.01
"""Largest share of the predicted step by which a rank's arithmetic may exceed the emulated times, summed over a step."""
BUSY = 0.5
"""Largest share of a host's core time that its ranks may spend on arithmetic."""
_RULE = "the stand-in's own arithmetic must fit into the emulated times"
_NAMES = {
    Op.F: "a forward",
    Op.B: "a backward",
    Op.I: "a backward's input part",
    Op.W: "a backward's weight part",
    Op.STEP: "an optimizer step",
}


@dataclass(frozen=True)
class _Trial:
    """The timings of one rank, compared with the emulated times."""

    rank: int
    host: str
    cores: float
    work_s: float
    """Arithmetic of a whole step."""
    late_s: float
    """Arithmetic of a step beyond the emulated times, added up over its actions."""
    scale: float
    """The smallest ``time_scale`` tried, each a tenth larger than the one before, at which ``late_s`` is within ``OVERRUN``."""
    late: str
    """The actions that take too long, in words."""


def check_emulated_times(trainer: Trainer, world: World, emulation: Emulation, predicted_step_s: float) -> None:
    """Time each rank's forward, backward and optimizer step on made-up data. Collective; changes no state. Raises UserError: the
    arithmetic takes too long; says by how much, and which ``time_scale`` would do.
    """
    own: dict[Action, float] = {}
    for turn in range(world.size):
        if turn == world.rank and trainer.optimizer is not None:
            for paced, place in zip(trainer.stages, trainer.places, strict=True):
                own |= _compute_s(cast(PacedStage, paced).stage, place, emulation, trainer)
            own[Action(Op.STEP, trainer.places[0].index)] = _optimizer_s(trainer)
        world.meet_asleep()
    step_s = emulation.time_scale * predicted_step_s
    trial = _trial(own, trainer, world.host, emulation, step_s)
    trials = [_Trial(**fields) for fields in world.all_gather_json(asdict(trial))]
    world.agree(_too_slow(trials, emulation, step_s) or _too_crowded(trials, emulation, step_s))


def _compute_s(stage: Stage, place: Placement, emulation: Emulation, trainer: Trainer) -> dict[Action, float]:
    """Median seconds of one micro-batch's forward and backward (or the backward's two parts). A first run is not counted."""
    plan = emulation.stand_in_plan
    assert trainer.optimizer is not None
    pipeline = plan.pipelines[place.pipeline]
    shape = (pipeline.micro_batch, plan.sequence_length)
    device = stage.backend.device
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    x = (
        tokens
        if stage.is_first
        else torch.zeros(trainer.chain.boundary(stage.first - 1, *shape), dtype=stage.dtype, device=device)
    )
    backward = (Op.I, Op.W) if pipeline.split_backward and not stage.is_first else (Op.B,)
    times: dict[Op, list[float]] = {op: [] for op in (Op.F, *backward)}
    weights = lambda index, _: stage.backward_weights(index)  # noqa: E731
    calls: dict[Op, Callable[..., object]] = {Op.B: stage.backward, Op.I: stage.backward_input, Op.W: weights}
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        y = stage.forward(MicroBatch(0, 0, 0, tokens.numel()), x, tokens if stage.is_last else None)
        dy = None if stage.is_last else torch.zeros_like(y)
        times[Op.F].append(time.perf_counter() - begin)
        for op in backward:
            times[op].append(_seconds(partial(calls[op], 0, dy)))
    trainer.optimizer.zero()
    return {Action(op, place.index, 0): statistics.median(seconds[1:]) for op, seconds in times.items()}


def _optimizer_s(trainer: Trainer) -> float:
    """Seconds of the optimizer's step on copies of what this rank trains."""
    optimizer = trainer.optimizer
    assert optimizer is not None
    copies = []
    for name, target in optimizer.targets.items():
        copy = torch.nn.Parameter(target.detach().clone())
        copy.grad = torch.zeros_like(copy)
        copies.append((copy, True, trainer.tuning.moments.get(name, TWO), 1.0))
    if not copies:
        return 0.0
    library = LibraryOptimizers(optimizer.train, trainer.backend.fused_optimizer(), copies)
    return statistics.median([_seconds(lambda: library.step(0.0)) for _ in range(_REPEATS + 1)][1:])


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _trial(own: Mapping[Action, float], trainer: Trainer, host: str, emulation: Emulation, step_s: float) -> _Trial:
    """``own``: seconds of one action of each kind of each stage."""
    if not own:
        return _Trial(trainer.rank, host, emulation.cores, 0.0, 0.0, 0.0, "")
    assert trainer.pipeline is not None
    lasts_s = {action: emulation.pace.lasts_s(action) for action in own}
    times = emulation.plan.pipelines[trainer.pipeline].micro_batches

    def in_step(seconds: Mapping[Action, float]) -> float:
        return sum(value * (1 if action.op is Op.STEP else times) for action, value in seconds.items())

    def late_s(longer: float) -> float:
        return in_step({action: max(0.0, seconds - longer * lasts_s[action]) for action, seconds in own.items()})

    longer = 1.0
    while late_s(longer) > OVERRUN * longer * step_s:
        longer *= 1.1
    parts = [
        f"{_NAMES[action.op]} takes {units.seconds(seconds)} here and is to last {units.seconds(lasts_s[action])}, "
        f"{units.seconds(seconds - lasts_s[action])} less"
        for action, seconds in own.items()
        if seconds > lasts_s[action]
    ]
    scale = longer * emulation.time_scale
    return _Trial(trainer.rank, host, emulation.cores, in_step(own), late_s(1.0), scale, "; ".join(parts))


def _too_slow(trials: Sequence[_Trial], emulation: Emulation, step_s: float) -> str | None:
    """The message about the rank that is latest; None where it is within ``OVERRUN``."""
    latest = max(trials, key=lambda trial: trial.late_s)
    if latest.late_s <= OVERRUN * step_s:
        return None
    scale = max(trial.scale for trial in trials)
    return f"{_RULE}: on rank {latest.rank} {latest.late}. {_remedy(scale, emulation)}"


def _too_crowded(trials: Sequence[_Trial], emulation: Emulation, step_s: float) -> str | None:
    """The message about the host whose cores are busiest; None where it is within ``BUSY``."""
    shares = {}
    for host in dict.fromkeys(trial.host for trial in trials):
        here = [trial for trial in trials if trial.host == host]
        shares[host] = sum(trial.work_s for trial in here) / (step_s * sum(trial.cores for trial in here))
    host = max(shares, key=lambda name: shares[name])
    if shares[host] <= BUSY:
        return None
    scale = emulation.time_scale * shares[host] / BUSY
    return (
        f"{_RULE}, with cores to spare: the ranks of {host} together compute {units.percent(shares[host])} of the time of its "
        f"cores, at most {units.percent(BUSY)} will do. {_remedy(scale, emulation)}"
    )


def _remedy(scale: float, emulation: Emulation) -> str:
    """The remedy. The suggested scale has a tenth to spare."""
    now = f"now {emulation.time_scale:g}"
    return f"Set [cluster] time_scale = {1.1 * scale:.2g} ({now}), or make the model or its sequences smaller"
