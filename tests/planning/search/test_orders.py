"""Candidates by the thousand: which orders there are, and what their estimates say."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hetero_mpi.planning.search.orders import Candidates
from hetero_mpi.planning.search.pipelines import used
from hetero_mpi.planning.search.search import Search
from hetero_mpi.planning.types.request import PlanRequest
from tests.planning.search.test_annealing import REQUEST, cluster
from tests.support.planning_samples import SEQUENCE, make_model, make_profile


def test_one_rank_takes_what_it_computes() -> None:
    """12 sequences of embedding 0.3, six blocks of 3 and a head of 1.5 s."""
    request = PlanRequest(12, SEQUENCE, (1,), max_pipelines=1)
    orders = Search(make_profile([1.0], make_model(6)), request).orders(1)
    least_s = orders.least(orders.random_candidates(1, np.random.default_rng(0)), 1.0)
    assert least_s.tolist() == pytest.approx([12 * 19.8] * len(least_s), rel=0.01)


def in_order(these: Candidates) -> bool:
    ranks = np.sort(these.who, axis=0)
    return bool((ranks == np.arange(len(ranks))[:, None]).all() and (np.diff(these.pipeline, axis=0) >= 0).all())


@pytest.mark.parametrize("number", [1, 2, 3])
def test_candidates_stay_whole_and_get_better(number: int) -> None:
    """Every rank once, every pipeline with one at least, the whole batch in whole micro-batches."""
    search, draw = Search(cluster(), REQUEST), np.random.default_rng(0)
    orders = search.orders(number)
    begun = these = orders.random_candidates(number, draw)
    for _ in range(30):
        these = orders.changed(these, draw)
        assert in_order(these)
        assert (these.sequences[:-1].sum(axis=0) == REQUEST.global_batch).all() and (these.sequences > 0).all()
        assert (these.sequences % orders.sizes[these.size] == 0)[:-1].all()
        assert all((these.pipeline == p).any(axis=0).all() for p in range(number))
    found, _ = orders.improved(begun, 40, 1.0, draw, 5)
    assert found[0].seconds <= orders.least(begun, 1.0).min() and len({one[1:] for one in found}) == len(found) > 1


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "gpipe"])
def test_an_estimate_is_near_to_the_step_it_leads_to(schedule: str) -> None:
    """Where nothing is summed."""
    request = replace(REQUEST, max_pipelines=1, schedule=schedule)
    search, draw = Search(cluster(10_000_000), request), np.random.default_rng(0)
    orders = search.orders(1)
    found, _ = orders.improved(orders.random_candidates(1, draw), 40, 1.0, draw, 5)
    for one in found:
        lines = orders.lines(one, 1.0)
        assert lines is not None and sum(lines[0].counts) == 14 and used(lines) <= 7
        (start,) = search.rounds.timed_starts([lines], 1, 1e6, 1)
        assert 0.9 * one.seconds <= start[1] <= 1.35 * one.seconds < math.inf


@pytest.mark.parametrize("ranks", [3, 8])
def test_nothing_is_found_where_nothing_fits(ranks: int) -> None:
    profile = make_profile([1.0] * ranks, make_model(6), memory_bytes=1000)
    assert Search(profile, replace(REQUEST, global_batch=12)).best() is None
