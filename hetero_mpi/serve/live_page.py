"""The live page, which shows a running job in the browser and is rendered once for all viewers.

A separate low-priority process serves it, because rendering in a rank would hold the interpreter lock and delay the step. Numbers,
curves, ranks and events are as recent as the files. A background thread renders the slower parts when anything but the steps has
changed, then pauses in proportion to the rendering time. Viewers need an access token, which is part of the printed address after
the #, where browsers do not send it to the server. Unless the server listens on a loopback address, it hides hosts, users, paths
and logs.
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

DEFAULT_PORT = 8642
READ_INTERVAL_S = 0.5
"""Minimum interval between reads of the run's files."""
_PAUSE_RATIO = 15.0
"""Pause after rendering the figures, as a multiple of the rendering time."""
_WATCHER_TIMEOUT_S, _LINGER_S = 3.0, 2.5
"""If a viewer has sent a request within the first time, the server stays up for the second time to show that the run has ended."""
_LOG_BYTES = 1 << 15
_PRIVATE = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


_QUICK_PARTS = ("header", "tiles", "now", "learning", "next_commands", "checkpoints", "happenings")
"""Parts rendered on request; a background thread renders the others."""


class Parts:
    """The parts of the page, each with the version in which it last changed. Thread-safe.

    If ``shared`` is true, users of other machines can see the page, so hosts, users, paths and logs are hidden.
    """

    def __init__(self, directory: Path, shared: bool) -> None:
        self._directory, self._shared = directory, shared
        self._lock, self._redraw, self._closed = threading.Lock(), threading.Event(), threading.Event()
        self._drawn = dict.fromkeys((make.__name__ for make in SECTIONS if make.__name__ not in _QUICK_PARTS), Markup())
        self._version = int(time.time() * 1000)  # newer than any version of an earlier server of this run
        self._shown: dict[str, tuple[int, Markup]] = {}
        self.asked_s = self._next_s = float("-inf")
        self._run: PastRun | None = None
        self._background = Background("drawing the figures", self._draw)

    def close(self) -> None:
        """Stop rendering, because a process that exits while the library is rendering is killed by a signal."""
        self._closed.set()
        self._redraw.set()
        self._background.finish()

    def since(self, version: int) -> dict[str, Any]:
        """Return the order of all parts, and the markup of the parts that have changed since ``version``."""
        with self._lock:
            self.asked_s = time.monotonic()
            if self.asked_s > self._next_s:
                self._read_run()
                took_s = time.monotonic() - self.asked_s
                self._next_s = time.monotonic() + max(READ_INTERVAL_S, 3 * took_s)  # reading many steps takes long
            changed = {name: text for name, (since, text) in self._shown.items() if since > version}
            return {"version": self._version, "order": list(self._shown), "parts": changed}

    def log(self, number: str) -> bytes:
        """Return the end of a rank's log. Raises HttpError if the log does not exist or is not shown to this viewer."""
        path = self._directory / "logs" / f"rank-{number}.log"
        if self._shared or not path.is_file() or path.is_symlink():
            raise HttpError(404, f"no log is available for rank {number}", code="not_found")
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return file.read()

    def _read_run(self) -> None:
        try:
            self._show(self._parts())
            return
        except UserError as error:
            text = "There is no run, or its files cannot be read." if self._shared else str(error)
        except Exception as error:  # as in ``_draw``; a dropped connection would look like the end of the run
            logging.getLogger(__name__).exception("reading the run")
            detail = "" if self._shared else f": {error}"
            text = f"The run's files cannot be shown at the moment ({type(error).__name__}{detail})."
        self._show({"header": Markup("<h1>A run</h1><p>{}</p>").format(text)})

    def _parts(self) -> dict[str, Markup]:
        run = read_run(self._directory)
        run = anonymous(run) if self._shared else run
        if run != self._run:
            self._run = run
            self._redraw.set()
        logs = [] if self._shared else sorted(path.stem[5:] for path in (self._directory / "logs").glob("rank-*.log"))
        return {**page_parts(run, self._drawn), "logs": draw_part("logs", logs)}

    def _show(self, parts: dict[str, Markup]) -> None:
        earlier, self._shown = self._shown, {}
        for name, text in parts.items():
            since, previous = earlier.get(name, (0, None))
            if previous != text:
                since = self._version = self._version + 1
            self._shown[name] = since, text

    def _draw(self) -> None:
        """Render the slow parts of the page whenever anything but the steps of the run has changed."""
        drawn_state: object = None
        while self._redraw.wait() and not self._closed.is_set():
            self._redraw.clear()
            run, begin_s = self._run, time.monotonic()
            assert run is not None
            state = replace(run, metrics=Metrics((), ()), present=None), run.over
            if state == drawn_state:
                continue
            try:
                parts = page_parts(run, dict.fromkeys(_QUICK_PARTS, Markup()))
                self._drawn, drawn_state = {name: parts[name] for name in self._drawn}, state
            except Exception:  # a run of another version, or a bug: numbers are still shown
                logging.getLogger(__name__).exception("drawing the figures")
            self._closed.wait(_PAUSE_RATIO * (time.monotonic() - begin_s))


