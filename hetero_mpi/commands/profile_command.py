"""The command ``profile``: measures the ranks it runs on, and the links between them, and writes the profile to a file.

The set-up is that of ``train``, so that what is measured is what a run would do; nothing is trained and no run directory
is touched.
"""

from __future__ import annotations

from pathlib import Path

from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import save_profile
from hetero_mpi.profiling.cluster import profile_cluster
from hetero_mpi.report.profile_text import profile_lines
from hetero_mpi.rundir.logs import say
from hetero_mpi.training.setup import setup
from hetero_mpi.training.setup.context import TrainOptions
from hetero_mpi.training.setup.profile_and_plan import subject_of
from hetero_mpi.util.disk import write_errors


def measure(world: World, job: Path | LoadedJob, reprofile: bool) -> ClusterProfile:
    """Measure. Collective; every rank gets the same profile.

    Args:
        job: what rank 0 gives counts.
        reprofile: take nothing that was measured before.

    Raises:
        UserError: anything the user can put right, on all ranks together.
    """
    setup.look_around(world)
    loaded, run_dir = setup.read_job(world, TrainOptions(job))
    if loaded.job.cluster.emulate is not None:
        raise CollectiveUserError(
            "emulation.not_measured",
            f"[cluster] emulate = {loaded.job.cluster.emulate!r} takes all times from that profile, and nothing is measured: "
            f'add --set cluster.emulate=""',
        )
    with MpiTransport(world.comm, threaded=loaded.job.cluster.communication_thread) as transport:
        ready = setup.set_up(world, transport, loaded, run_dir)
        subject, _ = subject_of(ready)
        measured = profile_cluster(world, transport, ready.backend, subject, ready.job.profile, say, reprofile)
    say(*profile_lines(measured))
    return measured


def profile(world: World, job: Path | LoadedJob, output: Path, reprofile: bool) -> int:
    """The command: measure and write. Collective; returns the exit code. Raises: as ``measure``."""
    measured = measure(world, job, reprofile)
    with world.on_leader("writing the profile"):
        if world.rank == 0:
            with write_errors(output):
                save_profile(measured, output)
            say(f"Written: {output}")
    return 0
