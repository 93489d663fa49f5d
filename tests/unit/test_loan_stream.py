"""What any schedule of loans may do to a link and to the connection at its other end (`tests/support/loan_wire.py`)."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import Overloaded
from cluster.network.rpc import MAX_MESSAGE_BYTES
from engine.messages.from_engine import LendReady
from engine.messages.to_engine import LenderSilent, LoanBlocks, LoanFailed, LoanStarted
from engine.worker.front.heartbeat import QUIET_AFTER_S
from engine.worker.front.loan_stream import TOGETHER_S, LoanCall
from prefill_worker.borrower_stream import MAX_FRAME_BYTES
from prefill_worker.loan import READY_BYTES, announcements
from protos import lend_pb2 as pb
from support.loan_wire import SILENCE_S, Wire
from support.virtual_loop import run_virtually, settle

MINUTE_S = 60.0


async def said() -> None:
    """What may wait for more has waited."""
    await asyncio.sleep(TOGETHER_S)
    await settle()


def test_each_gets_its_own_and_no_other() -> None:
    run_virtually(_two())


async def _two() -> None:
    wire = Wire()
    loans = {name: wire.open(name) for name in ("a", "b")}
    await settle()
    for name, count in (("a", 2), ("b", 3)):
        wire.given[name].start()
        wire.given[name].say(count)
    await settle()
    for name, count in (("a", 2), ("b", 3)):
        started, blocks = wire.borrower.told_of(name)
        assert isinstance(started, LoanStarted)
        assert blocks == LoanBlocks(name, 0, tuple(range(count)), b"")
    assert wire.num_frames == 2, "both went together, there and back"
    loans["a"].release(0, 1)
    loans["b"].release(1, 2)
    await settle()
    assert wire.given["a"].released == [], "it may go with another loan's want"
    await said()
    assert wire.num_frames == 3
    assert (wire.given["a"].released, wire.given["b"].released) == ([(0, 1)], [(1, 2)])
    loans["a"].close()
    wire.open("c")
    await settle()
    assert (wire.given["a"].closed, wire.given["b"].closed) == (True, False)
    assert wire.num_frames == 4
    await said()
    assert wire.num_frames == 4
    wire.link.break_off("over")


async def test_refusals_and_mistakes_end_their_loan_only() -> None:
    wire = Wire()
    wire.open("refused"), wire.open("bug"), wire.open("good")
    await settle()
    assert wire.borrower.told_of("refused") == [LoanFailed("refused", "no room")]
    assert "ZeroDivisionError" in wire.borrower.told_of("bug")[0].reason
    wire.given["good"].say(1)
    await settle()
    assert len(wire.borrower.told_of("good")) == 1
    wire.given["good"].fail()
    await settle()
    assert wire.borrower.told_of("good")[1:] == [LoanFailed("good", "release: is wrong")]
    assert wire.given["good"].closed
    assert not wire.link.broken
    wire.link.break_off("over")


def test_what_is_closed_before_it_was_said_is_never_said() -> None:
    run_virtually(_unsaid())


async def _unsaid() -> None:
    wire = Wire()
    loan = wire.open("a")
    loan.release(0, 1)
    loan.close()
    loan.release(1, 1)
    await said()
    assert (wire.num_frames, wire.given) == (0, {})
    wire.link.break_off("over")


def test_a_close_says_all_that_releases_would() -> None:
    run_virtually(_closed())


async def _closed() -> None:
    wire = Wire()
    loan = wire.open("a")
    await settle()
    loan.release(0, 1)
    loan.close()
    await said()
    assert (wire.given["a"].released, wire.given["a"].closed) == ([], True)
    wire.link.break_off("over")


async def test_one_that_no_message_takes_fails_alone() -> None:
    wire = Wire()
    wire.open("large", MAX_MESSAGE_BYTES)
    wire.open("small")
    await settle()
    (failed,) = wire.borrower.told_of("large")
    assert "bytes of tokens" in failed.reason
    assert set(wire.given) == {"small"}
    wire.link.break_off("over")


async def test_more_blocks_than_a_message_takes_are_announced_in_several() -> None:
    wire = Wire()
    wire.open("long"), wire.open("short")
    await settle()
    for _ in range(40):
        wire.given["long"].say(1, READY_BYTES)
    wire.given["short"].say(1)
    wire.given["long"].fail()
    await settle()
    assert wire.largest < 2 * READY_BYTES + MAX_FRAME_BYTES < MAX_MESSAGE_BYTES
    *blocks, failed = wire.borrower.told_of("long")
    assert [told.first for told in blocks] == list(range(40))
    assert isinstance(failed, LoanFailed)
    assert len(wire.borrower.told_of("short")) == 1
    wire.link.break_off("over")


def test_fingerprints_of_many_heads_go_in_parts() -> None:
    width, count = 8 * 32, 70_000
    prints = random.Random(1).randbytes(width * count)
    parts = list(announcements(LendReady("a", 7, tuple(range(count)), prints, fetched=True)))
    assert all(part.ByteSize() < 2 * READY_BYTES and part.fetched for part in parts)
    assert [part.first for part in parts] == [7 + part.block_ids[0] for part in parts]
    assert [block for part in parts for block in part.block_ids] == list(range(count))
    assert b"".join(part.fingerprints for part in parts) == prints
    (whole,) = announcements(LendReady("a", 7, (1, 2), bytes(2 * width), fetched=False))
    assert whole == pb.BlocksReady(first=7, block_ids=[1, 2], fingerprints=bytes(2 * width))


async def test_a_broken_link_lends_nothing() -> None:
    wire = Wire()
    wire.link.break_off("gone")
    loan = wire.open("a")
    loan.close()
    assert [type(told) for told in wire.borrower.told] == [LoanFailed]


@pytest.mark.parametrize("hangs", ["borrower", "lender", "neither"])
def test_an_engine_that_hangs_is_noticed_by_the_other_end(hangs: str) -> None:
    run_virtually(_hang(hangs))


async def _hang(hangs: str) -> None:
    """For a minute the loops turn ten times a second, but one of them."""
    wire = Wire()
    wire.open("a")
    loop = asyncio.get_running_loop()
    began_at, ended_at = loop.time(), 0.0
    while loop.time() < began_at + MINUTE_S:
        for name, engine in (("borrower", wire.borrower), ("lender", wire.lender)):
            if name != hangs:
                engine.turn()
        await asyncio.sleep(0.1)
        if wire.link.broken and not ended_at:
            ended_at = loop.time()
    if hangs == "neither":
        assert not wire.link.broken
        assert not wire.given["a"].closed
        assert 2 * MINUTE_S * 4 < wire.num_frames < 2 * MINUTE_S * 6, "some five beats a second from each"
        wire.link.break_off("over")
    else:
        assert SILENCE_S <= ended_at - began_at < SILENCE_S + 1
        assert wire.given["a"].closed
        *silences, failed = wire.borrower.told_of("a")
        told = [message.silent_s for message in silences if isinstance(message, LenderSilent)]
        if hangs == "lender":
            assert len(told) == len(silences)
            assert told == sorted(told)
            assert QUIET_AFTER_S <= told[0] < 1
            assert SILENCE_S - 1 < told[-1] < SILENCE_S
        assert "was silent for 5 s" in failed.reason


def test_an_idle_stream_says_nothing_and_lasts() -> None:
    run_virtually(_idle())


async def _idle() -> None:
    wire = Wire()
    loan = wire.open("a")
    await settle()
    loan.close()
    await settle()
    before = wire.num_frames
    for _ in range(int(MINUTE_S)):
        await asyncio.sleep(1)
        wire.borrower.turn()
        wire.lender.turn()
    assert not wire.borrower.watchers | wire.lender.watchers
    assert wire.num_frames <= before + 1
    assert not wire.link.broken
    wire.open("b")
    await asyncio.sleep(SILENCE_S / 2)
    assert not wire.link.broken, "the silence before it does not count"
    wire.link.break_off("over")


moves = st.lists(
    st.tuples(
        st.sampled_from(["open", "start", "say", "say", "say", "release", "close", "fail", "hold", "let go"]),
        st.integers(0, 5),
        st.integers(1, 9),
    ),
    max_size=60,
)


@given(moves, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_any_schedule(schedule: list[tuple[str, int, int]], breaks: bool, seeds: random.Random) -> None:
    run_virtually(_any_schedule(schedule, breaks, seeds))


async def _any_schedule(schedule: list[tuple[str, int, int]], breaks: bool, seeds: random.Random) -> None:
    """An engine hears all that is announced to its loan, in order, until it closes it or one failure comes; what is
    closed at one end is at the other."""
    wire = Wire()
    loans: dict[str, LoanCall] = {}
    closed: dict[str, int] = {}
    """How much their engine had heard then."""
    released: dict[str, list[tuple[int, int]]] = {}
    for move, which, count in schedule:
        name = f"r{which}"
        given_loan = wire.given.get(name)
        speaks = given_loan is not None and given_loan.failure is None and not given_loan.closed
        match move:
            case "open" if name not in loans:
                loans[name] = wire.open(name)
                released[name] = []
            case "start" if speaks:
                wire.given[name].start()
            case "say" if speaks:
                wire.given[name].say(count)
            case "fail" if speaks:
                wire.given[name].fail()
            case "release" if name in loans and name not in closed:
                loans[name].release(which, count)
                released[name].append((which, count))
            case "close" if name in loans and name not in closed:
                loans[name].close()
                closed[name] = len(wire.borrower.told_of(name))
            case "hold":
                wire.held.clear()
            case "let go":
                wire.held.set()
        if seeds.random() < 0.7:
            await settle()
        if seeds.random() < 0.3:
            await asyncio.sleep(TOGETHER_S * seeds.random())
    wire.held.set()
    await said()
    for name in loans:
        told, given_loan = wire.borrower.told_of(name), wire.given.get(name)
        blocks = [block for message in told if isinstance(message, LoanBlocks) for block in message.block_ids]
        assert blocks == list(range(len(blocks))), "in order, each once"
        failed = [message for message in told if isinstance(message, LoanFailed)]
        if name in closed:
            assert len(told) == closed[name], "nothing after the close"
            assert given_loan is None or given_loan.closed
        else:
            assert given_loan is not None
            assert len(blocks) == given_loan.said
            assert told[-len(failed) :] == failed if failed else True
            assert len(failed) == (given_loan.failure is not None) == given_loan.closed
            if not failed:
                assert given_loan.released == released[name]
    assert wire.connection.num_loans == wire.link.num_loans
    if breaks:
        wire.connection.end(Overloaded("the end"))
    else:
        wire.link.break_off("over")
    await settle()
    assert wire.link.broken
    assert wire.times_broken == 1
    assert wire.link.num_loans == wire.connection.num_loans == 0
    assert all(given_loan.closed for given_loan in wire.given.values())
    assert not wire.borrower.watchers | wire.lender.watchers
    for name in loans.keys() - closed.keys():
        assert sum(isinstance(message, LoanFailed) for message in wire.borrower.told_of(name)) == 1
