"""A measured cluster: devices, links, and the model they were measured with."""

import bisect
import itertools
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.util.display import Displayed
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.grouping import grouped

SCHEMA_VERSION = 3
MEASURED = "measured"
"""``source`` of a profile measured on the cluster."""
EMULATED = "emulated"
"""Prefix of the ``source`` of a profile whose devices and links are emulated."""


@dataclass(frozen=True)
class Curve:
    """Seconds as a piecewise linear function of the token count, extrapolated from the nearest segment.

    ``tokens`` is strictly increasing. With one knot the line runs through the origin. Extrapolation is clamped against noise:
    more tokens take at least as long as the last knot, fewer at least a proportional share of the first.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    sample_tokens: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Token counts of ``samples``; strictly increasing."""
    samples: tuple[tuple[float, ...], ...] = field(default=(), compare=False, repr=False)
    """Seconds of the repetitions at each of ``sample_tokens``, to which the curve was fitted (``planning.fit``); empty if it
    was derived or written by hand. Ignored by comparisons and planning."""

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.seconds):
            raise UserError(
                "profile.curve",
                f"a curve needs at least one knot and as many seconds as tokens "
                f"(tokens: {list(self.tokens)}, seconds: {list(self.seconds)})",
            )
        if any(low >= high for low, high in zip((0, *self.tokens), self.tokens, strict=False)):
            raise UserError(
                "profile.curve",
                f"the tokens of a curve must be positive and strictly increasing (tokens: {list(self.tokens)})",
            )

    @property
    def spread(self) -> tuple[float, ...]:
        """Relative spread (p75 - p25) / median of the repetitions at each of ``sample_tokens``; 0 for fewer than three."""
        return tuple(_spread(times) for times in self.samples)

    def at(self, tokens: float) -> float:
        """Seconds for a micro-batch of ``tokens`` tokens; exact at knots."""
        index = bisect.bisect_left(self.tokens, tokens)
        if index < len(self.tokens) and self.tokens[index] == tokens:
            return self.seconds[index]
        if len(self.tokens) == 1:
            return self.seconds[0] * tokens / self.tokens[0]
        right = min(max(index, 1), len(self.tokens) - 1)
        x0, x1 = self.tokens[right - 1], self.tokens[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        line = y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)
        if index == len(self.tokens):
            return max(line, y1)
        return max(line, y0 * tokens / x0) if index == 0 else line


def _spread(times: Sequence[float]) -> float:
    if len(times) < 3:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle if middle > 0 else 0.0


@dataclass(frozen=True)
class LayerTimes:
    """Seconds that a layer kind takes on one device, per micro-batch with a given number of tokens."""

    forward_s: Curve
    backward_s: Curve
    recompute_s: Curve | None = None
    """Total time of backward with recomputation; if None (not measured), forward + backward is used."""
    input_s: Curve | None = None
    """First part of a split backward: gradients of the input and of non-matrices. If None (not measured), backward is not
    split."""
    weight_s: Curve | None = None
    """Second part of a split backward: gradients of the matrices."""


@dataclass(frozen=True, repr=False)
class DeviceProfile(Displayed):
    """Measurements of one rank."""

    rank: int
    host: str
    backend: str
    """``cuda``, ``rocm``, ``mps``, ``xpu`` or ``cpu``."""
    name: str
    memory_bytes: int
    """Usable memory for this rank (weights, state, activations, buffers)."""
    memory_reason: str
    """How ``memory_bytes`` was determined, in words."""
    dtypes: tuple[str, ...]
    """Compute dtypes this device can use: ``fp32``, ``bf16``, ``fp16``."""
    layers: dict[str, LayerTimes]
    """Layer kind -> times with dedicated cores."""
    optimizer_fixed_s: float
    optimizer_s_per_parameter: float
    """One optimizer step takes ``optimizer_fixed_s`` plus this value times the number of trainable parameters."""
    copy_latency_s: float = 0.0
    """Seconds that the smallest copy between device and host takes (0 on CPU ranks, which copy nothing)."""
    device_to_host_bytes_per_s: float = float("inf")
    host_to_device_bytes_per_s: float = float("inf")
    threads: int = 1
    """CPU threads of a CPU rank."""
    compiled: bool = False
    """Whether blocks were compiled when timed; split backwards and shards never are."""
    forward_overhead_s: float = 0.0
    """Seconds per forward of a micro-batch in addition to the layers (masks, rotary tables, calls)."""
    backward_overhead_s: float = 0.0
    shares_host_memory: bool = False
    """Whether ``memory_bytes`` is the host's memory, shared by its ranks (CPU ranks, integrated GPUs)."""
    host_optimizer_s_per_parameter: float | None = None
    """``optimizer_s_per_parameter`` in host memory, for offloaded full fine-tuning; None if not measured (as on CPU ranks)."""
    activation_ratio: float = 1.0
    """Ratio of a block's kept activation bytes to the model's: above 1 where attention has no fused kernel."""
    halved: dict[str, LayerTimes] = field(default_factory=dict)
    """Times with half of the heads (rounded down) and experts, if measured; without all-reduces."""
    without_experts: dict[str, LayerTimes] = field(default_factory=dict)
    """Times with half of the heads and no experts, where layers have experts."""


