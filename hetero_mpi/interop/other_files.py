"""Read other tools' files: YAML configs, TRL scripts, or text files that contain a training command."""

import contextlib
import json
import re
import shlex
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from hetero_mpi.interop.trl_script import read_script, trainers_in
from hetero_mpi.util.disk import require_regular
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.toml import MAX_NESTING_DEPTH

_MAX_FILE_BYTES, _MAX_VALUES = 1 << 20, 100_000
"""Limits on the size of a file, and on the number of its values after YAML aliases are expanded."""
_TRAINER = r"(?<![\w.-])(train|axolotl\.cli\.train|\S+\.py)(?=\s|$)"
"""What names a trainer in a command line, other than the word after ``trl``."""
_COMMAND = re.compile(rf"^(?!\s*#).*(\s--\w|{_TRAINER}\s+\S+\.(ya?ml|json)\b)", re.MULTILINE)


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if isinstance(key, str) and keys.count(key) > 1]:
            raise yaml.YAMLError(f"duplicate key {twice[0]}")
        return super().construct_mapping(node, deep)


def read_keys(file: Path) -> dict[str, Any]:
    """Read keys and values. Those of a command line include launcher options and, if it names a trainer, ``trainer``.

    Raises UserError if the file cannot be read, or if it is neither YAML with keys nor a single command line.
    """
    require_regular(file)
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES:,} bytes")
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".py":
            values = read_script(text)
        elif _COMMAND.search(text) and not _has_keys(text):
            return _command_line(file, text)
        elif not isinstance(values := _loaded(text), dict):
            raise ValueError("it has no keys")
        return dict(_plain(values, iter(range(_MAX_VALUES))))
    except OSError as error:
        raise UserError("convert.format", f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError, SyntaxError, yaml.YAMLError) as error:
        expected = "YAML, a command line, or a script that uses TRL"
        reason = " ".join(str(error).split())
        raise UserError("convert.format", f"{file}: must be {expected}: {reason}") from None


def _loaded(text: str) -> Any:
    """Parse JSON or else YAML. YAML alone would not do, since it rejects JSON's tabs and surrogate pairs."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(values := dict(pairs)) < len(pairs):
            raise ValueError("duplicate key")  # YAML names the key
        return values

    with contextlib.suppress(ValueError):
        return json.loads(text, object_pairs_hook=once)
    return yaml.load(text, _Loader)


def _has_keys(text: str) -> bool:
    """Return whether ``text``, which contains ``--``, is YAML with ``--`` only in comments or values."""
    with contextlib.suppress(yaml.YAMLError):
        values = _loaded(text)
        return isinstance(values, dict) and not any(" --" in str(key) for key in values)
    return False


def _plain(value: Any, budget: Iterator[int], depth: int = 0) -> Any:
    """Convert to JSON types, turning other types into strings. Raises ValueError if a job file cannot hold the value."""
    if depth > MAX_NESTING_DEPTH or next(budget, None) is None:
        raise ValueError(f"it has more than {_MAX_VALUES:,} values, or more than {MAX_NESTING_DEPTH} levels of nesting")
    if isinstance(value, dict):
        return {_plain(str(key), budget): _plain(inner, budget, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, budget, depth + 1) for inner in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = str(value)
    if match := re.search("[\\x00\ud800-\udfff]", text):
        raise ValueError(f"it contains the character {match[0]!a}, which is not allowed")
    return text


def _command_line(file: Path, text: str) -> dict[str, Any]:
    text = re.sub(r"\\\s*\n|\n(?=\s*--)", " ", text)  # some examples of TRL's lack a backslash
    text = re.sub(r"\s(\d?&?>|\|\s).*", "", re.sub(r"&&|;", "\n", text))  # without redirections
    lines = [match[0] for match in re.finditer(r"^(?!\s*#).*(\s--|\.(ya?ml|json)\b).*", text, re.MULTILINE)]
    lines = [line for line in lines if re.search(rf"{_TRAINER}|\btrl\s", line)] or lines
    variables = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=[\"']?([^\s\"']+)", text, re.MULTILINE))
    words = shlex.split(string.Template(lines[0] if len(lines) == 1 else "").safe_substitute(variables), comments=True)
    programs = [at for at, word in enumerate(words) if re.fullmatch(rf".*{_TRAINER}", word) or words[at - 1] == "trl"]
    unset = [f"; {word} has no value" for word in words if "$" in word]
    if len(programs) != 1 or unset:
        expected = "one command naming its trainer, such as `trl sft --model_name_or_path ...`, with all variables set"
        raise UserError("convert.command", f"{file}: must be {expected}{''.join(unset[:1])}")
    (at,) = programs
    values = dict(_options(words[:at])) | dict(_options(words[at + 1 :]))
    variables |= dict(re.findall(r"(\w+)=(\S+)", " ".join(words[:at])))
    if Path(words[at - 1]).name in ("llamafactory-cli", "lmf"):  # reads these variables
        counts = {"nproc_per_node": variables.get("NPROC_PER_NODE"), "nnodes": variables.get("NNODES")}
        values = {key: count for key, count in counts.items() if count} | values
    if (devices := variables.get("CUDA_VISIBLE_DEVICES")) and not values.keys() & {"num_processes", "nproc_per_node"}:
        values["num_processes"] = len(devices.split(","))
    files = [word for word in words[at + 1 : at + 2] if Path(word).suffix in (".yaml", ".yml", ".json")]
    for config in [*files, *([values.pop("config")] if "config" in values else [])]:
        path = Path(str(config))
        values = read_keys(path if path.exists() else file.parent / path) | values
    values |= dict(_options([f"--{word}" for word in words[at + 2 :] if re.match(r"\w+=", word)] if files else []))
    name = Path(words[at]).stem
    scripts = [path for path in (Path(words[at]), file.parent / words[at]) if path.suffix == ".py" and path.is_file()]
    for script in scripts:
        with contextlib.suppress(OSError, ValueError, SyntaxError):
            (name,) = trainers_in(script.read_text(encoding="utf-8"))
    return values if name in ("train", "axolotl.cli") else {"trainer": name, **values}


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of options in the forms ``--key``, ``--key value ...``, ``--key=value`` and ``--no_key``."""
    texts_by_key: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            texts_by_key[key] = [value] if equals else []
        elif key and not re.match("-[a-z]", word):
            texts_by_key[key].append(word)
    for key, texts in texts_by_key.items():
        values = [yaml.safe_load(word) if re.fullmatch(r"[\w.+-]+", word) else word for word in texts]
        yield key.removeprefix("no_"), values if len(values) > 1 else values[0] if values else not key.startswith("no_")
