"""The self-test of a device: ``operators`` in a process of its own, which may crash or hang, and what it found.

Nothing but the standard library is needed here, as it also runs where torch cannot be imported.
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
"""How long a check may take; importing torch from a cold network disk is one."""
OPENING = "opening the device"
MARK = "self-test: "
"""Before every line of the process: first ``{"about": ..., "checks": [names]}``, then a ``Result`` for each check in turn."""
_ENDING_S = 10.0
_PATH = re.compile(r"(?<![\w:/])/(?:[^\s/'\":,]+/)+")
_REMEDIES = {
    "NF4": "install bitsandbytes 0.50 or later, which must know this GPU and this torch build, or set [model] "
    'quantization = "none"',
    "attention": "another torch may have another kernel for it (PyTorch's nightly or an earlier version); "
    "known: pytorch#160787 (Intel Arc), pytorch#196678 (cuDNN)",
    "copies": "check the GPU's seat and riser, its driver, and the host's memory",
}
"""Part of a check's name -> what to do where it fails."""

OTHER_KERNELS = (
    "; a processor's own GPU may take its nearest relative's: HSA_OVERRIDE_GFX_VERSION=11.0.0 (10.3.0 before RDNA 3)"
)
"""Another remedy for an AMD GPU for which ROCm has no kernels."""


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    check: str
    worst: float | None = None
    """Largest difference from the CPU's numbers, relative to their norm; None: not a number, or never measured."""
    allowed: float = 0.0
    what: str = ""
    """Which tensor differs so."""
    took_s: float = 0.0
    error: str = ""
    short: bool = False
    """Memory was short, so that nothing was found out."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Kind of copy -> bytes/s."""

    @property
    def problem(self) -> str:
        """The fault in words; "" where there is none."""
        if self.short:
            return ""
        if self.error:
            return self.error
        if self.worst is None:
            return f"{self.what} is not finite"
        return (
            f"{self.what} differs by {self.worst:.1e}, {self.allowed:g} is allowed" if self.worst > self.allowed else ""
        )


@dataclass(frozen=True)
class SelfTest:
    """The results of one device."""

    backend: str
    index: int
    about: dict[str, str] = field(default_factory=dict)
    results: tuple[Result, ...] = ()

    @property
    def label(self) -> str:
        return self.backend if self.backend in ("cpu", "mps") else f"{self.backend}:{self.index}"

    @property
    def problems(self) -> list[str]:
        """A line for every check that failed."""
        return [f"{result.check}: {result.problem}" for result in self.results if result.problem]

    def remedy(self) -> str:
        """The remedy for the first failure, which those after it may follow from."""
        failed = next(result for result in self.results if result.problem)
        if "no kernel image" in failed.error or "invalid device function" in failed.error:
            text = "install a torch build that has kernels for it (docs/devices.md, Which torch for which GPU)"
            return text + (OTHER_KERNELS if self.backend == "rocm" else "")
        texts = [remedy for part, remedy in _REMEDIES.items() if part in failed.check][:1]
        if failed.check.endswith(("bf16", "fp16")) and "NF4" not in failed.check:
            other = "fp16" if failed.check.endswith("bf16") else "fp32"
            texts.append(f"[train] dtype = {other!r} does without it")
        text = "update its driver, or install another torch build (docs/devices.md, Which torch for which GPU)"
        return "; ".join(texts) or text

    def with_result(self, result: Result) -> SelfTest:
        """The test with one more result, in whose text no path stands: it may hold names of people."""
        return replace(self, results=(*self.results, replace(result, error=_PATH.sub("", result.error))))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SelfTest:
        """The inverse of ``to_dict``, JSON in between."""
        return cls(**{**values, "results": tuple(Result(**result) for result in values["results"])})


def self_test(backend: str, index: int, patience_s: float = PATIENCE_S) -> SelfTest:
    """Run the checks of all that the device can do.

    ``patience_s``: a check that takes longer has failed, and its process is killed.
    """
    command = [sys.executable, "-m", "hetero_mpi.device.operators", backend, str(index)]
    test, waiting, error = SelfTest(backend, index), [OPENING], ""
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True, errors="replace"
        )
        assert process.stdout is not None
        lines = lines_of(process.stdout)
        try:
            while waiting and (line := lines.get(timeout=patience_s)) is not None:
                if not line.startswith(MARK):  # a library's own words
                    continue
                value = json.loads(line.removeprefix(MARK))
                if "checks" in value:
                    test, waiting = replace(test, about=value["about"]), value["checks"]
                else:
                    test, waiting = test.with_result(Result(**value)), waiting[1:]
            error = _end(process, complaints) if waiting else ""
        except queue.Empty:
            error = f"no result within {patience_s:g} s; its process was killed"
        finally:
            process.kill()
    return test.with_result(Result(waiting[0], error=error)) if waiting else test


def _end(process: subprocess.Popen[str], complaints: IO[str]) -> str:
    """How a process came to its end before it was done, in words."""
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
        process.wait(_ENDING_S)
    code = process.returncode or 0
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    complaints.seek(0)
    said = [line.strip() for line in complaints if line.strip()]
    return f"its process ended with exit code {code}" + (f": {said[-1][:300]}" if said else "")


def text_of(test: SelfTest, driver: str) -> list[str]:
    """Lines for an issue: no host's name, no path.

    ``driver``: version of the device's kernel driver; "": not known, or it has none.
    """
    about = {**test.about, "driver": driver} if driver else test.about
    lines = [
        f"{test.label}: " + ", ".join(f"{name} {value}" if name != "device" else value for name, value in about.items())
    ]
    for result in test.results:
        outcome = "FAIL" if result.problem else "none" if result.short else "ok"
        worst = "nan" if result.worst is None else f"{result.worst:.1e}"
        numbers = "" if result.error else f"{worst:>7} of {result.allowed:g}"
        text = result.problem or ("no memory left to try it" if result.short else "")
        lines.append(f"  {outcome:<4} {result.check:<22} {numbers:<16} {result.took_s:7.2f} s  {text}".rstrip())
        lines += [f"       {name:<30} {speed / 1e9:6.2f} GB/s" for name, speed in result.speeds.items()]
    return lines
