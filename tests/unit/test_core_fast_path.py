"""Two engine cores with a fast path: the gain for a loan, and that the lease alone decides."""

import pytest

from engine.core_types import StepBudget
from engine.messages.from_engine import LendReady, LendStarting, Token
from engine.messages.to_engine import Cancel, LoanBlocks, LoanStarted, ToEngine
from kvtransfer.local import LocalNetwork
from loans.fast_path import NAME_BYTES
from support.core_engine import TWELVE, WIDE, Engine, account_of
from support.core_pair import Pair, moved
from support.fast_path_post import Post

PROMPT = (*TWELVE, 1, 2)
OTHER = (*range(100, 112), 1, 2)


def early_pair(budget: StepBudget = WIDE) -> Pair:
    """They have met, by a loan before."""
    network, boxes = LocalNetwork(), dict[bytes, list[bytes]]()
    borrower = Engine("borrower", network=network, fast_path=Post(boxes, b"b" * NAME_BYTES))
    lender = Engine("lender", network=network, budget=budget, fast_path=Post(boxes, b"l" * NAME_BYTES))
    pair = Pair(engines=(borrower, lender))
    pair.submit("met", OTHER)
    pair.run()
    pair.check_served("met")
    pair.closed.clear()
    pair.tokens.clear()
    return pair


@pytest.mark.parametrize("budget", [WIDE, StepBudget(5, 5)])
def test_all_is_read_before_the_lease_has_said_anything(budget: StepBudget) -> None:
    pair = early_pair(budget)
    pair.submit("r", PROMPT)
    pair.lender.send(*pair.from_borrower())
    pair.lender.run()
    pair.borrower.run()
    assert any(isinstance(message, Token) for message in pair.borrower.said), "nothing was carried to it"
    pair.run()
    pair.check_served("r")
    account = account_of(pair.tokens)
    assert moved(account) == (0, 3, 1, 2, 0)
    assert (account.lender_cached_blocks, account.lender_computed_blocks, account.loan_failure) == (0, 3, "")


def test_a_lender_that_was_not_met_is_waited_for() -> None:
    pair = early_pair()
    pair.borrower.core._fast_path._endpoints.clear()
    pair.submit("r", PROMPT)
    pair.lender.send(*pair.from_borrower())
    pair.lender.run()
    pair.borrower.run()
    assert not any(isinstance(message, Token) for message in pair.borrower.said)
    pair.run()
    pair.check_served("r")
    assert moved(account_of(pair.tokens)) == (0, 3, 1, 2, 0)


def test_what_comes_by_the_lease_first_is_not_heard_again() -> None:
    pair = early_pair(StepBudget(5, 5))
    pair.submit("r", PROMPT)
    pair.lender.send(*pair.from_borrower())
    words = pair.borrower.core._fast_path._link.boxes  # type: ignore[union-attr]
    held: list[bytes] = []
    while pair.lender.step():
        held += words.pop(b"b" * NAME_BYTES)
        words[b"b" * NAME_BYTES] = []
    pair.borrower.send(*pair.from_lender())
    words[b"b" * NAME_BYTES] += held
    pair.run()
    pair.check_served("r")
    assert moved(account_of(pair.tokens)) == (0, 3, 1, 2, 0)


@pytest.mark.parametrize("kind", [LoanStarted, LoanBlocks])
def test_a_lease_that_says_something_else_ends_the_loan(kind: type) -> None:
    """Nothing is answered wrong even then."""
    pair = early_pair(StepBudget(5, 5))
    pair.submit("r", PROMPT)
    pair.lender.send(*pair.from_borrower())
    pair.borrower.send()
    while not any(isinstance(message, LendReady) for message in pair.lender.said):
        pair.lender.step()
        pair.borrower.send()
    changed: list[ToEngine] = []
    for message in pair.from_lender():
        if isinstance(message, kind):
            match message:
                case LoanStarted():
                    message = message._replace(cached_end_block=1)
                case LoanBlocks():
                    message = message._replace(fingerprints=bytes(len(message.fingerprints)))
        changed.append(message)
    pair.borrower.send(*changed)
    pair.run()
    pair.check_served("r")
    assert account_of(pair.tokens).loan_failure == "protocol error: the lender announced another message"


def test_a_loan_that_was_cancelled_hears_nothing() -> None:
    pair = early_pair()
    pair.submit("r", PROMPT)
    pair.lender.send(*pair.from_borrower())
    pair.borrower.send(Cancel("r"))
    pair.lender.run()
    assert len(pair.lender.receive(LendStarting)) == 1
    pair.run()
    assert pair.borrower.held() == pair.lender.held() == (0, 0, 0, 0, 0)
