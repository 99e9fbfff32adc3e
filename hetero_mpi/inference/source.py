"""Open the model that ``generate`` is given: a run directory, a model directory or an adapter directory.

Only rank 0 reads the directory.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.chat_template import Template, has_template, render_prompt
from hetero_mpi.data.tokenizer import check_vocabulary, load_tokenizer, rows_with_added
from hetero_mpi.inference.decoding import require_decodable
from hetero_mpi.job.load import stored_job
from hetero_mpi.job.schema import ClusterTable, JobConfig
from hetero_mpi.model.adapters.adapter_files import adapter_of, as_written, check_adapter
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.files import hub
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.generation import model_stops, read_generation
from hetero_mpi.model.transformers.stored_model import stored_model
from hetero_mpi.rundir.logs import say
from hetero_mpi.state.hdf5 import CheckpointError
from hetero_mpi.state.reader import CheckpointReader
from hetero_mpi.training.setup.data_setup import prompt_template
from hetero_mpi.util.errors import UserError

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
_KINDS = (
    "a run directory (with model/ or adapter/), a Hugging Face model directory (config.json, *.safetensors), or a PEFT adapter "
    "directory (adapter_config.json)"
)


@dataclass(frozen=True)
class GenerateSource:
    """The model with its dtype and quantization, as plain values that can be broadcast."""

    config: dict[str, Any]
    """Content of the model's ``config.json``."""
    base: str | None
    """Directory of the weights, which must exist on rank 0's machine; None for weights initialised from the seed."""
    dtype: str
    adapter: dict[str, Any] | None = None
    """Content of a job's ``[adapter]``; None if there is no adapter."""
    nf4: bool = False
    double: bool = True
    seed: int = 0
    """Seed for weights that are not in any file."""
    cluster: dict[str, Any] = field(default_factory=lambda: ClusterTable().model_dump())
    """Content of a job's ``[cluster]``."""
    further: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Maps the names of additional adapters to the content of their ``[adapter]``."""

    @property
    def directory(self) -> Path | None:
        return Path(self.base) if self.base is not None else None


@dataclass(frozen=True)
class Opened:
    """A source with the parts that only rank 0 needs: tokenizer and prompt template."""

    source: GenerateSource
    tokenizer: PreTrainedTokenizerFast
    adapter: Path | None
    """Directory of the adapter; None if there is none."""
    template: Template | None
    """Template for prompts; None if prompts are continued verbatim."""
    reason: str
    """How prompts are formatted and why, for the user."""
    further: dict[str, Path] = field(default_factory=dict)
    """Maps the names of additional adapters to their directories."""

    @property
    def positions(self) -> int | None:
        """Context length: the model's maximum number of positions; None if it is unlimited."""
        return getattr(read_config(self.source.config), "max_position_embeddings", None)

    @property
    def stops(self) -> list[int]:
        return stop_tokens(self.source.config, self.source.directory, self.tokenizer)

    def prompt_tokens(self, prompt: str, raw: bool) -> list[int]:
        """Tokenise a prompt in the model's format. Raises UserError if it is empty or if the template rejects it."""
        if not prompt.strip():
            raise UserError("generate.empty_prompt", "the prompt is empty: pass some text with --prompt")
        return render_prompt(self.tokenizer, prompt, None if raw else self.template)


def open_source(path: Path) -> Opened:
    """Open a model without reading weights. Raises UserError if it is missing, incomplete or of an unsupported family."""
    path = path.expanduser()
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = [str(path.parent / name) for name in difflib.get_close_matches(path.name, siblings, n=3)]
        hint = f"; similar names: {', '.join(near)}" if near else ""
        raise UserError("generate.source", f"{path} does not exist{hint}. Pass {_KINDS}")
    if (path / "config.json").is_file():
        return _without_run(_model(path), path, None)
    if (path / "adapter_config.json").is_file():
        return _without_run(*_adapter(path))
    if any((path / name).is_dir() for name in ("model", "adapter", "checkpoints")):
        return _run(path)
    hint = f" A job's run directory is, by default, runs/{path.stem}." if path.suffix == ".toml" else ""
    raise UserError("generate.source", f"{path} contains no model. Pass {_KINDS}.{hint}")


