"""Write a Hugging Face model directory that ``from_pretrained`` can load, layer by layer.

    with ModelDirectoryWriter(model, directory, shard_bytes=1_000_000_000) as writer:
        for state in layers:                       # the embedding, each block, norm + head
            writer.add(state)
        tokenizer.save_pretrained(writer.path)    # and other files of the directory

The names and contents of the files equal those of transformers' ``save_pretrained``, whose conversion is used, but only one layer
and one shard are in memory at a time. The complete directory replaces the previous one at the end, so it is never half written.

A custom model is written as one safetensors file with the full state dict. All shapes are known in advance, so the header is
written first and only one layer at a time is in memory.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hetero_mpi.device.backend import host_bytes
from hetero_mpi.model.files.model_files import GENERATION, INDEX, WEIGHTS, header_of, write_tensors
from hetero_mpi.util.disk import atomic_write, sync
from hetero_mpi.util.errors import UserError

T = TypeVar("T", bound="WholeDirectory")
_OF_TOKENIZER = ("chat_template.jinja", "additional_chat_templates", "special_tokens_map.json", "added_tokens.json")
"""Optional tokenizer files that must not be combined with another tokenizer."""


class WholeDirectory:
    """Context manager that replaces ``directory`` with the files in ``path`` on success and discards them on error.

    If the process is killed, ``directory`` is unchanged, absent or complete. Temporary directories left by killed writers are
    removed, so only one process may write at a time. Other files in the previous directory are kept, except weights and tokenizer
    files.

    Args:
        marker: name of the file that identifies such a directory.
        weights: name prefixes of weight files, which are never kept.

    Raises:
        UserError: ``directory`` has other contents or cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], kind: str, marker: str, weights: tuple[str, ...]) -> None:
        self.directory = Path(directory).absolute()
        self._kind, self._marker, self._weights = kind, marker, weights
        self._former = self.directory.with_name(f".{self.directory.name}.former")
        self.path = self.directory.with_name(f".{self.directory.name}.tmp-{secrets.token_hex(4)}")
        """Temporary directory for the new files."""
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self._check_replaceable()
            for leftover in self.directory.parent.glob(f".{self.directory.name}.tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            try:
                self._complete()
                self._keep_other_files()
                for file in self.path.iterdir():
                    sync(file)
                sync(self.path)
                self._replace()
                return
            except OSError as problem:
                error = problem
        self.discard()
        if isinstance(error, OSError):
            raise self._error(error) from error

    def discard(self) -> None:
        """Remove ``path``; a previous directory stays unchanged."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _error(self, error: Exception) -> UserError:
        return UserError(
            "directory.unwritable",
            f"the {self._kind} {self.directory} could not be written ({error}), and its previous content is unchanged: free "
            "disk space, or choose another directory",
        )

    def _complete(self) -> None:
        """Write the remaining files on success; a hook for subclasses."""

    def _check_replaceable(self) -> None:
        """Refuse to replace a directory of another kind, and undo a replacement that was interrupted by a crash."""
        if self._former.exists() and not self.directory.exists():
            os.rename(self._former, self.directory)
        if not self.directory.exists():
            return
        filled = not self.directory.is_dir() or any(self.directory.iterdir())
        if filled and not (self.directory / self._marker).is_file():
            raise UserError(
                "directory.not_replaceable",
                f"{self.directory} exists and is not a {self._kind} (it has no {self._marker}): it is not overwritten. Move it, "
                f"or choose another directory.",
            )

    def _keep_other_files(self) -> None:
        if not self.directory.is_dir():
            return
        of_tokenizer = _OF_TOKENIZER if (self.path / "tokenizer.json").exists() else ()
        for entry in self.directory.iterdir():
            stale = entry.name.startswith(self._weights) or entry.suffix == ".gguf" or entry.name in of_tokenizer
            if stale or (self.path / entry.name).exists():
                continue
            if entry.is_dir():
                shutil.copytree(entry, self.path / entry.name, symlinks=True)
            else:
                shutil.copy2(entry, self.path / entry.name, follow_symlinks=False)

    def _replace(self) -> None:
        """Replace the directory by two renames; if the process crashes between them, the next writer undoes the first."""
        shutil.rmtree(self._former, ignore_errors=True)
        if self.directory.exists():
            os.rename(self.directory, self._former)
        os.rename(self.path, self.directory)
        sync(self.directory.parent)
        shutil.rmtree(self._former, ignore_errors=True)


CONFIG = "config.json"
_WEIGHT_FILES = ("model-", WEIGHTS, "pytorch_model")


class ModelDirectoryWriter(WholeDirectory):
    """Writes a model directory; other files, such as a tokenizer's, may be added to ``path``.

    ``model`` provides the class, configuration, generation configuration and names; its parameters may be on the meta device.
    ``shard_bytes`` bounds the size of each safetensors file (a larger tensor gets its own file). ``generation`` holds the keys of
    ``generation_config.json``; if None, they are derived from the configuration. Writing takes at most ``shard_bytes`` of host
    memory, plus one layer and its converted copy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        directory: str | os.PathLike[str],
        shard_bytes: int,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._generation = model, generation
        self._shard_bytes = shard_bytes
        unwritten = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
        self._awaited = set(model.state_dict()) - unwritten
        self._buffer: dict[str, torch.Tensor] = {}
        self._buffer_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._bytes_of: Counter[torch.dtype] = Counter()
        super().__init__(directory, "model directory", CONFIG, _WEIGHT_FILES)

    def add(self, state: dict[str, torch.Tensor]) -> None:
        """Add one layer's tensors, under the model's own parameter names.

        A layer must hold complete conversion groups (such as all experts of a block). The tensors are copied. Unknown or repeated
        names are programming errors; the tied copy of a head is skipped.
        """
        tied = set(self._model.all_tied_weights_keys)
        state = {name: tensor for name, tensor in state.items() if name not in tied}
        assert set(state) <= self._awaited, f"unknown or repeated: {sorted(set(state) - self._awaited)}"
        self._awaited -= set(state)
        for name, tensor in revert_weight_conversion(self._model, state).items():
            if tensor.is_floating_point():
                self._bytes_of[tensor.dtype] += tensor.nbytes
            if self._buffer and self._buffer_bytes + tensor.nbytes > self._shard_bytes:
                self._write_shard()
            self._buffer_bytes += tensor.nbytes
            # A copy, because the caller may change its tensor, and a view would keep a whole storage alive.
            self._buffer[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def _complete(self) -> None:
        assert not self._awaited, f"never added: {sorted(self._awaited)}"
        self._write_shard()
        self._name_shards()
        # Not by save_pretrained, whose validation could fail a finished run for a warning.
        config = copy.deepcopy(self._model.config)
        config.architectures = [type(self._model).__name__]
        config.dtype = str(max(self._bytes_of, key=lambda dtype: self._bytes_of[dtype])).removeprefix("torch.")
        self._write_keys(CONFIG, json.loads(config.to_json_string(use_diff=True)))
        generation = self._model.generation_config if self._model.can_generate() else None
        if self._generation is not None:
            self._write_keys(GENERATION, self._generation)
        elif generation is not None:
            self._write_keys(GENERATION, json.loads(generation.to_json_string(use_diff=True)))

    def _write_shard(self) -> None:
        self._shards.append(list(self._buffer))
        self._total_bytes += self._buffer_bytes
        path = self.path / _part(len(self._shards))
        write_tensors(path, self._buffer)
        sync(path)
        self._buffer, self._buffer_bytes = {}, 0

    def _name_shards(self) -> None:
        """Rename the shards now that their number is known, and write the index if there are several."""
        count = len(self._shards)
        if count == 1:
            os.rename(self.path / _part(1), self.path / WEIGHTS)
            return
        weight_map = {}
        for number, names in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors"
            os.rename(self.path / _part(number), self.path / final)
            weight_map.update(dict.fromkeys(names, final))
        metadata = {"total_parameters": self._model.num_parameters(), "total_size": self._total_bytes}
        index = {"metadata": metadata, "weight_map": weight_map}
        (self.path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _write_keys(self, name: str, keys: Mapping[str, Any]) -> None:
        # ``use_cache`` is off in training; in the files it would make ``generate()`` recompute every prefix.
        written_keys = {key: value for key, value in keys.items() if key != "use_cache"}
        (self.path / name).write_text(json.dumps(written_keys, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _part(number: int) -> str:
    return f"part-{number:05d}.safetensors"


Buffers = Callable[[], dict[str, torch.Tensor]]
"""Returns a layer's buffers by full name."""


class LayersWriter:
    """Context manager that writes ``DIRECTORY/model.safetensors``, replacing a previous file once the new one is complete.

    Args:
        buffers: buffers of each layer.
        parameters: maps the name of every parameter, trained or frozen, to its shape.

    Raises:
        UserError: The file cannot be written.
    """

    def __init__(self, directory: Path, buffers: Sequence[Buffers], parameters: Mapping[str, tuple[int, ...]]) -> None:
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
                for buffers in self._buffers:
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
        """Write the header and return the offset of each tensor."""
        listed = {name: ("float32", shape) for name, shape in parameters.items()}
        for buffers in self._buffers:
            listed |= {
                n: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for n, tensor in buffers().items()
            }
        begin, places = header_of(listed)
        self._file.write(begin)
        return places

    def _error(self, error: OSError) -> UserError:
        return UserError(
            "directory.unwritable",
            f"{self.path / WEIGHTS} could not be written ({error}): free disk space, or choose another directory",
        )
