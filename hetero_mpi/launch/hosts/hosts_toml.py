"""``hosts.toml``: a host file for machines with different settings, one ``[[host]]`` entry each.

    [[host]]
    address = "10.0.0.11"
    slots = 1
    python = "/home/me/cuda/bin/python"

An NVIDIA and an AMD GPU in one machine are two entries with one address and two Pythons, because a torch build supports one
vendor. ``read_hosts`` reports all errors of a file at once. ``docs/devices.md`` documents the keys.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hetero_mpi.device.choice import DEVICE, DEVICE_RULE, DEVICE_VARIABLE
from hetero_mpi.job.other_names import read_names
from hetero_mpi.job.rules import as_toml, broken_keys, may_be_empty
from hetero_mpi.launch.hosts.hostfile import HostEntry, check_slots, text_of
from hetero_mpi.util import toml
from hetero_mpi.util.errors import UserError

_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")  # no leading "-", which a launch agent would parse as an option
_ENDPOINT = re.compile(r"none|[A-Za-z0-9_][A-Za-z0-9_.\-]*:\d{1,5}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Host(BaseModel):
    """An entry of a hosts file: the ranks of one Python on one machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True)

    address: str
    """Name or IPv4 address at which every other host reaches this one. Several entries may share an address."""
    slots: Annotated[int, Field(ge=1)] = 1
    """Number of ranks in this entry."""
    name: str | None = None
    """Name of the entry in messages; its address if empty."""
    python: str | None = None
    """Python of this entry on its host, as an absolute path; if empty, the path of the Python that runs ``launch``."""
    prefix: str | None = None
    """Installation directory of MPI on the host, the parent of ``bin``. If empty, the environment of ``python`` if the local
    MPI is part of the local environment, else the same directory as here."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "mps", "rocm", "xpu", or one GPU of a backend: "cuda:1". Rank i of an entry uses GPU i."""
    directory: str | None = None
    """Working directory on the host, as an absolute path; if empty, the local path."""
    environment: dict[str, str] = {}
    """Environment variables for this entry's ranks. The host's process list shows them, so do not store secrets here."""
    mesh_address: str | None = None
    """For ``mesh init``: this machine's IPv4 address inside the mesh; if empty, the next free one."""
    endpoint: str | None = None
    """For ``mesh init``: ADDRESS:PORT at which others reach this host's WireGuard, if not ``address`` and the mesh's port (such
    as a port forwarded by a router); "none" if it is unreachable from outside and calls the other hosts."""

    @property
    def title(self) -> str:
        """Name of the entry in messages."""
        return self.name or self.address

    @property
    def executable(self) -> str:
        return self.python or sys.executable

    def variables(self) -> dict[str, str]:
        """Environment variables for the entry's ranks, including the device."""
        device = {} if self.device == "auto" else {DEVICE_VARIABLE: self.device}
        return {**device, **self.environment}


def read_hosts(path: str | Path) -> tuple[Host, ...]:
    """Return the entries of a ``hosts.toml``, in order.

    Raises a UserError that lists all problems (with entry, key and value) if the file is missing, is not TOML, or breaks rules.
    """
    values = tables_of(Path(path))
    problems = [
        f"{path}: {name} = {as_toml(value)}: unknown; a hosts file has [[host]] entries, and optionally [mesh]"
        for name, value in values.items()
        if name not in ("host", "mesh")
    ]
    entries = values.get("host", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        problems.append(f"{path}: host must be a list of tables: write [[host]], in double brackets, above each host")
        entries = []
    elif not entries and not problems:
        problems.append(f'{path}: names no host; write [[host]] and below it address = "10.0.0.11" for each')
    hosts: list[Host] = []
    for number, entry in enumerate(entries, start=1):
        fields = {key: Host.model_fields.get(key) for key, value in entry.items() if value == ""}
        empty = [key for key, field in fields.items() if field is not None and may_be_empty(field)]
        given_values = {key: value for key, value in entry.items() if key not in empty}
        rules = dict(_rules(given_values))
        for key, rule in rules.items():
            value_text = f" = {as_toml(given_values[key])}" if key in given_values else ""
            problems.append(f"{path}: [[host]] {number}: {key}{value_text}: {rule}")
        if not rules:
            hosts.append(Host.model_validate(given_values))
    if problems:
        raise UserError("hosts.invalid", "\n".join(problems))
    return tuple(hosts)


def tables_of(path: Path) -> dict[str, Any]:
    """Return the unchecked contents of a hosts file. Raises UserError if the file is missing or not TOML."""
    try:
        return toml.loads(text_of(path, "hosts"))
    except toml.TomlError as error:
        hint = "" if path.suffix == ".toml" else " (`name slots=2` lines are for --hostfile)"
        raise UserError("hosts.toml", f"{path}: a hosts file must be TOML: {error}{hint}") from None


def _rules(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, rule) for each rule that an entry breaks."""
    broken = broken_keys(Host, entry)
    if isinstance(entry.get("environment"), dict) and "environment" in broken:
        broken["environment"] = 'must hold strings in quotes, such as { OMP_NUM_THREADS = "8" }'
    other_names = read_names()["hosts"]
    broken |= {key: f"unknown key; {other_names[key.lower()]}" for key in broken if key.lower() in other_names}
    yield from broken.items()
    valid = {key: value for key, value in entry.items() if key not in broken}
    address, device, slots = valid.get("address"), valid.get("device", "auto"), valid.get("slots", 1)
    if address is not None and not _ADDRESS.fullmatch(address):
        yield "address", "must be a host name or an IPv4 address"
    if not DEVICE.fullmatch(device):
        yield "device", f"must be {DEVICE_RULE}"
    elif ":" in device and slots > 1:
        yield (
            "device",
            f'names one GPU for {slots} ranks: write slots = 1, or "{device.partition(":")[0]}" for one GPU per rank',
        )
    if not _ENDPOINT.fullmatch(valid.get("endpoint", "none")):
        yield "endpoint", 'must be ADDRESS:PORT, or "none" if other hosts cannot call this machine'
    for key in ("python", "prefix", "directory"):
        if key in valid and not valid[key].startswith("/"):
            yield key, "must be an absolute path on that host (~ is not expanded there)"
    invalid_names = [name for name in valid.get("environment", {}) if not _VARIABLE.fullmatch(name)]
    if invalid_names:
        yield "environment", f"{invalid_names[0]!r} cannot be the name of an environment variable"
    elif DEVICE_VARIABLE in valid.get("environment", {}):
        yield "environment", f'{DEVICE_VARIABLE} is set by device = "..."'


def ranks_of(hosts: Sequence[Host], ranks: int | None, path: str | Path) -> list[tuple[Host, int]]:
    """Fill the entries in order and return (entry, number of ranks) for those with ranks. If ``ranks`` is None, use all slots.

    Raises UserError for more ranks than slots.
    """
    remaining = sum(host.slots for host in hosts) if ranks is None else ranks
    check_slots([HostEntry(host.address, host.slots) for host in hosts], remaining, path)
    shares = []
    for host in hosts:
        share = min(host.slots, remaining)
        remaining -= share
        if share:
            shares.append((host, share))
    return shares
