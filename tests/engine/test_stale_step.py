"""Updates that count from the step after next (``train.stale_step``): which of them a step computes with where one is skipped, and
where training ends. That ranks equal a plain loop, and a resumed run the undisturbed one, is in ``tests/runtime/test_equality.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hetero_mpi.checkpoint import CheckpointReader, CheckpointWriter, verify
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.errors import UserError
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.tuning import full_training
from hetero_mpi.state.stored_state import check_train
from tests.engine.test_trainer import LAYOUTS, LENGTH, TRAIN, batch_of, chain_of
from tests.support.checkpoint_samples import told
from tests.support.ranks import Threads, plan_of

UNLIKE = "alone", "pipeline", "unlike pipelines"


def losses(layout: str, dtype: str, steps: Sequence[int], stale: bool, skipped: int | None = None) -> list[float]:
    """Of the steps, then of held-out rows when all updates count."""
    chain = chain_of(tied=True)
    tuning = replace(full_training(chain), stale=stale)
    threads = Threads(chain, plan_of(chain, LAYOUTS[layout], LENGTH), TRAIN.model_copy(update={"dtype": dtype}), tuning)

    def play(trainer: Trainer) -> list[float]:
        decide, found = trainer.decider.decide, []
        for step in steps:

            def decided(*given: Any, finite: bool = step != skipped) -> Any:
                return replace(decide(*given), finite=finite)

            trainer.decider.decide = decided  # type: ignore[method-assign]
            found.append(trainer.step(step, batch_of(step)).decision.loss)
        trainer.catch_up()
        return [*found, trainer.evaluate(batch_of(9, 5))[0]]

    return list(threads.together(play)[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", UNLIKE)
def test_a_step_computes_with_all_updates_but_the_latest(layout: str, dtype: str) -> None:
    found = losses(layout, dtype, (0, 1, 2), True)
    alone = losses(layout, dtype, (1,), False)
    updated = losses(layout, dtype, (0, 2), False)
    assert found[1] == alone[0], "with the start values"
    assert found[2] == updated[1], "with the first update"
    assert found[2] != losses(layout, dtype, (2,), False)[0]
    assert losses(layout, dtype, (0,), True) == losses(layout, dtype, (0,), False), "all count when training ends"


@pytest.mark.parametrize("layout", UNLIKE)
def test_after_a_skipped_step_all_updates_count(layout: str) -> None:
    found = losses(layout, "fp32", (0, 1, 2, 3), True, skipped=1)
    assert found[2] == losses(layout, "fp32", (0, 2), False)[1]
    assert found[3] == losses(layout, "fp32", (0, 3), False)[1], "the update of the step before does not"
    assert losses(layout, "fp32", (0, 1, 2), True, skipped=1)[-1] == losses(layout, "fp32", (0, 2), False)[-1]


def test_checkpoints_have_what_the_next_step_computes_with(tmp_path: Path) -> None:
    train = TrainTable(stale_step=True)
    described = told(1) | {"job": {"train": train.model_dump(), "data": {}}}
    tensors = [("parameters", (3, 4)), ("moments1", (3, 4)), ("moments2", (3, 4)), ("stale", (3, 4))]

    def write(name: str, shapes: list[tuple[str, tuple[int, ...]]], job: dict[str, Any] = described) -> Path:
        with CheckpointWriter(tmp_path / name, job) as writer:
            for kind, shape in shapes:
                writer.write(kind, "a.weight", np.ones(shape, np.float32), "float32")
        return tmp_path / name

    good = write("good.h5", tensors)
    assert verify(good) is None
    for damaged in (write("without.h5", tensors[:-1]), write("unasked.h5", tensors, told(1))):
        assert "the stale values are not those of the parameters that are trained" in str(verify(damaged))
    assert "its shape is not that of the parameter" in str(verify(write("flat.h5", [*tensors[:-1], ("stale", (12,))])))
    with CheckpointReader(good) as reader:
        check_train(reader, good, train)
        with pytest.raises(UserError, match=r"with \[train\] stale_step = True, this job says False.*set it back"):
            check_train(reader, good, TrainTable())
    before = write("before.h5", tensors[:-1], told(1))
    with h5py.File(before, "r+") as file:  # as the format was before
        del file["stale"]
        file.attrs["format_version"] = 2
    assert verify(before) is None
