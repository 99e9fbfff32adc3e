"""Prepare model configuration, tokenizer and sequences on rank 0, before any rank builds a layer."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.batch import Batch
from hetero_mpi.data.chat_template import Template, choose_template, plain_texts, tokenize_records
from hetero_mpi.data.dataset import Dataset, DataSource, SequenceSettings
from hetero_mpi.data.record_files import OwnKeys
from hetero_mpi.data.record_sequences import RecordSequences, build_record_sequences
from hetero_mpi.data.record_shapes import BadRecords
from hetero_mpi.data.records import Record, Records, read_records
from hetero_mpi.data.source_files import matching_files
from hetero_mpi.data.text_sequences import Corpus, build_sequences, pieces_of
from hetero_mpi.data.token_cache import cached_or_build, file_marks, read_dataset, write_dataset
from hetero_mpi.data.tokenizer import (
    add_tokens,
    bpe_split,
    check_vocabulary,
    largest_id,
    load_tokenizer,
    rows_with_added,
    save_tokenizer,
    train_bpe,
    vocabulary_note,
)
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.job.schema import JobConfig
from hetero_mpi.model.files import hub
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.transformers.families import check_keys, default_sizes, read_config
from hetero_mpi.model.transformers.generation import end_tokens, model_stops, read_generation, with_end
from hetero_mpi.model.transformers.packed_records import depends_on_length
from hetero_mpi.model.transformers.stored_model import stored_model
from hetero_mpi.model.transformers.supported import LEAKING_FAMILIES, PADDING_FAMILIES
from hetero_mpi.objectives import objective
from hetero_mpi.rundir.logs import say
from hetero_mpi.training.setup.custom_model import read_factory
from hetero_mpi.training.setup.named_sets import evaluation_sets
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError


@dataclass(frozen=True)
class Material:
    """Model configuration, tokenizer and data of a job. It exists on rank 0 only."""

    config: dict[str, Any]
    """Content of the model's ``config.json``, or the description of a factory's layers; to be broadcast."""
    tokenizer: PreTrainedTokenizerFast | None
    """The tokenizer; None for a model without text input."""
    dataset: DataSource
    notes: tuple[str, ...]
    """Notes to print for the user."""
    template: Literal["chat", "plain", "none"] | None = None
    """Kind of the template that turned records into text; None if the job has no records."""
    skipped_records: int = 0
    """Number of bad records that were skipped (``data.skip_bad``)."""
    generation: dict[str, Any] | None = None
    """Content of the result's ``generation_config.json``; None if the base model has none."""
    further: Mapping[str, Batch] = field(default_factory=dict)
    """Maps the names of additional evaluation sets to their sequences."""


def prompt_template(job: JobConfig) -> Template | None:
    """Return the prompt format that the job's model expects, as ``data.chat_template.render_prompt`` takes it."""
    return None if job.data.records is None or job.data.template == "none" else job.data.template


def prepare(loaded: LoadedJob) -> Material:
    """Read the job's files, data first since a model download may take an hour. Raises UserError for invalid files or settings."""
    if loaded.job.model.factory is not None:
        keys, samples = read_factory(loaded)
        return Material(keys, None, samples, samples.notes)
    material = _from_text(loaded) if loaded.job.data.records is None else _from_records(loaded)
    if loaded.job.data.evaluation_sets is None or material.tokenizer is None:
        return material
    stops, placed = model_stops(material.config, material.generation), depends_on_length(read_config(material.config))
    return replace(material, further=evaluation_sets(loaded, material.tokenizer, stops, placed))


