"""Cells of a notebook, as a kernel runs them: one after the other on the main thread inside a running event loop, with no
terminal, an stdout without a file, and an interrupt that is a SIGINT while a cell runs. ``notebook.py CELLS``: a file, cells
separated by ``# %%``. A cell that begins with ``# interrupt TEXT`` is interrupted once it has printed TEXT.
"""

import asyncio
import code
import io
import os
import signal
import sys
import threading
from pathlib import Path


class Shown(io.TextIOBase):
    """What the cells print."""

    def __init__(self) -> None:
        self.text, self.awaited = "", ""
        self.met = threading.Event()

    def write(self, text: str) -> int:
        self.text += text
        if self.awaited and self.awaited in self.text:
            self.awaited = ""
            self.met.set()
        return len(text)


def interrupt(shown: Shown) -> None:
    shown.met.wait()
    os.kill(os.getpid(), signal.SIGINT)


async def run(cells: list[str], shown: Shown) -> None:
    kernel = code.InteractiveInterpreter({"__name__": "__main__"})
    for cell in cells:
        mark, _, awaited = cell.lstrip().partition("\n")[0].partition("# interrupt ")
        if awaited and not mark:
            shown.awaited, shown.met = awaited, threading.Event()
            threading.Thread(target=interrupt, args=[shown], daemon=True).start()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as ipykernel has it
        try:
            kernel.runcode(compile(cell, "<cell>", "exec"))
        finally:
            signal.signal(signal.SIGINT, before)
        await asyncio.sleep(0)


if __name__ == "__main__":
    shown, terminal = Shown(), sys.stdout
    sys.stdout = sys.stderr = shown  # type: ignore[assignment]
    try:
        asyncio.run(run(Path(sys.argv[1]).read_text().split("# %%\n"), shown))
    finally:
        sys.stdout, sys.stderr = terminal, sys.__stderr__
        print(shown.text, flush=True)
