"""Run a launcher: forward signals and output, and report failures that its exit code does not show.

Two lines announce the job; ``--verbose`` adds every automatic choice with its reason. ``--print`` shows the command line, to be
edited and run by hand. If the reader of this process's output is gone (``| head``), the launcher's output is still read,
because it would otherwise end the job. Open MPI prints a box between dashed lines for every non-zero exit code and every rank
that aborts, even if the job has printed the reason. With fault tolerance, its launcher exits with code 0 when it loses a host's
daemon, and the job with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import IO, TextIO

from hetero_mpi.comm.ranks.library import ENDED_LINE
from hetero_mpi.device.shortage import memory_kills, memory_kills_text
from hetero_mpi.launch.launcher.command_line import CommandLine
from hetero_mpi.launch.launcher.launcher import with_home
from hetero_mpi.util.background import Background
from hetero_mpi.util.disk import folder_space, temporary_folder
from hetero_mpi.util.errors import ABORT_SIGNALS, ExitCode, UserError
from hetero_mpi.util.terminal import UNWATCHED_VARIABLE, write_text

_MORE_TEXT = "the full command: --print; with the reasons for its options: --verbose"
_PR_SET_PDEATHSIG_CODE = 1
_AGAIN = "(Ctrl-C or SIGTERM now: end at once)"
_KILLED = (
    "; a plain `scancel` (without --batch --signal=USR1) may cut that short" if "SLURM_JOB_ID" in os.environ else ""
)
STOP_TEXTS = {
    "train": f"asking the job to end: after its step, with a checkpoint, or at once before the first step{_KILLED} {_AGAIN}",
    "dry run": f"asking the dry run to end {_AGAIN}",
    "serve": f"asking the service to end {_AGAIN}",
}
"""Each program that can be stopped gracefully -> the message about the stop."""
ABORT_TEXT = "ending the job at once, without a checkpoint"
MAX_RANK_EXIT_CODE = 128 + 64
"""Maximum exit code of a rank, for death by a signal. Launchers exceed it if they could not start the job."""
_NOT_STARTED = (
    "no rank was started: the login to a host failed, MPI is not installed there, or a firewall blocks connections back to "
    "this machine"
)
_LINE = b"-" * 74
_BOX_STARTS = (b"prterun ", b"PRTE has lost communication", b"MPI_ABORT was invoked")
_ABORTED = (b"MPI_ABORT was invoked", b'calling\n"abort"')
"""Text in boxes about a rank that has already printed its reason (``comm.ranks.leave``)."""
_FAILED = b"exited with non-zero status"
_LOST = b"PRTE has lost communication"
_ENDED = ENDED_LINE.encode()
_NO_RANK_LEFT = b"launch: no rank is left, and none has reported the end of the job\n"
_EXPLAINED_CODES = (ExitCode.USER_ERROR, ExitCode.STOPPED)
"""Exit codes for which the job has printed the reason."""
_EXIT_TIMEOUT_S = 2.0
"""Maximum wait for processes that the launcher left behind, and for the end of stderr, which they may keep open."""
_POLL_INTERVAL_S = 0.02


def start(command: CommandLine, print_only: bool, verbose: bool, asked_text: str | None, doctor: str) -> int:
    """Run the command, or only print it, and return the launcher's exit code.

    ``doctor`` is the command that diagnoses the hosts; it is suggested if they do not answer.
    """
    if print_only:
        print_lines([command.summary, *(command.reasons if verbose else [])])
        print(command)
        return 0
    announce(command, verbose)
    kills = memory_kills()
    code = run_command(command, asked_text, doctor)
    if text := memory_kills_text({socket.gethostname(): memory_kills() - kills}) if code != 0 else "":
        print_lines([text])
    return code


def announce(command: CommandLine, verbose: bool) -> None:
    """Print the summary on stderr; if ``verbose``, also the command and the reasons."""
    print_lines([command.summary, *command.reasons, str(command)] if verbose else [command.summary, _MORE_TEXT])


def print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        write_text(f"launch: {line}\n", sys.stderr)


def run_command(command: CommandLine, asked_text: str | None = None, doctor: str = "doctor") -> int:
    """Run a command to its end and return the job's exit code; stop signals go to the launcher (``request_stop``).

    ``asked_text`` is printed when a stop is requested; None if the program has nothing to save and is ended at once.
    ``doctor``: see ``start``.
    """
    process, errors = start_process(command)
    stop_requested, first_signal = asked_text is None, 0

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal stop_requested, first_signal
        if stop_requested and asked_text is not None and number not in ABORT_SIGNALS:
            return
        if asked_text is not None:
            text = ABORT_TEXT if stop_requested else asked_text
            print_lines([f"{signal_name(number)}: {text}"])
        request_stop(process, again=stop_requested)
        stop_requested, first_signal = True, first_signal or number

    with on_stop_signal(pass_on):
        if (code := process.wait()) != 0:
            _end_session(process.pid)
    # A negative code means a signal, which a shell reports as 128 + its number.
    code = errors.finish(code if code >= 0 else 128 - code, first_signal)
    if first_signal and code == 128 + getattr(signal, "SIGUSR1", 0):  # as ``request_stop`` passes on any signal
        code = 128 + first_signal
    if code > MAX_RANK_EXIT_CODE:
        print_lines([_NOT_STARTED, f"to find the cause: {doctor}"])
    return code


def start_process(command: CommandLine, stdin: int | None = None) -> tuple[subprocess.Popen[bytes], ErrorStream]:
    """Start a command whose stderr is forwarded by an ``ErrorStream``; ``stdin`` is that of ``subprocess.Popen``.

    Raises UserError if the launcher's folder for temporary files is full.
    """
    folder = folder_space(temporary_folder(), must_exist=True)
    if folder["problem"]:
        remedy = "free some space, or choose another folder, such as `export TMPDIR=/var/tmp`"
        raise UserError(
            "launch.temporary_folder",
            f"{folder['path']}, the folder for temporary files, {folder['problem']}: {remedy}",
        )
    environment = {**_session_folder(command.arguments), **with_home(os.environ), **command.environment}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        environment[UNWATCHED_VARIABLE] = "1"
    # The launcher ends the job if its output blocks, so this process reads it; a terminal is left to the ranks' displays.
    output = None if sys.stdout.isatty() else subprocess.PIPE
    process = subprocess.Popen(
        command.arguments,
        env=environment,
        # Ctrl-C at the terminal would also reach the launcher, and Open MPI's kills ranks at once.
        start_new_session=True,
        preexec_fn=_signal_on_parent_death(),
        stdin=stdin,
        stdout=output,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    return process, ErrorStream(process.stderr, process.stdout, outlives="--with-ft" in command.arguments)


def _session_folder(arguments: Sequence[str]) -> dict[str, str]:
    """Return an environment variable with a private folder for Open MPI's launcher; empty if the user sets one.

    The launcher names its session directory after its process id, and fails if a killed launcher has left a directory with that
    name: "The PMIx server's listener thread failed to start". The private folder is removed at exit.
    """
    if any("tmpdir_base" in word for word in [*arguments, *os.environ]):
        return {}
    folder = tempfile.mkdtemp(prefix="hetero_mpi-launch-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"PRTE_MCA_prte_local_tmpdir_base": folder}


def _signal_on_parent_death() -> Callable[[], object] | None:
    """Return a hook that makes the kernel send a new process SIGUSR1 if this one is killed; None if unsupported."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG_CODE, signal.SIGUSR1)


