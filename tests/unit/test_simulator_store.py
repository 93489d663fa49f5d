"""The shared store in virtual time: it is used, costs time, and changes nothing that is promised."""

from dataclasses import replace

import pytest

from sizing.cluster.store import StoreSpec
from support.virtual_cluster import LAYOUT, Observed, cluster_spec, kills, random_requests

REQUESTS = random_requests(seed=3, count=150, rate=20.0)
POOLS = cluster_spec(1, 2, num_blocks=200)
"""Too small for four conversations of up to 126 blocks."""
STORE = StoreSpec(capacity_bytes=1e9, bytes_per_s=5e9)


def hit_rate(run: Observed) -> float:
    hits = sum(outcome.reused_tokens for outcome in run.outcomes)
    return hits / sum(outcome.request.input_tokens for outcome in run.outcomes)


@pytest.mark.parametrize("at_once", [False, True])
def test_prefixes_that_pools_evict_come_back_from_the_store(at_once: bool) -> None:
    without = Observed(POOLS, REQUESTS)
    stored = Observed(POOLS, REQUESTS, store=replace(STORE, writes_at_once=at_once))
    assert stored.faults == without.faults == []
    assert len(stored.outcomes) == len(REQUESTS)
    assert hit_rate(stored) > 1.3 * hit_rate(without)
    place = stored.cluster.place
    assert 0 < len(place.blocks) <= place.max_blocks
    index = stored.cluster.routers[0].fleet.index
    (row,) = [row for row in stored.cluster.routers[0].fleet.snapshot.ids if row.startswith("shared-store/")]
    assert index.keys_of(row) == frozenset(place.blocks), "the router knows what the store holds"


def test_a_store_too_slow_is_hardly_used_and_one_too_small_evicts() -> None:
    slow = Observed(POOLS, REQUESTS, store=replace(STORE, bytes_per_s=1e6))
    assert slow.faults == []
    fast = Observed(POOLS, REQUESTS, store=STORE)
    assert hit_rate(slow) < hit_rate(fast)
    small = Observed(POOLS, REQUESTS, store=replace(STORE, capacity_bytes=50 * LAYOUT.block_bytes))
    assert small.faults == []
    assert len(small.cluster.place.blocks) <= 50


def test_runs_are_equal_to_the_bit_with_and_without_single_steps() -> None:
    both = [Observed(POOLS, REQUESTS[:60], store=STORE, skip=skip) for skip in (True, False)]
    assert both[0].summary == both[1].summary
    assert Observed(POOLS, REQUESTS[:60], store=STORE).summary == both[0].summary


def test_workers_that_die_while_they_use_the_store_leave_nothing_behind() -> None:
    run = Observed(POOLS, REQUESTS, store=STORE, failures=kills([(1.0, "decode-0"), (3.0, "prefill-0")]))
    assert run.faults == []
    assert len(run.outcomes) == len(REQUESTS)
