"""Times that cannot be meant, as they look: what a busy machine makes of a measurement, or a slip of the pen of a file.

Nothing here is impossible (``profile_rules`` refuses that), so a person is told and may go on. A measured table is judged by its
weight: a curve counts as implausible where what is odd about it is a notable share of the whole chain's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Protocol

from hetero_mpi.planning.types.codec import encode
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, LayerTimes
from hetero_mpi.planning.words import describe_seconds

NOTABLE = 0.25
"""Of the seconds of the whole chain: a curve that is out of line by less does no harm."""
MOST_PER_TOKEN = 3.0
"""Larger micro-batches fall out of caches, but no token takes so many times as long in them."""
MOST_SPREAD = 1.0
"""(p75 - p25) / median of the whole chain's time: beyond it the median itself is chance."""


def doubts(layers: Mapping[str, LayerTimes], kinds: Sequence[str]) -> list[str]:
    """What is implausible about a table of one rank's times, with layer kind, curve and values; nothing where all is well.

    Args:
        layers: layer kind -> times.
        kinds: of every layer of the chain.
    """
    number = Counter(kinds)
    both = [(kind, name, curve) for kind, name, curve in _curves(layers) if name in ("forward_s", "backward_s")]

    def chain_s(tokens: int) -> float:
        return sum(number[kind] * curve.at(tokens) for kind, _, curve in both)

    found = []
    for kind, name, curve in _curves(layers):
        odd = [(number[kind] * more_s / max(chain_s(tokens), 1e-12), text) for more_s, tokens, text in _odd(curve)]
        share, text = max(odd, default=(0.0, ""))
        if share >= NOTABLE:
            found.append(f"{kind}, {name}: {text}")
    for tokens in sorted({tokens for _, _, curve in both for tokens in curve.sample_tokens}):
        spreads = [(number[kind] * s * r, f"{kind}, {name}", s, r) for kind, name, c in both for s, r in _at(c, tokens)]
        if sum(one[0] for one in spreads) > MOST_SPREAD * chain_s(tokens):
            _, where, seconds, spread = max(spreads)
            found.append(
                f"{where}: {describe_seconds(seconds)} with {tokens} tokens is the middle of repetitions that differ by "
                f"{100 * spread:.0f} % of it"
            )
    return found


class Timed(Protocol):
    """A rank's tables of times, as ``DeviceProfile`` has them."""

    @property
    def layers(self) -> dict[str, LayerTimes]: ...
    @property
    def halved(self) -> dict[str, LayerTimes]: ...
    @property
    def without_experts(self) -> dict[str, LayerTimes]: ...


def rank_doubts(times: Timed, kinds: Sequence[str]) -> list[str]:
    """``doubts`` of whole layers, and of those of a member of a group."""
    member = {"half of the heads": times.halved, "none of the experts": times.without_experts}
    told = [f"with {what}: {doubt}" for what, layers in member.items() for doubt in doubts(layers, kinds)]
    return doubts(times.layers, kinds) + told


def profile_doubts(profile: ClusterProfile) -> list[str]:
    """``rank_doubts`` of every rank, with its number and device; ranks that are told alike share a line."""
    kinds = [layer.kind for layer in profile.model.layers]
    known: dict[str, list[str]] = {}
    ranks: dict[str, list[int]] = {}
    for device in profile.devices:
        content = repr(encode(replace(device, rank=0, host="")))
        if content not in known:  # of hundreds of ranks most are alike
            known[content] = rank_doubts(device, kinds)
        for doubt in known[content]:
            ranks.setdefault(f"({device.name}): {doubt}", []).append(device.rank)
    return [f"rank {', '.join(map(str, members))} {text}" for text, members in ranks.items()]


def _curves(layers: Mapping[str, LayerTimes]) -> Iterator[tuple[str, str, Curve]]:
    for kind, times in layers.items():
        for field in fields(times):
            curve: Curve | None = getattr(times, field.name)
            if curve is not None:
                yield kind, field.name, curve


def _odd(curve: Curve) -> Iterator[tuple[float, int, str]]:
    """(seconds out of line, tokens at which, in words) of pairs of samples of which the larger takes less time than the smaller,
    or far more per token."""
    samples = list(zip(curve.tokens, curve.seconds, strict=True))
    for place, (tokens, seconds) in enumerate(samples):
        for more, longer in samples[place + 1 :]:
            values = f"{describe_seconds(seconds)} with {tokens} tokens, but {describe_seconds(longer)} with {more}"
            yield seconds - longer, more, values
            yield longer - MOST_PER_TOKEN * seconds * more / tokens, more, values


def _at(curve: Curve, tokens: int) -> Iterator[tuple[float, float]]:
    """(seconds, spread) of the samples at ``tokens``, where there are any."""
    if tokens in curve.sample_tokens:
        yield curve.at(tokens), curve.spread[curve.sample_tokens.index(tokens)]
