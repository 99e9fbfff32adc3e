"""Sets of data that a model is evaluated on, on rank 0, as texts whose targets are known: cut and wrapped as training does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_mpi.data.batch import IGNORED, Tokens
from hetero_mpi.data.dataset import Rows
from hetero_mpi.inference.decoding import Sampling
from hetero_mpi.inference.source import Opened
from hetero_mpi.inference.writer import Task
from hetero_mpi.job.load import LoadedJob, job_of_tables
from hetero_mpi.job.schema import DataTable
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import RUN_NAME, run_json, run_table
from hetero_mpi.training.setup.data_setup import prepare
from hetero_mpi.training.setup.named_sets import read_set
from hetero_mpi.util.errors import UserError

_MOST_TOKENS = 2048
"""Of a sequence of a model that no run is known of."""
_TEXT = (".txt", ".text", ".md")


@dataclass(frozen=True)
class ScoredText:
    """A text with known targets. ``weights``: in the loss, of the token behind each token of the prompt; None: it is no target."""

    task: Task
    weights: list[float | None]


def job_of_run(source: Path) -> LoadedJob | None:
    """The job of a run directory; None: ``source`` is none."""
    if not (source / RUN_NAME).is_file():
        return None
    told = run_json(source / RUN_NAME)
    return job_of_tables(run_table(told, "job"), str(told.get("name")), Path(str(told.get("job_file"))).parent)


def own_set(loaded: LoadedJob, limit: int) -> list[ScoredText]:
    """The sequences that a run held out, at most ``limit``. Raises UserError: there are none, or its data have gone."""
    if loaded.job.model.factory is not None or loaded.job.train.preference != "none":
        raise UserError(
            "evaluate.no_data",
            "the run's own held-out data are no text with one loss; name a set by --data, or --tasks",
        )
    dataset = prepare(loaded).dataset
    batch = next(dataset.held_out_batches(limit, limit), None)
    if batch is None:
        raise UserError(
            "evaluate.no_data",
            "the run held nothing out (data.held_out, data.evaluation); name a set by --data NAME=FILE, or --tasks",
        )
    weights = None if batch.weighed is None else batch.weighed.weights
    return list(_texts(Rows(batch.tokens, batch.targets, positions=batch.positions, weights=weights)))


def set_of_files(opened: Opened, loaded: LoadedJob | None, pattern: str, limit: int) -> list[ScoredText]:
    """The sequences of files that match a pattern, at most ``limit``.

    They are records or text as the run's data were; without a run by the names of the files. Raises UserError: they cannot be read.
    """
    if loaded is not None:
        data = loaded.job.data
    else:
        kind = "text" if pattern.lower().endswith(_TEXT) else "records"
        length = min(opened.positions or _MOST_TOKENS, _MOST_TOKENS)
        data = DataTable(sequence_length=length, **{kind: [pattern]})  # type: ignore[arg-type]
    dataset = read_set([pattern], "--data", data, opened.tokenizer, opened.stops, limit)
    say(*(f"{pattern}: {note}" for note in dataset.notes))
    return list(_texts(dataset, limit))


def _texts(rows: Rows, limit: int | None = None) -> Iterator[ScoredText]:
    """The texts of sequences, of which a packed one holds several."""
    for row, (tokens, targets) in enumerate(zip(rows.tokens[:limit], rows.targets[:limit], strict=True)):
        begins = [0] if rows.positions is None else np.flatnonzero(rows.positions[row] == 0).tolist()
        for first, last in zip(begins, [*begins[1:], len(tokens)], strict=True):
            weights = None if rows.weights is None else rows.weights[row][first:last]
            yield from _text(tokens[first:last], targets[first:last], weights)


def _text(tokens: Tokens, targets: Tokens, weights: npt.NDArray[np.float32] | None) -> Iterator[ScoredText]:
    learnt = targets != IGNORED
    if learnt.any():
        length = int(np.flatnonzero(learnt)[-1]) + 1
        task = Task(tokens[:length].tolist(), [], 1, Sampling(), 0, 1, True, given=[int(targets[length - 1])])
        own = [1.0] * length if weights is None else weights[:length].tolist()
        yield ScoredText(task, [one if is_one else None for one, is_one in zip(own, learnt[:length], strict=True)])


def named(words: Sequence[str]) -> dict[str, str]:
    """Name -> pattern of files, of ``NAME=FILES`` or ``FILES``, which bear the file's name. Raises UserError: two have one name."""
    found: dict[str, str] = {}
    for word in words:
        name, is_, rest = word.partition("=")
        own = (name, rest) if is_ and "/" not in name else (Path(word).stem, word)
        if not all(own):
            raise UserError("evaluate.set", f"--data {word}: must be NAME=FILES, or files")
        if own[0] in found:
            raise UserError(
                "evaluate.set", f"--data {word}: there is a set {own[0]!r} already; name it by --data NAME={own[1]}"
            )
        found[own[0]] = own[1]
    return found
