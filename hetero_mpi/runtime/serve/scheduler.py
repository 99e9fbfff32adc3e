"""The order in which requests are written: first come, first served, side by side as far as memory and ``--parallel`` allow.

HTTP threads submit requests and take their tokens; the thread that drives the pipeline asks for the next changes and hands tokens
out. Nothing else passes between them.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_mpi.model.decoding import NOT_A_NUMBER, Scored
from hetero_mpi.runtime.generate.writer import NOT_A_NUMBER_TEXT, Round, Task, TextChanges
from hetero_mpi.web.server import HttpError

KEPT_FREE = 0.2
"""Share of the memory beside the parameters that is left to activations and to the allocator's gaps."""
MOST_WAITING = 400
"""Fewer than connections, so that others are told, and health is."""


@dataclass(frozen=True)
class CacheRoom:
    """A rank's memory for keys and values. All bytes."""

    rank: int
    per_text_bytes: int
    per_token_bytes: int
    free_bytes: int

    def needed_bytes(self, lengths: Sequence[int]) -> int:
        """For texts of these lengths, in tokens."""
        return sum(self.per_text_bytes + self.per_token_bytes * length for length in lengths)

    def longest(self) -> float:
        """Tokens of the longest text that fits alone."""
        left = self.free_bytes - self.per_text_bytes
        return max(0, left // self.per_token_bytes) if self.per_token_bytes else float("inf") if left >= 0 else 0


@dataclass(frozen=True)
class News:
    """Results of a round for an answer."""

    choice: int
    token: int | None
    """None: the prompt has not passed entirely."""
    scores: Sequence[Scored] = ()
    """Log-likelihoods that are known now."""


Events = queue.SimpleQueue[News | HttpError]


@dataclass
class Answer:
    """One answer of a request. ``events`` gives its tokens, and those of the request's other answers, or the error that it ends
    with."""

    task: Task
    choice: int = 0
    """Its number in the request."""
    events: Events = field(default_factory=queue.SimpleQueue)
    given_up: threading.Event = field(default_factory=threading.Event)
    """Nobody wants the rest."""
    written: int = 0

    @property
    def length(self) -> int:
        """Tokens at most, with the prompt's."""
        return len(self.task.prompt) + self.task.limit

    def add(self, token: int | None, scores: Sequence[Scored]) -> None:
        self.written += token is not None
        bad = token == NOT_A_NUMBER or any(math.isnan(one.likelihood) for one in scores)
        self.events.put(HttpError(500, NOT_A_NUMBER_TEXT) if bad else News(self.choice, token, scores))


class Scheduler:
    """The requests of all clients. ``submit`` may be called by any thread, the rest by the pipeline's only.

    Args:
        room: of every rank with a stage.
        parallel: texts that are written side by side at most.
    """

    def __init__(self, room: Sequence[CacheRoom], parallel: int) -> None:
        self.room, self.parallel = room, parallel
        self._arriving: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._waiting: deque[Answer] = deque()
        self._running: dict[int, Answer] = {}
        self._numbers = 0
        self._closed: HttpError | None = None

    def counts(self) -> dict[str, int]:
        return {"running": len(self._running), "waiting": len(self._waiting) + self._arriving.qsize()}

    def submit(self, tasks: Sequence[Task]) -> list[Answer]:
        """Queue a request's texts to be written. Raises HttpError: the service is ending, or too many wait."""
        waiting = self.counts()["waiting"]
        if waiting and waiting + len(tasks) > MOST_WAITING:
            raise HttpError(503, f"{waiting} answers wait already, of at most {MOST_WAITING}; try again later")
        events: Events = queue.SimpleQueue()
        answers = [Answer(task, choice, events) for choice, task in enumerate(tasks)]
        for answer in answers:
            self._arriving.put(answer)
        if self._closed is not None:  # looked at after the put: whoever closes fails what it finds
            raise self._closed
        return answers

    def next_changes(self, wait_s: float) -> TextChanges:
        """The texts that begin and that end now. Waits up to ``wait_s`` for a request where there is none."""
        if wait_s and not self._waiting:
            try:
                self._waiting.append(self._arriving.get(timeout=wait_s))
            except queue.Empty:
                return TextChanges()
        while not self._arriving.empty():
            self._waiting.append(self._arriving.get())
        ended = [number for number, answer in self._running.items() if answer.given_up.is_set()]
        for number in ended:
            del self._running[number]
        self._waiting = deque(answer for answer in self._waiting if not answer.given_up.is_set())
        begun = {}
        while self._waiting and self._has_room_for(self._waiting[0]):
            self._numbers += 1
            self._running[self._numbers] = self._waiting.popleft()
            begun[self._numbers] = self._running[self._numbers].task
        return TextChanges(begun, ended)

    def hand_out(self, found: Round) -> None:
        """Pass what a round has made on to those who wait for it."""
        for number in found.tokens.keys() | found.scores.keys():
            answer, token = self._running[number], found.tokens.get(number)
            answer.add(token, found.scores.get(number, ()))
            if token is not None and answer.task.ends_with(token, answer.written):
                del self._running[number]

    def close(self, error: HttpError) -> None:
        """End all requests, present and future, with an error. By any thread that knows that the pipeline's is done or stuck."""
        self._closed = error
        for answer in [*self._running.values(), *self._waiting]:
            answer.events.put(error)
        while not self._arriving.empty():
            self._arriving.get().events.put(error)

    def _has_room_for(self, answer: Answer) -> bool:
        lengths = [other.length for other in (*self._running.values(), answer)]
        return len(lengths) <= self.parallel and all(one.needed_bytes(lengths) <= one.free_bytes for one in self.room)
