"""Self-test of a device, which runs ``operators`` in a subprocess because it may crash or hang, and collects the results.

Uses only the standard library, so that it works without a usable torch.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

from hetero_mpi.util.background import lines_of

PATIENCE_S = 120.0
"""Time limit for each check. The first includes importing torch, possibly from a cold network disk."""
OPENING = "opening the device"
MARK = "self-test: "
"""Prefix of the subprocess's output lines. The first has ``{"about": ..., "checks": [names]}``, each later one a ``Result``."""
_EXIT_TIMEOUT_S = 10.0
_PATH = re.compile(r"(?<![\w:/])/(?:[^\s/'\":,]+/)+")
_REMEDIES = {
    "NF4": "install bitsandbytes 0.50 or later, which must support this GPU and this torch build, or set [model] "
    'quantization = "none"',
    "attention": "try another torch version (nightly or earlier); known bugs: pytorch#160787 (Intel Arc), pytorch#196678 (cuDNN)",
    "copies": "check that the GPU and its riser are seated firmly, its driver, and the host's memory",
}
"""Maps a part of a check's name to the remedy if the check fails."""

OTHER_KERNELS = (
    "; an integrated GPU may use a related GPU's kernels: set HSA_OVERRIDE_GFX_VERSION=11.0.0 (10.3.0 before RDNA 3)"
)
"""Additional remedy for an AMD GPU for which ROCm has no kernels."""


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    check: str
    worst: float | None = None
    """Largest difference from the CPU's result, relative to its norm. None if the difference is NaN or was not measured."""
    allowed: float = 0.0
    what: str = ""
    """Name of the tensor with the largest difference."""
    took_s: float = 0.0
    error: str = ""
    short: bool = False
    """Whether the check ran out of memory and therefore has no result."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Maps each kind of copy to its speed in bytes/s."""

    @property
    def problem(self) -> str:
        """Description of the failure, or "" if the check did not fail."""
        if self.short:
            return ""
        if self.error:
            return self.error
        if self.worst is None:
            return f"{self.what} is not finite"
        return f"{self.what} differs by {self.worst:.1e} (limit: {self.allowed:g})" if self.worst > self.allowed else ""


@dataclass(frozen=True)
class SelfTest:
    """The results of the self-test of one device."""

    backend: str
    index: int
    about: dict[str, str] = field(default_factory=dict)
    results: tuple[Result, ...] = ()

    @property
    def label(self) -> str:
        return self.backend if self.backend in ("cpu", "mps") else f"{self.backend}:{self.index}"

    @property
    def problems(self) -> list[str]:
        """One line per failed check."""
        return [f"{result.check}: {result.problem}" for result in self.results if result.problem]

    def remedy(self) -> str:
        """Return the remedy for the first failure, which may have caused the later ones."""
        failed = next(result for result in self.results if result.problem)
        if "no kernel image" in failed.error or "invalid device function" in failed.error:
            text = "install a torch build that has kernels for it (docs/devices.md, Which torch for which GPU)"
            return text + (OTHER_KERNELS if self.backend == "rocm" else "")
        texts = [remedy for part, remedy in _REMEDIES.items() if part in failed.check][:1]
        if failed.check.endswith(("bf16", "fp16")) and "NF4" not in failed.check:
            alternative = "fp16" if failed.check.endswith("bf16") else "fp32"
            texts.append(f"[train] dtype = {alternative!r} avoids it")
        text = "update its driver, or install another torch build (docs/devices.md, Which torch for which GPU)"
        return "; ".join(texts) or text

    def with_result(self, result: Result) -> SelfTest:
        """Return a copy with another result, from whose text paths are removed because they may contain user names."""
        return replace(self, results=(*self.results, replace(result, error=_PATH.sub("", result.error))))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SelfTest:
        """Restore an object from the result of ``to_dict`` after a JSON round trip."""
        return cls(**{**values, "results": tuple(Result(**result) for result in values["results"])})


def self_test(backend: str, index: int, patience_s: float = PATIENCE_S) -> SelfTest:
    """Run the checks for all capabilities of the device.

    A check that takes longer than ``patience_s`` has failed, and its process is killed.
    """
    command = [sys.executable, "-m", "hetero_mpi.device.operators", backend, str(index)]
    test, waiting, error = SelfTest(backend, index), [OPENING], ""
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace"
        )
        assert process.stdout is not None
        lines = lines_of(process.stdout)
        try:
            while waiting and (line := lines.get(timeout=patience_s)) is not None:
                if not line.startswith(MARK):  # output of a library
                    continue
                value = json.loads(line.removeprefix(MARK))
                if "checks" in value:
                    test, waiting = replace(test, about=value["about"]), value["checks"]
                else:
                    test, waiting = test.with_result(Result(**value)), waiting[1:]
            error = _describe_exit(process, stderr) if waiting else ""
        except queue.Empty:
            error = f"no result within {patience_s:g} s; its process was killed"
        finally:
            process.kill()
    return test.with_result(Result(waiting[0], error=error)) if waiting else test


def _describe_exit(process: subprocess.Popen[str], stderr: IO[str]) -> str:
    """Describe how a process ended before it had completed its checks."""
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may block it
        process.wait(_EXIT_TIMEOUT_S)
    code = process.returncode or 0
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    stderr.seek(0)
    stderr_lines = [line.strip() for line in stderr if line.strip()]
    return f"its process ended with exit code {code}" + (f": {stderr_lines[-1][:300]}" if stderr_lines else "")


def text_of(test: SelfTest, driver: str) -> list[str]:
    """Format a test as lines for a bug report, without host names and paths.

    ``driver`` is the version of the device's kernel driver, or "" if it is unknown or the device has none.
    """
    about = {**test.about, "driver": driver} if driver else test.about
    lines = [
        f"{test.label}: " + ", ".join(f"{name} {value}" if name != "device" else value for name, value in about.items())
    ]
    for result in test.results:
        outcome = "FAIL" if result.problem else "none" if result.short else "ok"
        worst = "nan" if result.worst is None else f"{result.worst:.1e}"
        numbers = "" if result.error else f"{worst:>7} of {result.allowed:g}"
        text = result.problem or ("no memory left for the test" if result.short else "")
        lines.append(f"  {outcome:<4} {result.check:<22} {numbers:<16} {result.took_s:7.2f} s  {text}".rstrip())
        lines += [f"       {name:<30} {speed / 1e9:6.2f} GB/s" for name, speed in result.speeds.items()]
    return lines
