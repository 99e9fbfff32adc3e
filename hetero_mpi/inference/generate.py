"""The command ``generate``: continue a prompt with a model that may exceed any one rank's memory; also a run's final sample.

``layer_split.py`` splits and loads the model, ``writer.py`` produces the tokens. The sample comes from the trained stages.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.data.chat_template import render_prompt
from hetero_mpi.engine.placement import active_ranks
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.inference.decoding import require_decodable
from hetero_mpi.inference.layer_split import GenerateSetup, set_up, with_writer
from hetero_mpi.inference.sampling import Sampling
from hetero_mpi.inference.source import Opened, open_source, stop_tokens
from hetero_mpi.inference.spelling import Spelling
from hetero_mpi.inference.writer import Task, Writer
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import SAMPLE_NAME
from hetero_mpi.training.setup.data_setup import model_directory, prompt_template
from hetero_mpi.training.setup.setup import look_around
from hetero_mpi.util import units
from hetero_mpi.util.background import warn_on_failure
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.terminal import write_text

DEFAULT_TOKENS = 128
"""New tokens if the user gives no number; fewer if the model has not enough positions."""


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

    Raises UserError, on all ranks, for an error that the user can correct.
    """
    look_around(world)
    opened: Opened | None = None
    task: Task | None = None
    with world.on_leader("reading the model's directory"):
        if world.rank == 0:
            check_options(options)
            opened = open_source(options.source)
            task = task_of(opened, options)
    task = Task.from_dict(world.broadcast_json(asdict(task) if task is not None else None))
    setup = set_up(world, opened)
    if opened is not None:
        reason = "continued verbatim (--raw)" if options.raw else opened.reason
        say(f"prompt: {units.plural(len(task.prompt), 'token')}, {reason}", "")
    run_task(setup, task)
    return 0


def check_options(options: GenerateOptions) -> None:
    """Validate numeric options. Raises UserError with the option, its value and the accepted range."""
    rules = (
        ("--max-new-tokens", options.max_new_tokens, options.max_new_tokens is None or options.max_new_tokens >= 1, "1 or more"),
        ("--temperature", options.temperature, 0 <= options.temperature < math.inf, "0 (greedy) or more"),
        ("--top-p", options.top_p, 0 < options.top_p <= 1, "more than 0, at most 1"),
        ("--seed", options.seed, 0 <= options.seed < 2**63, "0 or more, below 2**63"),
    )  # fmt: skip
    for name, value, good, rule in rules:
        if not good:
            raise UserError("options.value", f"{name} {value}: must be {rule}")


def task_of(opened: Opened, options: GenerateOptions) -> Task:
    """The prompt as tokens, checked against the model's positions. Raises UserError if it is empty or too long."""
    prompt = opened.prompt_tokens(options.prompt, options.raw)
    positions = opened.positions
    room = positions - len(prompt) if positions is not None else sys.maxsize
    new_tokens = options.max_new_tokens if options.max_new_tokens is not None else min(DEFAULT_TOKENS, max(1, room))
    if new_tokens > room:
        raise UserError(
            "generate.too_long",
            f"the context length is {positions} tokens (max_position_embeddings), but the prompt has {len(prompt)} tokens and "
            f"{new_tokens} new tokens are requested: shorten the prompt, or set --max-new-tokens to at most {max(room, 0)}",
        )
    return Task(prompt, opened.stops, new_tokens, Sampling(options.temperature, options.top_p, options.seed))


def run_task(setup: GenerateSetup, task: Task) -> list[int]:
    """Load the model and generate; ranks that are idle in the plan sleep. Collective; returns the new tokens (on active ranks)."""

    def work(members: World, writer: Writer) -> list[int]:
        members.current_action = "generating"
        coming = writer.tokens(task)
        return list(coming if setup.opened is None else _printed_tokens(coming, setup.opened, task))

    return with_writer(setup, work) or []


