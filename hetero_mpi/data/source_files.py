"""The files that a job's keys name: by patterns, in an order that depends on their names only, or as data sets of the Hugging Face
hub (``hf:org/name``, ``hf:org/name/config:split``), whose files are in the local cache or come there.

The hub's own package finds, fetches and keeps the files, as for models. The package ``datasets`` would write a second copy in
a format of its own and keep what it has computed as pickles. What lies in the cache is taken as it is, so a job means the same
tomorrow; with a complete copy nothing is asked of the network.
"""

from __future__ import annotations

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
"""Split -> what its files are called in a data set whose card does not say it."""
SILENT_S, SILENT_AT_MOST_S = 5.0, 20.0
"""After so many seconds without an answer of the hub a line says so, and after so many it is given up."""
_SHARD = re.compile(r"-\d+-of-(\d+)(\.\w+)+$")


def matching_files(key: str, patterns: Sequence[str], tell: Callable[[str], None] | None = None) -> tuple[Path, ...]:
    """The files that match the glob patterns of the job's ``key``: sorted by path, each once, directories ignored; then those of
    data sets of the hub, in the order of the job.

    A pattern that begins with ``!`` takes files of the patterns before it away again. ``tell``: is told of files that are
    fetched from the hub; None: none is. Raises UserError when nothing matches.
    """
    from_hub = [file for text in patterns if text.startswith(PREFIX) for file in hub_files(text, key, tell)]
    patterns = [text for text in patterns if not text.startswith(PREFIX)]
    # A link and its target are one file; the real path is its identity and its place in the order.
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
        what = (
            f"only directories, such as {directories[0]} (add /**/*.{kind} to read inside)"
            if directories
            else "nothing"
        )
        raise UserError(
            "data.no_files", f"{key} must match at least one file; {shown_patterns(patterns)} matched {what}."
        )
    return (*(paths[real] for real in sorted(paths)), *from_hub)


def shown_patterns(patterns: Sequence[str]) -> str:
    return ", ".join(repr(pattern) for pattern in patterns)


class HubName(NamedTuple):
    """A data set as the job names it; ``said``: the job's key and the text, for messages."""

    said: str
    name: str
    config: str | None
    split: str


def hub_files(text: str, key: str, tell: Callable[[str], None] | None) -> list[Path]:
    """The files of a data set's split, by name; fetched if need be. ``tell``: is told of that; None: nothing is fetched.

    Raises UserError: it is not here and cannot be fetched, or it has no such config, split or file.
    """
    found = _NAME.fullmatch(text)
    if found is None:
        raise UserError("data.hub_name", f'{key}: a data set of the hub is written "hf:org/name", "hf:org/name:split" or '
                        f'"hf:org/name/config:split"; this is not: "{text}"')  # fmt: skip
    wanted = HubName(key if text in key else f'{key} "{text}"', found[1], found[2], found[3] or "train")
    directory = cached(wanted.name, "dataset", "README.md")
    if directory is not None:
        names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        chosen = _chosen(wanted, names, directory, whole=False)
        if chosen and _complete(chosen):
            return [directory / name for name in chosen]
    missing = (
        "nothing of it is there" if directory is None else f'not all files of the split "{wanted.split}" are there'
    )
    if tell is None or constants.HF_HUB_OFFLINE:
        rule = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "only rank 0 asks the network"
        raise UserError("data.hub_missing", _not_here(wanted, f"{missing}; {rule}, so nothing is fetched"))
    tell(f"fetching {text} from {constants.ENDPOINT} into {constants.HF_HUB_CACHE}")
    try:
        reach_hub(tell)
        card = Path(huggingface_hub.snapshot_download(wanted.name, repo_type="dataset", allow_patterns=["README.md"]))
        names = sorted(huggingface_hub.HfApi().list_repo_files(wanted.name, repo_type="dataset"))
        chosen = _chosen(wanted, names, card, whole=True)
        patterns = [glob.escape(name) for name in chosen]
        fetched = Path(huggingface_hub.snapshot_download(wanted.name, repo_type="dataset", allow_patterns=patterns))
    except UserError:
        raise
    except Exception as error:  # network libraries raise many kinds; none of them is a defect of this program
        raise UserError(
            "data.hub_missing", _not_here(wanted, f"{missing}; {why_not(wanted.name, 'data set', key, error)}")
        ) from None
    return [fetched / name for name in chosen]


def reach_hub(tell: Callable[[str], None]) -> None:
    """Return when the hub, or the proxy before it, takes a connection. A firewall that drops packets would hold every request of
    the hub's own package for minutes, in silence.

    Raises OSError: it does not, or not in time.
    """
    place = urlsplit(constants.ENDPOINT)
    proxy = urllib.request.getproxies().get(place.scheme)
    if proxy and not urllib.request.proxy_bypass(place.hostname or ""):
        place = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    name, port = place.hostname or "", place.port or (80 if place.scheme == "http" else 443)
    work = Background("reaching the hub", lambda: socket.create_connection((name, port)).close())
    work.finish(SILENT_S)
    if work.running:
        tell(f"{name} has not answered for {SILENT_S:.0f} s; waiting {SILENT_AT_MOST_S - SILENT_S:.0f} s more")
        work.finish(SILENT_AT_MOST_S - SILENT_S)
    if work.running:
        raise TimeoutError(f"{name} did not answer within {SILENT_AT_MOST_S:.0f} s: a firewall may drop packets")


