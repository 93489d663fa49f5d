"""The affinity hint: what is remembered of sessions, and that it loses to load."""

from collections import Counter, OrderedDict
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.block_keys import block_keys, root_key
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.place import Decision
from router.placement.rates import MOST_S, NO_SESSION, SHARE, Affinities, Priors, Served, SessionKey, session_of

PRIORS = Priors(1000, 100, 1e6, 0.01, 0.002, 0.001)
DEMAND = Demand(num_tokens=20, num_usable_blocks=4, num_total_blocks=6, block_tokens=4, block_bytes=100)
KEYS = block_keys(root_key(b"model", ""), list(range(16)), 4)
MAX = 12


class RememberedSessions(RuleBasedStateMachine):
    """Compared with a plain list of all requests."""

    def __init__(self) -> None:
        super().__init__()
        self.affinities = Affinities(MAX)
        self.expected: OrderedDict[SessionKey, Served] = OrderedDict()

    @rule(tenant=st.sampled_from("abcd"), name=st.integers(0, 20).map(str), worker=st.sampled_from(["d0", "d1"]))
    def served(self, tenant: str, name: str, worker: str) -> None:
        session, by = (tenant, name), Served(worker, b"1")
        sizes = Counter(of for of, _ in self.expected)
        self.affinities.served(session, by)
        self.expected[session] = by
        self.expected.move_to_end(session)
        for key in [key for key in self.expected if self.affinities.last(key) is None]:
            loser = key[0]
            assert len(self.expected) == MAX + 1, "nothing is lost while there is room"
            assert sizes[loser] + (loser == tenant) >= max(sizes.values()), "a tenant with fewer sessions loses none"
            assert next(other for other in self.expected if other[0] == loser) == key, "the tenant's oldest goes"
            del self.expected[key]

    @invariant()
    def agree(self) -> None:
        self.affinities.check_integrity()
        assert len(self.affinities) == len(self.expected) <= MAX
        assert all(self.affinities.last(session) == by for session, by in self.expected.items())


test_remembered_sessions = RememberedSessions.TestCase


def test_requests_without_a_session_have_no_key_and_names_are_not_kept() -> None:
    assert session_of("acme", "", "") == NO_SESSION
    affinities = Affinities()
    affinities.served(NO_SESSION, Served("d0", b""))
    assert len(affinities) == 0
    assert affinities.last(NO_SESSION) is None
    assert session_of("acme", "talk", "group") == session_of("acme", "talk", "")
    assert session_of("acme", "", "group") == session_of("acme", "group", "")
    assert session_of("acme", "talk", "") != session_of("other", "talk", "")
    assert "talk" not in session_of("acme", "talk", "")[1]


def fleet_of(*worker_ids: str) -> Fleet:
    fleet = Fleet("router", PRIORS)
    for worker_id in worker_ids:
        role = pb.ROLE_DECODE if worker_id.startswith("d") else pb.ROLE_PREFILL
        hello = pb.Hello(worker_id=worker_id, incarnation=b"1", role=role, model_fingerprint=b"model", num_blocks=50)
        fleet.reported(fleet.joined(hello), pb.LoadReport(available_blocks=50, num_blocks=50))
    return fleet


def serve(fleet: Fleet, decision: Decision, demand: Demand, *, first_token: bool = True) -> None:
    placed = fleet.placed(decision, demand, KEYS)
    if first_token:
        fleet.started(placed)
    fleet.ended(placed)


def test_the_worker_that_served_a_session_last_is_preferred_among_equals() -> None:
    fleet = fleet_of("d0", "d1", "p0", "p1")
    one, other = (replace(DEMAND, session=session_of("", name, "")) for name in ("one", "other"))
    alone = Decision("d1", None, False, None, 0, 20, 0, 0, 1, "")
    first = fleet.decide(one, KEYS)
    assert (first.decode_id, first.lender_id) == ("d0", "p0"), "ties go to the first"

    serve(fleet, replace(first, decode_id="d1", lender_id="p1"), one, first_token=False)
    again = fleet.decide(one, KEYS)
    assert again == first, "a request that failed was not served"

    serve(fleet, replace(first, decode_id="d1", lender_id="p1"), one)
    again = fleet.decide(one, KEYS)
    assert (again.decode_id, again.lender_id) == ("d1", "p1")
    assert "served the last request of this session" in again.reason
    assert again.predicted_ttft_s == pytest.approx(first.predicted_ttft_s)
    assert first.cost_s - again.cost_s == pytest.approx(min(SHARE * first.cost_s, MOST_S))
    unlike = fleet.decide(other, KEYS)
    assert (unlike.decode_id, unlike.lender_id) == ("d0", "p0")

    serve(fleet, alone, one)
    again = fleet.decide(one, KEYS)
    assert (again.decode_id, again.lender_id) == ("d1", "p0"), "this time no lender computed"


def test_a_worker_that_restarted_or_left_is_not_preferred() -> None:
    fleet = fleet_of("d0", "d1")
    demand = replace(DEMAND, session=session_of("", "one", ""))
    serve(fleet, Decision("d1", None, False, None, 0, 20, 0, 0, 1, ""), demand)
    assert fleet.hits(KEYS, (), demand.session).last_decode == 1
    old = fleet.worker("d1")
    restarted = pb.Hello()
    restarted.CopyFrom(old.hello)
    restarted.incarnation = b"2"
    new = fleet.joined(restarted)
    fleet.reported(new, pb.LoadReport(available_blocks=50, num_blocks=50))
    assert fleet.hits(KEYS, (), demand.session).last_decode == -1
    fleet.left(new)
    assert fleet.hits(KEYS, (), demand.session).last_decode == -1
