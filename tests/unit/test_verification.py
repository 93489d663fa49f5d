"""Verification of blocks that arrive in a GPU's memory: passes for all that wait, in any order of ends."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtransfer.errors import TransferError
from kvtransfer.fingerprint import fingerprint_blocks
from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.ranks import BlockPart, join_endpoints
from kvtransfer.transport import Pool
from loans.reads.block_reads import BlockRead, LocalRank
from loans.reads.verification import BatchVerifier
from support.memory_objects import StepExecutor
from support.sim_model import LAYOUT
from support.slow_transport import SlowTransport

BLOCK = LAYOUT.block_bytes
NUM_BLOCKS = 24
LENDERS = ("one", "other", "two ranks")

Quiet = list[tuple[bytes, ...] | None]


class Borrower:
    """One rank with its pool "on a GPU", which borrows from three lenders; passes happen when told to."""

    def __init__(self) -> None:
        network = dict[bytes, Pool]()
        self.pool = Pool(np.zeros((NUM_BLOCKS, BLOCK), np.uint8))
        self.transport = SlowTransport(network, "borrower")
        self.transport.register(self.pool)
        self.transport.on_gpu = True
        self.passes = StepExecutor()
        self.looked: list[list[int]] = []
        self.rank = LocalRank(self.transport, BlockPart(BLOCK), self.fingerprints, executor=self.passes)
        rng = np.random.default_rng(1)
        self.contents = {name: rng.integers(0, 256, (NUM_BLOCKS, BLOCK), np.uint8) for name in LENDERS}
        self.endpoints = {
            name: SlowTransport(network, name).register(Pool(self.contents[name].copy())) for name in LENDERS[:2]
        }
        halves = np.split(self.contents["two ranks"], 2, axis=1)
        self.endpoints["two ranks"] = join_endpoints(
            [SlowTransport(network, f"rank {number}").register(Pool(half.copy())) for number, half in enumerate(halves)]
        )

    def fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        assert blocks
        self.looked.append(list(blocks))
        return fingerprint_blocks(self.pool.memory, blocks, kv_heads=2)

    def wanted(self, lender: str, block_ids: Sequence[int]) -> tuple[bytes, ...]:
        prints = fingerprint_blocks(self.contents[lender], block_ids, kv_heads=2)
        return tuple(row.tobytes() for row in prints)

    @property
    def written(self) -> set[int]:
        """Blocks that posted reads may write."""
        return {
            block
            for read in self.transport.posted.values()
            for span in read.spans
            for block in range(span.local_offset // BLOCK, -(-(span.local_offset + span.length) // BLOCK))
        }

    def read(self, lender: str, block_ids: Sequence[int], blocks: Sequence[int]) -> tuple[BlockRead, Quiet]:
        quiet: Quiet = []
        read = self.rank.start_read(
            self.endpoints[lender], block_ids, blocks, "flow", lambda prints, gone: quiet.append(prints)
        )
        return read, quiet

    def land_all(self) -> None:
        while self.transport.step():
            pass


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transport.READ_BYTES_ON_GPU", 2 * BLOCK)


@pytest.mark.parametrize("num_reads", [1, 2, 5])
def test_reads_that_are_complete_share_one_pass(num_reads: int, small_reads: None) -> None:
    """Those of one loan and those of several."""
    borrower = Borrower()
    starts = [
        (lender, [at, at + 2, at + 1], [8 * number + at, 8 * number + at + 1, 8 * number + at + 2])
        for number, lender in enumerate(LENDERS)
        for at in (0, 3)
    ][:num_reads]
    reads = [borrower.read(*each) for each in starts]
    borrower.land_all()
    assert all(not quiet for _, quiet in reads)
    assert all(read.withdraw() == [] and not read.is_quiet for read, _ in reads[1:2])  # none is being written
    while borrower.passes.step():
        pass
    for number, ((lender, block_ids, _), (read, quiet)) in enumerate(zip(starts, reads, strict=True)):
        assert read.is_quiet
        assert quiet == [None if number == 1 else borrower.wanted(lender, block_ids)]
    assert len(borrower.looked) == borrower.rank.batch_verifier.num_passes == 1
    verified = [block for number, (_, _, blocks) in enumerate(starts) if number != 1 for block in blocks]
    assert sorted(borrower.looked[0]) == sorted(verified)


def test_what_arrives_during_a_pass_shares_the_next_one() -> None:
    """With the verifier's own thread: neither the transport nor the loop waits for a pass."""
    pool, network = Pool(np.zeros((NUM_BLOCKS, BLOCK), np.uint8)), LocalNetwork()
    reader, lender = LocalTransport(network, "reader"), LocalTransport(network, "lender")
    reader.register(pool)
    reader.on_gpu = True
    contents = np.random.default_rng(2).integers(0, 256, (NUM_BLOCKS, BLOCK), np.uint8)
    endpoint = lender.register(Pool(contents))
    began, go_on, over = threading.Event(), threading.Event(), threading.Semaphore(0)

    def fingerprints(blocks: Sequence[int]) -> NDArray[np.uint64]:
        began.set()
        assert go_on.wait()
        return fingerprint_blocks(pool.memory, blocks, kv_heads=2)

    quiet: list[tuple[bytes, ...] | None] = []

    def on_quiet(prints: tuple[bytes, ...] | None, gone: bool) -> None:
        quiet.append(prints)
        over.release()

    rank = LocalRank(reader, BlockPart(BLOCK), fingerprints)
    rank.start_read(endpoint, [0], [0], "flow", on_quiet)
    assert began.wait()
    for block in range(1, 9):
        rank.start_read(endpoint, [block], [block], "flow", on_quiet)
    assert quiet == []
    go_on.set()
    for _ in range(9):
        assert over.acquire()
    wanted = fingerprint_blocks(contents, range(9), kv_heads=2)
    assert quiet == [(row.tobytes(),) for row in wanted]
    assert rank.batch_verifier.num_passes == 2


