"""Rebalancing: move layers away from stragglers during a run (such as a throttled laptop or a GPU that another user occupies).

Every rank adds its measurements of a step to the decision that the next step all-reduces (``StepExchange``), so no extra message is
needed. Rank 0 compares the sums with the predictions, watches the ratios (``Decider``) and requests a new plan from a separate
process (``Replanner``). All ranks change plans after the same step, which rank 0 announces in its part of the decision.

* A speed counts as changed once the median over its last steps has been outside a band around the planned speed for several
  steps in a row. The band widens with the noise.
* Since the new speed may not last, layers move only once the steps since the change have lost as much time as moving costs. The
  lost time is then at most about twice the optimum (ski rental; Karlin et al. 1988, "Competitive snoopy caching").
"""

from __future__ import annotations

import enum
import itertools
import json
import logging
import math
import statistics
import subprocess
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.engine.trainer import StepResult
from hetero_mpi.planning.analysis.calibration import LinkBetween, Pair, WatchedPart, drifted_profile, part_text
from hetero_mpi.planning.analysis.step_comparison import RankMeasurement, StepExchange
from hetero_mpi.planning.fit import median_error
from hetero_mpi.planning.schedule import holders
from hetero_mpi.planning.types.codec import decode, encode
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import append_event
from hetero_mpi.state.saving import MAX_MEMORY_RATIO
from hetero_mpi.training.build import lack_of_snapshot_memory
from hetero_mpi.training.setup.context import RunContext, Share
from hetero_mpi.training.setup.profile_and_plan import planning_request
from hetero_mpi.util import units
from hetero_mpi.util.background import Background, BestEffort, start_module

if TYPE_CHECKING:
    from hetero_mpi.training.replan import Prospect, ReplanAnswer, ReplanQuestion

MIN_BAND = 0.15
"""Relative deviation from the planned ratio up to which a speed counts as unchanged."""
MIN_BAND_STANDARD_ERRORS = 4.0
"""Half-width of the band in standard errors of the median, if this is wider than ``MIN_BAND``."""
MAX_MEDIAN_STEPS = 8
"""Maximum number of recent steps over which the median is taken."""
MIN_MEDIAN_STEPS = 5
"""Minimum number of steps over which a median is taken."""
MIN_MEDIANS_OUTSIDE = 3
"""Number of consecutive medians on the same side of the band that count as a change of speed."""
MAX_ANSWER_S = 300.0
"""Time limit for an answer from the planning process, in seconds."""
_LOG = logging.getLogger(__name__)


