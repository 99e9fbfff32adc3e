"""What somebody has who installed the program: jobs to start from, profiles by name; from a wheel and from an editable install."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.cli import main
from hetero_mpi.comm.ranks.versions import own_source
from hetero_mpi.interop import init
from hetero_mpi.job.load import load_job
from hetero_mpi.planning.types.toml_files import load_profile
from hetero_mpi.util import shipped
from tests.support.environments import second_environment
from tests.support.errors import refuses
from tests.support.mpi import ROOT, require_success

pytestmark = pytest.mark.slow

HOMELAB = "homelab-5090-strix-halo"
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.toml") if path.name != "reference.toml")
SOURCES = ("hetero_mpi", "jobs", "profiles", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def run(words: list[str | Path], place: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(
        list(map(str, words)), cwd=place, env=environment, capture_output=True, text=True, timeout=300
    )


# Copies of jobs


@pytest.mark.parametrize("name", JOBS)
def test_a_copied_job_finds_what_it_reads(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", name, str(tmp_path / "own")]) == 0
    loaded = load_job(tmp_path / "own" / "jobs" / f"{name}.toml")
    for pattern in (*loaded.patterns("text"), *loaded.patterns("records")):
        assert glob.glob(pattern), pattern
    if loaded.job.model.factory is not None:
        assert (loaded.directory / f"{loaded.job.model.factory.partition(':')[0]}.py").is_file()
    runs = loaded.resolve(loaded.job.model.path or "").resolve()
    if ".." in (loaded.job.model.path or ""):
        assert (
            runs.is_relative_to(tmp_path / "own" / "runs") and (loaded.directory / f"{runs.parent.name}.toml").is_file()
        )
    assert f"-- train jobs/{name}.toml" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    init.init("quickstart", tmp_path)
    own = tmp_path / "jobs" / "quickstart.toml"
    own.write_text("mine")
    with refuses("init.exists"):
        init.init("quickstart", tmp_path)
    init.init("lora_nf4", tmp_path)
    assert own.read_text() == "mine"
    with refuses("file.unwritable", own):
        init.init("cnn", own)


def test_names_are_listed_and_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in [*JOBS, "slurm"])
    assert init._purpose("moe_small").endswith("over two ranks."), "a sentence of two lines"
    with refuses("init.unknown_job", "quikstart", "quickstart"):
        init.init("quikstart", Path())


def test_slurm_scripts_are_copied_with_what_they_source(tmp_path: Path) -> None:
    init.init("slurm", tmp_path)
    scripts = list((tmp_path / "jobs").glob("*.sbatch"))
    assert len(scripts) == 4 and all("source jobs/slurm.sh" in path.read_text() for path in scripts)
    assert (tmp_path / "jobs" / "slurm.sh").is_file()


# Profiles by name


def test_a_shipped_profile_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = load_profile(ROOT / "profiles" / f"{HOMELAB}.toml")
    assert load_profile(HOMELAB) == load_profile(f"{HOMELAB}.toml") == expected
    init.init("quickstart", tmp_path)
    assert load_job("jobs/quickstart.toml").profile_file(HOMELAB) == shipped.shipped_profiles()[HOMELAB]
    for load in (load_profile, load_job("jobs/quickstart.toml").profile_file):
        with refuses("shipped.missing", "homelab-5090.toml", HOMELAB):
            load("homelab-5090.toml")
    (tmp_path / HOMELAB).write_text("schema_version = 0\n")
    with refuses("file.version"):
        load_profile(HOMELAB)  # a file of that name goes first


# How another machine gets the same


@pytest.mark.parametrize(
    ("origin", "argument"),
    [
        (
            {"url": "file:///tmp/my%20wheels/a-py3-none-any.whl", "archive_info": {}},
            "'/tmp/my wheels/a-py3-none-any.whl'",
        ),
        (None, "hetero_mpi==0.1.0"),
    ],
)
def test_remedies_name_the_way_it_was_installed(
    origin: dict[str, Any] | None, argument: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return json.dumps(origin) if origin is not None and name == "direct_url.json" else None

    monkeypatch.setattr(shipped.metadata, "distribution", lambda name: Installed())
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path / "my clone" / "hetero_mpi")
    assert shipped.pip_argument() == argument
    (tmp_path / "my clone").mkdir()
    (tmp_path / "my clone" / "pyproject.toml").touch()
    assert shipped.pip_argument() == f"-e '{tmp_path}/my clone'", "in a clone, whatever is known of installations"


# Installed in an environment of its own


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with nothing but this program installed, and everybody else's packages."""
    pytest.importorskip("setuptools", minversion="77")
    place = tmp_path_factory.mktemp(request.param)
    for name in SOURCES:
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", "*.png")
        shutil.copytree(source, place / "clone" / name, ignore=ignored) if source.is_dir() else shutil.copy(
            source, place / "clone"
        )
    python = second_environment(place / "environment")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
    options: list[str | Path] = ["--no-deps", "--no-build-isolation", "--no-index", "-q"]
    if request.param == "wheel":
        require_success(run([*pip, "wheel", *options, "-w", place, place / "clone"], place))
        shutil.rmtree(place / "clone")
        (wheel,) = place.glob("*.whl")
        done = run([*pip, "install", *options, wheel], place)
    else:
        done = run([*pip, "install", *options, "-e", place / "clone"], place)
    assert done.returncode == 0, done.stderr
    return python


def test_an_installation_has_jobs_and_profiles(installed: Path, tmp_path: Path) -> None:
    program = installed.parent / "hetero-mpi"
    done = require_success(run([program, "init", "llama8b_alpaca"], tmp_path))
    assert f"{installed} -m hetero_mpi launch" in done.stdout, "the command as it can be typed here"
    done = run([program, "plan", "jobs/llama8b_alpaca.toml", "--profile", HOMELAB], tmp_path)
    assert done.returncode == 0 and "RTX 5090" in done.stdout, done.stderr
    done = run([program, "init", "--from", ROOT / "tests/commands/other_tools/axolotl-orpo.yml"], tmp_path)
    assert done.returncode == 0 and (tmp_path / "job.toml").exists(), done.stderr
    code = "from hetero_mpi.comm.ranks.versions import own_source; from hetero_mpi.util import shipped\n"
    code += "print(shipped.shipped_folder('jobs')); print(shipped.pip_argument()); print(own_source())"
    folder, argument, source = run([installed, "-c", code], tmp_path).stdout.splitlines()
    assert source == own_source(), "a wheel and the clone it was made of are the same source"
    top = installed.parents[2]
    assert Path(folder).is_relative_to(top)
    assert argument == f"-e {top / 'clone'}" if (top / "clone").exists() else argument.endswith(".whl")
    held = {path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".pyc"}
    jobs = (path for path in (ROOT / "jobs").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert held == {path.relative_to(ROOT / "jobs") for path in jobs}


@pytest.mark.long
def test_an_installation_trains_the_quickstart(installed: Path, tmp_path: Path) -> None:
    assert run([installed, "-m", "hetero_mpi", "init", "quickstart"], tmp_path).returncode == 0
    words = ["launch", "-np", "2", "--", "train", "jobs/quickstart.toml", "--set", "train.steps=2"]
    require_success(run([installed, "-m", "hetero_mpi", *words], tmp_path, OMP_NUM_THREADS="1"))
    assert (tmp_path / "runs" / "quickstart" / "model" / "config.json").is_file()
