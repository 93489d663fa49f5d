"""Tests of what `kvtransfer/transport.py` promises, for any transport.

A test module takes them with `from kvtransfer.contract.suite import *` and has a fixture `world`.
"""

import threading
from concurrent.futures import CancelledError
from functools import partial

import numpy as np
import pytest

from kvtransfer.contract.worlds import BLOCK, LENDER_BLOCKS, READER_BLOCKS, TIMEOUT_S, UNTOUCHED, World, wait_until
from kvtransfer.errors import EndpointMismatch, PeerGone, TransferError
from kvtransfer.fingerprint import Folding, fingerprint_blocks
from kvtransfer.ranks import BlockPart, part_spans
from kvtransfer.transport import MAX_POSTED_BYTES, Peer, Read, Span

WINDOW = MAX_POSTED_BYTES


# ------------------------------------------------------------------------------------------------ reading


def test_one_span_arrives_to_the_byte_and_nothing_else_changes(world: World) -> None:
    lender = world.lender(0)
    world.done(world.reader.read(world.reader.connect(lender.endpoint), [Span(5, 17, 1001)]))
    assert world.memory[5:1006].tobytes() == lender.data[17:1018].tobytes()
    assert world.untouched(0, 5)
    assert world.untouched(1006)


def test_many_spans_in_one_read(world: World) -> None:
    lender = world.lender(0)
    pairs = [(own, (7 * own + 3) % LENDER_BLOCKS) for own in range(0, READER_BLOCKS, 2)]
    spans = part_spans(BlockPart(BLOCK), BlockPart(BLOCK), pairs)
    assert len(spans) == len(pairs)
    world.done(world.reader.read(world.reader.connect(lender.endpoint), spans))
    own, theirs = world.memory.reshape(-1, BLOCK), lender.data.reshape(-1, BLOCK)
    for mine, remote in pairs:
        assert own[mine].tobytes() == theirs[remote].tobytes()
        assert (own[mine + 1] == UNTOUCHED).all()


