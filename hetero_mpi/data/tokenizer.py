"""Train, load and save tokenizers, encode text, and check the vocabulary against the model."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from hetero_mpi.util.disk import require_regular
from hetero_mpi.util.errors import UserError

T = TypeVar("T")

END_TOKEN = "<|end|>"
"""End-of-document token of trained tokenizers, which also serves as padding, since padding is never a target."""

_MIN_BATCH_CHARACTERS = 2_000_000
"""Characters per tokenizer call: enough to keep all its threads busy, while the returned Python lists stay small."""


def bpe_split(texts: Sequence[str]) -> list[list[str]]:
    """Split strings into the parts within which ``train_bpe`` learns merges."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return [[part for part, _ in splitter.pre_tokenize_str(text)] for text in texts]


def train_bpe(documents: Iterable[str], vocab_size: int, sequence_length: int | None = None) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like GPT-2's, which is lossless for any text.

    The result is the same for whole documents and for pieces that end at ``bpe_split`` boundaries. ``vocab_size`` counts 256 bytes,
    the end token (id 0) and the merges; a small corpus may yield fewer merges (``vocabulary_note``). ``sequence_length`` is saved
    as ``model_max_length``.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    limit = {} if sequence_length is None else {"model_max_length": sequence_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=END_TOKEN,
        clean_up_tokenization_spaces=False,
        **limit,
    )


def is_trained_here(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether ``train_bpe`` made the tokenizer, as its first tokens show."""
    first_tokens = [END_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return bool(tokenizer.convert_ids_to_tokens(range(len(first_tokens))) == first_tokens)


def vocabulary_note(tokenizer: PreTrainedTokenizerFast, requested: int) -> str | None:
    """Return a note for the user if the trained vocabulary is smaller than requested, else None."""
    if len(tokenizer) >= requested:
        return None
    return (
        f"the trained tokenizer has {len(tokenizer):,} of the {requested:,} requested tokens (tokenizer.train_vocab_size): the "
        f"corpus has no more pairs to merge"
    )


@contextmanager
def faults_named(what: str) -> Iterator[None]:
    """Convert any error of the tokenizer libraries, whose files may hold anything, to a UserError that begins with ``what``.

    The libraries raise a bare Exception for input that they cannot parse, and a panic in Rust code is not even an Exception.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise UserError(
            "tokenizer.damaged",
            f"{what}: {type(error).__name__}: {error}; its files may be damaged: download them again, or use another tokenizer",
        ) from error


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a local directory, without downloads and without running code from the directory.

    Raises UserError if there is no tokenizer, if it cannot be read, or if it is not backed by ``tokenizer.json``.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError("tokenizer.missing", f"tokenizer directory {directory} not found; it needs tokenizer.json")
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        raise UserError(
            "tokenizer.missing",
            f"{directory} holds no tokenizer (no tokenizer.json): set tokenizer.path to a directory with one, or "
            "tokenizer.train_vocab_size to train one on the corpus",
        )
    for path in directory.iterdir():
        if not path.is_dir():
            require_regular(path)
    family = _family_of(directory / "config.json")
    with faults_named(f"the tokenizer in {directory} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(
            directory, config=family, local_files_only=True, trust_remote_code=False
        )
        # Reject lone surrogates now: saving the tokenizer would fail at the end of the run.
        json.dumps(getattr(tokenizer, "init_kwargs", None), ensure_ascii=False, default=str).encode()
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            "tokenizer.slow",
            f"the tokenizer in {directory} must be a fast one (tokenizer.json); it is {type(tokenizer).__name__}",
        )
    return tokenizer


def _family_of(path: Path) -> PreTrainedConfig | None:
    """Read the keys of ``config.json`` that select the tokenizer's class; the other keys are checked with the model."""
    if not path.is_file():
        return None
    try:
        keys = json.loads(path.read_bytes())
        family = CONFIG_MAPPING[keys["model_type"]] if keys.get("model_type") in CONFIG_MAPPING else PreTrainedConfig
        return family(name_or_path=str(path.parent), tokenizer_class=keys.get("tokenizer_class"))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(
            "model.configuration", f"{path} must contain a model configuration as JSON: {error}; correct it"
        ) from None


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> None:
    """Write the tokenizer's files into ``directory`` (created if missing), for ``AutoTokenizer.from_pretrained``."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(directory))


def own_tokens_only(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Copy the tokenizer's backend without the truncation and padding that its tokenizer.json may request."""
    with faults_named("the tokenizer cannot be used"):
        engine = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        engine.no_truncation()
        engine.no_padding()
        return engine


