"""Token ids are kept for later starts: what makes two starts alike, what does not, and what becomes of the folder."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hetero_mpi.cli import main
from hetero_mpi.data import text_sequences, token_cache
from hetero_mpi.data.dataset import mapped, parts_of_rows
from hetero_mpi.data.token_cache import cached_or_build, file_marks
from hetero_mpi.job.load import load_job
from hetero_mpi.training.setup.data_setup import Material, prepare
from hetero_mpi.util.disk import cache_folder
from tests.support.errors import refuses

MODEL = """
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[tokenizer]
train_vocab_size = 300
"""
TEXT = MODEL + '[data]\ntext = ["*.txt"]\nsequence_length = 16\n'
RECORDS = MODEL + '[data]\nrecords = ["*.jsonl"]\nsequence_length = 48\nskip_bad = 1\n'


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    (tmp_path / "b.txt").write_text("seven grey birds follow the boat\n" * 50)
    lines = [json.dumps({"instruction": f"colour {n}", "output": f"green {n}", "note": 1}) for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "broken"]))
    return tmp_path


def prepared(directory: Path, text: str, *overrides: str) -> tuple[Material, bool]:
    """(the data, were they kept?)."""
    file = directory / "job.toml"
    file.write_text(text)
    material = prepare(load_job(file, overrides))
    notes = [note for note in material.notes if "earlier start" not in note]
    return material, len(notes) < len(material.notes)


@pytest.mark.parametrize("text", [TEXT, RECORDS, TEXT + "packing = false\n", TEXT + 'evaluation = ["b.txt"]\n'])
def test_a_second_start_has_the_same_data_and_reads_nothing(
    job: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, there = prepared(job, text, "data.cache=false")
    assert not there and not cache_folder("tokens").exists()
    first, there = prepared(job, text)
    assert not there
    for name in ("train_bpe", "build_sequences", "build_record_sequences", "read_records"):
        monkeypatch.setattr(f"hetero_mpi.training.setup.data_setup.{name}", None)
    second, there = prepared(job, text)
    assert there
    for material in (first, second):
        assert material.dataset.fingerprint() == plain.dataset.fingerprint()
        assert material.skipped_records == plain.skipped_records
        ours, theirs = material.dataset.batch(3, 4), plain.dataset.batch(3, 4)
        assert np.array_equal(ours.tokens, theirs.tokens) and np.array_equal(ours.targets, theirs.targets)
        assert material.dataset.unigram_entropy() == plain.dataset.unigram_entropy()
        assert material.tokenizer is not None and plain.tokenizer is not None
        assert material.tokenizer.chat_template == plain.tokenizer.chat_template
        notes = tuple(note for note in material.notes if "earlier start" not in note)
        assert notes == plain.notes
    assert isinstance(second.dataset.tokens, np.memmap), "the ids are not in memory"


def test_what_changes_the_tokens_is_another_entry(job: Path) -> None:
    prepared(job, TEXT)
    for override in ("data.sequence_length=8", "data.evaluation_fraction=0.2", "train.seed=3", "data.documents=line",
                     "data.packing=false", "data.max_bytes=900", "tokenizer.train_vocab_size=290"):  # fmt: skip
        assert not prepared(job, TEXT, override)[1], override
    (job / "b.txt").write_text("seven grey birds follow the goat\n" * 50)
    assert not prepared(job, TEXT)[1], "another text of the same size"
    os.utime(job / "a.txt", (1, 1))
    assert not prepared(job, TEXT)[1], "the time says that it was changed"
    assert prepared(job, TEXT, "train.steps=7", "train.learning_rate=0.1")[1]
    prepared(job, RECORDS)
    for override in ("data.train_on_prompt=true", "data.packing=false", "data.isolate=false", "data.skip_bad=2"):
        assert not prepared(job, RECORDS, override)[1], override


def test_large_files_are_told_apart_by_samples(tmp_path: Path) -> None:
    path, size = tmp_path / "large", 40 * 65_536
    path.write_bytes(b"a" * size)
    stamp = path.stat()
    (before,) = file_marks([path])
    with path.open("r+b") as file:
        file.seek(size - 10)
        file.write(b"b")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    (after,) = file_marks([path])
    assert before[:3] == after[:3] and before[3] != after[3], "its end is always among them"


def entry(key: object, fill: Callable[[Path], object]) -> tuple[str, bool]:
    """(the text of the file "x" of an entry, was it there?)."""
    return cached_or_build([key], fill, lambda folder, _: (folder / "x").read_text(), print)


def test_runs_at_once_and_what_dead_ones_left(job: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "x").write_text("mine")

    def fill_late(folder: Path) -> None:
        fill(folder)
        assert entry("k", fill) == ("mine", False)  # another run makes the same entry meanwhile, and is first

    assert entry("k", fill_late) == ("mine", False)
    assert entry("k", fill) == ("mine", True)
    left = cache_folder("tokens") / ".dead.abcd"
    left.mkdir()
    os.utime(left, (1, 1))
    assert entry("k", fill)[1] and not left.exists()
    with pytest.raises(ZeroDivisionError):
        entry("bad", lambda folder: print(1 // 0))
    assert len(list(cache_folder("tokens").iterdir())) == 1, "nothing of a failed one"


def test_the_oldest_go_first(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(folder: Path) -> None:
        (folder / "x").write_text("0" * 1000)

    for number in range(4):
        entry(number, fill)
        newest = max(cache_folder("tokens").iterdir(), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (time.time() - 100 + number,) * 2)
    assert entry(0, fill)[1]  # and is the newest now
    monkeypatch.setattr(token_cache, "MOST_BYTES", 2500)
    entry(9, fill)
    assert [entry(number, fill)[1] for number in (0, 9, 3, 2, 1)] == [True, True, False, False, False]


def test_a_cache_that_cannot_be_written_is_no_reason_to_end(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(job / "file"))
    assert not prepared(job, TEXT)[1]


@pytest.mark.parametrize("cache", ["true", "false"])
def test_a_full_disk_is_not_the_users_file_that_cannot_be_read(
    job: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def unreadable(*_: object) -> Iterator[str]:
        yield "the quick brown fox"
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, refuses("file.unwritable", "No space left", "XDG_CACHE_HOME"):
        patch.setattr(np, "save", full)
        prepared(job, TEXT, f"data.cache={cache}")
    with monkeypatch.context() as patch, refuses("text.no_text"):
        patch.setattr(text_sequences, "_texts", unreadable)
        patch.setattr(text_sequences, "_is_text", lambda *_: True)
        prepared(job, TEXT, f"data.cache={cache}")


def test_the_command_shows_and_empties_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared(job, TEXT)
    assert main(["cache"]) == 0
    assert ": 2, " in capsys.readouterr().out
    assert main(["cache", "--empty"]) == 0
    assert not cache_folder("tokens").exists() and not prepared(job, TEXT)[1]


def test_parts_of_a_mapped_array_are_the_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_mpi.data.dataset._PART_BYTES", 100)
    values = np.arange(300, dtype=np.int32).reshape(60, 5)
    np.save(tmp_path / "a.npy", values)
    parts = list(parts_of_rows(mapped(tmp_path / "a.npy")))
    assert [first for first, _ in parts] == list(range(0, 60, 5))
    assert np.array_equal(np.concatenate([part for _, part in parts]), values)
    assert mapped(tmp_path / "a.npy").flags.writeable is False


@pytest.mark.parametrize(
    ("line", "nearest"),
    [("hiden_size = 16", "hidden_size"), ("layers = 1", "num_hidden_layers"), ("rope = 1", "llama")],
)
def test_a_key_that_the_models_family_does_not_know_is_refused(job: Path, line: str, nearest: str) -> None:
    with refuses("model.configuration_key", line.split()[0], nearest):
        prepared(job, TEXT.replace("hidden_size = 16", f"hidden_size = 16\n{line}", 1))
