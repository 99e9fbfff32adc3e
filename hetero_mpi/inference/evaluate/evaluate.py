"""The command ``evaluate``: computes a finished model's loss, perplexity and accuracy, or runs lm-evaluation-harness on it.

The model is split over the ranks as in ``generate``. Evaluation sets are read on rank 0 as sequences with known targets, cut and
formatted as in training. lm-evaluation-harness runs as a client of ``serve``, in a process on rank 0's machine that requests
log-probabilities and generated text, prints its table and writes its results.
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
from hetero_mpi.inference.layer_split import set_up, with_writer
from hetero_mpi.inference.sampling import Sampling, Scored
from hetero_mpi.inference.source import Opened, open_source
from hetero_mpi.inference.writer import NOT_A_NUMBER_TEXT, Task, TextChanges, Writer
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.job.schema import DataTable
from hetero_mpi.report.past_run import job_of_run
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import EVALUATION_NAME, run_json
from hetero_mpi.serve.api_server import ApiServer
from hetero_mpi.serve.scheduler import CacheBudget
from hetero_mpi.serve.serve import ServeOptions, cache_budgets, serve
from hetero_mpi.training.setup.data_setup import prepare
from hetero_mpi.training.setup.named_sets import read_set
from hetero_mpi.training.setup.setup import look_around
from hetero_mpi.util import units
from hetero_mpi.util.background import start_module
from hetero_mpi.util.disk import write_atomic, write_errors
from hetero_mpi.util.errors import ExitCode, UserError

FOLDER = "lm-eval"
"""Name of the folder for the harness's results in a run directory."""
_TIMEOUT_S = 24 * 3600


