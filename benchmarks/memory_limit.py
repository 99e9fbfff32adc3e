"""Does a model train on one rank whose memory is half as large? LoRA under the limit of a control group.

    python benchmarks/memory_limit.py [--model-gb 3] [--limit-gb 1.5] [--full] [--steps 3] [--json FILE] [--check]

Writes a random Llama in bf16 and trains an adapter on it with the command that a user types; launcher and rank are in a control
group with that limit (root is needed), which the planner finds by itself. Looked at every 20 ms: what the rank cannot give back
(RssAnon), the clean pages of mapped files that it has beside (RssFile), and the group's pages of files that are not on the disk
yet. ``--check`` exits 1 where the run fails, where no stage was streamed, or where RssAnon gets larger than the limit.

``--full``: all weights are trained, in fp32, by a plan with a streamed stage that keeps no memory free. The size is that of the
weights in fp32; the limit counts beyond four times as much: weights, gradients and two moments. A step is one short sequence,
since a large model is slow here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import psutil  # noqa: E402
import tomli_w  # noqa: E402
from harness import MAX_RUN_S, parser_of, skip  # noqa: E402

from hetero_mpi.launch.launcher.command_line import build_command  # noqa: E402
from hetero_mpi.launch.launcher.launcher import find_launcher  # noqa: E402
from hetero_mpi.planning.types.plan import FROM_DISK, PipelinePlan, Plan, StagePlan  # noqa: E402
from hetero_mpi.planning.types.toml_files import load_report, save_plan  # noqa: E402
from hetero_mpi.rundir.metrics import read_metrics  # noqa: E402
from tests.support.processes import end_tree  # noqa: E402

GROUPS = Path("/sys/fs/cgroup")
LAYER = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": 8192}
LAYER_BYTES = 2 * (4 * 2048 * 2048 + 3 * 2048 * 5632)
ENDS_BYTES = 2 * 2 * 8192 * 2048
CREATE = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("llama", **json.loads(sys.argv[1]))
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(sys.argv[2])
print(sum(p.nbytes for p in model.parameters()))
"""


def main() -> int:
    parser = parser_of(__doc__, model_gb=0.2, limit_gb=1.2, steps=1)
    parser.add_argument("--model-gb", type=float, default=3.0, help="size of the model's weights in bf16")
    parser.add_argument("--limit-gb", type=float, default=1.5, help="of the control group")
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--steps", type=int, default=3, help="of the run")
    arguments = parser.parse_args()
    blocks = round(arguments.model_gb * 1e9 / LAYER_BYTES / (2 if arguments.full else 1))
    state_bytes = (
        8 * (blocks * LAYER_BYTES + ENDS_BYTES) if arguments.full else 0
    )  # from 2 bytes of each parameter to 16
    limit_bytes = int(arguments.limit_gb * 1e9) + state_bytes
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, limited_group(limit_bytes) as group:
        folder = Path(name)
        shape = json.dumps({**LAYER, "num_hidden_layers": blocks})
        made = subprocess.run([sys.executable, "-c", CREATE, shape, name + "/model"], capture_output=True, text=True)
        model_bytes = int(made.stdout.split()[-1])
        job = _job(folder, arguments.steps, *((1, 32) if arguments.full else (4, 64)), arguments.full)
        began = time.monotonic()
        plan = ["--plan", str(_streamed_plan(folder / "given.toml", blocks))] if arguments.full else []
        code, text, anon_bytes, file_bytes, dirty_bytes = _run(job, folder / "run", group, *plan)
        seconds = time.monotonic() - began
        steps = read_metrics(folder / "run" / "metrics.jsonl").steps if code == 0 else []
        report = load_report(folder / "run" / "plan.toml") if code == 0 else None
    streamed = report is not None and any(stage.streamed for _, _, stage in report.plan.numbered)
    predicted = f", {report.predicted_step_s:.1f} predicted" if report is not None else ""
    if code != 0 or not streamed:
        print(text)
    row = {
        "model_bytes": model_bytes,
        "limit_bytes": limit_bytes,
        "exit_code": code,
        "streamed": streamed,
        "most_anon_bytes": anon_bytes,
        "most_file_bytes": file_bytes,
        "most_dirty_bytes": dirty_bytes,
        "seconds": seconds,
        "step_s": [step.step_s for step in steps],
        "losses": [step.loss for step in steps],
    }
    print(
        f"model {model_bytes / 1e9:.2f} GB, limit {limit_bytes / 1e9:.2f} GB: exit code {code}, {len(steps)} steps, streamed: "
        f"{streamed}; RssAnon at most {anon_bytes / 1e9:.2f} GB, mapped files at most {file_bytes / 1e9:.2f} GB, "
        f"to be written at most {dirty_bytes / 1e9:.2f} GB; {seconds:.0f} s in all, "
        f"steps of {', '.join(f'{step.step_s:.1f}' for step in steps)} s{predicted}"
    )
    for reason in report.reasons if report is not None else ():
        if FROM_DISK in reason:
            print(reason)
    if arguments.json:
        arguments.json.write_text(json.dumps(row, indent=1) + "\n")
    return int(arguments.check and (code != 0 or not streamed or anon_bytes > limit_bytes))


