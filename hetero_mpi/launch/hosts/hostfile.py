"""Host files: the hosts of a job and the number of ranks that each can run.

Both common styles are read, so that one file serves both MPIs::

    # Open MPI                      # MPICH
    rtx        slots=2              rtx:2
    me@mac     slots = 1            me@mac:1

Unknown words are rejected, with their line.
"""

import codecs
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetero_mpi.comm.ranks.library import OPEN_MPI
from hetero_mpi.util import units
from hetero_mpi.util.disk import require_regular
from hetero_mpi.util.errors import UserError

_USER = r"(?:[A-Za-z0-9_][A-Za-z0-9_.\-]*@)?"
_NAME = _USER + r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"  # no leading "-", which a launch agent would parse as an option
_IPV6 = re.compile(_USER + r"(\[[0-9A-Fa-f:.]+(%\w+)?\](:\d+)?|[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,}(%\w+)?)")
_HOST = re.compile(rf"({_NAME})(?::(\S*))?")
_SLOTS_KEYS = ("slots",)
_MAX_SLOTS_KEYS = ("max_slots", "max-slots", "slots_max", "slots-max")
_HYDRA_KEYS = ("ifname", "binding")
"""Options of MPICH that the launch command supersedes."""


@dataclass(frozen=True)
class HostEntry:
    """A line of a host file: a host and its number of slots."""

    name: str
    """Host name for ssh, optionally with a user (``me@mac``)."""
    slots: int | None
    """Number of ranks that this host can run; None if not specified."""


def read_hostfile(path: str | Path) -> tuple[HostEntry, ...]:
    """Return the entries of a host file. Raises UserError if it is missing, empty or invalid (with the line's number)."""
    entries, text = [], text_of(Path(path), "host")
    if re.search(r"^\s*\[\[host\]\]", text, re.MULTILINE):
        raise UserError("hosts.is_toml", f"{path} has [[host]] entries: write `--hosts {path}`, not --hostfile.")
    for number, line in enumerate(text.splitlines(), start=1):
        content = re.split("#|//", line)[0].strip()
        if content:
            entries.append(_parse_line(content, f"{path}, line {number}"))
    if not entries:
        raise UserError("hosts.empty", f"Host file {path} lists no host: write one per line, such as `rtx slots=2`.")
    return tuple(entries)


def text_of(path: Path, kind: Literal["host", "hosts"]) -> str:
    """Read a host file or a hosts file without the byte-order mark that Windows editors add. Raises UserError."""
    option = "--hosts" if kind == "hosts" else "--hostfile"
    require_regular(path)
    try:
        content = path.read_bytes()
        wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return content.decode("utf-16" if wide else "utf-8-sig")
    except OSError as error:
        raise UserError(
            "hosts.unreadable", f"The {kind} file {path} cannot be read ({error.strerror}): check `{option}`."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            "hosts.encoding", f"The {kind} file {path} must be UTF-8 text ({error}): check `{option}`."
        ) from error


def _parse_line(content: str, location: str) -> HostEntry:
    first, *options = re.sub(r"\s*=\s*", "=", content).split()
    if _IPV6.fullmatch(first):
        raise UserError(
            "hosts.ipv6",
            f"{location}: `{first}` is an IPv6 address, but ranks need IPv4: write the host's name or IPv4 address.",
        )
    match = _HOST.fullmatch(first)
    if match is None:
        raise UserError(
            "hosts.line",
            f"{location}: `{first}` is invalid: each line has the name or IPv4 address of one host, such as `rtx slots=2`.",
        )
    name, count = match[1], match[2]
    slot_counts = [_slots(count, location)] if count is not None else []
    for option in options:
        key, _, value = option.partition("=")
        if key in _SLOTS_KEYS:
            slot_counts.append(_slots(value, location))
        elif key in _MAX_SLOTS_KEYS:
            _slots(value, location)  # slots is the limit in any case
        elif key not in _HYDRA_KEYS or not value:
            hint = "; set another port in ~/.ssh/config" if key == "port" else ""
            slots = value if value.isdigit() and key != "port" else 2
            raise UserError(
                "hosts.option",
                f"{location}: `{option}` of `{content}` is unknown: write `{name} slots={slots}` or `{name}:{slots}`{hint}.",
            )
    if len(set(slot_counts)) > 1:
        raise UserError(
            "hosts.two_counts",
            f"{location}: `{content}` gives two rank counts, {slot_counts[0]} and {slot_counts[1]}: write one.",
        )
    return HostEntry(name, slot_counts[0] if slot_counts else None)


def _slots(text: str, location: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise UserError(
            "hosts.slots", f"{location}: the number of ranks must be a positive whole number, not `{text[:40]}`."
        )
    return int(text)


def check_slots(entries: Iterable[HostEntry], ranks: int, path: str | Path) -> None:
    """Raise UserError for more ranks than the file has slots. Hosts without a number of slots are unlimited."""
    slots = [entry.slots for entry in entries]
    known_slots = [count for count in slots if count is not None]
    if len(known_slots) == len(slots) and sum(known_slots) < ranks:
        raise UserError(
            "hosts.too_many_ranks",
            f"-np {ranks} asks for more ranks than the {units.plural(sum(known_slots), 'slot')} in {path}: "
            f"raise `slots=` of a host there, or start with -np {sum(known_slots)}.",
        )


def slots_by_host(entries: Iterable[HostEntry]) -> Counter[str]:
    """Sum up the slots of each host over its entries, in order; an entry without a number counts as 1."""
    slots = Counter[str]()
    for entry in entries:
        slots[entry.name] += entry.slots or 1
    return slots


def format_hostfile(entries: Iterable[HostEntry], family: str) -> str:
    """Format a host file in the style of an MPI family, one line per host; MPICH expects the user after the name."""
    all_entries = tuple(entries)
    hosts_without_slots = {entry.name for entry in all_entries if entry.slots is None}
    lines = []
    for name, count in slots_by_host(all_entries).items():
        slots_text = "" if name in hosts_without_slots else f" slots={count}" if family == OPEN_MPI else f":{count}"
        user, _, host = name.rpartition("@")
        lines.append(f"{name}{slots_text}" if family == OPEN_MPI or not user else f"{host}{slots_text} user={user}")
    return "".join(f"{line}\n" for line in lines)
