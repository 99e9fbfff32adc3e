"""Channels between ranks whose devices have their own memory: pieces that are copied while others travel."""

import json

from tests.support.late_copies import LATE_S
from tests.support.rank_pool import run_pooled


def test_tensors_in_pieces_whichever_end_copies_np2() -> None:
    result = run_pooled(2, "channel_pieces")
    assert result.returncode == 0, result.stdout + result.stderr
    *cases, (first_s, last_s) = map(json.loads, result.stdout.splitlines())
    kinds = ("Backend", "LateBackend")
    assert cases == [[threaded, a, b] for threaded in (True, False) for a in kinds for b in kinds]
    assert last_s - first_s > 30 * LATE_S, "the first of 64 pieces travels while the others are still copied"
