"""Resolve the job's data keys to files: glob patterns, or datasets of the Hugging Face hub (``hf:org/name/config:split``).

Files are ordered by path. Like models, hub datasets are read from the local cache, or downloaded into it by huggingface_hub;
the ``datasets`` package would write a second copy in its own format and cache results as pickles. A complete cached copy is used
without network access, so that a job also reads the same data later.
"""

import fnmatch
import glob
import os
import re
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants, errors

from hetero_mpi.util.background import Background
from hetero_mpi.util.disk import require_regular
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.plug_ins import plug_in, plug_in_names

PREFIX = "hf:"
FORMATS = "hetero_mpi.data.formats"
_NAME = re.compile(r"hf:([\w-][\w.-]*/[\w-][\w.-]*)(?:/([\w][\w.-]*))?(?::([\w][\w.-]*))?", re.ASCII)
_WORDS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
"""Maps each split to words in the names of its files, for datasets whose cards list no files."""
SILENT_S, SILENT_AT_MOST_S = 5.0, 20.0
"""Time without an answer from the hub after which the user is notified, and after which the attempt fails."""
_SHARD = re.compile(r"-\d+-of-(\d+)(\.\w+)+$")


def matching_files(key: str, patterns: Sequence[str], tell: Callable[[str], None] | None = None) -> tuple[Path, ...]:
    """Find the files that match the glob patterns of the job's ``key``, sorted by path without duplicates, then its hub files.

    A pattern with a leading ``!`` removes files that earlier patterns matched. ``tell`` is called before a download; if it is
    None, nothing is downloaded. Raises UserError if nothing matches.
    """
    from_hub = [file for text in patterns if text.startswith(PREFIX) for file in hub_files(text, key, tell)]
    patterns = [text for text in patterns if not text.startswith(PREFIX)]
    # A link and its target are one file, identified and ordered by the real path.
    paths: dict[str, Path] = {}
    directories: list[str] = []
    for pattern in patterns:
        for text in glob.iglob(pattern.removeprefix("!"), recursive=True):
            if pattern.startswith("!"):
                paths.pop(os.path.realpath(text), None)
            elif os.path.isfile(text):
                paths.setdefault(os.path.realpath(text), Path(text))
            else:
                if not os.path.isdir(text):
                    require_regular(Path(text))
                directories.append(text)
    if not paths and not from_hub:
        kind = "jsonl" if key.startswith("data.records") else "txt"
        hint = f"(add /**/*.{kind} to read inside)"
        what = f"only directories, such as {directories[0]} {hint}" if directories else "nothing"
        raise UserError("data.no_files", f"{key} must match a file; {shown_patterns(patterns)} matched {what}.")
    return (*(paths[real] for real in sorted(paths)), *from_hub)


def shown_patterns(patterns: Sequence[str]) -> str:
    return ", ".join(repr(pattern) for pattern in patterns)


class HubName(NamedTuple):
    """A hub dataset as named in the job; ``label`` names it in messages."""

    label: str
    name: str
    config: str | None
    split: str