@contextlib.contextmanager
def on_stop_signal(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Direct stop signals to ``handler`` inside a block.

    Ignored signals stay ignored, as requested by ``nohup``. SIGINT is an exception: shells ignore it in every background
    command of a script, so a SIGINT that is sent to such a process is deliberate.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    handled = [n for n in numbers if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
    previous_handlers = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


def signal_name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def request_stop(process: subprocess.Popen[bytes], again: bool) -> None:
    """Ask all ranks to finish their step, write a checkpoint and exit; ``again``: to exit at once.

    Both launchers forward SIGUSR1 to the ranks on all hosts, and wait. At SIGINT or SIGTERM, Open MPI's launcher kills the
    ranks after a quarter of a second, whatever its settings. MPICH's forwards the signal, and a second one ends the ranks.
    """
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM if again or not hasattr(signal, "SIGUSR1") else signal.SIGUSR1)


def _end_session(session: int) -> None:
    """Wait until no process of an ended launcher's session runs on this machine; kill those that take too long.

    Open MPI's launcher with fault tolerance exits before the ranks that it has killed.
    """
    start_s = time.monotonic()
    while (running := _running_in(session)) and (waited_s := time.monotonic() - start_s) < 2 * _EXIT_TIMEOUT_S:
        for process in running if waited_s > _EXIT_TIMEOUT_S else []:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_INTERVAL_S)