def encoded(engine: Tokenizer, texts: Sequence[str], special: bool = False) -> list[list[int]]:
    """Tokenise strings; ``special`` includes the special tokens that the tokenizer adds. Raises UserError on failure."""
    with faults_named("the tokenizer cannot tokenise the text"):
        return [encoding.ids for encoding in engine.encode_batch_fast(list(texts), add_special_tokens=special)]


def beginning(engine: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer prepends to every text (one for Llama and Gemma, usually none)."""
    (full,), (bare,) = encoded(engine, ["a"], special=True), encoded(engine, ["a"])
    return next((full[:end] for end in range(len(full)) if full[end : end + len(bare)] == bare), [])


def document_token_ids(engine: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise strings as starts of documents, with ``beginning`` prepended exactly once."""
    begin = beginning(engine)
    return [ids if ids[: len(begin)] == begin else [*begin, *ids] for ids in encoded(engine, texts)]


def starts_of(engine: Tokenizer, text: str, count: int) -> list[int]:
    """Return the positions at which the last ``count`` tokens of ``text`` begin; 0 for tokens that ``beginning`` prepends."""
    offsets = engine.encode(text, add_special_tokens=False).offsets
    # Some tokenizers exclude the space before a token from its offsets; the space ends the previous token.
    starts = [min(first, last) for (first, _), (_, last) in zip(offsets, [(0, 0), *offsets], strict=False)]
    return [0] * (count - len(starts)) + starts


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}
"""Maps each letter of a byte-level token to its byte (GPT-2's table)."""


def token_bytes(piece: str, text: str) -> bytes:
    """Return the bytes of the token ``piece``, whose decoded ``text`` loses them if the token is part of a character."""
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes.fromhex(piece[3:5])
    return bytes(_BYTES[letter] for letter in piece) if {*piece} <= _BYTES.keys() else text.encode()


def in_batches(items: Iterable[T], characters: Callable[[T], int]) -> Iterator[list[T]]:
    """Group ``items`` into lists that each hold enough text for one tokenizer call."""
    batch: list[T] = []
    count = 0
    for item in items:
        batch.append(item)
        count += characters(item)
        if count >= _MIN_BATCH_CHARACTERS:
            yield batch
            batch, count = [], 0
    yield batch


def end_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id of the token that ends documents and answers. Raises UserError if the tokenizer has none."""
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError(
            "tokenizer.no_end_token",
            "documents and answers end with the tokenizer's end token; this tokenizer has none: set eos_token in its "
            "tokenizer_config.json, or train one with tokenizer.train_vocab_size",
        )
    return int(end)


def pad_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id of the padding token, or of the end token if the tokenizer has no padding token."""
    return end_token(tokenizer) if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def add_tokens(tokenizer: PreTrainedTokenizerFast, plain: Sequence[str], special: Sequence[str]) -> list[str]:
    """Add tokens to the tokenizer and return notes for the user."""
    old = tokenizer.get_vocab()
    tokenizer.add_tokens(list(plain))
    tokenizer.add_tokens(list(special), special_tokens=True)
    new = [f"{text} ({tokenizer.convert_tokens_to_ids(text):,})" for text in (*plain, *special) if text not in old]
    return [f"new tokens: {', '.join(new)}"] if new else []


def rows_with_added(tokenizer: PreTrainedTokenizerFast, rows: int) -> int:
    """Return the number of embedding rows needed for added tokens; ``rows`` unless only added tokens lack a row."""
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    fits = all(number < rows for text, number in vocabulary.items() if text not in added)
    return max(rows, *(number + 1 for number in added.values())) if fits and added else rows


def largest_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the largest token id; -1 if the vocabulary is empty."""
    return max(tokenizer.get_vocab().values(), default=-1)


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    """Raise UserError unless every token id has a row in an embedding of ``vocab_size`` rows."""
    largest = largest_id(tokenizer)
    if largest >= vocab_size:
        raise UserError(
            "tokenizer.vocabulary_size",
            f"every token needs a row of the model's embedding: the tokenizer's largest id is {largest}, the model's "
            f"vocab_size is {vocab_size} (ids up to {vocab_size - 1}). Raise vocab_size in the model's config to "
            f"at least {largest + 1}, or use a smaller tokenizer.",
        )