def hub_files(text: str, key: str, tell: Callable[[str], None] | None) -> list[Path]:
    """Return the files of a dataset's split, ordered by name, from the cache or the hub; ``tell`` as in ``matching_files``.

    Raises UserError if the dataset is neither cached nor downloadable, or has no such config, split or file.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        forms = '"hf:org/name", "hf:org/name:split" or "hf:org/name/config:split"'
        raise UserError("data.hub_name", f'{key}: a Hugging Face Hub dataset must be written as {forms}, not "{text}"')
    source = HubName(key if text in key else f'{key} "{text}"', match[1], match[2], match[3] or "train")
    directory = cached(source.name, "dataset", "README.md")
    if directory is not None:
        names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        split_files = _files_of_split(source, names, directory, complete=False)
        if split_files and _has_all_shards(split_files):
            return [directory / name for name in split_files]
    missing = "it is not cached" if directory is None else f'the split "{source.split}" is incomplete there'
    if tell is None or constants.HF_HUB_OFFLINE:
        rule = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "only rank 0 uses the network"
        raise UserError("data.hub_missing", _missing_message(source, f"{missing}; {rule}, so nothing is downloaded"))
    tell(f"downloading {text} from {constants.ENDPOINT} into {constants.HF_HUB_CACHE}")
    try:
        reach_hub(tell)
        card = Path(huggingface_hub.snapshot_download(source.name, repo_type="dataset", allow_patterns=["README.md"]))
        names = sorted(huggingface_hub.HfApi().list_repo_files(source.name, repo_type="dataset"))
        split_files = _files_of_split(source, names, card, complete=True)
        patterns = [glob.escape(name) for name in split_files]
        fetched = Path(huggingface_hub.snapshot_download(source.name, repo_type="dataset", allow_patterns=patterns))
    except UserError:
        raise
    except Exception as error:  # network libraries raise many kinds of errors; none is a defect of this program
        raise UserError(
            "data.hub_missing", _missing_message(source, f"{missing}; {why_not(source.name, 'dataset', key, error)}")
        ) from None
    return [fetched / name for name in split_files]


def reach_hub(tell: Callable[[str], None]) -> None:
    """Check that the hub or its proxy accepts connections; if a firewall drops packets, huggingface_hub would block for minutes.

    Raises OSError if the connection is refused, TimeoutError after ``SILENT_AT_MOST_S`` without an answer.
    """
    address = urlsplit(constants.ENDPOINT)
    proxy = urllib.request.getproxies().get(address.scheme)
    if proxy and not urllib.request.proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    name, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    work = Background("reaching the hub", lambda: socket.create_connection((name, port)).close())
    work.finish(SILENT_S)
    if work.running:
        tell(f"{name} has not answered for {SILENT_S:.0f} s; waiting {SILENT_AT_MOST_S - SILENT_S:.0f} s more")
        work.finish(SILENT_AT_MOST_S - SILENT_S)
    if work.running:
        raise TimeoutError(f"{name} did not answer within {SILENT_AT_MOST_S:.0f} s: a firewall may drop packets")


def why_not(name: str, kind: str, key: str, error: Exception) -> str:
    """Explain why a model or dataset (``kind``) under the job's ``key`` could not be downloaded, with a remedy."""
    login = "`hf auth login` (formerly `huggingface-cli login`) on rank 0's machine, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        base_url = constants.ENDPOINT + ("" if kind == "model" else "/datasets")
        return f"{name} is a gated {kind} that this user cannot access: accept its terms at {base_url}/{name}, then run {login}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{constants.ENDPOINT} has no {kind} {name}, or it is private: correct {key}; for a private {kind} run {login}"
    first_line = (str(error) or type(error).__name__).strip().splitlines()[0]
    return f"{name} could not be downloaded from {constants.ENDPOINT} ({first_line})"


def cached(name: str, kind: str, file: str) -> Path | None:
    """Find the cached, possibly incomplete snapshot of a hub "model" or "dataset" to search for ``file``; None if not cached."""
    try:
        return Path(
            huggingface_hub.snapshot_download(name, repo_type=kind, local_files_only=True, allow_patterns=[file])
        )
    except (OSError, ValueError):  # huggingface_hub raises one of these
        return None


def _files_of_split(source: HubName, names: Sequence[str], directory: Path, complete: bool) -> list[str]:
    """Select the files of a split by the repository's card, else by file names.

    If the split has no files, raises UserError if ``names`` lists the ``complete`` repository, and returns [] otherwise.
    """
    splits = _splits(source, names, directory)
    if splits.get(source.split):
        return splits[source.split]
    if not complete:
        return []
    listed = ", ".join(f'"{split}"' for split, files in splits.items() if files)
    endings = ", ".join(_supported_endings())
    has = f"it has the splits {listed}" if listed else f"none of its {len(names):,} files ends with {endings}"
    raise UserError(
        "data.hub_split",
        f'{source.label}: {source.name} must have files for the split "{source.split}" in a supported format; '
        f"{has}. Select another split or config, or convert the dataset and list its files",
    )