TABLES = "layers", "halved", "without_experts"
"""A device's tables of times by layer kind."""


@dataclass(frozen=True)
class HostProfile:
    """Resources that the ranks of one host share."""

    name: str
    memory_bytes: int
    """Usable memory of the host itself, for all its ranks together."""
    memory_reason: str
    shared_nic: bool = False
    """Whether messages to and from other hosts all queue for one NIC, measured by sending them concurrently."""
    flows_bytes_per_s: float = float("inf")
    """Total bandwidth of all concurrent flows that leave the host."""
    copies_bytes_per_s: float = float("inf")
    """Total bandwidth of concurrent copies from host memory to devices with their own memory, assumed for the reverse direction
    too. Infinite if unlimited or if there is at most one such device."""
    sum_latency_s: float = 0.0
    """Two ranks of the host take ``sum_latency_s + n / sum_bytes_per_s`` to add n bytes in host memory."""
    sum_bytes_per_s: float | None = None
    cores: float | None = None
    """Cores that the host's CPU ranks share; None means one core per thread."""
    other_threads: float = 0.0
    """Threads of other programs on these cores at the time of measurement."""
    disk_bytes_per_s: float | None = None
    """Read bandwidth for frozen weights in files; if None (not measured), no plan reads them from disk."""


@dataclass(frozen=True, repr=False)
class LinkProfile(Displayed):
    """One directed pair of ranks: ``seconds(bytes) = latency_s + bytes / bytes_per_s``, host buffer to host buffer."""

    source: int
    destination: int
    latency_s: float
    bytes_per_s: float
    same_host: bool
    sample_bytes: tuple[int, ...] = ()
    sample_s: tuple[float, ...] = ()


ANY_HOST = "*"
ITSELF = "itself"


@dataclass(frozen=True)
class HostLinkProfile:
    """One link for all ranks of two hosts or within one host, as large clusters have millions of pairs of ranks."""

    source: str
    """A host, or ``ANY_HOST`` as the default."""
    destination: str
    """A host; for source ``ANY_HOST`` either ``ANY_HOST`` (two hosts) or ``ITSELF`` (two ranks of one host)."""
    latency_s: float
    bytes_per_s: float

    @property
    def same_host(self) -> bool:
        return self.destination in (self.source, ITSELF) and self.destination != ANY_HOST


_Value = TypeVar("_Value")
_Floats = NDArray[np.float64]
_Pairs = tuple[NDArray[np.int64], _Floats, _Floats, _Floats, _Floats]