def why_not(name: str, kind: str, key: str, error: Exception) -> str:
    """Why a model or data set (``kind``), which the job's ``key`` names, could not be fetched; with what to do."""
    login = "`hf auth login` (formerly `huggingface-cli login`) on rank 0's machine, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        place = constants.ENDPOINT + ("" if kind == "model" else "/datasets")
        return f"{name} is a gated {kind}, and this user may not read it: accept its terms at {place}/{name}, then run {login}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{constants.ENDPOINT} has no {kind} {name}, or it is private: correct {key}; for a private {kind} run {login}"
    first_line = (str(error) or type(error).__name__).strip().splitlines()[0]
    return f"{name} could not be fetched from {constants.ENDPOINT} ({first_line})"


def cached(name: str, kind: str, file: str) -> Path | None:
    """Directory of a repository of a kind ("model", "dataset") in this machine's Hugging Face cache, perhaps incomplete, in which a
    file is looked for; None when there is nothing of it."""
    try:
        return Path(
            huggingface_hub.snapshot_download(name, repo_type=kind, local_files_only=True, allow_patterns=[file])
        )
    except (OSError, ValueError):  # what huggingface_hub raises is one of these
        return None


def _chosen(wanted: HubName, names: Sequence[str], directory: Path, whole: bool) -> list[str]:
    """A repository's files of the split: by its card, else by their names. ``whole``: these are all files of it.

    Raises UserError where it has none; [] where a part of it may lack them.
    """
    kinds = tuple(suffix for name in plug_in_names(FORMATS) for suffix in plug_in(FORMATS, name).SUFFIXES)
    data = [name for name in names if name.endswith(kinds) and not fnmatch.fnmatch(Path(name).name, "dataset_*.json")]
    splits = _by_card(wanted, data, directory / "README.md")
    if splits is None:
        splits = _by_names(wanted, data)
    if splits.get(wanted.split):
        return splits[wanted.split]
    if not whole:
        return []
    there = ", ".join(f'"{split}"' for split, files in splits.items() if files)
    has = f"it has the splits {there}" if there else f"none of its {len(names):,} files ends with {', '.join(kinds)}"
    raise UserError(
        "data.hub_split",
        f'{wanted.said}: {wanted.name} must have files of the split "{wanted.split}" in a format that is read here; '
        f"{has}. Name another split or config, or convert it on your own machine and name the files",
    )


def _by_card(wanted: HubName, data: Sequence[str], card: Path) -> dict[str, list[str]] | None:
    """Split -> files as the data set's card says it (``configs`` in the head of README.md); None where it says nothing."""
    try:
        said = huggingface_hub.metadata_load(card) if card.is_file() else None
    except Exception as error:  # a card may hold anything
        raise UserError("data.hub_card", f"{wanted.said}: its card {card} cannot be read: {error}") from None
    configs = [one for one in (said or {}).get("configs") or () if isinstance(one, dict) and one.get("data_files")]
    if not configs:
        return None
    named = {str(one.get("config_name", "default")): one for one in configs}
    first = next((name for name, one in named.items() if one.get("default") is True), "default")
    choice = wanted.config or (first if first in named else next(iter(named)) if len(named) == 1 else None)
    if choice not in named:
        rule = "has no such config" if wanted.config else "has several configs, and one must be named"
        example = f'"hf:{wanted.name}/{next(iter(named))}:{wanted.split}"'
        raise UserError(
            "data.hub_ambiguous", f"{wanted.said}: {wanted.name} {rule}: {', '.join(named)}. Write {example}, say"
        )
    files = named[choice]["data_files"]
    entries = files if isinstance(files, list) else [files]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        split, patterns = (
            (str(entry.get("split", "train")), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        )
        listed = [str(pattern) for pattern in (patterns if isinstance(patterns, list) else [patterns])]
        both = {*listed, *(pattern.removeprefix("**/") for pattern in listed)}
        found = {name for pattern in both for name in data if fnmatch.fnmatch(name, pattern)}
        splits[split] = sorted({*splits.get(split, []), *found})
    return splits


def _by_names(wanted: HubName, data: Sequence[str]) -> dict[str, list[str]]:
    """Split -> the files that have its name in theirs; all are "train" where none has any."""
    if wanted.config is not None:
        data = [name for name in data if wanted.config in Path(name).parts[:-1]]
    splits = {
        split: [name for name in data if re.search(rf"(^|[\W_\d])({words})([\W_\d]|$)", name)]
        for split, words in _WORDS.items()
    }
    return splits if any(splits.values()) else {"train": list(data)}


def _complete(names: Sequence[str]) -> bool:
    """True: all parts of files are there that are written ``train-00000-of-00003.parquet``."""
    shards = Counter((name[: found.start()], int(found[1])) for name in names if (found := _SHARD.search(name)))
    return all(count == of for (_, of), count in shards.items())


def _not_here(wanted: HubName, reason: str) -> str:
    return (
        f"{wanted.said} is not in the Hugging Face cache {constants.HF_HUB_CACHE}: {reason}. On a machine with a "
        f"network, run `hf download {wanted.name} --repo-type dataset`, copy the directory that it prints to rank 0's machine, "
        f"and name its files in place of it"
    )
