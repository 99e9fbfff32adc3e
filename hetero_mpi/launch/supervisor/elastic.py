"""The supervisor of ``launch --elastic``: a process outside MPI that restarts the job on the remaining hosts.

MPI does not survive the loss of a host: its launcher ends the job, or hangs for minutes or forever. The supervisor therefore
starts the launcher and watches the hosts itself (``watched_hosts``, ``host_reports``). When a host falls silent or a job
fails::

    end remaining processes on all hosts -> probe the hosts -> restart on those that answer, from the newest state

The job plans again for its new ranks and finds the newest state: a checkpoint on the leading host, or copies on the disks of
all hosts (``train.start_state``). A host that comes back takes part again from the next restart.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hetero_mpi.comm.ranks.library import OPEN_MPI
from hetero_mpi.device.shortage import memory_kills_text
from hetero_mpi.launch.hosts.agent import launch_agent
from hetero_mpi.launch.hosts.hostfile import format_hostfile
from hetero_mpi.launch.launcher.command_line import CommandLine, build_command, hosts_command
from hetero_mpi.launch.launcher.launcher import Launcher
from hetero_mpi.launch.launcher.launcher_process import (
    ABORT_TEXT,
    STOP_TEXTS,
    announce,
    on_stop_signal,
    request_stop,
    signal_name,
    start_process,
)
from hetero_mpi.launch.supervisor.elastic_options import ElasticOptions
from hetero_mpi.launch.supervisor.host_reports import end_starts
from hetero_mpi.launch.supervisor.watched_hosts import WatchedHost, WatchedHosts
from hetero_mpi.rundir.run_directory import START_VARIABLE, EventLog
from hetero_mpi.util.disk import write_atomic
from hetero_mpi.util.errors import ABORT_SIGNALS, ExitCode, UserError

GIVEN_UP = int(ExitCode.GIVEN_UP)
"""Exit code if the supervisor gives up on restarting the job (EX_TEMPFAIL: trying later may help)."""
_FINAL_CODES = (ExitCode.DONE, ExitCode.USER_ERROR, ExitCode.STOPPED)
"""Exit codes that cause no restart: done, an error that the user must fix, or stopped on request."""
_MAX_FRUITLESS_STARTS = 3
"""The supervisor gives up after this many consecutive starts on the same hosts without a completed step."""
_MAX_PAUSE_S = 60.0
_POLL_S = 0.05
_LOCK_TIMEOUT_S = 120.0
"""Maximum wait for the lock of a run directory; NFS servers keep a lost machine's locks for 90 s."""
_SWEEP_TIMEOUT_S = 8.0
"""Maximum wait for a host to end its processes, which normally takes half a second."""


@dataclass
class StartOutcome:
    """How one start of the job ended: with the launcher's exit code, or because hosts fell silent."""

    code: int | None
    silent: list[WatchedHost] = field(default_factory=list)


