"""Seeds of random instances: a few are tried in the short suite, all in the long one."""

from collections.abc import Sequence

import pytest


def seeds(count: int, quick: int | Sequence[int], name: str = "seed") -> pytest.MarkDecorator:
    """Run the test with its parameter ``name`` from 0 to ``count`` - 1; those in ``quick`` (a number: so many) are short."""
    short = range(quick) if isinstance(quick, int) else quick
    marked = [pytest.param(n, marks=() if n in short else pytest.mark.long) for n in range(count)]
    return pytest.mark.parametrize(name, marked)
