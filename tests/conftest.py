"""What holds for every test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.support.rank_pool import close_pools


def pytest_collection_finish() -> None:
    """Tests that free memory do not look through all modules and all tests each time."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Device times that tests measure are neither kept for the user's runs nor taken from them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def ranks_leave(cache_of_its_own: None) -> Iterator[None]:
    """Ranks that stay between tests leave at the end."""
    yield
    close_pools()
