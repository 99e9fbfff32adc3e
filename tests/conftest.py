"""What holds for every test."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.rank_pool import close_pools
from tests.support.tiers import Tiers, pytest_addoption  # noqa: F401

LONGEST = [
    "runtime/test_equality.py", "device/test_accelerators.py", "commands/test_python_api.py",
    "runtime/test_streamed_job.py", "runtime/test_recovery.py", "runtime/test_command.py", "state/test_kills.py",
    "device/test_stand_in_gpu.py", "launch/test_self_test.py", "planning/search/test_planner.py",
    "runtime/test_bad_input.py", "runtime/test_files_of_a_run.py", "planning/search/test_exact.py",
    "job/test_shipped_jobs.py", "commands/test_generate.py", "runtime/test_factory.py", "commands/test_export.py",
    "runtime/test_signals.py", "emulation/test_emulated_cluster.py", "commands/test_installed.py",
    "runtime/test_reconfigure.py", "launch/test_elastic.py", "runtime/test_watchdog.py", "state/test_copies.py",
    "launch/test_slurm.py", "launch/test_mesh.py", "launch/test_hosts.py", "planning/search/test_frozen_plans.py",
    "planning/test_commands.py", "test_docs.py", "model/test_streamed.py", "profiling/test_mpi.py",
    "planning/search/test_wider_requests.py", "planning/test_drift.py", "planning/search/test_annealing.py",
    "planning/search/test_alone.py",
]  # fmt: skip
"""Files that begin first, those that take longest in either suite, so that no process ends long after the other."""


def pytest_configure(config: pytest.Config) -> None:
    # Where the environment says otherwise, each of the hundreds of processes that tests start would compile all modules anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.pop("COLUMNS", None)  # lines that are looked for stay whole
    sys.dont_write_bytecode = False
    gc.disable()  # until all tests are collected: thousands of modules are no garbage
    config.pluginmanager.register(Tiers(config.getoption("--seconds-to")), "tiers")
    config.option.loadscopereorder = False  # else files with the most tests begin first: mostly the quickest ones


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Tests that free memory do not look through all modules and all tests each time."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Device times that tests measure are neither kept for the user's runs nor taken from them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def sessions_of_their_own() -> Iterator[None]:
    """Launchers that tests start themselves do not find what killed ones of other runs have left under their process's number."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="hetero_mpi-tests-") as folder:
        patch.setenv("PRTE_MCA_prte_local_tmpdir_base", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def ranks_leave(cache_of_its_own: None, sessions_of_their_own: None) -> Iterator[None]:
    """Ranks that stay between tests leave at the end."""
    yield
    close_pools()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a job and a profile."""
    from tests.support.planning_folder import fill

    monkeypatch.chdir(tmp_path)
    return fill(tmp_path)