def test_neighbours_merged_into_one_span_arrive_as_single_blocks_would(world: World) -> None:
    lender = world.lender(0)
    pairs = [(8, 3), (9, 4), (10, 5), (20, 6), (21, 7), (22, 1), (11, 2)]
    spans = part_spans(BlockPart(BLOCK), BlockPart(BLOCK), pairs)
    assert [span.length // BLOCK for span in spans] == [3, 2, 1, 1]
    world.done(world.reader.read(world.reader.connect(lender.endpoint), spans))
    own, theirs = world.memory.reshape(-1, BLOCK), lender.data.reshape(-1, BLOCK)
    for mine, remote in pairs:
        assert own[mine].tobytes() == theirs[remote].tobytes()
    assert int((own == UNTOUCHED).all(axis=1).sum()) == READER_BLOCKS - len(pairs)


def test_the_whole_pool_to_its_last_byte(world: World) -> None:
    lender = world.lender(1)
    world.done(world.reader.read(world.reader.connect(lender.endpoint), [Span(0, 0, lender.data.nbytes)]))
    assert world.memory[: lender.data.nbytes].tobytes() == lender.data.tobytes()


def test_fingerprints_that_a_read_says_are_those_of_what_it_brought(world: World) -> None:
    """Fingerprints come in the order of the spans; a transport that computes none returns none."""
    lender = world.lender(0)
    pairs = [(8, 3), (9, 4), (20, 6), (3, 1), (40, 2)]
    heads = 4
    folding = Folding(BLOCK // heads // 8)
    peer = world.reader.connect(lender.endpoint)
    for folds in (folding, None, folding):
        world.memory[:] = UNTOUCHED
        read = world.reader.read(peer, part_spans(BlockPart(BLOCK), BlockPart(BLOCK), pairs), None, folds)
        world.done(read)
        own, theirs = world.memory.reshape(-1, BLOCK), lender.data.reshape(-1, BLOCK)
        assert all(own[mine].tobytes() == theirs[remote].tobytes() for mine, remote in pairs)
        fingerprints = read.result()
        assert fingerprints is None or folds is not None
        if fingerprints is not None:
            expected = fingerprint_blocks(theirs, [remote for _, remote in pairs], heads)
            assert np.array_equal(fingerprints.reshape(-1, heads), expected)


def test_two_lenders_are_not_mixed_up(world: World) -> None:
    first, second = world.lender(0), world.lender(1)
    reads = [
        world.reader.read(world.reader.connect(lender.endpoint), [Span(number * BLOCK, 0, BLOCK)])
        for number, lender in enumerate((first, second) * 8)
    ]
    for read in reads:
        world.done(read)
    for number, lender in enumerate((first, second) * 8):
        assert world.memory[number * BLOCK :][:BLOCK].tobytes() == lender.data[:BLOCK].tobytes()


def test_reads_of_one_peer_happen_in_order(world: World) -> None:
    """Each overwrites the one before it."""
    lender = world.lender(0)
    peer = world.reader.connect(lender.endpoint)
    finished: list[int] = []

    def note(number: int, _: Read) -> None:
        finished.append(number)

    with world.held(peer, 0):
        reads = [world.reader.read(peer, [Span(BLOCK, number * BLOCK, BLOCK)]) for number in range(32)]
        for number, read in enumerate(reads):
            read.add_done_callback(partial(note, number))
    for read in reads:
        world.done(read)
    assert finished == list(range(32))
    assert world.memory[BLOCK : 2 * BLOCK].tobytes() == lender.data[31 * BLOCK : 32 * BLOCK].tobytes()


def test_flows_of_one_peer_take_turns(world: World) -> None:
    """A request with much to read does not hold up one with little; within a flow the order stays."""
    peer = world.reader.connect(world.lender(0).endpoint)
    finished: list[tuple[str, int]] = []

    def note(which: tuple[str, int], _: Read) -> None:
        finished.append(which)

    wanted = [("much", number) for number in range(8)] + [("little", 0), ("some", 0), ("little", 1)]
    reads: list[Read] = []
    with world.held(peer, 0):
        for flow, number in wanted:
            reads.append(world.reader.read(peer, [Span(BLOCK, 0, BLOCK)], flow))
            reads[-1].add_done_callback(partial(note, (flow, number)))
    for read in reads:
        world.done(read)
    assert finished[:6] == [("much", 0), ("little", 0), ("some", 0), ("much", 1), ("little", 1), ("much", 2)]
    assert finished[6:] == [("much", number) for number in range(3, 8)]


def test_a_flow_whose_reads_were_withdrawn_does_not_stop_the_others(world: World) -> None:
    peer = world.reader.connect(world.lender(0).endpoint)
    with world.held(peer, 0):
        withdrawn = [world.reader.read(peer, [Span(BLOCK, 0, BLOCK)], "withdrawn") for _ in range(4)]
        other = world.reader.read(peer, [Span(2 * BLOCK, 0, BLOCK)], "other")
        assert all(read.cancel() for read in withdrawn)
    world.done(other)
    assert world.untouched(BLOCK, 2 * BLOCK)


def test_what_a_read_went_over_is_known_after_it(world: World) -> None:
    peer = world.reader.connect(world.lender(0).endpoint)
    world.done(world.reader.read(peer, [Span(0, 0, BLOCK)]))
    assert peer.lanes


@pytest.mark.parametrize(
    "span",
    [
        Span(0, LENDER_BLOCKS * BLOCK, 1),
        Span(0, LENDER_BLOCKS * BLOCK - 1, 2),
        Span(READER_BLOCKS * BLOCK - 1, 0, 2),
        Span(-1, 0, 1),
        Span(0, -1, 1),
        Span(0, 0, 0),
        Span(0, 0, -1),
        Span(0, 0, WINDOW + 1),
    ],
)
def test_spans_out_of_range_are_refused(world: World, span: Span) -> None:
    peer = world.reader.connect(world.lender(0).endpoint)
    with pytest.raises(ValueError, match=r"span|pool|carries"):
        world.reader.read(peer, [Span(0, 0, 1), span])
    world.done(world.reader.read(peer, [Span(0, 0, BLOCK)]))
    assert world.untouched(BLOCK)


# --------------------------------------------------------------------------------------------- connecting


def test_connecting_again_gives_the_same_peer(world: World) -> None:
    endpoint = world.lender(0).endpoint
    assert world.reader.connect(endpoint) is world.reader.connect(bytes(bytearray(endpoint)))
    assert world.reader.connect(endpoint) is not world.reader.connect(world.lender(1).endpoint)


def test_connecting_from_many_threads_gives_one_peer(world: World) -> None:
    endpoint, gate = world.lender(0).endpoint, threading.Barrier(8)
    peers: list[Peer] = []

    def connect() -> None:
        gate.wait()
        peers.append(world.reader.connect(endpoint))

    threads = [threading.Thread(target=connect) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, peers))) == 1
    assert len(peers) == 8


