"""``--help``, shell completion, and the unit that keeps ``serve`` running."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_mpi.cli import main
from hetero_mpi.commands.options import parser
from tests.support.mpi import ROOT

BASH = 'source {}; COMP_WORDS=({}); COMP_CWORD={}; _shtab_hetero_mpi; printf "%s\\n" "${{COMPREPLY[@]}}"'
FISH = 'source {}; complete -C "{}"'
ZSH = """
zmodload zsh/zpty; zpty shell zsh -f -i
zpty -w shell 'PS1=; autoload -Uz compinit; compinit -D -u; source {}; compdef _shtab_hetero_mpi hetero-mpi; echo rea''dy'
zpty -m shell seen '*ready*'; zpty -w -n shell $'{}\\t'
for _ in {{1..600}}; do
    sleep 0.1
    while zpty -r -t shell more; do seen+=$more; done
    [[ $seen == *{}* ]] && break
done
print -r -- $seen; zpty -d shell
"""


def test_every_command_has_one_line_of_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = parser().format_help()
    listed = text.partition("  COMMAND\n")[2].partition("\n\n")[0].splitlines()
    (commands,) = parser()._subparsers._group_actions  # type: ignore[union-attr]
    assert [line.split()[0] for line in listed] == list(commands.choices or ()), "none takes two lines"
    assert all(len(line) < 80 and len(line.split()) > 2 for line in listed)
    assert "order of use:" in text and text.count("\n  hetero-mpi ") == 2, "two examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "wanted"), [("hetero-mpi simu", "simulate"), ("hetero-mpi plan --expl", "--explain")]
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes(
    shell: str, words: str, wanted: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason="needs the package shtab")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    script = tmp_path / f"script.{shell}"
    script.write_text(capfd.readouterr().out)
    code = {
        "bash": BASH.format(script, words, len(words.split()) - 1),
        "fish": FISH.format(script, words),
        "zsh": ZSH.format(script, words, wanted),
    }[shell]
    flag = [] if shell == "fish" else ["-f"] if shell == "zsh" else ["--norc"]
    environment = {**os.environ, "HOME": str(tmp_path), "TERM": "dumb"}
    done = subprocess.run([shell, *flag, "-c", code], capture_output=True, text=True, env=environment, timeout=240)
    assert wanted in done.stdout, done.stdout + done.stderr


def test_without_its_package_completion_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2 and "pip install shtab" in capsys.readouterr().err


@pytest.mark.slow
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    home = tmp_path / "home"
    program = home / "hetero_mpi" / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.symlink_to(sys.executable)
    unit = tmp_path / "hetero-mpi-serve.service"
    unit.write_text((ROOT / "jobs" / "serve.service").read_text().replace("%h", str(home)))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0 and unit.name not in done.stderr, done.stderr
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=mixd"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "mixd" in done.stderr, "it tells a word that it does not know"
    command = unit.read_text().partition("ExecStart=")[2].splitlines()[0].split(" -m hetero_mpi ")[1]
    assert parser().parse_args(command.split()).ranks == 1
