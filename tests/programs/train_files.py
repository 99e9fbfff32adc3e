"""Trains jobs one after the other in one MPI job, on ranks that have the model's files or not: ``train_files.py LIST OUT``.

Each entry of the list (JSON) holds the options of ``train`` and what is particular: ``at`` (rank -> where the model lies on
that rank's machine, which may be nowhere), ``spoil`` (patterns of files in which rank 0 beforehand flips a bit) and ``fails``
(a rank that cannot convert the second layer it loads). The output holds, for each entry and rank, what was raised, its text,
what was printed, how many bytes of tensors the rank received, and how many tensors it had under way at once.
"""

import contextlib
import glob
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.model.eager_imports import eager_imports
from hetero_mpi.util.errors import UserError

with eager_imports():  # as a rank of ``train`` does
    from hetero_mpi.comm.mpi_transport import MpiTransport
    from hetero_mpi.comm.transport import Buffer, Request
    from hetero_mpi.model.transformers.weights import FileStart
    from hetero_mpi.state import file_supply
    from hetero_mpi.training import build
    from hetero_mpi.training.setup.context import TrainOptions
    from hetero_mpi.training.training_run import train
    from tests.programs.pooled import forget


class Meter:
    """Counts the model's tensors where they pass: in the transport."""

    def __init__(self) -> None:
        self.received_bytes, self.most_at_once = 0, 0
        self._sends: list[Request] = []

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        post_receive, send = MpiTransport.post_receive, MpiTransport.send

        def counting_receive(transport: MpiTransport, source: int, tag: int, buffer: Buffer, *more: Any) -> Request:
            self.received_bytes += buffer.size if tag == file_supply._TENSOR else 0
            return post_receive(transport, source, tag, buffer, *more)

        def counting_send(transport: MpiTransport, destination: int, tag: int, buffer: Buffer, *more: Any) -> Request:
            request = send(transport, destination, tag, buffer, *more)
            if tag == file_supply._TENSOR:
                self._sends = [other for other in self._sends if not other.completed] + [request]
                self.most_at_once = max(self.most_at_once, len(self._sends))
            return request

        with (
            mock.patch.object(MpiTransport, "post_receive", counting_receive),
            mock.patch.object(MpiTransport, "send", counting_send),
        ):
            yield


@contextlib.contextmanager
def failing_at_the_second_layer() -> Iterator[None]:
    calls = 0
    fill = FileStart.fill

    def failing(start: FileStart, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise UserError("test.fault", "this layer cannot be converted")
        fill(start, *arguments)

    with mock.patch.object(FileStart, "fill", failing):
        yield


@contextlib.contextmanager
def circumstances(world: World, entry: dict[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        place = entry.get("at", {}).get(str(world.rank))
        if place is not None:
            stack.enter_context(mock.patch.object(build, "model_directory", lambda loaded: Path(place)))
        if entry.get("fails") == world.rank:
            stack.enter_context(failing_at_the_second_layer())
        yield


def spoil(path: Path) -> None:
    """Flip one bit in the middle of the last half."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 4
    path.write_bytes(content)


def outcome_of(world: World, entry: dict[str, Any]) -> dict[str, Any]:
    """How one job ended on this rank."""
    if world.rank == 0:
        for path in [path for pattern in entry.get("spoil", ()) for path in glob.glob(pattern)]:
            spoil(Path(path))
    world.barrier()
    raised, text, printed, meter = "", "", io.StringIO(), Meter()
    paths = {key: Path(entry[key]) for key in ("job", "plan", "profile") if entry.get(key)}
    options = TrainOptions(**paths, overrides=tuple(entry.get("set", ())), run_dir=entry["run_dir"])
    with contextlib.redirect_stdout(printed), meter.measuring(), circumstances(world, entry):
        try:
            train(world, options)
        except UserError as error:
            raised, text = type(error).__name__, str(error)
    return {
        "raised": raised,
        "text": text,
        "printed": printed.getvalue(),
        "received_bytes": meter.received_bytes,
        "most_at_once": meter.most_at_once,
    }


def main(world: World) -> int:
    outcomes = []
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        outcomes.append(world.gather_json(outcome_of(world, entry)))
        forget()
        if world.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
