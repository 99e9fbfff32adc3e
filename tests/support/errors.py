"""What a test asks of an error: its kind, and the values that its text shows; never its wording."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hetero_mpi.data.record_shapes import BadRecord
from hetero_mpi.util.errors import UserError


@contextmanager
def refuses(kind: str, *shown: object) -> Iterator[pytest.ExceptionInfo[UserError | BadRecord]]:
    """A block that raises an error of ``kind``, or with a problem of it; its text shows all values of ``shown``."""
    with pytest.raises((UserError, BadRecord)) as caught:
        yield caught
    error = caught.value
    kinds = error.kinds if isinstance(error, UserError) else {error.kind}
    assert kind in kinds, f"{sorted(kinds)}: {error}"
    assert all(str(value) in str(error) for value in shown), str(error)
