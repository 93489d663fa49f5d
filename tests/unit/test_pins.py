"""Prompts whose blocks stay in the pool: pools of sixteen blocks of four tokens."""

from hypothesis import given
from hypothesis import strategies as st

from engine.core_types import SamplingParams, StepBudget
from engine.messages.from_engine import LoadReport, Rejected, Token
from engine.messages.to_engine import Generate
from kvcache.pins import Retention
from loans.account import KvAccount
from support.sim_model import undisturbed
from support.trial_node import Node

WIDE = StepBudget(64, 64)
HOUR = Retention(3600.0, "tenant")


class Engine(Node):
    def __init__(self, num_blocks: int = 16, reserve: int = 256) -> None:
        self.now = 100.0
        super().__init__({}, "node", num_blocks, WIDE, reserve, clock=lambda: self.now)
        self.count = 0

    def serve(self, first: int, num_tokens: int, retention: Retention | None = None, max_tokens: int = 2) -> KvAccount:
        """Serve a prompt of tokens from `first` on; its tokens are right."""
        prompt = tuple(number % 90 for number in range(first, first + num_tokens))
        self.said.clear()
        self.count += 1
        sampling = SamplingParams(max_tokens)
        self.send(Generate(f"r{self.count}", prompt, (), sampling, "", 0, lender=None, retention=retention))
        while self.core.step():
            self.check()
        tokens = [message for message in self.said if isinstance(message, Token)]
        assert not [message for message in self.said if isinstance(message, Rejected)]
        assert [token.token_id for token in tokens] == undisturbed(prompt, max_tokens)
        self.check_at_rest()
        assert tokens[0].account is not None
        return tokens[0].account


def test_a_pinned_prompt_survives_a_flood_and_goes_when_its_time_is_over() -> None:
    engine = Engine()
    assert engine.serve(0, 17, HOUR).pinned_blocks == 4
    for number in range(20):
        assert engine.serve(100 * number + 31, 30).reused_blocks == 0
    assert engine.serve(0, 17).reused_blocks == 4
    engine.now += 3601.0
    engine.core.report()
    assert engine.core.kv_cache.cached.pins.blocks == []
    for number in range(20):
        engine.serve(100 * number + 31, 30)
    assert engine.serve(0, 17).reused_blocks == 0


def test_a_longer_time_counts() -> None:
    engine = Engine()
    engine.serve(0, 9, Retention(50.0))
    engine.serve(0, 9, Retention(100.0))
    engine.serve(0, 9, Retention(10.0))
    engine.now += 99.0
    engine.core.report()
    assert len(engine.core.kv_cache.cached.pins.blocks) == 2
    engine.now += 2.0
    engine.core.report()
    assert engine.core.kv_cache.cached.pins.blocks == []


def test_pins_give_way_to_a_request_that_would_never_fit() -> None:
    engine = Engine()
    engine.serve(0, 17, HOUR)
    engine.serve(40, 9, Retention(60.0, "other"))
    engine.now += 1.0
    engine.core.report()
    load = [message for message in engine.said if isinstance(message, LoadReport)][-1]
    assert load.available_blocks == 16, "the router may send it"
    engine.serve(31, 50)
    by_tenant = engine.core.kv_cache.cached.pins.by_tenant()
    assert [(tenant, count) for tenant, count, _ in by_tenant] == [("tenant", 3)], "the first to end went"


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 40), st.sampled_from([None, 5.0, 50.0]), st.integers(0, 1)),
        max_size=25,
    )
)
def test_any_order_of_pins_keeps_books_and_bounds(requests: list[tuple[int, int, float | None, int]]) -> None:
    engine = Engine()
    for trunk, length, seconds, tenant in requests:
        engine.now += 1.0
        retention = None if seconds is None else Retention(seconds, f"tenant-{tenant}")
        engine.serve(40 * trunk, length, retention)
        pins = engine.core.kv_cache.cached.pins
        pins.check_integrity()
        assert len(pins.blocks) <= 8
        assert all(count <= 4 for _, count, _ in pins.by_tenant())
    engine.now += 100.0
    engine.core.report()
    assert engine.core.kv_cache.pool.num_held == 0
