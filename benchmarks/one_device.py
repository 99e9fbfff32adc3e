"""Tokens per second and peak memory on one device: ours beside a plain loop of PyTorch, transformers' Trainer and TRL's SFTTrainer.

    python benchmarks/one_device.py [--cases NAME ...] [--rounds 7] [--device cpu] [--compiled] [--check] [--json FILE]

Every contender of a case is a process that waits while another one computes its step; the order is reversed every round, so that
all see the same load of the machine. Times are processor seconds of the whole process on a CPU, seconds on a GPU. All train the
same model on the same tokens with fused AdamW and clipped gradients, one micro-batch per step, and read the loss of every step.
In bf16 all update fp32 weights, the others by autocast or with peft's fp32 adapters; "bf16 weights" is a plain loop that keeps
no fp32 weights, so that small updates are lost.

The bar of ``--check``: in every training case ours is at least 0.97 times as fast as the plain loop, and as fast as SFTTrainer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from harness import parser_of  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

import hetero_mpi  # noqa: E402
from hetero_mpi.device.accelerators import open_backend  # noqa: E402
from hetero_mpi.device.backend import DTYPES  # noqa: E402
from hetero_mpi.inference.sampling import Sampling  # noqa: E402
from hetero_mpi.inference.writer import Task, TextChanges, Writer  # noqa: E402
from hetero_mpi.job.training_tables import TrainTable  # noqa: E402
from hetero_mpi.model.stage import Stage, StageSpec  # noqa: E402
from hetero_mpi.model.transformers.chain import TransformersChain  # noqa: E402
from hetero_mpi.model.transformers.families import read_config  # noqa: E402
from hetero_mpi.model.transformers.weights import SeededStart  # noqa: E402
from hetero_mpi.model.tuning import nothing_trained  # noqa: E402
from hetero_mpi.training.setup.data_setup import prepare  # noqa: E402
from tests.support.ranks import LoopbackNetwork  # noqa: E402

MIN_OVER_PLAIN, MIN_OVER_TRL = 0.97, 1.0
PLAIN, NARROW, LIGER = "plain loop", "plain loop, bf16 weights", "plain loop, Liger"
OURS, TRAINER, TRL = "ours", "transformers' Trainer", "TRL's SFTTrainer"
GENERATE, COMPILED = "transformers' generate", ", compiled"
MAX_STEPS, VOCABULARY, PROMPT_TOKENS, RANK = 10_000, 2048, 64, 16
SIZES = {"hidden": 512, "blocks": 4, "rows": 8, "length": 128, "new_tokens": 32}
COMPILES = "compile" in TrainTable.model_fields


@dataclass(frozen=True)
class Case:
    """Training of all parameters or of an adapter in a dtype, or generation of some texts, or of the first token of each.

    ``shortest``: tokens of the shortest prompt; the lengths of the others grow evenly up to the longest.
    """

    dtype: str
    adapter: bool = False
    texts: int = 0
    first: bool = False
    shortest: int = PROMPT_TOKENS


CASES = {
    "full fp32": Case("fp32"),
    "full bf16": Case("bf16"),
    "LoRA bf16": Case("bf16", True),
    "generate 1 text": Case("bf16", texts=1),
    "generate 8 texts": Case("bf16", texts=8),
    "first token of 1": Case("bf16", texts=1, first=True),
    "first token of 8": Case("bf16", texts=8, first=True),
    "first token of 8 unlike": Case("bf16", texts=8, first=True, shortest=16),
}


class Gate:
    """Called by a contender after each of its steps: reports it, and waits until the benchmark asks for the next."""

    def __init__(self, device: str) -> None:
        self._on_cpu, self._begin_s = device == "cpu", 0.0
        self._reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what contenders print is no report

    def __call__(self) -> None:
        if self._on_cpu:
            clock, peak_bytes = time.process_time, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        else:
            torch.cuda.synchronize()
            clock, peak_bytes = time.perf_counter, torch.cuda.max_memory_allocated()
        print(json.dumps([clock() - self._begin_s, peak_bytes]), file=self._reports, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._begin_s = clock()


class Contenders:
    """The programs of a case, by the names of the tables."""

    def __init__(self, case: Case, arguments: argparse.Namespace) -> None:
        self.case, self.device, self.sizes = case, arguments.device, arguments
        self.new_tokens = 1 if case.first else arguments.new_tokens
        self.dtype, self.mixed = DTYPES[case.dtype], case == CASES["full bf16"]
        hidden, heads = arguments.hidden, arguments.hidden // 64
        self.config: dict[str, Any] = {
            **{"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": arguments.blocks},
            **{"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 1024},
            **{"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0},
        }
        if case.texts:
            self.programs = {GENERATE: self.generate_by_transformers, OURS: self.generate_ours}
            return
        self.programs = {PLAIN: self.train_plain, OURS: self.train_ours, TRAINER: self.train_by_trainer}
        if case.dtype == "bf16":
            self.programs[NARROW] = partial(self.train_plain, narrow=True)
        if _is_installed("trl", "datasets"):
            self.programs[TRL] = partial(self.train_by_trainer, trl=True)
        if self.device != "cpu" and _is_installed("liger_kernel"):
            self.programs[LIGER] = partial(self.train_plain, change=_fuse_by_liger)
        if arguments.compiled:
            compile_blocks = lambda model: [block.compile() for block in model.get_decoder().layers]  # noqa: E731
            self.programs[PLAIN + COMPILED] = partial(self.train_plain, change=compile_blocks)
            if COMPILES:
                self.programs[OURS + COMPILED] = partial(self.train_ours, compiled=True)

    @property
    def tokens(self) -> int:
        """Tokens of a step, or new tokens of all texts."""
        return self.case.texts * self.new_tokens or self.sizes.rows * self.sizes.length

    def job(self, compiled: bool = False) -> hetero_mpi.Job:
        rows = {"global_batch": self.sizes.rows, "micro_batch": self.sizes.rows}
        train = {**rows, "steps": MAX_STEPS, "dtype": self.case.dtype, "recompute": False}
        tables: dict[str, dict[str, Any]] = {
            "model": {"config": {"model_type": "llama", **self.config}},
            "tokenizer": {"train_vocab_size": VOCABULARY},
            "data": {"text": ["{stdlib}/json/*.py"], "sequence_length": self.sizes.length, "evaluation_fraction": 0.0},
            "train": {**train, "compile": compiled} if COMPILES else train,
            "cluster": {"device": self.device, **({"threads": 1} if self.device == "cpu" else {})},
        }
        if self.case.adapter:
            tables["adapter"] = {"method": "lora", "rank": RANK, "alpha": 2.0 * RANK, "dropout": 0.0}
        return hetero_mpi.Job.build(tables)

    def model(self, narrow: bool = False) -> Any:
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **self.config)
        dtype = torch.float32 if self.mixed and not narrow else self.dtype
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).to(self.device)
        if self.case.adapter:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, lora, autocast_adapter_dtype=not narrow)
        return model.train()

    def train_plain(self, gate: Gate, change: Callable[[Any], object] | None = None, narrow: bool = False) -> None:
        model, dataset = self.model(narrow), prepare(self.job()).dataset
        if change is not None:
            change(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        for step in range(MAX_STEPS):
            batch = dataset.batch(step, self.sizes.rows)
            tokens, targets = (torch.from_numpy(part).long().to(self.device) for part in (batch.tokens, batch.targets))
            with torch.autocast(self.device, torch.bfloat16, enabled=self.mixed and not narrow):
                logits = model(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            gate()

    def train_ours(self, gate: Gate, compiled: bool = False) -> None:
        with tempfile.TemporaryDirectory() as folder:
            hetero_mpi.train(self.job(compiled), run_dir=Path(folder) / "run", on_step=lambda step: gate())

    def train_by_trainer(self, gate: Gate, trl: bool = False) -> None:
        material, model = prepare(self.job()), self.model()
        rows = material.dataset.batch(0, 64).tokens.tolist()
        options: dict[str, Any] = {
            **{"per_device_train_batch_size": self.sizes.rows, "max_steps": MAX_STEPS, "logging_steps": 1},
            **{"learning_rate": 1e-4, "lr_scheduler_type": "constant", "max_grad_norm": 1.0},
            **{"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": self.device == "cpu"},
            **{"bf16": self.mixed, "gradient_checkpointing": False},  # SFTTrainer's defaults are True
        }
        with tempfile.TemporaryDirectory() as folder:
            if trl:
                from datasets import Dataset
                from trl import SFTConfig, SFTTrainer

                tokenizer, dataset = material.tokenizer, Dataset.from_dict({"input_ids": rows})
                tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)
                config = SFTConfig(folder, max_length=None, **options)
                trainer = SFTTrainer(model, config, train_dataset=dataset, processing_class=tokenizer)
            else:
                examples: Any = [{"input_ids": row, "labels": row} for row in rows]
                trainer = Trainer(model, TrainingArguments(folder, **options), train_dataset=examples)
            trainer.add_callback(_StepEnd(gate))
            trainer.train()

    def prompts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask, padded on the left."""
        size = self.case.texts, PROMPT_TOKENS
        tokens = torch.randint(1, VOCABULARY, size, generator=torch.Generator().manual_seed(1))
        lengths = torch.linspace(self.case.shortest, PROMPT_TOKENS, self.case.texts).long()
        return tokens, torch.arange(PROMPT_TOKENS) >= PROMPT_TOKENS - lengths[:, None]

    def generate_by_transformers(self, gate: Gate) -> None:
        model, count = self.model().eval(), self.new_tokens
        prompts, mask = (part.to(self.device) for part in self.prompts())
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        for _ in range(MAX_STEPS):
            model.generate(prompts, attention_mask=mask.long(), **options)
            gate()

    def generate_ours(self, gate: Gate) -> None:
        chain = TransformersChain(read_config({"model_type": "llama", **self.config}))
        backend, count = open_backend(self.device), self.new_tokens
        spec = StageSpec(chain, 0, chain.layer_count, backend, self.case.dtype, tuning=nothing_trained())
        writer = Writer(0, [0], [0], LoopbackNetwork(1).transports[0], chain, [Stage(spec, SeededStart(0))])
        one_rank: Any = SimpleNamespace(all_gather_json=lambda sizes: [sizes])
        writer.settle_width(one_rank, 8)  # as `serve` does
        prompts = [tokens[mask].tolist() for tokens, mask in zip(*self.prompts(), strict=True)]
        tasks = {number: Task(prompt, [], count, Sampling()) for number, prompt in enumerate(prompts)}
        rounds = writer.written(lambda idle: TextChanges(tasks if idle else {}))  # as `serve` does, until it ends
        for number, _ in enumerate(rounds, start=1):
            if number % count == 0:
                gate()


