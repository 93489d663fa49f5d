"""Reads that are under way when something happens: over TCP, from a stopped process."""

import time
from collections.abc import Iterator

import pytest

from kvtransfer.contract.worlds import BLOCK, TIMEOUT_S, UNTOUCHED, ProcessLender, ProcessWorld, wait_until
from kvtransfer.errors import TransferError
from kvtransfer.transport import MAX_POSTED_BYTES, Peer, Read, Span
from support.transport_worlds import WORLDS

WINDOW = MAX_POSTED_BYTES
Stopped = tuple[ProcessWorld, ProcessLender, Peer]


@pytest.fixture(params=["nixl", "ucxx"])
def stopped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopped]:
    """A connected lender that is stopped, so that a read from it stays in flight."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    lender = ProcessLender(7, WINDOW, request.param, UCX_TLS="tcp")
    world = WORLDS[request.param]([], num_bytes=WINDOW + BLOCK)
    try:
        peer = world.reader.connect(lender.endpoint)
        world.done(world.reader.read(peer, [Span(WINDOW, 0, BLOCK)]))
        lender.stop()
        yield world, lender, peer
    finally:
        world.close()
        lender.kill()


def test_a_read_in_flight_cannot_be_cancelled_and_completes(stopped: Stopped) -> None:
    world, lender, peer = stopped
    read = world.reader.read(peer, [Span(0, 0, WINDOW)])
    wait_until(read.running, "the read is posted")
    assert not read.cancel()
    lender.wake()
    world.done(read)
    assert world.memory[:WINDOW].tobytes() == lender.data.tobytes()


def test_a_silent_peer_holds_up_no_other(stopped: Stopped) -> None:
    world, lender, peer = stopped
    stuck = world.reader.read(peer, [Span(0, 0, WINDOW - BLOCK)])
    other = ProcessLender(8, transport=world.transport, UCX_TLS="tcp")
    try:
        world.done(world.reader.read(world.reader.connect(other.endpoint), [Span(WINDOW - BLOCK, 0, BLOCK)]))
        assert world.memory[WINDOW - BLOCK : WINDOW].tobytes() == other.data[:BLOCK].tobytes()
        assert not stuck.done()
        lender.wake()
        world.done(stuck)
    finally:
        other.kill()


def test_a_peer_killed_in_mid_read_fails_it_and_what_waits_behind_it(stopped: Stopped) -> None:
    world, lender, peer = stopped
    reads = [world.reader.read(peer, [Span(0, 0, WINDOW)]) for _ in range(3)]
    wait_until(reads[0].running, "the read is posted")
    lender.process.kill()
    for read in reads:
        with pytest.raises(TransferError):
            world.done(read)


def test_dropping_a_silent_peer_leaves_what_is_posted_until_it_is_quiet(stopped: Stopped) -> None:
    """The read is settled only when nothing is written any more; one of a new connection comes through as well."""
    world, lender, peer = stopped
    reads = [world.reader.read(peer, [Span(0, 0, WINDOW)]) for _ in range(3)]
    wait_until(reads[0].running, "the read is posted")
    world.reader.drop(peer)
    wait_until(lambda: all(read.done() for read in reads[1:]), "queued ones are cancelled")
    assert all(read.cancelled() for read in reads[1:])
    again = world.reader.connect(lender.endpoint)
    behind = world.reader.read(again, [Span(WINDOW, BLOCK, BLOCK)])
    lender.wake()
    if reads[0].exception(TIMEOUT_S) is None:
        assert world.memory[:WINDOW].tobytes() == lender.data.tobytes()
    at_its_end = world.memory[:WINDOW].tobytes()
    world.done(behind)
    assert world.memory[WINDOW:].tobytes() == lender.data[BLOCK : 2 * BLOCK].tobytes()
    assert world.memory[:WINDOW].tobytes() == at_its_end


def test_after_close_nothing_is_written_by_a_peer_that_wakes(stopped: Stopped) -> None:
    """A read in flight fails, and only once its memory is safe to use: here it is refilled at that very moment."""
    world, lender, peer = stopped
    in_flight = world.reader.read(peer, [Span(0, 0, WINDOW)])
    queued = [world.reader.read(peer, [Span(0, 0, WINDOW)]) for _ in range(2)]
    wait_until(in_flight.running, "the read is posted")
    woken: list[bool] = []

    def reuse(_: Read) -> None:
        world.memory[:] = UNTOUCHED
        lender.wake()
        # It sends what it was asked for within milliseconds. (UCX may also end it: its reply finds nobody.)
        give_up_at = time.monotonic() + 0.3
        while world.untouched() and lender.process.poll() is None and time.monotonic() < give_up_at:
            time.sleep(0.001)
        woken.append(world.untouched())

    in_flight.add_done_callback(reuse)
    world.reader.close()
    assert woken == [True]
    assert isinstance(in_flight.exception(), TransferError)
    assert all(read.cancelled() for read in queued)
    lender.kill()
    assert world.untouched()