@dataclass(frozen=True, repr=False)
class ClusterProfile(Displayed):
    """Everything that planning knows: an editable TOML file in ``profiles/`` or the run directory."""

    source: str
    """Origin of the figures: ``measured``, ``derived from ...``, ``emulated``."""
    date: str
    key: str
    """Profiles with equal keys have equal devices, dtype, model shape, sequence length and versions."""
    mpi_library: str
    versions: dict[str, str]
    model: ModelCost
    devices: tuple[DeviceProfile, ...]
    """Devices in rank order: ``devices[i].rank == i``."""
    links: tuple[LinkProfile, ...] = ()
    schema_version: int = SCHEMA_VERSION
    hosts: tuple[HostProfile, ...] = ()
    """Hosts with a memory limit or shared NIC."""
    host_links: tuple[HostLinkProfile, ...] = ()
    """Links by pair of hosts; ``links`` takes precedence."""
    notes: tuple[str, ...] = field(default=())
    """Remarks for the reader, such as "3 ranks share 2 cores: timed all at once"."""

    @property
    def emulated(self) -> bool:
        return self.source.startswith(EMULATED)

    def model_on(self, rank: int) -> ModelCost:
        return self.model.keeping(self.devices[rank].activation_ratio)

    def link(self, source: int, destination: int) -> LinkProfile:
        listed_link = self._link_of.get((source, destination))
        if listed_link is not None:
            return listed_link
        hosts = self.devices[source].host, self.devices[destination].host
        between = self.host_link(*hosts)
        if between is None or source == destination:
            raise UserError(
                "profile.link_missing",
                f"every directed pair of ranks needs a link (missing: {source} -> {destination}); "
                f"add a [[links]] table or measure the cluster again",
            )
        return LinkProfile(source, destination, between.latency_s, between.bytes_per_s, hosts[0] == hosts[1])

    @cached_property
    def _link_of(self) -> dict[tuple[int, int], LinkProfile]:
        return {(link.source, link.destination): link for link in reversed(self.links)}

    def host_link(self, source: str, destination: str) -> HostLinkProfile | None:
        """Return the link from one host to another or within one host, or None if it is not listed."""
        link_by_hosts, any_other = self._host_link_of, ITSELF if source == destination else ANY_HOST
        return link_by_hosts.get((source, destination)) or link_by_hosts.get((ANY_HOST, any_other))

    def described_links(self) -> tuple[LinkProfile, ...]:
        """Return ``links``, or one link per pair of hosts if ``links`` is empty."""
        if self.links:
            return self.links
        ranks = grouped(range(len(self.devices)), lambda rank: self.devices[rank].host).values()
        ends = ((a[0], b[-1]) for a in ranks for b in ranks)
        return tuple(self.link(a, b) for a, b in ends if a != b)

    @cached_property
    def _host_link_of(self) -> dict[tuple[str, str], HostLinkProfile]:
        return {(link.source, link.destination): link for link in reversed(self.host_links)}

    def host(self, rank: int) -> HostProfile | None:
        """Return the host of ``rank``, or None if it is not listed."""
        return self._host_of.get(self.devices[rank].host)

    @cached_property
    def _host_of(self) -> dict[str, HostProfile]:
        return {host.name: host for host in self.hosts}

    def transfer_s(self, source: int, destination: int, message_bytes: float) -> float:
        """Seconds to send one message from device to device: copy to the host, link, copy to the device."""
        out, into = self.devices[source], self.devices[destination]
        link = self.link(source, destination)
        return (
            (out.copy_latency_s + message_bytes / out.device_to_host_bytes_per_s)
            + (link.latency_s + message_bytes / link.bytes_per_s)
            + (into.copy_latency_s + message_bytes / into.host_to_device_bytes_per_s)
        )

    def messages_s(self, ranks: Sequence[int], message_bytes: float) -> _Floats:
        """Seconds [source, destination] of a message between any two ``ranks``, as ``transfer_s``; 0 on the diagonal."""
        places, latency_s, per_byte_s, out, into = self._pairs
        at = np.array(ranks)
        pairs = np.ix_(places[at], places[at])
        copied = out[at][:, None, :] + into[at][None, :, :]
        seconds = (latency_s[pairs] + copied[:, :, 0]) + message_bytes * (per_byte_s[pairs] + copied[:, :, 1])
        np.fill_diagonal(seconds, 0.0)
        for a, b in np.argwhere(np.isnan(seconds)):
            self.link(ranks[a], ranks[b])  # raises an error that names the missing link
        return np.asarray(seconds)

    @cached_property
    def _known(self) -> dict[Hashable, Any]:
        return {}

    def cached(self, key: Hashable, compute: Callable[[], _Value]) -> _Value:
        """Return ``compute()``, computed once for each key."""
        if key not in self._known:
            self._known[key] = compute()
        return cast(_Value, self._known[key])

    @cached_property
    def _pairs(self) -> _Pairs:
        """Return positions of ranks, latency and seconds per byte between positions, and of device copies [rank, 2].

        A rank's position is its host if there are only host links, else its number. A missing link is NaN. Copies are those out
        of and into the device.
        """
        names = [device.host for device in self.devices]
        hosts = list(dict.fromkeys(names))
        by_host = not self.links
        places = np.array([hosts.index(name) if by_host else rank for rank, name in enumerate(names)])
        count = len(hosts) if by_host else len(names)
        latency_s, per_byte_s = np.full((count, count), np.nan), np.full((count, count), np.nan)
        for a, b in itertools.product(range(count), repeat=2):
            pair = (hosts[a], hosts[b]) if by_host else (names[a], names[b])
            link = (None if by_host else self._link_of.get((a, b))) or self.host_link(*pair)
            if link is not None:
                latency_s[a, b], per_byte_s[a, b] = link.latency_s, 1 / link.bytes_per_s
        out = np.array([(d.copy_latency_s, 1 / d.device_to_host_bytes_per_s) for d in self.devices])
        into = np.array([(d.copy_latency_s, 1 / d.host_to_device_bytes_per_s) for d in self.devices])
        return places, latency_s, per_byte_s, out, into
