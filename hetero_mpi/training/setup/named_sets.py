"""Named datasets on which a model is only evaluated. Each sequence holds one record, or is cut from text as in training."""

from collections.abc import Collection

import numpy as np
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.batch import Batch
from hetero_mpi.data.chat_template import choose_template
from hetero_mpi.data.dataset import Dataset, SequenceSettings, share_out
from hetero_mpi.data.record_files import OwnKeys
from hetero_mpi.data.record_sequences import RecordSequences
from hetero_mpi.data.record_shapes import BadRecords
from hetero_mpi.data.records import read_records
from hetero_mpi.data.text_sequences import Corpus, build_sequences
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.job.schema import DataTable
from hetero_mpi.rundir.logs import say


def read_set(
    patterns: list[str],
    key: str,
    data: DataTable,
    tokenizer: PreTrainedTokenizerFast,
    ends: Collection[int],
    limit: int,
) -> Dataset:
    """Read the sequences of matching files, at most ``limit`` records. Raises UserError if that fails or yields no sequence."""
    settings = SequenceSettings(data.sequence_length, data.packing and data.text is not None, held_out=0, seed=0)
    if data.text is not None:
        corpus = Corpus(patterns, data.documents, None, key, data.keys, data.skip_bad, say)
        return build_sequences(corpus, tokenizer, settings)
    bad = BadRecords(data.skip_bad)
    records = read_records(patterns, key, bad, None, say, OwnKeys(data.keys or {})).records[:limit]
    template = choose_template(tokenizer, data.template, records)
    rows = RecordSequences(tokenizer, template, settings, data.train_on_prompt, ends=ends).rows(records, key, bad)
    return share_out(rows, settings, f"the records of {key}", "Add records.")


def evaluation_sets(
    loaded: LoadedJob, tokenizer: PreTrainedTokenizerFast, ends: Collection[int], with_positions: bool
) -> dict[str, Batch]:
    """Read ``data.evaluation_sets`` as one batch per name. ``with_positions``: whether to add positions that mark padding."""
    limit, batches = loaded.job.train.evaluate_sequences, {}
    for name, patterns in loaded.evaluation_sets().items():
        key = f"data.evaluation_sets.{name}"
        dataset = read_set(list(patterns), key, loaded.job.data, tokenizer, ends, limit)
        dataset = dataset.placed() if with_positions else dataset
        batches[name] = dataset.gather(np.arange(min(limit, len(dataset.tokens))))
        say(*(f"{key}: {note}" for note in dataset.notes))
    return batches
