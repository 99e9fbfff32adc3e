"""The command ``evaluate``: loss, perplexity and token accuracy of a finished model, divided over the ranks as for ``generate``; or
its results in tasks of lm-evaluation-harness, which asks the same ranks by ``serve``.

Also here: sets of data that a model is evaluated on, on rank 0, as texts whose targets are known: cut and wrapped as training
does it; and lm-evaluation-harness as a client of ``serve``: a process of its own on rank 0's machine, which asks for
log-likelihoods and texts, prints its table and writes its results.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.data.batch import IGNORED, Tokens
from hetero_mpi.data.dataset import Rows
from hetero_mpi.data.tokenizer import save_tokenizer
from hetero_mpi.inference.decoding import Sampling, Scored
from hetero_mpi.inference.layer_split import set_up, with_writer
from hetero_mpi.inference.source import Opened, open_source
from hetero_mpi.inference.writer import NOT_A_NUMBER_TEXT, Task, TextChanges, Writer
from hetero_mpi.job.load import LoadedJob, job_of_tables
from hetero_mpi.job.schema import DataTable
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import RUN_NAME, run_json, run_table
from hetero_mpi.serve.api_server import ApiServer
from hetero_mpi.serve.scheduler import CacheBudget
from hetero_mpi.serve.serve import ServeOptions, cache_budgets, serve
from hetero_mpi.training.setup.data_setup import prepare
from hetero_mpi.training.setup.named_sets import read_set
from hetero_mpi.training.setup.setup import look_around
from hetero_mpi.util.background import start_module
from hetero_mpi.util.disk import write_atomic, write_errors
from hetero_mpi.util.errors import ExitCode, UserError

FOLDER = "lm-eval"
"""Folder of a run's directory with the results, as the harness names them."""
_PATIENCE_S = 24 * 3600


class Harness:
    """The process; ``on_ready`` starts it. ``code``: its exit code, once it has ended.

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

    def on_ready(self, server: ApiServer) -> None:
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
        module, words = "hetero_mpi.inference.evaluate.harness_model", [*words, *self._further]
        self._process = start_module(module, *words, env={**own, **quiet}, stdin=None, stdout=None)

    def has_ended(self) -> bool:
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


RESULT = "evaluation.json"
"""File in a run's directory: set -> its numbers."""
OWN = "held out"
"""The set that a run held out."""
_MOST_SEQUENCES = 1000
_ELSEWHERE = "name another directory for the results by -o"


@dataclass(frozen=True)
class EvaluateOptions:
    """The command line of ``evaluate``."""

    source: Path
    data: Sequence[str] = ()
    """``NAME=FILES``, or files; none: what a run held out."""
    tasks: str | None = None
    """Of lm-evaluation-harness, with commas between; then ``data`` is not looked at."""
    limit: int | None = None
    output: Path | None = None
    """Directory of the results; None: that of the run, or none."""
    parallel: int = 8
    lm_eval_args: str = ""


@dataclass(frozen=True)
class SetResult:
    """Means over a set's target tokens; ``loss`` in nats."""

    loss: float
    perplexity: float
    accuracy: float
    """Share of the targets that the model finds the likeliest."""
    tokens: int
    sequences: int


def evaluate(world: World, options: EvaluateOptions) -> int:
    """Print, and write where there is a place, how good the model is. Collective; returns the exit code. Raises UserError: an error
    the user can correct; the same on all ranks.
    """
    if options.tasks is not None:
        return _in_tasks(world, options)
    look_around(world)
    opened: Opened | None = None
    sets: dict[str, list[ScoredText]] = {}
    with world.on_leader("reading the model's directory and the data"):
        if world.rank == 0:
            _check(options)
            opened = open_source(options.source)
            sets = _sets(opened, options)
    setup = set_up(world, opened)

    def work(members: World, writer: Writer) -> dict[str, list[list[Scored]]]:
        members.current_action = "measuring the memory of a text"
        room = cache_budgets(members, setup.memory, writer)
        members.current_action = "evaluating"
        tasks = [asdict(text.task) for texts in sets.values() for text in texts]
        texts = [Task.from_dict(task) for task in members.broadcast_json(tasks if setup.opened is not None else None)]
        found = scores(writer, texts, room, options.parallel)
        return {name: [next(found) for _ in own] for name, own in sets.items()}

    told = with_writer(setup, work) or {}
    with world.on_leader("writing the results"):
        if world.rank == 0:
            results = {name: _result(texts, told[name]) for name, texts in sets.items()}
            _tell(results, options)
    return ExitCode.DONE


