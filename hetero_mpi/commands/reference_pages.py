"""The command ``reference``: generate pages from the code that list all job file keys and all command-line options.

``jobs/reference.toml`` and ``docs/job.md`` (``--markdown``) are generated from the fields of ``job/schema.py``, and
``docs/commands.md`` (``--commands``) from the parser. ``tests/test_docs.py`` checks that the files are up to date.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from hetero_mpi.commands.options import parser
from hetero_mpi.job.rules import as_toml, field_metadata, rule_text
from hetero_mpi.job.schema import TABLES
from hetero_mpi.job.training_tables import LANGUAGE, Example, OnlyIf, OnResume, Unit
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.terminal import fold_line, line_width


def _text(file: str) -> str:
    return Path(__file__).with_name(file).read_text(encoding="utf-8")


HEADER = _text("reference_toml_head.txt")
JOB_HEADER = _text("job_page_head.md")
COMMANDS_HEADER = _text("commands_page_head.md")

ENVIRONMENT = {
    "HETERO_MPI_DEVICE": "device of this rank, such as `cuda` or `cuda:1`; overrides `[cluster] device`",
    "HETERO_MPI_MPIEXEC": "path of the MPI launcher for `launch`, instead of the detected launcher",
    "HETERO_MPI_TOKEN": "API key for clients of `serve` ([serving.md](serving.md#api-key)); access token of the live page",
    "XDG_CACHE_HOME": "cache directory for token ids and device measurements, instead of `~/.cache`",
}
"""Maps the environment variables that users may set to their effects. Those of MPI, torch and Hugging Face apply as well."""

_SHORT = {
    'empty ("")': "empty",
    "quoted strings": "strings",
    "text in quotes": "text",
    "true or false": "true/false",
    "a whole number": "integer",
    "whole numbers": "integers",
    "a number": "number",
    " of at least ": " ≥ ",
    " above ": " > ",
    " below ": " < ",
    " at most ": " ≤ ",
    "a list of": "list of",
    "a table of keys": "table",
    "a table (a ": "table (",
    '" or "': '", "',
}
"""Maps phrases of rules to their abbreviations in the tables of ``docs/job.md``."""


def reference(markdown: bool, commands: bool) -> str:
    """Return the page to print: job file keys as Markdown or TOML, or all commands as Markdown."""
    return commands_page(parser()) if commands else job_page() if markdown else reference_text()


def reference_text() -> str:
    """Generate ``jobs/reference.toml``: every key of every table, in the order of ``job/schema.py``."""
    parts = [HEADER]
    for table, model in TABLES.items():
        parts.append(f"\n{_comment(model.__doc__ or '')}\n[{table}]\n")
        parts.extend(_key_text(table, key, field) for key, field in model.model_fields.items())
    return "\n".join(parts)


def _key_text(table: str, key: str, field: FieldInfo) -> str:
    lines = _comment(_key_description(table, key)) + "\n" + _comment(f"Accepts {rule_text(field)}.")
    if field.default is not None:
        return f"{lines}\n{key} = {as_toml(field.default)}\n"
    return f"{lines}\n# Empty by default; for example:\n# {key} = {_first_metadata(table, key, Example)}\n"


def _first_metadata(table: str, key: str, kind: type[str]) -> str:
    return next(iter(field_metadata(TABLES[table], kind).get(key, [])), "")


def _key_description(table: str, key: str) -> str:
    """Return a key's description, the conditions under which it has an effect, and whether it is fixed on resume."""
    conditions = [text for text in field_metadata(TABLES[table], OnlyIf).get(key, []) if text != LANGUAGE]
    notes = [f"Only if {' and '.join(f'``{text}``' for text in conditions)}."] if conditions else []
    notes += ["Fixed on resume."] if _first_metadata(table, key, OnResume) in ("same", "shapes") else []
    return " ".join([TABLES[table].model_fields[key].description or "", *notes])


def _comment(text: str) -> str:
    return "\n".join(fold_line(_plain(text), min(118, line_width()), "# ", "# "))


