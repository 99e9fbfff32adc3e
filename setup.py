"""The build's one hook: the files of ``jobs/`` and ``profiles/`` go into the package as ``hetero_mpi/shipped_files/``.

An editable install reads them where they are. Everything else about the build is in ``pyproject.toml``.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
FOLDERS = ("jobs", "profiles")
SUFFIXES = {".toml", ".jsonl", ".py", ".sh", ".sbatch", ".service", ".md"}


class BuildWithShippedFiles(build_py):
    """``build_py`` that also copies ``FOLDERS``."""

    def run(self) -> None:
        super().run()
        for target, source in self._shipped().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *self._shipped().values()]  # an sdist holds them too

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._shipped()]

    def _shipped(self) -> dict[str, str]:
        """Where a file goes -> the file, relative to the project; nothing in an editable install."""
        files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
        names = [str(path.relative_to(ROOT)) for path in files]
        place = Path(self.build_lib) / "hetero_mpi" / "shipped_files"
        return {} if self.editable_mode else {str(place / name): name for name in names}


setup(cmdclass={"build_py": BuildWithShippedFiles})
