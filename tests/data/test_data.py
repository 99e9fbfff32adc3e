"""Documents, tokenizers, sequences and their order: nothing lost, nothing depends on luck."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hetero_mpi.data.batch import IGNORED, Batch, batch_indices, steps_per_epoch
from hetero_mpi.data.dataset import Dataset, SequenceSettings
from hetero_mpi.data.text_sequences import Corpus, build_sequences
from hetero_mpi.data.tokenizer import (
    END_TOKEN,
    check_vocabulary,
    encoded,
    load_tokenizer,
    own_tokens_only,
    save_tokenizer,
    train_bpe,
    vocabulary_note,
)
from tests.support.errors import refuses

TEXTS = [f"def name_{i}(value):\n    return value + {i}  # größer\n" * (1 + i % 3) for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe(TEXTS, 300, sequence_length=16)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("two\n\nlines\x0chere\r\n", encoding="utf-8")
    (tmp_path / "a.txt").write_text("\ufeffzoë", encoding="utf-8")
    (tmp_path / "sub" / "c.txt").write_text("below", encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("zoë".encode("latin-1"))
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    return tmp_path


def whole(corpus: Corpus) -> list[str]:
    """The documents."""
    found, begun = list[str](), ""
    for text, ends in corpus.blocks():
        begun += text
        if ends:
            found, begun = [*found, begun], ""
    return found


def built(documents: Any, tokenizer: Any, length: int, packing: bool, held_out: float, seed: int) -> Dataset:
    return build_sequences(documents, tokenizer, SequenceSettings(length, packing, held_out, seed))


# Documents


def test_documents_are_sorted_once_each_and_the_rest_is_reported(corpus: Path) -> None:
    found = Corpus([f"{corpus}/sub/*", f"{corpus}/*.txt", f"{corpus}/**"])
    assert whole(found) == ["zoë", "two\n\nlines\x0chere\r\n", "below"]
    assert (found.report.files, found.report.documents, found.report.bytes) == (3, 3, 7 + 17 + 5)
    assert {path.name: reason for path, reason in found.report.skipped.items()} == {
        "empty.txt": "is empty",
        "latin.txt": "is not UTF-8 (byte 2)",
    }
    assert whole(found) == whole(found), "a corpus can be read again"
    assert whole(Corpus([f"{corpus}/b.txt"], "line")) == ["two", "lines\x0chere"]
    assert whole(Corpus([f"{corpus}/**", f"!{corpus}/sub/**", f"!{corpus}/b*"])) == ["zoë"]


@pytest.mark.parametrize(
    ("max_bytes", "texts", "truncated"),
    [(5, ["zo"], True), (6, ["zo"], True), (7, ["zoë"], True), (9, ["zoë", "tw"], True), (99, None, False)],
)
def test_max_bytes_cuts_between_characters(
    corpus: Path, max_bytes: int, texts: list[str] | None, truncated: bool
) -> None:
    patterns = [f"{corpus}/a.txt", f"{corpus}/b.txt"]
    found = Corpus(patterns, max_bytes=max_bytes)
    assert whole(found) == (texts or whole(Corpus(patterns)))
    assert found.report.truncated is truncated
    assert found.report.bytes <= max_bytes


def test_no_text_is_an_error_that_names_the_patterns(corpus: Path) -> None:
    for pattern in ("none*", "s*b"):
        with refuses("data.no_files", f"{corpus}/{pattern}"):
            Corpus([f"{corpus}/{pattern}"])
    with refuses("text.no_text", "2 file(s)", "empty.txt", "latin.txt"):
        whole(Corpus([f"{corpus}/empty.txt", f"{corpus}/latin.txt"]))


# Tokenizers


def test_byte_level_bpe_loses_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in [*TEXTS, "漢字 \x00 \r\n\t 🙂", "  leading", ""]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 300
    assert tokenizer.eos_token == tokenizer.pad_token == END_TOKEN
    assert tokenizer.model_max_length == 16


@pytest.mark.slow
def test_training_is_deterministic_across_processes_and_threads() -> None:
    program = (
        "import sysconfig, hashlib\n"
        "from hetero_mpi.data.text_sequences import Corpus\n"
        "from hetero_mpi.data.tokenizer import train_bpe\n"
        "corpus = Corpus([sysconfig.get_path('stdlib') + '/*.py'], max_bytes=1_000_000)\n"
        "text = train_bpe((text for text, _ in corpus.blocks()), 1000).backend_tokenizer.to_str()\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for threads in ("1", "3")
    }
    assert len(digests) == 1 and len(digests.pop().strip()) == hashlib.sha256().digest_size * 2


def test_a_saved_tokenizer_is_loaded_by_transformers(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path / "model")
    for again in (load_tokenizer(tmp_path / "model"), AutoTokenizer.from_pretrained(tmp_path / "model")):
        assert again(TEXTS[7])["input_ids"] == tokenizer(TEXTS[7])["input_ids"]
        assert (again.eos_token, again.model_max_length) == (END_TOKEN, 16)


def test_missing_and_broken_tokenizers(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    for place in (tmp_path / "absent", tmp_path):
        with refuses("tokenizer.missing", place):
            load_tokenizer(place)
    save_tokenizer(tokenizer, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    whole = config.read_text()
    config.write_text(json.dumps({**json.loads(whole), "note": "half a character: \ud800"}))
    with refuses("tokenizer.damaged", "UnicodeEncodeError"):
        load_tokenizer(tmp_path)
    config.write_text(whole)
    load_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:500])
    with refuses("tokenizer.damaged"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2", "of-tomorrow", None])
def test_a_tokenizer_is_not_blamed_for_the_models_configuration(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, family: str | None
) -> None:
    save_tokenizer(tokenizer, tmp_path)
    keys = {"model_type": family, "dtype": "auto", "hidden_size": "x", "rope_scaling": 3}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert load_tokenizer(tmp_path)(TEXTS[7])["input_ids"] == tokenizer(TEXTS[7])["input_ids"]
    for broken in ("{", "[]", '"a"', '{"model_type": []}', '{"a": "\xff"}'):
        (tmp_path / "config.json").write_bytes(broken.encode("latin-1"))
        with refuses("model.configuration"):
            load_tokenizer(tmp_path)


def test_a_small_corpus_gives_a_note_and_a_small_model_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    assert vocabulary_note(tokenizer, 300) is None
    small = train_bpe(["abc"], 5000)
    assert "yields 25" in str(vocabulary_note(small, 5000))
    check_vocabulary(tokenizer, 300)
    with refuses("tokenizer.vocabulary_size"):
        check_vocabulary(tokenizer, 299)


# Sequences


def stream_of(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]


def test_packing_loses_no_token(tokenizer: PreTrainedTokenizerFast) -> None:
    """Tokens a b c d e f g, T = 2 ->  tokens  [a b] [c d] [e f],  targets [b c] [d e] [f g]."""
    dataset = built(TEXTS, tokenizer, 16, packing=True, held_out=0.1, seed=3)
    stream = stream_of(tokenizer)
    count = (len(stream) - 1) // 16
    assert dataset.tokens.shape == dataset.targets.shape == (count, 16)
    assert dataset.tokens.dtype == dataset.targets.dtype == np.int32
    assert dataset.tokens.ravel().tolist() == stream[: count * 16]
    assert dataset.targets.ravel().tolist() == stream[1 : count * 16 + 1]


@pytest.mark.parametrize(("length", "count"), [(3, 2), (4, 1), (6, 1), (7, 0)])
def test_a_sequence_needs_one_token_more_than_its_length(
    tokenizer: PreTrainedTokenizerFast, length: int, count: int
) -> None:
    """a b <end> q x z <end>: 7 tokens."""
    texts = ["ab", "qxz"]
    if count:
        assert len(built(texts, tokenizer, length, True, 0.0, 0).tokens) == count
    else:
        with refuses("data.too_few_sequences", 7):
            built(texts, tokenizer, length, True, 0.0, 0)
    with refuses("data.too_few_sequences", 1000, "40 documents"):
        built(TEXTS, tokenizer, 1000, True, 0.1, seed=0)
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with refuses("tokenizer.no_end_token"):
        built(texts, endless, length, True, 0.0, 0)


def test_padding_teaches_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["", "a", "ab", "abcd", "abcdqxzj"]
    ids = {text: tokenizer(text)["input_ids"] for text in texts}
    assert [len(ids[text]) for text in texts] == [0, 1, 2, 4, 8], "letters that no merge joins"
    dataset = built(texts, tokenizer, 4, packing=False, held_out=0.0, seed=0)
    end, (a, b, c, d, e, *_) = tokenizer.eos_token_id, ids["abcdqxzj"]
    assert dataset.tokens.tolist() == [[a, b, end, end], [a, b, c, d], [a, b, c, d]]
    assert dataset.targets.tolist() == [[b, end, IGNORED, IGNORED], [b, c, d, end], [b, c, d, e]]
    assert [note.split()[0] for note in dataset.notes] == ["2", "1"]
    assert dataset.batch(0, 3).target_tokens == 2 + 4 + 4
    assert list(dataset.held_out_batches(2)) == []
    assert len(dataset.fingerprint()) == 32


def test_positions_tell_texts_from_padding(tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = built(["one two", "a b c d e f g h i j k"], tokenizer, 12, False, 0.0, 1)
    placed = dataset.placed()
    assert dataset.positions is None and placed.positions is not None and dataset.padded
    for row, targets in zip(placed.positions, dataset.targets, strict=True):
        length = int(np.flatnonzero(targets != IGNORED)[-1]) + 1
        assert row.tolist() == [*range(length), *range(len(row) - length)]
    packed = built(["one two three"] * 20, tokenizer, 12, True, 0.0, 1)
    assert packed.placed() is packed and placed.placed() is placed, (
        "without padding, or with positions, nothing is to be told"
    )


def test_a_tokenizer_that_cuts_and_pads_by_itself_is_not_obeyed(tokenizer: PreTrainedTokenizerFast) -> None:
    cutting = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token=END_TOKEN)
    plain = built(TEXTS, tokenizer, 16, packing=True, held_out=0.1, seed=3)
    cutting.backend_tokenizer.enable_truncation(5)
    cutting.backend_tokenizer.enable_padding(length=500)
    assert built(TEXTS, cutting, 16, packing=True, held_out=0.1, seed=3).fingerprint() == plain.fingerprint()


def test_the_held_out_share(tokenizer: PreTrainedTokenizerFast) -> None:
    def build(held_out: float, seed: int) -> Dataset:
        return built(TEXTS, tokenizer, 16, packing=True, held_out=held_out, seed=seed)

    first, again, other = build(0.1, 3), build(0.1, 3), build(0.1, 4)
    count = len(first.tokens)
    assert len(first.held_out) == round(0.1 * count) > 1
    assert sorted([*first.train, *first.held_out]) == list(range(count))
    assert (first.fingerprint(), first.held_out.tolist()) == (again.fingerprint(), again.held_out.tolist())
    assert first.fingerprint() != other.fingerprint()
    assert len(build(1e-6, 3).held_out) == 1
    assert len(build(0.999, 3).train) == 1

    batches = list(first.held_out_batches(2, limit=3))
    assert [batch.tokens.shape for batch in batches] == [(2, 16), (1, 16)]
    assert np.concatenate([batch.tokens for batch in batches]).tolist() == first.tokens[first.held_out[:3]].tolist()


def test_unigram_entropy() -> None:
    targets = np.array([[1, 1, 7, IGNORED], [7, 9, 9, IGNORED], [5, 5, 5, 5]], dtype=np.int32)
    rows = np.arange(3)
    assert Dataset(targets, targets, train=rows[:2], held_out=rows[2:], seed=0).unigram_entropy() == pytest.approx(
        np.log(3)
    )
    assert Dataset(targets, targets, train=rows[2:], held_out=rows[:2], seed=0).unigram_entropy() == 0.0


def test_from_files_to_batches(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for number, text in enumerate(TEXTS):
        (corpus / f"{number:03}.py").write_text(text, encoding="utf-8")
    found: Corpus = Corpus([f"{corpus}/*.py"])
    from_files = built(found, tokenizer, 16, packing=True, held_out=0.1, seed=3)
    assert from_files.fingerprint() == built(TEXTS, tokenizer, 16, True, 0.1, 3).fingerprint()
    batch = from_files.batch(step=2, global_batch=5)
    chosen = from_files.train[batch_indices(2, 5, len(from_files.train), 3)]
    assert batch.tokens.tolist() == from_files.tokens[chosen].tolist()
    assert batch.targets.tolist() == from_files.targets[chosen].tolist()
    assert batch.target_tokens == 5 * 16


# Order


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**63 - 1))
def test_every_epoch_holds_every_sample_once(samples: int, global_batch: int, seed: int) -> None:
    epochs = 3
    steps = -(-samples * epochs // global_batch)
    stream = np.concatenate([batch_indices(step, global_batch, samples, seed) for step in range(steps)])
    assert stream.dtype == np.int64 and len(stream) == steps * global_batch
    for epoch in range(epochs):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**63 - 1))
def test_an_epoch_may_end_with_a_smaller_batch(samples: int, global_batch: int, seed: int) -> None:
    steps = int(steps_per_epoch(samples, global_batch, True))
    batches = [batch_indices(step, global_batch, samples, seed, smaller=True) for step in range(2 * steps)]
    assert {len(batch) for batch in batches[: steps - 1]} <= {global_batch}
    assert len(batches[steps - 1]) == len(batches[-1])
    for epoch in range(2):
        assert sorted(np.concatenate(batches[epoch * steps : (epoch + 1) * steps])) == list(range(samples))
    same = np.concatenate([batch_indices(step, global_batch, samples, seed) for step in range(steps)])[:samples]
    assert np.concatenate(batches[:steps]).tolist() == same.tolist()


def test_the_order_is_frozen() -> None:
    """These numbers are part of every checkpoint: a change here changes what a resumed run trains on."""
    assert [batch_indices(step, 3, 5, 0).tolist() for step in range(4)] == [[0, 2, 1], [4, 3, 3], [2, 4, 1], [0, 2, 1]]
    assert batch_indices(10**9, 3, 5, 2**63 - 1).tolist() == [3, 2, 4]
    orders = {tuple(batch_indices(step, 50, 50, seed).tolist()) for step in range(4) for seed in range(4)}
    assert len(orders) == 16, "epochs and seeds differ"


@pytest.mark.parametrize(("last_learnt", "length"), [(0, 8), (7, 8), (8, 16), (18, 19), (None, 8)])
def test_trimmed_batches_lose_nothing_that_is_learnt(last_learnt: int | None, length: int) -> None:
    """Sequences of 19 tokens; row 1 learns up to ``last_learnt``, row 0 its first token only (or nothing)."""
    tokens = np.arange(38, dtype=np.int32).reshape(2, 19)
    targets = np.full((2, 19), IGNORED, np.int32)
    if last_learnt is not None:
        targets[0, 0] = targets[1, last_learnt] = 5
    trimmed = Batch(tokens, targets, int((targets != IGNORED).sum())).trimmed()
    assert trimmed.tokens.shape == trimmed.targets.shape == (2, length)
    assert np.array_equal(trimmed.tokens, tokens[:, :length])
    assert (trimmed.targets != IGNORED).sum() == trimmed.target_tokens == (targets != IGNORED).sum()


TOKENIZER_FAULTS: dict[str, Any] = {
    "merge-out-of-vocabulary": {"model": {"merges": [["zzz", "qqq"]]}},
    "panic-while-loading": {"model": {"continuing_subword_prefix": "##########", "merges": [["a", "b"]]}},
    "panic-while-encoding": {
        "post_processor": {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [], "special_tokens": {},
        }
    },
    "unknown-token-missing": {"model": {"type": "WordLevel", "unk_token": "none", "vocab": {"a": 0}}},
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZER_FAULTS)
def test_a_tokenizer_that_makes_its_library_fail_is_refused(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Rust's panics are no Exception: they pass by whatever catches those."""
    save_tokenizer(tokenizer, tmp_path)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    for key, change in TOKENIZER_FAULTS[name].items():
        values[key] = change if "type" in change else {**values[key], **change}
    path.write_text(json.dumps(values))
    with refuses("tokenizer.damaged"):
        encoded(own_tokens_only(load_tokenizer(tmp_path)), ["ab \u00fc"], special=True)


