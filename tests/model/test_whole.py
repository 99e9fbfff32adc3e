"""Writers of results that are killed at any moment: what is left is the former result or the new one, never something between."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hetero_mpi.model.adapters.adapter_files import adapter_directory, write_adapter
from hetero_mpi.model.adapters.adapter_tuning import tuning_of
from tests.model.test_adapter import chain, job
from tests.model.test_directory import build, export
from tests.support.errors import refuses

KILLS = 25
RANKS = (4, 8)


def write_adapter_of_rank(directory: Path, rank: int) -> None:
    """An adapter whose every file says the rank."""
    tuning = tuning_of(job(rank=rank), chain())
    assert tuning.adapter is not None
    state = {name: torch.zeros(spec.shape) for name, spec in tuning.trainable.items()}
    with adapter_directory(directory) as whole:
        write_adapter(whole.path, tuning, state, None)
        (whole.path / "tokenizer.json").write_text(str(rank))


def rank_of_adapter(directory: Path) -> int:
    """The rank that all files of an adapter directory agree on."""
    config = json.loads((directory / "adapter_config.json").read_text())
    weights = load_file(directory / "adapter_model.safetensors")
    said = {config["r"], int((directory / "tokenizer.json").read_text())}
    said |= {tensor.shape[0] for name, tensor in weights.items() if "lora_A" in name}
    assert len(said) == 1, f"files of different adapters: {said}"
    return int(said.pop())


def write_model(directory: Path, number: int) -> None:
    model = build("llama")
    for tensor in model.state_dict().values():
        tensor.fill_(number)
    export(model, directory, shard_bytes=20_000)


def number_of_model(directory: Path) -> int:
    (number,) = {
        int(value) for t in AutoModelForCausalLM.from_pretrained(directory).parameters() for value in t.unique()
    }
    return number


def test_who_may_read_the_files_is_left_to_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_adapter_of_rank(tmp_path / "adapter", RANKS[0])
        write_model(tmp_path / "model", 1)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5 and {path.stat().st_mode & 0o777 for path in files} == {0o640}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "read"),
    [(write_adapter_of_rank, rank_of_adapter), (write_model, number_of_model)],
    ids=["adapter", "model"],
)
def test_writers_killed_at_random_moments_leave_the_former_result_or_the_new_one(
    write: Callable[[Path, int], None], read: Callable[[Path], int], tmp_path: Path
) -> None:
    directory, dice, fork = tmp_path / "result", random.Random(1), multiprocessing.get_context("fork")
    begin = time.monotonic()
    for number in RANKS:
        write(directory, number)
    wanted, write_s, caught = RANKS[0], (time.monotonic() - begin) / 2, 0
    for _ in range(KILLS):
        before = read(directory)
        writer = fork.Process(target=write, args=(directory, wanted))
        writer.start()
        while writer.is_alive() and not list(tmp_path.glob(".result.tmp-*")):
            time.sleep(0.0005)
        time.sleep(dice.random() * write_s)
        writer.kill()
        writer.join()
        caught += writer.exitcode != 0 and bool(list(tmp_path.glob(".result.tmp-*")))
        if not directory.exists():  # between the two renames; the next writer brings it back
            (tmp_path / ".result.former").rename(directory)
        assert read(directory) in (before, wanted)
        wanted = next(number for number in RANKS if number != read(directory))
    print(f"killed {caught} of {KILLS} times while the directory was being written")
    assert caught > 0
    write(directory, wanted)
    assert read(directory) == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["result"], "leftovers of the killed are removed"


def test_something_else_is_not_replaced_by_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with refuses("directory.not_replaceable"):
        adapter_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
