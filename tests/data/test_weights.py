"""Several data sets with weights: what an epoch takes from each, in which order, what is held out, and what is refused."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hetero_mpi.data.batch import batch_indices, parts_of
from hetero_mpi.data.dataset import Dataset
from hetero_mpi.data.tokenizer import save_tokenizer, train_bpe
from hetero_mpi.job.load import load_job
from hetero_mpi.training.setup.data_setup import prepare
from tests.support.errors import refuses
from tests.support.jobs import SMALLEST

JOB = (
    SMALLEST
    + '[data]\nrecords = ["a.jsonl", "b.jsonl"]\nsequence_length = 32\npacking = false\nevaluation_fraction = 0.1\n'
)
SIZES = {"a": 20, "b": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    save_tokenizer(train_bpe(["## Task\nSay a b\n\n## Answer\n0123456789"], 300), directory / "tokenizer")
    for name, count in SIZES.items():
        rows = [{"prompt": f"Say {name}", "completion": f"{name} {number}"} for number in range(count)]
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "one.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    (directory / "silent.jsonl").write_text('{"prompt": "a", "completion": ""}')
    (directory / "job.toml").write_text(JOB)
    return directory


def built(folder: Path, *overrides: str) -> Dataset:
    dataset = prepare(load_job(folder / "job.toml", overrides)).dataset
    assert isinstance(dataset, Dataset)
    return dataset


def learnt(dataset: Dataset, first: int, steps: int, batch: int = 8) -> list[bytes]:
    return [row.tobytes() for step in range(first, first + steps) for row in dataset.batch(step, batch).tokens]


def of_a(dataset: Dataset, rows: list[bytes]) -> int:
    """How many of the rows are records of a.jsonl, which come first."""
    ours = {dataset.tokens[number].tobytes() for number in range(SIZES["a"])}
    return sum(row in ours for row in rows)


def test_shares() -> None:
    assert parts_of([20, 60], [3, 1]) == ((20, 60), (60, 20))
    assert parts_of([5, 5, 5], [1, 1, 1]) == ((5, 5), (5, 5), (5, 5))
    assert sum(take for _, take in parts_of([7, 11, 13], [0.2, 0.3, 0.5])) == 31
    assert parts_of([3, 1000], [1000, 1])[1] == (1000, 1)


def test_an_epoch_takes_shares_and_the_next_one_goes_on() -> None:
    parts = parts_of([4, 12], [1, 1])
    epochs = [batch_indices(epoch, 16, 16, 5, parts) for epoch in range(3)]
    for epoch in epochs:
        assert Counter(epoch[epoch < 4].tolist()) == dict.fromkeys(range(4), 2), "repeated twice"
        assert len(set(epoch[epoch >= 4].tolist())) == 8, "cut"
    seen = np.concatenate(epochs)
    assert Counter(seen[seen >= 4].tolist()) == dict.fromkeys(range(4, 16), 2), "24 are twice all 12"
    steps = np.concatenate([batch_indices(step, 5, 16, 5, parts) for step in range(9)])
    assert steps.tolist() == seen[:45].tolist(), "batches are cut out of the epochs"
    assert batch_indices(7, 5, 16, 6, parts).tolist() != batch_indices(7, 5, 16, 5, parts).tolist()


def test_records_are_learnt_by_weight(folder: Path) -> None:
    whole, mixed = built(folder), built(folder, "data.weights=[3, 1]")
    assert len(whole.train) == len(mixed.train) == 72, "an epoch is as long"
    assert len(set(learnt(whole, 0, 9))) == 72 and of_a(whole, learnt(whole, 0, 9)) in range(16, 21)
    assert of_a(mixed, learnt(mixed, 0, 9)) == 54
    assert of_a(mixed, learnt(mixed, 9, 9)) == 54
    assert learnt(mixed, 3, 4) == learnt(built(folder, "data.weights=[0.75, 0.25]"), 3, 4)
    assert "a.jsonl: 54 of the 72" in mixed.notes[-2] and "b.jsonl: 18 of the 72" in mixed.notes[-1]
    (held,) = mixed.held_out_batches(100)
    rows = [row.tobytes() for row in held.tokens]
    assert len(rows) == 8 and of_a(mixed, rows) == 2, "a tenth of each"
    assert not set(rows) & set(learnt(mixed, 0, 100))


def test_other_weights_are_other_data(folder: Path) -> None:
    prints = [built(folder, f"data.weights={weights}").fingerprint() for weights in ("[3, 1]", "[6, 2]", "[2, 1]")]
    assert prints[0] == prints[1] != prints[2]
    assert built(folder).fingerprint() not in prints


def test_weights_beside_evaluation_files(folder: Path) -> None:
    mixed = built(folder, "data.weights=[1, 1]", "data.evaluation=['one.jsonl']", "data.packing=true")
    assert mixed.positions is not None and len(mixed.positions) == len(mixed.tokens)
    assert len(mixed.held_out) == 1 and mixed.held_out[0] == len(mixed.tokens) - 1
    assert sum(take for _, take in mixed.parts) == len(mixed.train) == len(mixed.tokens) - 1


@pytest.mark.parametrize(
    ("overrides", "kind", "shown"),
    [
        *(([f"data.weights={value}"], "job.data.weights", "numbers above 0") for value in (
            "[3, 0]", "[3, -1]", "['a', 'b']", "[nan, 1]", "[]")),
        (["data.weights=[1]"], "job.data.weights", "1 and 2"),
        (["data.weights=[1, 1]", "data.records=['a.jsonl', '!b.jsonl']"], "job.data.weights", "!"),
        (["data.weights=[1]", "data.records=", "data.text=['a.jsonl']"], "job.data.weights", "[1]"),
        (["data.weights=[1, 100000]"], "data.weights", "data.records a.jsonl"),
        (["data.weights=[1, 1]", "data.records=['a.jsonl', 'c*']"], "data.no_files", "data.records c*"),
        (["data.weights=[1, 1]", "data.records=['a.jsonl', 'one.jsonl']"], "data.too_few_sequences", "data.records one.jsonl"),
        (["data.weights=[1, 1]", "data.records=['a.jsonl', 'silent.jsonl']"], "records.nothing_to_learn", "silent.jsonl"),
    ],
)  # fmt: skip
def test_what_is_refused(folder: Path, overrides: list[str], kind: str, shown: str) -> None:
    with refuses(kind, shown):
        built(folder, *overrides)
