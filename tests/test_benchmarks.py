"""Every script in benchmarks/ runs, at its smallest size: ``python benchmarks/NAME.py --smallest``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.forked_scripts import read_arguments, run_script
from tests.support.mpi import ROOT, require_success

SCRIPTS = sorted(
    path.name for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()
)
NEEDED = {
    "make_profiles.py": ("--to", "."),
    "reference_runs.py": ("--freeze", "reference.json"),
    "tool_keys.py": ("--check",),
}
"""What a script cannot do without, beside ``--smallest``."""
FURTHER = (
    ("shard_memory.py", "--streamed", "--only", "8bit"),
    ("planner_quality.py", "--looks", "20"),
    ("memory_limit.py", "--full"),
    ("peers.py", "--contenders", "DistributedDataParallel", "ours, free choice"),
    ("peers.py", "--unlike", "1", "--micro-batch"),
    *(("reliability.py", "--only", name) for name in ("stall", "kills", "pipeline_kills", "copies", "rebalancing")),
)
"""Other ways through a script, in the long tier. Options behind ``--smallest`` count."""
LONG = {
    "emulated.py": "two emulated ranks start, then one",
    "groups.py": "four ranks start and measure their profile",
    "memory_limit.py": "a rank trains in a control group",
    "methods.py": "three ranks start; its cells are those of tests/runtime/test_equality.py",
    "one_device.py": "every contender is a process",
    "peers.py": "a model is written and trained in one process",
    "prediction.py": "two ranks start and measure their profile",
    "quickstart.py": "two runs measure their profile",
    "step_scaling.py": "two ranks start",
    "streaming.py": "ten ranks start",
    "watch_cost.py": "a rank trains while a page is looked at",
    "wire.py": "two ranks start in namespaces of their own",
}
"""What takes more than ten seconds of the processor at its smallest size, and why; in the slow tier its arguments are read."""
ELSEWHERE = {
    "peers_worker.py": "tests/commands/test_peers.py::test_all_others_compute_the_same_losses",
    "perfetto.py": "tests/report/test_group_steps.py::test_perfettos_own_trace_processor_reads_every_event",
}
"""Script that needs what another one makes -> the test that runs it."""
MAX_RUN_S = 900.0


@pytest.mark.slow
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in ELSEWHERE])
def test_a_benchmark_runs_at_its_smallest_size(script: str, tmp_path: Path) -> None:
    if script in LONG:
        words = ["--smallest", *NEEDED.get(script, ())]
        require_success(read_arguments(ROOT / "benchmarks" / script, [words], tmp_path, MAX_RUN_S))
    else:
        run(script, (), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "further"),
    [*((name, ()) for name in LONG), *((name, further) for name, *further in FURTHER)],
    ids=lambda part: part if isinstance(part, str) else " ".join(part),
)
def test_a_benchmark_that_starts_ranks_runs_at_its_smallest_size(
    script: str, further: Sequence[str], tmp_path: Path
) -> None:
    run(script, further, tmp_path)


def run(script: str, further: Sequence[str], folder: Path) -> None:
    words = ["--smallest", *NEEDED.get(script, ()), *further]
    done = run_script(ROOT / "benchmarks" / script, words, folder, MAX_RUN_S)
    assert done.returncode == 0 and done.stdout.strip(), f"{script} {' '.join(words)}:\n{done.stdout[-5000:]}"
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.strip())


def test_files_that_are_no_scripts_are_parts_of_one() -> None:
    parts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {Path(name).stem for name in SCRIPTS}
    source = "\n".join((ROOT / "benchmarks" / name).read_text() for name in SCRIPTS)
    assert {part for part in parts if not re.search(rf"^\s*(from|import) (.*\b)?{part}\b", source, re.M)} == set()


def test_scripts_that_do_not_run_here_exist_and_are_run_by_the_tests_named() -> None:
    assert {*LONG, *NEEDED, *ELSEWHERE, *(name for name, *_ in FURTHER)} <= set(SCRIPTS)
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test