def _from_text(loaded: LoadedJob) -> Material:
    data = loaded.job.data
    read = functools.partial(Corpus, documents=data.documents, keys=data.keys, skip_bad=data.skip_bad, tell=say)
    corpus, evaluation = read(loaded.patterns("text"), max_bytes=data.max_bytes), None
    if data.evaluation is not None:
        evaluation = read(loaded.patterns("evaluation"), key="data.evaluation")
    for source in (corpus, evaluation):
        next(iter(source.blocks() if source else ("",)))  # there is some text
    config, generation, model_notes = _model_keys(loaded)
    files = [file_marks(source.paths) if source else None for source in (corpus, evaluation)]
    key = ["text", *files, data.documents, data.max_bytes, data.keys, data.skip_bad]
    tokenizer, notes = _tokenizer(
        loaded, config, key, lambda: (piece.text for piece in pieces_of(corpus.blocks(), bpe_split))
    )

    def fill(folder: Path) -> dict[str, Any]:
        settings = _settings(loaded, data.packing)
        dataset = build_sequences(corpus, tokenizer, settings, evaluation, folder, _progress(corpus.paths))
        lines = [
            f"{name}: {line}"
            for name, source in (("corpus", corpus), ("evaluation", evaluation))
            for line in (source.report.lines() if source is not None else ())
        ]
        skipped = sum(len(source.report.bad.problems) for source in (corpus, evaluation) if source is not None)
        return write_dataset(folder, dataset, {"notes": [*lines, *dataset.notes], "skipped": skipped})

    dataset, description, reused = _dataset(loaded, [*key, _mark(tokenizer), data.packing], fill, tokenizer)
    dataset, remarks = _placed(dataset, config)
    generation = _with_end(config, generation, tokenizer)
    lines = (*model_notes, *notes, *description["notes"], *reused, *remarks)
    return Material(config, tokenizer, dataset, lines, None, description["skipped"], generation)


def _from_records(loaded: LoadedJob) -> Material:
    data = loaded.job.data
    compared, bad = objective(loaded.job.train.preference), BadRecords(data.skip_bad)
    preference, learns_chosen = (compared.learns_from, compared.learns_chosen) if compared else (None, False)
    named_patterns = _named_patterns(loaded)
    files = [file_marks(matching_files(key, patterns, say)) for key, patterns in named_patterns]
    key = ["records", files, [name for name, _ in named_patterns], data.skip_bad, preference, data.keys]

    @functools.cache
    def read() -> list[Records]:
        keys = OwnKeys(data.keys or {})
        sources = [read_records(patterns, name, bad, preference, say, keys) for name, patterns in named_patterns]
        keys.check()
        return sources

    def records() -> Iterator[Record]:
        """Yield the records to train on."""
        sources = zip(named_patterns, read(), strict=True)
        return (record for (name, _), source in sources if name != _EVALUATION for record in source.records)

    def check(_: Path) -> None:
        read()

    # Report broken records before downloading a model, which may take an hour.
    cached_or_build(["read", *key] if data.cache else None, check, lambda *_: True, say)
    config, generation, model_notes = _model_keys(loaded)
    tokenizer, notes = _tokenizer(loaded, config, key, lambda: plain_texts(records()))
    packing, isolate, note = _packing(loaded, str(config["model_type"]))
    options = data.train_on_prompt, isolate, preference, model_stops(config, generation), learns_chosen

    def fill(folder: Path) -> dict[str, Any]:
        every_record = [record for source in read() for record in source.records]
        template = choose_template(tokenizer, data.template, every_record)
        # Report records that the template rejects as early as broken lines, unless they are rare exceptions.
        stride = len(every_record) // _MAX_CHECKED
        sample = every_record[::stride] if len(every_record) > _MAX_CHECKED else ()  # few are all read soon
        for _ in tokenize_records(tokenizer, template, sample, BadRecords(data.skip_bad)):
            pass
        sources = {name: source for (name, _), source in zip(named_patterns, read(), strict=True)}
        evaluation = sources.pop(_EVALUATION, None)
        lines = [
            line if data.weights is None else f"{name}: {line}"
            for name, source in sources.items()
            for line in source.lines(template.source)
        ]
        lines.extend(f"evaluation: {line}" for line in (evaluation.lines(template.source) if evaluation else ()))
        settings = _settings(loaded, packing)
        dataset = build_record_sequences(
            [(name, source.records) for name, source in sources.items()],
            RecordSequences(tokenizer, template, settings, *options),
            None if evaluation is None else evaluation.records,
            bad,
            data.weights,
        )
        rendered = any(record.messages for record in every_record)
        form = "" if rendered else "token ids, trained on as they are; for prompts to the trained model: "
        lines += [f"record format: {form}{_FORMS[template.kind]}", *note, *bad.lines(), *dataset.notes]
        values = {"notes": lines, "kind": template.kind, "source": template.source, "skipped": len(bad.problems)}
        return write_dataset(folder, dataset, values)

    settings_key = [_mark(tokenizer), data.template, packing, data.weights, *options]
    dataset, description, reused = _dataset(loaded, [*key, *settings_key], fill, tokenizer)
    if description["kind"] == "plain":
        # The result carries the template that it was trained with.
        tokenizer.chat_template = description["source"]
    dataset, remarks = _placed(dataset, config)
    generation = _with_end(config, generation, tokenizer)
    lines = (*model_notes, *notes, *description["notes"], *reused, *remarks)
    return Material(config, tokenizer, dataset, lines, description["kind"], description["skipped"], generation)


