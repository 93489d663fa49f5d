"""Fast-path announcements: which engine receives them, and how other datagrams are treated."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages.from_engine import LendReady, LendStarting
from engine.messages.to_engine import LoanBlocks, LoanStarted
from loans.fast_path import ADDRESS_BYTES, MAX_BLOCKS_BYTES, MAX_ENDPOINTS, NAME_BYTES, FastPath
from prefill_worker.loan import announcements
from support.fast_path_post import Post

ENDPOINT = b"the lender's endpoint"
STARTING = LendStarting("loan", 7, 3, 1.25)
READY = LendReady("loan", 3, (5, 2, 9), bytes(range(24)), fetched=True)


class Two:
    """A lender and a borrower that has met it."""

    def __init__(self) -> None:
        boxes: dict[bytes, list[bytes]] = {}
        self.box = Post(boxes, b"b" * NAME_BYTES)
        self.lender, self.borrower = FastPath(Post(boxes, b"l" * NAME_BYTES)), FastPath(self.box)
        self.lender.lends_from(ENDPOINT)
        self.borrower.met(ENDPOINT)
        self.address = self.borrower.expect("request")


def test_what_a_lender_says_is_what_the_lease_would_say() -> None:
    two = Two()
    assert len(two.address) == ADDRESS_BYTES
    two.lender.announce(two.address, STARTING)
    two.lender.announce(two.address, READY)
    assert two.borrower.take() == [
        LoanStarted("request", ENDPOINT, 7, 3, 1.25),
        LoanBlocks("request", 3, (5, 2, 9), bytes(range(24)), fetched=True),
    ]
    assert two.borrower.take() == []


@given(
    first=st.integers(0, 2**32 - 1),
    ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    heads=st.integers(1, 8),
    fetched=st.booleans(),
)
def test_any_announcement(first: int, ids: list[int], heads: int, fetched: bool) -> None:
    two = Two()
    prints = struct.pack(f"<{len(ids) * heads}Q", *range(len(ids) * heads))
    two.lender.announce(two.address, LendReady("loan", first, tuple(ids), prints, fetched))
    assert two.borrower.take() == [LoanBlocks("request", first, tuple(ids), prints, fetched)]


def test_nobody_is_told_of_what_has_no_address_or_too_much_of_it() -> None:
    two = Two()
    two.lender.announce(b"", READY)
    count = MAX_BLOCKS_BYTES // 12
    two.lender.announce(two.address, LendReady("loan", 0, tuple(range(count + 1)), bytes(8 * count + 8)))
    assert two.borrower.take() == []
    two.lender.announce(two.address, LendReady("loan", 0, tuple(range(count)), bytes(8 * count)))
    assert len(two.borrower.take()) == 1


def test_what_is_said_early_is_one_message_of_the_lease() -> None:
    """Both are held against each other message by message."""
    count = MAX_BLOCKS_BYTES // 12
    (message,) = announcements(LendReady("loan", 0, tuple(range(count)), bytes(8 * count)))
    assert len(message.block_ids) == count


def test_a_loan_that_is_over_and_a_lender_that_was_never_met() -> None:
    two = Two()
    other = two.borrower.expect("other")
    assert other != two.address
    two.borrower.forget("request")
    two.borrower.forget("request")
    two.lender.announce(two.address, READY)
    assert two.borrower.take() == []
    two.lender.lends_from(b"another endpoint")
    two.lender.announce(other, STARTING)
    assert two.borrower.take() == []
    two.borrower.met(b"another endpoint")
    two.lender.announce(other, STARTING)
    assert two.borrower.take() == [LoanStarted("other", b"another endpoint", 7, 3, 1.25)]


def test_so_many_lenders_are_remembered() -> None:
    two = Two()
    for number in range(MAX_ENDPOINTS - 1):
        two.borrower.met(b"%d" % number)
    two.lender.announce(two.address, STARTING)
    assert len(two.borrower.take()) == 1
    two.borrower.met(b"one more")
    two.lender.announce(two.address, STARTING)
    assert two.borrower.take() == []


def test_without_a_link_nothing_is_said_or_expected() -> None:
    words = FastPath(None)
    words.met(ENDPOINT)
    assert words.expect("request") == b""
    words.announce(b"x" * ADDRESS_BYTES, STARTING)
    words.forget("request")
    assert words.take() == []


@given(word=st.binary(max_size=80))
def test_whatever_else_arrives_is_nobodys(word: bytes) -> None:
    two = Two()
    two.box.boxes[two.box.name].append(word)
    assert two.borrower.take() == []


@given(kind=st.sampled_from([b"s", b"r", b"x", b""]), rest=st.binary(max_size=80))
def test_who_knows_the_secret_may_say_nonsense(kind: bytes, rest: bytes) -> None:
    """It is dropped, or is an announcement that the loan's machine will look at."""
    two = Two()
    two.box.boxes[two.box.name].append(two.address[NAME_BYTES:] + kind + rest)
    for said in two.borrower.take():
        assert isinstance(said, LoanBlocks)
        assert said.request_id == "request"


@pytest.mark.parametrize("said", [STARTING, READY])
def test_a_word_that_is_not_whole_is_dropped(said: LendStarting | LendReady) -> None:
    two = Two()
    two.lender.announce(two.address, said)
    (word,) = two.box.take()
    for changed in [*(word[:length] for length in range(len(word))), word + b"x"]:
        two.box.boxes[two.box.name].append(changed)
        assert two.borrower.take() == []


def test_a_count_that_the_word_does_not_have() -> None:
    two = Two()
    word = two.address[NAME_BYTES:] + b"r" + struct.pack("<III?", 0, 2**32 - 1, 0, False)
    two.box.boxes[two.box.name].append(word)
    assert two.borrower.take() == []
