"""Does a change leave every bit of training as it was? For "before and after" on one machine.

    python benchmarks/reference_runs.py --freeze FILE [--only NAME]     before the change
    python benchmarks/reference_runs.py --check FILE [--only NAME]      after it: exit status 1 if a job differs

Runs small real jobs (``JOBS``) by mpirun, each under a plan of its own, so that the planner has no say.
FILE (JSON) holds for every job the loss of each step as a hexadecimal float, and a SHA-256 of the result: the tensors of the
final checkpoint (parameters and moments) and of the exported model or adapter, sorted by name. Bits depend on the processor and on
the versions of the libraries: a file is of no use on another machine, and none is committed.

The recovered job loses a rank by SIGKILL at a moment that differs from run to run. Its losses and tensors do not: one pipeline with
fixed micro-batches computes the same bits under every division of the layers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import h5py  # noqa: E402
import psutil  # noqa: E402
from harness import add_smallest  # noqa: E402
from safetensors import safe_open  # noqa: E402

from hetero_mpi.launch.launcher.command_line import build_command  # noqa: E402
from hetero_mpi.launch.launcher.launcher import find_launcher  # noqa: E402
from tests.stand_in_gpu import build  # noqa: E402
from tests.support import case_plans, training_cases  # noqa: E402
from tests.support.processes import end_tree  # noqa: E402
from tests.support.training_cases import Case  # noqa: E402

TIMEOUT_S = 600
RECOVERED_STEPS = 60


@dataclass(frozen=True)
class Job:
    """A job of ``ranks`` ranks. ``case`` says model, data and plan."""

    name: str
    ranks: int
    case: Case
    kind: str = "train"
    """``train``; ``stand-in`` (on stand-in GPUs); ``recover`` (a rank is killed)."""
    resumes: str | None = None
    """The job whose checkpoint of step 1 it goes on from, with another division of the layers."""
    settings: tuple[str, ...] = ()
    """Other values of the job: ``table.key=value``."""


FULL = Case("full", "llama", False, 0.0, True, 2, "even")
TIED = Case("tied", "gemma2", True, 0.0, True, 4, "ends", recompute=True)
DROPOUT = Case("dropout", "gpt_neox", False, 0.1, False, 2, "reversed")
LORA = Case("lora", "qwen3", True, 0.0, True, 1, "reversed", tuning="lora")
NF4 = Case("nf4", "phi3", False, 0.0, True, 2, "even", tuning="nf4")
FP16 = Case("fp16", "llama", False, 0.0, True, 2, "even", tuning="lora", dtype="fp16")
BF16_SPLIT = Case("bf16-split", "llama", True, 0.1, True, 2, "uneven", schedule="split", dtype="bf16")
EACH = Case("each", "phi3", False, 0.0, True, 2, "even", pipelines="each", shares="unequal")
TAIL = Case("tail", "gemma2", True, 0.0, False, 2, "even", pipelines="tail", shares="unequal")
LORA_TWO = Case("lora-two", "llama", True, 0.0, True, 1, "even", tuning="lora", pipelines="two", schedule="gpipe")
JOBS = (
    Job("full-1", 1, FULL, settings=("train.evaluate_every=2", "report.write=true")),
    Job("lora-1", 1, LORA),
    Job("nf4-dropout-1", 1, Case("nf4-dropout", "llama", False, 0.1, False, 2, "even", tuning="nf4")),
    Job("full-2", 2, FULL, settings=("train.evaluate_every=1",)),
    Job("nf4-2", 2, NF4),
    Job("each-2", 2, EACH),
    Job("fp16-2", 2, FP16),
    Job("full-2-resumed", 2, FULL, resumes="full-2"),
    Job("tied-3", 3, TIED),
    Job("dropout-3", 3, DROPOUT),
    Job("lora-3", 3, LORA),
    Job("bf16-split-3", 3, BF16_SPLIT),
    Job("tail-3", 3, TAIL, settings=("report.write=true",)),
    Job("lora-two-3", 3, LORA_TWO),
    Job("dropout-3-resumed", 3, DROPOUT, resumes="dropout-3"),
    Job("recovered-3", 3, FULL, "recover", settings=(f"train.steps={RECOVERED_STEPS}", "checkpoint.every=20")),
    Job("stand-in-lora-2", 2, LORA, "stand-in"),
)


class Bench:
    """Runs jobs in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.text = training_cases.corpus(directory)
        self.tokenizer = training_cases.tokenizer_directory(directory, self.text)

    def run(self, jobs: Sequence[Job]) -> None:
        """Run jobs of one kind and number of ranks: plain ones in one mpirun, as starting ranks takes longer than these jobs."""
        first, output = jobs[0], (self.directory / jobs[0].name).with_suffix(".out")
        if first.kind == "train":
            listed, outcomes = (self.directory / f"{first.name}.{name}.json" for name in ("jobs", "outcomes"))
            listed.write_text(json.dumps([self._entry(job) for job in jobs]))
            program = [sys.executable, "tests/programs/train_outcomes.py", str(listed), str(outcomes)]
            line = build_command(find_launcher(), first.ranks, None, program)
            self._start(line.arguments, {**line.environment, "PYTHONPATH": str(ROOT)}, output)
            for job, ranks in zip(jobs, json.loads(outcomes.read_text()), strict=True):
                if any(rank["raised"] for rank in ranks):
                    raise SystemExit(f"{job.name} failed:\n{ranks[0]['text']}\n{output.read_text()[-4000:]}")
            return
        entry, module = self._entry(first), "tests.stand_in_gpu" if first.kind == "stand-in" else "hetero_mpi"
        options = [word for text in entry["set"] for word in ("--set", text)]
        options += ["--run-dir", entry["run_dir"], "--plan", entry["plan"]]
        recover = ["--recover"] if first.kind == "recover" else []
        command = [sys.executable, "-m", module, "launch", "-np", str(first.ranks), *recover, "--"]
        killed = Path(entry["run_dir"]) if first.kind == "recover" else None
        self._start([*command, "train", entry["job"], *options], {}, output, killed)

    def _start(self, command: list[str], environment: dict[str, str], output: Path, killed: Path | None = None) -> None:
        """Run a command to its end. ``killed``: the run directory of a job that loses rank 1 meanwhile."""
        with output.open("w") as stream, ExitStack() as stack:
            process = psutil.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
            stack.callback(end_tree, process)
            if killed is not None:
                _kill_a_rank(process, killed, output)
            code = process.wait(TIMEOUT_S)
        text = output.read_text()
        if code != 0 or (killed is not None and "Lost rank 1" not in text):
            raise SystemExit(f"exit code {code} of {' '.join(command)}:\n{text[-6000:]}")

    def _entry(self, job: Job) -> dict[str, Any]:
        """Files and options of a job, as ``train_outcomes.py`` reads them."""
        case, run = job.case, self.directory / job.name
        model = training_cases.model_directory(self.directory, case)
        adapter = None if case.tuning == "full" else training_cases.adapter_directory(self.directory, case)
        file, plan = run.with_suffix(".toml"), run.with_suffix(".plan.toml")
        file.write_text(training_cases.job_text(case, model, self.tokenizer, self.text, adapter))
        case_plans.write_plan(plan, case, job.ranks, "uneven" if job.resumes is not None else None)
        entry = {"job": str(file), "plan": str(plan), "run_dir": str(run), "set": job.settings}
        if job.resumes is not None:
            entry["resume"] = str(self.directory / job.resumes / "checkpoints" / "step-00000001.h5")
        return entry


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that share an mpirun, in their order."""
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.ranks if job.kind == "train" else job, []).append(job)
    return list(groups.values())


def _kill_a_rank(process: psutil.Popen, run: Path, output: Path) -> None:
    """SIGKILL rank 1 once it has taken five steps."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (run / "metrics.jsonl").exists() or len(losses(run)) < 5:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the job to be recovered ended too early:\n{output.read_text()[-6000:]}")
        time.sleep(0.02)
    for child in process.children(recursive=True):
        if "train" in child.cmdline() and child.environ().get("OMPI_COMM_WORLD_RANK") == "1":
            child.kill()
            return
    raise SystemExit(f"rank 1 was not found:\n{output.read_text()[-6000:]}")


