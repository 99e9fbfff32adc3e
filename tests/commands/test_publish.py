"""``export --push``: to a hub that is served here."""

from __future__ import annotations

import base64
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mpi import ROOT, require_success


def directory(path: Path, files: dict[str, Any]) -> Path:
    path.mkdir()
    for name, values in files.items():
        (path / name).write_text(json.dumps(values))
    return path


class _Hub(http.server.BaseHTTPRequestHandler):
    """What a hub answers to an upload of small files."""

    files: dict[str, bytes]
    asked: list[tuple[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            self.asked.append((self.headers["Authorization"], json.loads(body)))
            answer: Any = {"url": "https://huggingface.co/org/mine", "name": "org/mine"}
        elif "/preupload/" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            answer = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": "https://huggingface.co/org/mine/commit/1", "commitOid": "1" * 40, "success": True}
        else:
            answer = {"valid": True}
        self.reply(answer)

    def do_GET(self) -> None:
        self.reply(
            {"id": "org/mine", "modelId": "org/mine", "sha": "0" * 40, "siblings": [], "private": True, "tags": []}
        )

    def reply(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, type[_Hub]]]:
    handler = type("Handler", (_Hub,), {"files": {}, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


PUSH = """
import sys
from pathlib import Path
from hetero_mpi.interop.export import push_directory
print(push_directory(Path(sys.argv[1]), "org/mine"))
"""


def pushed(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", PUSH, str(path)], cwd=ROOT, env=given, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_directory_is_pushed_as_a_private_model(tmp_path: Path, hub: tuple[str, type[_Hub]]) -> None:
    endpoint, handler = hub
    model = directory(tmp_path / "model", {"config.json": {"model_type": "llama"}, "model.safetensors": [1]})
    done = require_success(pushed(model, HF_ENDPOINT=endpoint))
    assert done.stdout.strip() == f"{endpoint}/org/mine"
    ((token, asked),) = handler.asked
    assert token == "Bearer hf_test" and (asked["organization"], asked["name"]) == ("org", "mine")
    assert asked.get("visibility") == "private" or asked.get("private") is True  # the key has changed between versions
    assert handler.files == {path.name: path.read_bytes() for path in model.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "rule"),
    [({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"), ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "Connection refused")],
)
def test_without_a_hub_the_command_is_told(tmp_path: Path, environment: dict[str, str], rule: str) -> None:
    model = directory(tmp_path / "model", {"config.json": {}})
    done = pushed(model, **environment)
    assert done.returncode != 0 and rule in done.stderr
    assert f"hf upload org/mine {model}" in done.stderr
