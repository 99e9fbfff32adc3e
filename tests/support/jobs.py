"""Small training jobs for tests: a made-up corpus, a tokenizer, random models, job files made of a few changes, and profiles that
nobody measured, for runs by a plan that is given: measuring small models takes longer than training them.

``run_entries`` runs many jobs on ranks that stay (programs/train_outcomes.py) and gives back how each ended on every rank.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tomli_w

from hetero_mpi.job.load import load_job
from hetero_mpi.model.adapters.adapter_files import with_patterns_of
from hetero_mpi.model.adapters.adapter_tuning import tuning_of
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.planning.types.profile import Curve, LayerTimes
from hetero_mpi.planning.types.toml_files import save_profile
from hetero_mpi.state.directory import SHARDS_NAME
from tests.support import training_cases
from tests.support.mpi import run_mpi
from tests.support.planning_samples import make_profile
from tests.support.plans import GLOBAL_BATCH, pipeline, write_plan
from tests.support.rank_pool import run_pooled
from tests.support.training_cases import SEQUENCE, Case

SMALLEST = """\
[model.config]
model_type = "llama"
hidden_size = 8
intermediate_size = 8
num_hidden_layers = 1
num_attention_heads = 1
max_position_embeddings = 64
[tokenizer]
path = "tokenizer"
"""
"""The beginning of a job whose data are what is tested: a model that is hardly one, and a tokenizer beside the job."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended: per rank, what was raised ("": nothing), its text and the exit code; what rank 0 printed."""

    raised: tuple[str, ...]
    texts: tuple[str, ...]
    codes: tuple[int, ...]
    printed: str
    printed_elsewhere: str
    """By all ranks but 0: nothing, if all is well."""


class Workshop:
    """A directory with what jobs need. Models are Llama with hidden size 32.

    ``through``: arguments of Python before the program that ``run_entries`` then starts on ranks of its own.
    """

    def __init__(self, directory: Path, through: Sequence[str] = ()) -> None:
        self.directory, self.through = directory, through
        self.printed_errors = ""
        """On stderr by the ranks of the latest ``run_entries``."""
        self.text = training_cases.corpus(directory)
        self.tokenizer = training_cases.tokenizer_directory(directory, self.text)

    def model(self, name: str = "llama", blocks: int = 2, tied: bool = False, **config: Any) -> Path:
        """A model directory with random weights; ``config`` changes keys of its config.json beforehand."""
        case = _Sized(name, "llama", tied, 0.0, True, 1, "even", blocks=blocks, changes=tuple(config.items()))
        return training_cases.model_directory(self.directory, case)

    def values(self, model: Path | None) -> dict[str, Any]:
        """The tables of a job of 4 steps on ``model`` (None: fill [model] in yourself)."""
        return {
            "model": {"path": str(model)} if model is not None else {},
            "tokenizer": {"path": str(self.tokenizer)},
            "data": {
                "text": [str(self.text)],
                "documents": "line",
                "sequence_length": SEQUENCE,
                "evaluation_fraction": 0.1,
            },
            "train": {
                "steps": 4,
                "global_batch": GLOBAL_BATCH,
                "micro_batch": 1,
                "learning_rate": 3e-3,
                "schedule": "constant",  # a longer run then begins as a shorter one
                "seed": 7,
            },
            "checkpoint": {"every": 1, "keep": 100},
            "cluster": {"threads": 1},
            # Runs are compared bit by bit, and a noisy profile may prefer another number; busy machines change their speed.
            "plan": {"pipelines": 1, "rebalance": False},
            "profile": {"repeats": 1, "largest_message_bytes": 65536},
            "report": {"write": False},  # pictures of some hundred runs would take minutes
        }

    def job(self, name: str, values: dict[str, Any], **tables: dict[str, Any]) -> Path:
        """Write ``NAME.toml``: ``values`` with the keys of ``tables`` put over them."""
        merged = {table: {**values.get(table, {}), **tables.get(table, {})} for table in {**values, **tables}}
        path = self.directory / f"{name}.toml"
        path.write_text(tomli_w.dumps(merged))
        return path

    def plan(self, name: str, ranks: int, rows: int, length: int, **stage: Any) -> Path:
        """Write ``NAME.plan.toml``: a model of two blocks on one rank, or on three; ``stage``: further fields of each stage."""
        made = pipeline(range(ranks), {1: (0, 4), 3: (0, 1, 3, 4)}[ranks], 2, rows, **stage)
        return write_plan(self.directory / f"{name}.plan.toml", made, length=length)

    def entry(
        self, name: str, values: dict[str, Any], options: dict[str, Any] | None = None, **tables: Any
    ) -> dict[str, Any]:
        """An entry for ``run_entries``: a job in a run directory of its name; ``options``: further keys of the entry."""
        return {"job": self.job(name, values, **tables), "run_dir": self.directory / name, **(options or {})}

    def finish_entries(
        self, ranks: int, entries: dict[str, dict[str, Any]], timeout_s: float = 180
    ) -> dict[str, Outcome]:
        """As ``run_entries``, of jobs that all end well."""
        outcomes = self.run_entries(ranks, entries, timeout_s)
        failed = {name: outcome.texts for name, outcome in outcomes.items() if set(outcome.codes) != {0}}
        assert not failed, failed
        return outcomes

    def run_entries(
        self, ranks: int, entries: dict[str, dict[str, Any]], timeout_s: float = 180, own_environment: bool = False
    ) -> dict[str, Outcome]:
        """Run jobs one after the other on so many ranks: name -> how it ended. Paths may be ``Path``. ``own_environment``: on ranks
        that are started for it, with this process's environment of now."""
        listed, results = self.directory / f"np{ranks}.json", self.directory / f"np{ranks}-outcomes.json"
        listed.write_text(json.dumps(list(entries.values()), default=str))
        files = [str(listed), str(results)]
        if self.through or own_environment:
            result = run_mpi(ranks, [*self.through, "tests/programs/train_outcomes.py", *files], timeout_s)
        else:
            result = run_pooled(ranks, "train_outcomes", files, timeout_s)
        self.printed_errors = result.stderr
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        return {
            name: Outcome(
                raised=tuple(rank["raised"] for rank in ranks_of_entry),
                texts=tuple(rank["text"] for rank in ranks_of_entry),
                codes=tuple(rank["code"] for rank in ranks_of_entry),
                printed=ranks_of_entry[0]["printed"],
                printed_elsewhere="".join(rank["printed"] for rank in ranks_of_entry[1:]),
            )
            for name, ranks_of_entry in zip(entries, json.loads(results.read_text()), strict=True)
        }


