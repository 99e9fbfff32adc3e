"""What commands print fits the terminal, and no word is broken; where nobody watches, lines stay whole."""

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from hetero_mpi.cli import main, parser
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.report.table import Table
from hetero_mpi.util.terminal import columns, wrap_text
from tests.support.mpi import ROOT
from tests.support.past_runs import make_run
from tests.support.planning_folder import REQUEST, cluster

HOMELAB = "homelab-5090-strix-halo"
COMMANDS = [
    ["plan", "--profile", HOMELAB, "--explain"],
    ["inspect", "hethub-128-640", "-o", "profile.png"],
    ["inspect", HOMELAB, "-o", "profile.png"],
    ["simulate", "--profile", HOMELAB, "-o", "simulation", "--shared-nic"],
    ["baseline", "--profile", HOMELAB],
    ["compare", "runs/one", "runs/two"],
    ["init"],
    ["plan", "--profile", "nowhere"],
]
PROFILES = {path.stem for path in (ROOT / "profiles").glob("*.toml")}
NAMES = tuple(parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr, arg-type]


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with contextlib.suppress(SystemExit):
        main(words)
    return "\n".join(capsys.readouterr())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    report = make_plan(cluster(), REQUEST)
    for name in ("one", "two"):
        make_run(tmp_path / "runs" / name, report, cluster())
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3]))
def test_lines_fit_and_hold_whole_words(
    words: list[str], width: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = printed(words, capsys)
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = printed(words, capsys)
    assert narrow.strip() and not [line for line in narrow.splitlines() if len(line) > width and " " in line.strip()]
    assert set(narrow.split()) - set(whole.split()) == set()
    assert max(map(len, whole.splitlines())) > width, "the example shows nothing"


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("name", NAMES)
def test_help_fits(name: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    whole = printed([name, "--help"], capsys)
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = printed([name, "--help"], capsys)
    assert max(map(len, narrow.splitlines())) <= width and set(narrow.split()) <= set(whole.split())


def test_lines_are_whole_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "word " * 60 + "end"
    assert columns() is None and wrap_text("because: ", long) == [f"because: {long}"]
    (line,) = Table.of_texts(("", "why"), [("0", long)]).lines()[1:]
    assert line == f"  0  {long}"


@pytest.mark.slow
def test_the_width_of_a_real_terminal_counts() -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
    command = [sys.executable, "-m", "hetero_mpi", "plan", "--profile", HOMELAB]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        command,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=theirs,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # under nohup nobody watches
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:
        pass  # the end of a pseudo-terminal
    os.close(ours)
    assert process.wait() == 0
    assert 60 < max(map(len, shown.decode().splitlines())) <= 70
