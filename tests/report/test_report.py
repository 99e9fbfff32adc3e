"""What people see: units, names, and how often."""

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.planning.types.profile import HostProfile
from hetero_mpi.report.plan_text import plan_lines, planned_lines
from hetero_mpi.report.progress import ProgressDisplay
from hetero_mpi.rundir.metrics import measured_step_s
from hetero_mpi.util import units
from tests.report.test_looks import PROFILE, REPORT, steps
from tests.support.past_runs import metrics

# Units


def test_units() -> None:
    assert [units.seconds(value) for value in (0, 4.2e-6, 0.0123, 0.99999, 1.5, 62, 150, 3723, math.inf)] == [
        "0 s", "4.20 µs", "12.3 ms", "1.00 s", "1.50 s", "62.0 s", "2:30", "1:02:03", "unknown",
    ]  # fmt: skip
    assert [units.size(value) for value in (0, 999, 1e3, 8.53e9, 999.9e6)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "8.53 GB",
        "1.00 GB",
    ]
    assert [units.count(value) for value in (7, 12_345_678, 134e6)] == ["7", "12.3 M", "134 M"]
    assert [units.percent(value) for value in (0.0834, 0.25, -0.02)] == ["8.3 %", "25 %", "-2.0 %"]
    assert units.bandwidth(math.inf) == "unlimited"


def test_layers_by_name() -> None:
    names = {(0, 8): "embedding, blocks 0-5, head", (0, 2): "embedding, block 0", (4, 7): "blocks 3-5", (7, 8): "head"}
    assert {part: units.layers(*part, 8, 32) for part in names} == names
    custom = {(0, 8): "layers 0-7", (3, 4): "layer 3"}
    assert {part: units.layers(*part, 8, 1) for part in custom} == custom


@pytest.mark.parametrize(
    ("name", "most", "shown"),
    [
        ("NVIDIA GeForce RTX 4090", 26, "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090", 10, "RTX 4090"),
        ("cuda NVIDIA GeForce RTX 4090", 20, "cuda RTX 4090"),
        ("cuda NVIDIA GeForce RTX 4090", 10, "RTX 4090"),
        ("rocm AMD Strix Halo (Radeon 8060S)", 26, "rocm Strix Halo"),
        ("cpu AMD Ryzen 9 9950X 16-Core Processor", 26, "cpu Ryzen 9 9950X"),
        ("A100-SXM4-80GB", 10, "...M4-80GB"),
    ],
)
def test_device_names_are_shortened_from_the_left(name: str, most: int, shown: str) -> None:
    """What tells one card from another stands last."""
    assert units.device_name(name, most) == shown


def test_the_first_screen_shows_times_as_they_are_predicted() -> None:
    """Where ranks have less than a core for each thread, as beside other programs, compute is as much longer."""
    host = HostProfile(PROFILE.devices[0].host, 1 << 40, "made up", cores=1.0, other_threads=1.0)
    crowded = replace(PROFILE, hosts=(host,), devices=tuple(replace(one, host=host.name) for one in PROFILE.devices))
    shown, full = planned_lines(REPORT, crowded, Path("run")), plan_lines(REPORT, crowded)
    assert _computing(shown) == _computing(full) != _computing(planned_lines(REPORT, PROFILE, Path("run")))


def _computing(lines: list[str]) -> list[str]:
    return [found[0] for line in lines for found in [re.findall(r"GB +(?:yes +)?([\d.]+ m?s)", line)] if found]


def test_the_last_plan_is_measured_without_its_first_steps() -> None:
    before, after = steps(6.0, 1, 10, 5.5), steps(2.0, 11, 20)
    assert measured_step_s([*before, *steps(9.0, 11, 12), *after[2:]]) == 2.0
    assert measured_step_s([*before, *after[:2]]) is None


@pytest.mark.parametrize(
    ("step_s", "steps", "most"), [(0.35, 60, 13), (2.0, 300, 22), (0.01, 5000, 12), (20.0, 20_000, 900)]
)
def test_lines_of_progress_do_not_fill_a_file(step_s: float, steps: int, most: int) -> None:
    """By a made-up clock; the last case lasts four days, of which a line comes every ten minutes."""
    clock, stream = [0.0], io.StringIO()
    with ProgressDisplay(steps, stream=stream, now_s=lambda: clock[0]) as display:
        for step in range(1, steps + 1):
            clock[0] = step * step_s
            display.update(metrics(step, step_s=step_s))
    lines = stream.getvalue().splitlines()
    assert most * 0.4 < len(lines) <= most, len(lines)
    assert f"1/{steps} " in lines[0] and f" {steps}/{steps} " in lines[-1]
