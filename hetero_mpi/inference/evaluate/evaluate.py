"""The command ``evaluate``: loss, perplexity and token accuracy of a finished model, divided over the ranks as for ``generate``; or
its results in tasks of lm-evaluation-harness, which asks the same ranks by ``serve``.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.inference.decoding import Scored
from hetero_mpi.inference.evaluate.harness import Harness
from hetero_mpi.inference.evaluate.scored_sets import ScoredText, job_of_run, named, own_set, set_of_files
from hetero_mpi.inference.layer_split import set_up, with_writer
from hetero_mpi.inference.source import Opened, open_source
from hetero_mpi.inference.writer import NOT_A_NUMBER_TEXT, Task, TextChanges, Writer
from hetero_mpi.rundir.logs import say
from hetero_mpi.serve.scheduler import CacheRoom
from hetero_mpi.serve.serve import ServeOptions, cache_room, serve
from hetero_mpi.training.setup.setup import look_around
from hetero_mpi.util.disk import write_whole, writing
from hetero_mpi.util.errors import ExitCode, UserError

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
    with world.led("reading the model's directory and the data"):
        if world.rank == 0:
            _check(options)
            opened = open_source(options.source)
            sets = _sets(opened, options)
    setup = set_up(world, opened)

    def work(members: World, writer: Writer) -> dict[str, list[list[Scored]]]:
        members.doing = "measuring the memory of a text"
        room = cache_room(members, setup.memory, writer)
        members.doing = "evaluating"
        tasks = [asdict(text.task) for texts in sets.values() for text in texts]
        texts = [Task.from_dict(task) for task in members.broadcast_json(tasks if setup.opened is not None else None)]
        found = scores(writer, texts, room, options.parallel)
        return {name: [next(found) for _ in own] for name, own in sets.items()}

    told = with_writer(setup, work) or {}
    with world.led("writing the results"):
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


def scores(writer: Writer, tasks: Sequence[Task], room: Sequence[CacheRoom], parallel: int) -> Iterator[list[Scored]]:
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


def _groups(tasks: Sequence[Task], room: Sequence[CacheRoom], parallel: int) -> Iterator[dict[int, Task]]:
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
        with writing(place / RESULT, _ELSEWHERE):
            write_whole(place / RESULT, json.dumps(values, indent=2) + "\n", make_folder=True)
        say(f"written to {place / RESULT}")


def result_directory(options: EvaluateOptions) -> Path | None:
    """Where results are written; None: nowhere."""
    source = options.source.expanduser()
    if options.output is not None:
        return options.output.expanduser()
    return source if job_of_run(source) is not None else None


def _in_tasks(world: World, options: EvaluateOptions) -> int:
    harness: Harness | None = None
    with world.led("looking for lm-evaluation-harness"):
        if world.rank == 0:
            _check(options)
            assert options.tasks is not None
            place = result_directory(options)
            harness = Harness(options.tasks, options.limit, place, options.parallel, options.lm_eval_args)
    asked = ServeOptions(options.source, port=0, token=secrets.token_urlsafe(32), parallel=options.parallel)
    code = serve(world, asked, harness)
    return int(harness.code) if harness is not None and code == ExitCode.DONE else code
