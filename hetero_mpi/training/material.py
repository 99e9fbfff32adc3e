"""What rank 0 prepares before any rank builds a layer: the model's configuration, the tokenizer and the sequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.documents import read_documents
from hetero_mpi.data.sequences import Dataset, build_sequences
from hetero_mpi.data.tokenizer import check_vocabulary, load_tokenizer, train_bpe, vocabulary_note
from hetero_mpi.errors import UserError
from hetero_mpi.job import LoadedJob
from hetero_mpi.model.families import read_config
from hetero_mpi.model.files import ModelFiles


@dataclass(frozen=True)
class Material:
    """Model configuration, tokenizer and data of a job. Only rank 0 has it."""

    config: dict[str, Any]
    """Keys of the model's ``config.json``, to be broadcast."""
    tokenizer: PreTrainedTokenizerFast
    dataset: Dataset
    notes: tuple[str, ...]
    """Remarks for a person."""


def prepare(loaded: LoadedJob) -> Material:
    """Read the job's files.

    Raises:
        UserError: anything missing, damaged or contradictory.
    """
    job = loaded.job
    config = _model_keys(loaded)
    _check_model(loaded, config)
    corpus = read_documents(loaded.text_patterns(), job.data.documents, job.data.max_bytes)
    notes: list[str] = []
    if job.tokenizer.train_vocab_size is not None:
        tokenizer = train_bpe(corpus, job.tokenizer.train_vocab_size, job.data.sequence_length)
        note = vocabulary_note(tokenizer, job.tokenizer.train_vocab_size)
        notes.extend([note] if note else [])
    else:
        tokenizer = load_tokenizer(loaded.resolve(job.tokenizer.path or str(job.model.path)))
    if job.model.path is None:
        notes.extend(_complete(config, tokenizer))
    check_vocabulary(tokenizer, read_config(config).vocab_size)
    dataset = build_sequences(
        corpus, tokenizer, job.data.sequence_length, job.data.packing, job.data.held_out, job.train.seed
    )
    report = corpus.report
    notes.append(f"corpus: {report.files:,} files, {report.bytes / 1e6:.1f} MB of text")
    notes.extend(dataset.notes)
    return Material(config, tokenizer, dataset, tuple(notes))


def _model_keys(loaded: LoadedJob) -> dict[str, Any]:
    model = loaded.job.model
    if model.path is not None:
        files = ModelFiles(loaded.resolve(model.path))
        files.check()
        return dict(files.config)
    if isinstance(model.config, dict):
        return dict(model.config)
    assert model.config is not None
    return read_config(loaded.resolve(model.config)).to_dict()


def _check_model(loaded: LoadedJob, config: dict[str, Any]) -> None:
    """Refuse what cannot be trained before a long corpus is read."""
    positions = getattr(read_config(config), "max_position_embeddings", None)
    length = loaded.job.data.sequence_length
    if positions is not None and length > positions:
        raise UserError(
            f"{loaded.path}: [data] sequence_length = {length}: the model has positions for {positions} tokens "
            f"(max_position_embeddings); shorten the sequences"
        )


def _complete(config: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Take from the tokenizer what a configuration written by hand need not repeat."""
    notes = []
    if "vocab_size" not in config:
        config["vocab_size"] = len(tokenizer)
        notes.append(f"vocab_size {len(tokenizer):,}: the tokenizer's")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config.setdefault(key, getattr(tokenizer, key))
    return notes


def model_directory(loaded: LoadedJob) -> Path | None:
    """The directory start weights come from, or None when they are initialised from the seed."""
    return None if loaded.job.model.path is None else loaded.resolve(loaded.job.model.path)
