"""Moves layers when machines change their speed during a run: a laptop throttles, or somebody else uses a GPU.

Every rank compares what it measured of a step with its profile (``StepWord``). The ratios travel in the next step's decision, so
they cost no message. Rank 0 watches them (``planning.analysis.drift``) and asks a separate process for another plan
(``Replanner``). If the change pays, it says so in its own decision, so all ranks change after the same step.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.engine.trainer import StepResult
from hetero_mpi.planning.analysis.drift import Decider, GroupSums, LinkBetween, Move, Watched, as_measured, moved_layers
from hetero_mpi.planning.schedule import COMPUTE, Action, Op, Schedule
from hetero_mpi.planning.types.codec import decode, encode
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import append_event
from hetero_mpi.state.saving import MEMORY_SHARE
from hetero_mpi.training.build import lack_of_room
from hetero_mpi.training.measuring import LEAST_SHARE, Expected, Pair, message_at_s
from hetero_mpi.training.setup.context import RunContext, Share
from hetero_mpi.training.setup.profile_and_plan import planning_request
from hetero_mpi.util import units
from hetero_mpi.util.background import Background, BestEffort, start_module

if TYPE_CHECKING:
    from hetero_mpi.planning.analysis.replan import ReplanAnswer, ReplanQuestion

LIMIT_S = 300.0
"""Time limit for an answer of the planning process, seconds."""
_LOG = logging.getLogger(__name__)


class Rebalancer:
    """A rank's part in rebalancing, over all plans of a run. Active ranks make the same calls, ``begin`` before a plan's steps."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._profile = context, context.profile
        profile = context.profile
        cluster = context.job.cluster
        self._scale = cluster.time_scale if cluster.emulate is not None else 1.0
        self._hosts = [device.host for device in profile.devices]
        self._decider, self._replanner = Decider(range(len(profile.devices))), Replanner()
        self._ratios: dict[Watched, float] = {}
        """The ratios of the latest question."""
        self._answer: ReplanAnswer | None = None
        self._rebuild_s: float | None = None
        self._ready, self._room = False, True
        self._share: Share | None = None
        self._word: StepWord | None = None
        self._because = ""
        self._latest: StepResult | None = None
        self._watch = BestEffort("comparing the speed of ranks with the profile", self._consider)

    def begin(self, share: Share) -> None:
        """Prepare for the steps of a plan. Collective over the active ranks."""
        assert share.trainer is not None
        self._share, self._ready, self._latest = share, False, None
        self._word = StepWord(share.trainer.rank, share.plan, self._profile, share.schedule)
        if self._rebuild_s is None or share.seconds:
            seconds = share.seconds
            self._rebuild_s = (seconds.get("keep", 0.0) + seconds.get("build", 0.0)) / self._scale
        lack = lack_of_room(share)
        if lack is not None and self._room:
            say(
                f"Layers stay where they are, however fast the ranks are: what is trained may take {units.percent(MEMORY_SHARE)} "
                f"of the free host memory while layers move; {lack}"
            )
        self._room = lack is None

    def end(self) -> None:
        """Forget the plan's trainer. No step follows under this plan."""
        self._share = None

    def close(self) -> None:
        self.end()
        self._replanner.close()

    def word(self) -> NDArray[np.float64]:
        """Numbers that travel with the step decision: 1 on rank 0 when the plan is to be changed, then the numbers of the last
        step."""
        assert self._word is not None and self._share is not None
        latest = self._latest
        if latest is not None and self._share.emulation is not None:
            latest = replace(latest, length=self._share.plan.sequence_length)
        go = self._ready and self._context.world.rank == 0
        return np.append(float(go), self._word.numbers(latest, self._scale))

    def due(self, step: int, result: StepResult) -> bool:
        """After step number ``step``, when ``result.heard`` is the sum of all ranks' words: is the plan to be changed now? The same
        answer on all ranks.
        """
        assert self._word is not None
        heard, self._latest = result.heard, result
        if self._context.world.rank == 0 and self._room and not self._ready:
            self._watch(self._word, heard[1:], self._context.job.train.steps - step - 1)
        return bool(heard[0] > 0)

    def chosen(self) -> PlanReport | None:
        """The plan to change to, on rank 0."""
        return self._answer.report if self._answer is not None else None

    def changed(self, step: int, old: Plan, new: Plan, stall_s: float) -> None:
        """Report on rank 0 that layers have moved, and that training stood still for ``stall_s`` (wall clock)."""
        assert self._answer is not None
        prospect, moves = self._answer.prospect, moved_layers(old, new)
        self._decider.moved()
        before, after = units.seconds(prospect.now_s), units.seconds(prospect.then_s)
        moved = _moves_text(moves, new.layers) or "no layer moves, but warm-up depths change"
        text = (
            f"{self._because}: {moved}; a step {before} -> {after}; training stood still for {units.seconds(stall_s)}"
        )
        say(f"step {step}: {text}")
        append_event(
            self._context.run_dir,
            "rebalanced",
            text,
            step=step,
            speeds={str(one): round(1 / ratio, 4) for one, ratio in self._ratios.items() if isinstance(one, int)},
            moved=[{"from": a, "to": b, "layers": layers} for (a, b), layers in moves.items()],
            step_s_before=prospect.now_s,
            step_s_after=prospect.then_s,
            predicted_cost_s=prospect.cost_s,
            stall_s=stall_s,
        )

    def _consider(self, word: StepWord, heard: NDArray[np.float64], remaining: int) -> None:
        """Take an answer that has come, and decide what to do. On rank 0, after every step."""
        self._decider.observe(word.ratios(heard))
        if self._decider.asked is not None and self._replanner.ready:
            self._answer = self._replanner.take()
            self._decider.answered(self._answer.prospect if self._answer is not None else None)
            _LOG.info("planned anew: %s", self._answer.prospect if self._answer is not None else "nothing was found")
        move = self._decider.decide(remaining)
        if move is Move.ASK:
            self._ask(remaining)
        elif move is Move.GO:
            self._ready, self._because = True, self._decider.sentence(self._hosts)

    def _ask(self, remaining: int) -> None:
        from hetero_mpi.planning.analysis.replan import ReplanQuestion  # brings the planner, which few runs need again

        assert self._share is not None and self._rebuild_s is not None and self._decider.asked is not None
        self._ratios = self._decider.asked
        _LOG.info("%s: planning anew", self._decider.sentence(self._hosts))
        measured = as_measured(self._ratios)
        self._replanner.ask(
            ReplanQuestion(self._profile, measured, self._request, self._share.report, remaining, self._rebuild_s)
        )

    @cached_property
    def _request(self) -> PlanRequest:
        return planning_request(self._context, self._profile)


