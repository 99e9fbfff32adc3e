"""The result of a model made of layers: one safetensors file with the full state dict, written tensor by tensor.

As all shapes are known before, the header comes first, and no more than a layer is ever in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from hetero_mpi.device.backend import host_bytes
from hetero_mpi.disk import atomic_write
from hetero_mpi.errors import UserError
from hetero_mpi.model.files.model_files import WEIGHTS, header_of

Buffers = Callable[[], dict[str, torch.Tensor]]
"""Gives a layer's buffers under their full names."""


class LayersWriter:
    """Writes ``DIRECTORY/model.safetensors``; a context manager. A former file is replaced when the new one is whole.

    Args:
        buffers: layer -> its buffers, in the order of the layers.
        parameters: name -> shape of every parameter, trained or not.

    :raises UserError: it cannot be written.
    """

    def __init__(
        self, directory: Path, buffers: Mapping[str, Buffers], parameters: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.path = directory
        self._buffers = buffers
        self._awaited = set(parameters)
        self._appearing = contextlib.ExitStack()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            temporary = self._appearing.enter_context(atomic_write(directory / WEIGHTS, durable=True))
            self._file: BinaryIO = temporary.open("wb")
            self._places = self._write_header(parameters)
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> LayersWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            with self._appearing, self._file:
                if error is not None:
                    raise error
                assert not self._awaited, f"never added: {sorted(self._awaited)}"
                for buffers in self._buffers.values():
                    self._put(buffers())
        except OSError as problem:
            if problem is not error:
                raise self._error(problem) from problem

    def add(self, state: dict[str, torch.Tensor]) -> None:
        self._awaited -= set(state)
        try:
            self._put(state)
        except OSError as error:
            raise self._error(error) from error

    def _put(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            self._file.seek(self._places[name])
            self._file.write(host_bytes(tensor.detach().contiguous()).data)

    def _write_header(self, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Returns where each tensor lies."""
        listed = [(name, shape, torch.float32) for name, shape in parameters.items()]
        for buffers in self._buffers.values():
            listed += [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in buffers().items()]
        listed.sort(key=lambda one: -one[2].itemsize)  # so that each is aligned
        begin, places = header_of({name: (str(dtype).removeprefix("torch."), shape) for name, shape, dtype in listed})
        self._file.write(begin)
        return places

    def _error(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path / WEIGHTS} could not be written ({error}); free space or choose another output.run_dir; the last "
            f"checkpoint holds the same weights"
        )
