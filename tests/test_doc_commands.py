"""Every command that README and the documents tell to type runs in some tier, or stands below with the reason why it does not.

That all commands of the program are understood is seen in ``test_docs.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.types.request import PlanRequest
from tests.support.checkpoint_samples import told, write_checkpoint
from tests.support.forked_scripts import read_arguments
from tests.support.long_run import started
from tests.support.mpi import ROOT, SHARING, launcher_or_skip, require_success
from tests.support.past_runs import make_run
from tests.support.planning_samples import make_model, make_profile
from tests.support.processes import run_within
from tests.test_docs import DOCUMENTS, FENCED, OFFLINE, WRITTEN_WHOLE, simple_commands, spans

SPAN = re.compile(
    r"(\w+=\S+ )*(\S*/)?(python3?|pytest|mpirun|srun|hetero-mpi|pip|docker|conda|bash|git|ctest|cmake) [^.]"
)
"""A code span that is a whole command."""
FORM = re.compile(r"\.\.\.|\b(COMMAND|JOB|PYTHON)\b")
"""A form of a command, not one to type."""
BENCHMARKS, COLLECTED = "tests/test_benchmarks.py", "test_tests_named_by_a_document_exist"
PATIENCE_S = 300.0
FOLLOWED = {
    "jobs/first_evening.md": "tests/job/test_shipped_jobs.py::test_the_first_evening_ends_with_a_model_that_passes_its_exam",
    "docs/getting-started.md": "tests/commands/test_getting_started.py::test_the_commands_of_the_page_work_in_their_order",
    "docs/python.md": "tests/commands/test_python_api.py::"
    "test_the_programs_and_commands_of_the_document_run_in_an_empty_folder",
    "docs/emulated.md": "tests/emulation/test_emulated_cluster.py::test_the_job_of_the_document_runs_in_an_empty_folder",
}
"""Page -> the test that runs its ``sh`` blocks in their order, but for those that install or need several machines."""
NOT_FOLLOWED = re.compile("installs|several machines")
OURS = "python -m hetero_mpi "
LIGHT = (
    f"{OURS}(cache|init (quickstart|letters|dpo|lora_nf4|llama8b_alpaca|slurm)|init --from axolotl.yml --gpus 2)",
    f"{OURS}inspect (step-00000120.h5|runs/first/profile.toml)",
    f"{OURS}launch --hosts hosts.toml --print -- train job.toml",
    f"{OURS}mesh init hosts.toml -o mesh",
    "hetero-mpi completion (bash|zsh|fish)",
)
"""Commands that start no ranks: ``test_light_commands_run_as_they_stand``."""
STARTING = (
    f"{OURS}generate runs/quickstart .*",
    f"{OURS}doctor --(hostfile hosts|hosts hosts.toml)",
    f"{OURS}launch -np 2 -- train jobs/quickstart.toml --set train.steps=10",
    f"{OURS}launch -np 3 -- train (jobs/quickstart.toml|job.toml --dry-run)",
    f"{OURS}launch -np 2 -- train job.toml --dry-run",
    f"{OURS}launch --hosts hosts.toml -- (train job.toml|serve runs/first --port 8000)",
    f"{OURS}launch -np 2 --hostfile hosts -- doctor",
    f"{OURS}launch -np 3 --hostfile hosts (--recover|--elastic) -- train job.toml",
    f"mpirun --with-ft ulfm -np 3 -hostfile hosts {OURS}train job.toml",
    f"(mpirun -np 3 {OURS}doctor|{OURS}launch -np 3 -- (profile job.toml -o cluster.toml|train jobs/quickstart.toml --watch))",
    f"{OURS}(profile job.toml -o inside.toml|watch runs/quickstart|evaluate runs/tuned|serve runs/first)",
    f"{OURS}launch -np 3 -- evaluate runs/tuned --data .*",
    f"{OURS}launch -np 3 -- serve .*",
    f"HETERO_MPI_TOKEN=something-long {OURS}launch -np 2 -- serve runs/first --host 0.0.0.0",
)
"""Commands that start ranks or servers: ``test_commands_that_start_ranks_run_as_they_stand``."""
RUN_BY = {
    f"{OURS}doctor --selftest": "tests/launch/test_self_test.py::test_doctor_goes_on_with_the_next_device",
    f"{OURS}launch -np 2 -- train jobs/moe_small.toml": "tests/job/test_shipped_jobs.py::"
    "test_the_small_mixture_of_experts_runs_np2",
    f"{OURS}launch -np 3 -- train jobs/stages.toml": "tests/job/test_shipped_jobs.py::"
    "test_the_job_of_stages_has_a_stage_per_rank_np3",
    f"{OURS}launch --hosts mesh/hosts.toml -- .*": "tests/launch/test_mesh.py::"
    "test_messages_go_through_wireguard_or_it_is_told",
    f"{OURS}launch -np 3 -- train jobs/dpo.toml": "tests/runtime/test_preference.py::test_the_shipped_jobs",
    f"{OURS}export runs/tuned OUT .*": "tests/commands/test_publish.py::test_a_directory_is_pushed_as_a_private_model",
    f"{OURS}reference --(commands|markdown)": "tests/test_docs.py::test_pages_of_reference_are_the_code",
    "python -m tests.written_docs": "tests/test_docs.py::test_pages_of_reference_are_the_code",
    "OMP_NUM_THREADS=1 python -m tests.family_trial": "tests/model/test_all_families.py::test_proven_families",
    "python -m tests.stand_in_gpu launch .*": "tests/device/test_accelerators.py::"
    "test_gpus_and_a_processor_compute_what_one_process_does",
    ".*(plan.schedule=all_forward_two_backward|train.preference=exponential).*": "tests/test_plug_ins.py::"
    "test_the_exercises_train",
    "scancel .*": "tests/launch/test_slurm.py::test_unlike_nodes_stop_at_the_limit_and_go_on_np2",
    f"(source jobs/slurm.sh|to_scratch .*|train .*|{OURS}launch --print .*)": "tests/launch/test_slurm.py::"
    "test_nodes_copies_and_ranks",
}
"""Command (a pattern) -> the test that runs it, on files of its own."""
NOT_RUN = {
    r"(python3 -m venv|pip install|conda (create|activate)|git clone|cd hetero_mpi|\. activate)( .*)?": "installs: "
    ".ci/run does so from pyproject.toml, tests/commands/test_containers.py as README says",
    r"(ssh|ssh-keygen|ssh-copy-id) .*": "needs the reader's machines",
    "sudo .*": "needs a Thunderbolt cable",
    "(srun --mpi=pmix (python|apptainer)|scontrol) .*": "needs a cluster whose MPI was built with SLURM's PMIx, or its operator",
    f"{OURS}launch --hosts hosts.toml -- train jobs/moe_nf4.toml": "fetches 61 GB",
    f"{OURS}launch -np 3 --hostfile hosts -- train jobs/lora_nf4.toml --dry-run": "the hosts are the reader's; the same "
    "on one machine stands in docs/coming-from.md",
    ".* -k all_forward_two_backward": "needs the test that the page tells to write",
    f"{OURS}launch -np 3 -- evaluate .* --tasks .*": "fetches data sets; tests/commands/test_evaluate.py has tasks of its own",
    f"({OURS}launch -np 3 -- train homelab.toml|python -m tests.written_docs --run)": "two minutes, and its pictures are "
    "looked at by hand",
    "python -m tests.arm_host .*": "fetches 2 GB",
    f"({OURS.strip()}( launch)?|mpirun (-np 3|--with-ft ulfm)|srun --(het-group=.*|mpi=list)|docker run .*)": "the "
    "beginning of a command, of which its sentence speaks",
}
"""Command (a pattern) -> why no test runs it."""


@dataclass(frozen=True)
class Typed:
    """A command of a document."""

    document: str
    words: tuple[str, ...]
    mark: str | None
    """The comment before its block; None: a code span."""

    @property
    def text(self) -> str:
        return shlex.join(self.words)

    @property
    def program(self) -> tuple[str, ...]:
        """Without assignments before it."""
        given = next((place for place, word in enumerate(self.words) if not re.match(r"\w+=", word)), 0)
        return self.words[given:]

    @property
    def entries(self) -> list[str]:
        """The patterns of ``RUN_BY`` and ``NOT_RUN`` that it has."""
        return [entry for entry in (*RUN_BY, *NOT_RUN) if re.fullmatch(entry, self.text)]

    @property
    def runner(self) -> str | None:
        """What runs all commands of its kind; None: it is to stand in a table."""
        if self.entries:
            return None
        if self.program[:2] == ("bash", ".ci/run") or self.mark == "test-command":
            return ".ci/run"
        if self.program[0] == "python" and self.program[1].startswith("benchmarks/"):
            return BENCHMARKS
        if self.program[0] == "pytest" or self.program[:3] == ("python", "-m", "pytest"):
            return COLLECTED
        if any(re.fullmatch(pattern, self.text) for pattern in LIGHT + STARTING):
            return "below"
        if self.mark is None:
            return None
        if self.document in FOLLOWED and not NOT_FOLLOWED.search(self.mark):
            return FOLLOWED[self.document]
        offline = self.words[:3] == ("python", "-m", "hetero_mpi") and self.words[3] in OFFLINE
        return "tests/test_docs.py::test_offline_commands_run" if offline else None


def typed(document: Path) -> Iterator[Typed]:
    """The commands of a document's shell blocks and code spans."""
    name, text = str(document.relative_to(ROOT)), document.read_text(encoding="utf-8")
    lines = [(None, span) for span in spans(document) if SPAN.match(span)]
    for found in FENCED.finditer(text) if document.name not in WRITTEN_WHOLE else ():
        mark = re.search(r"<!-- (.*?) -->\n$", text[: found.start()])
        for line in found["text"].replace("\\\n", " ").splitlines():
            if found["language"] in ("sh", "bash") or (not found["language"] and SPAN.match(line)):
                lines.append((mark[1] if mark else "", line))
    for mark, line in lines:
        for words in simple_commands(re.sub(r"<([\w ]+)>", "PLACE", line)):
            if not FORM.search(shlex.join(words)):
                yield Typed(name, words, mark)


