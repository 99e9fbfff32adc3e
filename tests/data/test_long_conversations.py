"""Tokens of answers are marked from one encoding: as from encodings of all beginnings, token by token."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from hetero_mpi.data.answers import ChatTemplate, Rendered, rendered
from hetero_mpi.data.chat_template import answer_tokens, choose_template
from hetero_mpi.data.messages import ChatMessage
from hetero_mpi.data.record_shapes import BadRecord
from hetero_mpi.data.tokenizer import own_tokens_only, train_bpe
from tests.data import test_marks, test_masks, test_tools
from tests.data.test_masks import tokenizer_of

pytestmark = pytest.mark.slow  # many renderings of long conversations

FORMATS = {
    **test_masks.FORMATS,
    **{f"marks-{name}": one for name, one in test_marks.MARKED.items()},
    **{f"tools-{name}": one for name, one in test_tools.FORMATS.items()},
}
CALLING = [
    *(f"tools-{name}" for name in ("qwen", "qwen-latest", "qwen-thinking", "qwen-in-letters", "llama", "deepseek")),
]
TALKING = [name for name in CALLING if name not in ("tools-llama", "tools-deepseek")]
"""Print what is said beside a call."""
SAID = ("Hello", "Why?", "user", "assistant\n", "qzxv1x", "qzxv", "x", "y.\n\n", " so ", "\nThere", "  ", "", "Grün 🙂",
        "<|im_end|>", "one\n\n* two", "User: x\n\nAssistant: y", "{\"a\": 1}", "Hello Hello")  # fmt: skip
THOUGHTS = ("It is so.", "Hello", "\nOne\n")


def chat(name: str, seed: int, turns: int, thoughts: float = 0.0) -> list[ChatMessage]:
    """A conversation by chance that the format prints whole."""
    chance, messages = random.Random(seed), list[ChatMessage]()
    talking, calls = name in TALKING, (0.6 if seed % 3 else 0.0) * (name in CALLING)

    def say(role: Any, *said: str, trained: bool = True, **keys: Any) -> None:
        text = chance.choice(said or SAID)
        messages.append(ChatMessage(role, text, {"role": role, "content": text, **keys} if keys else None, trained))

    def call() -> None:
        given: list[Any] = [{"a": "Hello", "b": 7}, {"a": 17}, {}, {"a": {"x": ["  \n'y'"]}}]
        calls = list[Any]()
        for number in range(chance.choice([1, 1, 2]) if talking else 1):
            arguments = chance.choice(given)
            function = {
                "name": chance.choice(["sum", "x"]),
                "arguments": json.dumps(arguments) if "deepseek" in name else arguments,
            }
            calls.append({"id": f"c{len(messages)}{number}", "type": "function", "function": function})
        say("assistant", *("", "", "I add.")[: 3 if talking else 2], tool_calls=calls)
        for one in calls:
            say("tool", tool_call_id=one["id"], name=one["function"]["name"])

    if FORMATS[name].system and seed % 2:
        say("system", "Be brief.")
    for turn in range(turns):
        say("user")
        while chance.random() < calls:
            call()
        thought = chance.choice(THOUGHTS) if chance.random() < thoughts else None
        if thought is not None and turn % 2:
            say("assistant", *(f"<think>\n{thought}\n</think>\n\n{said}" for said in SAID))
        elif thought is not None:
            say("assistant", reasoning_content=thought)
        else:
            say("assistant", trained=chance.random() < 0.8)
    return messages


def outcome(printer: ChatTemplate, messages: Sequence[ChatMessage]) -> Rendered | str:
    """What is made of it, or why nothing."""
    try:
        return rendered(printer, messages, None)
    except BadRecord as problem:
        return str(problem)


def slow_marks(engine: Tokenizer, one: Rendered) -> list[tuple[int, ...]]:
    """By encoding every beginning, and scanning all offsets."""
    edges = sorted({0, *(edge for span in one.spans for edge in span[:2])})
    texts = [one.text, *(one.text[:edge] for edge in edges)]
    whole, *parts = engine.encode_batch(texts, add_special_tokens=False)
    ids, offsets, beginnings = (
        whole.ids,
        whole.offsets,
        {edge: part.ids for edge, part in zip(edges, parts, strict=True)},
    )
    marks: list[tuple[int, ...]] = []
    for first, last, _ in one.spans:
        behind = next((n for n, (_, end) in enumerate(offsets) if end > first), len(ids))
        before = next((n for n, (start, _) in enumerate(offsets) if start >= last), len(ids))
        if one.marked:
            inside = [n for n, (start, end) in enumerate(offsets) if end > first and start < last]
            marks.append((inside[0], inside[-1] + 1) if inside else (0, 0))
            continue
        known = [len(ids_) if ids[: len(ids_)] == ids_ else None for ids_ in (beginnings[first], beginnings[last])]
        marks.append(
            tuple(found if told is None else told for told, found in zip(known, (behind, before), strict=True))
        )
    return marks


def used(name: str, marked: bool = False) -> tuple[ChatTemplate, Tokenizer]:
    wanted = FORMATS[name]
    tokenizer = tokenizer_of(wanted)
    tokenizer.chat_template = wanted.marked if marked else wanted.template
    form = choose_template(tokenizer, "plain" if name == "plain" else "chat")
    return form, own_tokens_only(tokenizer)


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_of_answers_are_those_of_all_beginnings(name: str) -> None:
    printer, engine = used(name)
    whole = 0
    for seed in range(20):
        messages = chat(name, seed, 5 + seed % 9, 0.5 * (seed % 5 == 4))
        found = outcome(printer, messages)
        if isinstance(found, Rendered):
            whole += 1
            (marks,) = answer_tokens(engine, [found])
            assert marks.spans == slow_marks(engine, found), messages
    assert whole > 5


@pytest.mark.parametrize("name", ["chatml", "tools-qwen", "marks-gpt-oss"])
def test_tokens_of_answers_that_the_template_marks(name: str) -> None:
    printer, engine = used(name, marked=True)
    for seed in range(5):
        found = outcome(printer, chat(name, seed, 5 + seed))
        assert isinstance(found, Rendered) and found.marked
        assert answer_tokens(engine, [found])[0].spans == slow_marks(engine, found)


def engines() -> dict[str, Tokenizer]:
    """Tokenizers that split, join, add or drop characters."""
    texts = ["Hello user: y.\n\n So it is so, Hello Hello\n<|user|> assistant one two"] * 3
    bpe = {
        name: Tokenizer(models.BPE(unk_token="<unk>"))
        for name in ("prefixed", "metaspace", "stripped", "composed", "bare")
    }
    bpe["prefixed"].normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe["metaspace"].pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bpe["stripped"].normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")])
    bpe["stripped"].pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\w+"), "isolated")
    bpe["composed"].normalizer = normalizers.NFKC()
    bpe["composed"].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for engine in bpe.values():
        engine.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"]))
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>"]))
    return {**bpe, "words": words, "trained": own_tokens_only(train_bpe(texts, 400))}


@pytest.mark.parametrize("name", engines())
def test_tokens_of_answers_for_tokenizers_of_all_kinds(name: str) -> None:
    engine = engines()[name]
    closing = [AddedToken("<|end|>", lstrip=True, rstrip=True), AddedToken("<|assistant|>", rstrip=True), "<|im_end|>"]
    for added in ([], ["<start_of_turn>", "<|user|>", "<|im_start|>"], closing):
        engine.add_special_tokens(added)
        for kind in ("chatml", "gemma", "phi3", "glm4", "llama2", "alpaca", "r1"):
            printer, _ = used(kind)
            some = [outcome(printer, chat(kind, seed, 5)) for seed in range(6)]
            kept = [one for one in some if isinstance(one, Rendered)]
            assert len(kept) > 3
            for one, marks in zip(kept, answer_tokens(engine, kept), strict=True):
                assert marks.spans == slow_marks(engine, one), one
