"""Decoding in one process: picks, spelling, and every family's logits over several stages."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hetero_mpi.data.tokenizer import load_tokenizer
from hetero_mpi.device.accelerators import open_backend
from hetero_mpi.inference import sampling as sampling_module
from hetero_mpi.inference.adapter_switch import OPENED, add_adapter
from hetero_mpi.inference.decoding import (
    OWN_CACHE,
    Decoder,
    cache_keyword,
    reason_against_batches,
    takes_pieces,
)
from hetero_mpi.inference.sampling import NOT_A_NUMBER, Sampling, pick
from hetero_mpi.inference.spelling import Spelling
from hetero_mpi.inference.writer import Round, Task, TextChanges, Writer
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.layer.interface import seed_from
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import PROVEN_FAMILIES, read_config
from hetero_mpi.model.transformers.weights import FileStart
from hetero_mpi.model.tuning import nothing_trained
from tests.support.family_configs import VOCABULARY, tiny_keys
from tests.support.plain_training import set_training
from tests.support.ranks import LoopbackNetwork
from tests.support.stages import stage_of
from tests.support.tiers import slow_unless
from tests.support.training_cases import Case, corpus, model_directory, tokenizer_directory


def test_picks_follow_temperature_and_nucleus() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert pick(logits, Sampling(), 0) == 0
    drawn = [pick(logits, Sampling(1.0, 0.79, 5), position) for position in range(400)]
    assert set(drawn) == {0, 1}, "0.5 + 0.3 reach 0.79"
    assert 0.55 < drawn.count(0) / 400 < 0.7, "0.5 / 0.8"
    assert drawn == [pick(logits, Sampling(1.0, 0.79, 5), position) for position in range(400)]
    cold = [pick(logits, Sampling(1e-30, 1.0, 5), position) for position in range(20)]
    assert set(cold) == {0}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9, 5)], ids=["greedy", "drawn"])
def test_logits_that_give_no_token_are_told_and_forbidden_tokens_are_not_picked(sampling: Sampling) -> None:
    for bad in ([0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf], [math.nan, math.inf]):
        assert pick(torch.tensor(bad), sampling, 0) == NOT_A_NUMBER
    assert {pick(torch.tensor([-math.inf, 0.0]), sampling, position) for position in range(20)} == {1}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.8, 1.0, 3, top_k=5),
        Sampling(1.3, 0.7, 3, top_k=20),
        Sampling(1.0, 1.0, 3, min_p=0.2),
        Sampling(0.7, 0.9, 3, top_k=30, min_p=0.05, repetition_penalty=1.7),
        Sampling(1.0, 1.0, 3, repetition_penalty=0.6),
        Sampling(0.0, repetition_penalty=1.9),
        Sampling(0.0, repetition_penalty=5.0),
    ],
    ids=str,
)
def test_picks_are_those_of_the_steps_of_transformers(sampling: Sampling) -> None:
    """Greedily the same token, and drawn from the same probabilities by the same random number."""
    steps: list[Any] = [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    steps += [MinNewTokensLengthLogitsProcessor(4, 2, torch.tensor([7, 9]))]
    if sampling.temperature:
        steps += [TemperatureLogitsWarper(sampling.temperature)]
        steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        steps += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    generator = torch.Generator().manual_seed(1)
    changed = 0
    for position in range(4, 204):
        logits = torch.randn(50, generator=generator) * 3
        if sampling.top_p == 1:  # of tokens as likely as each other top_p drops any, and top_k none
            logits[20:24] = logits[19]
        known = torch.randint(50, (position,), generator=generator).tolist()
        scores = logits[None]
        for step in steps:
            scores = step(torch.tensor([known]), scores)
        picked = pick(logits, sampling, position, known, [7, 9] if position < 6 else [])
        if sampling.temperature == 0:
            assert picked == int(scores.argmax())
            changed += picked != int(logits.argmax())
            continue
        likely, tokens = torch.softmax(scores[0].double(), 0).sort(descending=True, stable=True)
        assert picked == int(tokens[torch.searchsorted(likely.cumsum(0), share(sampling, position), right=True)])
        changed += picked != pick(logits, Sampling(sampling.temperature, 1.0, sampling.seed), position)
    assert changed, "the settings do something"


def share(sampling: Sampling, position: int) -> torch.Tensor:
    """The random number of a position."""
    generator = torch.Generator().manual_seed(seed_from(sampling.seed, "token", position))
    return torch.rand((), dtype=torch.float64, generator=generator)


def picked_by_sort(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """The token that sampling from all sorted tokens gives."""
    weights = torch.exp((logits.double() - logits.max()) / sampling.temperature)
    likely, tokens = weights.sort(descending=True, stable=True)
    if 0 < sampling.top_k < len(likely):
        likely = likely.masked_fill(likely < likely[sampling.top_k - 1], 0.0)
    before = torch.cat([torch.zeros(1), likely.cumsum(0)[:-1]])
    excluded = (before >= sampling.top_p * likely.sum()) & (sampling.top_p < 1)
    sums = likely.masked_fill(excluded | (likely < sampling.min_p * likely[0]), 0.0).cumsum(0)
    return int(tokens[torch.searchsorted(sums, share(sampling, position) * sums[-1], right=True)])


def test_picks_are_those_of_sorting_all_tokens() -> None:
    """With flat and peaked logits, equal and forbidden ones, and filters that keep fewer or more tokens than are sorted first."""
    numbers = random.Random(2)
    reached = []
    with mock.patch.object(sampling_module, "_drawn", wraps=sampling_module._drawn) as drawn:
        for position in range(250):
            generator = torch.Generator().manual_seed(position)
            logits = torch.randn(numbers.choice([40, 5000, 9000]), generator=generator) * numbers.choice(
                [0.01, 1, 3, 9]
            )
            if numbers.random() < 0.4:
                logits = (logits * numbers.choice([0.5, 2.0])).round()
            if numbers.random() < 0.3:
                logits[numbers.randrange(20) :: 7] = -torch.inf
            sampling = Sampling(
                numbers.choice([0.3, 0.8, 1.0, 4.0]),
                numbers.choice([1.0, 1.0, 0.95, 0.3, 0.9999]),
                numbers.randrange(99),
                numbers.choice([0, 0, 1, 50, 4096, 4500]),
                numbers.choice([0.0, 0.0, 0.05, 1e-5]),
            )
            drawn.reset_mock()
            assert pick(logits, sampling, position) == picked_by_sort(logits, sampling, position), sampling
            if len(logits) > 40:
                reached.append(drawn.call_count)
    assert reached.count(1) > 60 and reached.count(2) > 15, "both ways are tried"


def test_characters_of_several_tokens_appear_whole(tmp_path: Path) -> None:
    loaded = load_tokenizer(tokenizer_directory(tmp_path, corpus(tmp_path)))
    text = "ab déf 漢字 🎉 end"
    tokens = loaded(text).input_ids
    spelling = Spelling(loaded, tokens[:1])
    pieces = [spelling.add(token) for token in tokens[1:]]
    assert "".join([loaded.decode(tokens[:1]), *pieces, spelling.end()]) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    cut = Spelling(loaded, [])
    emoji = loaded("🎉").input_ids
    assert [cut.add(token) for token in emoji[:-1]] == [""] * (len(emoji) - 1)
    assert cut.end(), "half a character is told at the end"


def test_decoding_leaves_a_stage_in_training_as_it_was(tmp_path: Path) -> None:
    """Dropout, gradients and random numbers after a sample are those of a run without one."""
    case = Case("dropout", "llama", True, 0.1, True, 1, "even")
    path = model_directory(tmp_path, case)

    def losses(sample: bool) -> tuple[list[float], torch.Tensor]:
        chain = TransformersChain(read_config(ModelFiles(path).config))
        given: Any = chain, 0, chain.layer_count, open_backend("cpu", 0), "fp32", FileStart(ModelFiles(path), chain)
        stage = stage_of(*given, recompute=True)
        torch.manual_seed(1)
        found = []
        tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
        for step in range(2):
            position = MicroBatch(0, step, 0, 6)
            found.append(float(stage.forward(position, tokens, tokens)))
            stage.backward(0)
            if sample:
                with Decoder(stage) as decoder:
                    pick(decoder.step(tokens)[-1], Sampling(1.0), 6)
        found.append(float(torch.rand(())))
        return found, torch.cat([p.grad.flatten() for p in stage.parameters.values() if p.grad is not None])

    plain, sampled = losses(False), losses(True)
    assert plain[0] == sampled[0] and torch.equal(plain[1], sampled[1])


def stages_of(
    path: Path, cuts: tuple[int, ...], dtype: str = "fp32", adapters: Sequence[dict[str, Any]] = (), nf4: bool = False
) -> list[Stage]:
    """Stages with random ``adapters``, from the second on named beside1, beside2, ..."""
    chain, stages = TransformersChain(read_config(ModelFiles(path).config)), list[Stage]()
    given: Any = open_backend("cpu", 0), dtype, FileStart(ModelFiles(path), chain)
    tunings = [adapter_tuning(chain, AdapterTable(method="lora", **keys), nf4, True) for keys in adapters]
    for first, last in pairwise([0, *cuts, chain.layer_count]):
        stages.append(stage_of(chain, first, last, *given, tuning=tunings[0] if tunings else nothing_trained()))
        for number, tuning in enumerate(tunings[1:], start=1):
            add_adapter(stages[-1], f"beside{number}", tuning)
        for name, parameter in stages[-1].model.named_parameters():
            if ".lora_A." in name or ".lora_B." in name:
                parameter.data.normal_(std=0.25, generator=torch.Generator().manual_seed(seed_from(1, name)))
    return stages


def test_texts_side_by_side_are_computed_as_if_alone(tmp_path: Path) -> None:
    """To the bit, whichever joins or leaves in between; and a text's memory is known."""
    path = model_directory(tmp_path, Case("llama-even", "llama", False, 0.0, True, 2, "even"))
    tokens = {1: torch.randint(1, 300, (1, 20)), 2: torch.randint(1, 300, (1, 16))}

    def logits(order: list[tuple[int, int, int]]) -> dict[int, list[torch.Tensor]]:
        found: dict[int, list[torch.Tensor]] = {1: [], 2: []}
        with contextlib.ExitStack() as stack:
            decoders = [stack.enter_context(Decoder(stage)) for stage in stages_of(path, (3,))]
            for text, first, last in order:
                x = tokens[text][:, first:last]
                for decoder in decoders:
                    x = decoder.step(x, text)
                found[text].append(x)
                kept = [decoder.cached_bytes(text) for decoder in decoders]
                assert kept == [2 * 2 * 2 * 8 * 4 * last] * 2, "keys and values, 2 blocks, 2 heads of 8 numbers in fp32"
            for decoder in decoders:
                decoder.forget(1)
            with pytest.raises(KeyError):
                decoders[0].cached_bytes(1)
        return found

    long = [(1, 0, 8), *((1, n, n + 1) for n in range(8, 20))]
    short = [(2, 0, 12), *((2, n, n + 1) for n in range(12, 16))]
    alone, together = logits([*long, *short]), logits([*long[:5], *short[:3], *long[5:9], *short[3:], *long[9:]])
    for text in tokens:
        assert all(torch.equal(one, other) for one, other in zip(alone[text], together[text], strict=True))


