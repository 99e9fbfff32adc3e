"""``export --gguf`` and ``--push``: through a converter's command line, and a hub that is served here."""

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

from hetero_mpi.commands.export import write_gguf
from hetero_mpi.errors import UserError
from tests.support.mpi import ROOT

CONVERTER = """
import argparse, json
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("directory")
for name in ("--outfile", "--outtype", "--base", "--base-model-id"):
    parser.add_argument(name)
given = parser.parse_args()
assert json.loads((Path(given.directory) / "config.json").read_text()), "not a model"
Path(given.outfile).write_text(json.dumps(vars(given)))
"""
"""Takes the arguments that llama.cpp's converters take, and keeps them."""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No converter anywhere but in ``llama``, once it is there."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path / "llama"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return tmp_path


def directory(path: Path, files: dict[str, Any]) -> Path:
    path.mkdir()
    for name, values in files.items():
        (path / name).write_text(json.dumps(values))
    return path


def converters(places: Path) -> None:
    (places / "llama").mkdir()
    for name in ("hf", "lora"):
        (places / "llama" / f"convert_{name}_to_gguf.py").write_text(CONVERTER)


def test_without_llama_cpp_the_two_commands_are_told(places: Path) -> None:
    model = directory(places / "my model", {"config.json": {"model_type": "llama"}})
    with pytest.raises(UserError, match=r"is written, but no GGUF file") as caught:
        write_gguf(model, "q8_0")
    first, second = str(caught.value).splitlines()[1:]
    assert first == "  git clone https://github.com/ggml-org/llama.cpp"
    file = f"'{model}/my model.gguf'"
    assert second == f"  python llama.cpp/convert_hf_to_gguf.py '{model}' --outfile {file} --outtype q8_0"


def test_a_model_and_an_adapter(places: Path) -> None:
    converters(places)
    model = directory(places / "model", {"config.json": {"model_type": "llama"}})
    assert "ollama create model -f" in write_gguf(model, "auto")
    asked = json.loads((model / "model.gguf").read_text())
    assert asked["outtype"] == "auto" and asked["base"] is None
    assert (model / "Modelfile").read_text() == "FROM ./model.gguf\n"
    for number, (base, key) in enumerate([(str(model), "base"), ("org/name", "base_model_id")]):
        files = {"adapter_config.json": {"base_model_name_or_path": base}, "config.json": {"peft": True}}
        adapter = directory(places / f"adapter{number}", files)
        write_gguf(adapter, "f16")
        assert json.loads((adapter / f"adapter{number}.gguf").read_text())[key] == base
        assert (adapter / "Modelfile").read_text() == f"FROM {base}\nADAPTER ./adapter{number}.gguf\n"


def test_a_converter_that_fails_is_quoted(places: Path) -> None:
    converters(places)
    model = directory(places / "model", {"config.json": {}})
    with pytest.raises(UserError, match=r"ended with 1:\n(.*\n)*.*AssertionError: not a model\n.*run it again: "):
        write_gguf(model, "auto")
    assert not (model / "Modelfile").exists()


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
from hetero_mpi.commands.export import push
print(push(Path(sys.argv[1]), "org/mine"))
"""


def pushed(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", PUSH, str(path)], cwd=ROOT, env=given, capture_output=True, text=True, timeout=120
    )


def test_a_directory_is_pushed_as_a_private_model(tmp_path: Path, hub: tuple[str, type[_Hub]]) -> None:
    endpoint, handler = hub
    model = directory(tmp_path / "model", {"config.json": {"model_type": "llama"}, "model.safetensors": [1]})
    done = pushed(model, HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{endpoint}/org/mine"
    ((token, asked),) = handler.asked
    assert token == "Bearer hf_test" and (asked["organization"], asked["name"]) == ("org", "mine")
    assert asked.get("visibility") == "private" or asked.get("private") is True  # the key has changed between versions
    assert handler.files == {path.name: path.read_bytes() for path in model.iterdir()}


@pytest.mark.parametrize(
    ("environment", "rule"),
    [({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"), ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "Connection refused")],
)
def test_without_a_hub_the_command_is_told(tmp_path: Path, environment: dict[str, str], rule: str) -> None:
    model = directory(tmp_path / "model", {"config.json": {}})
    done = pushed(model, **environment)
    assert done.returncode != 0 and rule in done.stderr
    assert f"hf upload org/mine {model}" in done.stderr
