"""Virtual time, and transfers that share NICs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import EndpointMismatch, PeerGone
from kvtransfer.transport import Span
from sizing.cluster.clock import VirtualClock
from sizing.cluster.links import Links
from sizing.cluster.transport import VirtualTransport
from support.virtual_cluster import run_out


def test_things_happen_in_order_of_time_then_of_asking() -> None:
    clock, seen = VirtualClock(), []
    clock.late(1.0, 2, seen.append, "rank 2")
    clock.late(1.0, 1, seen.append, "rank 1")
    clock.at(2.0, seen.append, "later")
    clock.at(1.0, seen.append, "first")
    clock.after(1.0, seen.append, "second")
    clock.at(1.5, seen.append, "never").cancel()
    run_out(clock)
    assert seen == ["first", "second", "rank 1", "rank 2", "later"]
    assert clock.now == 2.0
    assert clock.num_events == 5


def test_a_transfer_alone_takes_its_bytes_over_the_slower_nic() -> None:
    clock, over = VirtualClock(), []
    links = Links(clock)
    links.add("fast", 100.0)
    links.add("slow", 50.0)
    links.transfer("fast", "slow", 200, lambda whole: over.append((clock.now, whole)))
    run_out(clock)
    assert over == [(4.0, True)]
    assert links.nic("slow").received_bytes == links.nic("fast").sent_bytes == 200


def test_two_that_leave_one_nic_have_half_each_until_the_shorter_is_over() -> None:
    clock, over = VirtualClock(), {}
    links = Links(clock)
    for name in "abc":
        links.add(name, 100.0)
    links.transfer("a", "b", 100, lambda _: over.setdefault("b", clock.now))
    links.transfer("a", "c", 300, lambda _: over.setdefault("c", clock.now))
    run_out(clock)
    assert over == {"b": 2.0, "c": 4.0}


def test_what_is_cut_ends_at_once_and_others_have_its_share() -> None:
    clock, over = VirtualClock(), {}
    links = Links(clock)
    for name in "abc":
        links.add(name, 100.0)
    links.transfer("a", "b", 1000, lambda whole: over.setdefault("b", (clock.now, whole)))
    links.transfer("a", "c", 150, lambda whole: over.setdefault("c", (clock.now, whole)))
    clock.at(1.0, links.cut, "b")
    run_out(clock)
    assert over == {"b": (1.0, False), "c": (2.0, True)}
    links.transfer("a", "b", 1, lambda whole: over.setdefault("late", (clock.now, whole)))
    run_out(clock)
    assert over["late"] == (2.0, False)


@given(
    transfers=st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 3), st.integers(0, 3), st.integers(1, 10_000)),
        min_size=1,
        max_size=25,
    ),
    speeds=st.lists(st.floats(10, 1000), min_size=4, max_size=4),
    cut=st.none() | st.tuples(st.floats(0, 10), st.integers(0, 3)),
)
def test_no_nic_carries_more_than_it_can_and_every_transfer_ends_once(
    transfers: list[tuple[float, int, int, int]], speeds: list[float], cut: tuple[float, int] | None
) -> None:
    clock, ended = VirtualClock(), []
    links = Links(clock)
    for name, speed in enumerate(speeds):
        links.add(name, speed)
    for number, (at, sender, receiver, num_bytes) in enumerate(transfers):
        over = lambda whole, number=number: ended.append((number, whole, clock.now))  # noqa: E731
        clock.at(at, links.transfer, sender, receiver, num_bytes, over)
    if cut is not None:
        clock.at(cut[0], links.cut, cut[1])
    nics = [links.nic(name) for name in range(4)]
    while clock.step():
        links.check()
        for nic, speed in zip(nics, speeds, strict=True):
            assert max(nic.sent_bytes, nic.received_bytes) <= speed * clock.now * (1 + 1e-9) + 1e-6
    assert sorted(number for number, _, _ in ended) == list(range(len(transfers)))
    for number, whole, at in ended:
        start, sender, receiver, num_bytes = transfers[number]
        if whole:
            assert at - start >= num_bytes / min(speeds[sender], speeds[receiver]) * (1 - 1e-9) - 1e-9
        else:
            assert cut[1] in (sender, receiver)
    moved = sum(transfers[number][3] for number, whole, _ in ended if whole)
    assert sum(nic.sent_bytes for nic in nics) >= moved * (1 - 1e-9)


def test_the_transport_reads_one_after_another_and_fails_what_its_peer_takes_along() -> None:
    clock = VirtualClock()
    links = Links(clock)
    for name in ("reader", "lender"):
        links.add(name, 100.0)
    reader, lender = (VirtualTransport(clock, links, name, 0.5) for name in ("reader", "lender"))
    peer = reader.connect(lender.register(None))  # type: ignore[arg-type]
    futures = [reader.read(peer, [Span(0, 0, 100)], flow=number) for number in range(3)]
    assert futures[1].cancel()
    while not futures[0].done():
        clock.step()
    assert clock.now == 1.5
    assert futures[0].result() is None
    clock.at(2.5, links.cut, "lender")
    run_out(clock)
    assert isinstance(futures[2].exception(), PeerGone)
    reader.drop(peer)
    assert isinstance(reader.read(peer, [Span(0, 0, 1)]).exception(), PeerGone)
    with pytest.raises(EndpointMismatch):
        reader.connect(b"elsewhere")
