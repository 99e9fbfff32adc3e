"""What rank 0 prepares before any rank builds a layer: the model's configuration, the tokenizer and the sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.documents import read_documents
from hetero_mpi.data.instructions import build_record_sequences
from hetero_mpi.data.record_files import BadRecords
from hetero_mpi.data.records import Records, read_records
from hetero_mpi.data.samples import DataSource
from hetero_mpi.data.sequences import Dataset, build_sequences
from hetero_mpi.data.template import Template, choose_form, plain_texts
from hetero_mpi.data.tokenizer import check_vocabulary, load_tokenizer, train_bpe, vocabulary_note
from hetero_mpi.errors import UserError
from hetero_mpi.job.load import JobConfig, LoadedJob
from hetero_mpi.model.files import hub
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.generation import end_tokens, model_stops, read_generation, with_end
from hetero_mpi.model.transformers.record_rotary import depends_on_length
from hetero_mpi.model.transformers.stored_model import stored_model
from hetero_mpi.model.transformers.supported import LEAKING_FAMILIES, PADDING_FAMILIES
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.runtime.setup.custom_model import read_factory


@dataclass(frozen=True)
class Material:
    """Model configuration, tokenizer and data of a job. On rank 0 only."""

    config: dict[str, Any]
    """Keys of the model's ``config.json``, or the description of a factory's layers; to be broadcast."""
    tokenizer: PreTrainedTokenizerFast | None
    """None: the model takes no text."""
    dataset: DataSource
    notes: tuple[str, ...]
    """Remarks to be printed."""
    template: Literal["chat", "plain"] | None = None
    """The template that turned records into text; None: the job has plain text."""
    skipped_records: int = 0
    """Bad records that were left out (``data.skip_bad``)."""
    generation: dict[str, Any] | None = None
    """Keys of the ``generation_config.json`` that the result gets; None: the base has none."""


def prompt_template(job: JobConfig) -> Template | None:
    """The form of prompt that the job's model expects: the last argument of ``data.template.render_prompt``."""
    return None if job.data.records is None else job.data.template


def prepare(loaded: LoadedJob) -> Material:
    """Read the job's files. The data come first, since fetching a model from the hub may take an hour. Raises UserError: a file is
    missing or damaged, or the job contradicts itself.
    """
    if loaded.job.model.factory is not None:
        keys, samples = read_factory(loaded)
        return Material(keys, None, samples, samples.notes)
    return _from_text(loaded) if loaded.job.data.records is None else _from_records(loaded)


def _from_text(loaded: LoadedJob) -> Material:
    data = loaded.job.data
    corpus = read_documents(loaded.text_patterns(), data.documents, data.max_bytes)
    evaluation = None
    if data.evaluation is not None:
        evaluation = read_documents(loaded.evaluation_patterns(), data.documents, key="data.evaluation")
    for read in (corpus, evaluation):
        next(iter(read or ("",)))  # there is some text
    config, generation, told = _model_keys(loaded)
    tokenizer, notes = _tokenizer(loaded, config, corpus)
    notes[:0] = told
    dataset = build_sequences(
        corpus, tokenizer, data.sequence_length, data.packing, data.held_out, loaded.job.train.seed, evaluation
    )
    for name, read in (("corpus", corpus), ("evaluation", evaluation)):
        if read is not None:
            notes.append(f"{name}: {read.report.files:,} files, {read.report.bytes / 1e6:.1f} MB of text")
    notes.extend(dataset.notes)
    dataset, remarks = _placed(dataset, config)
    notes.extend(remarks)
    generation = _with_end(config, generation, tokenizer)
    return Material(config, tokenizer, dataset, tuple(notes), generation=generation)


