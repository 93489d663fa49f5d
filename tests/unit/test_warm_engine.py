"""Requests without output in engines of a few blocks of four tokens: their blocks, and nothing else, stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core_types import SamplingParams, StepBudget
from engine.messages.from_engine import Filled, Rejected, Token
from engine.messages.to_engine import Cancel, Generate
from kvcache.pins import Retention
from kvtransfer.local import LocalNetwork
from loans.account import KvAccount
from loans.borrower_manager import HEDGE_UNMEASURED_S
from support.checked_core import NOTHING_LEFT
from support.core_engine import Engine as CoreEngine
from support.core_pair import Pair
from support.hand_network import HandNetwork
from support.memory_objects import MemoryObjects
from support.sim_model import undisturbed
from support.trial_node import Node

WIDE, NARROW = StepBudget(64, 64), StepBudget(8, 4)


class Engine(Node):
    def __init__(self, num_blocks: int = 16, budget: StepBudget = WIDE, objects: MemoryObjects | None = None) -> None:
        super().__init__({}, "node", num_blocks, budget, 4, clock=lambda: 100.0, objects=objects)

    def ask(self, name: str, prompt: tuple[int, ...], max_tokens: int = 0, **options: object) -> None:
        sampling = SamplingParams(max_tokens)
        self.send(Generate(name, prompt, (), sampling, "", 0, lender=None, **options))  # type: ignore[arg-type]

    def settle(self) -> None:
        moved = True
        while moved:
            moved = sum(store.step() for store in self.stores) > 0
            self.receive()
            moved |= self.core.step() or any(store.is_busy for store in self.stores)
            self.check()

    def filled(self, name: str) -> KvAccount:
        (account,) = [m.account for m in self.said if isinstance(m, Filled) and m.request_id == name]
        return account


def test_the_tail_is_left_and_a_known_prompt_needs_no_step() -> None:
    engine = Engine()
    engine.ask("a", tuple(range(11)))
    engine.settle()
    assert (engine.filled("a").computed_blocks, engine.filled("a").computed_tokens) == (2, 8)
    engine.ask("b", tuple(range(8)))
    assert engine.filled("b").reused_blocks == 2, "at once"
    assert not [m for m in engine.said if isinstance(m, Token)]
    engine.check_at_rest()
    engine.ask("c", (1, 2, 3))
    assert [m.permanent for m in engine.said if isinstance(m, Rejected)] == [True]


def test_pins_and_the_store() -> None:
    objects = MemoryObjects(2)
    engine = Engine(17, objects=objects)
    engine.ask("a", tuple(range(16)), retention=Retention(60.0), to_store=True)
    engine.settle()
    account = engine.filled("a")
    assert (account.pinned_blocks, account.stored_blocks, len(objects.stored)) == (4, 4, 4)
    engine.ask("b", tuple(range(16)), to_store=True)
    engine.settle()
    assert (engine.filled("b").stored_blocks, len(objects.stored)) == (4, 4)
    engine.check_at_rest()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(4, 30), st.sampled_from([0, 0, 3, 9])), min_size=1, max_size=8),
    st.lists(st.integers(0, 7), max_size=3),
)
def test_beside_others_in_a_small_pool_every_request_ends_and_tokens_are_right(
    asked: list[tuple[int, int, int]], cancelled: list[int]
) -> None:
    """Narrow steps and little reserved output: sequences are preempted, restarted, and find blocks of each other."""
    engine = Engine(12, NARROW)
    prompts = [tuple((first + at) % 90 for at in range(count)) for first, count, _ in asked]
    for number, (prompt, (*_, max_tokens)) in enumerate(zip(prompts, asked, strict=True)):
        engine.ask(f"r{number}", prompt, max_tokens)
        engine.core.step()
        engine.check()
        if number in cancelled:
            engine.send(Cancel(f"r{number}"))
    engine.settle()
    engine.check_at_rest()
    rejected = {m.request_id for m in engine.said if isinstance(m, Rejected)}
    ends = {m.request_id for m in engine.said if isinstance(m, Filled)}
    for number, (prompt, (*_, max_tokens)) in enumerate(zip(prompts, asked, strict=True)):
        name = f"r{number}"
        tokens = [m.token_id for m in engine.said if isinstance(m, Token) and m.request_id == name]
        if name in rejected:
            assert not tokens
        elif max_tokens:
            assert name not in ends
            assert number in cancelled or tokens == undisturbed(prompt, max_tokens)
        else:
            assert not tokens
            assert number in cancelled or name in ends


LONG = tuple(range(10, 30))
"""Five whole blocks."""


def hedged_pair() -> Pair:
    """Return a pair whose borrower waits for a silent lender and now computes itself; the lender has heard nothing."""
    network, peers, narrow = LocalNetwork(), dict[bytes, HandNetwork](), StepBudget(4, 4)
    engines = (
        CoreEngine("borrower", network=network, eager=False, budget=narrow, engines=peers),
        CoreEngine("lender", network=network, budget=narrow, engines=peers),
    )
    pair = Pair(engines=engines)
    pair.submit("r", LONG, 0)
    pair.borrower.taken("r").quiet_for_s = HEDGE_UNMEASURED_S
    pair.borrower.core.report()
    return pair


def ended(pair: Pair) -> KvAccount:
    pair.hear()
    (filled,) = pair.filled
    assert pair.borrower.held() == NOTHING_LEFT
    return filled.account


def test_a_silent_lender_is_not_waited_for() -> None:
    pair = hedged_pair()
    pair.borrower.run()
    account = ended(pair)
    assert (account.moved_blocks, account.computed_blocks, account.hedged_blocks) == (0, 5, 5)


@pytest.mark.parametrize("steps", range(5))
def test_a_lender_that_is_heard_again_brings_the_rest(steps: int) -> None:
    """Whatever was computed before, and whichever way the last block comes, the request ends once."""
    pair = hedged_pair()
    for _ in range(steps):
        pair.borrower.step()
    pair.carry()
    pair.lender.run()
    while pair.carry() or pair.borrower.land() or pair.borrower.step():
        pass
    account = ended(pair)
    assert account.moved_blocks + account.computed_blocks == 5
    assert account.computed_blocks >= steps