COMMANDS = [command for document in DOCUMENTS for command in typed(document)]


def test_every_command_is_run_or_has_a_reason() -> None:
    unknown = [f"{one.document}: {one.text}" for one in COMMANDS if not one.entries and one.runner is None]
    assert not unknown, "no test runs it: name one in RUN_BY, or a reason in NOT_RUN"
    assert not [one.text for one in COMMANDS if len(one.entries) > 1]
    assert {entry for one in COMMANDS for entry in one.entries} == {*RUN_BY, *NOT_RUN}, "entries of no command"


def test_tests_that_run_commands_exist() -> None:
    for test in (*FOLLOWED.values(), *RUN_BY.values()):
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test


@pytest.mark.slow
def test_benchmarks_take_the_arguments_that_documents_give(tmp_path: Path) -> None:
    by_script = defaultdict[str, set[tuple[str, ...]]](set)
    for command in COMMANDS:
        if command.runner == BENCHMARKS:
            by_script[command.program[1]].add(command.program[2:])
    assert len(by_script) > 25
    for script, given in by_script.items():
        require_success(read_arguments(ROOT / script, sorted(given), tmp_path, PATIENCE_S))


COLLECT = """
import contextlib, json, os, pytest
class Collected:
    def pytest_collection_modifyitems(self, items):
        self.marks = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in items}
collected = Collected()
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    pytest.main(["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider"], plugins=[collected])
print(json.dumps(collected.marks))
"""
"""Prints every test and its marks."""


