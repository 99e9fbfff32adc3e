"""Runs several training jobs, one after the other, in one MPI job: ``train_cases.py LIST.json``.

Each entry holds the options of ``train``. Starting ranks costs more than training these models, so they are started once.
"""

import json
import sys
from pathlib import Path

from hetero_mpi.comm.world import World, run_guarded
from hetero_mpi.training.run import train
from hetero_mpi.training.setup import Options


def main(world: World) -> int:
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        paths = {key: Path(entry[key]) for key in ("job", "plan", "profile") if entry.get(key)}
        train(world, Options(**paths, run_dir=entry["run_dir"], resume=entry.get("resume")))
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
