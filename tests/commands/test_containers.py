"""The container files of ``docs/containers``: they install what README says, and their install steps run in a bare Debian."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mpi import ROOT

FOLDER = ROOT / "docs" / "containers"
FILES = sorted(FOLDER.glob("*.Containerfile"))
MINUTES = 60
INSTALL = re.compile(r"pip install (.*-e '\.\[openmpi\]')")


def steps(file: Path) -> list[tuple[str, str]]:
    """(instruction, its text) of a container file."""
    lines = file.read_text().splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


def test_all_of_them_install_as_readme_does() -> None:
    (wanted,) = {found for found in INSTALL.findall((ROOT / "README.md").read_text()) if "test" not in found}
    for file in [*FILES, FOLDER / "apptainer.def"]:
        (own,) = INSTALL.findall(file.read_text())
        assert own.removeprefix("--no-cache-dir ") == wanted, file
    assert [file.name.partition(".")[0] for file in FILES] == ["amd", "cpu", "intel", "nvidia"]


def test_they_differ_in_what_their_vendor_needs_only() -> None:
    of_cpu = steps(FOLDER / "cpu.Containerfile")
    for file in FILES:
        other = steps(file)
        assert [kind for kind, _ in other] == [kind for kind, _ in of_cpu]
        same = [pair for pair, cpu in zip(other, of_cpu, strict=True) if pair == cpu]
        assert len(other) - len(same) <= 3, "the base, its packages, the environment"


@pytest.mark.long
def test_the_install_steps_run_in_a_bare_debian(tmp_path: Path) -> None:
    """Debian's smallest system, no container engine: what the CPU's file says, then a plan and two ranks.

    pip is configured inside as it is outside, so that this machine's sources of packages serve.
    """
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap (apt install debootstrap)")
    system = tmp_path / "debian"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", system], check=True, capture_output=True)
    configured = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    pairs = dict(re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", configured.stdout, re.MULTILINE))
    environment = {f"PIP_{key.upper().replace('-', '_')}": value for key, value in pairs.items()}
    bound = [Path("/proc"), Path("/dev")]
    named = {pair for value in environment.values() for pair in re.findall(r"(?<![\w:/])(file://)?(/[\w./-]+)", value)}
    for is_index, path in named:
        if Path(path).is_dir():  # sources on this machine; an index leads to files beside it
            bound.append(Path(path).parent if is_index else Path(path))
        elif Path(path).is_file():  # a certificate, say, which a package would write, too
            (system / "outside").mkdir(exist_ok=True)
            shutil.copy(path, system / "outside")
            copied = f"/outside/{Path(path).name}"
            environment = {key: value.replace(path, copied) for key, value in environment.items()}
    shutil.copy("/etc/resolv.conf", system / "etc/resolv.conf")
    bound = list(dict.fromkeys(bound))
    for source in bound:
        (system / str(source).lstrip("/")).mkdir(parents=True, exist_ok=True)
    work = "/"
    for kind, text in steps(FOLDER / "cpu.Containerfile"):
        if kind == "COPY":
            ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__")
            shutil.copytree(ROOT, system / text.split()[1].lstrip("/"), ignore=ignored)
        elif kind == "WORKDIR":
            work = text
            (system / work.lstrip("/")).mkdir(exist_ok=True)
        elif kind == "RUN":
            inside(system, bound, f"cd {work}; {text}", environment)
        elif kind == "USER":
            user = text
    program = f"su {user} -c 'cd /tmp && /opt/hetero_mpi/.venv/bin/python -m hetero_mpi {{}}'"
    assert "per step" in inside(system, bound, program.format("plan --profile homelab-5090-strix-halo"), {})
    assert "2 connected ranks" in inside(system, bound, program.format("launch -np 2 -- doctor"), {})


def inside(system: Path, bound: list[Path], command: str, environment: dict[str, str]) -> str:
    """What a command prints in ``system``, with folders of this machine in their places. The mounts are the command's own, so none
    is left when it ends, however it does.
    """
    binds = "; ".join(f"mount --rbind {source} {system}{source}" for source in bound)
    words = ["unshare", "--mount", "sh", "-ec", f'{binds}; exec chroot {system} /bin/sh -ec "$0"', command]
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    own = {"PATH": path, "DEBIAN_FRONTEND": "noninteractive", "HOME": "/root", "LANG": "C.UTF-8"}
    done = subprocess.run(words, capture_output=True, text=True, env={**own, **environment}, timeout=MINUTES * 60)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
