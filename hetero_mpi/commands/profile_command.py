"""The command ``profile``: measure the ranks and the links between them, and write the profile to a file.

It uses the set-up of ``train``, so that the measurements match a run, but does not train or write a run directory.
"""

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
    """Measure the cluster and return the profile on all ranks. Collective.

    Args:
        job: the job. Only rank 0's value is used.
        reprofile: ignore earlier measurements.

    Raises:
        UserError: If there is an error that the user can fix. Raised on all ranks.
    """
    setup.look_around(world)
    loaded, run_dir = setup.read_job(world, TrainOptions(job))
    if loaded.job.cluster.emulate is not None:
        raise CollectiveUserError(
            "emulation.not_measured",
            f"cannot measure with [cluster] emulate = {loaded.job.cluster.emulate!r}, which takes all times from that profile: "
            'clear it (--set cluster.emulate="", or set={"cluster.emulate": None} in Python)',
        )
    with MpiTransport(world.comm, threaded=loaded.job.cluster.communication_thread) as transport:
        ready = setup.set_up(world, transport, loaded, run_dir)
        subject, _ = subject_of(ready)
        cluster_profile = profile_cluster(world, transport, ready.backend, subject, ready.job.profile, say, reprofile)
    say(*profile_lines(cluster_profile))
    return cluster_profile


def profile(world: World, job: Path | LoadedJob, output: Path, reprofile: bool) -> int:
    """Measure the cluster, write the profile and return the exit code. Collective. Raises the errors of ``measure``."""
    cluster_profile = measure(world, job, reprofile)
    with world.on_leader("writing the profile"):
        if world.rank == 0:
            with write_errors(output):
                save_profile(cluster_profile, output)
            say(f"Written: {output}")
    return 0