def _running_in(session: int) -> list[int]:
    import psutil

    running = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):  # just ended
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process.pid)
    return running


class ErrorStream:
    """Reads ``stream``, a launcher's stderr, to its end on a separate thread, and forwards its informative parts.

    ``output`` is the launcher's stdout, which another thread forwards unchanged. If ``outlives``, the launcher tolerates lost
    ranks and exits with code 0 when none is left.
    """

    def __init__(self, stream: IO[bytes], output: IO[bytes] | None = None, outlives: bool = False) -> None:
        self._stream, self._with_ft = stream, outlives
        self._box: list[bytes] = []
        """Lines since a dashed line, as long as they may still form a box."""
        self._held_boxes = b""
        """Complete boxes that tell no more than an exit code."""
        self._lost = self._ended = False
        self._reading = [Background("forwarding the launcher's stderr", self._read)]
        if output is not None:
            self._reading.append(Background("forwarding the launcher's stdout", lambda: _forward_stdout(output)))

    def finish(self, code: int, asked_by: int = 0) -> int:
        """Return the job's exit code for the launcher's ``code``; print held boxes if the job has printed no reason."""
        for reading in self._reading:
            reading.finish(_EXIT_TIMEOUT_S)
        if code not in _EXPLAINED_CODES:
            _write(self._held_boxes)
        vanished = code == 0 and self._with_ft and not self._ended
        if vanished and asked_by:  # the signal has ended ranks that did not handle it yet
            return 128 + asked_by
        if vanished:
            _write(_NO_RANK_LEFT)
        return int(ExitCode.FAILED) if vanished or (code == 0 and self._lost) else code

    def _read(self) -> None:
        rest = b""
        with contextlib.suppress(OSError, ValueError):
            while piece := os.read(self._stream.fileno(), 65536):
                piece = piece.replace(b"\0", b"")  # ends Open MPI's boxes
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self._handle_line(line + b"\n")
                if not self._box and not rest.startswith(b"-") and b"\x1e" not in rest:
                    _write(rest)
                    rest = b""
        _write(b"".join(self._box) + rest)

    def _handle_line(self, line: bytes) -> None:
        if _ENDED in line:
            self._ended = True
            _write(line.replace(_ENDED, b"").strip(b"\r\n"))
            return
        rule = line.strip(b"\r\n") == _LINE
        if not self._box and not rule:
            _write(line)
            return
        self._box.append(line)
        if len(self._box) == 2 and rule:
            _write(self._box.pop(0))
        elif len(self._box) > 1 and (rule or not self._box[1].startswith(_BOX_STARTS)):
            self._handle_box(b"".join(self._box))

    def _handle_box(self, box: bytes) -> None:
        self._box = []
        if any(words in box for words in _ABORTED):
            return
        if _FAILED in box:
            self._held_boxes += box
            return
        self._lost = self._lost or _LOST in box
        _write(box)


def _forward_stdout(output: IO[bytes]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while piece := os.read(output.fileno(), 65536):
            _write(piece, sys.stdout)


def _write(piece: bytes, stream: TextIO | None = None) -> None:
    """Write to ``stream``, by default stderr."""
    rest = memoryview(piece)
    with contextlib.suppress(OSError):  # the reader may be gone, which must not end the job
        while rest:
            rest = rest[os.write((stream or sys.stderr).fileno(), rest) :]
