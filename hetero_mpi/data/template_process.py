"""Render chat templates, which are third-party programs, in a sandbox process.

A template may allocate gigabytes or loop forever. Jinja's sandbox prevents neither, and Python can rarely interrupt either. The
sandbox process has a memory limit (where the system supports one; macOS does not) and a CPU-time limit per rendering. If a
record exceeds a limit, it is reported and a new process is started. The process starts with the first conversation. It exits
when its pipe closes (and thus whenever its parent exits) or after some idle time.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetero_mpi.data.answers import WAY_OUT, ChatTemplate, Rendered, rendered
from hetero_mpi.data.messages import ChatMessage
from hetero_mpi.data.printed_parts import Conversation
from hetero_mpi.data.record_shapes import BadRecord
from hetero_mpi.data.records import Record
from hetero_mpi.util import units
from hetero_mpi.util.background import start_module

LIMIT_S = 5.0
"""CPU-time limit per rendering, a hundred times what the longest conversations take."""
MEMORY = 2**29
"""Memory limit in bytes, in addition to what the process uses at its start."""
IDLE_S = 30.0
"""Time after which an idle sandbox process exits."""
_OOM_CODE = 3
"""Exit code of a sandbox process that exceeds its memory limit."""


class _SandboxProcess:
    """Thread-safe handle that the parent holds on the sandbox process."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def answers(self, template: ChatTemplate, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the sandbox's response to each item (see ``_answer``)."""
        results: list[dict[str, Any]] = []
        with self._asking:
            while len(results) < len(items):
                try:
                    results.extend(self._ask(template, items[len(results) :]))
                except BaseException:  # after an interrupt the pipes hold data of an abandoned request
                    self._end()
                    raise
        return results

    def _ask(self, template: ChatTemplate, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the responses up to the item at which the process died, if any; that item's response gives the reason."""
        process = self._process
        if process is None or process.poll() is not None:
            # A Ctrl-C in the terminal must not reach the process.
            process = self._process = start_module("hetero_mpi.data.template_process", start_new_session=True)
        assert process.stdin is not None and process.stdout is not None
        # A process that is exiting because it was idle is detected by its exit code below.
        with contextlib.suppress(BrokenPipeError):
            request = json.dumps([asdict(template), items], default=lambda value: f"<{type(value).__name__}>")
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
        results: list[dict[str, Any]] = []
        for line in process.stdout:
            results.append(json.loads(line))
            if len(results) == len(items):
                return results
        code = self._end()
        if code == 0:
            return results
        if code > 0 and code != _OOM_CODE:
            raise RuntimeError(f"the process that renders chat templates ended with exit code {code}")
        limits = f"{LIMIT_S:.0f} s of CPU time and {units.size(MEMORY)} of memory"
        why = {-signal.SIGPROF: "it took longer", _OOM_CODE: "it needed more"}.get(code, f"signal {-code} killed it")
        text = f"the tokenizer's chat template must render within {limits}; {why}. {WAY_OUT}."
        return [*results, {"bad": ["template.limits", text]}]

    def _end(self) -> int:
        """Stop the process and return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


_PROCESS = _SandboxProcess()


def rendered_records(template: ChatTemplate, records: Sequence[Record]) -> list[Rendered | BadRecord]:
    """Render records; the result for a record that fails is a BadRecord."""
    items = [
        {"messages": [[m.role, m.content, m.original, m.trained] for m in record.messages], "tools": record.tools}
        for record in records
    ]
    return [
        BadRecord(*answer["bad"])
        if "bad" in answer
        else Rendered(**{**answer, "spans": [(a, b, learnt) for a, b, learnt in answer["spans"]]})
        for answer in _answers(template, items)
    ]


def rendered_prompt(template: ChatTemplate, conversation: Conversation, tools: Conversation = ()) -> str:
    """Render a conversation with the generation prompt. Raises BadRecord if the template fails."""
    (answer,) = _answers(template, [{"conversation": list(conversation), "tools": list(tools) or None}])
    if "bad" in answer:
        raise BadRecord(*answer["bad"])
    return str(answer["text"])


def _answers(template: ChatTemplate, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if template.ours:
        return [_answer(template, item, lambda: None) for item in items]
    return _PROCESS.answers(template, items)


def _answer(template: ChatTemplate, item: dict[str, Any], begin: Callable[[], object]) -> dict[str, Any]:
    """Render an item, calling ``begin`` first: returns the fields of :class:`Rendered`, a prompt's ``text``, or ``bad``."""
    try:
        if "conversation" in item:
            begin()
            return {"text": template.text(item["conversation"], item["tools"], asking=True)[0]}
        messages = [ChatMessage(*fields) for fields in item["messages"]]
        return vars(rendered(template, messages, item["tools"], begin))
    except BadRecord as problem:
        return {"bad": [problem.kind, str(problem)]}


def _start_timer() -> None:
    # The signal kills a process without a handler, even inside C code.
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)


def _main() -> None:
    with contextlib.suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    answers = sys.stdout.buffer
    # Requests wait for their answers, so an empty pipe means an empty buffer.
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.buffer.readline()):
        try:
            values, items = json.loads(line)
            for item in items:
                answer = _answer(ChatTemplate(**values), item, _start_timer)
                signal.setitimer(signal.ITIMER_PROF, 0)
                answers.write(json.dumps(answer).encode() + b"\n")
                answers.flush()
        except MemoryError:
            os._exit(_OOM_CODE)
        except BrokenPipeError:  # the parent is gone
            os._exit(0)


if __name__ == "__main__":
    _main()
