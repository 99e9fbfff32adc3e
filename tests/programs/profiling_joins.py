"""A cluster is measured, and again after a rank has joined it on a host of its own, and once more in spite of what is known.

Three ranks of one machine pass for ranks of three hosts. Prints who measured each time, and what the profiles say of it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.job.schema import ProfileTable
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.eager_imports import eager_imports
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import save_profile

with eager_imports():  # as a rank of ``profile`` does
    import torch
    from transformers import AutoConfig

    from hetero_mpi.device.backend import Backend, Memory
    from hetero_mpi.model.transformers.chain import TransformersChain
    from hetero_mpi.model.tuning import full_training
    from hetero_mpi.profiling import cluster, host_profiles
    from hetero_mpi.profiling.benchmark_spec import BenchmarkSpec, DeviceTimes
    from hetero_mpi.profiling.device import DeviceBenchmark

SETTINGS = ProfileTable(repeats=1, largest_message_bytes=4096)
CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def main(world: World) -> int:
    torch.set_num_threads(1)
    chain = TransformersChain(AutoConfig.for_model("llama", **CONFIG))
    subject = BenchmarkSpec(chain, full_training(chain), TrainTable(dtype="fp32", steps=1), 8, (1,), 1.0, 1, None, True)
    measured: list[str] = []
    lines: list[Any] = []
    run = DeviceBenchmark.run

    def noted(self: DeviceBenchmark, *arguments: Any, **keywords: Any) -> DeviceTimes:
        measured.append("together")
        return run(self, *arguments, **keywords)

    DeviceBenchmark.run = noted  # type: ignore[method-assign]

    def profiled(
        hosts: tuple[str, ...], fresh: bool = False, subject: BenchmarkSpec = subject
    ) -> ClusterProfile | None:
        measured.clear()
        said: list[str] = []
        members = world.subset(range(len(hosts)))
        profile = None
        if members is not None:
            members = replace(members, hosts=hosts)
            with MpiTransport(members.comm) as transport:
                profile = cluster.profile_cluster(members, transport, Backend(), subject, SETTINGS, said.append, fresh)
        notes = list(profile.notes) if profile else []
        disks = [one.disk_bytes_per_s for one in profile.hosts] if profile else []
        lines.append({"measured": world.all_gather_json(measured), "notes": notes, "said": said, "disks": disks})
        return profile

    profiled(("a", "b"))
    profiled(("a", "b", "c"))
    profile = profiled(("a", "b", "b"))
    larger = replace(subject, stream_folder=Path(sys.argv[1]).parent / "to be made")
    with mock.patch.object(host_profiles, "host_memory", lambda: Memory(1000, "less than the model")):
        profiled(("a", "b", "b"), fresh=True, subject=larger)
    if world.rank == 0:
        assert profile is not None
        save_profile(profile, sys.argv[1])
        print(json.dumps(lines))
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