@dataclass(frozen=True)
class _Sized(Case):
    """A case of the equality tests with another number of blocks and other changes of its configuration."""

    blocks: int = 2
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def config(self) -> dict[str, object]:
        return {**super().config, "num_hidden_layers": self.blocks, **dict(self.changes)}


T = TypeVar("T")


def once_per_ranks(factory: pytest.TempPathFactory, make: Callable[[Path, int], T]) -> Callable[[int], T]:
    """Number of ranks -> what ``make`` gives for it in a directory of its own, made when it is first asked for."""
    return functools.cache(lambda ranks: make(factory.mktemp(f"np{ranks}"), ranks))


def newest_copy_step(run_dir: Path) -> int:
    """The step of the newest copy of a rank's part of the state on this host; 0: there is none."""
    names = (path.name for path in run_dir.glob(f"{SHARDS_NAME}/rank-*/step-*.h5"))
    return max((int(name[5:13]) for name in names), default=0)


ACTIVATION_BYTES = 1000.0
"""Per token of every layer."""


def write_profile(path: Path, job: Path, ranks: int, changes: Sequence[str] = ()) -> Path:
    """Write the profile of a job on a model directory, with ``changes`` of its keys: ranks of one host and alike, each layer takes
    1 ms for a sequence."""
    loaded = load_job(job, changes)
    length, dtype = loaded.job.data.sequence_length, loaded.job.train.dtype
    dtype = "fp32" if dtype == "auto" else dtype  # of ranks on processors
    chain = TransformersChain(read_config(loaded.resolve(loaded.job.model.path) / "config.json"))
    job, adapter = loaded.job, loaded.job.adapter
    if adapter.path is not None:
        job = job.model_copy(update={"adapter": with_patterns_of(loaded.resolve(adapter.path), adapter)})
    cost = model_cost(chain, tuning_of(job, chain), dtype, length, dict.fromkeys(chain.kinds, ACTIVATION_BYTES))
    profile = make_profile((1.0,) * ranks, cost, 1 << 30, 1e-4, 1e9)
    curve = Curve((length,), (1e-3,))
    parts = {"input_s": curve, "weight_s": curve} if loaded.job.adapter.method == "none" else {}  # as it is measured
    times = dict.fromkeys(chain.kinds, LayerTimes(forward_s=curve, backward_s=curve, **parts))
    devices = tuple(replace(one, host="host", layers=times, dtypes=(dtype,)) for one in profile.devices)
    links = tuple(replace(link, same_host=True) for link in profile.links)
    save_profile(replace(profile, devices=devices, links=links), path)
    return path
