"""The command ``init``: copy an example job with its files, or convert another tool's config file to a job."""

import difflib
import glob
import re
import shlex
import shutil
import sys
from itertools import takewhile
from pathlib import Path

from hetero_mpi.job.load import LoadedJob, load_job
from hetero_mpi.util.disk import write_errors
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.shipped import shipped_folder
from hetero_mpi.util.terminal import wrap_text

SLURM = "slurm"
REFERENCE = "reference.toml"
"""A file in ``jobs`` that is not an example job; the command ``reference`` prints it."""


def init(name: str | None, directory: Path, source: Path | None = None, gpus: int | None = None) -> list[str]:
    """Copy an example job to ``directory``/jobs without overwriting files, and return the lines to print.

    Without ``name``, list the example jobs. If ``source`` is given, convert that file of another tool, which used ``gpus`` GPUs, to
    the job file or directory ``name``. Raises UserError if the job is unknown, its file exists, or the directory is not writable.
    """
    if gpus is not None and gpus < 1:
        raise UserError("init.gpus", f"--gpus {gpus}: must be the number of GPUs that the other tool used, at least 1")
    if source is not None:
        from hetero_mpi.interop.other_tools import convert_file

        destination = Path(name or ".")
        return convert_file(source, destination if destination.suffix == ".toml" else destination / "job.toml", gpus)
    if name is None:
        width = max(map(len, _names()))
        return [
            "Example jobs (init NAME [DIR]):",
            *(line for name in _names() for line in wrap_text(f"  {name:<{width}}  ", _purpose(name))),
            "All keys of a job: `hetero-mpi reference`.",
            "Convert a config of axolotl, LLaMA-Factory or TRL: `hetero-mpi init --from FILE`.",
        ]
    job_files, inputs = _files(name)
    existing = [directory / "jobs" / path for path in job_files if (directory / "jobs" / path).exists()]
    if existing:
        rule = f"already exists, and init does not overwrite files; choose another directory (init {name} DIR), or move it away"
        raise UserError("init.exists", f"{', '.join(map(str, existing))}: {rule}")
    lines = [*wrap_text("", _purpose(name)), "Copied:"]
    for path in [*job_files, *inputs]:
        target = directory / "jobs" / path
        with write_errors(target, f"choose another directory: init {name} DIR"):
            if not (exists := target.exists()):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(shipped_folder("jobs") / path, target)
        lines.append(f"  {target}{' (already exists, unchanged)' if exists else ''}")
    cd = [] if directory == Path() else [f"  cd {shlex.quote(str(directory))}"]
    return [*lines, "Then:", *cd, *(f"  {line}" for line in _commands(name, inputs))]


def _names() -> list[str]:
    stems = sorted(path.stem for path in shipped_folder("jobs").glob("*.toml") if path.name != REFERENCE)
    return [*sorted(stems, key=lambda name: name != "quickstart"), SLURM]


def _purpose(name: str) -> str:
    """Return the first sentence of a job file's first comment, which states its purpose."""
    if name == SLURM:
        return "Batch scripts for SLURM: one node, several nodes, mixed nodes, job arrays (docs/slurm.md)."
    text = (shipped_folder("jobs") / f"{name}.toml").read_text(encoding="utf-8")
    prose = takewhile(lambda line: line.startswith("# ") and not line.startswith("#  "), text.splitlines())
    return " ".join(line.removeprefix("# ") for line in prose).partition(". ")[0].rstrip(".:;") + "."


def _files(name: str) -> tuple[list[Path], list[Path]]:
    """Return the files of the example ``name``, and the files that they need. Paths are relative to ``jobs``."""
    jobs = shipped_folder("jobs")
    if name not in _names():
        near = difflib.get_close_matches(name.removesuffix(".toml"), _names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError("init.unknown_job", f"there is no example job {name!r}; {hint}Available: {', '.join(_names())}")
    if name == SLURM:
        return [path.relative_to(jobs) for path in sorted([*jobs.glob("*.sbatch"), *jobs.glob("*.sh")])], []
    return [Path(f"{name}.toml")], [path.relative_to(jobs) for path in _needed_files(load_job(jobs / f"{name}.toml"))]


def _needed_files(loaded: LoadedJob) -> list[Path]:
    """Return the files that a job needs: its data, the module of a custom model, and the job that trains its base model."""
    jobs, model = loaded.directory, loaded.job.model
    patterns = (*loaded.patterns("text"), *loaded.patterns("records"), *loaded.patterns("evaluation"))
    files = [Path(path) for pattern in patterns for path in sorted(glob.glob(pattern))]
    if model.factory is not None:
        files.append(jobs / f"{model.factory.partition(':')[0]}.py")
    if model.path is not None and model.path.startswith("../runs/"):
        files.append(jobs / f"{Path(model.path).parts[2]}.toml")
    return [path for path in dict.fromkeys(files) if jobs in path.parents]


def _commands(name: str, inputs: list[Path]) -> list[str]:
    if name == SLURM:
        return [f"PYTHONS={shlex.quote(sys.executable)} sbatch jobs/one_node.sbatch JOB"]
    first = [path for path in inputs if path.suffix == ".toml"]
    is_on_path = Path(shutil.which("hetero-mpi") or "").parent == Path(sys.executable).parent
    program = "hetero-mpi" if is_on_path else f"{shlex.quote(sys.executable)} -m hetero_mpi"
    files = [*first, Path(f"{name}.toml")]
    return [f"{program} launch -np {_ranks(path)} -- train jobs/{path}" for path in files]


def _ranks(path: Path) -> str:
    """Return the number of ranks in the command at the head of an example job."""
    command = re.search(r"-np (\d+)", (shipped_folder("jobs") / path).read_text(encoding="utf-8"))
    return command[1] if command else "3"