def losses(run: Path) -> list[str]:
    """Of every step and held-out evaluation, in their order, as hexadecimal floats."""
    found: dict[str, str] = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        key = "loss" if "loss" in line else "evaluation_loss"
        found[f"{line['step']} {key}"] = f"{line['step']} {key} {float(line[key]).hex()}"
    return list(found.values())


def digest(run: Path) -> str:
    """SHA-256 of the tensors of the final checkpoint and of the exported model or adapter, by name."""
    whole = hashlib.sha256()
    for name, content in sorted([*_checkpoint_tensors(run), *_exported_tensors(run)]):
        whole.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return whole.hexdigest()


def _checkpoint_tensors(run: Path) -> Iterator[tuple[str, bytes]]:
    with h5py.File(max((run / "checkpoints").glob("step-*.h5")), "r") as file:
        for kind in ("parameters", "moments1", "moments2"):
            group = file[kind]
            yield from ((f"{kind}/{name}", group[name][()].tobytes()) for name in group)


def _exported_tensors(run: Path) -> Iterator[tuple[str, bytes]]:
    files = sorted([*run.glob("model/*.safetensors"), *run.glob("adapter/*.safetensors")])
    if not files:
        raise SystemExit(f"{run} holds no exported model or adapter")
    for path in files:
        with safe_open(path, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                yield f"exported/{name}", stored.get_tensor(name).contiguous().view(-1).float().numpy().tobytes()


def difference(then: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first difference of a job's results, in words; None: they are equal."""
    for before, after in zip(then["losses"], now["losses"], strict=False):
        if before != after:
            return f"was {before}, is {after}"
    if len(then["losses"]) != len(now["losses"]):
        return f"{len(then['losses'])} losses then, {len(now['losses'])} now"
    return None if then["result"] == now["result"] else "the losses are equal, the resulting tensors are not"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--freeze", type=Path, metavar="FILE", help="run the jobs and write what they compute")
    way.add_argument("--check", type=Path, metavar="FILE", help="run the jobs again and compare")
    parser.add_argument("--only", default="", metavar="NAME", help="only jobs whose name contains this")
    add_smallest(parser, only="full-1")
    arguments = parser.parse_args(given)
    frozen = json.loads(arguments.check.read_text()) if arguments.check else {}
    chosen = [job for job in JOBS if arguments.only in job.name]
    needed = {job.resumes for job in chosen}
    chosen = [job for job in JOBS if job in chosen or job.name in needed]
    skipped = {job.name: build.missing() for job in chosen if job.kind == "stand-in" and build.missing() is not None}
    skipped |= {
        job.name: f"{arguments.check} does not have it" for job in chosen if arguments.check and job.name not in frozen
    }
    for name, reason in skipped.items():
        print(f"{name}: skipped, {reason}", flush=True)
    chosen = [job for job in chosen if job.name not in skipped]
    found: dict[str, Any] = {}
    differing = []
    with tempfile.TemporaryDirectory(prefix="reference-runs-") as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")  # neither takes nor leaves the user's measured times
        bench = Bench(Path(folder))
        for jobs in together(chosen):
            begin = time.monotonic()
            bench.run(jobs)
            print(f"{len(jobs)} on {jobs[0].ranks} ranks: {time.monotonic() - begin:.1f} s", flush=True)
            for job in jobs:
                found[job.name] = {
                    "losses": losses(bench.directory / job.name),
                    "result": digest(bench.directory / job.name),
                }
                told = difference(frozen[job.name], found[job.name]) if arguments.check else "frozen"
                differing += [job.name] if arguments.check and told is not None else []
                print(f"  {job.name}: {told or 'equal'}", flush=True)
    if arguments.freeze:
        arguments.freeze.write_text(json.dumps(found, indent=1) + "\n")
    else:
        print(f"{len(found)} jobs, {len(differing)} differ{': ' + ', '.join(differing) if differing else ''}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