def _check(options: EvaluateOptions) -> None:
    for name, value in (("--limit", options.limit), ("--parallel", options.parallel)):
        if value is not None and value < 1:
            raise UserError("options.value", f"{name} {value}: must be 1 or more")
    if (place := result_directory(options)) is not None:
        there = next(one for one in (place, *place.absolute().parents) if one.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise UserError("file.unwritable", f"{place}: nothing can be written there; {_ELSEWHERE}")


def _sets(opened: Opened, options: EvaluateOptions) -> dict[str, list[ScoredText]]:
    source, limit = options.source.expanduser(), options.limit or _MOST_SEQUENCES
    loaded = job_of_run(source)
    if options.data:
        found = {name: set_of_files(opened, loaded, files, limit) for name, files in named(options.data).items()}
        if empty := [name for name, texts in found.items() if not texts]:
            raise UserError(
                "evaluate.nothing_to_score",
                f"--data {empty[0]}: its first {limit:,} sequences have no token to be found; raise --limit",
            )
        return found
    if loaded is None:
        raise UserError(
            "evaluate.no_data",
            f"{source} is no run, which would have held data out: name a set by --data NAME=FILE, or --tasks",
        )
    return {OWN: own_set(loaded, limit)}


def scores(writer: Writer, tasks: Sequence[Task], room: Sequence[CacheBudget], parallel: int) -> Iterator[list[Scored]]:
    """Log-likelihoods of the tokens of each text, in their order; on other ranks than 0 empty. Collective."""
    groups = list(_groups(tasks, room, parallel))
    waiting = list(groups)

    def changes(idle: bool) -> TextChanges | None:
        if not idle:
            return TextChanges()
        return TextChanges(waiting.pop(0)) if waiting else None

    found: dict[int, list[Scored]] = {}
    for round_ in writer.written(changes):
        for number, some in round_.scores.items():
            found.setdefault(number, []).extend(some)
    return (found.get(number, []) for number in range(len(tasks)))


def _groups(tasks: Sequence[Task], room: Sequence[CacheBudget], parallel: int) -> Iterator[dict[int, Task]]:
    """Texts that pass side by side, as memory allows. Raises CollectiveUserError: one has no room by itself."""
    group: dict[int, Task] = {}
    for number, task in enumerate(tasks):
        lengths = [len(one.prompt) + 1 for one in (*group.values(), task)]
        full = [one for one in room if one.needed_bytes(lengths) > one.free_bytes]
        if group and (full or len(group) == parallel):
            yield group
            group = {}
        if any(one.needed_bytes(lengths[-1:]) > one.free_bytes for one in full):
            raise CollectiveUserError(
                "memory.exceeded",
                f"rank {full[0].rank} has no memory for a sequence of {lengths[-1]:,} tokens beside the model",
            )
        group[number] = task
    if group:
        yield group


def _result(texts: Sequence[ScoredText], told: Sequence[Sequence[Scored]]) -> SetResult:
    found = [
        (weight, weight * one.likelihood, one.token == one.likeliest[0][0])
        for text, own in zip(texts, told, strict=True)
        for one, weight in zip(own, text.weights, strict=True)
        if weight is not None
    ]
    weights, likelihoods, right = zip(*found, strict=True)
    loss = -math.fsum(likelihoods) / (math.fsum(weights) or 1.0)
    if math.isnan(loss):
        raise UserError("numbers.not_finite", NOT_A_NUMBER_TEXT)
    return SetResult(loss, math.exp(min(loss, 100.0)), sum(right) / len(found), len(found), len(texts))


def _tell(results: Mapping[str, SetResult], options: EvaluateOptions) -> None:
    width = max(map(len, results))
    say(f"{'set':<{width}}  loss    perplexity  accuracy  target tokens  sequences")
    for name, one in results.items():
        say(
            f"{name:<{width}}  {one.loss:<6.4f}  {one.perplexity:>10,.4g}  {one.accuracy:>8.2%}  {one.tokens:>13,}  "
            f"{one.sequences:>9,}"
        )
    place = result_directory(options)
    if place is not None:
        values = {name: asdict(one) for name, one in results.items()}
        with write_errors(place / RESULT, _ELSEWHERE):
            write_atomic(place / RESULT, json.dumps(values, indent=2) + "\n", make_folder=True)
        say(f"written to {place / RESULT}")


def result_directory(options: EvaluateOptions) -> Path | None:
    """Where results are written; None: nowhere."""
    source = options.source.expanduser()
    if options.output is not None:
        return options.output.expanduser()
    return source if job_of_run(source) is not None else None


def _in_tasks(world: World, options: EvaluateOptions) -> int:
    harness: Harness | None = None
    with world.on_leader("looking for lm-evaluation-harness"):
        if world.rank == 0:
            _check(options)
            assert options.tasks is not None
            place = result_directory(options)
            harness = Harness(options.tasks, options.limit, place, options.parallel, options.lm_eval_args)
    asked = ServeOptions(options.source, port=0, token=secrets.token_urlsafe(32), parallel=options.parallel)
    code = serve(world, asked, harness)
    return int(harness.code) if harness is not None and code == ExitCode.DONE else code
