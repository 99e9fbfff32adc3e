"""The HTTP server of the OpenAI-compatible API, with a chat page and Prometheus metrics (text format)."""

from __future__ import annotations

import html
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hetero_mpi.rundir.logs import say
from hetero_mpi.serve.api_requests import ApiRequest, ChatRequest, CompletionRequest, parse
from hetero_mpi.serve.bodies import ResponseBuilder
from hetero_mpi.serve.service import Service, ending_error
from hetero_mpi.serve.web.connection import Connection
from hetero_mpi.serve.web.server import HttpError, Names, WebServer
from hetero_mpi.serve.wording import Choice

_TIME_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServiceMetrics:
    """The metrics at ``/metrics``. ``active_answers`` returns the number of answers in each state."""

    def __init__(self, active_answers: Callable[[], Mapping[str, int]]) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry, client_labels = CollectorRegistry(), ("model", "client")
        options: dict[str, Any] = {"namespace": "hetero_mpi", "registry": self.registry}
        text = "Finished requests by response status (499: the client disconnected)."
        self.requests = Counter("requests", text, ("route", *client_labels, "status"), **options)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens.", client_labels, **options)
        self.generated_tokens = Counter("generated_tokens", "Generated tokens.", client_labels, **options)
        for state in active_answers():
            gauge = Gauge(f"answers_{state}", f"Answers that are {state}.", **options)
            gauge.set_function(lambda state=state: active_answers()[state])  # type: ignore[misc]
        options["buckets"] = _TIME_BUCKETS_S
        self.first_token_s = Histogram("first_token_seconds", "Time to first token.", **options)
        text = "Mean time per output token of a request, after the first."
        self.token_s = Histogram("token_seconds", text, **options)


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
        self.service, self.metrics, self.quiet = service, ServiceMetrics(service.scheduler.counts), quiet
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
            content = prometheus_client.generate_latest(self.server.metrics.registry)
            self.send_content(content, prometheus_client.CONTENT_TYPE_LATEST)
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
            self.server.metrics.requests.labels(**labels, status=status).inc()

    def _answered(self, service: Service, request: ApiRequest, labels: dict[str, str]) -> str:
        """Answer a request and return its HTTP status for the metrics. ``labels`` has the route, the model and the client."""
        tasks, metrics = service.tasks(request), self.server.metrics
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
            metrics.prompt_tokens.labels(**client_labels).inc(prompt_tokens)
            metrics.generated_tokens.labels(**client_labels).inc(new_tokens)
            outcome = choices[0].finish or "aborted"
            client_text = f", of {labels['client']}" if labels["client"] else ""
            if not self.server.quiet:
                took_s = time.monotonic() - begin
                say(f"{self.route}: {prompt_tokens} + {new_tokens} tokens in {took_s:.1f} s, {outcome}{client_text}")

    def _timed(
        self, pieces: Iterator[tuple[Choice, str]], choices: Sequence[Choice], begin: float
    ) -> Iterator[tuple[Choice, str]]:
        """Yield the pieces unchanged and record the time to the first token and the time per token."""
        first_token_s, metrics = None, self.server.metrics
        for piece in pieces:
            if first_token_s is None and piece[0].wording.tokens:
                first_token_s = time.monotonic()
                metrics.first_token_s.observe(first_token_s - begin)
            yield piece
        longest = max(choice.wording.tokens for choice in choices)
        if first_token_s is not None and longest > 1:
            metrics.token_s.observe((time.monotonic() - first_token_s) / (longest - 1))

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