def _settings(loaded: LoadedJob, packing: bool) -> SequenceSettings:
    data = loaded.job.data
    return SequenceSettings(data.sequence_length, packing, data.evaluation_fraction, loaded.job.train.seed)


_EVALUATION = "data.evaluation"
_MAX_CHECKED = 256
"""Number of sampled records that are rendered first to detect faults early; smaller datasets need no sample."""


def _named_patterns(loaded: LoadedJob) -> list[tuple[str, list[str]]]:
    """List (name, file patterns) of the job's records; if datasets are weighted, one pair per entry of ``data.records``."""
    patterns, data = list(loaded.patterns("records")), loaded.job.data
    named = [("data.records", patterns)]
    if data.weights is not None:
        pairs = zip(data.records or (), patterns, strict=True)
        named = [(f"data.records {text}", [pattern]) for text, pattern in pairs]
    return named if data.evaluation is None else [*named, (_EVALUATION, list(loaded.patterns("evaluation")))]


def _dataset(
    loaded: LoadedJob, key: Sequence[Any], fill: Callable[[Path], Any], tokenizer: PreTrainedTokenizerFast
) -> tuple[Dataset, dict[str, Any], list[str]]:
    """Return the cached or newly built (``fill``) dataset, its description, and notes on whether it was cached."""
    data = loaded.job.data
    cache_key = [*key, data.sequence_length, data.evaluation_fraction, loaded.job.train.seed] if data.cache else None
    read = functools.partial(read_dataset, ids=largest_id(tokenizer) + 1)
    (dataset, description), is_cached = cached_or_build(cache_key, fill, read, say)
    return dataset, description, ["token ids: reused from an earlier start"] if is_cached else []


