"""Planning during training: a separate process at low priority looks for a better plan while steps go on."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_mpi.background import Background

if TYPE_CHECKING:
    from hetero_mpi.planning.analysis.replan import ReplanAnswer, ReplanQuestion

LIMIT_S = 300.0
"""Time limit for an answer, seconds."""
_PACKAGES = Path(__file__).resolve().parents[2]
_LOG = logging.getLogger(__name__)


class Replanner:
    """Answers one ``ReplanQuestion`` at a time in a separate process.

    Errors are written to the log and give no answer: a run does not fail because no better plan was found.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._answering: Background[ReplanAnswer | None] | None = None

    @property
    def busy(self) -> bool:
        """Is a question being answered?"""
        return self._answering is not None and self._answering.running

    def ask(self, question: ReplanQuestion) -> None:
        """Begin to answer a question. Returns at once."""
        assert not self.busy
        self._answering = Background("planning anew", lambda: self._answer(question))

    def take(self) -> ReplanAnswer | None:
        """Wait for the answer and return it; None where there is none."""
        return self._answering.finish() if self._answering is not None else None

    def close(self) -> None:
        """End the process that is still planning, if any."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
        self.take()

    def _answer(self, question: ReplanQuestion) -> ReplanAnswer | None:
        from hetero_mpi.planning.analysis.replan import ReplanAnswer  # brings the planner, which few runs need again

        paths = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hetero_mpi.planning.analysis.replan"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
            )
            answer, complaint = self._process.communicate(json.dumps(question.to_dict()), LIMIT_S)
            if self._process.returncode == 0:
                return ReplanAnswer.from_dict(json.loads(answer))
            _LOG.warning("planning anew ended with exit code %d: %s", self._process.returncode, complaint)
        except subprocess.TimeoutExpired:
            assert self._process is not None
            self._process.kill()
            self._process.communicate()
            _LOG.warning("planning anew took more than %.0f s and was given up", LIMIT_S)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _LOG.warning("planning anew failed: %r", error)
        return None