class Rebalancer:
    """One rank's part in rebalancing, over all plans of a run. All active ranks make the same calls, ``start_plan`` first."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._profile = context, context.profile
        cluster = context.job.cluster
        self._scale = cluster.time_scale if cluster.emulate is not None else 1.0
        self._hosts = [device.host for device in self._profile.devices]
        self._decider, self._replanner = Decider(range(len(self._hosts))), Replanner()
        self._answer: ReplanAnswer | None = None
        self._rebuild_s: float | None = None
        self._ready, self._has_memory = False, True
        self._share: Share | None = None
        self._word: StepExchange | None = None
        self._latest: StepResult | None = None
        self._watch = BestEffort("comparing the speed of ranks with the profile", self._consider)

    def start_plan(self, share: Share) -> None:
        """Prepare for the steps of a plan. Collective over the active ranks."""
        assert share.trainer is not None
        self._share, self._ready, self._latest = share, False, None
        self._word = StepExchange(share.trainer.rank, share.plan, self._profile, share.schedule, self._scale)
        if self._rebuild_s is None or share.seconds:
            self._rebuild_s = (share.seconds.get("keep", 0.0) + share.seconds.get("build", 0.0)) / self._scale
        lack = lack_of_snapshot_memory(share)
        if lack is not None and self._has_memory:
            limit = f"{units.percent(MAX_MEMORY_RATIO)} of the free host memory"
            say(f"Rebalancing is off: moving layers may use {limit}; {lack}")
        self._has_memory = lack is None

    def end_plan(self) -> None:
        """Drop the reference to the plan's trainer after the last step."""
        self._share = None

    def close(self) -> None:
        self.end_plan()
        self._replanner.close()

    def word(self) -> NDArray[np.float64]:
        """Return the values to all-reduce with the step decision: rank 0's request to change plans, then measurements."""
        assert self._word is not None and self._share is not None
        measurement, length, latest = None, 0, self._latest
        if latest is not None:
            measurement = RankMeasurement.from_events(self._context.world.rank, latest.events, latest.began_s)
            length = latest.length if self._share.emulation is None else self._share.plan.sequence_length
        return np.append(float(self._ready), self._word.numbers(measurement, length))

    def due(self, step: int, result: StepResult) -> bool:
        """Whether the plan changes after step ``step``, according to ``result.extras_sum``; the same on all ranks."""
        sums, self._latest = result.extras_sum, result
        if self._context.world.rank == 0 and self._has_memory and not self._ready:
            self._watch(sums[1:], self._context.job.train.steps - step - 1)
        return bool(sums[0] > 0)

    def chosen(self) -> PlanReport | None:
        """Return the plan to change to; None on ranks other than 0."""
        return self._answer.report if self._answer is not None else None

    def changed(self, step: int, old: Plan, new: Plan, stall_s: float) -> None:
        """Report on rank 0 which layers have moved, and that training paused for ``stall_s`` seconds."""
        assert self._answer is not None and self._decider.requested_ratios is not None
        prospect, moves, ratios = self._answer.prospect, moved_layers(old, new), self._decider.requested_ratios
        before, after = units.seconds(prospect.now_s), units.seconds(prospect.then_s)
        moves_text = _moves_text(moves, new) or "only warm-up depths change"
        text = f"{self._decider.sentence(self._hosts)}: {moves_text}; a step {before} -> {after}"
        text = f"{text}; training paused for {units.seconds(stall_s)}"
        self._decider.record_move()
        say(f"step {step}: {text}")
        append_event(
            self._context.run_dir,
            "rebalanced",
            text,
            step=step,
            speeds={str(part): round(1 / ratio, 4) for part, ratio in ratios.items() if isinstance(part, int)},
            moved=[{"from": a, "to": b, "layers": layers} for (a, b), layers in moves.items()],
            step_s_before=prospect.now_s,
            step_s_after=prospect.then_s,
            predicted_cost_s=prospect.cost_s,
            stall_s=stall_s,
        )

    def _consider(self, sums: NDArray[np.float64], remaining_steps: int) -> None:
        """Collect a finished replanning answer and decide on the next move. Called on rank 0 after every step."""
        assert self._word is not None
        self._decider.observe(self._word.ratios(sums))
        if self._decider.requested_ratios is not None and self._replanner.ready:
            self._answer = self._replanner.take_answer()
            prospect = self._answer.prospect if self._answer is not None else None
            self._decider.answered(prospect)
            _LOG.info("replanned: %s", prospect or "no answer; keeping the plan")
        move = self._decider.decide(remaining_steps)
        if move is Move.ASK:
            self._ask(remaining_steps)
        self._ready = move is Move.GO

    def _ask(self, remaining_steps: int) -> None:
        from hetero_mpi.training.replan import ReplanQuestion  # brings the planner, which few runs need again

        assert self._share is not None and self._rebuild_s is not None and self._decider.requested_ratios is not None
        _LOG.info("%s: replanning", self._decider.sentence(self._hosts))
        report, request = self._share.report, planning_request(self._context, self._profile)
        profile = drifted_profile(self._profile, report.plan, self._decider.requested_ratios)
        self._replanner.ask(ReplanQuestion(profile, request, report, remaining_steps, self._rebuild_s))


def rebalancer_of(context: RunContext, plan_given: bool) -> Rebalancer | None:
    """Return a run's rebalancer; None if the plan is fixed (one rank, a user's plan, or ``[plan] rebalance = false``)."""
    single_rank = len(context.profile.devices) == 1
    return None if single_rank or plan_given or not context.job.plan.rebalance else Rebalancer(context)


def moved_layers(old: Plan, new: Plan) -> dict[Pair, list[int]]:
    """Map (sending rank, receiving rank) to the layers, or shards of layers, that move; a group's first rank counts as sender."""
    before, after, layers_by_pair = holders(old), holders(new), dict[Pair, list[int]]()
    for layer in range(new.layers):
        for rank in after[layer]:
            if rank not in before[layer]:
                layers_by_pair.setdefault((before[layer][0], rank), []).append(layer)
    return layers_by_pair


