"""One thread for all tests of models, since bits may depend on the number of threads; no progress bars."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)