class LiveServer(WebServer):
    """Serves the page of the run in ``directory`` to viewers with the access token."""

    def __init__(self, bound: socket.socket, directory: Path, names: Names, token: str) -> None:
        self.parts = Parts(directory, bound.getsockname()[0] not in LOCAL)
        super().__init__(bound, _LiveConnection, names, {"": token})


class _LiveConnection(Connection):
    server: LiveServer

    def answer(self) -> None:
        if self.command == "POST":
            raise HttpError(405, "a run's page is read-only: use GET", allow="GET, HEAD")
        if self.route == "":
            self.send_content(live_page().encode(), "text/html; charset=utf-8", _PRIVATE)
            return
        if self.route == "/live.js":
            script = Path(__file__).with_name("live.js").read_bytes()
            self.send_content(script, "text/javascript; charset=utf-8", _PRIVATE)
            return
        self.check_key()
        if match := re.fullmatch(r"/changes/([0-9]{1,18})", self.route):
            self.send(self.server.parts.since(int(match[1])))
        elif match := re.fullmatch(r"/log/([0-9]{4,9})", self.route):
            self.send_content(self.server.parts.log(match[1]), "text/plain; charset=utf-8", _PRIVATE)
        else:
            raise HttpError(404, f"there is no {self.route[:100]} on this server", code="not_found")


def _page_socket(port: int | None, host: str) -> socket.socket:
    """Open a listening socket on ``port``. If ``port`` is None, use the default port or, if that is taken, any free port."""
    try:
        return bound_socket(host, DEFAULT_PORT if port is None else port)
    except UserError:
        if port is not None:
            raise
    return bound_socket(host, 0)


def watch(
    run_dir: Path, host: str = "127.0.0.1", port: int | None = None, token: str | None = None, allow_host: Sequence[str] = (),
    beside_run: bool = False,
) -> Iterator[str]:  # fmt: skip
    """Serve the page of a run and yield a line with its address. The page is served until the user interrupts it.

    With ``beside_run``, it ends with the run's rank 0. Raises UserError if there is no run or the address cannot be used.
    """
    read_run(run_dir)
    token = (token or os.environ.get("HETERO_MPI_TOKEN", "")).strip() or secrets.token_urlsafe(12)
    server = LiveServer(_page_socket(port, host), run_dir, Names.for_address(host, allow_host), token)
    try:
        yield f"Watch this run at {server.url}/#{token}"
        if beside_run:
            sys.stdin.buffer.read()
            present = read_present(run_dir)  # a lost rank 0 frees the port for its successor at once
            is_watched = time.monotonic() - server.parts.asked_s < _WATCHER_TIMEOUT_S
            if present is not None and present.ended is not None and is_watched:
                time.sleep(_LINGER_S)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()
    finally:
        server.parts.close()


if __name__ == "__main__":  # started by rank 0: RUN [PORT]
    os.nice(NICENESS)
    try:
        for line in watch(Path(sys.argv[1]), port=int(sys.argv[2]) if len(sys.argv) > 2 else None, beside_run=True):
            print(line, flush=True)
    except UserError as error:
        print(f"{error}; the run continues without its page", flush=True)
