"""Host files: the machines that take part, and how many ranks each may hold.

Both common styles are read, so that one file serves both MPIs::

    # Open MPI              # MPICH
    rtx  slots=2            rtx:2
    mac  slots=1            mac:1
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hetero_mpi.comm.ranks.library import OPEN_MPI
from hetero_mpi.errors import UserError

_IGNORED_KEYS = ("max_slots", "max-slots", "port", "ifname", "binding")


@dataclass(frozen=True)
class HostEntry:
    """A line of a host file: a host and its number of slots."""

    name: str
    slots: int | None
    """Ranks this host may hold; ``None``: not said."""
    style: str | None = None
    """``Open MPI`` or ``MPICH`` if the line can only be read in that style, else ``None``."""


def read_hostfile(path: str | Path) -> tuple[HostEntry, ...]:
    """The entries of a host file, in its order.

    :raises UserError: the file does not exist, names no host, or has a line in neither style (with its number).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"The host file {path} cannot be read ({error.strerror}): check `--hostfile`.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"The host file {path} must be text in UTF-8 ({error}): check `--hostfile`.") from error
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#")[0].strip()
        if content:
            entries.append(_parse_line(content, f"{path}, line {number}"))
    if not entries:
        raise UserError(f"The host file {path} names no host: write one per line, such as `rtx slots=2`.")
    return tuple(entries)


def _parse_line(content: str, place: str) -> HostEntry:
    name, *options = content.split()
    slots: int | None = None
    style: str | None = None
    if name.count(":") == 1:
        name, _, count = name.partition(":")
        slots, style = _slots(count, place), "MPICH"
    for option in options:
        key, _, value = option.partition("=")
        if key == "slots":
            slots, style = _slots(value, place), OPEN_MPI
        elif key not in _IGNORED_KEYS:
            raise UserError(f"{place}: `{content}` is not understood: write `{name} slots=2` or `{name}:2`.")
    return HostEntry(name, slots, style)


def _slots(text: str, place: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise UserError(f"{place}: the number of ranks must be a positive whole number, not `{text[:40]}`.")
    return int(text)


def check_slots(entries: Iterable[HostEntry], ranks: int, path: str | Path) -> None:
    """Refuse more ranks than the file offers. Hosts without a number may hold any.

    :raises UserError: too few slots, with both numbers.
    """
    slots = [entry.slots for entry in entries]
    known = [count for count in slots if count is not None]
    if len(known) == len(slots) and sum(known) < ranks:
        raise UserError(
            f"-np {ranks} asks for more ranks than the {sum(known)} slots in {path}: "
            f"raise `slots=` of a host there, or start with -np {sum(known)}."
        )


def slots_by_host(entries: Iterable[HostEntry]) -> Counter[str]:
    """Host -> slots of all its entries, in their order (1 where the file gives no number)."""
    slots = Counter[str]()
    for entry in entries:
        slots[entry.name] += entry.slots or 1
    return slots


def host_list(entries: Iterable[HostEntry]) -> str:
    """The hosts as one word that both launchers read: ``rtx:2,mac:1``."""
    return ",".join(f"{name}:{count}" for name, count in slots_by_host(entries).items())


def format_hostfile(entries: Iterable[HostEntry], family: str) -> str:
    """The text of a host file in the style of an MPI family (``Open MPI`` or ``MPICH``)."""
    between = " slots=" if family == OPEN_MPI else ":"
    return "".join(f"{one.name}\n" if one.slots is None else f"{one.name}{between}{one.slots}\n" for one in entries)
