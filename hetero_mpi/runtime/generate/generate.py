"""The command ``generate``: continues a prompt with a model that may be larger than any one rank's memory.

``place.py`` divides and loads the model, ``writer.py`` produces the tokens.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.errors import UserError
from hetero_mpi.model.decoding import Sampling
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.report import units
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.runtime.generate.place import GenerateSetup, look_around, set_up, with_writer
from hetero_mpi.runtime.generate.source import Opened, open_source, stop_tokens
from hetero_mpi.runtime.generate.writer import Spelling, Task, Writer

DEFAULT_TOKENS = 128
"""New tokens where the user gives no number. Fewer where the model has no positions for so many."""


@dataclass(frozen=True)
class GenerateOptions:
    """The command line of ``generate``."""

    source: Path
    prompt: str
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    raw: bool = False


def generate(world: World, options: GenerateOptions) -> int:
    """Continue a prompt and print the text as it is produced. Collective; returns the exit code.

    Raises:
        UserError: an error the user can correct; the same on all ranks.
    """
    look_around(world)
    opened: Opened | None = None
    task: Task | None = None
    with world.led("reading the model's directory"):
        if world.rank == 0:
            check_options(options)
            opened = open_source(options.source)
            task = task_of(opened, options)
    task = Task.from_dict(world.broadcast_json(asdict(task) if task is not None else None))
    setup = set_up(world, opened)
    if opened is not None:
        reason = "continued as it is: --raw" if options.raw else opened.reason
        say(f"prompt: {len(task.prompt)} tokens, {reason}", "")
    run_task(setup, task)
    return 0


def check_options(options: GenerateOptions) -> None:
    """Refuse numbers that are out of range.

    Raises:
        UserError: names the option, its value and the accepted range.
    """
    rules = (
        ("--max-new-tokens", options.max_new_tokens, options.max_new_tokens is None or options.max_new_tokens >= 1, "1 or more"),
        ("--temperature", options.temperature, 0 <= options.temperature < math.inf, "0 (greedy) or more"),
        ("--top-p", options.top_p, 0 < options.top_p <= 1, "more than 0, at most 1"),
        ("--seed", options.seed, 0 <= options.seed < 2**63, "0 or more, below 2**63"),
    )  # fmt: skip
    for name, value, good, rule in rules:
        if not good:
            raise UserError(f"{name} {value}: must be {rule}")


def task_of(opened: Opened, options: GenerateOptions) -> Task:
    """The prompt as tokens, checked against the model's positions.

    Raises:
        UserError: an empty prompt, or one that leaves too little room.
    """
    prompt = opened.prompt_tokens(options.prompt, options.raw)
    positions = getattr(read_config(opened.source.config), "max_position_embeddings", None)
    room = positions - len(prompt) if positions is not None else sys.maxsize
    wanted = options.max_new_tokens if options.max_new_tokens is not None else min(DEFAULT_TOKENS, max(1, room))
    if wanted > room:
        raise UserError(
            f"the model has positions for {positions} tokens (max_position_embeddings); the prompt has {len(prompt)}, and "
            f"{wanted} new ones are asked for: shorten the prompt, or give --max-new-tokens {max(room, 0)} or less"
        )
    source = opened.source
    directory = Path(source.base) if source.base is not None else None
    stops = stop_tokens(source.config, directory, opened.tokenizer)
    return Task(prompt, stops, wanted, Sampling(options.temperature, options.top_p, options.seed))


def run_task(setup: GenerateSetup, task: Task) -> list[int]:
    """Load the model and generate; ranks that the plan leaves idle sleep. Collective; returns the new tokens (on active ranks)."""

    def work(members: World, writer: Writer) -> list[int]:
        members.doing = "generating"
        coming = writer.tokens(task)
        return list(coming if setup.opened is None else _told(coming, setup.opened, task))

    return with_writer(setup, work) or []


def _told(coming: Iterator[int], opened: Opened, task: Task) -> Iterator[int]:
    """Yields the tokens; prints their text as it is produced, and the speed at the end."""
    spelling = Spelling(opened.tokenizer, task.prompt)
    begin = first = time.perf_counter()
    count = 0
    for token in coming:
        count += 1
        first = time.perf_counter() if count == 1 else first
        _print(spelling.add(token))
        yield token
    _print(spelling.end() + "\n")
    end = time.perf_counter()
    rate = f", then {(count - 1) / (end - first):.1f} tokens/s" if count > 1 else ""
    say("", f"{count} tokens in {units.seconds(end - begin)}: the first after {units.seconds(first - begin)}{rate}")


def _print(text: str) -> None:
    """Print to stdout and flush; characters that its encoding lacks become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
