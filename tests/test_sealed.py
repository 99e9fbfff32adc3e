"""Caches that anything has happened to: what is not as it was written is made again, with one sentence, and is the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from hetero_mpi.data.dataset import SequenceSettings
from hetero_mpi.data.text_sequences import build_sequences
from hetero_mpi.data.token_cache import cached_or_build, read_dataset, write_dataset
from hetero_mpi.data.tokenizer import train_bpe
from hetero_mpi.interop import trainer_inputs
from hetero_mpi.job.load import load_job
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.planning.types.codec import encode
from hetero_mpi.profiling import benchmark_spec
from hetero_mpi.state.file_supply import ShardCache
from hetero_mpi.training.setup import data_setup
from hetero_mpi.util.disk import cache_folder
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.sealed import load_sealed, store_folder, store_value
from tests.profiling.test_profiling import kept_times
from tests.support.damages import DAMAGES

JOB = """
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[tokenizer]
train_vocab_size = 300
[data]
sequence_length = 16
"""
ROWS = [{"text": f"one two {number}"} for number in range(9)]


@dataclass
class Kept:
    """A cache: how it is filled and read, and what of it is compared."""

    place: Path
    """Its folder."""
    use: Callable[[Callable[[str], object]], object]
    """Read it, or make it again; the function hears what was damaged."""


def token_ids(directory: Path, monkeypatch: pytest.MonkeyPatch, data: str) -> Kept:
    (directory / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    lines = [json.dumps({"instruction": f"colour {n}", "output": f"green {n}"}) for n in range(40)]
    (directory / "a.jsonl").write_text("\n".join(lines))
    (directory / "job.toml").write_text(JOB + data)

    def use(tell: Callable[[str], object]) -> object:
        monkeypatch.setattr(data_setup, "say", tell)
        found = data_setup.prepare(load_job(directory / "job.toml"))
        assert found.tokenizer is not None
        batch = found.dataset.batch(1, 4)
        return batch.tokens.tolist(), batch.targets.tolist(), found.tokenizer.get_vocab(), found.dataset.fingerprint()

    return Kept(cache_folder("tokens"), use)


def sequences(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    texts = ["one two three four"] * 30
    tokenizer = train_bpe(texts, 270)

    def fill(folder: Path) -> object:
        return write_dataset(
            folder, build_sequences(texts, tokenizer, SequenceSettings(8, True, 0.1, 0), None, folder), {}
        )

    def use(tell: Callable[[str], object]) -> object:
        (dataset, _), _ = cached_or_build(["key"], fill, partial(read_dataset, ids=270), tell)
        return dataset.tokens.tolist(), dataset.targets.tolist(), dataset.train.tolist(), dataset.held_out.tolist()

    return Kept(cache_folder("tokens"), use)


def text(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return token_ids(directory, monkeypatch, 'text = ["*.txt"]')


def records(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return token_ids(directory, monkeypatch, 'records = ["*.jsonl"]')


def device_times(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    def use(tell: Callable[[str], object]) -> object:
        if (found := benchmark_spec.load_times("key", tell)) is None:
            benchmark_spec.store_cached("key", encode(found := kept_times(), infinity_as_text=True))
        return found

    return Kept(cache_folder("profiles"), use)


def shards(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    tensors = {"a": torch.arange(40.0), "b": torch.arange(5).to(torch.bfloat16)}
    (directory / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, directory / "model.safetensors")
    contents = ModelFiles(directory).contents()

    def use(tell: Callable[[str], object]) -> object:
        cache = ShardCache(directory / "cache", contents.identity)
        if not cache.holds(3, contents.tensors):
            cache.add(3, tensors)
            assert cache.holds(3, contents.tensors)
        for remark in cache.remarks:
            tell(remark)
        return [cache.read(3, ["a", "b"])[name].tolist() for name in tensors]

    return Kept(directory / "cache", use)


def trainers_rows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    def use(tell: Callable[[str], object]) -> object:
        monkeypatch.setattr(trainer_inputs, "write_line", tell)
        return [json.loads(line) for line in Path(trainer_inputs.rows_file(ROWS)).open()]

    return Kept(cache_folder("datasets"), use)


def trainers_tokenizer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    tokenizer = train_bpe(["one two three"] * 9, 270)

    def use(tell: Callable[[str], object]) -> object:
        monkeypatch.setattr(trainer_inputs, "write_line", tell)
        place = trainer_inputs.tokenizer_directory(tokenizer, "", None)
        return AutoTokenizer.from_pretrained(place).get_vocab()

    return Kept(cache_folder("datasets"), use)


SLOW = [pytest.param(make, marks=pytest.mark.slow, id=make.__name__) for make in (text, records)]
CACHES = [pytest.param(make, id=make.__name__) for make in (sequences, device_times, shards, trainers_rows,
                                                            trainers_tokenizer)]  # fmt: skip


@pytest.mark.parametrize("make", [*CACHES, *SLOW])
def test_what_is_damaged_is_made_again_with_one_sentence(
    make: Callable[..., Kept], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cache, told = make(tmp_path, monkeypatch), list[str]()
    first = cache.use(told.append)
    told.clear()
    assert cache.use(told.append) == first
    always = len(told)
    whole = shutil.copytree(cache.place, tmp_path / "whole")
    files = {path.relative_to(whole) for path in whole.rglob("*") if path.is_file()}
    for place, file in enumerate(sorted(files)):
        for damage in DAMAGES[place % 2 :: 2]:
            shutil.rmtree(cache.place)
            shutil.copytree(whole, cache.place)
            damage(cache.place / file)
            alone = file.parent == Path() and not os.path.lexists(cache.place / file)  # nothing says that it was there
            for sentences in (0 if alone else 1, 0):
                told.clear()
                assert cache.use(told.append) == first, (damage, file)
                assert len(told) == max(always, sentences), (damage, file, told)
            assert {path.relative_to(cache.place) for path in cache.place.rglob("*") if path.is_file()} >= files


@pytest.mark.parametrize("spoil", [
    lambda folder: shutil.rmtree(folder) or folder.write_text(""), lambda folder: shutil.rmtree(folder) or folder.symlink_to("x"),
    lambda folder: (folder / "more").write_text(""), lambda folder: os.mkfifo(folder / "more"),
])  # fmt: skip
def test_a_folder_is_more_than_its_files(spoil: Callable[[Path], object], tmp_path: Path) -> None:
    def fill(folder: Path) -> int:
        (folder / "x").write_text("x")
        return 7

    def read(folder: Path, value: int) -> tuple[str, int]:
        return (folder / "x").read_text(), value

    told: list[str] = []
    for _ in range(2):
        store_folder(tmp_path / "place", fill, "")
    assert load_sealed(tmp_path / "place", read, told.append) == ("x", 7) and not told
    spoil(tmp_path / "place")
    assert load_sealed(tmp_path / "place", read, told.append) is None and len(told) == 1
    assert os.listdir(tmp_path) == []


def test_what_its_reader_refuses_is_made_again_too(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise UserError("test.fault", "of another version")

    told: list[str] = []
    store_value(tmp_path / "value", {"a": [1.5, None, "\ud800"]})
    assert load_sealed(tmp_path / "value", lambda _, value: value, told.append) == {"a": [1.5, None, "\ud800"]}
    assert load_sealed(tmp_path / "value", refuse, told.append) is None
    assert len(told) == 1 and not (tmp_path / "value").exists()


def test_files_are_on_the_disk_before_their_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    rename, fsync = Path.rename, os.fsync
    monkeypatch.setattr(Path, "rename", lambda old, new: steps.append("rename") or rename(old, new))
    monkeypatch.setattr(os, "fsync", lambda file: steps.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    store_folder(tmp_path / "place", lambda folder: (folder / "x").write_text("x"), "")
    written, renamed = steps[: steps.index("rename")], steps[steps.index("rename") + 1 :]
    assert {Path(name).name for name in written[:-1]} == {"x", "seal.json"} and Path(written[-1]).name.startswith(
        ".place"
    )
    assert renamed == [str(tmp_path)]
