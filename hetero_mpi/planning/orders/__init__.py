"""The orders in which a stage computes the micro-batches of a step, a file each.

The first line of a file's docstring says what the order is, ``SPLITS`` whether backward is computed in two parts, and
``computing`` yields what a stage computes; ``schedule`` adds the messages. ``[plan] schedule`` takes the name of any file here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Protocol, cast

from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan


class Order(Protocol):
    """What a file here holds."""

    __doc__: str | None
    SPLITS: bool

    def computing(self, pipeline: PipelinePlan, place: int) -> Iterable[tuple[str, int]]:
        """(``F``, ``B``, ``I`` or ``W``, micro-batch) one after the other, for stage number ``place`` of the pipeline.

        Backwards come in the order of the micro-batches on all stages, as gradients are added up in it.
        """
        ...


ORDERS = {
    found.name: cast(Order, importlib.import_module(f"{__name__}.{found.name}"))
    for found in pkgutil.iter_modules(__path__)
}
OTHER_ORDERS = {name: order for name, order in ORDERS.items() if name != WARM_UP}
"""Those that the planner does not choose by itself."""
SCHEDULES = {
    "auto": "warm-up depths and splitting as the planner finds best",
    "gpipe": "all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)",
    "1f1b": "a forward and a backward in turn after the classic warm-up (Narayanan et al. 2019, PipeDream)",
    "split": "1f1b with the gradients of the weights put off (zero bubble, Qi et al. 2023, arXiv:2401.10241)",
    **{name: (order.__doc__ or "").split("\n")[0] for name, order in OTHER_ORDERS.items()},
}
"""What ``schedule`` of a request may be; the first four are depths of ``warm_up``."""