@pytest.mark.long
def test_tests_named_by_a_document_exist() -> None:
    """Each command of pytest selects some."""
    done = subprocess.run([sys.executable, "-c", COLLECT], capture_output=True, text=True, cwd=ROOT, timeout=600)
    marks_of: dict[str, list[str]] = json.loads(done.stdout)
    given = {command.program for command in COMMANDS if command.runner == COLLECTED}
    assert len(given) > 15
    parser = argparse.ArgumentParser()
    for option, default in (("-m", "not slow and not long"), ("-k", ""), ("-n", ""), ("--dist", "")):
        parser.add_argument(option, default=default)
    parser.add_argument("files", nargs="*")
    missing = []
    for words in given:
        asked = parser.parse_args(words[words.index("pytest") + 1 :])
        files = tuple(asked.files) or ("tests/",)
        tests = (
            test for test, marks in marks_of.items() if test.startswith(files) and holds(asked.m, marks.__contains__)
        )
        if not any(holds(asked.k, test.__contains__) for test in tests):
            missing.append(shlex.join(words))
    assert not missing


def holds(expression: str, is_true: Callable[[str], bool]) -> bool:
    """Whether an expression of names with ``and``, ``or`` and ``not`` holds, as pytest's ``-m`` and ``-k`` do."""
    words = re.findall(r"\w+|[()]", expression)
    return not words or bool(
        eval(" ".join(w if w in ("and", "or", "not", "(", ")") else str(is_true(w)) for w in words))
    )


