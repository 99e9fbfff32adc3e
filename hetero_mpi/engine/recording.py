"""Record the events and resource usage of selected steps in ``steps.jsonl``, gathered on rank 0 and aligned to one clock.

Between recorded steps each rank only accumulates its own usage; nothing is sent.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hetero_mpi.comm.links import clock_offset_s
from hetero_mpi.comm.transport import Transport
from hetero_mpi.engine.trainer import StepResult, Trainer
from hetero_mpi.planning.schedule import Event, MeasuredEvent
from hetero_mpi.rundir.line_files import STEPS_NAME, LineFile, keep_until
from hetero_mpi.rundir.metrics import StepMetrics
from hetero_mpi.rundir.rank_steps import RankStep, Usage, rank_step_to_dict
from hetero_mpi.util.background import BestEffort, warn_on_failure

_WARMUP_STEPS = 3
"""The first step to record; by then caches and links are warm."""
_RECORDED_PART_COUNT = 4
"""Number of equal parts of the run; the last step of each part is also recorded."""
_MAX_EVENTS = 20_000
"""Maximum number of events written per rank and step; usage statistics still cover all events."""


def recorded_steps(first: int, last: int) -> frozenset[int]:
    """Return the steps to record in a run of steps ``first + 1`` to ``last``; their number does not grow with the run."""
    quarters = (first + (last - first) * part // _RECORDED_PART_COUNT for part in range(1, _RECORDED_PART_COUNT + 1))
    return frozenset(step for step in (min(first + _WARMUP_STEPS, last), *quarters) if step > first)


class Recorder:
    """Accumulates this rank's usage and, on rank 0, writes recorded steps to ``steps.jsonl``.

    The constructor and the calls for recorded steps are collective over the active ranks.

    Args:
        transport: transport that connects all ranks, with no messages in flight.
        steps: (steps completed before this plan starts, steps completed at the end of the run).
        time_scale: wall-clock seconds per reported second.
    """

    def __init__(
        self, trainer: Trainer, transport: Transport, directory: Path, steps: tuple[int, int], time_scale: float = 1.0
    ) -> None:
        self._trainer, self._world, self._scale = trainer, trainer.world, time_scale
        world = self._world
        self._file = LineFile(directory / STEPS_NAME) if world.rank == 0 else None
        self._steps = recorded_steps(*steps)
        self._usage = Usage()
        self._clock_s = clock_offset_s(world, transport)
        self._record = BestEffort("recording steps", Recorder._recorded)
        if self._file is not None:
            with warn_on_failure("dropping later steps from steps.jsonl"):
                keep_until(self._file.path, steps[0])

    def __call__(self, line: StepMetrics, result: StepResult) -> None:
        rank_record = self._record(self, line, result)  # a bound function would keep the trainer's memory
        gathered = self._world.gather_json(rank_record) if line.step in self._steps else None
        if gathered is not None and self._file is not None:
            self._file.write(*(record for record in gathered if record is not None))

    def _recorded(self, line: StepMetrics, result: StepResult) -> dict[str, Any] | None:
        events = result.events if self._scale == 1.0 else [_scaled(event, self._scale) for event in result.events]
        self._usage = self._usage.and_step(events, line.step_s)
        if line.step not in self._steps or not result.events:
            return None
        usage = replace(self._usage, peak_bytes=self._trainer.backend.peak_bytes())
        begin_s = (result.began_s - self._clock_s) / self._scale
        written_events = tuple(_scaled(replace(event, step=line.step), 1.0) for event in events[:_MAX_EVENTS])
        return rank_step_to_dict(RankStep(self._trainer.rank, line.step, begin_s, written_events, usage))


def _scaled(event: Event, scale: float) -> MeasuredEvent:
    measured = event if isinstance(event, MeasuredEvent) else MeasuredEvent(**vars(event))
    return replace(
        measured,
        start_s=event.start_s / scale,
        end_s=event.end_s / scale,
        exchanged_s=event.exchanged_s / scale,
        copied_s=measured.copied_s / scale,
        arrived_s=None if measured.arrived_s is None else measured.arrived_s / scale,
    )
