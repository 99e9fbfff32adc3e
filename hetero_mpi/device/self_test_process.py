"""The self-test of a device: ``model/self_test.py`` in a process of its own, which may crash or hang, and what it found.

Nothing but the standard library is needed here, as ``launch.doctor.probe`` runs it.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

from hetero_mpi.background import lines_of

NF4 = "nf4"
"""Stands among the dtypes of ``needs``: packed weights too."""
PATIENCE_S = 120.0
"""How long a check may take; importing torch from a cold network disk is one."""
OPENING = "opening the device"
MARK = "self-test: "
"""Before every line of the process: a JSON list of what it tells and the value. Told are ``about``, ``result`` and ``speeds``, as
in ``SelfTest``, and ``begin`` with the name and the kind of the next check, both empty at the end."""
_ENDING_S = 10.0
_PATH = re.compile(r"(?<![\w:/])/(?:[^\s/'\":,]+/)+")
_REMEDIES = {
    "attention": "another torch may have another kernel for it (PyTorch's nightly or an earlier version); "
    "known: pytorch#160787 (Intel Arc), pytorch#196678 (cuDNN)",
    NF4: 'install bitsandbytes 0.50 or later, which must know this GPU and this torch build, or set [model] quantization = "none"',
    "copies": "check the GPU's seat and riser, its driver, and the host's memory",
}


@dataclass(frozen=True)
class Result:
    """Of one check."""

    check: str
    kind: str
    """What it is about: ``model``, ``attention``, ``nf4``, ``adamw``, ``copies`` or ``start``."""
    worst: float | None = None
    """Largest difference from the CPU's numbers, relative to their norm; None: not a number, or never measured."""
    allowed: float = 0.0
    what: str = ""
    """Which tensor differs so."""
    took_s: float = 0.0
    error: str = ""
    short: bool = False
    """Memory was short, so that nothing was found out."""

    @property
    def problem(self) -> str:
        """What is wrong; "" where nothing is."""
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
    """Of one device."""

    backend: str
    index: int
    about: dict[str, str] = field(default_factory=dict)
    results: tuple[Result, ...] = ()
    speeds: dict[str, float] = field(default_factory=dict)
    """What was copied -> bytes/s."""

    @property
    def label(self) -> str:
        return self.backend if self.backend in ("cpu", "mps") else f"{self.backend}:{self.index}"

    @property
    def problems(self) -> list[str]:
        """A line for every check that failed."""
        return [f"{result.check}: {result.problem}" for result in self.results if result.problem]

    @property
    def passed(self) -> bool:
        """Is every result there, and good?"""
        return not any(result.problem or result.short for result in self.results)

    def remedy(self) -> str:
        """What to do about the first failure, which those after it may follow from."""
        failed = next(result for result in self.results if result.problem)
        if "no kernel image" in failed.error or "invalid device function" in failed.error:
            return "install a torch build that has kernels for it (docs/devices.md, Which torch for which GPU)"
        text = _REMEDIES.get(failed.kind, "")
        for dtype in ("bf16", "fp16"):
            if failed.check.endswith(dtype) and failed.kind != NF4:
                text += (
                    f"{'; ' if text else ''}[train] dtype = {'fp16' if dtype == 'bf16' else 'fp32'!r} does without it"
                )
        return text or "update its driver, or install another torch build (docs/devices.md, Which torch for which GPU)"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SelfTest:
        """The inverse of ``to_dict``, JSON in between."""
        return cls(**{**values, "results": tuple(Result(**result) for result in values["results"])})


def self_test(backend: str, index: int, needs: Sequence[str] = (), patience_s: float = PATIENCE_S) -> SelfTest:
    """Run the checks of ``needs``; without: all that the device can do, and its copies timed.

    ``patience_s``: a check that takes longer has failed, and its process is killed.
    """
    command = [sys.executable, "-m", "hetero_mpi.model.self_test", backend, str(index)]
    command += ["--needs", ",".join(needs)] if needs else []
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True, errors="replace"
        )
        assert process.stdout is not None
        return _heard(SelfTest(backend, index), process, lines_of(process.stdout), complaints, patience_s)


def _heard(
    test: SelfTest,
    process: subprocess.Popen[str],
    lines: queue.Queue[str | None],
    complaints: IO[str],
    patience_s: float,
) -> SelfTest:
    """``test`` with what its process tells."""
    begun, kind, late = OPENING, "start", False
    try:
        while begun and (line := lines.get(timeout=patience_s)) is not None:
            if not line.startswith(MARK):  # a library's own words
                continue
            what, value = json.loads(line.removeprefix(MARK))
            if what == "begin":
                begun, kind = value
            elif what == "result":
                result = Result(**value)
                test = replace(test, results=(*test.results, replace(result, error=_public(result.error))))
            else:
                test = replace(test, **{what: value})
        process.wait(_ENDING_S)
    except (queue.Empty, subprocess.TimeoutExpired):
        late = True
    finally:
        process.kill()
    if begun:
        error = f"no result within {patience_s:g} s; its process was killed" if late else _end(process, complaints)
        test = replace(test, results=(*test.results, Result(begun, kind, error=_public(error))))
    return test


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


def _public(text: str) -> str:
    """Without directories, which may hold names of people."""
    return _PATH.sub("", text)


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
    lines += [f"       {name:<30} {speed / 1e9:6.2f} GB/s" for name, speed in test.speeds.items()]
    return lines