def _printed_tokens(coming: Iterator[int], opened: Opened, task: Task) -> Iterator[int]:
    """Yield the tokens, print their text as it is produced, and the speed at the end."""
    spelling = Spelling(opened.tokenizer, task.prompt)
    begin = first = time.perf_counter()
    count = 0
    for token in coming:
        count += 1
        first = time.perf_counter() if count == 1 else first
        write_text(spelling.add(token), sys.stdout, exact=True)
        yield token
    write_text(spelling.end() + "\n", sys.stdout, exact=True)
    end = time.perf_counter()
    rate = f", then {(count - 1) / (end - first):.1f} tokens/s" if count > 1 else ""
    say(
        "",
        f"{units.plural(count, 'token')} in {units.seconds(end - begin)}: the first after {units.seconds(first - begin)}{rate}",
    )


def write_sample(trainer: Trainer, loaded: LoadedJob, tokenizer: PreTrainedTokenizerFast | None, run_dir: Path) -> None:
    """Print the continuation of ``[sample] prompt`` and write it to the run directory; nothing without a prompt. Collective.

    Parameters, optimizer and random generators are unchanged. An unusable prompt is reported without an error, since training has
    succeeded. ``tokenizer``: on rank 0, else None.
    """
    table = loaded.job.sample
    if table.prompt is None:
        return
    if any(stage.grouped for _, _, stage in trainer.plan.numbered):
        say("No sample: some stages use tensor parallelism; generate text from the trained model with `generate`")
        return
    trainer.world.current_action = "writing a sample"
    own_task: Task | None = None
    if tokenizer is not None:
        with warn_on_failure("preparing the sample"):
            own_task = _sample_task(trainer, loaded, tokenizer)
    values = trainer.world.broadcast_json(asdict(own_task) if own_task is not None else None)
    if values is None:
        return
    task = Task.from_dict(values)
    ranks = [stage.ranks[0] for stage in trainer.plan.pipelines[0].stages]
    active = active_ranks(trainer.plan)
    stages = trainer.stages if trainer.pipeline == 0 else []
    writer = Writer(trainer.rank, ranks, active, trainer.transport, language(trainer.chain), stages)
    try:
        tokens = list(writer.tokens(task))
    except CollectiveUserError as error:
        say(f"No sample: {error}")
        return
    if tokenizer is None:
        return
    with warn_on_failure(f"writing {SAMPLE_NAME}"):
        spelling = Spelling(tokenizer, task.prompt)
        text = "".join([*map(spelling.add, tokens), spelling.end()])
        sampling = "greedy" if table.temperature == 0 else f"temperature {table.temperature:g}, top_p {table.top_p:g}"
        lines = [f"## Prompt ({sampling})", table.prompt, "", "## Continuation", text]
        say(f"Sample ({run_dir / SAMPLE_NAME}):", *lines)
        (run_dir / SAMPLE_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sample_task(trainer: Trainer, loaded: LoadedJob, tokenizer: PreTrainedTokenizerFast) -> Task | None:
    """The task of the sample; None, after printing the reason, if the prompt cannot be continued."""
    table, config = loaded.job.sample, language(trainer.chain).config
    assert table.prompt is not None
    try:
        require_decodable(config)
        prompt = render_prompt(tokenizer, table.prompt, prompt_template(loaded.job))
        stops = stop_tokens(config.to_dict(), model_directory(loaded), tokenizer)
    except UserError as error:
        say(f"No sample: {error}")
        return None
    positions = getattr(config, "max_position_embeddings", None)
    limit = min(table.max_new_tokens, positions - len(prompt) if positions is not None else table.max_new_tokens)
    if limit < 1:
        say(f"No sample: [sample] prompt has {len(prompt)} tokens, the model has {positions} positions; shorten it")
        return None
    return Task(prompt, stops, limit, Sampling(table.temperature, table.top_p, loaded.job.train.seed))