def split_files(directory: Path, config: str | None) -> dict[str, list[str]]:
    """Map the splits of a local directory to their files, like those of a repository."""
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    splits = _splits(HubName(str(directory), str(directory), config, "train"), names, directory)
    return {split: [str(directory / glob.escape(name)) for name in files] for split, files in splits.items() if files}


def _splits(source: HubName, names: Sequence[str], directory: Path) -> dict[str, list[str]]:
    """Map the splits of a dataset to those of its files ``names`` that are in a supported format."""
    endings = _supported_endings()
    data = [name for name in names if name.endswith(endings) and not fnmatch.fnmatch(Path(name).name, "dataset_*.json")]
    by_card = _splits_by_card(source, data, directory / "README.md")
    return _splits_by_name(source, data) if by_card is None else by_card


def _supported_endings() -> tuple[str, ...]:
    return tuple(suffix for name in plug_in_names(FORMATS) for suffix in plug_in(FORMATS, name).SUFFIXES)


def _splits_by_card(source: HubName, data: Sequence[str], card: Path) -> dict[str, list[str]] | None:
    """Map splits to files by the dataset's card (``configs`` in the metadata of README.md); None if the card lists no files."""
    try:
        metadata = huggingface_hub.metadata_load(card) if card.is_file() else None
    except Exception as error:  # a card may contain anything
        raise UserError("data.hub_card", f"{source.label}: its dataset card {card} cannot be read: {error}") from None
    configs = [
        item for item in (metadata or {}).get("configs") or () if isinstance(item, dict) and item.get("data_files")
    ]
    if not configs:
        return None
    by_name = {str(item.get("config_name", "default")): item for item in configs}
    first = next((name for name, item in by_name.items() if item.get("default") is True), "default")
    choice = source.config or (first if first in by_name else next(iter(by_name)) if len(by_name) == 1 else None)
    if choice not in by_name:
        rule = "has no such config" if source.config else "has several configs, so select one"
        example = f'"hf:{source.name}/{next(iter(by_name))}:{source.split}"'
        raise UserError(
            "data.hub_ambiguous", f"{source.label}: {source.name} {rule}: {', '.join(by_name)}. For example: {example}"
        )
    files = by_name[choice]["data_files"]
    entries = files if isinstance(files, list) else [files]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        split, patterns = (
            (str(entry.get("split", "train")), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        )
        listed = [str(pattern) for pattern in (patterns if isinstance(patterns, list) else [patterns])]
        globs = {*listed, *(pattern.removeprefix("**/") for pattern in listed)}
        matching_names = {name for pattern in globs for name in data if fnmatch.fnmatch(name, pattern)}
        splits[split] = sorted({*splits.get(split, []), *matching_names})
    return splits


def _splits_by_name(source: HubName, data: Sequence[str]) -> dict[str, list[str]]:
    """Map splits to the files with the split's name in their paths; if no path contains one, all files belong to "train"."""
    if source.config is not None:
        data = [name for name in data if source.config in Path(name).parts[:-1]]
    splits = {
        split: [name for name in data if re.search(rf"(^|[\W_\d])({words})([\W_\d]|$)", name)]
        for split, words in _WORDS.items()
    }
    return splits if any(splits.values()) else {"train": list(data)}


def _has_all_shards(names: Sequence[str]) -> bool:
    """Whether all shards are present of files with names such as ``train-00000-of-00003.parquet``."""
    shards = Counter((name[: match.start()], int(match[1])) for name in names if (match := _SHARD.search(name)))
    return all(count == shard_total for (_, shard_total), count in shards.items())


def _missing_message(source: HubName, reason: str) -> str:
    return (
        f"{source.label} is not in the Hugging Face cache {constants.HF_HUB_CACHE}: {reason}. On a machine with "
        f"network access, run `hf download {source.name} --repo-type dataset`, copy the printed directory to rank 0's machine, "
        f"and list its files instead"
    )
