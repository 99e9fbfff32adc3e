"""The build's two hooks; everything else about the build is in ``pyproject.toml`` and ``MANIFEST.in``.

* The files of ``jobs/`` and ``profiles/`` go into the package as ``hetero_mpi/shipped_files/``. An editable install reads them
  where they are.
* The description has no relative links, because a package index does not have their targets.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

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


RELATIVE = r"\((?![a-z]+:|#)([^)\s]+)\)"
IMAGE = re.compile(r"!\[([^\]]*)\]" + RELATIVE)
LINK = re.compile(r"(?<!!)\[((?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]" + RELATIVE)


class DescribeWithoutRelativeLinks(egg_info):
    """``egg_info`` whose description links to the files of the repository ``Source`` in ``[project.urls]``, or to none if unset."""

    def run(self) -> None:
        metadata = self.distribution.metadata
        source = (metadata.project_urls or {}).get("Source")
        image, link = (f"![\\1]({source}/raw/HEAD/\\2)", f"[\\1]({source}/blob/HEAD/\\2)") if source else ("", r"\1")
        metadata.long_description = LINK.sub(link, IMAGE.sub(image, metadata.long_description))
        super().run()


setup(cmdclass={"build_py": BuildWithShippedFiles, "egg_info": DescribeWithoutRelativeLinks})
