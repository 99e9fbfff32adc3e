"""Hugging Face models by name: ``[model] path = "org/name"`` is looked up in the local Hugging Face cache or downloaded to it.

A cached model is used without checking for newer revisions, so jobs are reproducible and a complete copy needs no network.
"""

import re
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from hetero_mpi.data import source_files
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.util.errors import UserError

WANTED = (
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.json", "chat_template.jinja", "README.md",
)  # fmt: skip
"""Files to download: configuration, tokenizer, weights, and the model card for its licence, but never code or pickles."""
UNWANTED = ("*/*", "consolidated*")
"""Files to skip: copies of the weights in other layouts."""
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def is_hub_id(text: str, path: Path) -> bool:
    """Return whether ``text`` is the name of a model on the Hub rather than a directory path.

    Args:
        text: value in the job.
        path: the value as a path; if the path or its parent directory exists, the value is a path.
    """
    return _ID.fullmatch(text) is not None and not path.exists() and not path.parent.exists()


def cached(name: str) -> Path | None:
    """Return the model's directory, possibly incomplete, in this machine's Hugging Face cache; None if the model is not cached."""
    return source_files.cached(name, "model", "config.json")


def directory_of(name: str) -> Path:
    """Return the directory of a base model's files on this machine. ``name`` is a Hub name or a directory."""
    path = Path(name)
    return (cached(name) if is_hub_id(name, path) else None) or path


def name_of(directory: Path) -> str:
    """Return a portable name for a model directory: the Hub name if this machine has cached it, else the path."""
    for path in (directory.absolute(), directory.resolve()):
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            name = path.parent.parent.name.removeprefix("models--").replace("--", "/")
            cached_directory = cached(name)
            if cached_directory is not None and cached_directory.resolve() == directory.resolve():
                return name
    return str(directory)


def obtain(name: str, path: Path, download: bool, report: Callable[[str], None]) -> Path:
    """Return the directory of a complete model, downloading it if necessary and allowed.

    Raises:
        UserError: The model is not on this machine and cannot be downloaded; the message includes ``path``, the name as a path.
    """
    directory = cached(name)
    reason = "it is not cached" if directory is None else _damage(directory)
    if directory is not None and reason is None:
        return directory
    if not download or constants.HF_HUB_OFFLINE:
        rule = "[model] download = false" if not download else "HF_HUB_OFFLINE is set, so nothing is downloaded"
        raise UserError("model.missing", _not_here(name, path, f"{reason}; {rule}"))
    report(f"downloading {name} from {constants.ENDPOINT} into {constants.HF_HUB_CACHE}")
    try:
        source_files.reach_hub(report)
        allowed, ignored = list(WANTED), list(UNWANTED)
        directory = Path(huggingface_hub.snapshot_download(name, allow_patterns=allowed, ignore_patterns=ignored))
    except Exception as error:  # network libraries raise many kinds of errors
        raise UserError(
            "model.missing",
            _not_here(name, path, f"{reason}; {source_files.why_not(name, 'model', 'model.path', error)}"),
        ) from None
    damage = _damage(directory)  # without a network, an incomplete copy may be returned unchanged
    if damage is not None:
        raise UserError("model.missing", _not_here(name, path, f"{damage}; a new download did not repair it"))
    return directory


def _damage(directory: Path) -> str | None:
    try:
        ModelFiles(directory).check()
    except UserError as error:
        return str(error).rstrip(".")
    return None


def _not_here(name: str, path: Path, reason: str) -> str:
    return (
        f'[model] path = "{name}" is neither a directory ({path}) nor a complete model in the Hugging Face cache '
        f"{constants.HF_HUB_CACHE}: {reason}. Correct the path; or, on a machine with network access, run `hf download {name}`, "
        f"copy the printed directory to rank 0's machine, and set model.path to it"
    )
