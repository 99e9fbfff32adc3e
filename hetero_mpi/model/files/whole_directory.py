"""A directory that is never seen half written: files are collected beside it, and it appears, whole, in place of a former one."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hetero_mpi.disk import sync
from hetero_mpi.errors import UserError

T = TypeVar("T", bound="WholeDirectory")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Make a safetensors file, which whoever the umask allows may read: the library alone lets nobody but its owner."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


class WholeDirectory:
    """A context manager: at the end of the block what was put into ``path`` becomes ``directory``; after an error nothing does.

    Whoever is killed at any moment leaves the former directory, none, or the new one. What a dead writer left unfinished beside it
    is removed: one process at a time writes there. Files of the former one that are neither weights nor written anew are kept.

    Args:
        marker: the file by which such a directory is known.
        weights: how names of files with weights begin, which are never kept.

    :raises UserError: ``directory`` holds something else, or cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], kind: str, marker: str, weights: tuple[str, ...]) -> None:
        self.directory = Path(directory).absolute()
        self._kind, self._marker, self._weights = kind, marker, weights
        self._former = self.directory.with_name(f".{self.directory.name}.former")
        self.path = self.directory.with_name(f".{self.directory.name}.tmp-{secrets.token_hex(4)}")
        """Where files are collected."""
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self._check_replaceable()
            for leftover in self.directory.parent.glob(f".{self.directory.name}.tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            raise self.error(error) from error

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
            return
        self.discard()
        if isinstance(error, OSError | SafetensorError):
            raise self.error(error) from error

    def close(self) -> Path:
        """Let the directory appear. Returns it."""
        try:
            self._complete()
            self._keep_other_files()
            for file in self.path.iterdir():
                sync(file)
            sync(self.path)
            self._replace()
        except (OSError, SafetensorError) as error:
            self.discard()
            raise self.error(error) from error
        return self.directory

    def discard(self) -> None:
        """Remove what was put into ``path``; a former directory stays as it was."""
        shutil.rmtree(self.path, ignore_errors=True)

    def error(self, error: Exception) -> UserError:
        """What a person is told when it cannot be written."""
        return UserError(
            f"The {self._kind} {self.directory} could not be written ({error}); what was there before is untouched. "
            "Free space or choose another output.run_dir; the last checkpoint holds the same weights."
        )

    def _complete(self) -> None:
        """Called when all has been put into ``path``, for what remains to be written."""

    def _check_replaceable(self) -> None:
        """Refuse to replace anything of another kind; undo a replacement that a crash interrupted."""
        if self._former.exists() and not self.directory.exists():
            os.rename(self._former, self.directory)
        if not self.directory.exists():
            return
        filled = not self.directory.is_dir() or any(self.directory.iterdir())
        if filled and not (self.directory / self._marker).is_file():
            raise UserError(
                f"{self.directory} exists and is not a {self._kind} (it has no {self._marker}): it is not replaced. "
                "Move it away or choose another output.run_dir."
            )

    def _keep_other_files(self) -> None:
        if not self.directory.is_dir():
            return
        for entry in self.directory.iterdir():
            if (self.path / entry.name).exists() or entry.name.startswith(self._weights):
                continue
            if entry.is_dir():
                shutil.copytree(entry, self.path / entry.name, symlinks=True)
            else:
                shutil.copy2(entry, self.path / entry.name, follow_symlinks=False)

    def _replace(self) -> None:
        """Two renames; a crash between them is undone by the next writer."""
        shutil.rmtree(self._former, ignore_errors=True)
        if self.directory.exists():
            os.rename(self.directory, self._former)
        os.rename(self.path, self.directory)
        sync(self.directory.parent)
        shutil.rmtree(self._former, ignore_errors=True)
