"""Models by their Hugging Face name: ``[model] path = "org/name"`` is found in the local Hugging Face cache, or downloaded to it.

A cached model is used without looking for newer revisions, so that jobs are reproducible and a complete copy needs no network.
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
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "README.md",
)
"""Configuration, tokenizer and weights, and the card, for its licence; never code, never pickles."""
UNWANTED = ("*/*", "consolidated*")
"""Copies of the weights in other layouts."""
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def is_hub_id(text: str, path: Path) -> bool:
    """Whether ``text`` is the name of a model on the hub, not the path of a directory.

    Args:
        text: value in the job.
        path: the value as a path; if it or its parent directory exists, the value is a path.
    """
    return _ID.fullmatch(text) is not None and not path.exists() and not path.parent.exists()


def cached(name: str) -> Path | None:
    """Directory of the model in this machine's Hugging Face cache, perhaps incomplete; None when there is nothing of it."""
    return source_files.cached(name, "model", "config.json")


def directory_of(name: str) -> Path:
    """Directory of a base model's files on this machine. ``name``: a name of the hub, or a directory."""
    path = Path(name)
    return (cached(name) if is_hub_id(name, path) else None) or path


def name_of(directory: Path) -> str:
    """Portable name of a model directory: its hub name if it is in this machine's cache, else its path."""
    for path in (directory.absolute(), directory.resolve()):
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            name = path.parent.parent.name.removeprefix("models--").replace("--", "/")
            cached_directory = cached(name)
            if cached_directory is not None and cached_directory.resolve() == directory.resolve():
                return name
    return str(directory)


def obtain(name: str, path: Path, download: bool, report: Callable[[str], None]) -> Path:
    """Directory of a complete model, downloaded if necessary and allowed. ``path``: the name as a path, for the message.

    Raises:
        UserError: The model is not here and cannot be downloaded.
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
