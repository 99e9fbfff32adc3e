"""The models that a service answers for, as rank 0 knows them before any weight is loaded: one base, alone or with adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from hetero_mpi.data.chat_template import choose_template
from hetero_mpi.data.tokenizer import own_tokens_only
from hetero_mpi.inference.decoding import OPENED
from hetero_mpi.inference.source import Opened, open_source
from hetero_mpi.model.files.model_files import GENERATION
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.generation import read_generation
from hetero_mpi.rundir.logs import say
from hetero_mpi.serve.api_requests import SamplingDefaults
from hetero_mpi.serve.wording import form_of
from hetero_mpi.util.errors import UserError

_OF_CALLS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")
"""Tokens that some tokenizers keep special: calls of tools are known by them."""

_ALONE = {
    "parameters": "adapters of fused experts",
    "modules_to_save": "adapters with whole modules (modules_to_save)",
    "tokens": "adapters with rows of tokens (tokens)",
}
"""Key of ``[adapter]`` -> the adapters that change more than can be switched from request to request."""


class ServedModel:
    """Rank 0's knowledge of a model before its weights are loaded.

    Args:
        name: of the model, as clients see it.
        adapter: that which computes it (``Task.adapter``).

    :raises UserError: its template or its ``generation_config.json`` cannot be used.
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
        """Text -> id of the tokens that no text shows."""
        form = self.form if self.form is not None and self.form.kind == "chat" else None
        self.calls = form_of(form.with_tools or form.source) if form is not None else None
        """How it calls tools; None: that is not known."""
        self.shown = {self.special[text]: text for text in _OF_CALLS if self.calls is not None and text in self.special}


def sampling_defaults(directory: Path | None) -> SamplingDefaults:
    """Those of the model's ``generation_config.json``. Raises UserError: it cannot be read, or a value is out of its range."""
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
    """The model at ``source``, first, and where there are adapters (``NAME=DIR``, or DIR) beside it, these and the base alone. All
    know all adapters. Raises UserError: an adapter is none, or of another base, or two have one name.
    """
    first = open_source(source)
    found = {source.expanduser().resolve().name: (first, OPENED)}
    base = first.source.directory
    if adapters and first.adapter is not None and base is not None:
        found[base.resolve().name] = (open_source(base), "")
    tables, paths = dict[str, dict[str, object]](), dict[str, Path]()
    for number, word in enumerate(adapters, start=1):
        name, is_, rest = word.partition("=")
        named = bool(is_) and "/" not in name
        path = Path(rest if named else word)
        name = name if named else path.expanduser().resolve().name
        opened = open_source(path)
        _check_beside(word, opened, first)
        if name in found or not name:
            raise UserError(
                "serve.adapter",
                f"--adapter {word}: there is a model {name!r} already; name it by --adapter NAME={path}",
            )
        assert opened.source.adapter is not None and opened.adapter is not None
        own = f"beside{number}"
        tables[own], paths[own] = opened.source.adapter, opened.adapter
        found[name] = (opened, own)
    first = replace(first, source=replace(first.source, further=tables), further=paths)
    (name, _), *others = found.items()
    return [ServedModel(name, first), *(ServedModel(name, opened, own) for name, (opened, own) in others)]


def _check_beside(word: str, opened: Opened, first: Opened) -> None:
    base, other = first.source.directory, opened.source.directory
    if opened.source.adapter is None:
        raise UserError(
            "serve.adapter", f"--adapter {word}: must be an adapter, or a run that trained one; this is a whole model"
        )
    if base is None or other is None or base.resolve() != other.resolve():
        raise UserError(
            "serve.adapter",
            f"--adapter {word}: its base is {other}, and {base} is served; adapters beside each other share one",
        )
    for table in (opened.source.adapter, first.source.adapter or {}):
        kind = next((what for key, what in _ALONE.items() if table.get(key)), None)
        if kind is not None:
            raise UserError(
                "serve.adapter",
                f"--adapter {word}: {kind} are served alone, without others beside them; make a model of one by export --merge",
            )
    rows, served_rows = (read_config(one.source.config).vocab_size for one in (opened, first))
    if rows > served_rows:
        raise UserError(
            "serve.adapter",
            f"--adapter {word}: its tokenizer has new tokens, for which it needs {rows:,} rows of the embedding, and the "
            f"model that is served has {served_rows:,}; serve it alone",
        )
    own, served = (f"{one.source.dtype}{', 4 bits' * one.source.nf4}" for one in (opened, first))
    if own != served:
        say(f"adapter {word} was made for a base in {own}; it is served over one in {served}")
