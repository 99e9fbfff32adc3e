"""The collective benchmark on real ranks: who measures when, and what the command writes."""

import json
from pathlib import Path

import pytest

from hetero_mpi.planning.types.toml_files import load_profile
from tests.support.mpi import finish_mpi

pytestmark = pytest.mark.slow


def test_a_rank_that_joins_makes_nobody_else_measure_again(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    program = ["tests/programs/profiling_joins.py", str(tmp_path / "p.toml")]
    result = finish_mpi(3, program, timeout_s=240, env=environment)
    first, joined, shared, fresh = json.loads(result.stdout.splitlines()[-1])
    assert first["measured"] == [["together"], ["together"], []], "two hosts of one rank: nobody disturbs them"
    assert joined["measured"] == [[], [], ["together"]], "only the rank that is new"
    # A second rank on host b shares it with the first: both are measured anew, together; a's table is kept.
    assert shared["measured"] == [[], ["together"], ["together"]]
    assert fresh["measured"] == [["together"], ["together"], ["together"]]
    # Disks are timed where a host has no memory for the weights, by one rank each.
    assert first["disks"] == [None, None] and len(fresh["disks"]) == 2 and all(speed > 1e6 for speed in fresh["disks"])
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["p.toml"]
    assert any("device times of rank 0, 1 were measured" in note for note in joined["notes"])
    assert not any("were measured" in note for note in fresh["notes"])

    profile = load_profile(tmp_path / "p.toml")
    assert [host.name for host in profile.hosts] == ["a", "b"]
    assert all(device.shares_host_memory for device in profile.devices)
    # Only ranks of one host may hold a stage together: what half the heads take is timed there, and how fast two ranks add up.
    assert [device.halved.keys() for device in profile.devices] == [set(), *2 * [profile.devices[0].layers.keys()]]
    assert [host.sum_bytes_per_s is not None for host in profile.hosts] == [False, True]
    memory = {host.name: host.memory_bytes for host in profile.hosts}
    assert all(abs(device.memory_bytes / memory[device.host] - 1) < 0.1 for device in profile.devices), "not divided"
    block = next(layer.kind for layer in profile.model.layers[1:-1])
    times = profile.devices[0].layers[block]
    assert times.recompute_s is not None and times.input_s is not None and times.weight_s is not None
    assert profile.model.layers[1].deferred_bytes_per_token > 0
    assert all(link.sample_bytes == (1024, 4096) for link in profile.links) and len(profile.links) == 6
