"""Several hosts on this machine that can be switched off: each has its own network, name and processes.

They hang on a switch (a bridge in a network namespace of its own), so that a cable can be pulled between any two of them. The
file system is shared, as over NFS, but for one directory that may be every host's own. Needs root; commands reach a host as they
do with ssh (programs/launch_host.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil
import pytest

from tests.support.processes import wait_until

LOGIN = Path(__file__).parents[1] / "programs" / "launch_host.py"
NETWORK = "10.79.14"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Rack:
    """``names`` of hosts -> addresses; a context manager that leaves nothing behind. Skips the test where it cannot be.

    Args:
        own: a directory that is another one on every host, on its own disk: ``disks[name]`` to those who look from outside.
        full: hosts whose folder for temporary files is full.
    """

    def __init__(
        self, directory: Path, names: Sequence[str], own: Path | None = None, full: Sequence[str] = ()
    ) -> None:
        if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "unshare", "bash")):
            pytest.skip("hosts on one machine need root, ip and unshare")
        self.directory = directory
        directory.mkdir()
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, start=1)}
        self.own, self.full = own, full
        self.disks = {name: directory / f"disk-{name}" for name in names}
        for disk in (*self.disks.values(), *([own] if own is not None else [])):
            disk.mkdir()
        self.switch = f"sw{os.getpid()}"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._temporary: list[tempfile.TemporaryDirectory[str]] = []
        self.agent = directory / "agent"
        cases = " ".join(f"{address}) name={name};;" for name, address in self.addresses.items())
        self.agent.write_text(
            "#!/bin/bash\n# Stands in for ssh: AGENT HOST COMMAND...\nwhile [[ $1 == -* ]]; do shift; done\n"
            f'case $1 in {cases} esac\nshift\nexec {sys.executable} {LOGIN} run {directory} $name "$@"\n'
        )
        self.agent.chmod(0o755)

    def __enter__(self) -> Rack:
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.switch, "link", "set", "bridge", "up")
            for name in self.addresses:
                self.power_on(name)
        except subprocess.CalledProcessError as error:
            self.__exit__(None, None, None)
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._running):
            self._kill(name)
        for temporary in self._temporary:
            temporary.cleanup()
        subprocess.run(["ip", "netns", "delete", self.switch], capture_output=True)

    def power_on(self, name: str) -> None:
        """Boot a host and plug it in."""
        (self.directory / f"{name}.socket").unlink(missing_ok=True)
        unshare = ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
        # A sysfs of its own shows the host's network devices, not this machine's.
        mounts = "mount -t sysfs none /sys"
        if self.own is not None:
            mounts += f"; mount --bind {self.disks[name]} {self.own}"
        if name in self.full:
            mounts += "; mount -t tmpfs -o size=256k none $TMPDIR; head -c 1000000 /dev/zero > $TMPDIR/fill"
        serve = f"{mounts}; exec {sys.executable} {LOGIN} serve {self.directory} {name}"
        # Process ids begin anew in every host: files that launchers name by them must not meet.
        temporary = tempfile.TemporaryDirectory(prefix=name)
        self._temporary.append(temporary)
        self._running[name] = subprocess.Popen(
            [*unshare, "bash", "-c", serve],
            env={**os.environ, "TMPDIR": temporary.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: (self.directory / f"{name}.socket").exists(), f"host {name} is up")
        inside = str(self.login(name).pid)
        # The kernel takes its time to remove what a host without power was plugged in with.
        subprocess.run(["ip", "-n", self.switch, "link", "delete", f"to{name}"], capture_output=True)
        ip("link", "add", "cable0", "netns", inside, "type", "veth", "peer", "name", f"to{name}", "netns", self.switch)
        ip("-n", self.switch, "link", "set", f"to{name}", "master", "bridge", "up")
        enter = ["nsenter", "-t", inside, "-n", "ip"]
        for words in (
            ("address", "add", f"{self.addresses[name]}/24", "dev", "cable0"),
            ("link", "set", "cable0", "up"),
            ("link", "set", "lo", "up"),
        ):
            subprocess.run([*enter, *words], check=True, capture_output=True, text=True)
        (self.directory / f"{name}.dark").unlink(missing_ok=True)

    def pull_cable(self, name: str) -> None:
        """The host runs on, and nobody hears of it: no packet leaves the switch's port."""
        (self.directory / f"{name}.dark").touch()
        ip("-n", self.switch, "link", "set", f"to{name}", "down")

    def plug_in(self, name: str) -> None:
        ip("-n", self.switch, "link", "set", f"to{name}", "up")
        (self.directory / f"{name}.dark").unlink()

    def cut_power(self, name: str) -> None:
        """Nothing runs on, and no connection is closed towards the others."""
        self.pull_cable(name)
        self._kill(name)

    def lose(self, name: str) -> None:
        """The power goes, and nothing that was on the host's own disk will ever be read again."""
        self.cut_power(name)
        shutil.rmtree(self.disks[name])

    def crash(self, name: str) -> None:
        """All processes of the host die, its login included; the network tells the others at once."""
        self._kill(name)

    def login(self, name: str) -> psutil.Process:
        """The first process of a host; all others are below it."""
        return psutil.Process(self._running[name].pid).children()[0]

    def running(self) -> list[str]:
        """Hosts with power."""
        return list(self._running)

    def _kill(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is not None:
            for first in psutil.Process(process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    first.kill()  # takes everything in there with it
            process.kill()
            process.wait()