def _is_installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def _fuse_by_liger(model: Any) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model.get_base_model() if hasattr(model, "get_base_model") else model)


class _StepEnd(TrainerCallback):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._gate()


@contextlib.contextmanager
def started(words: list[str]) -> Iterator[Callable[[], tuple[float, int]]]:
    """A contender's process, which has computed its first step: gives a function that asks for a step, and returns its seconds
    and the peak memory (bytes) up to then. Ends the benchmark where the contender fails."""
    program = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], *words]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "errors", "w+") as errors:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        process: Any = subprocess.Popen(program, **pipes, env={**os.environ, "TMPDIR": folder})

        def step(word: str = "step\n") -> tuple[float, int]:
            process.stdin.write(word)
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                errors.seek(0)
                sys.exit(f"{' '.join(program)} failed:\n{errors.read()[-3000:]}")
            seconds, peak_bytes = json.loads(line)
            return seconds, peak_bytes

        try:
            step("")
            yield step
        finally:
            process.stdin.close()
            process.wait()


def compare(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a case's table; returns its rows."""
    case = Contenders(CASES[name], arguments)
    base, peaks = next(iter(case.programs)), dict[str, int]()
    seconds = {contender: list[float]() for contender in case.programs}
    with contextlib.ExitStack() as processes:
        steps = {who: processes.enter_context(started(["--cases", name, "--worker", who])) for who in seconds}
        for step in steps.values():
            step()
        for turn in range(arguments.rounds):
            for contender in list(steps) if turn % 2 == 0 else reversed(steps):
                step_s, peaks[contender] = steps[contender]()
                seconds[contender].append(step_s)
    print(f"\n{name:<17} {'contender':<30} {'tokens/s':>8}   {'speed over ' + base:<32} peak memory")
    rows = []
    for contender, values in seconds.items():
        ratios = [base_s / step_s for base_s, step_s in zip(seconds[base], values, strict=True)]
        speed, tokens_per_s = statistics.median(ratios), case.tokens / statistics.median(values)
        spread = f"{speed:.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"{'':<17} {contender:<30} {tokens_per_s:>8.0f}   {spread:<32} {peaks[contender] / 1e6:.0f} MB", flush=True
        )
        row = {"case": name, "contender": contender, "tokens_per_s": tokens_per_s, "speed": speed}
        rows.append(row | {"ratios": ratios, "peak_bytes": peaks[contender]})
    return rows


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The bars that were missed."""
    speeds = {(row["case"], row["contender"]): row["speed"] for row in rows}
    failures = []
    for name in (name for name, case in CASES.items() if not case.texts and (name, OURS) in speeds):
        for peer, bar in ((PLAIN, MIN_OVER_PLAIN), (TRL, MIN_OVER_TRL)):
            speed = speeds[name, OURS] / speeds.get((name, peer), 1e-9)
            if speed < bar:
                failures.append(f"{name}: {speed:.3f} of {peer}, the bar is {bar}")
    return failures


def main() -> int:
    parser = parser_of(__doc__, rounds=1, hidden=64, blocks=1, rows=2, length=32, new_tokens=4)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of every contender")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where all compute")
    parser.add_argument("--compiled", action="store_true", help="also with compiled blocks")
    for option, size in SIZES.items():
        parser.add_argument(f"--{option}", type=int, default=size, metavar="N", help="size of the model or of a step")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        torch.set_num_threads(1)
        Contenders(CASES[arguments.cases[0]], arguments).programs[arguments.worker](Gate(arguments.device))
        return 1  # a contender computes until the benchmark ends
    for package, contender in (("trl", TRL), ("datasets", TRL), ("liger_kernel", LIGER)):
        if not _is_installed(package):
            print(f"without {contender}: {package} is not installed")
    if arguments.compiled and not COMPILES:
        print(f"without {OURS}{COMPILED}: there is no key [train] compile")
    rows = [row for name in arguments.cases for row in compare(name, arguments)]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    failures = missed(rows)
    print("", *failures, sep="\n")
    return int(bool(failures) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
