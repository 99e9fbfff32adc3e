"""Real runs on records from several files, with weights and bad records: one rank and three, and resumed to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.state.directory import checkpoint_path
from tests.support.equality import assert_same_run
from tests.support.jobs import Outcome, Workshop, once_per_ranks

pytestmark = pytest.mark.slow

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CHATS = [
    {"messages": [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": "no", "train": False},
                  {"role": "user", "content": "why"}, {"role": "assistant", "content": f"so {number}"}]}
    for number in range(9)
]  # fmt: skip
PAIRS = [{"prompt": f"grass {number}", "completion": f"green {number}"} for number in range(12)]
STEPS, BATCH = 6, 4
RANKS = pytest.mark.parametrize("ranks", [pytest.param(1, id="np1"), pytest.param(3, id="np3", marks=pytest.mark.long)])


class Runs(Workshop):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        lines = [json.dumps(one) for one in CHATS]
        for name, some in (("good", lines), ("bad", [*lines[:4], '{"messages": 3}', *lines[4:]]), ("pairs", PAIRS)):
            text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in some)
            (directory / f"{name}.jsonl").write_text(text)
        pq.write_table(pa.Table.from_pylist(PAIRS), directory / "pairs.parquet", row_group_size=5)
        values = self.values(self.model(blocks=2, max_position_embeddings=96))
        values["data"] = {
            "template": "plain",
            "sequence_length": 96,
            "packing": False,
            "evaluation_fraction": 0.1,
            "weights": [1, 2],
        }
        values["train"] |= {"steps": STEPS, "global_batch": BATCH}
        self.entries = {
            "lines": self.made("lines", values, "good.jsonl", "pairs.jsonl"),
            "table": self.made("table", values, "bad.jsonl", "pairs.parquet", skip_bad=1),
            "large": self.made("large", values, "good.jsonl", "pairs.jsonl", batch=40),
        }
        middle = checkpoint_path(self.run("table") / "checkpoints", 2)
        self.later = {"again": {**self.entries["table"], "run_dir": self.run("again"), "resume": middle}}
        other = self.made("other", values, "good.jsonl", "pairs.jsonl", weights=[2, 1])
        self.later["other"] = {**other, "resume": middle}

    def made(self, name: str, values: dict[str, Any], *files: str, batch: int = BATCH, **data: Any) -> dict[str, Any]:
        records = [str(self.directory / file) for file in files]
        return self.entry(name, values, data={"records": records, **data}, train={"global_batch": batch})

    def run(self, name: str) -> Path:
        return self.directory / name


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def run(directory: Path, ranks: int) -> tuple[Runs, dict[str, Outcome]]:
        runs = Runs(directory)
        return runs, runs.finish_entries(ranks, runs.entries) | runs.run_entries(ranks, runs.later)

    return once_per_ranks(tmp_path_factory, run)


@RANKS
def test_the_same_records_give_the_same_bits(on: Any, ranks: int) -> None:
    runs, outcomes = on(ranks)
    assert outcomes["again"].raised == ("",) * ranks, outcomes["again"].texts
    for name in ("table", "again"):
        assert_same_run(runs.run(name), runs.run("lines"))


@RANKS
def test_what_is_said_of_the_data(on: Any, ranks: int) -> None:
    runs, outcomes = on(ranks)
    printed = outcomes["table"].printed
    assert f"{runs.directory}/bad.jsonl, line 5: 'messages' must be a list of messages; it is a number" in printed
    assert "1 bad records were skipped (data.skip_bad)" in printed
    for name, skipped in (("table", 1), ("again", 1), ("lines", 0)):
        starts = json.loads((runs.run(name) / "run.json").read_text())["starts"]
        assert [start["skipped_records"] for start in starts] == [skipped]
    assert (
        "the batch is larger than the training data: each sequence occurs in every step 2.11 times"
        in outcomes["large"].printed
    )
    assert "larger than the training data" not in printed
    assert outcomes["other"].codes == (2,) * ranks and "different data" in outcomes["other"].texts[0]