JOB = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 3
num_attention_heads = 2
[tokenizer]
train_vocab_size = 300
[data]
text = ["{stdlib}/json/*.py"]
sequence_length = 32
[train]
steps = 4
global_batch = 6
[cluster]
threads = 1
"""


def run(line: str, folder: Path) -> str:
    """What a command prints in ``folder``, with the programs of this environment."""
    done = require_success(run_within(PATIENCE_S, ["bash", "-c", line], environment(folder), folder))
    return done.stdout + done.stderr


def environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **SHARING, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}


def as_typed(patterns: tuple[str, ...]) -> list[str]:
    texts = dict.fromkeys(command.text for command in COMMANDS)
    return [text for text in texts if any(re.fullmatch(pattern, text) for pattern in patterns)]


@pytest.mark.slow
def test_light_commands_run_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    shutil.copy(ROOT / "tests" / "commands" / "other_tools" / "axolotl-alpaca-qlora.yml", tmp_path / "axolotl.yml")
    addresses = {"first": "192.168.1.10", "second": "192.168.1.11"}
    hosts = [f'[[host]]\nname = "{name}"\naddress = "{address}"\n' for name, address in addresses.items()]
    (tmp_path / "hosts.toml").write_text("\n".join(hosts))
    write_checkpoint(tmp_path / "step-00000120.h5", told(120), {"w": (2, 3)})
    profile = make_profile((1.0, 1.5), make_model(6))
    make_run(tmp_path / "runs" / "first", make_plan(profile, PlanRequest(8, 10, (1, 2))), profile)
    lines = as_typed(LIGHT)
    assert len(lines) > len(LIGHT)
    for line in lines:
        if "init --from" in line:
            (tmp_path / "job.toml").rename(tmp_path / "small.toml")
        assert run(line, tmp_path).strip(), line
        if "init --from" in line:
            (tmp_path / "small.toml").replace(tmp_path / "job.toml")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small jobs and runs under the names of the documents; this machine is all hosts."""
    launcher_or_skip()
    folder = tmp_path_factory.mktemp("typed")
    (folder / "jobs").mkdir()
    for name in ("job.toml", "jobs/quickstart.toml"):
        (folder / name).write_text(JOB)
    (folder / "hosts").write_text("localhost slots=3\n")
    (folder / "hosts.toml").write_text('[[host]]\nname = "here"\naddress = "localhost"\nslots = 3\n')
    (folder / "code").mkdir()
    for name in ("wiki.jsonl", "code/a.jsonl"):
        (folder / name).write_text('{"text": "A text to evaluate on, of one line."}\n' * 9)
    run("python -m hetero_mpi train job.toml --run-dir runs/first", folder)
    for name in ("quickstart", "tuned"):
        shutil.copytree(folder / "runs" / "first", folder / "runs" / name)
    shutil.copytree(folder / "runs" / "first" / "model", folder / "base-model")
    adapted = f'[model]\npath = "base-model"\n[adapter]\nmethod = "lora"\n{JOB[JOB.index("[data]") :]}'
    (folder / "adapted.toml").write_text(adapted)
    run("python -m hetero_mpi train adapted.toml --run-dir runs/poems", folder)
    shutil.copytree(folder / "runs" / "poems" / "adapter", folder / "adapters" / "code")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("line", as_typed(STARTING))
def test_commands_that_start_ranks_run_as_they_stand(line: str, trained: Path) -> None:
    if not re.search(r" (serve|watch) ", line):
        assert run(line, trained).strip()
        return
    port = "" if " watch " in line else " --port 0"  # another one may be taken
    words, output = ["bash", "-c", f"cd {trained} && exec env {line}{port}"], trained / "output.txt"
    with started(words, environment(trained), trained, output) as server:
        server.wait_for("the address", lambda: "http://" in server.text())