def test_a_document_begins_as_the_tokenizer_begins_texts() -> None:
    """Once, with the tokenizer's own token (Llama's, Gemma's)."""
    tokenizer, texts = train_bpe(["Grass is green", "Say hello"], 300), ["Grass is", "<s>Say hello"]
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    bare = built(texts[:1], tokenizer, 2, True, 0.0, 0)
    assert begin not in bare.tokens
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", begin)]
    )
    grass, hello = tokenizer("Grass is")["input_ids"], tokenizer("Say hello")["input_ids"]
    assert grass[0] == hello[0] == begin and begin not in [*grass[1:], *hello[1:]]
    packed = built(texts, tokenizer, len(grass) + len(hello) + 1, True, 0.0, 0)
    assert packed.tokens.tolist() == [[*grass, end, *hello]]
    padded = built(texts, tokenizer, 20, False, 0.0, 0)
    for row, ids in zip(padded.tokens.tolist(), (grass, hello), strict=True):
        assert row[: len(ids)] == ids
    assert [int((row != IGNORED).sum()) for row in padded.targets] == [len(grass), len(hello)]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (gzip.compress(b"text", mtime=0), "gzip"),
        ("text".encode("utf-16"), "UTF-16"),
        (b"%PDF\n\xff", "PDF"),
        (b"a\xff", "byte 1"),
    ],
)
def test_a_file_that_is_no_text_is_named_by_what_it_is(tmp_path: Path, content: bytes, shown: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with refuses("text.no_text", "a.txt: ", shown):
        whole(Corpus([f"{tmp_path}/*"]))
