"""A borrower whose lender is silent computes its blocks itself, and keeps what still arrives."""

import pytest

from engine.core_types import StepBudget
from kvtransfer.local import LocalNetwork
from loans.borrower_manager import HEDGE_AFTER_S, HEDGE_UNMEASURED_S
from support.checked_core import NOTHING_LEFT
from support.core_engine import WIDE, Engine, account_of, tokens_of
from support.core_pair import Pair, moved
from support.hand_network import HandNetwork
from support.sim_model import undisturbed

LONG = tuple(range(10, 32))
"""Five whole blocks and a tail."""
NARROW = StepBudget(4, 4)
"""One block a step."""


def pair(borrower_budget: StepBudget = NARROW) -> Pair:
    """Reads land one at a time, and the lender computes a block a step."""
    network, engines = LocalNetwork(), dict[bytes, HandNetwork]()
    return Pair(
        engines=(
            Engine("borrower", network=network, eager=False, budget=borrower_budget, engines=engines),
            Engine("lender", network=network, budget=NARROW, engines=engines),
        )
    )


def silent(pair: Pair, seconds: float = HEDGE_UNMEASURED_S) -> None:
    """No sign of life has come for so long."""
    manager = pair.borrower.core.borrower_manager
    pair.borrower.taken("r").quiet_for_s = seconds
    manager.look_for_silence()
    pair.borrower.turn()


def resumed(steps: int) -> Pair:
    """The borrower has computed some steps alone; then the lender hears of the loan, and computes all of it."""
    both = pair()
    both.submit("r", LONG)
    silent(both)
    for _ in range(steps):
        both.borrower.step()
    both.carry()
    both.lender.run()
    return both


def test_all_is_computed_here_when_nothing_comes() -> None:
    both = pair()
    both.submit("r", LONG)
    silent(both)
    both.borrower.run()
    both.hear()
    both.check_served("r")
    account = account_of(both.tokens)
    assert moved(account) == (0, 0, 6, 22, 0)
    assert account.hedged_blocks == 5
    assert account.loan_failure == (
        f"the lender was silent for {HEDGE_UNMEASURED_S:.1f} s: the blocks were computed here before they arrived"
    )


@pytest.mark.parametrize("steps", range(1, 5))
def test_what_still_arrives_is_used(steps: int) -> None:
    """The borrower computes some blocks; then the lender, which had gone on, is heard again."""
    both = resumed(steps)
    both.run()
    both.check_served("r")
    account = account_of(both.tokens)
    assert account.hedged_blocks == steps
    assert moved(account) == (0, 5 - steps, 1 + steps, 2 + 4 * steps, 0)
    assert account.loan_failure == ""


def test_a_wrong_block_that_arrives_late_is_computed() -> None:
    both = resumed(1)
    both.carry()
    both.lender.runner.pool.memory[2, 5] ^= 1
    both.run()
    both.check_served("r")
    account = account_of(both.tokens)
    assert account.mismatched_blocks == 1
    assert "arrived corrupted" in account.loan_failure


def test_reads_that_hang_are_given_up() -> None:
    both = pair()
    both.submit("r", LONG)
    both.carry()
    both.lender.step()
    both.carry()  # a block is announced, and its read is queued
    silent(both)
    both.borrower.run()
    both.hear()
    assert tokens_of(both.tokens, "r") == undisturbed(LONG, 2)
    assert both.borrower.held() == NOTHING_LEFT
    account = account_of(both.tokens)
    assert account.loan_failure == f"the lender was silent for {HEDGE_UNMEASURED_S:.1f} s: its reads hang"
    assert account.moved_blocks == account.hedged_blocks == 0


def test_silence_shorter_than_computing_is_waited_for() -> None:
    both = pair(WIDE)
    both.borrower.core.kv_cache.cached.speeds.prefill_tokens_per_s = 10.0  # 20 tokens take two seconds
    both.submit("r", LONG)
    both.carry()
    silent(both, 1.9)
    assert not both.borrower.step()
    both.borrower.core.kv_cache.cached.speeds.prefill_tokens_per_s = 1e6
    silent(both, HEDGE_AFTER_S - 0.01)
    assert not both.borrower.step()
    silent(both, HEDGE_AFTER_S)
    assert both.borrower.step()