@pytest.mark.parametrize("endpoint", [b"", b"garbage", b"\xff\x00\xfe", b"{}", b"[]", b"null", b'"text"', b"[" * 9999])
def test_garbage_is_no_endpoint(world: World, endpoint: bytes) -> None:
    with pytest.raises(EndpointMismatch):
        world.reader.connect(endpoint)


def test_an_endpoint_of_another_format_is_refused(world: World) -> None:
    with pytest.raises(EndpointMismatch):
        world.reader.connect(world.another_format)


# ---------------------------------------------------------------------------- cancelling, dying, closing


def test_a_read_cancelled_before_it_is_posted_writes_nothing(world: World) -> None:
    peer = world.reader.connect(world.lender(0).endpoint)
    with world.held(peer, 0):
        cancelled = world.reader.read(peer, [Span(BLOCK, 0, BLOCK)])
        after = world.reader.read(peer, [Span(2 * BLOCK, 0, BLOCK)])
        assert cancelled.cancel()
    world.done(after)
    assert cancelled.cancelled()
    assert world.untouched(BLOCK, 2 * BLOCK)


def test_a_read_that_was_posted_cannot_be_cancelled(world: World) -> None:
    peer = world.reader.connect(world.lender(0).endpoint)
    read = world.reader.read(peer, [Span(0, 0, BLOCK)])
    world.done(read)
    assert not read.cancel()
    assert not world.untouched(0, BLOCK)


def test_a_dead_peer_fails_its_reads_and_no_others(world: World) -> None:
    mortal, other = world.mortal(), world.lender(0)
    dying, living = world.reader.connect(mortal.endpoint), world.reader.connect(other.endpoint)
    world.done(world.reader.read(dying, [Span(0, 0, BLOCK)]))
    assert world.memory[:BLOCK].tobytes() == mortal.data[:BLOCK].tobytes()
    mortal.kill()
    reads = [world.reader.read(dying, [Span(BLOCK, 0, BLOCK)]) for _ in range(2)]
    good = world.reader.read(living, [Span(2 * BLOCK, 0, BLOCK)])
    for read in reads:
        with pytest.raises(TransferError):
            world.done(read)
    world.done(good)
    assert world.memory[2 * BLOCK : 3 * BLOCK].tobytes() == other.data[:BLOCK].tobytes()


def test_a_peer_that_died_before_the_first_read(world: World) -> None:
    mortal = world.mortal()
    peer = world.reader.connect(mortal.endpoint)
    mortal.kill()
    with pytest.raises(PeerGone):
        world.done(world.reader.read(peer, [Span(0, 0, BLOCK)]))
    assert world.untouched()