@contextlib.contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """A control group with this limit; its ``cgroup.procs`` takes processes."""
    version_2 = (GROUPS / "cgroup.controllers").exists()
    group = (GROUPS if version_2 else GROUPS / "memory") / f"hetero-limit-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        skip(f"no control group can be made here ({error}): root is needed, and the memory controller")
    try:
        (group / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def _streamed_plan(path: Path, blocks: int) -> Path:
    """One rank holds the model layer by layer."""
    stage = StagePlan((0,), 0, blocks + 2, 0, streamed=True, slice_sequences=1)
    save_plan(Plan((PipelinePlan((stage,), 1, 1),), 1, 32, blocks + 2), path)
    return path


def _job(folder: Path, steps: int, sequences: int, tokens: int, full: bool) -> Path:
    (folder / "text.txt").write_text("\n".join(f"line {i} of a text that nobody reads" for i in range(4000)))
    tables = {
        "model": {"path": "model"},
        "tokenizer": {"train_vocab_size": 300},
        "adapter": {"method": "none"} if full else {"method": "lora", "rank": 4},
        "data": {"text": ["text.txt"], "sequence_length": tokens, "evaluation_fraction": 0.0},
        "train": {"steps": steps, "global_batch": sequences, "dtype": "fp32" if full else "bf16"},
        "plan": {"memory_reserve": 0.0 if full else 0.05},
        "checkpoint": {"every": 0},
        "report": {"write": False},
    }
    (folder / "job.toml").write_text(tomli_w.dumps(tables))
    return folder / "job.toml"


def _run(job: Path, run: Path, group: Path, *options: str) -> tuple[int, str, int, int, int]:
    """(exit code, what was printed, most RssAnon, most RssFile) of the rank; most bytes that were not on the disk yet."""
    program = [sys.executable, "-m", "hetero_mpi", "train", str(job), "--run-dir", str(run), *options]
    command = build_command(find_launcher(), 1, None, program)
    inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *command.arguments]
    environment = {**os.environ, **command.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    most_anon = most_file = most_dirty = 0
    deadline = time.monotonic() + MAX_RUN_S
    with run.with_suffix(".txt").open("w") as out:
        process = psutil.Popen(inside, env=environment, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            for child in (group / "cgroup.procs").read_text().split():
                anon, file = _held(int(child))
                most_anon, most_file = max(most_anon, anon), max(most_file, file)
            most_dirty = max(most_dirty, _dirty(group))
            if time.monotonic() > deadline:
                end_tree(process)
            time.sleep(0.02)
    return int(process.wait()), run.with_suffix(".txt").read_text(), most_anon, most_file, most_dirty


def _dirty(group: Path) -> int:
    """Bytes of files that are to be written, or are being written."""
    found = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return sum(int(found.get(name, 0)) for name in ("dirty", "writeback", "file_dirty", "file_writeback"))


def _held(pid: int) -> tuple[int, int]:
    """(RssAnon, RssFile) of a process in bytes; (0, 0) where it has gone."""
    try:
        found = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(found["RssAnon"].split()[0]) * 1024, int(found["RssFile"].split()[0]) * 1024
    except (OSError, KeyError):
        return 0, 0


if __name__ == "__main__":
    sys.exit(main())
