"""The HTTP server of the OpenAI-compatible API, with a chat page and Prometheus metrics (text format)."""

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
from hetero_mpi.serve.api_requests import ApiRequest, ChatRequest, CompletionRequest, parse
from hetero_mpi.serve.bodies import ResponseBuilder
from hetero_mpi.serve.service import Service, ending_error
from hetero_mpi.serve.web.connection import Connection
from hetero_mpi.serve.web.server import HttpError, Names, WebServer
from hetero_mpi.serve.wording import Choice

KIND = "text/plain; version=0.0.4; charset=utf-8"
_BUCKET_LIMITS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COUNTERS = {
    "requests": "Finished requests by response status (499: the client disconnected)",
    "prompt_tokens": "Prompt tokens",
    "generated_tokens": "Generated tokens",
}
TIMES = {
    "first_token_seconds": "Time to first token",
    "token_seconds": "Mean time per output token of a request, after the first",
}


class Counts:
    """Thread-safe counters and histograms for ``/metrics``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, Counter[tuple[tuple[str, str], ...]]] = {name: Counter() for name in COUNTERS}
        self._times = {name: [0] * (len(_BUCKET_LIMITS_S) + 1) for name in TIMES}
        self._sums = dict.fromkeys(TIMES, 0.0)

    def add(self, name: str, count: int, **labels: str) -> None:
        with self._lock:
            self._counters[name][tuple(labels.items())] += count

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            self._times[name][bisect_left(_BUCKET_LIMITS_S, seconds)] += 1
            self._sums[name] += seconds

    def text(self, under_way: Mapping[str, int]) -> str:
        """Return all metrics in Prometheus' text format, with the numbers of active answers in ``under_way``."""
        with self._lock:
            return "".join(f"{line}\n" for line in self._lines(under_way))

    def _lines(self, under_way: Mapping[str, int]) -> Iterator[str]:
        for name, values in self._counters.items():
            yield from _head(f"{name}_total", COUNTERS[name], "counter")
            yield from (f"hetero_mpi_{name}_total{_labels(dict(labels))} {count}" for labels, count in values.items())
        for name, number in under_way.items():
            yield from _head(f"answers_{name}", f"Answers that are {name}", "gauge")
            yield f"hetero_mpi_answers_{name} {number}"
        for name, buckets in self._times.items():
            yield from _head(name, TIMES[name], "histogram")
            for bound, count in zip((*map(str, _BUCKET_LIMITS_S), "+Inf"), accumulate(buckets), strict=True):
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


_ROUTES: dict[str, type[ApiRequest]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
_PAGE = Path(__file__).with_name("page.html")
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class ApiServer(WebServer):
    """Serves the API of ``service``. If ``quiet`` is true, requests are not logged. See WebServer for the other arguments."""

    def __init__(
        self, bound: socket.socket, keys: Mapping[str, str], service: Service, names: Names, quiet: bool = False
    ) -> None:
        self.service, self.counts, self.quiet = service, Counts(), quiet
        fields = {"object": "model", "created": int(time.time()), "owned_by": "hetero_mpi"}
        fields |= {"max_model_len": service.context.tokens}
        self.models = {name: {"id": name, **fields} for name in service.models}
        super().__init__(bound, _ApiConnection, names, keys)

    def page(self) -> bytes:
        """Return a self-contained chat page."""
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
            self.send_content(self.server.page(), "text/html; charset=utf-8", {"Content-Security-Policy": _PAGE_POLICY})
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
        elif self.route in _ROUTES:
            raise HttpError(405, f"{self.route} accepts only POST", allow="POST")
        else:
            raise HttpError(404, f"there is no {self.route[:100]} on this server", code="not_found")

    def _post(self, service: Service) -> None:
        client = self.check_key()
        kind = _ROUTES.get(self.route)
        if kind is None:
            raise HttpError(
                404, f"there is no {self.route[:100]} on this server; POST to {' or '.join(_ROUTES)}", code="not_found"
            )
        labels, status = {"route": self.route, "model": "", "client": client}, "499"
        try:
            with self.body("application/json", service.largest_body_bytes) as body:
                request = parse(kind, body)
            labels["model"] = service.model_of(request).name
            status = self._answered(service, request, labels)
        except HttpError as error:
            status = str(error.status)
            raise
        finally:
            self.server.counts.add("requests", 1, **labels, status=status)

    def _answered(self, service: Service, request: ApiRequest, labels: dict[str, str]) -> str:
        """Answer a request and return its HTTP status for the metrics. ``labels`` has the route, the model and the client."""
        tasks, counts = service.tasks(request), self.server.counts
        choices, bodies = service.choices(request, tasks), service.bodies(request, tasks)
        begin = time.monotonic()
        answers = service.scheduler.submit(tasks, labels["client"])
        try:
            pieces = self._timed(service.pieces(answers, choices, request.limit == 0, self.alive), choices, begin)
            if request.stream:
                return self._stream(pieces, choices, bodies)
            texts = [""] * len(choices)
            for choice, text in pieces:
                texts[choice.number] += text
            self.send(bodies.response(texts, choices))
            return "200"
        finally:
            for answer in answers:
                answer.cancelled.set()
            client_labels = {name: labels[name] for name in ("model", "client")}
            prompt_tokens = sum(len(task.prompt) for task in tasks[:: request.n])
            new_tokens = sum(choice.wording.tokens for choice in choices)
            counts.add("prompt_tokens", prompt_tokens, **client_labels)
            counts.add("generated_tokens", new_tokens, **client_labels)
            outcome = choices[0].finish or "aborted"
            client_text = f", of {labels['client']}" if labels["client"] else ""
            if not self.server.quiet:
                took_s = time.monotonic() - begin
                say(f"{self.route}: {prompt_tokens} + {new_tokens} tokens in {took_s:.1f} s, {outcome}{client_text}")

    def _timed(
        self, pieces: Iterator[tuple[Choice, str]], choices: Sequence[Choice], begin: float
    ) -> Iterator[tuple[Choice, str]]:
        """Yield the pieces unchanged and record the time to the first token and the time per token."""
        first_token_s, counts = None, self.server.counts
        for piece in pieces:
            if first_token_s is None and piece[0].wording.tokens:
                first_token_s = time.monotonic()
                counts.observe("first_token_seconds", first_token_s - begin)
            yield piece
        longest = max(choice.wording.tokens for choice in choices)
        if first_token_s is not None and longest > 1:
            counts.observe("token_seconds", (time.monotonic() - first_token_s) / (longest - 1))

    def _stream(self, pieces: Iterator[tuple[Choice, str]], choices: Sequence[Choice], bodies: ResponseBuilder) -> str:
        first_piece = [next(pieces)]  # an error before the first token has its own HTTP status
        started = set[int]()
        with self.events() as send:
            for choice, text in chain(first_piece, pieces):
                if text or choice.number not in started:
                    send(json.dumps(bodies.chunk(choice, text, first=choice.number not in started)))
                    started.add(choice.number)
                if choice.finish is not None:
                    send(json.dumps(bodies.chunk(choice, None)))
            for chunk in bodies.usage_chunk(choices):
                send(json.dumps(chunk))
            send("[DONE]")
        return "200"