def _moves_text(moves: Mapping[Pair, Sequence[int]], plan: Plan) -> str:
    """Describe moves, such as ``blocks 9-11 move from rank 1 to rank 0``."""
    texts = []
    for (a, b), moved_layers_of_pair in sorted(moves.items()):
        firsts = [layer for layer in moved_layers_of_pair if layer - 1 not in moved_layers_of_pair]
        ends = [layer + 1 for layer in moved_layers_of_pair if layer + 1 not in moved_layers_of_pair]
        names = ", ".join(units.layers(*ab, plan.layers, plan.sequence_length) for ab in zip(firsts, ends, strict=True))
        texts.append(f"{names} move from rank {a} to rank {b}")
    return "; ".join(texts)


@dataclass
class _SpeedHistory:
    """Measured ratios of one rank or link, and where they are relative to the band."""

    planned: float = 1.0
    """Ratio that the current plan assumes."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_MEDIAN_STEPS))
    jumps: deque[float] = field(default_factory=lambda: deque(maxlen=4 * MAX_MEDIAN_STEPS))
    """Absolute log-ratios of successive steps, from which the noise is estimated."""
    side: int = 0
    """Where the latest medians are: 1 above the band, -1 below it, 0 inside."""
    medians: int = 0
    """Number of consecutive medians on that side of the band."""
    steps: int = 0
    """Number of consecutive steps on that side of the band, since the speed last changed."""
    first_median: float = 1.0
    """Median at the first of these steps that were counted."""

    @property
    def median(self) -> float:
        """Median over the last steps, or the planned ratio as long as there are fewer than ``MIN_MEDIAN_STEPS``."""
        return statistics.median(self.recent) if len(self.recent) >= MIN_MEDIAN_STEPS else self.planned

    @property
    def band(self) -> float:
        """Half-width of the band as a log-ratio."""
        if not self.jumps or not self.recent:
            return math.log1p(MIN_BAND)
        sigma = statistics.median(self.jumps) / 0.954  # of normal values
        return max(math.log1p(MIN_BAND), MIN_BAND_STANDARD_ERRORS * median_error(sigma, len(self.recent)))

    def observe(self, ratio: float) -> None:
        if self.recent:
            self.jumps.append(abs(math.log(ratio / self.recent[-1])))
        self.recent.append(ratio)
        if len(self.recent) < MIN_MEDIAN_STEPS:
            return
        away = math.log(self.median / self.planned)
        side = 0 if abs(away) <= self.band else int(math.copysign(1, away))
        stays = side != 0 and side == self.side
        self.medians = self.medians + 1 if stays else abs(side)
        if stays and not self.is_far_from(self.first_median):
            self.steps += 1
        else:
            # Count the latest consecutive steps that have themselves left the earlier speed.
            before = self.first_median if stays else self.planned
            way = math.copysign(1, self.median - before)
            beyond = (way * math.log(value / before) > math.log1p(MIN_BAND) for value in reversed(self.recent))
            self.steps, self.first_median = sum(1 for _ in itertools.takewhile(bool, beyond)), self.median
        self.side = side

    def is_far_from(self, ratio: float | None) -> bool:
        """Whether the median is outside the band around ``ratio``, or around the planned ratio if it is None."""
        return abs(math.log(self.median / (self.planned if ratio is None else ratio))) > self.band

    def restart_count(self) -> None:
        """Require ``MIN_MEDIANS_OUTSIDE`` further medians outside the band before the speed counts as changed."""
        self.medians = 0

    def set_planned(self, ratio: float | None) -> None:
        """Center the band on ``ratio``, or on the current planned ratio if it is None."""
        self.planned = self.planned if ratio is None else ratio
        self.side = self.medians = self.steps = 0


class Move(enum.Enum):
    """Action on the plan after a step."""

    STAY = "stay"
    ASK = "ask"
    """Request a plan for ``Decider.requested_ratios``."""
    GO = "go"
    """Change to the requested plan."""


class Decider:
    """Decides from ratios of measured to profiled times when to request a new plan and when to change to it.

    Call ``observe`` and ``decide`` after every step, and ``answered`` between the two once the requested plan is ready.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.requested_ratios: dict[WatchedPart, float] | None = None
        """Ratios of the pending request; None if no request is pending."""
        self._prospect: Prospect | None = None
        self._speeds: dict[WatchedPart, _SpeedHistory] = {rank: _SpeedHistory() for rank in ranks}

    def observe(self, ratios: Mapping[WatchedPart, float]) -> None:
        """Record the ratios measured in one step."""
        for part, ratio in ratios.items():
            self._speeds.setdefault(part, _SpeedHistory()).observe(ratio)

    def changed(self) -> dict[WatchedPart, int]:
        """Map each rank or link whose speed has changed to the number of steps since the change."""
        return {part: speed.steps for part, speed in self._speeds.items() if speed.medians >= MIN_MEDIANS_OUTSIDE}

    def ratios(self) -> dict[WatchedPart, float]:
        """Return the current ratio of every rank and link."""
        return {part: speed.median for part, speed in self._speeds.items()}

    def answered(self, prospect: Prospect | None) -> None:
        """Record the replanner's answer; None if there is no better plan for the requested ratios."""
        self._prospect = prospect
        if prospect is None:
            self._accept_requested()

    def decide(self, remaining_steps: int) -> Move:
        """Decide on the next move, given the number of steps that remain."""
        changed = self.changed()
        if self.requested_ratios is None:
            if not changed or remaining_steps == 0:
                return Move.STAY
            self.requested_ratios = self.ratios()
            return Move.ASK
        if self._prospect is None:
            return Move.STAY
        requested = self.requested_ratios
        if not changed or any(speed.is_far_from(requested.get(part)) for part, speed in self._speeds.items()):
            _LOG.info("not moving: speeds have changed since, and are watched until they settle")
            self.requested_ratios = self._prospect = None
            for speed in self._speeds.values():
                speed.restart_count()
        elif self._prospect.hopeless(remaining_steps):
            _LOG.info("not moving: this gains too little in the remaining %s", units.plural(remaining_steps, "step"))
            self._accept_requested()
        elif self._prospect.pays(max(changed.values()), remaining_steps):
            return Move.GO
        return Move.STAY

    def record_move(self) -> None:
        """Discard the recent measurements after layers have moved (``Move.GO``)."""
        self._accept_requested()
        for speed in self._speeds.values():
            speed.recent.clear()

    def sentence(self, hosts: Sequence[str]) -> str:
        """Describe the changed speeds. ``hosts``: the host name of each rank."""
        ratios = self.ratios()
        return ", ".join(
            f"{part_text(part, hosts)}{' and back' if isinstance(part, LinkBetween) else ''} at {1 / ratios[part]:.2g} of the "
            f"profiled speed for {units.plural(steps, 'step')}"
            for part, steps in self.changed().items()
        )

    def _accept_requested(self) -> None:
        """Center the bands on the requested ratios and close the request."""
        assert self.requested_ratios is not None
        for part, speed in self._speeds.items():
            speed.set_planned(self.requested_ratios.get(part))
        self.requested_ratios = self._prospect = None


