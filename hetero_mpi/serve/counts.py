"""Numbers about the requests that were answered, for Prometheus (its text format)."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate

KIND = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COUNTERS = {
    "requests": "Requests that have ended, by the status of their answer (499: the client has gone)",
    "prompt_tokens": "Tokens of prompts",
    "generated_tokens": "Tokens of answers",
}
TIMES = {
    "first_token_seconds": "From a request to its first token",
    "token_seconds": "Mean time from token to token of a request",
}


class Counts:
    """Counters and times; any thread may add and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, Counter[tuple[tuple[str, str], ...]]] = {name: Counter() for name in COUNTERS}
        self._times = {name: [0] * (len(_BOUNDS_S) + 1) for name in TIMES}
        self._sums = dict.fromkeys(TIMES, 0.0)

    def add(self, name: str, count: int, **labels: str) -> None:
        with self._lock:
            self._counters[name][tuple(labels.items())] += count

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            self._times[name][bisect_left(_BOUNDS_S, seconds)] += 1
            self._sums[name] += seconds

    def text(self, under_way: Mapping[str, int]) -> str:
        """All of them, and the numbers of answers that are ``under_way``."""
        with self._lock:
            return "".join(f"{line}\n" for line in self._lines(under_way))

    def _lines(self, under_way: Mapping[str, int]) -> Iterator[str]:
        for name, values in self._counters.items():
            yield from _head(f"{name}_total", COUNTERS[name], "counter")
            yield from (f"hetero_mpi_{name}_total{_labels(dict(own))} {count}" for own, count in values.items())
        for name, number in under_way.items():
            yield from _head(f"answers_{name}", f"Answers that are {name}", "gauge")
            yield f"hetero_mpi_answers_{name} {number}"
        for name, buckets in self._times.items():
            yield from _head(name, TIMES[name], "histogram")
            for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), accumulate(buckets), strict=True):
                yield f'hetero_mpi_{name}_bucket{{le="{bound}"}} {count}'
            yield f"hetero_mpi_{name}_sum {self._sums[name]}"
            yield f"hetero_mpi_{name}_count {sum(buckets)}"


def _head(name: str, text: str, kind: str) -> Iterator[str]:
    yield f"# HELP hetero_mpi_{name} {text}."
    yield f"# TYPE hetero_mpi_{name} {kind}"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {
        name: text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, text in labels.items()
    }
    return "{" + ",".join(f'{name}="{text}"' for name, text in escaped.items()) + "}"
