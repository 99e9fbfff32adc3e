"""Two hosts of two ranks each with one cable between them: found out by measuring."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.test_hosts import HEAD, HOSTS, two_hosts  # noqa: F401  (a fixture)
from tests.support.mpi import ROOT, run_bounded

MEGABITS = 200
BYTES_PER_S = MEGABITS * 1e6 / 8


@pytest.fixture
def limited(two_hosts: tuple[Path, Path]) -> tuple[Path, Path]:  # noqa: F811
    """(host file of two slots each, launch agent); the cable carries 200 Mbit/s in each direction."""
    hostfile, agent = two_hosts
    if shutil.which("tc") is None:
        pytest.skip("limiting a cable needs tc")
    for name in HOSTS:
        shape = f"tc qdisc add dev cable0 root tbf rate {MEGABITS}mbit burst 32kb latency 400ms"
        done = subprocess.run(["ip", "netns", "exec", name, *shape.split()], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"the cable cannot be limited here: {done.stderr.strip()}")
    hostfile.write_text("".join(f"{address} slots=2\n" for address in HOSTS.values()))
    return hostfile, agent


@pytest.mark.long
def test_ranks_behind_one_cable_are_found_to_share_it(limited: tuple[Path, Path]) -> None:
    hostfile, agent = limited
    programs = ROOT / "tests" / "programs"
    options = f"--mca plm_rsh_agent {agent} --mca btl tcp,self,sm --mca pml ob1 --oversubscribe"
    start = f'hostname {HEAD}; exec "$@"'
    command = ["ip", "netns", "exec", HEAD, "unshare", "--uts", "bash", "-c", start, "start", sys.executable]
    command += [str(programs / "comm_launch.py"), "4", str(hostfile), options, str(programs / "comm_flows.py")]
    result = run_bounded(command, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout_s=120)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found["links"]) == 12
    assert found["shared"] == dict.fromkeys(found["shared"], True) and len(found["shared"]) == 2, found
    speeds = {(a, b): bytes_per_s for a, b, bytes_per_s in found["links"]}
    for (a, b), bytes_per_s in speeds.items():
        if (a < 2) == (b < 2):
            assert bytes_per_s > 2 * BYTES_PER_S, f"{a} -> {b} does not use the cable"
        else:
            # No pair was measured while another one used the cable. (Of the largest message: small ones pass a rate limit
            # in one burst, so that the line through all would be too flat.)
            assert 0.6 * BYTES_PER_S < bytes_per_s < 1.3 * BYTES_PER_S, (a, b, bytes_per_s)
