"""Required packages, jobs and profiles by name and kind, and the pip argument that installs the same version."""

import difflib
import json
import os
import shlex
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hetero_mpi import __version__
from hetero_mpi.util.errors import UserError

DISTRIBUTION = "hetero_mpi"
REQUIRED = (
    "torch", "mpi4py", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "peft", "bitsandbytes", "h5py",
    "tomli", "tomli_w", "pydantic", "psutil", "matplotlib", "jinja2", "prometheus_client",
)  # fmt: skip
"""Modules that a run imports. A test compares this list with pyproject.toml."""
USED_PROFILE = "used-profile.toml"
"""File in a run directory with the profile on which the run's plans are based, if that differs from ``profile.toml``."""
_KIND_BY_TABLE = {"devices": "profile", "pipelines": "plan", "data": "job"}
"""A table that files of only one kind have -> that kind."""
SHIPPED_FILES = "shipped_files"
"""Folder inside the package that exists in a wheel but not in a clone."""
_PACKAGE = Path(__file__).resolve().parents[1]


def absent_packages() -> tuple[str, ...]:
    """Return the modules of ``REQUIRED`` that are not installed, without importing any."""
    return tuple(name for name in REQUIRED if not _is_installed(name))


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def shipped_folder(name: str) -> Path:
    """Return the folder ``jobs`` or ``profiles``, which a wheel has inside the package (``setup.py``) and a clone next to it."""
    inside = _PACKAGE / SHIPPED_FILES / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def shipped_profiles() -> dict[str, Path]:
    """Map the name of each shipped profile to its file."""
    return {path.stem: path for path in sorted(shipped_folder("profiles").glob("*.toml"))}


def profile_file(name: str | os.PathLike[str], requested_path: Path | None = None) -> Path:
    """Return the file of a profile: ``requested_path`` (default ``name``) if it exists, otherwise the shipped profile ``name``.

    For a run directory, return the profile on which its plans are based. Raises UserError if there is no such profile.
    """
    requested_path, shipped = requested_path or Path(name), shipped_profiles()
    if requested_path.is_dir():
        return file_of_run(requested_path, USED_PROFILE, "profile.toml")
    path = requested_path if requested_path.exists() else shipped.get(os.fspath(name).removesuffix(".toml"))
    if path is None:
        similar_names = difflib.get_close_matches(requested_path.name.removesuffix(".toml"), shipped, n=1)
        hint = f"did you mean {similar_names[0]}?" if similar_names else f"shipped profiles: {', '.join(shipped)}"
        raise UserError(
            "shipped.missing", f"{requested_path}: no such file, and no shipped profile of this name; {hint}"
        )
    return path


def require_kind(tables: object, kind: str, where: str) -> None:
    """Raise UserError if ``tables`` are those of another ``kind`` of file: a profile, a plan or a job."""
    kinds = [
        kind_of_table for table, kind_of_table in _KIND_BY_TABLE.items() if isinstance(tables, dict) and table in tables
    ]
    if kinds and kind not in kinds:
        option_text = "first, without an option" if kinds[0] == "job" else f"with --{kinds[0]}"
        raise UserError("file.kind", f"{where}: a {kinds[0]}, not a {kind}; pass it {option_text}")


def file_of_run(directory: Path, *names: str) -> Path:
    """Return the first of the named files that exists in a run directory. Raises UserError if none exists."""
    path = next((directory / name for name in names if (directory / name).exists()), None)
    if path is None:
        raise UserError(
            "shipped.missing",
            f"{directory}: no {' and no '.join(names)} in this directory; specify a file, or a run directory",
        )
    return path


def pip_argument() -> str:
    """Return the shell-quoted ``pip install`` argument that installs this version from the same source on another machine."""
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        return f"-e {shlex.quote(str(_PACKAGE.parent))}"  # a clone
    text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    if text is None:
        return f"{DISTRIBUTION}=={__version__}"  # from an index
    origin = json.loads(text)
    url = urlsplit(origin["url"])
    return shlex.quote(unquote(url.path) if url.scheme == "file" else origin["url"])
