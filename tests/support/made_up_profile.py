"""A profile of a job that nobody measured: for runs by a plan that is given, or where any plan will do.

Measuring small models takes longer than training them. The model's cost is its real one but for the bytes of activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetero_mpi.job.load import load_job
from hetero_mpi.model.adapter_files import with_patterns_of
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.tuning import tuning_of
from hetero_mpi.planning.types.profile import Curve, LayerTimes
from hetero_mpi.planning.types.toml_files import save_profile
from tests.support.planning_samples import make_profile

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