def test_a_pass_that_fails_fails_its_reads_and_no_later_ones(caplog: pytest.LogCaptureFixture) -> None:
    borrower = Borrower()
    look, broken = borrower.fingerprints, [True]

    def fingerprints(blocks: Sequence[int]) -> NDArray[np.uint64]:
        if broken:
            raise RuntimeError("CUDA error")
        return look(blocks)

    borrower.rank.batch_verifier = BatchVerifier(fingerprints, borrower.passes)
    _, first = borrower.read("one", [0, 1], [0, 1])
    _, second = borrower.read("other", [0], [2])
    borrower.land_all()
    borrower.passes.step()
    assert first == second == [None]
    assert "3 blocks that arrived could not be verified" in caplog.text
    broken.clear()
    _, third = borrower.read("one", [0, 1], [0, 1])
    borrower.land_all()
    borrower.passes.step()
    assert third == [borrower.wanted("one", [0, 1])]


def test_an_end_that_cannot_be_reported_loses_no_other(caplog: pytest.LogCaptureFixture) -> None:
    borrower = Borrower()

    def broken(prints: tuple[bytes, ...] | None, gone: bool) -> None:
        raise RuntimeError("the loop is closed")

    borrower.rank.start_read(borrower.endpoints["one"], [0], [0], "flow", broken)
    _, quiet = borrower.read("one", [1], [1])
    borrower.land_all()
    borrower.passes.step()
    assert quiet == [borrower.wanted("one", [1])]
    assert "the loop is closed" in caplog.text


def test_blocks_that_lie_side_by_side_are_one_span_in_whatever_order_they_come() -> None:
    borrower = Borrower()
    borrower.read("one", [9, 8, 7, 3], [5, 4, 3, 0])
    (read,) = borrower.transport.queued["one"]
    assert [(span.local_offset, span.remote_offset, span.length) for span in read.spans] == [
        (0, 3 * BLOCK, BLOCK),
        (3 * BLOCK, 7 * BLOCK, 3 * BLOCK),
    ]


