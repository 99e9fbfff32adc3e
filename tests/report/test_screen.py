"""The terminal: plain lines in logs, a calm screen where a person watches."""

import fcntl
import io
import os
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hetero_mpi.launch.launcher.command_line import build_command
from hetero_mpi.report import progress as module
from hetero_mpi.report.progress import Overview, ProgressDisplay, RankRow, Screen
from hetero_mpi.rundir.logs import write_line
from hetero_mpi.rundir.metrics import StepMetrics
from hetero_mpi.rundir.present import Standing
from hetero_mpi.util import units
from tests.support.mpi import ROOT, launcher_or_skip
from tests.support.processes import end_tree


def metrics(step: int, loss: float = 2.0) -> StepMetrics:
    return StepMetrics(step, loss, 1.0, 3e-4, 8192, 8192.0, 1.0, 1.1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


@pytest.mark.parametrize(
    ("step_s", "first_step", "expected"),
    [
        (0.1, 0, [1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 40]),
        (3.0, 0, [1, 3, 5, 7, 9, 12, 15, *range(19, 41, 4), 40]),
        (0.1, 35, [36, 37, 38, 39, 40]),
    ],
)
def test_plain_lines_at_a_sensible_rate(step_s: float, first_step: int, expected: list[int]) -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressDisplay(40, first_step, stream, clock) as progress:
        for step in range(first_step + 1, 41):
            clock.s += step_s
            progress.update(replace(metrics(step, loss=2.5), tokens_per_s=1234.0))
    lines = stream.getvalue().splitlines()
    assert [
        int(line.split()[1].split("/")[0]) if "/" in line.split()[1] else int(line.split()[1]) for line in lines
    ] == expected
    assert lines[-1] == "step 40/40  loss 2.5000  1,234 tokens/s"
    left = units.clock(step_s * (40 - first_step - 1))
    assert lines[0] == f"step {first_step + 1:>2}/40  loss 2.5000  1,234 tokens/s  {left} left"


OVERVIEW = Overview(
    "quickstart: 2 stages on 2 of 3 ranks, schedule 1F1B",
    (RankRow(0, "blocks 2-5, head", 0.8), RankRow(1, "embedding, blocks 0-1", 0.9)),
)
SCREEN = re.findall(r"```\n(quickstart: .*?)```", (ROOT / "docs" / "reading-a-run.md").read_text(), re.S)[0]


def drawn(progress: ProgressDisplay, monkeypatch: pytest.MonkeyPatch, columns: int, rows: int) -> str:
    """What a terminal of this size shows, without colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(module, "terminal_size", lambda stream: os.terminal_size((columns, rows + 2)))
    with Screen(out := Terminal(), progress.view, 60.0):
        return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm-256color")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, where there is no screen
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_calm_screen_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person sees: drawn in place, and left standing at the end; more ranks than lines are counted."""
    stream, clock = Terminal(), Clock()
    with ProgressDisplay(40, 2, stream, clock, OVERVIEW) as progress:
        progress.standings = lambda: {
            0: Standing("1F3", computed=0.75),
            1: Standing("1RECV_F3", waits_for="rank 0 to send"),
        }
        clock.s += 5.0
        progress.update(metrics(3, loss=2.5))
        assert drawn(progress, monkeypatch, 100, 30) == SCREEN
        assert drawn(progress, monkeypatch, 100, 7).endswith("  and 2 more ranks\n")
        assert drawn(progress, monkeypatch, 100, 4).count("\n") == 3, "a low terminal shows no ranks"
        narrow = drawn(progress, monkeypatch, 40, 30).splitlines()
        assert max(map(len, narrow)) == 40 and len(narrow) == 7, "a narrow one cuts"
    shown = stream.getvalue()
    assert "quickstart: 2 stages" in shown and "step  3/40" in shown and shown.endswith("\n")
    assert "\x1b[?25l" not in shown, "who is killed leaves no terminal without a cursor"


def test_what_is_said_goes_above_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Terminal()
    with Screen(stream, lambda rows: ["one", "two"], 60.0):
        assert stream.getvalue().endswith("one\ntwo\n")
        write_line("said [bold] and more")
        after = stream.getvalue().partition("said [bold] and more\n")[2]
        assert after.endswith("one\ntwo\n"), "the screen is below what was said"
    assert capsys.readouterr().out == ""
    write_line("after it")
    assert capsys.readouterr().out == "after it\n"


def test_a_terminal_that_has_gone_ends_nothing() -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with ProgressDisplay(2, 0, Gone(), Clock(), OVERVIEW) as progress:
        progress.update(metrics(1))


def test_no_escape_codes_where_nobody_watches() -> None:
    stream = io.StringIO()
    with ProgressDisplay(2, 0, stream, Clock(), OVERVIEW) as progress:
        progress.update(metrics(1))
        progress.update(metrics(2))
    assert stream.getvalue().count("\n") == 2 and "\x1b" not in stream.getvalue()


def test_every_row_comes_through_the_launcher(tmp_path: Path) -> None:
    """Open MPI passes on whole lines. Here a person's terminal is a real one, and the screen stands still."""
    launcher = launcher_or_skip()
    if launcher.family != "Open MPI":
        pytest.skip("only Open MPI gives ranks a terminal")
    leave = tmp_path / "leave"
    words = [sys.executable, str(ROOT / "tests/programs/screen_rows.py"), str(leave)]
    command = build_command(launcher, 1, None, words)
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **command.environment}
    process = psutil.Popen(command.arguments, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    try:
        os.close(theirs)
        shown, deadline = b"", time.monotonic() + 30
        while b"row 2\r\n" not in shown and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                shown += os.read(ours, 65536)
        whole = shown.rpartition(b"row 0")[2]
        assert b"row 1\r\n" in whole and b"row 2\r\n" in whole, shown
        leave.touch()
    finally:
        os.close(ours)
        end_tree(process)
