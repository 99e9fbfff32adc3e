"""How time and memory grow with the data: each row at three sizes, in a process of its own; the exponent is of the last two.

    python benchmarks/growth.py [ROW ...] [--large] [--json FILE]

``--large``: ten times the text, up to 1 GB in one file. Peak memory is beyond what imports take. "datasets" is the package of that
name with the same fast tokenizer on the same file, a line as a document; it is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import MAX_RUN_S, parser_of  # noqa: E402

WORDS = [
    "the",
    "crew",
    "sings",
    "while",
    "rain",
    "falls",
    "on",
    "an",
    "old",
    "harbour",
    "seven",
    "grey",
    "birds",
    "follow",
    "the",
    "boat",
    "nobody",
    "counts",
    "them",
]
JOB = """
[model.config]
model_type = "llama"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 1024
[tokenizer]
{tokenizer}
[data]
text = ["text-{size}.txt"]
sequence_length = 512
"""
CHAT = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def text(megabytes: int) -> Path:
    """A file of lines of words, of so many MB."""
    path, chance, left = Path(f"text-{megabytes}.txt"), random.Random(megabytes), megabytes * 1_000_000
    if not path.exists():
        with path.open("w") as file:
            while left > 0:
                stems = chance.choices(WORDS, k=2000)
                block = " ".join(f"{word}{chance.randint(0, 99)}" if chance.random() < 0.2 else word for word in stems)
                left -= file.write(block.replace("the crew", "the crew\n") + "\n")
    return path


def tokenizer() -> str:
    """A tokenizer directory."""
    from hetero_mpi.data.tokenizer import save_tokenizer, train_bpe

    if not Path("tokenizer").exists():
        save_tokenizer(train_bpe([text(1).read_text()], 2000), "tokenizer")
    return "tokenizer"


def prepared(size: int, keys: str) -> Callable[[], object]:
    from hetero_mpi.job.load import load_job
    from hetero_mpi.training.setup.data_setup import prepare

    text(size)
    file = Path(f"job-{size}.toml")
    file.write_text(JOB.format(tokenizer=keys, size=size))

    def run() -> str:
        dataset = prepare(load_job(file)).dataset
        dataset.batch(0, 8)
        return dataset.fingerprint()

    return run


def first_start(size: int) -> Callable[[], object]:
    return prepared(size, f'path = "{tokenizer()}"')


def training_a_tokenizer(size: int) -> Callable[[], object]:
    return prepared(size, "train_vocab_size = 2000")


def second_start(size: int) -> Callable[[], object]:
    return first_start(size)


def by_datasets(size: int) -> Callable[[], object]:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    fast = AutoTokenizer.from_pretrained(tokenizer())
    file = str(text(size))

    def run() -> int:
        found = datasets.load_dataset("text", data_files=file, split="train", cache_dir="datasets")
        return len(
            found.map(lambda rows: {"ids": fast(rows["text"])["input_ids"]}, batched=True, remove_columns=["text"])
        )

    return run


def conversation(messages: int, plainly: bool = False) -> Callable[[], object]:
    from hetero_mpi.data.chat_template import choose_template, tokenize_records
    from hetero_mpi.data.records import read_records
    from hetero_mpi.data.tokenizer import load_tokenizer

    chance, found = random.Random(messages), load_tokenizer(tokenizer())
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.chat_template = CHAT
    turns = [
        {"role": ("user", "assistant")[number % 2], "content": " ".join(chance.choices(WORDS, k=60))}
        for number in range(messages)
    ]
    if plainly:
        return lambda: [found.apply_chat_template(turns) for _ in range(10)]
    Path("chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 11)
    records = read_records(["chat.jsonl"]).records
    list(tokenize_records(found, choose_template(found, "chat"), records[:1]))  # the process that renders is there
    return lambda: list(tokenize_records(found, choose_template(found, "chat"), records[1:]))


def plain_conversation(messages: int) -> Callable[[], object]:
    return conversation(messages, plainly=True)


def packing(records: int) -> Callable[[], object]:
    from hetero_mpi.data.record_sequences import pack

    chance = random.Random(records)
    lengths = [chance.randint(20, 300) for _ in range(records)]
    return lambda: pack(lengths, 2049)


def tensors(count: int) -> Callable[[], object]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hetero_mpi.model.files.model_directory import ModelDirectoryWriter

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = AutoConfig.for_model("llama", vocab_size=16, num_hidden_layers=count // 9, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}

    def run() -> None:
        with ModelDirectoryWriter(model, Path("model"), 1_000_000_000) as writer:
            writer.add(state)

    return run


def recorded_steps(count: int) -> Callable[[], object]:
    from hetero_mpi.planning.schedule import Action, MeasuredEvent, Op
    from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
    from hetero_mpi.rundir.rank_steps import RankStep, Usage, steps_under

    plan = Plan((PipelinePlan((StagePlan((0,), 0, 1, 0), StagePlan((1,), 1, 2, 0)), 1, 1),), 1, 8, 2)
    usage = Usage(**dict.fromkeys(Usage.__dataclass_fields__, 0))
    records = [
        RankStep(rank, step, 0.0, (MeasuredEvent(rank, step, Action(Op.F, rank, 0), 0.0, 1.0, 0, 0.0, None),), usage)
        for step in range(count)
        for rank in range(2)
    ]
    return lambda: len(steps_under(records, plan))


ROWS: dict[str, tuple[Callable[[int], Callable[[], object]], tuple[int, ...], str]] = {
    "one text file, first start": (first_start, (4, 16, 64), "MB"),
    "the same by datasets": (by_datasets, (4, 16, 64), "MB"),
    "the same, second start": (second_start, (4, 16, 64), "MB"),
    "a tokenizer trained on it, too": (training_a_tokenizer, (4, 16, 64), "MB"),
    "10 conversations": (conversation, (20, 100, 400), "messages"),
    "the same, rendered and encoded plainly": (plain_conversation, (20, 100, 400), "messages"),
    "packing": (packing, (62_500, 250_000, 1_000_000), "records"),
    "tensors into one shard": (tensors, (1_000, 4_000, 16_000), "tensors"),
    "recorded steps": (recorded_steps, (1_000, 10_000, 100_000), "steps"),
}


def one(row: str, size: int) -> None:
    run = ROWS[row][0](size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    run()
    taken = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([taken, peak * (1 if sys.platform == "darwin" else 1024)]))


def measured(row: str, size: int, folder: str) -> tuple[float, float] | None:
    environment = {**os.environ, "XDG_CACHE_HOME": folder, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).resolve()), "--one", row, str(size)]
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=MAX_RUN_S)
    if answer.returncode != 0:
        print(f"{row}, {size}: {answer.stderr.strip().splitlines()[-1]}")
        return None
    seconds, peak = json.loads(answer.stdout.splitlines()[-1])
    return seconds, peak


def measured_here(row: str, size: int, folder: str) -> tuple[float, float]:
    """``measured`` in this process: without the imports' time, and with memory that other rows took."""
    os.environ["XDG_CACHE_HOME"] = folder
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as answer:
        one(row, size)
    os.chdir(ROOT)
    seconds, peak = json.loads(answer.getvalue().splitlines()[-1])
    return seconds, peak


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; all")
    parser.add_argument("--large", action="store_true", help="ten times the text")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one[0], int(options.one[1]))
        return 0
    results: dict[str, list[tuple[int, tuple[float, float] | None]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row, (_, sizes, unit) in ROWS.items():
            if options.rows and row not in options.rows:
                continue
            some = tuple(10 * size for size in (4, 25, 100)) if options.large and unit == "MB" else sizes
            if options.smallest:
                found = results[row] = [(1, measured_here(row, 1 if unit == "MB" else sizes[0], folder))]
            else:
                found = results[row] = [(size, measured(row, size, folder)) for size in some]
            shown = "; ".join(f"{size:,}: {f[0]:.2f} s, {f[1] / 1e6:,.0f} MB" for size, f in found if f is not None)
            ends = [(size, f[0]) for size, f in found[-2:] if f is not None]
            power = ""
            if len(ends) == 2:
                power = f"; exponent {math.log(ends[1][1] / ends[0][1]) / math.log(ends[1][0] / ends[0][0]):.2f}"
            print(f"{row} ({unit}): {shown}{power}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
