"""The routes of OpenAI's API on rank 0, and a page for people. It never calls MPI."""

from __future__ import annotations

import html
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetero_mpi.report.run_files.logs import say
from hetero_mpi.runtime.serve.api_requests import Asked, ChatRequest, CompletionRequest, parse
from hetero_mpi.runtime.serve.service import Bodies, Service, Wording, ending_error
from hetero_mpi.web.connection import Connection
from hetero_mpi.web.names import Names
from hetero_mpi.web.server import HttpError, WebServer

_POSTED: dict[str, type[Asked]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
_PAGE = Path(__file__).with_name("page.html")
_PAGE_MAY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class ApiServer(WebServer):
    """Answers requests to a model. The arguments are those of WebServer, and the service."""

    def __init__(self, bound: socket.socket, token: str | None, service: Service, names: Names) -> None:
        self.service = service
        begun = int(time.time())
        own = {"id": service.model.name, "object": "model", "created": begun, "owned_by": "hetero_mpi"}
        self.models = [{**own, "max_model_len": service.context.tokens}]
        super().__init__(bound, _ApiConnection, names, token)

    def page(self) -> bytes:
        """A text box for the model, whole in itself."""
        values = {
            "CHATS": json.dumps(self.service.chats),
            "KEY": json.dumps(self.token is not None),
            "NAME": html.escape(self.service.model.name),
        }
        page = _PAGE.read_text(encoding="utf-8")
        for name, value in values.items():
            page = page.replace(f"@{name}@", value)
        return page.encode()


class _ApiConnection(Connection):
    server: ApiServer

    def answer(self) -> None:
        (self._get if self.command == "GET" else self._post)(self.server.service)

    def _get(self, service: Service) -> None:
        if self.route == "":
            self.send_content(self.server.page(), "text/html; charset=utf-8", {"Content-Security-Policy": _PAGE_MAY})
            return
        if self.route == "/health":
            if service.ending():
                raise ending_error()
            self.send({"status": "ok", **service.scheduler.counts()})
            return
        self.check_token()
        models = self.server.models
        if self.route == "/v1/models":
            self.send({"object": "list", "data": models})
        elif self.route == f"/v1/models/{service.model.name}":
            self.send(models[0])
        else:
            raise HttpError(404, f"there is no {self.route[:100]} here", code="not_found")

    def _post(self, service: Service) -> None:
        self.check_token()
        kind = _POSTED.get(self.route)
        if kind is None:
            raise HttpError(
                404, f"there is no {self.route[:100]} here; POST to {' or '.join(_POSTED)}", code="not_found"
            )
        with self.body("application/json", service.largest_body_bytes) as body:
            asked = parse(kind, body)
        task = service.task(asked)
        begin = time.monotonic()
        answer = service.scheduler.submit(task)
        wording = Wording(service.model.tokenizer, task, asked.stop)
        bodies = Bodies(asked, service.model.name, len(task.prompt))
        try:
            pieces = service.pieces(answer, wording, self.alive)
            if asked.stream:
                self._stream(pieces, wording, bodies)
            else:
                self.send(bodies.whole("".join(pieces), wording))
        finally:
            answer.given_up.set()
            how = wording.finish or "broken off"
            say(
                f"{self.route}: {len(task.prompt)} + {wording.tokens} tokens in {time.monotonic() - begin:.1f} s, {how}"
            )

    def _stream(self, pieces: Iterator[str], wording: Wording, bodies: Bodies) -> None:
        text = next(pieces)  # what fails before the first token has a status of its own
        send = self.begin_events()

        def tell(value: dict[str, Any]) -> None:
            send(json.dumps(value))

        tell(bodies.chunk(text, first=True))
        try:
            for text in pieces:
                if text:
                    tell(bodies.chunk(text))
        except HttpError as error:
            tell(error.body())
            return
        for chunk in bodies.last(wording):
            tell(chunk)
        send("[DONE]")
