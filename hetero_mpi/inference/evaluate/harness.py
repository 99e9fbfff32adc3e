"""lm-evaluation-harness as a client of ``serve``: a process of its own on rank 0's machine, which asks for log-likelihoods and
texts, prints its table and writes its results.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from hetero_mpi.data.tokenizer import save_tokenizer
from hetero_mpi.rundir.logs import say
from hetero_mpi.serve.api_server import ApiServer
from hetero_mpi.util.errors import ExitCode, UserError

FOLDER = "lm-eval"
"""Folder of a run's directory with the results, as the harness names them."""
_PATIENCE_S = 24 * 3600
_PACKAGES = Path(__file__).resolve().parents[3]


class Harness:
    """The process; ``begin`` starts it. ``code``: its exit code, once it has ended.

    :raises UserError: the harness is not installed, or its options cannot be read.
    """

    def __init__(self, tasks: str, limit: int | None, place: Path | None, parallel: int, further: str) -> None:
        if find_spec("lm_eval") is None:
            raise UserError(
                "evaluate.package_missing",
                f'--tasks needs lm-evaluation-harness: {sys.executable} -m pip install "lm-eval[api]>=0.4.9"',
            )
        try:
            self._further = shlex.split(further)
        except ValueError as error:
            raise UserError(
                "evaluate.arguments", f"--lm-eval-args {further}: {error}; words are as in a shell"
            ) from None
        self._tasks, self._limit, self._parallel = tasks, limit, parallel
        self._output = place / FOLDER if place is not None else None
        self._folder = tempfile.TemporaryDirectory(prefix="hetero-mpi-lm-eval-")
        self._process: subprocess.Popen[bytes] | None = None
        self.code = int(ExitCode.FAILED)

    def begin(self, server: ApiServer) -> None:
        service = server.service
        save_tokenizer(service.model.tokenizer, Path(self._folder.name))
        model = {
            "base_url": f"{server.url}/v1/completions",
            "model": service.model.name,
            "tokenizer": self._folder.name,
            "tokenizer_backend": "huggingface",
            "num_concurrent": self._parallel,
            "max_length": service.context.tokens,
            "timeout": _PATIENCE_S,
            "max_retries": 1,
        }
        words = ["run", "--model", "hetero_mpi", "--model_args", json.dumps(model), "--tasks", self._tasks]
        words += ["--limit", str(self._limit)] if self._limit is not None else []
        words += ["--output_path", str(self._output)] if self._output is not None else []
        quiet = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false"}
        quiet["OPENAI_API_KEY"] = next(iter(server.keys.values()))  # arguments would be in the list of processes
        own = {name: text for name, text in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
        quiet["PYTHONPATH"] = os.pathsep.join([str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "hetero_mpi.inference.evaluate.harness_model", *words, *self._further]
        self._process = subprocess.Popen(command, env={**own, **quiet})

    def ended(self) -> bool:
        """Has it ended? Then what it says is all there."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return False
        self.code = ExitCode.DONE if code == 0 else ExitCode.FAILED
        return True

    def close(self) -> None:
        """End it, if need be."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._folder.cleanup()
        if self._output is not None and self.code == ExitCode.DONE:
            say(f"results of lm-evaluation-harness: {self._output}")
