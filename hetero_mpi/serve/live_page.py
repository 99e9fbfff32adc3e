"""The live page: the page of a run as it is at this moment, for browsers. Its parts are drawn once for all who watch.

A process of its own serves it, at a low priority: drawing would hold the interpreter of a rank, and with it the step. Numbers,
curves, ranks and events are as new as the files; the other parts take longest, and are drawn beside the requests when anything but
steps has changed, with a pause that is some times as long. Who watches shows a token, which is in the address that is printed,
behind the #: browsers keep that to themselves. On another address than this machine's own no hosts, users and paths are named, and
no logs shown.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hetero_mpi.report.page.document import SECTIONS, draw_part, live_page, page_parts
from hetero_mpi.report.past_run import PastRun, anonymous, read_run
from hetero_mpi.rundir.metrics import Metrics
from hetero_mpi.rundir.present import NICENESS, read_present
from hetero_mpi.serve.web.connection import Connection
from hetero_mpi.serve.web.server import LOCAL, HttpError, Names, WebServer, bound_socket
from hetero_mpi.util.background import Background
from hetero_mpi.util.errors import UserError

USUAL_PORT = 8642
LOOK_S = 0.5
"""Nobody looks at the files more often."""
_REST = 15.0
"""The pause after figures were drawn, in times of what that took."""
_WATCHED_S, _LINGER_S = 3.0, 2.5
"""Who has asked within this time watches, and is shown the end for so long."""
_LOG_BYTES = 1 << 15
_UNKEPT = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"}


_AT_EACH_LOOK = ("header", "tiles", "now", "learning", "next_commands", "checkpoints", "happenings")
"""Parts that are drawn at once; the others are drawn on a thread."""


class Parts:
    """The parts of the page, each with the number of the version in which it last changed. Any thread may ask.

    ``shared``: for others than the user of this machine.
    """

    def __init__(self, directory: Path, shared: bool) -> None:
        self._directory, self._shared = directory, shared
        self._asking, self._wanted, self._closed = threading.Lock(), threading.Event(), threading.Event()
        self._drawn = dict.fromkeys(
            (make.__name__ for make in SECTIONS if make.__name__ not in _AT_EACH_LOOK), Markup()
        )
        self._version = int(time.time() * 1000)  # later than any that an earlier server of this run has told
        self._shown: dict[str, tuple[int, Markup]] = {}
        self.asked_s = self._next_s = float("-inf")
        self._run: PastRun | None = None
        self._drawing = Background("drawing the figures", self._draw)

    def close(self) -> None:
        """Draw no more figures: a process that ends while the library draws one is killed by a signal."""
        self._closed.set()
        self._wanted.set()
        self._drawing.finish()

    def since(self, version: int) -> dict[str, Any]:
        """The order of all parts, and the markup of those that have changed since ``version``."""
        with self._asking:
            self.asked_s = time.monotonic()
            if self.asked_s > self._next_s:
                self._look()
                took_s = time.monotonic() - self.asked_s
                self._next_s = time.monotonic() + max(LOOK_S, 3 * took_s)  # reading many steps takes long
            changed = {name: text for name, (since, text) in self._shown.items() if since > version}
            return {"version": self._version, "order": list(self._shown), "parts": changed}

    def log(self, number: str) -> bytes:
        """The end of a rank's log. Raises HttpError: there is none, or it is not shown."""
        path = self._directory / "logs" / f"rank-{number}.log"
        if self._shared or not path.is_file() or path.is_symlink():
            raise HttpError(404, f"no log of rank {number} is shown", code="not_found")
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return file.read()

    def _look(self) -> None:
        try:
            self._show(self._parts())
            return
        except UserError as error:
            text = "There is no run, or its files cannot be read." if self._shared else str(error)
        except Exception as error:  # as in ``_draw``; a dropped connection would read as an end of the run
            logging.getLogger(__name__).exception("reading the run")
            said = "" if self._shared else f": {error}"
            text = f"The files of the run cannot be shown now ({type(error).__name__}{said})."
        self._show({"header": Markup("<h1>A run</h1><p>{}</p>").format(text)})

    def _parts(self) -> dict[str, Markup]:
        run = read_run(self._directory)
        run = anonymous(run) if self._shared else run
        if run != self._run:
            self._run = run
            self._wanted.set()
        logs = [] if self._shared else sorted(path.stem[5:] for path in (self._directory / "logs").glob("rank-*.log"))
        return {**page_parts(run, self._drawn), "logs": draw_part("logs", logs)}

    def _show(self, parts: dict[str, Markup]) -> None:
        before, self._shown = self._shown, {}
        for name, text in parts.items():
            since, former = before.get(name, (0, None))
            if former != text:
                since = self._version = self._version + 1
            self._shown[name] = since, text

    def _draw(self) -> None:
        """Draw the parts that take long, of the newest run that was read, unless only its steps have changed."""
        before: object = None
        while self._wanted.wait() and not self._closed.is_set():
            self._wanted.clear()
            run, begin_s = self._run, time.monotonic()
            assert run is not None
            rest = replace(run, metrics=Metrics((), ()), present=None), run.over
            if rest == before:
                continue
            try:
                parts = page_parts(run, dict.fromkeys(_AT_EACH_LOOK, Markup()))
                self._drawn, before = {name: parts[name] for name in self._drawn}, rest
            except Exception:  # a run of another version, or a defect: the numbers are shown all the same
                logging.getLogger(__name__).exception("drawing the figures")
            self._closed.wait(_REST * (time.monotonic() - begin_s))


