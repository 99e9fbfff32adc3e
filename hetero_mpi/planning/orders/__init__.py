"""Orders in which a stage computes the micro-batches of a step, one per file.

The docstring of each file begins with a description of its order, ``SPLITS`` says whether backward is split, and ``computing``
yields a stage's operations, to which ``schedule`` adds the messages. ``[plan] schedule`` accepts the name of any file here. An
order for ranks with several stages defines ``interleaving`` instead, which returns each rank's operations.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, cast

from hetero_mpi.planning.orders.warm_up import scheduled_depths
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan
from hetero_mpi.util import units
from hetero_mpi.util.plug_ins import plug_in, plug_in_names


class Order(Protocol):
    """Interface of a module that defines an order."""

    __doc__: str | None
    SPLITS: bool

    def computing(self, pipeline: PipelinePlan, index: int) -> Iterable[tuple[str, int]]:
        """Yield (``F``, ``B``, ``I`` or ``W``, micro-batch) in order, for stage ``index`` of the pipeline.

        All stages run backwards in micro-batch order, because gradients accumulate in that order.
        """


class Interleaving(Protocol):
    """Interface of a module that defines an order for ranks with several stages."""

    __doc__: str | None
    SPLITS: bool

    def interleaving(self, pipeline: PipelinePlan) -> Mapping[int, Iterable[tuple[str, int, int]]]:
        """Map each rank to (``F``, ``B``, ``I`` or ``W``, index of the stage in the pipeline, micro-batch) tuples, in order.

        All stages run backwards in micro-batch order. A rank's later stages finish before its earlier ones.
        """


ORDERS: dict[str, Order | Interleaving] = {name: plug_in(__name__, name) for name in plug_in_names(__name__)}
OTHER_ORDERS = {name: order for name, order in ORDERS.items() if name != WARM_UP}
"""All orders except ``warm_up``."""
INTERLEAVINGS = {name for name, order in ORDERS.items() if hasattr(order, "interleaving")}
"""Orders for ranks that hold several stages."""


def computed_by_rank(pipeline: PipelinePlan) -> Mapping[int, Iterable[tuple[str, int, int]]]:
    """Map each rank to its (operation, index of the stage in the pipeline, micro-batch) tuples, in the pipeline's order."""
    order = ORDERS[pipeline.order]
    if pipeline.order in INTERLEAVINGS:
        return cast(Interleaving, order).interleaving(pipeline)
    computing = cast(Order, order).computing
    return {
        rank: [(op, index, m) for index in indices for op, m in computing(pipeline, index)]
        for rank, indices in pipeline.stages_of.items()
    }


SCHEDULES = {
    "auto": "warm-up depths and splitting chosen by the planner",
    "gpipe": "all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965)",
    "1f1b": "alternates forward and backward passes after the classic warm-up (Narayanan et al. 2019, PipeDream)",
    "split": "1f1b with deferred weight gradients (zero bubble, Qi et al. 2023, arXiv:2401.10241)",
    **{name: (order.__doc__ or "").split("\n")[0].rstrip(".") for name, order in OTHER_ORDERS.items()},
}
"""Values of a request's ``schedule`` with descriptions; the first four use ``warm_up`` with different depths."""


def follows(pipeline: PipelinePlan, schedule: str) -> bool:
    """Whether a pipeline runs the ``schedule``. A single stage runs any; all pipelines run ``auto``."""
    if schedule == "auto" or len(pipeline.stages) == 1:
        return True
    if pipeline.order != WARM_UP or schedule in OTHER_ORDERS:
        return pipeline.order == schedule
    return _has_depths_of(schedule, pipeline) and pipeline.split_backward == (schedule == "split")


def _has_depths_of(schedule: str, pipeline: PipelinePlan) -> bool:
    """Compare warm-up depths; the last micro-batch goes forward just before backward begins, at any larger depth too."""
    count = pipeline.micro_batches
    depths = [stage.warm_up for stage in pipeline.stages], scheduled_depths(schedule, len(pipeline.stages), count)
    return all(min(a, count - 1) == min(b, count - 1) for a, b in zip(*depths, strict=True))


def schedule_title(pipeline: PipelinePlan) -> str:
    """Name the schedule of a pipeline of several stages, as in ``1F1B with adjusted warm-up depths, split backward``."""
    if pipeline.interleaved:
        note = ", backward in one part" * (ORDERS[pipeline.order].SPLITS and not pipeline.split_backward)
        return f"{pipeline.order} ({units.plural(max(map(len, pipeline.stages_of.values())), 'stage')} per rank{note})"
    if pipeline.order != WARM_UP:
        return pipeline.order
    name = "1F1B" if _has_depths_of("1f1b", pipeline) else "1F1B with adjusted warm-up depths"
    name = "GPipe" if name != "1F1B" and _has_depths_of("gpipe", pipeline) else name
    return f"{name}, split backward" if pipeline.split_backward else name