class Replanner:
    """Answers one ``ReplanQuestion`` at a time in a separate process. Errors are logged and treated as no answer."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._answering: Background[ReplanAnswer | None] | None = None

    @property
    def ready(self) -> bool:
        """Whether an answer is waiting."""
        return self._answering is not None and not self._answering.running

    def ask(self, question: ReplanQuestion) -> None:
        """Start answering a question in the background."""
        assert self._answering is None
        self._answering = Background("replanning", lambda: self._answer(question))

    def take_answer(self) -> ReplanAnswer | None:
        """Wait for the answer and return it; None if there is none."""
        answering, self._answering = self._answering, None
        return answering.finish() if answering is not None else None

    def close(self) -> None:
        """Kill the planning process, even if it is only just starting."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
        self.take_answer()

    def _answer(self, question: ReplanQuestion) -> ReplanAnswer | None:
        try:
            from hetero_mpi.training import replan  # brings the planner, which few runs need again

            question_json = json.dumps(encode(question, infinity_as_text=True))
            process = self._process = start_module(replan.__name__, stderr=subprocess.PIPE, text=True)
            try:
                answer, error_text = process.communicate(question_json, 0.0 if self._closed else MAX_ANSWER_S)
            finally:
                process.kill()
                process.wait()
            if process.returncode == 0:
                return decode(replan.ReplanAnswer, json.loads(answer), "answer")
            raise ChildProcessError(f"exit code {process.returncode}: {error_text}")
        except Exception as error:
            if not self._closed:
                _LOG.warning("replanning failed: %s: %s", type(error).__name__, error)
            return None
