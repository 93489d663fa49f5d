"""Steps that are all alike, made at once: nobody can tell."""

import os
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from support.virtual_cluster import Observed, cluster_spec, kills, random_requests
from workloads.request import EndState

TRIALS = int(os.environ.get("TANDEM_TRIALS", "25"))


@settings(max_examples=TRIALS, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(0, 1), (0, 3), (1, 1), (2, 2), (1, 3)]),
    rate=st.sampled_from([2.0, 10.0, 60.0]),
    num_blocks=st.sampled_from([150, 400]),
    reserve=st.sampled_from([1, 256]),
    routers=st.sampled_from([1, 1, 3]),
    deaths=st.lists(st.tuples(st.floats(0.05, 3.0), st.sampled_from(["decode-0", "prefill-0"])), max_size=2),
)
def test_what_the_world_sees_is_the_same_to_the_bit(
    seed: int,
    shape: tuple[int, int],
    rate: float,
    num_blocks: int,
    reserve: int,
    routers: int,
    deaths: list[tuple[float, str]],
) -> None:
    """Requests, reports of load and caches, their times; with workers short of blocks, and some that die."""
    spec = cluster_spec(*shape, num_blocks=num_blocks, reserve=reserve)
    there = {worker_id for worker_id, _ in spec.workers}
    unique = {name: (at_s, name) for at_s, name in deaths if name in there}
    spec = replace(spec, num_routers=routers, seed=seed, failures=kills(list(unique.values())))
    requests = random_requests(seed, 30, rate)
    slow, fast = (Observed(spec, requests, skip=skip) for skip in (False, True))
    assert fast.summary == slow.summary
    assert fast.reports == slow.reports
    assert vars(fast.cluster.fronts.gaps) == vars(slow.cluster.fronts.gaps)
    for one, other in zip(fast.cluster.workers.values(), slow.cluster.workers.values(), strict=True):
        assert one.num_steps == other.num_steps
        assert one.core.audit() == other.core.audit()
    assert fast.faults == []
    assert all(outcome.end_state is not None for outcome in fast.outcomes)


def test_most_steps_are_skipped() -> None:
    """Else the test above says nothing."""
    requests = random_requests(1, 20, rate=3.0, most_output=200)
    slow, fast = (Observed(cluster_spec(1, 2), requests, skip=skip) for skip in (False, True))
    assert all(outcome.end_state is EndState.FINISHED for outcome in fast.outcomes)
    assert fast.cluster.clock.num_events < 0.6 * slow.cluster.clock.num_events
