"""Moves layers when machines change their speed during a run: a laptop throttles, or somebody else uses a GPU.

Every rank compares what it measured of a step with its profile (``StepWord``). The ratios travel in the next step's decision, so
they cost no message. Rank 0 watches them (``planning.analysis.drift``) and asks a separate process for another plan
(``Replanner``). If the change pays, it says so in its own decision, so all ranks change after the same step.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetero_mpi import units
from hetero_mpi.background import Background
from hetero_mpi.engine.trainer import StepResult
from hetero_mpi.planning.analysis.drift import Decider, Move, Watched, as_measured, moved_layers
from hetero_mpi.planning.types.codec import decode, encode
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.run_directory import append_event
from hetero_mpi.runtime.reconfigure import lack_of_room
from hetero_mpi.runtime.setup.context import RunContext, Share
from hetero_mpi.runtime.setup.profile_and_plan import planning_request
from hetero_mpi.runtime.step_word import StepWord
from hetero_mpi.state.background_save import MEMORY_SHARE

if TYPE_CHECKING:
    from hetero_mpi.planning.analysis.replan import ReplanAnswer, ReplanQuestion

LIMIT_S = 300.0
"""Time limit for an answer of the planning process, seconds."""
_PACKAGES = Path(__file__).resolve().parents[2]
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
        """What travels with the step decision: 1 on rank 0 when the plan is to be changed, then the numbers of the last step."""
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
            self._decider.observe(self._word.ratios(heard[1:]))
            self._consider(self._context.job.train.steps - step - 1)
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

    def _consider(self, remaining: int) -> None:
        """Take an answer that has come, and decide what to do. On rank 0, after every step."""
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
        self._answering: Background[ReplanAnswer | None] | None = None

    @property
    def ready(self) -> bool:
        """Is there an answer that has not been taken?"""
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
        """End the process that is still planning, if any."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
        self.take()

    def _answer(self, question: ReplanQuestion) -> ReplanAnswer | None:
        from hetero_mpi.planning.analysis.replan import ReplanAnswer  # brings the planner, which few runs need again

        paths = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hetero_mpi.planning.analysis.replan"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
            )
            answer, complaint = self._process.communicate(json.dumps(encode(question, infinity_as_text=True)), LIMIT_S)
            if self._process.returncode == 0:
                return decode(ReplanAnswer, json.loads(answer), "answer")
            _LOG.warning("planning anew ended with exit code %d: %s", self._process.returncode, complaint)
        except subprocess.TimeoutExpired:
            assert self._process is not None
            self._process.kill()
            self._process.communicate()
            _LOG.warning("planning anew took more than %.0f s and was given up", LIMIT_S)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _LOG.warning("planning anew failed: %r", error)
        return None