def job_page() -> str:
    """Generate ``docs/job.md``: a Markdown table per table of a job file, in the order of ``job/schema.py``."""
    parts = [JOB_HEADER, "Tables: " + ", ".join(f"[`[{table}]`](#{table})" for table in TABLES) + ".\n"]
    for table, model in TABLES.items():
        parts.append(f"\n## `[{table}]`\n\n{_plain(model.__doc__ or '')}\n\n")
        parts.append("| key | accepts | default | meaning |\n| --- | --- | --- | --- |\n")
        parts.extend(_key_row(table, key, field) for key, field in model.model_fields.items())
    return "".join(parts)


def _key_row(table: str, key: str, field: FieldInfo) -> str:
    meaning = _plain(_key_description(table, key))
    if example := _first_metadata(table, key, Example):
        meaning += f" Example: `{example}`"
    accepts = rule_text(field)
    for words, short in _SHORT.items():
        accepts = accepts.replace(words, short)
    if field.default is None:
        accepts = accepts.removesuffix(" or empty")
    if unit := _first_metadata(table, key, Unit):
        accepts += f" ({unit})"
    default = "empty" if field.default is None else f"`{as_toml(field.default)}`"
    return _row(f"`{key}`", accepts, default, meaning)


def completion(shell: str) -> str:
    """Generate a shell completion script. Raises UserError if the package shtab is not installed."""
    try:
        import shtab
    except ImportError:
        raise UserError("completion.package_missing", "completion requires shtab: pip install shtab") from None
    top = parser()
    for _, _, command in _commands(top, ""):
        for action in command._actions:
            if action.type is Path:
                vars(action).update(complete=shtab.FILE)  # the attribute that shtab reads
    return str(shtab.complete(top, shell))


def commands_page(top: argparse.ArgumentParser) -> str:
    """Generate ``docs/commands.md``: a Markdown section for each command, including subcommands such as ``mesh init``."""
    command_rows = list(_commands(top, ""))
    parts = [COMMANDS_HEADER]
    for name, help_text, command in command_rows:
        sentence = help_text[:1].upper() + help_text[1:] + "." * (not help_text.endswith((".", "?", "!")))
        parts.append(f"## {name}\n\n{sentence}\n\n```\n{_usage(name, command)}\n```\n\n")
        rows = [_argument_row(action, command) for action in _visible_arguments(command)]
        if rows:
            parts.append("| argument | |\n| --- | --- |\n" + "".join(rows) + "\n")
    parts.append("## Environment variables\n\n| variable | |\n| --- | --- |\n")
    parts.extend(_row(f"`{name}`", text) for name, text in ENVIRONMENT.items())
    return "".join(parts)


def _commands(parser: argparse.ArgumentParser, before: str) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield (name, description, parser) of every command without subcommands, in the order of ``--help``."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                subcommands = list(_commands(inner, f"{before}{name} "))
                yield from subcommands or [(before + name, inner.description or "", inner)]


def _visible_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the positional arguments, then the options except ``--help``."""
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return sorted(actions, key=lambda action: bool(action.option_strings))


def _usage(name: str, parser: argparse.ArgumentParser) -> str:
    arguments = _visible_arguments(parser)
    required = [f"{act.option_strings[0]} {_values(act)}" for act in arguments if act.option_strings and act.required]
    optional = ["[OPTIONS]"] if any(action.option_strings and not action.required for action in arguments) else []
    positional = [_values(action) for action in arguments if not action.option_strings]
    return " ".join([name, *optional, *required, *positional])


def _argument_row(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    if action.option_strings and action.required:
        text = f"required{': ' if text else ''}{text}"
    exclusive_options = [
        exclusive.option_strings[-1]
        for group in parser._mutually_exclusive_groups
        if action in group._group_actions
        for exclusive in group._group_actions
        if exclusive is not action
    ]
    if exclusive_options:
        text += f"; not with {', '.join(f'`{exclusive}`' for exclusive in exclusive_options)}"
    usage = f"{', '.join(action.option_strings)} {_values(action)}".strip()  # such as -o, --output DIR
    return _row(f"`{usage}`", text)


def _values(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    name = str(action.metavar or "|".join(map(str, action.choices or [])) or action.dest.upper())
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _plain(text: str) -> str:
    """Convert a docstring to one line of Markdown."""
    return " ".join(text.replace("``", "`").split())
