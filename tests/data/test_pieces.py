"""Texts in pieces have the tokens of the whole: all kinds of tokenizers that the families use, and texts that try to break it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from hetero_mpi.data import text_sequences
from hetero_mpi.data.text_sequences import ids_of, pieces_of
from hetero_mpi.data.tokenizer import bpe_split, encoded, train_bpe

WORDS = ["the", "crew's", "boat", "sails", "north", ",", "then", "naïve", "birds", "don't", "count", "12345", "of", "67", ":",
         "Straße", "façade", "漢字", "かな", "x1y2", "ét́", "up_down"]  # fmt: skip
CHOICE = random.Random(5)
WORDS_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MIXED = [" ".join(CHOICE.choices(WORDS, k=200)) + "\n\n  x\t y" for _ in range(40)]


def of_bytes(*before: pre_tokenizers.PreTokenizer, prefix: bool = False, regex: bool = True, normal: object = None):  # type: ignore[no-untyped-def]
    engine = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    if normal is not None:
        engine.normalizer = normal
    engine.train_from_iterator(MIXED, trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=BYTES))
    return engine


def of_pieces(model: models.Model, split: object, normal: object = None, without_split: bool = False) -> Tokenizer:
    engine = Tokenizer(model)
    if split is not None:
        engine.pre_tokenizer = split
    if normal is not None:
        engine.normalizer = normal
    settings = {"vocab_size": 300, "show_progress": False, "special_tokens": ["<unk>"]}
    if isinstance(model, models.Unigram):
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **settings)
    elif isinstance(model, models.WordPiece):
        trainer = trainers.WordPieceTrainer(**settings)
    else:
        trainer = trainers.BpeTrainer(max_token_length=8, **settings)
    engine.train_from_iterator(MIXED, trainer)
    if without_split:  # as SentencePiece's are: their tokens do not reach over spaces, and nothing splits the text
        engine.pre_tokenizer = None
        engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return engine


def with_added(engine: Tokenizer) -> Tokenizer:
    spaces = [AddedToken(" " * count, normalized=False) for count in (2, 4, 8)]
    words = [AddedToken("boat sails", lstrip=True, rstrip=True), AddedToken("<|x|>", special=True, lstrip=True)]
    engine.add_tokens([*spaces, *words])
    return engine


SPLIT = pre_tokenizers.Split(Regex(WORDS_SPLIT), "isolated")
METASPACE = pre_tokenizers.Metaspace
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": of_bytes,
    "with a space in front": lambda: of_bytes(prefix=True),
    "Llama 3": lambda: of_bytes(SPLIT, regex=False),
    "Qwen": lambda: of_bytes(SPLIT, regex=False, normal=normalizers.NFC()),
    "single digits": lambda: of_bytes(pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)),
    "GPT-NeoX": lambda: with_added(of_bytes()),
    "T5": lambda: of_pieces(models.Unigram(), METASPACE(prepend_scheme="always"), normalizers.NFKC()),
    "Unigram": lambda: of_pieces(models.Unigram(), METASPACE(prepend_scheme="first")),
    "Llama 2": lambda: of_pieces(
        models.BPE(unk_token="<unk>", fuse_unk=True),
        METASPACE(prepend_scheme="never"),
        without_split=True,
    ),
    "Gemma": lambda: of_pieces(models.BPE(unk_token="<unk>", fuse_unk=True), METASPACE(prepend_scheme="never")),
    "BERT": lambda: of_pieces(
        models.WordPiece(unk_token="<unk>"), pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    ),
}


def words(count: int) -> list[str]:
    return CHOICE.choices(WORDS, k=count)


ENDS = ["\n", "\r\n", "\n\n", " \n", "\n   ", "\t\n"]
TEXTS = {
    "one line": " ".join(words(3000)),
    "lines": "".join(" ".join(words(CHOICE.randint(0, 12))) + CHOICE.choice(ENDS) for _ in range(700)),
    "CR LF": "\r\n".join(" ".join(words(9)) for _ in range(300)),
    "no spaces": "".join(words(3000)),
    "one letter": "a" * 9000,
    "digits": "".join(CHOICE.choices("0123456789", k=9000)),
    "spaces": " " * 9000,
    "runs of spaces": "".join(word + " " * CHOICE.randint(0, 40) for word in words(900)),
    "empty lines": "\n" * 9000 + "x" + "\n" * 5000,
    "emoji": "".join(CHOICE.choices(["👩‍👩‍👧‍👦", "🇩🇪", "e\u0301", "👍🏽", " ", "\u200d", "a"], k=5000)),
    "code": "".join("    " * CHOICE.randint(0, 5) + "def f(x): return x.y + 12345 # it's\n" for _ in range(300)),
    "no words": "。".join("".join(CHOICE.choices("漢字仮名交文", k=CHOICE.randint(1, 30))) for _ in range(600)),
    "added tokens": "".join(
        CHOICE.choice(["boat sails", " boat sails ", "<|x|>", "  <|x|>  ", "    ", "w "]) for _ in range(1500)
    ),
}
UNCUT = {"one letter", "digits", "spaces", "empty lines"}
"""Texts without a place where every tokenizer would begin a token whatever is around it."""


def blocks(text: str, size: int = 777) -> Iterator[tuple[str, bool]]:
    for first in range(0, len(text), size):
        yield text[first : first + size], first + size >= len(text)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sequences, "MIN_PIECE_CHARACTERS", 2000)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_token_changes(kind: str) -> None:
    engine = TOKENIZERS[kind]()
    for name, text in TEXTS.items():
        cut = list(pieces_of(blocks(text), lambda texts: encoded(engine, texts)))
        assert "".join(piece.text for piece in cut) == text and [piece.ends for piece in cut].count(True) == 1, name
        assert len(cut) == 1 if name in UNCUT else len(cut) > 2, name
        ids = np.concatenate([some for some, _ in ids_of(blocks(text), engine)])
        assert ids.tolist() == encoded(engine, [text])[0], name


def test_texts_end_where_they_end_and_begin_once() -> None:
    engine = TOKENIZERS["Llama 3"]()
    texts = ["", "a", TEXTS["lines"], "b c"]
    found = list(
        ids_of(((part, ends) for text in texts for part, ends in (blocks(text) if text else [("", True)])), engine)
    )
    assert [ends for _, ends in found].count(True) == 4
    whole: list[list[int]] = [[]]
    for ids, ends in found:
        whole[-1] += ids.tolist()
        whole += [[]] if ends else []
    assert whole[:-1] == encoded(engine, texts)


def test_a_tokenizer_trained_on_pieces_is_the_one_trained_on_the_whole() -> None:
    whole = [TEXTS[name] for name in ("lines", "code", "CR LF", "runs of spaces", "emoji")]
    cut = [piece.text for text in whole for piece in pieces_of(blocks(text), bpe_split)]
    assert len(cut) > 20
    assert train_bpe(cut, 600).backend_tokenizer.to_str() == train_bpe(whole, 600).backend_tokenizer.to_str()
