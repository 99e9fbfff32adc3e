"""Schedules requests: each round's ``--parallel`` slots rotate among clients, and among the requests of each client.

HTTP threads submit requests and receive the tokens. The pipeline's thread asks which sequences start, end or rest, and distributes
the generated tokens. The threads share nothing else.

    client a   request 1   answers A B C D      three slots:   A E B, then E A F, A E B, ...
    client b   request 2   answer  E
               request 3   answer  F

A started answer without a slot rests: its keys and values stay in memory, so resting does not change its later tokens.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hetero_mpi.inference.sampling import NOT_A_NUMBER, Scored
from hetero_mpi.inference.writer import NOT_A_NUMBER_TEXT, Round, Task, TextChanges
from hetero_mpi.serve.web.server import HttpError

MEMORY_RESERVE_RATIO = 0.2
"""Share of the memory left beside the parameters that is reserved for activations and allocator fragmentation."""
MAX_WAITING = 400
"""Maximum number of waiting answers. Smaller than ``MAX_CONNECTIONS``, so that further clients get an error and /health answers."""


@dataclass(frozen=True)
class CacheBudget:
    """A rank's memory budget for keys and values, in bytes."""

    rank: int
    per_text_bytes: int
    per_token_bytes: int
    free_bytes: int

    def needed_bytes(self, lengths: Sequence[int]) -> int:
        """Return the bytes needed to cache sequences of these lengths (in tokens)."""
        return sum(self.per_text_bytes + self.per_token_bytes * length for length in lengths)

    def longest(self) -> float:
        """Return the length in tokens of the longest sequence that fits if it is the only one."""
        free = self.free_bytes - self.per_text_bytes
        return max(0, free // self.per_token_bytes) if self.per_token_bytes else float("inf") if free >= 0 else 0


@dataclass(frozen=True)
class TokenEvent:
    """The results of one round for one answer."""

    choice: int
    token: int | None
    """The new token, or None while the prompt has not been processed completely."""
    scores: Sequence[Scored] = ()
    """Logprobs computed in this round."""


Events = queue.SimpleQueue[TokenEvent | HttpError]


@dataclass
class Answer:
    """One answer to a request. All answers to a request share ``events``, which receives their tokens or a final error."""

    task: Task
    choice: int
    """Index of the answer within the request."""
    events: Events
    request: int
    client: str
    """Name of the client's API key, or "" if the service has no keys."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when no more tokens are needed."""
    written: int = 0

    @property
    def length(self) -> int:
        """Maximum length in tokens, including the prompt."""
        return len(self.task.prompt) + self.task.limit

    def add(self, token: int | None, scores: Sequence[Scored]) -> None:
        self.written += token is not None
        invalid = token == NOT_A_NUMBER or any(math.isnan(scored.likelihood) for scored in scores)
        self.events.put(HttpError(500, NOT_A_NUMBER_TEXT) if invalid else TokenEvent(self.choice, token, scores))


class Scheduler:
    """Holds and schedules the requests of all clients.

    Only the pipeline's thread may call ``next_changes`` and ``distribute``. Any thread may call the other methods.

    Args:
        room: Cache budget of every rank with a stage.
        parallel: Number of slots, which is the maximum number of answers that get a token in one round.
    """

    def __init__(self, room: Sequence[CacheBudget], parallel: int) -> None:
        self.room, self.parallel = room, parallel
        self._arrival = threading.Condition()
        """Guards all of the following attributes. Notified when a request arrives."""
        self._answers: dict[int, Answer] = {}
        """All unfinished answers by number, in order of arrival."""
        self._cached: set[int] = set()
        """Numbers of the answers that have memory for keys and values."""
        self._placed: set[int] = set()
        """Numbers of the answers that have a slot in this round."""
        self._latest: dict[str | int, int] = {}
        """Maps each client and request to a counter value: that of its latest slot or, before its first slot, of its arrival."""
        self._numbers, self._requests, self._places = itertools.count(1), itertools.count(), itertools.count()
        self._closed: HttpError | None = None

    def counts(self) -> dict[str, int]:
        with self._arrival:
            return {"running": len(self._placed), "waiting": len(self._answers) - len(self._placed)}

    def submit(self, tasks: Sequence[Task], client: str = "") -> list[Answer]:
        """Queue the answers to a request. Raises HttpError if the service is ending or too many answers are waiting."""
        events, request = Events(), next(self._requests)
        answers = [Answer(task, choice, events, request, client) for choice, task in enumerate(tasks)]
        with self._arrival:
            if self._closed is not None:
                raise self._closed
            waiting = Counter(answer.client for number, answer in self._answers.items() if number not in self._placed)
            count, ahead = waiting.total(), waiting[client]
            if ahead and count + len(tasks) > MAX_WAITING and ahead + len(tasks) > MAX_WAITING // len(waiting):
                raise HttpError(503, f"{count} answers are waiting (maximum {MAX_WAITING}); try again later")
            self._answers.update((number, answer) for answer, number in zip(answers, self._numbers, strict=False))
            for group in (client, request):
                self._latest.setdefault(group, next(self._places))
            self._arrival.notify()
        return answers

    def next_changes(self, wait_s: float) -> TextChanges:
        """Return the sequences that start, end and rest in the next round. Waits up to ``wait_s`` for a request if idle."""
        with self._arrival:
            if not self._answers:
                self._arrival.wait(wait_s)
            ended = [number for number, answer in self._answers.items() if answer.cancelled.is_set()]
            for number in ended:
                self._remove(number)
            groups = {group for answer in self._answers.values() for group in (answer.client, answer.request)}
            self._latest = {group: self._latest[group] for group in groups}
            new_tasks = self._assign_places()
            return TextChanges(new_tasks, ended, sorted(self._cached - self._placed))

    def distribute(self, results: Round) -> None:
        """Pass the results of a round to the answers, and remove those that are complete."""
        with self._arrival:
            for number in results.tokens.keys() | results.scores.keys():
                answer, token = self._answers[number], results.tokens.get(number)
                answer.add(token, results.scores.get(number, ()))
                if token is not None and answer.task.ends_with(token, answer.written):
                    self._remove(number)

    def close(self, error: HttpError) -> None:
        """End all requests with an error. Any thread may call this once the pipeline's thread has ended or hangs."""
        with self._arrival:
            self._closed = error
            for answer in self._answers.values():
                answer.events.put(error)

    def _assign_places(self) -> dict[int, Task]:
        """Assign the slots of the next round; return the tasks that start in it, by answer number."""
        new_tasks: dict[int, Task] = {}
        memory_full = False
        self._placed.clear()
        by_request = self._by_turn(self._answers, lambda answer: answer.request)
        for number in self._by_turn(by_request, lambda answer: answer.client):
            if len(self._placed) == self.parallel:
                break
            answer = self._answers[number]
            if number not in self._cached:
                memory_full = memory_full or not self._fits(answer)
                if memory_full:  # no answer overtakes a large one that waits for memory
                    continue
                self._cached.add(number)
                new_tasks[number] = answer.task
            self._placed.add(number)
            self._latest[answer.client] = self._latest[answer.request] = next(self._places)
        return new_tasks

    def _by_turn(self, numbers: Iterable[int], group_of: Callable[[Answer], str | int]) -> list[int]:
        """Sort the answers: the first of each group, then the second of each, and so on. The longest-waiting group goes first."""
        counts: Counter[str | int] = Counter()
        sort_key: dict[int, tuple[int, int]] = {}
        for number in numbers:
            group = group_of(self._answers[number])
            sort_key[number] = counts[group], self._latest[group]
            counts[group] += 1
        return sorted(sort_key, key=sort_key.__getitem__)

    def _fits(self, answer: Answer) -> bool:
        lengths = [answer.length, *(self._answers[number].length for number in self._cached)]
        return all(budget.needed_bytes(lengths) <= budget.free_bytes for budget in self.room)

    def _remove(self, number: int) -> None:
        del self._answers[number]
        self._cached.discard(number)
        self._placed.discard(number)