def _from_records(loaded: LoadedJob) -> Material:
    data = loaded.job.data
    preference, bad = loaded.job.train.preference != "none", BadRecords(data.skip_bad)
    sources = _sources(loaded, bad, preference)
    records = [record for _, source in sources for record in source.records]
    evaluation = None
    if data.evaluation is not None:
        evaluation = read_records(loaded.evaluation_patterns(), "data.evaluation", bad, preference, say)
    config, generation, told = _model_keys(loaded)
    tokenizer, notes = _tokenizer(loaded, config, plain_texts(records))
    notes[:0] = told
    form = choose_form(tokenizer, data.template, (*records, *(evaluation.records if evaluation else ())))
    for name, source in sources:
        notes.extend(line if data.weights is None else f"{name}: {line}" for line in source.lines(form.source))
    notes.extend(f"evaluation: {line}" for line in (evaluation.lines(form.source) if evaluation else ()))
    notes.append("records become text by " + _FORMS[form.kind])
    packing, isolate, note = _packing(loaded, str(config["model_type"]))
    notes.extend(note)
    dataset = build_record_sequences(
        [(name, source.records) for name, source in sources],
        tokenizer,
        form,
        data.sequence_length,
        packing,
        data.held_out,
        loaded.job.train.seed,
        data.train_on_prompt,
        None if evaluation is None else evaluation.records,
        isolate,
        bad,
        preference,
        data.weights,
        model_stops(config, generation),
    )
    notes.extend(bad.lines())
    if form.kind == "plain":
        # So that whoever loads the result can ask it in the words it was taught in.
        tokenizer.chat_template = form.source
    dataset, remarks = _placed(dataset, config)
    notes.extend(remarks)
    generation = _with_end(config, generation, tokenizer)
    return Material(config, tokenizer, dataset, (*notes, *dataset.notes), form.kind, len(bad.problems), generation)


def _sources(loaded: LoadedJob, bad: BadRecords, preference: bool) -> list[tuple[str, Records]]:
    """The job's records, with a name: of each entry of ``data.records`` for itself where these have weights."""
    patterns, data = loaded.record_patterns(), loaded.job.data
    if data.weights is None:
        return [("data.records", read_records(patterns, "data.records", bad, preference, say))]
    named = [(f"data.records {text}", pattern) for text, pattern in zip(data.records or (), patterns, strict=True)]
    return [(name, read_records([pattern], name, bad, preference, say)) for name, pattern in named]


def _packing(loaded: LoadedJob, family: str) -> tuple[bool, bool, list[str]]:
    """(are records packed, are they kept apart then, remarks)."""
    data = loaded.job.data
    why = LEAKING_FAMILIES.get(family)
    if loaded.job.train.preference != "none" and why is not None:
        raise UserError(
            f"{loaded.path}: [train] preference puts two records into one sequence, which must not see each other, and the "
            f"{family} family cannot: it {why}. Take a model of another family (docs/models.md)"
        )
    if not data.packing or data.isolate is False or why is None:
        return data.packing, data.isolate is not False, []
    if data.isolate is True:
        raise UserError(
            f"{loaded.path}: [data] isolate = true keeps packed records from seeing each other, and the {family} family cannot: it "
            f"{why}. Set packing = false (a sequence for each record), or isolate = false"
        )
    note = (
        f"records are not packed, as packed ones would see each other: the {family} family {why}. "
        "[data] isolate = false packs them all the same"
    )
    return False, False, [note]


_FORMS = {
    "chat": "the tokenizer's chat template",
    "plain": "the plain form (## Task, ## Answer), which is saved as the tokenizer's chat template",
}


def _tokenizer(
    loaded: LoadedJob, config: dict[str, Any], texts: Iterable[str]
) -> tuple[PreTrainedTokenizerFast, list[str]]:
    """The job's tokenizer (loaded, or trained on the texts), and remarks. Adds the tokenizer's keys to the configuration."""
    job, notes = loaded.job, []
    if job.tokenizer.train_vocab_size is not None:
        tokenizer = train_bpe(texts, job.tokenizer.train_vocab_size, job.data.sequence_length)
        note = vocabulary_note(tokenizer, job.tokenizer.train_vocab_size)
        notes.extend([note] if note else [])
    else:
        tokenizer = load_tokenizer(_tokenizer_directory(loaded))
    if job.model.path is None:
        notes.extend(_complete(config, tokenizer))
    check_vocabulary(tokenizer, read_config(config).vocab_size)
    return tokenizer, notes


