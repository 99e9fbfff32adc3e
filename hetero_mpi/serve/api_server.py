"""The HTTP server of OpenAI's API, with a page for people and numbers for Prometheus.

Also here: numbers about the requests that were answered, for Prometheus (its text format).
"""

from __future__ import annotations

import html
import json
import socket
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from urllib.parse import unquote

from hetero_mpi.rundir.logs import say
from hetero_mpi.serve.api_requests import Asked, ChatRequest, CompletionRequest, parse
from hetero_mpi.serve.bodies import Bodies
from hetero_mpi.serve.service import Service, ending_error
from hetero_mpi.serve.web.connection import Connection
from hetero_mpi.serve.web.server import HttpError, Names, WebServer
from hetero_mpi.serve.wording import Choice

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


_POSTED: dict[str, type[Asked]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
_PAGE = Path(__file__).with_name("page.html")
_PAGE_MAY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class ApiServer(WebServer):
    """Answers requests to models. The arguments are those of WebServer, and the service; ``quiet``: no line tells of a request."""

    def __init__(
        self, bound: socket.socket, keys: Mapping[str, str], service: Service, names: Names, quiet: bool = False
    ) -> None:
        self.service, self.counts, self.quiet = service, Counts(), quiet
        own = {"object": "model", "created": int(time.time()), "owned_by": "hetero_mpi"}
        own |= {"max_model_len": service.context.tokens}
        self.models = {name: {"id": name, **own} for name in service.models}
        super().__init__(bound, _ApiConnection, names, keys)

    def page(self) -> bytes:
        """A text box for the model, whole in itself."""
        values = {
            "CHATS": json.dumps(self.service.chats),
            "KEY": json.dumps(bool(self.keys)),
            "NAME": html.escape(self.service.model.name),
        }
        page = _PAGE.read_text(encoding="utf-8")
        for name, value in values.items():
            page = page.replace(f"@{name}@", value)
        return page.encode()


class _ApiConnection(Connection):
    server: ApiServer

    def answer(self) -> None:
        (self._post if self.command == "POST" else self._get)(self.server.service)

    def _get(self, service: Service) -> None:
        if self.route == "":
            self.send_content(self.server.page(), "text/html; charset=utf-8", {"Content-Security-Policy": _PAGE_MAY})
            return
        if self.route == "/health":
            if service.ending():
                raise ending_error()
            self.send({"status": "ok", **service.scheduler.counts()})
            return
        self.check_key()
        models, name = self.server.models, unquote(self.route.removeprefix("/v1/models/"))
        if self.route == "/v1/models":
            self.send({"object": "list", "data": list(models.values())})
        elif self.route == "/metrics":
            self.send_content(self.server.counts.text(service.scheduler.counts()).encode(), KIND)
        elif self.route.startswith("/v1/models/") and name in models:
            self.send(models[name])
        elif self.route in _POSTED:
            raise HttpError(405, f"{self.route} answers POST", allow="POST")
        else:
            raise HttpError(404, f"there is no {self.route[:100]} here", code="not_found")

    def _post(self, service: Service) -> None:
        client = self.check_key()
        kind = _POSTED.get(self.route)
        if kind is None:
            raise HttpError(
                404, f"there is no {self.route[:100]} here; POST to {' or '.join(_POSTED)}", code="not_found"
            )
        told, status = {"route": self.route, "model": "", "client": client}, "499"
        try:
            with self.body("application/json", service.largest_body_bytes) as body:
                asked = parse(kind, body)
            told["model"] = service.model_of(asked).name
            status = self._answered(service, asked, told)
        except HttpError as error:
            status = str(error.status)
            raise
        finally:
            self.server.counts.add("requests", 1, **told, status=status)

    def _answered(self, service: Service, asked: Asked, told: dict[str, str]) -> str:
        """Answer; returns the status that counts. ``told``: the route, and whose request to which model it is."""
        tasks, counts = service.tasks(asked), self.server.counts
        choices, bodies = service.choices(asked, tasks), service.bodies(asked, tasks)
        begin = time.monotonic()
        answers = service.scheduler.submit(tasks, told["client"])
        try:
            pieces = self._timed(service.pieces(answers, choices, asked.limit == 0, self.alive), choices, begin)
            if asked.stream:
                return self._stream(pieces, choices, bodies)
            texts = [""] * len(choices)
            for choice, text in pieces:
                texts[choice.number] += text
            self.send(bodies.whole(texts, choices))
            return "200"
        finally:
            for answer in answers:
                answer.given_up.set()
            whose = {name: told[name] for name in ("model", "client")}
            prompt = sum(len(task.prompt) for task in tasks[:: asked.n])
            written = sum(choice.wording.tokens for choice in choices)
            counts.add("prompt_tokens", prompt, **whose)
            counts.add("generated_tokens", written, **whose)
            how = choices[0].finish or "broken off"
            of = f", of {told['client']}" if told["client"] else ""
            if not self.server.quiet:
                say(f"{self.route}: {prompt} + {written} tokens in {time.monotonic() - begin:.1f} s, {how}{of}")

    def _timed(
        self, pieces: Iterator[tuple[Choice, str]], choices: Sequence[Choice], begin: float
    ) -> Iterator[tuple[Choice, str]]:
        """The same, while it is noted how long tokens take."""
        first, counts = None, self.server.counts
        for piece in pieces:
            if first is None and piece[0].wording.tokens:
                first = time.monotonic()
                counts.observe("first_token_seconds", first - begin)
            yield piece
        most = max(choice.wording.tokens for choice in choices)
        if first is not None and most > 1:
            counts.observe("token_seconds", (time.monotonic() - first) / (most - 1))

    def _stream(self, pieces: Iterator[tuple[Choice, str]], choices: Sequence[Choice], bodies: Bodies) -> str:
        before = [next(pieces)]  # what fails before the first token has a status of its own
        begun = set[int]()
        with self.events() as send:
            for choice, text in chain(before, pieces):
                if text or choice.number not in begun:
                    send(json.dumps(bodies.chunk(choice, text, first=choice.number not in begun)))
                    begun.add(choice.number)
                if choice.finish is not None:
                    send(json.dumps(bodies.chunk(choice, None)))
            for chunk in bodies.usage_chunk(choices):
                send(json.dumps(chunk))
            send("[DONE]")
        return "200"
