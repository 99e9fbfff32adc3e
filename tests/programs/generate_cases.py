"""Generates from what a list names, one after the other, in one MPI job: ``generate_cases.py LIST.json OUT.json``.

An entry holds the options of ``generate``, or of ``train`` (``job``, ``run_dir``); ``shares`` are layers [first, last) for each
rank instead of the program's division, ``memory`` the bytes that every rank may use. The output holds for each entry and rank
the tokens, what was raised, and what was printed.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend, Memory
from hetero_mpi.model.eager_imports import eager_imports
from hetero_mpi.util.errors import UserError

with eager_imports():  # as a rank of ``train`` does
    from hetero_mpi.inference import generate as command
    from hetero_mpi.inference import layer_split
    from hetero_mpi.training import training_run
    from hetero_mpi.training.setup.context import TrainOptions
    from tests.programs.pooled import forget


def perform(world: World, entry: dict[str, Any]) -> None:
    if "job" in entry:
        training_run.train(
            world, TrainOptions(Path(entry["job"]), profile=Path(entry["profile"]), run_dir=entry["run_dir"])
        )
        return
    chosen = {key: value for key, value in entry.items() if key not in ("shares", "memory")}
    command.generate(world, command.GenerateOptions(**{**chosen, "source": Path(entry["source"])}))


def outcome_of(world: World, entry: dict[str, Any]) -> dict[str, Any]:
    """How one entry ended on this rank."""
    tokens: list[int] = []
    run_task = command.run_task

    def keep(*arguments: Any) -> list[int]:
        tokens.extend(run_task(*arguments))
        return tokens

    world.barrier()
    error, printed = "", io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(mock.patch.object(command, "run_task", keep))
        if "shares" in entry and world.size == len(entry["shares"]):
            shares = [tuple(share) for share in entry["shares"]]
            stack.enter_context(mock.patch.object(layer_split, "share_out", lambda sizes, memory: shares))
        if "memory" in entry:
            given = Memory(entry["memory"], "given")
            stack.enter_context(mock.patch.object(Backend, "memory", lambda self, sharing=1: given))
        try:
            perform(world, entry)
        except UserError as problem:
            error = str(problem)
    return {"tokens": tokens, "error": error, "printed": printed.getvalue()}


def main(world: World) -> int:
    listed, results = Path(sys.argv[1]), Path(sys.argv[2])
    outcomes = {}
    for name, entry in json.loads(listed.read_text()).items():
        outcomes[name] = world.gather_json(outcome_of(world, entry))
        forget()
        if world.rank == 0:
            results.write_text(json.dumps(outcomes))  # also when a later entry takes all ranks down
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