def test_a_block_larger_than_any_read_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transport.MAX_POSTED_BYTES_ON_GPU", BLOCK - 1)
    borrower = Borrower()
    with pytest.raises(TransferError, match=f"a block of {BLOCK} bytes is larger than one read, {BLOCK - 1}"):
        borrower.rank.connect(borrower.endpoints["one"])
    _, quiet = borrower.read("one", [0, 1], [0, 1])
    assert quiet == [None]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_block_read_ends_once_and_right(data: st.DataObject) -> None:
    """Reads are posted, end well or fail, and are withdrawn, and passes run, in any order."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvtransfer.transport.READ_BYTES_ON_GPU", data.draw(st.sampled_from([1, 2, 4])) * BLOCK)
        _try_any_order(data)


def _try_any_order(data: st.DataObject) -> None:
    borrower = Borrower()
    transport = borrower.transport
    free = list(range(NUM_BLOCKS))
    begun: list[tuple[str, list[int], list[int], BlockRead, Quiet]] = []
    withdrawn: set[int] = set()
    failed: set[int] = set()

    def look(blocks: Sequence[int]) -> NDArray[np.uint64]:
        assert not borrower.written & set(blocks), "a block is verified while a read may write it"
        return fingerprint_blocks(borrower.pool.memory, blocks, kv_heads=2)

    seen: list[AssertionError] = []

    def fingerprints(blocks: Sequence[int]) -> NDArray[np.uint64]:
        try:
            return look(blocks)
        except AssertionError as error:  # the verifier takes any error for one of the GPU
            seen.append(error)
            raise

    borrower.rank.batch_verifier = BatchVerifier(fingerprints, borrower.passes)
    for _ in range(data.draw(st.integers(1, 40), "moves")):
        moves = ["read"] * bool(free) + ["post"] * bool(transport.busy()) + 2 * ["land"] * bool(transport.posted)
        moves += ["fail"] * bool(transport.posted) + ["withdraw"] * bool(begun) + ["pass"]
        match data.draw(st.sampled_from(moves), "move"):
            case "read":
                lender = data.draw(st.sampled_from(LENDERS))
                count = data.draw(st.integers(1, min(6, len(free))))
                blocks = [free.pop(data.draw(st.integers(0, len(free) - 1))) for _ in range(count)]
                ids = st.integers(0, NUM_BLOCKS - 1)
                block_ids = data.draw(st.lists(ids, min_size=count, max_size=count, unique=True))
                begun.append((lender, block_ids, blocks, *borrower.read(lender, block_ids, blocks)))
            case "post":
                transport.post(data.draw(st.sampled_from(transport.busy())))
            case "land":
                transport.land(data.draw(st.sampled_from(sorted(transport.posted))))
            case "fail":
                peer = data.draw(st.sampled_from(sorted(transport.posted)))
                at = transport.posted[peer].spans[0].local_offset // BLOCK
                failed |= {n for n, (_, _, blocks, _, quiet) in enumerate(begun) if at in blocks and not quiet}
                transport.fail(peer)
            case "withdraw":
                number = data.draw(st.integers(0, len(begun) - 1))
                _, _, blocks, read, quiet = begun[number]
                if number in withdrawn or quiet:
                    continue  # a loan withdraws a read once, before it hears of its end
                withdrawn.add(number)
                posted = borrower.written & set(blocks)
                writing = set(read.withdraw())
                assert posted <= writing <= set(blocks)
                free += [block for block in blocks if block not in writing and block not in free]
            case "pass":
                borrower.passes.step()
        assert all(len(quiet) <= 1 for *_, quiet in begun)
    while transport.step() or borrower.passes.step():
        pass
    assert not seen
    for number, (lender, block_ids, _, read, quiet) in enumerate(begun):
        assert len(quiet) == 1
        assert read.is_quiet
        if number in failed:
            assert quiet == [None]
        else:
            assert quiet == [None if number in withdrawn else borrower.wanted(lender, block_ids)]
    assert borrower.rank.batch_verifier.waiting == []