class Supervisor:
    """Runs a job until it ends, restarting it as often as necessary.

    ``program``: arguments of ``python -m hetero_mpi``. ``trains``: whether the job takes steps (not under ``--dry-run``).
    """

    def __init__(
        self, options: ElasticOptions, launcher: Launcher, program: Sequence[str], run_dir: Path, trains: bool
    ) -> None:
        self.trains = trains
        self.options, self.launcher, self.program = options, launcher, tuple(program)
        self.name = secrets.token_hex(6)
        self.hosts, self.entries = options.hosts(), options.entries()
        self.run_dir = run_dir
        agent, _ = launch_agent(launcher.family, options.mpirun_args, os.environ)
        entries = {entry.address: entry for entry in reversed(self.entries)}
        self.watching = WatchedHosts(self.hosts, agent, self.name, options.heartbeat_timeout_s, run_dir, entries)
        self.events = EventLog(run_dir, self.name)
        self.signals: list[int] = []
        self.starts = 0
        self.stepped = False
        """Whether any start of this supervisor has completed a step. Until then, the user's own ``--resume`` applies."""
        self._noticed_s: float | None = None
        self._unfit_leaders: list[str] = []
        """Hosts that could not lead because they lack files of the lost leader, such as the data."""
        self._leader_name: str | None = None
        """Host that was the leader at the last completed step."""

    def run(self) -> int:
        """Run the job until it ends; return its exit code, ``GIVEN_UP``, or 128 plus a signal's number."""
        with self.watching, on_stop_signal(self._on_signal), tempfile.TemporaryDirectory() as scratch:
            return self._run(Path(scratch))

    def _run(self, scratch: Path) -> int:
        silent: list[WatchedHost] = []
        restarts = fruitless = 0
        previous_names: list[str] = []
        while True:
            watched = self._probe(silent)
            if self.signals:
                return 128 + self.signals[0]
            previous_names, same = [host.name for host in watched], previous_names == [host.name for host in watched]
            fruitless = fruitless if same else 0
            if self._ranks(watched) < self.options.min_ranks:
                text = f"{self._ranks(watched)} ranks fit on the hosts that answer, but --min-ranks is {self.options.min_ranks}"
                self.events.report("too-few", text, hosts=previous_names)
                silent, fruitless = [], fruitless + 1
            else:
                outcome, progressed = self._start(watched, scratch)
                if self._cannot_lead(outcome, progressed, watched):
                    silent = []
                    continue
                if outcome.code is not None and (outcome.code in _FINAL_CODES or self.signals):
                    self.events.report("end", f"the job ended with exit code {outcome.code}", code=outcome.code)
                    return outcome.code
                silent, fruitless = outcome.silent, 0 if progressed else fruitless + 1
                if fruitless >= _MAX_FRUITLESS_STARTS:
                    text = f"{fruitless} consecutive attempts on the same hosts completed no step: giving up"
                    return self._stop_restarting(text)
            if restarts >= self.options.max_restarts:
                return self._stop_restarting(f"--max-restarts {self.options.max_restarts} reached: giving up")
            restarts += 1
            self._pause(fruitless)

    def _stop_restarting(self, text: str) -> int:
        self.events.report("given-up", f"{text} (exit code {GIVEN_UP})", code=GIVEN_UP)
        return GIVEN_UP

    def _probe(self, silent: Sequence[WatchedHost]) -> list[WatchedHost]:
        began = time.monotonic()
        answered = self.watching.probe([host.number for host in silent], self.options.probe_timeout_s)
        watched = [host for host in answered if not host.disk_problems()]
        missing = {
            host.name: host.disk_problems() if host in answered else host.complaint()
            for host in self.watching.watched
            if host not in watched
        }
        names = [host.name for host in watched]
        text = f"{', '.join(names) or 'no host'} answered within {time.monotonic() - began:.1f} s"
        text += "".join(f"; without {name} ({why})" for name, why in missing.items())
        if self.starts == 0 and self._ranks(watched) < self.options.min_ranks <= self._ranks(answered):
            raise UserError(
                "elastic.no_room", f"{text}: free some space there; TMPDIR sets the folder for temporary files"
            )
        self.events.report("hosts", text, present=names, missing=missing)
        return watched

    def _ranks(self, watched: Sequence[WatchedHost]) -> int:
        return min(self.options.ranks, sum(host.entry.slots or 0 for host in watched))

    def _start(self, watched: list[WatchedHost], scratch: Path) -> tuple[StartOutcome, bool]:
        """Run the job once and end all its processes; return (outcome, whether it completed a step)."""
        self.starts += 1
        start = f"{self.name}.{self.starts}"
        ranks, resume, copies = self._ranks(watched), *self._state(watched)
        self._wait_for_lock(watched[0])
        command = self.command(start, watched, ranks, bool(resume or copies), scratch)
        text = f"attempt {self.starts}: {ranks} rank{'s' if ranks > 1 else ''} on {', '.join(p.name for p in watched)}"
        if self.stepped:
            text += f", {_state_text(resume, copies)}"
        hosts = [host.name for host in watched]
        self.events.report("start", text, start=self.starts, ranks=ranks, hosts=hosts, resume=resume, copies=copies)
        if self.options.verbose or self.starts == 1:
            announce(command, self.options.verbose)
        self.watching.spare_start(start)
        kills = {host.number: host.memory_kills for host in watched}
        process, errors = start_process(command, subprocess.DEVNULL)
        progress = _Progress(watched, self._report_first_step)
        try:
            outcome = self._watch_start(process, watched, progress)
        finally:
            unreachable = self._end_start(process, watched)
        killed = {host.name: host.memory_kills - kills[host.number] for host in watched}
        if outcome.code != 0 and (text := memory_kills_text(killed)):
            self.events.report("memory", text, hosts=[name for name, count in killed.items() if count > 0])
        errors.finish(ExitCode.FAILED if outcome.code is None else outcome.code)
        if outcome.code == 0:
            outcome = self._verified_outcome(outcome, watched, unreachable)
        if progress.first_step_seen:
            self._leader_name = watched[0].name
        return outcome, progress.first_step_seen

    def command(
        self, start: str, watched: Sequence[WatchedHost], ranks: int, resume: bool, scratch: Path
    ) -> CommandLine:
        """Build the command line of one start: the user's, restricted to the hosts that answer.

        Args:
            start: Identifier of the start, which all its processes carry.
            watched: Hosts to use, the leader first.
            resume: Whether to resume from the newest state; otherwise the user's command line decides.
            scratch: Folder for host files.
        """
        words = list(self.program)
        if resume:
            words = [*without_option(words, "--resume", needs_value=False), "--resume", "any"]
        if len(watched) < len(self.hosts):
            for option in ("--plan", "--profile"):  # made for all hosts
                words = without_option(words, option)
        mpirun_args = [*self.options.mpirun_args, *(["-x", START_VARIABLE] if self.launcher.family == OPEN_MPI else [])]
        if (path := self.options.hosts_file) is not None:
            from hetero_mpi.launch.hosts.hosts_toml import ranks_of  # imports pydantic
            from hetero_mpi.launch.hosts.mesh import read_mesh

            entries = [entry for host in watched for entry in self.entries if entry.address == host.name]
            # Rank 0 may start in another directory than this process, which looks for the run's files in its own.
            words = [*without_option(words, "--run-dir"), "--run-dir", str(self.run_dir)]
            command = hosts_command(self.launcher, ranks_of(entries, ranks, path), words, mpirun_args, read_mesh(path))
        else:
            hosts = None
            if self.options.hostfile is not None:
                hosts = str(scratch / f"hosts-{start}")
                write_atomic(Path(hosts), format_hostfile([host.entry for host in watched], self.launcher.family))
            program = [sys.executable, "-m", "hetero_mpi", *words]
            command = build_command(self.launcher, ranks, hosts, program, mpirun_args)
        command.environment[START_VARIABLE] = start
        return command

    def _cannot_lead(self, outcome: StartOutcome, progressed: bool, watched: Sequence[WatchedHost]) -> bool:
        """Whether the start failed because a new host leads, while another host could lead instead.

        If the run has completed steps before, the job is valid, so most likely this host lacks a file.
        """
        leader = watched[0].name
        if outcome.code != ExitCode.USER_ERROR or progressed or self._leader_name in (None, leader) or self.signals:
            return False
        self._unfit_leaders.append(leader)
        candidates = [host.name for host in watched if host.name not in self._unfit_leaders]
        text = f"{leader} cannot take over from {self._leader_name} as leader (see the error above)"
        if candidates:
            self.events.report("unfit", f"{text}: trying {candidates[0]}", host=leader)
            return True
        text += (
            "; nor could any other remaining host. The first rank must be able to read the job, its data and its model under "
            f"the same paths as on {self._leader_name}: copy them, and continue with `train --resume`"
        )
        self.events.report("unfit", text, host=leader)
        return False

    def _verified_outcome(
        self, outcome: StartOutcome, watched: Sequence[WatchedHost], unreachable: Sequence[WatchedHost]
    ) -> StartOutcome:
        """Return ``outcome``, or a failure if the job is incomplete: Open MPI may report success after losing a host."""
        step = max(host.run.get("step", 0) for host in watched)
        last = max(host.run.get("last", 0) for host in watched)
        if not self.trains or (not unreachable and 0 < last <= step):
            return outcome
        text = f"the launcher ended with exit code 0, but after step {step} of {last}; "
        text += f"no answer from {', '.join(host.name for host in unreachable)}" if unreachable else "all hosts answer"
        self.events.report("broken", text, code=0)
        return StartOutcome(None)

    def _watch_start(
        self, process: subprocess.Popen[bytes], watched: list[WatchedHost], progress: _Progress
    ) -> StartOutcome:
        """Watch a start until it ends, a host falls silent, or a second signal ends it."""
        passed_on = 0
        while True:
            code = process.poll()
            progress.poll_reports()
            if code is not None:
                self._noticed_s = time.monotonic()
                code = code if code >= 0 else 128 - code  # a shell's code for a signal
                if code not in _FINAL_CODES and not self.signals:
                    self.events.report("broken", f"the job ended with exit code {code}", code=code)
                return StartOutcome(code)
            if silent := self.watching.silent(watched):
                self._noticed_s = time.monotonic()
                names = [host.name for host in silent]
                text = f"{', '.join(names)} silent for {self.options.heartbeat_timeout_s:g} s: treated as lost"
                self.events.report("silent", text, hosts=names)
                return StartOutcome(128 + self.signals[0] if self.signals else None, silent)
            if len(self.signals) > passed_on:
                name = signal_name(self.signals[-1])
                if passed_on:
                    self.events.report("signal", f"{name}: {ABORT_TEXT}")
                    return StartOutcome(128 + self.signals[-1])
                self.events.report("signal", f"{name}: {STOP_TEXTS['train']}")
                request_stop(process, again=False)
                passed_on = len(self.signals)
            time.sleep(_POLL_S)

    def _end_start(self, process: subprocess.Popen[bytes], watched: Sequence[WatchedHost]) -> list[WatchedHost]:
        """End the remaining processes of a start on all hosts; return the hosts that cannot be reached."""
        began = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end_starts(self.name)
        unreachable = self.watching.sweep(watched, _SWEEP_TIMEOUT_S)
        text = f"ended attempt {self.starts} on all reachable hosts ({time.monotonic() - began:.1f} s)"
        if unreachable:
            names = ", ".join(host.name for host in unreachable)
            text = f"attempt {self.starts} was ended on all reachable hosts; no answer from {names}"
        self.events.report("ended", text, start=self.starts)
        return unreachable

    def _report_first_step(self, step: int) -> None:
        self.stepped = True
        text, values = f"step {step} is done, the first of attempt {self.starts}", {}
        if self._noticed_s is not None:
            values["after_s"] = round(time.monotonic() - self._noticed_s, 3)
            text += f", {values['after_s']:.1f} s after the previous attempt was found to have ended"
        self.events.report("first-step", text, start=self.starts, step=step, **values)

    def _state(self, watched: list[WatchedHost]) -> tuple[int, int]:
        """Return the steps of (the newest checkpoint, the newest copies on disk) from which to resume, 0 if there are none.

        Copies may be incomplete. If both are 0, the user's command line decides. Also sorts ``watched`` so that the host with
        the newest checkpoint comes first: its first rank becomes rank 0 and reads the checkpoint.
        """
        if not self.stepped:
            return 0, 0
        newest = max(host.run.get("checkpoint", 0) for host in watched)
        # Stable sort: the others keep their order.
        watched.sort(key=lambda host: (host.name in self._unfit_leaders, host.run.get("checkpoint", 0) < newest))
        return newest, max(host.run.get("copies", 0) for host in watched)

    def _wait_for_lock(self, leader: WatchedHost) -> None:
        """Wait until no lost rank locks a shared run directory: its host agent ends it, or the file server unlocks."""
        reported, deadline = False, time.monotonic() + _LOCK_TIMEOUT_S
        while self.starts > 1 and not self.signals and time.monotonic() < deadline and self.watching.locked(leader):
            if not reported:
                self.events.report("locked", "a lost rank still holds the run directory: waiting until it ends")
                reported = True
            time.sleep(_POLL_S)

    def _pause(self, fruitless: int) -> None:
        """Wait before the next start with exponential back-off; skip the wait after a start that completed a step."""
        if fruitless == 0:
            return
        pause_s = min(_MAX_PAUSE_S, 2.0 ** (fruitless - 1))
        self.events.report("pause", f"trying again in {pause_s:g} s", seconds=pause_s)
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not self.signals:
            time.sleep(_POLL_S)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Record a stop signal; ``_watch_start`` forwards the first and ends the job at the second."""
        if not self.signals or number in ABORT_SIGNALS:
            self.signals.append(number)


class _Progress:
    """Detects the first completed step of a start from the host agents' reports on the run directory.

    A start writes a new metrics.jsonl (another inode), which begins with the lines up to the step from which it resumes.
    """

    def __init__(self, watched: Sequence[WatchedHost], on_first_step: Callable[[int], None]) -> None:
        self.first_step_seen = False
        self._on_first_step, self._watched = on_first_step, watched
        self._files = {host.number: host.run.get("file", 0) for host in watched}

    def poll_reports(self) -> None:
        for host in self._watched if not self.first_step_seen else ():
            run = host.run
            if run.get("file", 0) != self._files[host.number] and run.get("step", 0) > run.get("base", 0):
                self.first_step_seen = True
                self._on_first_step(run["step"])
                return


def _state_text(checkpoint: int, copies: int) -> str:
    """Describe the state from which a start resumes, as far as the supervisor knows it."""
    if not checkpoint and not copies:
        return "without a checkpoint or copies: starting from the beginning"
    sources = [f"the checkpoint after step {checkpoint}"] * bool(checkpoint)
    if copies > checkpoint:
        sources.append(f"the copies on disk, up to step {copies}, if complete")
    return f"from {' or '.join(sources)}"


def without_option(words: Sequence[str], option: str, needs_value: bool = True) -> list[str]:
    """Remove an option and its value; only if the option ``needs_value`` may the value begin with "-"."""
    remaining: list[str] = []
    skip = False
    for word in words:
        if skip and (needs_value or not word.startswith("-")):
            skip = False
            continue
        skip = word == option
        if not skip and not word.startswith(f"{option}="):
            remaining.append(word)
    return remaining
