"""Consistency rules of profiles beyond types. Since users edit profiles, all problems are reported with their keys."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from hetero_mpi.planning.types.codec import encode
from hetero_mpi.planning.types.profile import ANY_HOST, ITSELF, TABLES, ClusterProfile, Curve, DeviceProfile, LayerTimes
from hetero_mpi.planning.types.sizes import DTYPE_BYTES, EMBEDDING, HEAD
from hetero_mpi.util import units
from hetero_mpi.util.plug_ins import plug_in_names

DTYPES = tuple(DTYPE_BYTES)
MAX_LAYER_S = 1e6
"""Maximum seconds of a micro-batch in one layer (eleven days); longer times are typing errors."""
MIN_SPEED = 1e-9
MAX_NUMBER = 1e18
"""Maximum of all figures except speeds."""
MAX_PARTS = 10_000
"""Maximum number of heads or experts, which are assigned to ranks one by one."""
PARTS: dict[str, str | int] = {
    "trainable_parameters": "parameters",
    "divided_parameters": "parameters",
    "divided_trainable": "trainable_parameters",
    "expert_parameters": "divided_parameters",
    "expert_trainable": "divided_trainable",
    "matrix_bytes": "workspace_bytes",
    "divided_activations": 1,
    "divided_workspace": 1,
}
"""Layer figure -> figure (or number) that it must not exceed."""
BACKENDS = ("cpu", *plug_in_names("hetero_mpi.device.backends"))


def profile_problems(profile: ClusterProfile) -> list[str]:
    """Return all problems of a profile with their keys: rank order, missing links and times, unknown hosts."""
    ranks = [device.rank for device in profile.devices]
    problems = [*_link_problems(profile), *_model_problems(profile)]
    if ranks != list(range(len(ranks))) or not ranks:
        problems.insert(0, f"devices.rank = {ranks}: devices must be listed in rank order 0, 1, 2, ...")
    trained: dict[str, int] = {}
    for layer in profile.model.layers:
        trained[layer.kind] = trained.get(layer.kind, 0) + layer.trainable_parameters
    checked_contents = set()
    for device in profile.devices:
        content = repr(encode(replace(device, rank=0, host="")))
        if content not in checked_contents:  # devices like an earlier one have its problems
            problems += _device_problems(device, trained, f"devices[{device.rank}]")
        checked_contents.add(content)
    return [*problems, *_host_problems(profile)]


def number_problems(value: Any, path: str = "") -> list[str]:
    """Return the problems of plain values: negative or infinite figures, and speeds that are not positive."""
    if isinstance(value, dict):
        return [p for key, item in value.items() for p in number_problems(item, f"{path}.{key}" if path else key)]
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in number_problems(item, f"{path}[{i}]")]
    number = math.inf if value == "inf" else value
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        if path.endswith("bytes_per_s"):
            return [f"{path} = {value}: a speed must be at least {MIN_SPEED:g}"] if number < MIN_SPEED else []
        if number < 0:
            return [f"{path} = {value}: must not be negative"]
        if math.isinf(number):
            return [f"{path} = {value}: must be finite (only speeds may be inf)"]
        if number > MAX_NUMBER:
            return [f"{path} = {value}: must be at most {MAX_NUMBER:g}; correct it"]
    return []


def _link_problems(profile: ClusterProfile) -> Iterator[str]:
    hosts = {device.rank: device.host for device in profile.devices}
    names, pairs = set(hosts.values()), Counter((link.source, link.destination) for link in profile.links)
    pair_counts = Counter((link.source, link.destination) for link in profile.host_links)
    for ends in pair_counts:
        if ends not in ((ANY_HOST, ANY_HOST), (ANY_HOST, ITSELF)):
            yield from (f"host_links: no such host: {host}" for host in sorted({*ends} - names))
    yield from (f"host_links: {' -> '.join(ends)} given {n} times" for ends, n in pair_counts.items() if n > 1)
    # Of pairs of ranks there may be a million.
    unlinked = {(a, b) for a in names for b in names if profile.host_link(a, b) is None}
    if unlinked:
        for a, b in itertools.permutations(sorted(hosts), 2):
            if (hosts[a], hosts[b]) in unlinked and (a, b) not in pairs:
                yield f"links: missing the link {a} -> {b}"
    for a, b in sorted(pairs):
        if a not in hosts or b not in hosts or a == b:
            yield f"links: no such pair of ranks: {a} -> {b}"
    yield from (f"links: {a} -> {b} given twice" for (a, b), times in sorted(pairs.items()) if times > 1)
    for index, link in enumerate(profile.links):
        path = f"links[{index}] ({link.source} -> {link.destination})"
        if len(link.sample_bytes) != len(link.sample_s):
            counts = f"{len(link.sample_bytes)} and {len(link.sample_s)}"
            yield f"{path}: sample_bytes and sample_s must have the same length (they have {counts}); both may be omitted"
        a_host, b_host = hosts.get(link.source), hosts.get(link.destination)
        if a_host is not None and b_host is not None and link.same_host != (a_host == b_host):
            yield f"{path}.same_host = {str(link.same_host).lower()}: the ranks are on {a_host} and {b_host}"


def _model_problems(profile: ClusterProfile) -> Iterator[str]:
    model = profile.model
    if model.dtype not in DTYPES:
        yield f"model.dtype = {model.dtype!r}: must be {units.listed(DTYPES, 'or')}"
    if model.sequence_length < 1:
        yield f"model.sequence_length = {model.sequence_length}: must be at least 1"
    for name, count in (("heads", model.heads), ("experts", model.experts)):
        if count is not None and not 1 <= count <= MAX_PARTS:
            yield f"model.{name} = {count}: must be 1 to {MAX_PARTS:,}; omit it if ranks cannot share them"
    if model.heads is not None and not any(layer.divided_parameters for layer in model.layers):
        yield f"model.heads = {model.heads}: give layers divided_parameters (docs/tensor-parallelism.md), or omit heads"
    if len(model.layers) < 2:
        yield "model.layers: must have at least an embedding and a head"
    for index, layer in enumerate(model.layers):
        ends = {0: EMBEDDING, len(model.layers) - 1: HEAD}
        if index in ends and layer.kind != ends[index]:
            yield f"model.layers[{index}].kind = {layer.kind!r}: must be {ends[index]!r} at this end of the chain"
        for part, total in PARTS.items():
            value, limit = getattr(layer, part), getattr(layer, total) if isinstance(total, str) else total
            if value > limit:
                limit_text = f"its {total} = {limit}" if isinstance(total, str) else f"{limit}"
                yield f"model.layers[{index}].{part} = {value}: must be at most {limit_text}"


def _device_problems(device: DeviceProfile, trained: dict[str, int], path: str) -> Iterator[str]:
    """Yield the problems of one device; ``trained`` maps each layer kind to its trainable parameters."""
    if device.backend not in BACKENDS:
        yield f"{path}.backend = {device.backend!r}: must be {units.listed(BACKENDS, 'or')}"
    for dtype in device.dtypes:
        if dtype not in DTYPES:
            yield f"{path}.dtypes: {dtype!r} is unknown: must be {units.listed(DTYPES, 'or')}"
    if device.threads < 1:
        yield f"{path}.threads = {device.threads}: must be at least 1"
    if not device.activation_ratio >= 1:
        yield (
            f"{path}.activation_ratio = {device.activation_ratio}: must be at least 1, as the model's activation bytes are "
            f"those of the device that keeps the fewest"
        )
    for name in TABLES:
        table: dict[str, LayerTimes] = getattr(device, name)
        missing = [kind for kind in trained if kind not in table]
        if missing and (table or name == "layers"):
            yield f"{path}.{name}: no times for {', '.join(missing)}"
        for kind in table:
            if kind not in trained:
                yield f"{path}.{name}.{kind}: the model has no such layer; it has {', '.join(trained)}"
            yield from _times_problems(table[kind], trained.get(kind, 0) > 0, f"{path}.{name}.{kind}")


def _times_problems(times: LayerTimes, trained: bool, path: str) -> Iterator[str]:
    """Check that curves are positive, or 0 if nothing is computed (frozen first layers, no weight gradients)."""
    if (times.input_s is None) != (times.weight_s is None):
        yield f"{path}: input_s and weight_s are the two parts of the backward pass: set both or neither"
    for field in fields(times):
        curve: Curve | None = getattr(times, field.name)
        if curve is None:
            continue
        yield from _sample_problems(curve, f"{path}.{field.name}")
        curve_text = f"{path}.{field.name} = {list(curve.seconds)}"
        nothing = field.name == "weight_s" or (field.name in ("backward_s", "input_s") and not trained)
        if min(curve.seconds) == 0 and not (nothing and max(curve.seconds) == 0):
            yield f"{curve_text}: times must be above zero; correct them, or measure again"
        if any(2 * more < less for less, more in itertools.pairwise(curve.seconds)):
            rule = "more tokens cannot take less than half the time; correct them, or measure again"
            yield f"{curve_text} with {list(curve.tokens)} tokens: {rule}"
        if max(curve.seconds) > MAX_LAYER_S:
            yield f"{curve_text}: must be at most {MAX_LAYER_S:,.0f} s; correct it"


def _sample_problems(curve: Curve, path: str) -> Iterator[str]:
    counts = curve.sample_tokens
    if len(counts) != len(curve.samples):
        yield (
            f"{path}: sample_tokens and samples must have the same length (they have {len(counts)} and {len(curve.samples)}); "
            f"both may be omitted"
        )
    if any(low >= high for low, high in itertools.pairwise((0, *counts))):
        yield f"{path}.sample_tokens = {list(counts)}: must be positive and strictly increasing"
    if any(not times for times in curve.samples):
        yield f"{path}.samples: every entry of sample_tokens needs at least one sample; remove entries that have none"


def _host_problems(profile: ClusterProfile) -> Iterator[str]:
    used = list(dict.fromkeys(device.host for device in profile.devices))
    for name, times in Counter(host.name for host in profile.hosts).items():
        if times > 1:
            yield f"hosts.name = {name!r}: given {times} times"
        if name not in used:
            yield f"hosts.name = {name!r}: no device is on it; devices are on {', '.join(used)}"
    for index, host in enumerate(profile.hosts):
        if host.cores is not None and not host.cores > 0:
            yield f"hosts[{index}].cores = {host.cores}: must be above zero"
    listed = {host.name for host in profile.hosts}
    for device in profile.devices:
        if device.shares_host_memory and device.host not in listed:
            yield (
                f"devices[{device.rank}].shares_host_memory = true: this needs a [[hosts]] table with name = {device.host!r} and "
                f"the host's memory"
            )
