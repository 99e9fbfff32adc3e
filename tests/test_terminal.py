"""What others wrote, on a terminal: nothing in it is obeyed, and a reader who goes away is no error."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.cli import main
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.types.toml_files import save_plan
from hetero_mpi.rundir.logs import say, setup_logging
from hetero_mpi.util.terminal import printable, write_text
from tests.support.checkpoint_samples import told, write_checkpoint
from tests.support.planning_folder import REQUEST, cluster

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\r"


def test_what_a_terminal_obeys_is_spelt_out() -> None:
    assert printable(EVIL) == r"\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\r"
    assert printable("\ud800") == r"\ud800"
    assert printable("Straße\t日本\n😀") == "Straße\t日本\n😀"


def test_escape_codes_of_files_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(make_plan(cluster(), REQUEST), reasons=(f"because{EVIL}",))
    save_plan(plan, tmp_path / "plan.toml")
    write_checkpoint(tmp_path / "a.h5", told(1, base_model=f"base{EVIL}", versions={EVIL: EVIL}), {"w": (1,)})
    write_checkpoint(tmp_path / "b.h5", told(1, run=7), {f"w{EVIL}": (1,)})
    setup_logging(None, rank=0, size=1)
    say(f"said{EVIL}")
    setup_logging(None, rank=1, size=1)
    logging.captureWarnings(False)
    codes = [main(["inspect", str(tmp_path / name)]) for name in ("plan.toml", "a.h5", "b.h5", f"c{EVIL}")]
    assert codes == [0, 0, 2, 2]
    shown = "".join(capsys.readouterr())
    assert "because" in shown and "base" in shown and "said" in shown
    assert not [
        character for character in shown if (character < " " and character != "\n") or character in "\x9b\u202e"
    ]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminal_s_encoding_lacks_is_spelt_out(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "a.h5", told(1, versions={"日本": "→ \ud800"}), {"w": (1,)})
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding))
    assert main(["inspect", str(tmp_path / "a.h5")]) == 0
    write_text("say → \ud800\n", sys.stdout)
    assert all(
        text in shown.getvalue().decode(encoding) for text in (r"\u65e5\u672c \u2192 \ud800", r"say \u2192 \ud800")
    )


@pytest.mark.parametrize("stream", [io.TextIOWrapper(io.BytesIO(), "ascii"), io.StringIO()])
def test_a_program_s_own_stream_ends_nothing(stream: io.TextIOBase) -> None:
    """One that lacks a character, and one that is closed."""
    write_text("\u2192", stream)  # type: ignore[arg-type]
    stream.close()
    write_text("more", stream)  # type: ignore[arg-type]


@pytest.mark.parametrize("command", [["reference"], ["inspect", "a.h5"]])
def test_a_reader_who_has_seen_enough_is_no_error(command: list[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a.h5", told(1), {"w": (1,)})
    child = subprocess.Popen(
        [sys.executable, "-m", "hetero_mpi", *command], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() == 141
    child.stderr.close()
