"""Work beside the main thread; more of what a run does with its errors: state/test_saving, runtime/test_watchdog."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_mpi.background import Background, lines_of
from hetero_mpi.runtime.rebalance import Replanner


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
    program = (
        "import threading; from hetero_mpi.background import Background; Background('waiting', threading.Event().wait)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_a_pipe_closed_by_its_reader_ends_like_any_other() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream, os.fdopen(writing, "wb", 0) as other:
        lines = lines_of(stream)
        other.write(b"one\ntwo")
        assert lines.get(timeout=10) == b"one\n"
        other.close()
        assert [lines.get(timeout=10), lines.get(timeout=10)] == [b"two", None]


@pytest.mark.parametrize("python", ["/bin/false", "/bin/echo", "/nowhere/python"])
def test_planning_anew_that_fails_is_logged_and_leaves_the_plan(
    python: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    question: Any = SimpleNamespace(to_dict=dict)
    replanner = Replanner()
    replanner.ask(question)
    assert replanner.take() is None and not replanner.ready
    assert [record.message.startswith("planning anew") for record in caplog.records] == [True]