def test_the_heads_matrix_is_not_copied(tmp_path: Path) -> None:
    """Neither for a piece of a prompt nor for a batch: torch would, for the last rows of a larger tensor, in ``bmm``."""
    (stage,) = stages_of(model_directory(tmp_path, Case("llama-even", "llama", False, 0.0, True, 2, "even")), ())

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape[-1] == stage.chain.config.vocab_size:
                made.append(operator.overloadpacket._qualified_op_name)
            return result

    tokens = torch.ones(1, 8, dtype=torch.long)
    with Decoder(stage) as decoder:
        for step in (lambda: decoder.step(tokens), lambda: decoder.step_packed(tokens, [0, 1], [1, 3], 4, ["", ""])):
            made = list[str]()
            with Products():
                step()
            assert "aten::mm" in made and not {"aten::bmm", "aten::clone"} & {*made}


def changed_model(directory: Path, family: str, changes: dict[str, Any]) -> Path:
    path = model_directory(directory, Case("changed", family, False, 0.0, True, 2, "even"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def generated(model: Any, task: Task) -> list[int]:
    """What transformers' ``generate`` writes."""
    ids = torch.tensor([task.prompt])
    options = {"do_sample": False, "max_new_tokens": task.limit, "eos_token_id": None}
    expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[
        0, len(task.prompt) :
    ].tolist()
    assert len(set(expected)) > 3, "a model that repeats itself proves nothing"
    return list(expected)


PIECE = 4
CHANGES = {"llama": {}, "mistral": {"sliding_window": 6}, "phi3": {"original_max_position_embeddings": 24}}
BATCHED: dict[str, dict[str, Any]] = {**CHANGES, "minicpm3": {"num_key_value_heads": 4, "scale_emb": 0.5}}


@pytest.mark.parametrize(
    ("cuts", "ranks"),
    [((), (0,)), ((2, 4), (0, 1, 2)), ((1, 2, 4), (0, 1, 0, 1)), ((2, 3, 4), (1, 0, 0, 1))],
    ids=["one stage", "three stages", "looped", "V"],
)
@pytest.mark.parametrize("family", CHANGES)
def test_a_prompt_passes_in_pieces_and_others_go_on_meanwhile(
    family: str, cuts: tuple[int, ...], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    """The tokens are those of the whole prompt and of transformers' ``generate``; Mistral's window is short, Phi-3 begins anew."""
    path = changed_model(tmp_path, family, CHANGES[family])
    generator = torch.Generator().manual_seed(4)
    long, short = (torch.randint(1, 300, (length,), generator=generator).tolist() for length in (21, 3))
    tasks = {1: Task(short, [], 12, Sampling()), 2: Task(long, [], 10, Sampling())}

    (whole, lengths), (pieces, short_lengths) = (rounds_by(path, cuts, ranks, tasks, size) for size in (512, PIECE))
    assert max(lengths) == (25 if family == "phi3" else 21) and max(short_lengths) == PIECE
    assert [sorted(one.tokens) for one in pieces[:6]] == [[1]] * 5 + [[1, 2]], "21 tokens pass in six rounds"
    model = AutoModelForCausalLM.from_pretrained(path)
    assert CHANGES[family].items() <= model.config.to_dict().items()
    set_training(model, False)
    for number, task in tasks.items():
        for rounds in (whole, pieces):
            assert [one.tokens[number] for one in rounds if number in one.tokens] == generated(model, task)


_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 7.0, 10.0], **_ROPE}
BY_LENGTH = {
    "phi3": {"rope_parameters": _LONG, "original_max_position_embeddings": 16},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **_ROPE}, "max_position_embeddings": 16},
    "qwen3": {"rope_parameters": _LONG},
}