def _mark(tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    """Return everything in a tokenizer that determines the tokens of records, as a cache key."""
    engine = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    return [engine, tokenizer.chat_template, {name: str(text) for name, text in tokenizer.special_tokens_map.items()}]


def _progress(paths: Sequence[Path]) -> Callable[[int], None]:
    total_mb = sum(path.stat().st_size for path in paths) / 1e6
    return lambda done: say(f"tokenised {done / 1e6:,.0f} million characters of {total_mb:,.0f} MB of text")


def _packing(loaded: LoadedJob, family: str) -> tuple[bool, bool, list[str]]:
    """Return whether records are packed, whether packed records are isolated, and notes. Raises UserError if impossible."""
    data = loaded.job.data
    why = LEAKING_FAMILIES.get(family)
    if loaded.job.train.preference != "none" and why is not None:
        raise UserError(
            "data.isolation",
            f"{loaded.path}: [train] preference puts two answers into one sequence, which must be isolated from each other, but "
            f"the {family} family cannot do that: it {why}. Use a model of another family (docs/models.md)",
        )
    if not data.packing or data.isolate is False or why is None:
        return data.packing, data.isolate is not False, []
    if data.isolate is True:
        raise UserError(
            "data.isolation",
            f"{loaded.path}: [data] isolate = true isolates packed records from each other, which the {family} family cannot do: "
            f"it {why}. Set packing = false (one record per sequence), or isolate = false",
        )
    note = (
        f"records are not packed, because packed records would affect each other: the {family} family {why}. [data] isolate = "
        f"false packs them anyway"
    )
    return False, False, [note]


_FORMS = {
    "chat": "the tokenizer's chat template",
    "plain": "the plain form (## Task, ## Answer), which is saved as the tokenizer's chat template",
    "none": "no template: a completion directly follows its prompt",
}


def _tokenizer(
    loaded: LoadedJob, config: dict[str, Any], key: Sequence[Any], texts: Callable[[], Iterable[str]]
) -> tuple[PreTrainedTokenizerFast, list[str]]:
    """Load or train the job's tokenizer; returns it with notes. Completes the model's configuration ``config`` from it."""
    job, notes = loaded.job, []
    size, length = job.tokenizer.train_vocab_size, job.data.sequence_length
    if size is not None:

        def fill(folder: Path) -> None:
            save_tokenizer(train_bpe(texts(), size, length), folder)

        cache_key = ["tokenizer", size, length, *key] if job.data.cache else None
        tokenizer, _ = cached_or_build(cache_key, fill, lambda folder, _: load_tokenizer(folder), say)
        note = vocabulary_note(tokenizer, size)
        notes.extend([note] if note else [])
    else:
        tokenizer = load_tokenizer(_tokenizer_directory(loaded))
    notes.extend(add_tokens(tokenizer, job.tokenizer.add, job.tokenizer.add_special))
    notes.extend(_complete(config, tokenizer) if job.model.path is None else _grown(config, tokenizer))
    check_vocabulary(tokenizer, read_config(config).vocab_size)
    return tokenizer, notes


def _model_keys(loaded: LoadedJob) -> tuple[dict[str, Any], dict[str, Any] | None, tuple[str, ...]]:
    """Return the content of ``config.json`` and ``generation_config.json``, and notes; downloads an uncached hub model."""
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
        check_keys(config)
        notes = default_sizes(config, read_config(config))
    else:
        assert model.config is not None
        config = read_config(loaded.resolve(model.config)).to_dict()
    # Before a long corpus is tokenized.
    positions = getattr(read_config(config), "max_position_embeddings", None)
    length, is_compared = loaded.job.data.sequence_length, loaded.job.train.preference not in ("none", "kto")
    if positions is not None and length > positions:
        raise UserError(
            "data.sequence_length",
            f"{loaded.path}: [data] sequence_length = {length}: the model has positions for {units.plural(positions, 'token')} "
            f"(max_position_embeddings); lower it{', which is for both answers of a pair' * is_compared}",
        )
    return config, generation, notes


def _with_end(
    config: dict[str, Any], generation: dict[str, Any] | None, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any] | None:
    """Add the tokenizer's end token to the content of ``generation_config.json`` and to the model's configuration."""
    if generation is not None:
        ends = with_end(model_stops(config, generation), tokenizer.eos_token_id)
        generation = {**generation, "eos_token_id": ends}
    config["eos_token_id"] = with_end(end_tokens(config, "config.json"), tokenizer.eos_token_id)
    return generation


def _placed(dataset: Dataset, config: dict[str, Any]) -> tuple[Dataset, list[str]]:
    """Add positions that mark padding if the model depends on the sequence length; returns notes if padding still matters."""
    notes, family = [], str(config["model_type"])
    if family in PADDING_FAMILIES and dataset.padded:
        notes.append(
            f"padding has an effect: the tokens that a {family} model attends to depend on the sequence length, so the loss of a "
            f"padded sequence differs slightly"
        )
    return dataset.placed() if depends_on_length(read_config(config)) else dataset, notes


def _grown(config: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Raise the ``vocab_size`` of a model's configuration for tokens added to its tokenizer; returns notes."""
    rows = int(read_config(config).vocab_size)
    config["vocab_size"] = rows_with_added(tokenizer, rows)
    sizes = f"from {rows:,} to {config['vocab_size']:,} rows"
    note = f"embedding and head grow {sizes}: new rows start as the mean of the others"
    return [note] if config["vocab_size"] != rows else []


def _complete(config: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Complete a handwritten model configuration from the tokenizer; returns notes."""
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
    """Return the directory of the initial weights on this machine, which may not exist; None if they are random.

    The network is not used.
    """
    text = loaded.job.model.path
    if text is None:
        return None
    path = loaded.resolve(text)
    return (hub.cached(text) if hub.is_hub_id(text, path) else None) or path


def base_name(loaded: LoadedJob) -> str | None:
    """Name the base model for an adapter's files by its hub name if possible, else its directory; None for random weights."""
    text, directory = loaded.job.model.path, model_directory(loaded)
    if text is None or directory is None:
        return None
    return text if hub.is_hub_id(text, loaded.resolve(text)) else hub.name_of(directory)


def _tokenizer_directory(loaded: LoadedJob) -> Path:
    tokenizer_path = loaded.job.tokenizer.path
    directory = loaded.resolve(tokenizer_path) if tokenizer_path is not None else model_directory(loaded)
    assert directory is not None  # the job has one or the other
    return directory
