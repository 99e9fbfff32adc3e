"""The product of the equality tests' fields, and those of its cases that the long suite runs."""

from __future__ import annotations

import itertools

from tests.support.training_cases import Case

CUTS = tuple(
    Case(
        f"{family}-{tied}-{dropout}-{packing}-{micro_batch}-{split}", family, tied, dropout, packing, micro_batch, split
    )
    for family in ("llama", "qwen3", "gemma2", "gpt_neox", "phi3")
    for tied in (False, True)
    for dropout in (0.0, 0.1)
    for packing in (False, True)
    for micro_batch in (1, 4)
    for split in ("even", "uneven", "ends", "reversed")
)
"""How one pipeline is cut, what it trains, and how its data are packed."""
SHARED = tuple(
    Case(
        f"{family}-{pipelines}-{shares}-{schedule}-{recompute}-{tuning}-{dtype}-{changing}",
        family,
        tied,
        0.0,
        True,
        1,
        "uneven",
        tuning=tuning,
        recompute=recompute,
        dtype=dtype,
        pipelines=pipelines,
        shares=shares,
        schedule=schedule,
        changing=changing,
    )
    for family, tied in (("llama", False), ("qwen3", True), ("gemma2", True), ("gpt_neox", False))
    for pipelines in ("one", "each", "two", "tail")
    for shares in ("whole", "unequal")
    for schedule in ("1f1b", "gpipe", "split")
    for recompute in (False, True)
    for tuning, dtype in (("full", "fp32"), ("lora", "fp32"), ("full", "bf16"))
    for changing in (False, True)
    if (pipelines, shares) != ("one", "unequal")
)
"""How a batch is shared among pipelines, in which order they compute, and what is trained in which dtype."""

ROUTED = tuple(
    Case(
        f"{family}-routers-{dropout}-{packing}-{pipelines}-{schedule}-{recompute}-{streamed}-{tuning}-{dtype}",
        family,
        tied,
        dropout,
        packing,
        2,
        "ends",
        tuning=tuning,
        recompute=recompute,
        dtype=dtype,
        pipelines=pipelines,
        schedule=schedule,
        changing=packing,
        streamed=streamed,
        routers=True,
    )
    for family, tied, dropout in (("mixtral", False, 0.1), ("qwen3_moe", True, 0.0), ("flex_olmo", False, 0.0))
    for packing in (False, True)
    for pipelines in ("one", "each", "two", "tail")
    for schedule in ("1f1b", "split")
    for recompute in (False, True)
    for streamed in (False, True)
    for tuning, dtype in (("full", "fp32"), ("lora", "fp32"), ("full", "bf16"))
    if not (streamed and (recompute or schedule == "split"))
)
"""Models whose routers have a loss. Micro-batches are the reference's: what a token's experts are may hang on the last bit."""
SEVERAL = tuple(
    Case(
        f"{family}-{dropout}-{micro_batch}-{split}-{schedule}-{recompute}-{tuning}-{dtype}-{changing}-{slices}",
        family,
        tied,
        dropout,
        True,
        micro_batch,
        split,
        micro_batch if slices is None else 1,
        tuning,
        recompute,
        dtype,
        schedule=schedule,
        changing=changing,
        slice_sequences=slices,
    )
    for family, tied in (("llama", False), ("qwen3", True), ("gemma2", True), ("gpt_neox", False))
    for dropout in (0.0, 0.1)
    for micro_batch in (1, 2)
    for split in ("looped", "V")
    for schedule in ("zbv", "dualpipev")
    for recompute in (False, True)
    for tuning, dtype in (("full", "fp32"), ("lora", "fp32"), ("nf4", "bf16"), ("full", "bf16"), ("lora", "fp16"))
    for changing in (False, True)
    for slices in (None, 1)
    if (family, dtype) != ("qwen3", "fp16")  # which overflows in every one of these few steps, in one process too
)
"""Ranks with several stages."""


def covering(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Some of the ``cases``, in which every two values meet that meet in any of them: each time the one with the most new pairs."""
    fields = [name for name in vars(cases[0]) if name != "name"]
    numbers: dict[tuple[object, ...], int] = {}
    pairs = dict[Case, int]()  # each pair of values is a bit
    for case in cases:
        own = itertools.combinations([(name, getattr(case, name)) for name in fields], 2)
        pairs[case] = sum(1 << numbers.setdefault(pair, len(numbers)) for pair in own)
    left, chosen = (1 << len(numbers)) - 1, list[Case]()
    while left:
        chosen.append(max(cases, key=lambda case: (pairs[case] & left).bit_count()))
        left &= ~pairs[chosen[-1]]
    return tuple(chosen)


FULL = covering(CUTS) + covering(SHARED) + covering(ROUTED) + covering(SEVERAL)
"""All pairs of values of the fields: all cases would take hours on four numbers of ranks."""