@pytest.mark.parametrize("family", BY_LENGTH)
def test_rotary_tables_are_those_of_each_text(family: str, tmp_path: Path) -> None:
    """A text crosses the limit while it is written, others before or never: the tokens are those of transformers for each alone."""
    path = changed_model(tmp_path, family, BY_LENGTH[family])
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(1, 300, (length,), generator=generator).tolist() for length in (25, 10, 3, 16)]
    tasks = {n: Task(prompt, [], 10, Sampling()) for n, prompt in enumerate(prompts)}
    rounds, _ = rounds_by(path, (2, 4), (0, 1, 2), tasks, 512)
    for number, task in tasks.items():
        model = AutoModelForCausalLM.from_pretrained(path)  # anew: a table of an earlier text may be kept
        assert [one.tokens[number] for one in rounds] == generated(model, task)


def rounds_by(
    path: Path, cuts: tuple[int, ...], ranks: tuple[int, ...], tasks: dict[int, Task], piece_tokens: int,
    rests: Sequence[tuple[int, ...]] = (), width: int = 1, later: Sequence[dict[int, Task]] = (), **made: Any
) -> tuple[list[Round], list[int]]:  # fmt: skip
    """What a thread per rank writes round by round, and the tokens that each stage got at once.

    ``ranks``: of the stages; ``rests``: of each round from the second on, the texts that rest; ``later``: tasks that begin after
    others; ``made``: of ``stages_of``."""
    stages, active = stages_of(path, cuts, **made), sorted(set(ranks))
    network = LoopbackNetwork(len(active))
    lengths: list[int] = []

    def write(rank: int) -> list[Round]:
        own, begun = (
            [stage for stage, holder in zip(stages, ranks, strict=True) if holder == rank],
            [*(TextChanges(rest=numbers) for numbers in reversed(rests)), TextChanges(tasks)],
        )
        waiting = [None, *map(TextChanges, later[::-1])]
        writer = Writer(rank, ranks, active, network.transports[rank], own[0].chain, own, piece_tokens)
        writer.settle_width(cast(Any, SimpleNamespace(all_gather_json=lambda sizes: [sizes])), width)
        assert width == 1 or width == writer.widths[-1]
        writer.widths = [width] if later else writer.widths  # a small model's rounding to bf16 can hide differences
        return list(writer.written(lambda idle: begun.pop() if begun else waiting.pop() if idle else TextChanges()))

    def counted(stage: Stage, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        lengths.append(-x.shape[1] if keywords["packed"] else x.shape[1])
        return apply(stage, x, **keywords)

    apply = Stage.apply
    with mock.patch.object(Stage, "apply", counted), ThreadPoolExecutor(len(active)) as pool:
        results = list(pool.map(write, active, timeout=60))
    tokens = [[found.tokens for found in result] for result in results]
    assert all(own == tokens[0] for own in tokens) and not any(found.scores for own in results[1:] for found in own)
    return results[0], lengths


SHAPES = {
    "one stage": ((), (0,), 4),
    "V": ((2, 3, 4), (1, 0, 0, 1), 4),
    "V, one by one": ((2, 3, 4), (1, 0, 0, 1), 1),
}
QUICK_SHAPES = {("llama", "V"), ("mistral", "V, one by one"), ("phi3", "one stage")}


@pytest.mark.parametrize(
    ("family", "cuts", "ranks", "width"),
    [
        pytest.param(family, *shape, id=f"{family}-{name}", marks=slow_unless((family, name) in QUICK_SHAPES))
        for family, (name, shape) in itertools.product(BATCHED, SHAPES.items())
    ],
)
def test_a_text_in_a_batch_has_the_bits_of_the_text_alone(
    family: str, cuts: tuple[int, ...], ranks: tuple[int, ...], width: int, tmp_path: Path
) -> None:
    """At the same width, whoever begins, rests and ends; the tokens are those of transformers' ``generate``."""
    path = changed_model(tmp_path, family, BATCHED[family])
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(1, 300, (length,), generator=generator).tolist() for length in (21, 3, 1, 9, 12, 5)]
    tasks = {n: Task(prompt, [], 6 + 2 * n, Sampling(), likeliest=2) for n, prompt in enumerate(prompts)}
    rests = [(), (), (0, 3), (1,), (), (2, 4, 5), (2, 3)]
    together, lengths = rounds_by(path, cuts, ranks, tasks, PIECE, rests, width)
    packed = [-length for length in lengths if length < 0]
    if width > 1:
        assert sum(n <= 4 for n in packed) > 20 and packed.count(32) > 5, "tokens and prompts are computed together"
    assert not together[3].tokens.keys() & {0, 3}, "these rest"
    model = AutoModelForCausalLM.from_pretrained(path)
    set_training(model, False)
    for number, task in tasks.items():
        alone, _ = rounds_by(path, cuts, ranks, {number: task}, PIECE, width=width)
        of_text = [[o for o in (one.scores.get(number) for one in found) if o] for found in (together, alone)]
        assert of_text[0] == of_text[1] and len(of_text[0]) >= task.limit
        assert [one.tokens[number] for one in together if number in one.tokens] == generated(model, task)


