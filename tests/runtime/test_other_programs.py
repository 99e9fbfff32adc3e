"""What other programs take of the cores while a run goes on."""

from __future__ import annotations

import json
import re

from tests.support.rank_pool import run_pooled


def test_what_other_programs_take_is_measured_np2() -> None:
    """Beside as many busy processes as there are cores, about half of these, and never what the ranks took themselves."""
    done = run_pooled(2, "other_programs", timeout_s=120)
    assert done.returncode == 0, done.stderr
    told, cores = json.loads(done.stdout)
    found = re.fullmatch(rf"other programs took about (\d+\.\d) of {cores} cores", told)
    assert found is not None, told
    assert 0.25 < float(found[1]) < cores
