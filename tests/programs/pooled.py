"""A rank that runs programs of this folder one after the other, as tests/support/rank_pool.py asks: ``pooled.py SOCKET``.

A request is a line of JSON: on how many ranks (the first ones), a program's name and its arguments. The answer tells how its
``main`` ended on this rank, and what was printed. A rank that waits for a request waits outside MPI, where it costs no processor
time.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

from hetero_mpi.comm.ranks.mpi_start import join, run_guarded
from hetero_mpi.comm.ranks.world import World


@contextlib.contextmanager
def captured(number: int, answer: dict[str, Any]) -> Iterator[None]:
    """What Python and libraries write to a file descriptor goes into ``answer``."""
    stream, name = (sys.stdout, "stdout") if number == 1 else (sys.stderr, "stderr")
    kept = os.dup(number)
    with tempfile.TemporaryFile() as file:
        stream.flush()
        os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            stream.flush()
            os.dup2(kept, number)
            os.close(kept)
            file.seek(0)
            answer[name] = file.read().decode(errors="replace")


def perform(ranks: int, program: str, *arguments: str) -> dict[str, Any]:
    """Run ``main`` of a program in a world of the first ``ranks``, made anew, with communicators of its own."""
    answer: dict[str, Any] = {"code": 1, "traceback": ""}
    begun_s = time.process_time()
    sys.argv = [program, *arguments]
    with captured(1, answer), captured(2, answer):
        try:
            world = join()
            taking_part = world if ranks == world.size else world.subset(range(ranks))
            main = importlib.import_module(f"tests.programs.{program}").main
            begun_s = time.process_time()  # without what is imported once
            answer["code"] = main(taking_part) if taking_part is not None else 0
        except BaseException:
            answer["traceback"] = traceback.format_exc()
    answer["seconds"] = time.process_time() - begun_s
    forget()
    return answer


def forget() -> None:
    """As if the process had ended: what has run is not on the account of what follows, nor do later collections look at it."""
    gc.collect()
    gc.freeze()


def main(world: World) -> int:
    faulthandler.enable(os.dup(2))  # the launcher's own, not what a program captures
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        with connection.makefile("rw") as stream:
            stream.write(json.dumps(world.rank) + "\n")
            stream.flush()
            for line in stream:
                stream.write(json.dumps(perform(*json.loads(line))) + "\n")
                stream.flush()
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
