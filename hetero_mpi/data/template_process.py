"""Chat templates are rendered in a small process of their own, as they are programs from somebody else.

A template may ask for a gigabyte or for a loop without end; no sandbox of Jinja's hinders that, and most of it happens where
Python cannot be interrupted. The process has a limit of memory (where the system knows one, which macOS does not) and of
processor time for each rendering; when it ends by one, the record is named and another process takes its place. It starts
with the first conversation, ends with its pipe (so with whoever has started it, however that ends), and when it is not needed.
"""

from __future__ import annotations

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
from hetero_mpi.util.background import start_module

LIMIT_S = 5.0
"""Processor time of one rendering; the longest conversations take a hundredth of that."""
MEMORY = 2**29
"""Bytes for a rendering."""
IDLE_S = 30.0
"""A process that is not asked for so long ends."""
_NO_MEMORY = 3
"""Exit code."""


class _Process:
    """The process, as its caller sees it. Any thread may ask."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def answers(self, template: ChatTemplate, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each item's answer (see :func:`_answer`)."""
        found: list[dict[str, Any]] = []
        with self._asking:
            while len(found) < len(items):
                try:
                    found.extend(self._ask(template, items[len(found) :]))
                except BaseException:  # an interrupt in the middle: what is in the pipes belongs to nobody
                    self._end()
                    raise
        return found

    def _ask(self, template: ChatTemplate, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers up to where the process has ended: that item's says why."""
        process = self._process
        if process is None or process.poll() is not None:
            # An interrupt of the terminal is not for it.
            process = self._process = start_module("hetero_mpi.data.template_process", start_new_session=True)
        assert process.stdin is not None and process.stdout is not None
        # What ends at this moment since it was not asked leaves its end to be seen below.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps([asdict(template), items], default=_named).encode() + b"\n")
            process.stdin.flush()
        found: list[dict[str, Any]] = []
        for line in process.stdout:
            found.append(json.loads(line))
            if len(found) == len(items):
                return found
        code = self._end()
        if code == 0:
            return found
        if code > 0 and code != _NO_MEMORY:
            raise RuntimeError(f"the process that renders chat templates ended with exit code {code}")
        limits = f"{LIMIT_S:.0f} s of processor time and {MEMORY >> 20} MiB"
        why = {-signal.SIGPROF: "it takes longer", _NO_MEMORY: "it needs more"}.get(code, f"it ended by signal {-code}")
        return [
            *found,
            {
                "bad": [
                    "template.limits",
                    f"the tokenizer's chat template must be rendered in {limits}; {why}. {WAY_OUT}.",
                ]
            },
        ]

    def _end(self) -> int:
        """The exit code of the process, which is ended if need be."""
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


_PROCESS = _Process()


def _named(value: Any) -> str:
    """A value that JSON does not know, as transformers shows it to a template."""
    return f"<{type(value).__name__}>"


def rendered_records(template: ChatTemplate, records: Sequence[Record]) -> list[Rendered | BadRecord]:
    """Each record as text, or what is wrong with it."""
    items = [
        {"messages": [[m.role, m.content, m.given, m.trained] for m in record.messages], "tools": record.tools}
        for record in records
    ]
    return [
        BadRecord(*answer["bad"])
        if "bad" in answer
        else Rendered(**{**answer, "spans": [(a, b, learnt) for a, b, learnt in answer["spans"]]})
        for answer in _answers(template, items)
    ]


def rendered_prompt(template: ChatTemplate, conversation: Conversation, tools: Conversation = ()) -> str:
    """A conversation up to where the next answer begins. Raises BadRecord."""
    (answer,) = _answers(template, [{"conversation": list(conversation), "tools": list(tools) or None}])
    if "bad" in answer:
        raise BadRecord(*answer["bad"])
    return str(answer["text"])


def _answers(template: ChatTemplate, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if template.ours:
        return [_answer(template, item, lambda: None) for item in items]
    return _PROCESS.answers(template, items)


def _answer(template: ChatTemplate, item: dict[str, Any], begin: Callable[[], object]) -> dict[str, Any]:
    """The fields of :class:`Rendered`, the text of a prompt, or what is ``bad``. ``begin``: is called before each rendering."""
    try:
        if "conversation" in item:
            begin()
            return {"text": template.text(item["conversation"], item["tools"], asking=True)[0]}
        messages = [ChatMessage(*fields) for fields in item["messages"]]
        return vars(rendered(template, messages, item["tools"], begin))
    except BadRecord as problem:
        return {"bad": [problem.kind, str(problem)]}


def _begin() -> None:
    # Its signal ends a process that does not handle it, wherever it is.
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _main() -> None:
    _limit_memory()
    answers = sys.stdout.buffer
    # Questions wait for their answers: where there is none, nothing is left in the buffer.
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.buffer.readline()):
        try:
            values, items = json.loads(line)
            for item in items:
                answer = _answer(ChatTemplate(**values), item, _begin)
                signal.setitimer(signal.ITIMER_PROF, 0)
                answers.write(json.dumps(answer).encode() + b"\n")
                answers.flush()
        except MemoryError:
            os._exit(_NO_MEMORY)
        except BrokenPipeError:  # nobody waits for it
            os._exit(0)


if __name__ == "__main__":
    _main()
