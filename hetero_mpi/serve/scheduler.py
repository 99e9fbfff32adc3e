"""The order in which requests are written: the ``--parallel`` places of a round go to clients in turn, and of a client to its
requests in turn.

HTTP threads submit requests and take their tokens; the thread that drives the pipeline asks for the next changes and hands tokens
out. Nothing else passes between them.

    client a   request 1   answers A B C D      three places:  A E B, then E A F, A E B, ...
    client b   request 2   answer  E
               request 3   answer  F

An answer that has begun and has no place rests: its keys and values stay in memory, so its later tokens have the same bits.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hetero_mpi.inference.decoding import NOT_A_NUMBER, Scored
from hetero_mpi.inference.writer import NOT_A_NUMBER_TEXT, Round, Task, TextChanges
from hetero_mpi.serve.web.server import HttpError

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
    choice: int
    """Its number in the request."""
    events: Events
    request: int
    client: str
    """The name of its API key; "" where the service has none."""
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
    """The requests of all clients. ``next_changes`` and ``hand_out`` are for the pipeline's thread, the rest for any.

    Args:
        room: of every rank with a stage.
        parallel: places: answers that get a token in one round at most.
    """

    def __init__(self, room: Sequence[CacheRoom], parallel: int) -> None:
        self.room, self.parallel = room, parallel
        self._arrival = threading.Condition()
        """Guards all that follows."""
        self._answers: dict[int, Answer] = {}
        """Every answer that has not ended, in the order of arrival."""
        self._begun: set[int] = set()
        """The numbers of those that have memory for their keys and values..."""
        self._placed: set[int] = set()
        """...and of those with a place in this round."""
        self._latest: dict[str | int, int] = {}
        """Client or request -> its latest place, or its arrival; places are counted from the first round on."""
        self._numbers, self._requests, self._places = itertools.count(1), itertools.count(), itertools.count()
        self._closed: HttpError | None = None

    def counts(self) -> dict[str, int]:
        with self._arrival:
            return {"running": len(self._placed), "waiting": len(self._answers) - len(self._placed)}

    def submit(self, tasks: Sequence[Task], client: str = "") -> list[Answer]:
        """Queue a request's texts to be written. Raises HttpError: the service is ending, or too many wait."""
        events, request = Events(), next(self._requests)
        answers = [Answer(task, choice, events, request, client) for choice, task in enumerate(tasks)]
        with self._arrival:
            if self._closed is not None:
                raise self._closed
            waiting = Counter(answer.client for number, answer in self._answers.items() if number not in self._placed)
            count, own = waiting.total(), waiting[client]
            if own and count + len(tasks) > MOST_WAITING and own + len(tasks) > MOST_WAITING // len(waiting):
                raise HttpError(503, f"{count} answers wait already, of at most {MOST_WAITING}; try again later")
            self._answers.update((number, answer) for answer, number in zip(answers, self._numbers, strict=False))
            for group in (client, request):
                self._latest.setdefault(group, next(self._places))
            self._arrival.notify()
        return answers

    def next_changes(self, wait_s: float) -> TextChanges:
        """The texts that begin, end and rest now. Waits up to ``wait_s`` for a request where there is none."""
        with self._arrival:
            if not self._answers:
                self._arrival.wait(wait_s)
            ended = [number for number, answer in self._answers.items() if answer.given_up.is_set()]
            for number in ended:
                self._forget(number)
            groups = {group for answer in self._answers.values() for group in (answer.client, answer.request)}
            self._latest = {group: self._latest[group] for group in groups}
            begun = self._give_places()
            return TextChanges(begun, ended, sorted(self._begun - self._placed))

    def hand_out(self, found: Round) -> None:
        """Pass what a round has made on to those who wait for it."""
        with self._arrival:
            for number in found.tokens.keys() | found.scores.keys():
                answer, token = self._answers[number], found.tokens.get(number)
                answer.add(token, found.scores.get(number, ()))
                if token is not None and answer.task.ends_with(token, answer.written):
                    self._forget(number)

    def close(self, error: HttpError) -> None:
        """End all requests, present and future, with an error. By any thread that knows that the pipeline's is done or stuck."""
        with self._arrival:
            self._closed = error
            for answer in self._answers.values():
                answer.events.put(error)

    def _give_places(self) -> dict[int, Task]:
        """Give the places of the next round; returns the texts that begin with it."""
        begun: dict[int, Task] = {}
        full = False
        self._placed.clear()
        by_request = self._in_turn(self._answers, lambda answer: answer.request)
        for number in self._in_turn(by_request, lambda answer: answer.client):
            if len(self._placed) == self.parallel:
                break
            answer = self._answers[number]
            if number not in self._begun:
                full = full or not self._has_room_for(answer)
                if full:  # nobody overtakes a large one that waits for memory
                    continue
                self._begun.add(number)
                begun[number] = answer.task
            self._placed.add(number)
            self._latest[answer.client] = self._latest[answer.request] = next(self._places)
        return begun

    def _in_turn(self, numbers: Iterable[int], group_of: Callable[[Answer], str | int]) -> list[int]:
        """Sorted: each group's first answer, each one's second, ...; among these, the group whose latest place is the oldest."""
        before: Counter[str | int] = Counter()
        due: dict[int, tuple[int, int]] = {}
        for number in numbers:
            group = group_of(self._answers[number])
            due[number] = before[group], self._latest[group]
            before[group] += 1
        return sorted(due, key=due.__getitem__)

    def _has_room_for(self, answer: Answer) -> bool:
        lengths = [answer.length, *(self._answers[number].length for number in self._begun)]
        return all(one.needed_bytes(lengths) <= one.free_bytes for one in self.room)

    def _forget(self, number: int) -> None:
        del self._answers[number]
        self._begun.discard(number)
        self._placed.discard(number)