class LiveServer(WebServer):
    """Serves the page of the run in a directory. The other arguments are those of WebServer."""

    def __init__(self, bound: socket.socket, directory: Path, names: Names, token: str) -> None:
        self.parts = Parts(directory, bound.getsockname()[0] not in LOCAL)
        super().__init__(bound, _LiveConnection, names, {"": token})


class _LiveConnection(Connection):
    server: LiveServer

    def answer(self) -> None:
        if self.command == "POST":
            raise HttpError(405, "the page of a run can be looked at only (GET)", allow="GET, HEAD")
        if self.route == "":
            self.send_content(live_page().encode(), "text/html; charset=utf-8", _UNKEPT)
            return
        if self.route == "/live.js":
            script = Path(__file__).with_name("live.js").read_bytes()
            self.send_content(script, "text/javascript; charset=utf-8", _UNKEPT)
            return
        self.check_key()
        if found := re.fullmatch(r"/changes/([0-9]{1,18})", self.route):
            self.send(self.server.parts.since(int(found[1])))
        elif found := re.fullmatch(r"/log/([0-9]{4,9})", self.route):
            self.send_content(self.server.parts.log(found[1]), "text/plain; charset=utf-8", _UNKEPT)
        else:
            raise HttpError(404, f"there is no {self.route[:100]} here", code="not_found")


def _page_socket(port: int | None, host: str) -> socket.socket:
    """As ``bound_socket``; without a port the usual one, or where that is taken any."""
    try:
        return bound_socket(host, USUAL_PORT if port is None else port)
    except UserError:
        if port is not None:
            raise
    return bound_socket(host, 0)


def watch(
    run_dir: Path, host: str = "127.0.0.1", port: int | None = None, token: str | None = None, allow_host: Sequence[str] = (),
    beside: bool = False,
) -> Iterator[str]:  # fmt: skip
    """Serve the page of a run until an interrupt, or ``beside`` its rank 0 as long as that lives; yields the address.

    Raises UserError: it is no run, or cannot be served so.
    """
    read_run(run_dir)
    token = (token or os.environ.get("HETERO_MPI_TOKEN", "")).strip() or secrets.token_urlsafe(12)
    server = LiveServer(_page_socket(port, host), run_dir, Names.of(host, allow_host), token)
    try:
        yield f"Watch this run at {server.url}/#{token}"
        if beside:
            sys.stdin.buffer.read()
            present = read_present(run_dir)  # a rank 0 that has died leaves the port to its successor at once
            if (
                present is not None
                and present.ended is not None
                and time.monotonic() - server.parts.asked_s < _WATCHED_S
            ):
                time.sleep(_LINGER_S)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()
    finally:
        server.parts.close()


if __name__ == "__main__":  # beside rank 0: RUN [PORT]
    os.nice(NICENESS)
    try:
        for line in watch(Path(sys.argv[1]), port=int(sys.argv[2]) if len(sys.argv) > 2 else None, beside=True):
            print(line, flush=True)
    except UserError as error:
        print(f"{error}; the run goes on without its page", flush=True)