def _model_keys(loaded: LoadedJob) -> tuple[dict[str, Any], dict[str, Any] | None, tuple[str, ...]]:
    """Keys of the model's configuration and of its ``generation_config.json``, and remarks; a model of the hub is fetched for them
    if it is not in the cache."""
    model, generation = loaded.job.model, None
    notes: tuple[str, ...] = ()
    if model.path is not None:
        path = loaded.resolve(model.path)
        if hub.is_hub_id(model.path, path):
            path = hub.obtain(model.path, path, model.download, say)
        stored = stored_model(ModelFiles(path))
        config, notes, generation = stored.config, stored.notes, read_generation(path)
    elif isinstance(model.config, dict):
        config = dict(model.config)
    else:
        assert model.config is not None
        config = read_config(loaded.resolve(model.config)).to_dict()
    _check_model(loaded, config)
    return config, generation, notes


def _with_end(
    config: dict[str, Any], generation: dict[str, Any] | None, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any] | None:
    """The keys of ``generation_config.json`` with the end token that is taught, which the model's configuration gets, too."""
    if generation is not None:
        ends = with_end(model_stops(config, generation), tokenizer.eos_token_id)
        generation = {**generation, "eos_token_id": ends}
    config["eos_token_id"] = with_end(end_tokens(config, "config.json"), tokenizer.eos_token_id)
    return generation


def _placed(dataset: Dataset, config: dict[str, Any]) -> tuple[Dataset, list[str]]:
    """The data with positions that tell texts from padding, where the model computes a text by its length; and a remark where
    padding counts all the same."""
    told, family = [], str(config["model_type"])
    if family in PADDING_FAMILIES and dataset.padded:
        told.append(
            f"padding counts: which tokens a {family} model looks at depends on how many there are, so a padded text's loss is not "
            f"quite what it has alone"
        )
    return dataset.placed() if depends_on_length(read_config(config)) else dataset, told


def _check_model(loaded: LoadedJob, config: dict[str, Any]) -> None:
    """Refuse a model that cannot be trained, before a long corpus is tokenized."""
    positions = getattr(read_config(config), "max_position_embeddings", None)
    length = loaded.job.data.sequence_length
    if loaded.job.train.preference != "none" and config.get("output_router_logits"):
        raise UserError(
            f"{loaded.path}: [train] preference does not go with the loss of routers, for which the model's configuration asks: "
            f"leave it out, or set output_router_logits = false there"
        )
    if positions is not None and length > positions:
        raise UserError(
            f"{loaded.path}: [data] sequence_length = {length}: the model has positions for {positions} tokens "
            f"(max_position_embeddings); shorten the sequences"
        )


def _complete(config: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Add to a hand-written configuration what the tokenizer tells."""
    notes = []
    if "vocab_size" not in config:
        config["vocab_size"] = len(tokenizer)
        notes.append(f"vocab_size {len(tokenizer):,}: the tokenizer's")
    for key in ("bos_token_id", "eos_token_id"):
        config.setdefault(key, getattr(tokenizer, key))
    # The embedding of a padding token is zero and learns nothing: no good for a token that also ends documents.
    pads_with_end = tokenizer.pad_token_id == tokenizer.eos_token_id
    config.setdefault("pad_token_id", None if pads_with_end else tokenizer.pad_token_id)
    return notes


def model_directory(loaded: LoadedJob) -> Path | None:
    """The directory of the start weights on this machine, which may not exist; None where they are initialised from the seed.

    Uses no network.
    """
    text = loaded.job.model.path
    if text is None:
        return None
    path = loaded.resolve(text)
    return (hub.cached(text) if hub.is_hub_id(text, path) else None) or path


def base_name(loaded: LoadedJob) -> str | None:
    """The start weights as an adapter's files name them: a model of the hub by its name, which means the same everywhere, else its
    directory. None: they are initialised from the seed."""
    text, directory = loaded.job.model.path, model_directory(loaded)
    if text is None or directory is None:
        return None
    return text if hub.is_hub_id(text, loaded.resolve(text)) else hub.name_of(directory)


def _tokenizer_directory(loaded: LoadedJob) -> Path:
    own = loaded.job.tokenizer.path
    directory = loaded.resolve(own) if own is not None else model_directory(loaded)
    assert directory is not None  # the job has one or the other
    return directory