QUICK_ADAPTED = {("llama", 2, 2), ("minicpm3", 1, 0)}
"""Family, number of ranks, number of keys that make the model."""
BESIDE: list[dict[str, Any]] = [
    {"rank": 2, "alpha": 8.0, "targets": ["up_proj", "down_proj"]},
    {"rank": 3, "alpha": 6.0, "targets": "all-linear", "rslora": True},
    {"rank": 4, "alpha": 8.0, "targets": ["o_proj", "gate_proj"], "layers": [3], "dora": True},
]


@pytest.mark.parametrize(
    ("family", "made", "cuts", "ranks"),
    [
        pytest.param(family, made, cuts, ranks, marks=slow_unless((family, len(ranks), len(made)) in QUICK_ADAPTED))
        for family, made, (cuts, ranks) in itertools.product(
            ["llama", "minicpm3"], [{}, {"dtype": "bf16", "nf4": True}], [((), (0,)), ((3,), (0, 1))]
        )
    ],
)
def test_texts_of_several_adapters_have_the_bits_of_each_alone(
    family: str, made: dict[str, Any], cuts: tuple[int, ...], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    """In one batch, except with latent attention."""
    path, names = changed_model(tmp_path, family, BATCHED[family]), ["", OPENED, "beside1", "beside2", "beside1", ""]
    tasks = [Task([5, 3, 8, 1, 9], [], 6 + n, Sampling(), 0, 2, adapter=name) for n, name in enumerate(names)]
    alone = [{n + 10: task} for n, task in enumerate(tasks)]
    rounds, lengths = rounds_by(path, cuts, ranks, dict(enumerate(tasks)), PIECE, (), 4, alone, adapters=BESIDE, **made)
    scores = {n: [one.scores[n] for one in rounds if n in one.scores] for n in (*range(6), *range(10, 16))}
    assert all(scores[n] == scores[n + 10] and len(scores[n]) == task.limit for n, task in enumerate(tasks))
    assert len({str(scores[n][:6]) for n in range(4)}) == 4, "each of them writes something else"
    passes = lengths[::-1].index(-512)  # the last one of ``settle_width``
    assert (passes < 80 * len(ranks)) == (family == "llama"), "77 per stage if adapters share batches"


@pytest.mark.parametrize(
    ("cuts", "ranks"),
    [((), (0,)), ((2, 4), (0, 1, 2)), ((2, 3, 4), (1, 0, 0, 1))],
    ids=["one stage", "three stages", "V"],
)
@pytest.mark.parametrize("family", CHANGES)
def test_log_likelihoods_are_those_of_transformers(
    family: str, cuts: tuple[int, ...], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    """Of prompts that pass in pieces, and of what is written, side by side with a text that wants none."""
    path = changed_model(tmp_path, family, CHANGES[family])
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(1, 300, (length,), generator=generator).tolist() for length in (21, 9, 1, 5)]
    tasks = {
        0: Task(prompts[0], [], 6, Sampling(0.9, repetition_penalty=1.5, seed=3), 0, 3, True),
        1: Task(prompts[1], [], 4, Sampling(), 0, 2),
        2: Task(prompts[2], [], 1, Sampling(), 0, 0, True),
        3: Task(prompts[3], [], 8, Sampling()),
    }
    rounds, _ = rounds_by(path, cuts, ranks, tasks, PIECE)
    model = AutoModelForCausalLM.from_pretrained(path)
    set_training(model, False)
    assert not any(3 in found.scores for found in rounds)
    for number, task in list(tasks.items())[:3]:
        written = [found.tokens[number] for found in rounds if number in found.tokens]
        scores = [one for found in rounds for one in found.scores.get(number, ())]
        whole = [*task.prompt, *written]
        first = 1 if task.echo else len(task.prompt)
        assert [one.token for one in scores] == whole[first:] and len(written) == task.limit
        with torch.no_grad():
            expected = torch.log_softmax(model(input_ids=torch.tensor([whole])).logits[0], -1)[first - 1 :]
        for row, one in zip(expected, scores, strict=False):
            assert one.likelihood == pytest.approx(float(row[one.token]), abs=1e-5)
            most = row.topk(max(1, task.likeliest or 0))
            assert [token for token, _ in one.likeliest] == most.indices.tolist()[: task.likeliest]
            assert [value for _, value in one.likeliest] == pytest.approx(
                most.values.tolist()[: task.likeliest], abs=1e-5
            )


def test_prompts_stay_whole_where_rotary_embeddings_depend_on_the_length() -> None:
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 10000.0}
    plain = AutoConfig.for_model("llama")
    assert takes_pieces(plain)
    for parameters in (longrope, {"full_attention": {"rope_type": "default"}, "sliding_attention": longrope}):
        plain.rope_parameters = parameters
        assert not takes_pieces(plain)


