"""The models that ``serve`` offers, as rank 0 knows them before loading weights: one base model, with or without adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from hetero_mpi.data.chat_template import choose_template
from hetero_mpi.data.tokenizer import own_tokens_only
from hetero_mpi.inference.adapter_switch import OPENED
from hetero_mpi.inference.source import Opened, open_source
from hetero_mpi.model.files.model_files import GENERATION
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.generation import read_generation
from hetero_mpi.rundir.logs import say
from hetero_mpi.serve.api_requests import SamplingDefaults
from hetero_mpi.serve.wording import call_form
from hetero_mpi.util.errors import UserError

_CALL_TOKENS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")
"""Strings that mark tool calls; some tokenizers treat them as special tokens."""

_EXCLUSIVE_KEYS = {
    "parameters": "adapters of fused experts",
    "modules_to_save": "adapters with whole modules (modules_to_save)",
    "tokens": "adapters with trained token embeddings (tokens)",
}
"""Maps a key of ``[adapter]`` to a description of the adapters that have it, which cannot be switched between requests."""


class ServedModel:
    """A model offered to clients: what rank 0 knows about it before its weights are loaded.

    Args:
        name: The name by which clients request the model.
        adapter: The adapter with which the model generates (``Task.adapter``).

    Raises:
        UserError: If the chat template or generation_config.json is invalid.
    """

    def __init__(self, name: str, opened: Opened, adapter: str = OPENED) -> None:
        self.name, self.opened, self.tokenizer, source = name, opened, opened.tokenizer, opened.source
        self.adapter = adapter
        self.engine = own_tokens_only(opened.tokenizer)
        self.form = choose_template(opened.tokenizer, opened.template) if opened.template is not None else None
        self.stops = opened.stops
        self.rows = int(read_config(source.config).vocab_size)
        self.defaults = sampling_defaults(source.directory)
        added = self.engine.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        """Maps the text of each special token to its id. Answers show only the ``visible_tokens`` among these."""
        form = self.form if self.form is not None and self.form.kind == "chat" else None
        self.calls = call_form(form.with_tools or form.source) if form is not None else None
        """The format in which the model writes tool calls, or None if it is unknown."""
        self.visible_tokens = {
            self.special[text]: text for text in _CALL_TOKENS if self.calls is not None and text in self.special
        }


def sampling_defaults(directory: Path | None) -> SamplingDefaults:
    """Read the sampling defaults in ``generation_config.json``. Raises UserError for an unreadable file or an invalid value."""
    values = read_generation(directory) or {}
    try:
        return SamplingDefaults.model_validate(
            {name: values[name] for name in SamplingDefaults.model_fields if values.get(name) is not None}
        )
    except ValidationError as error:
        (wrong, *_) = error.errors(include_url=False)
        raise UserError(
            "generation.value",
            f"{directory}/{GENERATION}: {wrong['loc'][0]}: {wrong['msg']}; correct it, or remove the file",
        ) from None


def served_models(source: Path, adapters: Sequence[str]) -> list[ServedModel]:
    """Open the model at ``source`` and the ``adapters`` (``NAME=DIR`` or DIR) to be served with it.

    The default model comes first. If ``source`` is itself an adapter and there are more, its base model is offered as well.
    Raises UserError for a path that is not an adapter, an adapter with a different base model, or a duplicate name.
    """
    first = open_source(source)
    models = {source.expanduser().resolve().name: (first, OPENED)}
    base = first.source.directory
    if adapters and first.adapter is not None and base is not None:
        models[base.resolve().name] = (open_source(base), "")
    tables, paths = dict[str, dict[str, object]](), dict[str, Path]()
    for number, word in enumerate(adapters, start=1):
        name, separator, rest = word.partition("=")
        has_name = bool(separator) and "/" not in name
        path = Path(rest if has_name else word)
        name = name if has_name else path.expanduser().resolve().name
        opened = open_source(path)
        _check_compatible(word, opened, first)
        if name in models or not name:
            raise UserError(
                "serve.adapter",
                f"--adapter {word}: there is already a model {name!r}; choose another name: --adapter NAME={path}",
            )
        assert opened.source.adapter is not None and opened.adapter is not None
        key = f"beside{number}"
        tables[key], paths[key] = opened.source.adapter, opened.adapter
        models[name] = (opened, key)
    first = replace(first, source=replace(first.source, further=tables), further=paths)
    (name, _), *further_models = models.items()
    return [ServedModel(name, first), *(ServedModel(name, opened, key) for name, (opened, key) in further_models)]


def _check_compatible(word: str, opened: Opened, first: Opened) -> None:
    base, adapter_base = first.source.directory, opened.source.directory
    if opened.source.adapter is None:
        raise UserError(
            "serve.adapter",
            f"--adapter {word}: must be an adapter, or a run that trained one; this is a complete model",
        )
    if base is None or adapter_base is None or base.resolve() != adapter_base.resolve():
        raise UserError(
            "serve.adapter",
            f"--adapter {word}: its base is {adapter_base}, but {base} is served; all adapters must share one base",
        )
    for table in (opened.source.adapter, first.source.adapter or {}):
        kind = next((description for key, description in _EXCLUSIVE_KEYS.items() if table.get(key)), None)
        if kind is not None:
            raise UserError(
                "serve.adapter",
                f"--adapter {word}: {kind} cannot be served together with others; merge it into a model with `export --merge`",
            )
    rows, served_rows = (read_config(model.source.config).vocab_size for model in (opened, first))
    if rows > served_rows:
        raise UserError(
            "serve.adapter",
            f"--adapter {word}: its tokenizer has new tokens, which need {rows:,} embedding rows, but the "
            f"served model has {served_rows:,}; serve it alone",
        )
    adapter_dtype, served_dtype = (f"{model.source.dtype}{', 4 bits' * model.source.nf4}" for model in (opened, first))
    if adapter_dtype != served_dtype:
        say(f"adapter {word} was trained on a base in {adapter_dtype}; it is served with a base in {served_dtype}")