def rebalancer_of(context: RunContext, plan_given: bool) -> Rebalancer | None:
    """The rebalancer of a run; None where the plan is fixed: there is one rank, the user gave the plan, or the job says so."""
    alone = len(context.profile.devices) == 1
    return None if alone or plan_given or not context.job.plan.rebalance else Rebalancer(context)


def _moves_text(moves: dict[tuple[int, int], list[int]], layers: int) -> str:
    """Such as ``layers 9-11 move from rank 1 to rank 0``; layers count from 0 as in the model's parameter names."""
    return ", ".join(
        f"{_layers_text(moved, layers)} from rank {a} to rank {b}" for (a, b), moved in sorted(moves.items())
    )


def _layers_text(moved: list[int], layers: int) -> str:
    names = ["the embedding"] if 0 in moved else []
    blocks = [layer - 1 for layer in moved if 0 < layer < layers - 1]
    for _, run in groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        names.append(f"layers {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"layer {numbers[0]}")
    names += ["the head"] if layers - 1 in moved else []
    return f"{' and '.join(names)} {'moves' if len(moved) == 1 else 'move'}"


class Replanner:
    """Answers one ``ReplanQuestion`` at a time in a separate process.

    Errors are written to the log and give no answer: a run does not fail because no better plan was found.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._starting, self._closed = threading.Lock(), False
        self._answering: Background[ReplanAnswer | None] | None = None

    @property
    def ready(self) -> bool:
        """Whether there is an answer that has not been taken."""
        return self._answering is not None and not self._answering.running

    def ask(self, question: ReplanQuestion) -> None:
        """Begin to answer a question. Returns at once."""
        assert self._answering is None
        self._answering = Background("planning anew", lambda: self._answer(question))

    def take(self) -> ReplanAnswer | None:
        """Wait for the answer, once, and return it; None where there is none."""
        answering, self._answering = self._answering, None
        return answering.finish() if answering is not None else None

    def close(self) -> None:
        """End the process that is still planning, if any; one that is about to start does not."""
        with self._starting:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        self.take()

    def _answer(self, question: ReplanQuestion) -> ReplanAnswer | None:
        try:
            from hetero_mpi.planning.analysis.replan import (
                ReplanAnswer,  # brings the planner, which few runs need again
            )

            with self._starting:
                if self._closed:
                    return None
                process = start_module("hetero_mpi.planning.analysis.replan", stderr=subprocess.PIPE, text=True)
                self._process = process
            try:
                answer, complaint = process.communicate(json.dumps(encode(question, infinity_as_text=True)), LIMIT_S)
            finally:
                process.kill()
                process.wait()
            if process.returncode == 0:
                return decode(ReplanAnswer, json.loads(answer), "answer")
            raise ChildProcessError(f"exit code {process.returncode}: {complaint}")
        except Exception as error:
            if not self._closed:
                _LOG.warning("planning anew failed: %s: %s", type(error).__name__, error)
            return None


class StepWord:
    """A step in a few numbers, which are added up over all of them: measured over predicted seconds.

    A number for every rank's computing, for every member's sums, and for every link between neighbouring stages. Of a link, the
    first message of a step there and the first one back are taken together, so that clocks of hosts need not agree.
    """

    def __init__(self, rank: int, plan: Plan, profile: ClusterProfile, schedule: Schedule) -> None:
        self._rank, self._plan, self._profile, self._schedule = rank, plan, profile, schedule
        self._by_length: dict[int, Expected] = {}
        self._told: Expected | None = None
        """The prediction of the step that ``numbers`` has told."""
        groups = dict.fromkeys(stage.ranks for _, _, stage in plan.numbered if stage.grouped)
        self._sums = [(ranks, rank) for ranks in groups for rank in ranks]
        self._links = self._round_trips() if not profile.emulated else {}
        self._size = len(plan.ranks) + len(self._sums) + len(self._links)

    def numbers(self, step: StepResult | None, scale: float = 1.0) -> NDArray[np.float64]:
        """The numbers of this rank; zeros before the first step. ``scale``: of an emulated run's times."""
        if step is None:
            self._told = None
            return np.zeros(self._size)
        expected = self._told = self._of_length(step.length)
        seconds, times = 0.0, dict[Action, float]()
        for event in step.events:
            if event.action.op in COMPUTE:
                seconds += event.end_s - event.start_s
            elif (at_s := message_at_s(event)) is not None:
                times[event.action] = step.began_s + at_s
        own = expected.computing_s.get(self._rank, {})
        predicted_s = scale * sum(own.get(op, 0.0) for op in COMPUTE)
        computing = (seconds - step.sums_s) / predicted_s if predicted_s > 0 else 0.0
        return np.array(
            [
                *(computing * (rank == self._rank) for rank in self._plan.ranks),
                *(
                    step.sums_s / expected.sums_s[ranks] if rank == self._rank and expected.sums_s[ranks] > 0 else 0.0
                    for ranks, rank in self._sums
                ),
                *(self._part(expected, messages, times) for messages in self._links.values()),
            ]
        )

    def ratios(self, told: NDArray[np.float64]) -> dict[Watched, float]:
        """From all ranks' numbers. Left out: what matters little."""
        expected, found = self._told, dict[Watched, float]()
        if expected is None:
            return found
        least_s = LEAST_SHARE * expected.step_s
        numbers = iter(map(float, told))
        computing = dict(zip(self._plan.ranks, numbers, strict=False))
        for rank, leader in self._plan.leader_of.items():
            computing[leader] = max(computing[leader], computing.pop(rank))
        found.update((rank, ratio) for rank, ratio in computing.items() if ratio > 0)
        sums = dict[tuple[int, ...], float]()
        for (ranks, _), ratio in zip(self._sums, numbers, strict=False):
            sums[ranks] = min(ratio, sums.get(ranks, math.inf))
        for ranks, ratio in sums.items():
            if max(1.0, ratio) * expected.sums_s[ranks] > least_s and ratio > 0:
                found[GroupSums(ranks)] = ratio
        for (pair, messages), ratio in zip(self._links.items(), numbers, strict=True):
            matters = max(1.0, ratio) * _both_s(expected, messages) > least_s
            if matters and ratio > 0 and not (expected.crowded and self._on_one_host(pair)):
                found[LinkBetween(pair)] = ratio
        return found

    def _of_length(self, length: int) -> Expected:
        if length not in self._by_length:
            plan = replace(self._plan, sequence_length=length)
            self._by_length[length] = Expected(plan, self._profile, self._schedule)
        return self._by_length[length]

    def _on_one_host(self, pair: Pair) -> bool:
        return len({self._profile.devices[rank].host for rank in pair}) == 1

    def _round_trips(self) -> dict[Pair, tuple[Action, Action]]:
        """Two ranks -> the first message from a stage of the one to the next one, of the other, and the first one back."""
        found: dict[Pair, tuple[Action, Action]] = {}
        for (number, index, stage), (_, there, after) in itertools.pairwise(self._plan.numbered):
            a, b = stage.ranks[0], after.ranks[0]
            forward = (one for one in self._schedule[a] if one.op is Op.SEND_F and one.stage == number)
            backward = (one for one in self._schedule[b] if one.op is Op.SEND_B and one.stage == number + 1)
            messages = next(forward, None), next(backward, None)
            if index == there and a != b and messages[0] is not None and messages[1] is not None:
                found.setdefault((min(a, b), max(a, b)), (messages[0], messages[1]))
        return found

    def _part(self, expected: Expected, messages: Sequence[Action], times: Mapping[Action, float]) -> float:
        """This rank's part of the ratio of two messages: when they came minus when they began; not a number: not known."""
        seconds, both_s = 0.0, _both_s(expected, messages)
        for send in messages:
            (source, destination), receive, _ = expected.message(send)
            seconds -= times.get(send, math.nan) if source == self._rank else 0.0
            seconds += times.get(receive, math.nan) if destination == self._rank else 0.0
        return seconds / both_s if both_s > 0 else math.nan


def _both_s(expected: Expected, messages: Sequence[Action]) -> float:
    return sum(expected.message(send)[2] for send in messages)
