"""Commands that have a time limit: what does not end within it is ended with all processes below it.

Ending a process group is not enough: launchers of ranks (mpirun, torchrun) start them in groups of their own.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil


def end_tree(process: psutil.Popen) -> None:
    """Kill a process and all below it. Without effect where it has ended."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        found = [process, *process.children(recursive=True)] if process.poll() is None else []
    for one in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def wait_until(holds: Callable[[], object], what: str, patience_s: float = 60.0, text: Callable[[], str] = str) -> None:
    """Fail, with ``text``, unless it holds in time."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}\n{text()}"
        time.sleep(0.02)


def run_within(
    timeout_s: float | None, arguments: Sequence[str], environment: Mapping[str, str], directory: Path
) -> subprocess.CompletedProcess[str]:
    """Run a command without input; its exit code and output.

    :raises subprocess.TimeoutExpired: it did not end in time, and nothing of it is left. It holds what was printed, as text.
    """
    words = list(arguments)
    process = psutil.Popen(
        words,
        env=dict(environment),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_tree(process)
        stdout, stderr = process.communicate()
        raise subprocess.TimeoutExpired(words, timeout_s or 0.0, stdout, stderr) from None
    finally:
        end_tree(process)
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)
