"""The product of the equality tests' fields, and those of its cases that the long suite runs."""

import itertools
from collections.abc import Sequence
from typing import Any

from tests.support.training_cases import Case


def product(**values: Sequence[Any]) -> tuple[Case, ...]:
    """A case for each choice of one of the values of every field; fields whose names stand in one word vary together."""
    cases = []
    for choice in itertools.product(*values.values()):
        fields: dict[str, Any] = {}
        for names, value in zip(values, choice, strict=True):
            fields |= dict(zip(names.split("__"), value, strict=True)) if "__" in names else {names: value}
        cases.append(Case("-".join(map(str, fields.values())), **fields))
    return tuple(cases)


BOTH = (False, True)
FAMILIES = (("llama", False), ("qwen3", True), ("gemma2", True), ("gpt_neox", False))
TRAINED = (("full", "fp32"), ("lora", "fp32"), ("full", "bf16"))
CUTS = product(
    family=("llama", "qwen3", "gemma2", "gpt_neox", "phi3"),
    tied=BOTH,
    dropout=(0.0, 0.1),
    packing=BOTH,
    micro_batch=(1, 4),
    split=("even", "uneven", "ends", "reversed"),
)
"""How one pipeline is cut, what it trains, and how its data are packed."""
SHARED = tuple(
    case
    for case in product(
        family__tied=FAMILIES,
        pipelines=("one", "each", "two", "tail"),
        shares=("whole", "unequal"),
        schedule=("1f1b", "gpipe", "split"),
        recompute=BOTH,
        tuning__dtype=TRAINED,
        changing=BOTH,
        micro_batch__split=((1, "uneven"),),
    )
    if (case.pipelines, case.shares) != ("one", "unequal")
)
"""How a batch is shared among pipelines, in which order they compute, and what is trained in which dtype."""
ROUTED = tuple(
    case
    for case in product(
        family__tied__dropout=(("mixtral", False, 0.1), ("qwen3_moe", True, 0.0), ("flex_olmo", False, 0.0)),
        packing__changing=((False, False), (True, True)),
        pipelines=("one", "each", "two", "tail"),
        schedule=("1f1b", "split"),
        recompute=BOTH,
        streamed=BOTH,
        tuning__dtype=TRAINED,
        split__routers=(("ends", True),),
    )
    if not (case.streamed and (case.recompute or case.schedule == "split"))
)
"""Models whose routers have a loss. Micro-batches are the reference's: what a token's experts are may hang on the last bit."""
SEVERAL = tuple(
    case
    for case in product(
        family__tied=FAMILIES,
        dropout=(0.0, 0.1),
        micro_batch=(1, 2),
        split=("looped", "V"),
        schedule=("zbv", "dualpipev"),
        recompute=BOTH,
        tuning__dtype=(*TRAINED[:2], ("nf4", "bf16"), TRAINED[2], ("lora", "fp16")),
        changing=BOTH,
        slice_sequences__reference_micro_batch=((None, 0), (1, 1)),
    )
    # Qwen 3 in fp16 overflows in every one of these few steps, in one process too.
    if (case.family, case.dtype) != ("qwen3", "fp16")
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
