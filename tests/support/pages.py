"""A page of the documents as a reader follows it: its files are written, and its commands run, in an empty folder."""

import os
import re
import sys
from pathlib import Path

from tests.support.mpi import ROOT, require_success
from tests.support.processes import run_within

FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
COMMANDS = re.compile(r"(?:<!-- (?P<mark>.*?) -->\n)?```sh\n(?P<text>.*?)```", re.DOTALL)


def write_files(page: Path, folder: Path) -> list[str]:
    """Write the files that the page names into ``folder``; returns their names."""
    found = FILE.findall(page.read_text(encoding="utf-8"))
    for name, content in found:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return [name for name, _ in found]


def follow(page: Path, folder: Path, timeout_s: float) -> str:
    """Run the page's blocks of commands in ``folder``, in their order, but for those that install or need several machines;
    returns what was printed.

    ``python`` and ``mpirun`` are those of this environment, with one thread. The first command that fails ends the test.
    """
    bin_folder = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    printed = ""
    for found in COMMANDS.finditer(page.read_text(encoding="utf-8")):
        if found["mark"] not in ("installs", "several machines"):
            done = require_success(run_within(timeout_s, ["bash", "-e", "-c", found["text"]], environment, folder))
            printed += done.stdout
    return printed