def test_dropping_a_peer_cancels_what_is_queued_for_it_and_nothing_else(world: World) -> None:
    dropped, other = (world.reader.connect(world.lender(number).endpoint) for number in range(2))
    with world.held(dropped, 0):
        queued = [world.reader.read(dropped, [Span(BLOCK, 0, BLOCK)], flow) for flow in (None, "a", "a")]
        good = world.reader.read(other, [Span(2 * BLOCK, 0, BLOCK)])
        world.reader.drop(dropped)
    wait_until(lambda: all(read.done() for read in queued), "they are settled")
    assert all(read.cancelled() for read in queued)
    world.done(good)
    assert world.untouched(BLOCK, 2 * BLOCK)
    late = world.reader.read(dropped, [Span(BLOCK, 0, BLOCK)])
    assert isinstance(late.exception(TIMEOUT_S), PeerGone)
    world.reader.drop(dropped)


def test_a_peer_that_was_dropped_can_be_connected_to_again(world: World) -> None:
    lender = world.lender(0)
    for number in range(3):
        peer = world.reader.connect(lender.endpoint)
        world.done(world.reader.read(peer, [Span(number * BLOCK, 0, BLOCK)]))
        world.reader.drop(peer)
        again = world.reader.connect(lender.endpoint)
        assert again is not peer
        world.done(world.reader.read(again, [Span(number * BLOCK, BLOCK, BLOCK)]))
        assert world.memory[number * BLOCK :][:BLOCK].tobytes() == lender.data[BLOCK : 2 * BLOCK].tobytes()
        world.reader.drop(again)


def test_a_dead_peer_can_be_dropped(world: World) -> None:
    mortal = world.mortal()
    peer = world.reader.connect(mortal.endpoint)
    world.done(world.reader.read(peer, [Span(0, 0, BLOCK)]))
    mortal.kill()
    world.reader.drop(peer)
    world.done(world.reader.read(world.reader.connect(world.lender(0).endpoint), [Span(BLOCK, 0, BLOCK)]))


def test_closing_cancels_what_is_queued(world: World) -> None:
    peer = world.reader.connect(world.lender(0).endpoint)
    closing = threading.Thread(target=world.reader.close)
    with world.held(peer, 0):
        queued = [world.reader.read(peer, [Span(BLOCK, 0, BLOCK)]) for _ in range(3)]
        closing.start()
        wait_until(lambda: world.reader.read(peer, [Span(BLOCK, 0, BLOCK)]).done(), "it refuses reads")
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert all(read.cancelled() for read in queued)
    assert world.untouched(BLOCK)


def test_a_closed_transport_fails_reads_at_once(world: World) -> None:
    peer = world.reader.connect(world.lender(0).endpoint)
    world.reader.close()
    read = world.reader.read(peer, [Span(0, 0, BLOCK)])
    assert read.done(), "it must not hang"
    assert isinstance(read.exception(), TransferError)
    with pytest.raises(TransferError):
        world.reader.connect(world.lender(1).endpoint)
    assert world.untouched()


def test_closing_twice_is_fine(world: World) -> None:
    world.reader.close()
    world.reader.close()


def test_reads_from_many_threads_while_it_closes_are_all_settled(world: World) -> None:
    """No read is left without an answer, whichever side of the stop it falls on.

    The lender is this test's own: UCX 1.21 over TCP may crash in one whose borrower closes while they connect.
    """
    peer = world.reader.connect(world.mortal().endpoint)
    reads: list[Read] = []
    closed = threading.Event()

    def keep_reading() -> None:
        while not closed.is_set():
            reads.append(world.reader.read(peer, [Span(0, 0, BLOCK)]))
        reads.append(world.reader.read(peer, [Span(0, 0, BLOCK)]))

    threads = [threading.Thread(target=keep_reading) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(reads) > 50, "some reads are queued")
    world.reader.close()
    closed.set()
    for thread in threads:
        thread.join()
    for read in reads:
        try:
            read.result(TIMEOUT_S)
        except (CancelledError, TransferError):
            continue
