"""The sample at the end of a run: the job's prompt, continued by the stages that have just been trained."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from hetero_mpi.comm.ranks.world import CollectiveUserError
from hetero_mpi.data.template import render_prompt
from hetero_mpi.engine.placement import active_ranks
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.errors import UserError
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.model.decoding import Sampling, require_decodable
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.report.past_run import SAMPLE_NAME
from hetero_mpi.report.run_files.line_files import unharmed
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.runtime.generate.source import stop_tokens
from hetero_mpi.runtime.generate.writer import Spelling, Task, Writer
from hetero_mpi.runtime.setup.material import model_directory, prompt_template


def write_sample(trainer: Trainer, loaded: LoadedJob, tokenizer: PreTrainedTokenizerFast | None, run_dir: Path) -> None:
    """Print the continuation of ``[sample] prompt`` and store it in the run directory; without a prompt do nothing. Collective.

    Parameters, optimizer and random generators are left as they are. A prompt that cannot be used is reported and is no error,
    since the training has succeeded.

    Args:
        trainer: this rank's trainer.
        tokenizer: on rank 0, else None.
    """
    table = loaded.job.sample
    if table.prompt is None:
        return
    if any(stage.grouped for _, _, stage in trainer.plan.numbered):
        say("No sample: some stages are held by several ranks together; `generate` writes text with the trained model")
        return
    trainer.world.doing = "writing a sample"
    own = _task(trainer, loaded, tokenizer) if tokenizer is not None else None
    word = trainer.world.broadcast_json(asdict(own) if own is not None else None)
    if word is None:
        return
    task = Task.from_dict(word)
    ranks = [stage.ranks[0] for stage in trainer.plan.pipelines[0].stages]
    active = active_ranks(trainer.plan)
    stages = trainer.stages if trainer.pipeline == 0 else []
    writer = Writer(trainer.rank, ranks, active, trainer.transport, language(trainer.chain), stages)
    try:
        tokens = list(writer.tokens(task))
    except CollectiveUserError as error:
        say(f"No sample: {error}")
        return
    if tokenizer is not None:
        spelling = Spelling(tokenizer, task.prompt)
        text = "".join([*map(spelling.add, tokens), spelling.end()])
        way = "greedy" if table.temperature == 0 else f"temperature {table.temperature:g}, top_p {table.top_p:g}"
        lines = [f"## Prompt ({way})", table.prompt, "", "## Continuation", text]
        with unharmed(SAMPLE_NAME):
            (run_dir / SAMPLE_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
        say(f"Sample ({run_dir / SAMPLE_NAME}):", *lines)


def _task(trainer: Trainer, loaded: LoadedJob, tokenizer: PreTrainedTokenizerFast) -> Task | None:
    """What is to be written; None, with the reason printed, where the prompt cannot be continued."""
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
        say(f"No sample: [sample] prompt has {len(prompt)} tokens, the model positions for {positions}; shorten it")
        return None
    return Task(prompt, stops, limit, Sampling(table.temperature, table.top_p, loaded.job.train.seed))
