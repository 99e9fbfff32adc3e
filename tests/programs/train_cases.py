"""Runs several training jobs, one after the other, in one MPI job: ``train_cases.py LIST.json``.

Each entry holds the options of ``train``, and whether batches are to change from step to step. Starting ranks costs more than
training these models, so they are started once.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.model.eager_imports import eager_imports

with eager_imports():  # as a rank of ``train`` does
    from hetero_mpi.data.batch import Batch
    from hetero_mpi.data.dataset import Dataset
    from hetero_mpi.training.setup.context import TrainOptions
    from hetero_mpi.training.training_run import train
    from tests.programs.pooled import forget
    from tests.support.changing_batches import changed


def main(world: World) -> int:
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        paths = {key: Path(entry[key]) for key in ("job", "plan", "profile") if entry.get(key)}
        with changing_batches() if entry.get("changing") else contextlib.nullcontext():
            train(world, TrainOptions(**paths, run_dir=entry["run_dir"], resume=entry.get("resume")))
        forget()
    return 0


@contextlib.contextmanager
def changing_batches() -> Iterator[None]:
    """Every step has another number of sequences and another length."""
    batch = Dataset.batch

    def changing(dataset: Dataset, step: int, global_batch: int, smaller: bool) -> Batch:
        return changed(batch(dataset, step, global_batch, smaller), step)

    with mock.patch.object(Dataset, "batch", changing):
        yield


if __name__ == "__main__":
    sys.exit(run_guarded(main))
