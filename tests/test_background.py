"""Work beside the main thread; more of what a run does with its errors: state/test_saving, runtime/test_watchdog."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_mpi.training.rebalance import Replanner
from hetero_mpi.util.background import Background, BestEffort, lines_of, start_unattended, warn_on_failure


def test_who_waits_is_given_the_result_or_the_error_with_its_action() -> None:
    assert Background("adding", lambda: 1 + 1).finish() == 2
    failing = Background("dividing by zero", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        failing.finish()
    if sys.version_info >= (3, 11):
        assert "while dividing by zero" in "".join(traceback.format_exception(caught.value))


def test_patience_ends_before_the_work_does() -> None:
    go_on = threading.Event()
    waiting = Background("waiting", lambda: go_on.wait() and 7)
    assert waiting.finish(0.01) is None and waiting.running
    go_on.set()
    assert waiting.finish() == 7 and not waiting.running


def test_a_process_ends_though_its_background_work_goes_on() -> None:
    program = "import threading; from hetero_mpi.util.background import Background; Background('waiting', threading.Event().wait)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_work_that_nobody_waits_for_ends_nothing_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor where no thread can be started."""
    done = threading.Event()
    start_unattended("opening the shop", lambda: done.set() or 1 // 0)
    assert done.wait(10)
    end_s = time.monotonic() + 10
    while len(caplog.records) < 1 and time.monotonic() < end_s:
        time.sleep(0.01)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: 1 // 0)
    start_unattended("closing the shop", done.clear)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(" failed")[0] for line in told] == ["Warning: opening the shop", "Warning: closing the shop"]
    assert all("ZeroDivisionError" in line for line in told) and done.is_set()


def test_what_fails_beside_a_run_is_left_out_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def inverse(number: int) -> float:
        asked.append(number)
        return 1 / number

    invert = BestEffort("inverting", inverse)
    assert [invert(number) for number in (2, 0, 4)] == [0.5, None, None] and asked == [2, 0]
    assert [record.levelname for record in caplog.records if record.levelname != "INFO"] == ["WARNING"]
    with pytest.raises(KeyboardInterrupt), warn_on_failure("waiting for a person"):
        raise KeyboardInterrupt


def test_a_pipe_closed_by_its_reader_ends_like_any_other() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream, os.fdopen(writing, "wb", 0) as other:
        lines = lines_of(stream)
        other.write(b"one\ntwo")
        assert lines.get(timeout=10) == b"one\n"
        other.close()
        assert [lines.get(timeout=10), lines.get(timeout=10)] == [b"two", None]


def test_the_end_of_a_run_does_not_wait_for_planning_that_is_about_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor for planning under way; neither is a failure."""
    (program := tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    question: Any = SimpleNamespace(to_dict=dict)
    monkeypatch.setattr("hetero_mpi.training.rebalance.encode", lambda question, **_: {})
    for under_way in (False, True):
        replanner, begin_s = Replanner(), time.monotonic()
        replanner.ask(question)
        while under_way and replanner._process is None:
            time.sleep(0.01)
        replanner.close()
        assert time.monotonic() - begin_s < 30 and not caplog.records


@pytest.mark.parametrize("python", ["/bin/false", "/bin/echo", "/nowhere/python"])
def test_planning_anew_that_fails_is_logged_and_leaves_the_plan(
    python: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    question: Any = SimpleNamespace(to_dict=dict)
    replanner = Replanner()
    replanner.ask(question)
    assert replanner.take_answer() is None and not replanner.ready
    assert [record.message.startswith("replanning") for record in caplog.records] == [True]