def stop_tokens(config: dict[str, Any], directory: Path | None, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the stop tokens of ``generation_config.json`` (else ``config.json``) and the tokenizer. Raises UserError."""
    stops = model_stops(config, read_generation(directory))
    return sorted({*stops, *(token for token in [tokenizer.eos_token_id] if token is not None)})


def _model(path: Path) -> GenerateSource:
    stored = stored_model(ModelFiles(path))
    require_decodable(read_config(stored.config))
    say(*stored.notes)
    return GenerateSource(stored.config, str(path.absolute()), _DTYPES.get(str(stored.config.get("dtype")), "fp32"))


def _adapter(path: Path) -> tuple[GenerateSource, Path, Path]:
    """Open an adapter directory with its base model, in the base model's dtype. Raises UserError if they do not match."""
    table, name = adapter_of(path)
    base = hub.directory_of(name) if name else None
    if base is None or not base.is_dir():
        raise UserError(
            "adapter.base_missing",
            f"{path / 'adapter_config.json'}: the base model {name!r} (base_model_name_or_path) is not a directory on this "
            f"machine; put the model there, or correct the path",
        )
    source = replace(_model(base), adapter=table.model_dump())
    source.config["vocab_size"] = rows_with_added(_tokenizer_of(path, base), read_config(source.config).vocab_size)
    chain = TransformersChain(read_config(source.config))
    modules = dict(chain.model.named_modules())
    foreign = [target for target in table.targets if target not in modules]
    if foreign:
        raise UserError(
            "adapter.base_differs",
            f"{path}: the adapter was trained on another model: {base} has no {foreign[0]}; correct base_model_name_or_path",
        )
    check_adapter(path, adapter_tuning(chain, table, False, True))
    return source, path, path


def _without_run(source: GenerateSource, path: Path, adapter: Path | None) -> Opened:
    """Add the tokenizer and prompt template to a model or adapter that does not belong to a run."""
    tokenizer = _tokenizer(source, adapter or path)
    if has_template(tokenizer):
        return Opened(source, tokenizer, adapter, "auto", "formatted by the tokenizer's chat template")
    return Opened(source, tokenizer, adapter, None, "continued verbatim: the tokenizer has no chat template")


def _run(path: Path) -> Opened:
    """Open the result of a run with the dtype and quantization of its job."""
    newest = _newest_metadata(path / "checkpoints")
    if newest is None:
        result = path / ("model" if (path / "model").is_dir() else "adapter")
        if not result.is_dir():
            raise UserError(
                "generate.source",
                f"{path}: neither a result (model/, adapter/) nor a valid checkpoint; run the job again",
            )
        return open_source(result)
    job, metadata = newest
    if job.model.factory is not None:
        raise UserError(
            "generate.custom_model",
            f"{path} holds a custom model ({job.model.factory}), which writes no text: generate, serve and evaluate need a "
            f"language model. Load {path}/model/model.safetensors in Python instead (docs/python.md)",
        )
    result = path / ("model" if job.adapter.method == "none" else "adapter")
    if not result.is_dir():
        raise UserError(
            "generate.unfinished_run",
            f"{path}: the run has not written {result.name}/ yet; finish it with --resume, or export its newest checkpoint: "
            f"python -m hetero_mpi export {path} OUT",
        )
    if job.adapter.method == "none":
        adapter, source = None, replace(_model(result), dtype=job.train.dtype, cluster=job.cluster.model_dump())
    else:
        adapter, source = result, _adapter_of_run(job, metadata, result)
    tokenizer, template = _tokenizer(source, result), prompt_template(job)
    if template is None:
        return Opened(source, tokenizer, adapter, None, "continued verbatim: the run trained on text")
    return Opened(source, tokenizer, adapter, template, "formatted as the run's records")


def _adapter_of_run(job: JobConfig, metadata: dict[str, Any], result: Path) -> GenerateSource:
    """Combine a run's adapter with the base model of its job, quantized as in the job."""
    name = adapter_of(result)[1] or metadata.get("base_model")
    base = hub.directory_of(name) if name else None
    config = metadata["model_config"]
    if base is not None:
        config = {**_model(base).config, "vocab_size": read_config(config).vocab_size}  # new tokens have rows
    require_decodable(read_config(config))
    adapter = as_written(job.adapter)
    source = GenerateSource(
        config,
        str(base) if base is not None else None,
        job.train.dtype,
        adapter.model_dump(),
        job.model.quantization == "nf4",
        job.model.double_quantization,
        job.train.seed,
        job.cluster.model_dump(),
    )
    chain = TransformersChain(read_config(config))
    check_adapter(result, adapter_tuning(chain, adapter, source.nf4, source.double))
    return source


def _newest_metadata(directory: Path) -> tuple[JobConfig, dict[str, Any]] | None:
    """Return (job, metadata) of the newest readable checkpoint without reading its tensors; None if there is none."""
    for path in sorted(directory.glob("step-*.h5"), reverse=True):
        try:
            with CheckpointReader(path) as reader:
                reader.required("model_config")
                return stored_job(reader.required("job"), path.stem, directory).job, reader.metadata
        except (CheckpointError, UserError):
            continue  # damaged, or written by a program with other keys
    return None


def _tokenizer(source: GenerateSource, directory: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer in ``directory``, else in the base model's directory, and check its vocabulary."""
    tokenizer = _tokenizer_of(directory, *([Path(source.base)] if source.base is not None else []))
    check_vocabulary(tokenizer, read_config(source.config).vocab_size)
    return tokenizer


def _tokenizer_of(*directories: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer in the first directory that has one. Raises UserError if none has."""
    for directory in directories:
        if any((directory / name).is_file() for name in _TOKENIZERS):
            return load_tokenizer(directory)
    raise UserError(
        "tokenizer.missing",
        f"{' and '.join(map(str, dict.fromkeys(directories)))}: no tokenizer (tokenizer.json) next to the model; copy the one "
        f"it was trained with into the directory",
    )