def decoded_families() -> list[Any]:
    """Every family; those whose masks differ most are tried always."""
    names = [family for family in PROVEN_FAMILIES if family not in OWN_CACHE]
    return [pytest.param(n, marks=() if n in ("gemma2", "gpt_oss", "phi3") else pytest.mark.long) for n in names]


@pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", decoded_families())
def test_every_proven_family_decodes_over_three_stages(family: str, tmp_path: Path) -> None:
    """The logits after a prompt of random tokens, after some more, and after single ones, are the whole model's; and those of
    the whole text at once, if the family ``takes_pieces``. In a batch they are those of each text."""
    torch.manual_seed(3)
    keys = tiny_keys(family)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    set_training(whole, False)
    tokens = torch.randint(1, VOCABULARY, (1, 40))
    past, name = None, cache_keyword(whole)
    with contextlib.ExitStack() as stack, torch.no_grad():
        decoders = [stack.enter_context(Decoder(stage)) for stage in stages_of(tmp_path, (2, 4))]
        at_once = whole(input_ids=tokens, use_cache=True).logits[0]
        for first, last in [(0, 10), (10, 15), *((index, index + 1) for index in range(15, 40))]:
            expected = whole(input_ids=tokens[:, first:last], use_cache=True, **{name: past})
            past = getattr(expected, name)
            x = tokens[:, first:last]
            for decoder in decoders:
                x = decoder.step(x)
            torch.testing.assert_close(x[-1], expected.logits[0, -1], rtol=1e-4, atol=1e-4)
            if takes_pieces(config):
                torch.testing.assert_close(x[-1], at_once[last - 1], rtol=1e-4, atol=1e-4)
        if reason_against_batches(config, whole) is not None:
            assert family not in ("llama", "qwen3", "gemma3_text", "mistral", "phi3", "mixtral")
            return
        ends = {1: 0, 2: 0}
        rounds = [(12, 3), (9, 1), *[(1, 1)] * 15, (2, 11)]
        if not takes_pieces(config):
            ends, rounds = {1: 12, 2: 3}, [(1, 1)] * 20
            for text, end in ends.items():
                x = tokens[:, :end]
                for decoder in decoders:
                    x = decoder.step(x, text)
        for lengths in rounds:
            pieces = [tokens[:, end : end + length] for end, length in zip(ends.values(), lengths, strict=True)]
            x = torch.cat([*pieces, torch.zeros(1, 2, dtype=torch.long)], 1)
            for decoder in decoders:
                x = decoder.step_packed(x, [*ends], lengths, 3, ["", ""])
            ends = {text: end + length for (text, end), length in zip(ends.items(), lengths, strict=True)}
            for row, end in zip(x, ends.values(), strict=False):
                torch.testing.assert_close(row, whole(input_ids=tokens[:, :end]).logits[0, -1], rtol=1e-4, atol=1e-4)