class Harness:
    """The lm-evaluation-harness process. ``code`` is its exit code once it has ended.

    The constructor raises UserError if the harness is not installed, or if its options cannot be parsed.
    """

    def __init__(self, tasks: str, limit: int | None, directory: Path | None, parallel: int, further: str) -> None:
        if find_spec("lm_eval") is None:
            raise UserError(
                "evaluate.package_missing",
                f'--tasks needs lm-evaluation-harness: {sys.executable} -m pip install "lm-eval[api]>=0.4.9"',
            )
        try:
            self._further = shlex.split(further)
        except ValueError as error:
            text = f"--lm-eval-args {further}: {error}; quote words as in a shell"
            raise UserError("evaluate.arguments", text) from None
        self._tasks, self._limit, self._parallel = tasks, limit, parallel
        self._output = directory / FOLDER if directory is not None else None
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
            "timeout": _TIMEOUT_S,
            "max_retries": 1,
        }
        words = ["run", "--model", "hetero_mpi", "--model_args", json.dumps(model), "--tasks", self._tasks]
        words += ["--limit", str(self._limit)] if self._limit is not None else []
        words += ["--output_path", str(self._output)] if self._output is not None else []
        quiet = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false"}
        quiet["OPENAI_API_KEY"] = next(iter(server.keys.values()))  # arguments would be visible to other users
        base = {name: text for name, text in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
        module, words = "hetero_mpi.inference.evaluate.harness_model", [*words, *self._further]
        self._process = start_module(module, *words, env={**base, **quiet}, stdin=None, stdout=None)

    def has_ended(self) -> bool:
        """Whether the process has ended; stores its exit code if so."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return False
        self.code = ExitCode.DONE if code == 0 else ExitCode.FAILED
        return True

    def close(self) -> None:
        """Stop the process if it is still running, and report where the results are."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._folder.cleanup()
        if self._output is not None and self.code == ExitCode.DONE:
            say(f"results of lm-evaluation-harness: {self._output}")


_MAX_TOKENS = 2048
"""Maximum sequence length if the model is not part of a run."""
_TEXT = (".txt", ".text", ".md")


@dataclass(frozen=True)
class ScoredText:
    """A text with known targets. ``weights``: loss weight of the token after each prompt token, or None if it is no target."""

    task: Task
    weights: list[float | None]


def own_set(loaded: LoadedJob, limit: int) -> list[ScoredText]:
    """Read up to ``limit`` of a run's own evaluation sequences. Raises UserError if there are none or the data is missing."""
    no_text = loaded.job.model.factory is not None or loaded.job.train.preference != "none"
    if no_text or "train.preference" in loaded.lost:
        text = "only training evaluates preferences and custom models (train.evaluate_every, metrics.jsonl); use --data or --tasks"
        raise UserError("evaluate.no_data", text)
    dataset = prepare(loaded).dataset
    batch = next(dataset.held_out_batches(limit, limit), None)
    if batch is None:
        text = "the run has no evaluation set (data.evaluation_fraction, data.evaluation); use --data NAME=FILES or --tasks"
        raise UserError("evaluate.no_data", text)
    weights = None if batch.weighed is None else batch.weighed.weights
    return list(_texts(Rows(batch.tokens, batch.targets, positions=batch.positions, weights=weights)))


def set_of_files(opened: Opened, loaded: LoadedJob | None, pattern: str, limit: int) -> list[ScoredText]:
    """Read up to ``limit`` sequences from the files that match a pattern. Raises UserError if the files cannot be read.

    The run's job says whether the files are records or text; if there is no run, the file name extension decides.
    """
    if loaded is not None:
        data = loaded.job.data
    else:
        kind = "text" if pattern.lower().endswith(_TEXT) else "records"
        length = min(opened.positions or _MAX_TOKENS, _MAX_TOKENS)
        data = DataTable(sequence_length=length, **{kind: [pattern]})  # type: ignore[arg-type]
    dataset = read_set([pattern], "--data", data, opened.tokenizer, opened.stops, limit)
    say(*(f"{pattern}: {note}" for note in dataset.notes))
    return list(_texts(dataset, limit))


def _texts(rows: Rows, limit: int | None = None) -> Iterator[ScoredText]:
    """Split sequences into texts; a packed sequence contains several."""
    for row, (tokens, targets) in enumerate(zip(rows.tokens[:limit], rows.targets[:limit], strict=True)):
        begins = [0] if rows.positions is None else np.flatnonzero(rows.positions[row] == 0).tolist()
        for first, last in zip(begins, [*begins[1:], len(tokens)], strict=True):
            weights = None if rows.weights is None else rows.weights[row][first:last]
            yield from _text(tokens[first:last], targets[first:last], weights)


def _text(tokens: Tokens, targets: Tokens, weights: npt.NDArray[np.float32] | None) -> Iterator[ScoredText]:
    target_mask = targets != IGNORED
    if target_mask.any():
        length = int(np.flatnonzero(target_mask)[-1]) + 1
        task = Task(tokens[:length].tolist(), [], 1, Sampling(), 0, 1, True, given=[int(targets[length - 1])])
        all_weights = [1.0] * length if weights is None else weights[:length].tolist()
        yield ScoredText(task, [w if used else None for w, used in zip(all_weights, target_mask[:length], strict=True)])


def patterns_by_name(words: Sequence[str]) -> dict[str, str]:
    """Parse ``NAME=FILES`` or ``FILES`` (named by the file's stem) to a map of names to patterns. Raises UserError."""
    pattern_by_name: dict[str, str] = {}
    for word in words:
        name, is_, rest = word.partition("=")
        entry = (name, rest) if is_ and "/" not in name else (Path(word).stem, word)
        if not all(entry):
            raise UserError("evaluate.set", f"--data {word}: must be NAME=FILES or FILES")
        if entry[0] in pattern_by_name:
            text = f"--data {word}: there is already a set {entry[0]!r}; choose another name: --data NAME={entry[1]}"
            raise UserError("evaluate.set", text)
        pattern_by_name[entry[0]] = entry[1]
    return pattern_by_name


OWN = "held out"
"""Name in the results for the run's own evaluation set."""
_MAX_SEQUENCES = 1000
_OUTPUT_REMEDY = "set another directory for the results with -o"


@dataclass(frozen=True)
class EvaluateOptions:
    source: Path
    data: Sequence[str] = ()
    """Datasets as ``NAME=FILES`` or ``FILES``; if empty, the run's own evaluation set is used."""
    tasks: str | None = None
    """Comma-separated tasks of lm-evaluation-harness; if given, ``data`` is ignored."""
    limit: int | None = None
    output: Path | None = None
    """Directory for the results; if None, they go to the run directory, if there is one."""
    parallel: int = 8
    lm_eval_args: str = ""


@dataclass(frozen=True)
class SetResult:
    """Means over the target tokens of an evaluation set; ``loss`` is in nats per token."""

    loss: float
    perplexity: float
    accuracy: float
    """Fraction of the targets that the model predicts as the most likely token."""
    tokens: int
    sequences: int


def evaluate(world: World, options: EvaluateOptions) -> int:
    """Evaluate the model, print the results, and write them if there is a directory. Collective; returns the exit code.

    Raises UserError on all ranks for errors that the user can correct.
    """
    if options.tasks is not None:
        return _evaluate_tasks(world, options)
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
        members.current_action = "measuring the memory that a sequence needs"
        room = cache_budgets(members, setup.memory, writer)
        members.current_action = "evaluating"
        tasks = [asdict(text.task) for texts in sets.values() for text in texts]
        texts = [Task.from_dict(task) for task in members.broadcast_json(tasks if setup.opened is not None else None)]
        text_scores = scores(writer, texts, room, options.parallel)
        return {name: [next(text_scores) for _ in set_texts] for name, set_texts in sets.items()}

    scores_by_set = with_writer(setup, work) or {}
    with world.on_leader("writing the results"):
        if world.rank == 0:
            results = {name: _result(texts, scores_by_set[name]) for name, texts in sets.items()}
            _report(results, options)
    return ExitCode.DONE


def _check(options: EvaluateOptions) -> None:
    for name, value in (("--limit", options.limit), ("--parallel", options.parallel)):
        if value is not None and value < 1:
            raise UserError("options.value", f"{name} {value}: must be 1 or more")
    if (directory := result_directory(options)) is not None:
        existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
        path = directory / EVALUATION_NAME
        if not writable or (path.exists() and not run_json(path)):
            raise UserError("file.unwritable", f"{path}: cannot be written, or is damaged; {_OUTPUT_REMEDY}")


def _sets(opened: Opened, options: EvaluateOptions) -> dict[str, list[ScoredText]]:
    source, limit = options.source.expanduser(), options.limit or _MAX_SEQUENCES
    loaded = job_of_run(source)
    if options.data:
        sets = {
            name: set_of_files(opened, loaded, files, limit) for name, files in patterns_by_name(options.data).items()
        }
        if empty := [name for name, texts in sets.items() if not texts]:
            text = f"--data {empty[0]}: there is no target token in the first {units.plural(limit, 'sequence')}; raise --limit"
            raise UserError("evaluate.nothing_to_score", text)
        return sets
    if loaded is None:
        text = f"{source} is not a run, so it has no evaluation set: use --data NAME=FILES or --tasks"
        raise UserError("evaluate.no_data", text)
    return {OWN: own_set(loaded, limit)}


def scores(writer: Writer, tasks: Sequence[Task], room: Sequence[CacheBudget], parallel: int) -> Iterator[list[Scored]]:
    """Compute the log-probabilities of each text's tokens, in token order; empty on ranks other than 0. Collective."""
    groups = list(_groups(tasks, room, parallel))
    waiting = list(groups)

    def changes(idle: bool) -> TextChanges | None:
        if not idle:
            return TextChanges()
        return TextChanges(waiting.pop(0)) if waiting else None

    scores_by_text: dict[int, list[Scored]] = {}
    for round_ in writer.written(changes):
        for number, tokens in round_.scores.items():
            scores_by_text.setdefault(number, []).extend(tokens)
    return (scores_by_text.get(number, []) for number in range(len(tasks)))


def _groups(tasks: Sequence[Task], room: Sequence[CacheBudget], parallel: int) -> Iterator[dict[int, Task]]:
    """Group texts that fit in memory together. Raises CollectiveUserError if a single text exceeds the memory of a rank."""
    group: dict[int, Task] = {}
    for number, task in enumerate(tasks):
        lengths = [len(entry.prompt) + 1 for entry in (*group.values(), task)]
        full = [entry for entry in room if entry.needed_bytes(lengths) > entry.free_bytes]
        if group and (full or len(group) == parallel):
            yield group
            group = {}
        if any(entry.needed_bytes(lengths[-1:]) > entry.free_bytes for entry in full):
            raise CollectiveUserError(
                "memory.exceeded",
                f"out of memory: rank {full[0].rank} cannot hold the model and a sequence of {lengths[-1]:,} tokens; use more "
                f"ranks",
            )
        group[number] = task
    if group:
        yield group


def _result(texts: Sequence[ScoredText], scores_by_text: Sequence[Sequence[Scored]]) -> SetResult:
    targets = [
        (weight, weight * token.likelihood, token.token == token.likeliest[0][0])
        for text, text_scores in zip(texts, scores_by_text, strict=True)
        for token, weight in zip(text_scores, text.weights, strict=True)
        if weight is not None
    ]
    weights, likelihoods, right = zip(*targets, strict=True)
    loss = -math.fsum(likelihoods) / (math.fsum(weights) or 1.0)
    if math.isnan(loss):
        raise UserError("numbers.not_finite", NOT_A_NUMBER_TEXT)
    return SetResult(loss, math.exp(min(loss, 100.0)), sum(right) / len(targets), len(targets), len(texts))


def _report(results: Mapping[str, SetResult], options: EvaluateOptions) -> None:
    width = max(map(len, results))
    say(f"{'set':<{width}}  loss    perplexity  accuracy  target tokens      texts")
    for name, result in results.items():
        figures = f"{result.loss:<6.4f}  {result.perplexity:>10,.4g}  {result.accuracy:>8.2%}  {result.tokens:>13,}"
        say(f"{name:<{width}}  {figures}  {result.sequences:>9,}")
    directory = result_directory(options)
    if directory is not None:
        path, trained = directory / EVALUATION_NAME, [directory / name for name in ("model", "adapter")]
        is_newer = options.output is None and path.is_file()
        is_newer = is_newer and all(path.stat().st_mtime > each.stat().st_mtime for each in trained if each.exists())
        values = (run_json(path) if is_newer else {}) | {name: asdict(result) for name, result in results.items()}
        with write_errors(path, _OUTPUT_REMEDY):
            write_atomic(path, json.dumps(values, indent=2) + "\n", make_folder=True)
        say(f"written to {path}")


def result_directory(options: EvaluateOptions) -> Path | None:
    """Return the directory for the results; None if they are not to be written."""
    source = options.source.expanduser()
    if options.output is not None:
        return options.output.expanduser()
    return source if job_of_run(source) is not None else None


def _evaluate_tasks(world: World, options: EvaluateOptions) -> int:
    harness: Harness | None = None
    with world.on_leader("looking for lm-evaluation-harness"):
        if world.rank == 0:
            _check(options)
            assert options.tasks is not None
            directory = result_directory(options)
            harness = Harness(options.tasks, options.limit, directory, options.parallel, options.lm_eval_args)
    serve_options = ServeOptions(options.source, port=0, token=secrets.token_urlsafe(32), parallel=options.parallel)
    code = serve(world, serve_options, harness)
    return int(harness.code) if harness is not None and code == ExitCode.DONE else code
