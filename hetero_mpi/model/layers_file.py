"""The result of a model made of layers: one safetensors file with the full state dict, written tensor by tensor.

The format (https://huggingface.co/docs/safetensors) is a length (8 bytes), a JSON header with each tensor's type, shape and place,
and the tensors' bytes. As all shapes are known before, the header comes first, and no more than a layer is ever in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from hetero_mpi.device.backend import host_bytes
from hetero_mpi.errors import UserError

NAME = "model.safetensors"
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Buffers = Callable[[], dict[str, torch.Tensor]]
"""Gives a layer's buffers under their full names."""


class LayersWriter:
    """Writes ``DIRECTORY/model.safetensors``; a context manager. A former file is replaced when the new one is whole.

    Args:
        directory: made if need be.
        buffers: layer -> its buffers, in the order of the layers.
        parameters: name -> shape of every parameter, trained or not.

    Raises:
        UserError: it cannot be written.
    """

    def __init__(
        self, directory: Path, buffers: Mapping[str, Buffers], parameters: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.path = directory
        self._buffers = buffers
        self._awaited = set(parameters)
        self._temporary = directory / f".{NAME}.tmp"
        self._places: dict[str, int] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._temporary.open("wb")
            self._begin = self._write_header(parameters)
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> LayersWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                assert not self._awaited, f"never added: {sorted(self._awaited)}"
                for buffers in self._buffers.values():
                    self._put(buffers())
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            if error is None:
                os.replace(self._temporary, self.path / NAME)
        except OSError as problem:
            raise self._error(problem) from problem
        finally:
            self._temporary.unlink(missing_ok=True)

    def add(self, state: dict[str, torch.Tensor]) -> None:
        """Some parameters, in host memory."""
        self._awaited -= set(state)
        try:
            self._put(state)
        except OSError as error:
            raise self._error(error) from error

    def _put(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            self._file.seek(self._begin + self._places[name])
            self._file.write(host_bytes(tensor.detach().contiguous()).data)

    def _write_header(self, parameters: Mapping[str, tuple[int, ...]]) -> int:
        """Returns where the tensors begin."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        listed = [(name, shape, torch.float32) for name, shape in parameters.items()]
        for buffers in self._buffers.values():
            listed += [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in buffers().items()]
        for name, shape, dtype in sorted(listed, key=lambda one: -one[2].itemsize):  # so that each is aligned
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            self._places[name] = begin
            header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file.write(len(text).to_bytes(8, "little") + text)
        return 8 + len(text)

    def _error(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path / NAME} could not be written ({error}); free space or choose another output.run_dir; the last checkpoint "
            f"holds the same weights"
        )
