"""The shipped clusters: each loads, says where its figures come from, and can be planned with."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.dry_run import validate
from hetero_mpi.planning.schedule import schedule_of
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import load_profile

ROOT = Path(__file__).resolve().parents[2]
PROFILES = sorted((ROOT / "profiles").glob("*.toml"))
SMALL = 6
"""Ranks up to which planning takes no noticeable time."""
sys.path.insert(0, str(ROOT / "benchmarks"))

import link_gain  # noqa: E402
import make_profiles  # noqa: E402
import moe_machines  # noqa: E402


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_shipped_profile_loads_and_names_its_source(path: Path) -> None:
    profile = load_profile(path)
    assert profile.source.startswith(("measured by ", "derived from ")) and len(profile.source) > 40
    assert profile.notes, "assumptions are stated"
    if "derived" in profile.source:
        assert any("data-sheet" in note or "Derived" in note for note in profile.notes)
    assert all(device.memory_reason and device.memory_bytes > 10**9 for device in profile.devices)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_shipped_profile_can_be_planned_with(path: Path) -> None:
    profile = load_profile(path)
    if len(profile.devices) > SMALL:
        assert all(profile.model.dtype in device.dtypes for device in profile.devices)
        return
    streaming = "auto" if path.stem == "moe-two-old-boxes" else "never"
    report = make_plan(profile, PlanRequest(8, profile.model.sequence_length, (1, 2), streaming=streaming))
    validate(schedule_of(report.plan, profile.model), report.plan, profile.model)
    assert 0 < report.bound_step_s <= report.predicted_step_s
    assert all(memory.peak_bytes <= memory.usable_bytes for memory in report.memory)


def test_hexiscales_and_hethubs_machines_are_as_many_as_published() -> None:
    """README of Relaxed-System-Lab/FlashFlex; HetHub's 768 accelerators."""
    found = {}
    for path in PROFILES:
        if path.stem.startswith(("hexiscale-setting", "hethub")):
            devices = load_profile(path).devices
            found[path.stem] = Counter(device.name.removeprefix("NVIDIA ") for device in devices)
    assert found == {
        "hexiscale-setting-1": {"RTX 3080 Ti": 8, "RTX 3090": 8, "RTX 4090": 24},
        "hexiscale-setting-2": {"RTX 3080 Ti": 8, "RTX 3090": 8, "RTX 4090": 8, "A100 80GB": 8},
        "hexiscale-setting-3": {"RTX 3090": 8, "RTX 4090": 40, "A100 80GB": 8},
        "hethub-128-640": {"type A (made up)": 128, "type B (made up)": 640},
    }


@pytest.mark.slow
def test_files_are_what_their_maker_writes(tmp_path: Path) -> None:
    """Nobody's edit is lost: figures change in ``benchmarks/make_profiles.py``, not in its output."""
    from hetero_mpi.planning.types.toml_files import save_profile

    for name, make in make_profiles.CLUSTERS.items():
        save_profile(make(), tmp_path / f"{name}.toml")
        assert (tmp_path / f"{name}.toml").read_text() == (ROOT / "profiles" / f"{name}.toml").read_text(), name


def test_the_two_homelab_cards_keep_their_published_ratio() -> None:
    fast, slow = load_profile(ROOT / "profiles" / "homelab-5090-strix-halo.toml").devices
    step = [d.layers["block"].forward_s for d in (fast, slow)]
    slope = [(curve.seconds[-1] - curve.seconds[0]) / (curve.tokens[-1] - curve.tokens[0]) for curve in step]
    assert slope[1] / slope[0] == pytest.approx(3243 / 289, rel=1e-3)


def test_the_readme_has_one_line_per_file() -> None:
    text = (ROOT / "profiles" / "README.md").read_text()
    listed = [line.split("](")[0].removeprefix("| [") for line in text.splitlines() if line.startswith("| [")]
    assert sorted(listed) == [path.name for path in PROFILES]


@pytest.mark.slow
def test_the_table_of_links_is_what_the_benchmark_prints() -> None:
    """The row of two machines; the others take a minute."""
    name = "homelab-5090-strix-halo"
    shown = "\n".join(link_gain.table(list(link_gain.cells(name)), (name,)))
    page = (ROOT / "docs" / "links.md").read_text()
    assert f"{shown}\n" in page


@pytest.mark.slow
def test_the_figures_of_mixtures_are_what_the_benchmark_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe_machines.py", "--check"])
    assert moe_machines.main() == 0
    printed, page = capsys.readouterr().out, (ROOT / "docs" / "mixtures.md").read_text()
    assert "\n".join(line for line in printed.splitlines() if line.startswith("|")) in page
    said = re.findall(r"plans are .* faster than the best|[\d.]+ m?s\b", printed)
    assert len(said) == 5 and [one for one in said if one not in page] == []
