"""The engine alone, and two of them with every message carried by hand. Eight blocks of four tokens; exact values."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pytest

from engine.core import CoreLimits, EngineCore
from engine.keys import block_keys, root_key
from engine.layout import KvLayout
from engine.messages import (
    Audit,
    Audited,
    CacheChanged,
    Cancel,
    CloseLoan,
    FromEngine,
    Generate,
    KvAccount,
    Lend,
    LendClosed,
    LendReady,
    LendRefused,
    LendReleased,
    LendStarting,
    Load,
    LoanBlocks,
    LoanFailed,
    LoanStarted,
    OpenLoan,
    PlacementMark,
    Rejected,
    ReleaseLoan,
    TakeSnapshot,
    ToEngine,
    Token,
)
from engine.pool import Removed, Stored
from engine.scheduler import StepBudget
from engine.sim.runner import SimRunner, chain, token_of
from engine.vocabulary import FinishReason, SamplingParams
from kvtransfer.fingerprint import fingerprint_blocks
from kvtransfer.local import LocalNetwork, LocalTransport

LAYOUT = KvLayout(layers=1, kv_heads=2, head_dim=1, block_tokens=4, dtype="float32")
VOCAB = 1000
WIDE = StepBudget(64, 64)
NOTHING_LEFT = (0, 0, 0, 0, 0)
M = TypeVar("M")


class Engine:
    """An engine core, what it said, and its books checked after every move."""

    def __init__(
        self,
        name: str = "engine",
        num_blocks: int = 8,
        budget: StepBudget = WIDE,
        network: LocalNetwork | None = None,
        eager: bool = True,
        max_queued_loans: int = 2,
    ) -> None:
        self.said: list[FromEngine] = []
        self.transport = LocalTransport(network or LocalNetwork(), name, eager)
        self.runner = SimRunner(LAYOUT, num_blocks, VOCAB)
        limits = CoreLimits(budget, max_queued_loans, report_interval_s=0.0, min_report_interval_s=0.0)
        self.core = EngineCore(self.runner, self.transport, limits, self.said.append)
        self.ready = self.core.start()

    def tell(self, *messages: ToEngine) -> None:
        for message in messages:
            self.core.handle(message)
        self.core.handle_posted()
        self.check()

    def step(self) -> bool:
        self.tell()
        worked = self.core.step()
        self.check()
        return worked

    def run(self) -> None:
        while self.step():
            pass

    def hear(self, *kinds: type[M]) -> list[M]:
        """Messages of these kinds, in order; the others are dropped."""
        heard: list[M] = [message for message in self.said if isinstance(message, kinds)]
        self.said.clear()
        return heard

    def check(self) -> None:
        assert self.core.audit().fault == ""

    def held(self) -> tuple[int, int, int, int, int]:
        """Blocks held, reserved and quarantined; sequences; loans given."""
        audited = self.core.audit()
        return (
            audited.held_blocks,
            audited.reserved_blocks,
            audited.quarantined_blocks,
            audited.sequences,
            audited.loans,
        )


def generate(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 2,
    emitted: Sequence[int] = (),
    borrow: bool = False,
    salt: str = "",
    priority: int = 0,
    sampling: SamplingParams | None = None,
) -> Generate:
    sampling = sampling or SamplingParams(max_tokens)
    return Generate(request_id, tuple(prompt), tuple(emitted), sampling, salt, priority, borrow)


def lend(loan_id: str, tokens: Sequence[int], first: int = 0, compute: bool = True, priority: int = 0) -> Lend:
    return Lend(loan_id, tuple(tokens), first, "", compute, priority)


def undisturbed(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the simulated model answers, with no engine about it."""
    state = int.from_bytes(LAYOUT.fingerprint(b"sim")[:8], "little")
    states: list[int] = []
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        for token in tokens[len(states) :]:
            state = chain(state, token)
            states.append(state)
        tokens.append(token_of(np.array([states] * LAYOUT.kv_heads, np.uint64)[:, :, None], VOCAB))
    return tokens[len(prompt) :]


def tokens_of(messages: Sequence[Token], request_id: str) -> list[int]:
    return [message.token_id for message in messages if message.request_id == request_id]


def account_of(messages: Sequence[Token]) -> KvAccount:
    accounts = [message.account for message in messages if message.account is not None]
    assert len(accounts) == 1
    assert messages[0].account is accounts[0], "it comes with the first token"
    return accounts[0]


TEN = tuple(range(10, 20))
TWELVE = tuple(range(10, 22))

# ------------------------------------------------------------------------------------------- one request


@pytest.mark.parametrize("budget", [WIDE, StepBudget(4, 3), StepBudget(1, 1), StepBudget(5, 4)])
def test_the_tokens_do_not_depend_on_the_chunks(budget: StepBudget) -> None:
    engine = Engine(budget=budget)
    engine.tell(generate("a", TEN, max_tokens=7))
    assert engine.held() == (0, 5, 0, 1, 0)
    engine.run()
    heard = engine.hear(Token)
    assert tokens_of(heard, "a") == undisturbed(TEN, 7)
    assert [message.finish for message in heard] == [None] * 6 + [FinishReason.LENGTH]
    account = account_of(heard)
    assert (account.reused_blocks, account.moved_blocks, account.computed_blocks) == (0, 0, 3)
    assert account.computed_tokens == 10
    assert engine.held() == NOTHING_LEFT


def test_requests_together_answer_as_alone() -> None:
    engine = Engine(num_blocks=16, budget=StepBudget(6, 4))
    prompts = {"a": TEN, "b": TEN[:3], "c": TWELVE, "d": (7,)}
    engine.tell(*(generate(name, prompt, 5) for name, prompt in prompts.items()))
    engine.run()
    heard = engine.hear(Token)
    for name, prompt in prompts.items():
        assert tokens_of(heard, name) == undisturbed(prompt, 5)
    assert engine.held() == NOTHING_LEFT


@pytest.mark.parametrize(("prompt", "reused", "computed_tokens"), [(TWELVE, 2, 4), ((*TWELVE, 1), 3, 1), (TEN, 2, 2)])
def test_a_known_prefix_is_reused_but_for_the_block_of_the_last_token(
    prompt: tuple[int, ...], reused: int, computed_tokens: int
) -> None:
    engine = Engine()
    engine.tell(generate("first", TWELVE))
    engine.run()
    engine.hear()
    engine.tell(generate("again", prompt))
    engine.run()
    heard = engine.hear(Token)
    assert tokens_of(heard, "again") == undisturbed(prompt, 2)
    account = account_of(heard)
    assert (account.reused_blocks, account.computed_tokens) == (reused, computed_tokens)
    assert account.computed_blocks == LAYOUT.blocks_for(len(prompt)) - reused


def test_generated_blocks_are_cached_too() -> None:
    engine = Engine()
    engine.tell(generate("a", TEN, max_tokens=8))
    engine.run()
    said = undisturbed(TEN, 8)
    engine.hear()
    engine.tell(generate("b", [*TEN, *said], max_tokens=1))
    engine.run()
    assert account_of(engine.hear(Token)).reused_blocks == 4


def test_a_request_resumed_elsewhere_goes_on_with_the_same_tokens() -> None:
    whole = undisturbed(TEN, 6)
    for num_emitted in range(6):
        engine = Engine()
        engine.tell(generate("a", TEN, max_tokens=6, emitted=whole[:num_emitted]))
        engine.run()
        heard = engine.hear(Token)
        assert tokens_of(heard, "a") == whole[num_emitted:]
        assert heard[-1].finish is FinishReason.LENGTH
        assert engine.held() == NOTHING_LEFT


def test_a_stop_token_ends_the_request() -> None:
    whole = undisturbed(TEN, 6)
    engine = Engine()
    stop = SamplingParams(max_tokens=6, stop_token_ids=frozenset({whole[2]}))
    engine.tell(generate("a", TEN, sampling=stop))
    engine.run()
    heard = engine.hear(Token)
    assert [message.token_id for message in heard] == whole[:3]
    assert [message.finish for message in heard] == [None, None, FinishReason.STOP]
    assert engine.held() == NOTHING_LEFT


def test_salts_do_not_see_each_other() -> None:
    engine = Engine()
    engine.tell(generate("a", TEN, salt="one"))
    engine.run()
    engine.hear()
    engine.tell(generate("b", TEN, salt="two"))
    engine.run()
    heard = engine.hear(Token)
    assert account_of(heard).reused_blocks == 0
    assert tokens_of(heard, "b") == undisturbed(TEN, 2)


def test_what_is_cached_makes_room_for_what_runs() -> None:
    engine = Engine(num_blocks=4)
    for base in range(0, 100, 20):
        prompt = range(base, base + 12)
        engine.tell(generate(f"r{base}", prompt))
        engine.run()
        assert tokens_of(engine.hear(Token), f"r{base}") == undisturbed(prompt, 2)
    assert engine.held() == NOTHING_LEFT


def test_a_higher_priority_prompt_is_computed_first() -> None:
    engine = Engine(budget=StepBudget(4, 4))
    engine.tell(generate("low", TEN, 1), generate("high", TEN[::-1], 1, priority=1))
    engine.run()
    assert [token.request_id for token in engine.hear(Token)] == ["high", "low"]


# ------------------------------------------------------------------------------------------- admission


def test_what_can_never_fit_is_rejected_for_good() -> None:
    engine = Engine()
    engine.tell(generate("a", TEN, max_tokens=23))
    assert engine.hear(Rejected) == [
        Rejected("a", "prompt + max_tokens need 9 KV blocks, the pool has 8", permanent=True)
    ]
    engine.tell(generate("a", TEN, max_tokens=22))
    assert engine.hear(Rejected) == []


def test_what_does_not_fit_now_is_rejected_at_once() -> None:
    engine = Engine()
    engine.tell(generate("a", TEN, max_tokens=10), generate("b", TEN, max_tokens=3))
    assert engine.hear(Rejected) == [Rejected("b", "4 KV blocks needed, 3 available now", permanent=False)]
    engine.run()
    assert tokens_of(engine.hear(Token), "a") == undisturbed(TEN, 10)


def test_an_id_that_is_running_is_rejected_and_the_first_goes_on() -> None:
    engine = Engine()
    engine.tell(generate("a", TEN), generate("a", TEN[::-1]))
    assert engine.hear(Rejected) == [Rejected("a", "a request of this id is running here", permanent=True)]
    engine.run()
    assert tokens_of(engine.hear(Token), "a") == undisturbed(TEN, 2)


@pytest.mark.parametrize(("prompt", "emitted"), [((), ()), (TEN, (1, 2)), (TEN, tuple(range(30)))])
def test_a_request_with_nothing_to_compute_is_rejected(prompt: tuple[int, ...], emitted: tuple[int, ...]) -> None:
    engine = Engine()
    engine.tell(generate("a", prompt, max_tokens=2, emitted=emitted))
    (rejected,) = engine.hear(Rejected)
    assert rejected.permanent
    assert engine.held() == NOTHING_LEFT
    engine.run()


@pytest.mark.parametrize("steps", range(6))
def test_cancel_at_any_step_frees_everything(steps: int) -> None:
    engine = Engine(budget=StepBudget(4, 4))
    engine.tell(generate("a", TEN, max_tokens=4))
    for _ in range(steps):
        engine.step()
    engine.hear()
    engine.tell(Cancel("a"), Cancel("a"), Cancel("unknown"))
    assert engine.held() == NOTHING_LEFT
    assert not engine.step()
    assert engine.hear(Token, Rejected) == []


# --------------------------------------------------------------------------------------------- reports


def test_cache_events_are_numbered_without_gaps_and_tell_what_the_snapshot_tells() -> None:
    engine = Engine(num_blocks=4)
    for base in (0, 20, 0):
        engine.tell(generate("a", range(base, base + 12)))
        engine.run()
    engine.tell(TakeSnapshot())
    *changes, snapshot = engine.hear(CacheChanged)
    assert snapshot.snapshot
    index: set[bytes] = set()
    expected = 0
    for change in changes:
        assert change.sequence == expected
        expected += len(change.events)
        for event in change.events:
            index = index | set(event.keys) if isinstance(event, Stored) else index - set(event.keys)
    assert any(isinstance(event, Removed) for change in changes for event in change.events)
    assert snapshot.sequence == expected
    assert {key for event in snapshot.events for key in event.keys} == index
    root = root_key(engine.ready.model_fingerprint, "")
    assert set(block_keys(root, range(12), 4)) == index - set(block_keys(root, range(20, 32), 4))


def test_load_tells_of_the_latest_placement_of_each_router() -> None:
    engine = Engine()
    first = Generate("a", TEN, (), SamplingParams(2), "", 0, False, PlacementMark("r1", 5))
    engine.tell(first, Lend("l", TWELVE, 0, "", True, 0, PlacementMark("r2", 1)))
    engine.tell(Generate("b", (), (), SamplingParams(2), "", 0, False, PlacementMark("r1", 4)))
    engine.step()
    load = engine.hear(Load)[-1]
    assert load.placements_seen == {"r1": 5, "r2": 1}
    assert (load.running, load.loans, load.queued_loans, load.num_blocks) == (1, 1, 0, 8)


def test_load_counts_prompts_and_waiting_loans() -> None:
    engine = Engine(budget=StepBudget(4, 4))
    engine.tell(generate("a", TEN, 2), lend("l", TWELVE), lend("m", range(40, 60)))
    engine.step()
    load = engine.hear(Load)[-1]
    assert load.queued_loans == 1
    assert load.queued_prefill_tokens == (10 - 4) + 12 + 20
    assert load.available_blocks == 8 - 3 - 3


def test_an_audit_is_answered() -> None:
    engine = Engine()
    engine.tell(generate("a", TEN), Audit(7))
    assert engine.hear(Audited) == [Audited(7, "", 0, 3, 0, 1, 0)]
    engine.core._books.pool._reserved += 1
    engine.core.handle(Audit(8))
    (audited,) = engine.hear(Audited)
    assert audited.fault == "4 blocks are promised, 3 expected"


# ---------------------------------------------------------------------------------------------- lending


def prints(engine: Engine, blocks: Sequence[int]) -> bytes:
    return fingerprint_blocks(engine.runner.pool.memory, list(blocks), LAYOUT.kv_heads).tobytes()


def starting(message: LendStarting) -> tuple[str, int, int]:
    return message.loan_id, message.end_block, message.cached_end_block


def test_a_loan_is_computed_and_announced_chunk_by_chunk() -> None:
    engine = Engine(budget=StepBudget(6, 6))
    engine.tell(lend("l", (*TWELVE, 1)))
    (message,) = engine.hear(LendStarting)
    assert starting(message) == ("l", 3, 0)
    assert engine.held() == (0, 3, 0, 0, 1)
    engine.step()
    assert engine.hear(LendReady) == [LendReady("l", 0, (0,), prints(engine, [0]))]
    engine.step()
    assert engine.hear(LendReady) == [LendReady("l", 1, (1, 2), prints(engine, [1, 2]))]
    assert engine.held() == (3, 0, 0, 0, 1), "the loan alone holds them now"
    assert not engine.step()
    engine.tell(LendReleased("l", 0, 2))
    assert engine.held() == (1, 0, 0, 0, 1)
    engine.tell(LendClosed("l"), LendClosed("l"), LendReleased("l", 2, 1))
    assert engine.held() == NOTHING_LEFT
    assert engine.hear(LendRefused) == []


def test_what_is_cached_is_lent_at_once_and_only_what_was_wanted() -> None:
    engine = Engine()
    engine.tell(generate("a", TWELVE, 1))
    engine.run()
    engine.hear()
    engine.tell(lend("l", (*TWELVE, 1, 2, 3, 4), first=1))
    start, ready = engine.hear(LendStarting, LendReady)
    assert isinstance(start, LendStarting)
    assert starting(start) == ("l", 4, 3)
    assert ready == LendReady("l", 1, (1, 2), prints(engine, [1, 2]))
    engine.step()
    (ready,) = engine.hear(LendReady)
    assert (ready.first, len(ready.block_ids)) == (3, 1)
    engine.tell(LendClosed("l"))
    assert engine.held() == NOTHING_LEFT


def test_blocks_before_the_wanted_ones_are_computed_and_not_announced() -> None:
    engine = Engine(budget=StepBudget(64, 6))
    engine.tell(lend("l", range(16), first=3))
    assert [starting(message) for message in engine.hear(LendStarting)] == [("l", 4, 3)]
    for _ in range(2):
        engine.step()
        assert engine.hear(LendReady) == []
    engine.step()
    assert engine.hear(LendReady) == [LendReady("l", 3, (3,), prints(engine, [3]))]
    assert engine.held() == (1, 0, 0, 0, 1)


@pytest.mark.parametrize(("first", "end"), [(0, 3), (2, 3), (3, 3), (4, 4)])
def test_a_loan_that_may_not_compute_is_of_what_is_cached(first: int, end: int) -> None:
    engine = Engine()
    engine.tell(generate("a", TWELVE, 1))
    engine.run()
    engine.hear()
    engine.tell(lend("l", range(10, 30), first=first, compute=False))
    said = engine.hear(LendStarting, LendReady)
    assert isinstance(said[0], LendStarting)
    assert starting(said[0]) == ("l", end, end)
    assert [message.first for message in said[1:] if isinstance(message, LendReady)] == [first] * (first < 3)
    assert not engine.step()
    engine.tell(LendClosed("l"))
    assert engine.held() == NOTHING_LEFT


def test_loans_are_refused() -> None:
    engine = Engine(num_blocks=4)
    engine.tell(lend("far", TWELVE, first=3), lend("large", range(20)), lend("short", (1, 2, 3)))
    refused = {message.loan_id: message for message in engine.hear(LendRefused)}
    assert refused["far"].bad_request
    assert refused["short"].bad_request
    assert not refused["large"].bad_request
    engine.tell(*(lend(f"l{i}", range(i * 20, i * 20 + 12)) for i in range(4)))
    assert engine.hear(LendRefused) == [LendRefused("l3", "2 loans wait already", bad_request=False)]
    engine.tell(*(LendClosed(f"l{i}") for i in range(4)))
    assert engine.held() == NOTHING_LEFT


@pytest.mark.parametrize("started", [True, False])
def test_a_borrower_that_breaks_the_protocol_loses_its_loan(started: bool) -> None:
    engine = Engine(num_blocks=4)
    engine.tell(lend("other", range(100, 112)) if not started else Audit(0), lend("l", TWELVE))
    engine.tell(LendReleased("l", 0, 1))
    (refused,) = engine.hear(LendRefused)
    assert (refused.loan_id, refused.bad_request) == ("l", True)
    engine.tell(LendClosed("l"), LendClosed("other"))
    assert engine.held() == NOTHING_LEFT
    assert not engine.step()


def test_a_loan_waits_for_room_and_starts_in_the_step_that_makes_it() -> None:
    """Not in the next one, before which an idle loop sleeps."""
    engine = Engine(num_blocks=4)
    engine.tell(generate("a", TEN, 2), lend("l", range(40, 52)))
    assert engine.held() == (0, 3, 0, 1, 1)
    assert engine.hear(LendStarting) == []
    assert engine.step()
    assert engine.hear(Token, LendStarting)[0].__class__ is Token
    assert engine.step()
    token, start = engine.hear(Token, LendStarting)
    assert isinstance(token, Token)
    assert token.finish is FinishReason.LENGTH
    assert isinstance(start, LendStarting)


def test_waiting_loans_go_by_priority_then_arrival_and_nobody_jumps_the_queue() -> None:
    engine = Engine(num_blocks=4, max_queued_loans=8)
    engine.tell(lend("holder", range(12)))
    engine.tell(lend("first", range(20, 32)), lend("small", range(40, 44)), lend("urgent", range(60, 72), priority=1))
    engine.run()
    engine.hear()
    order = []
    for loan_id in ("holder", "urgent", "first"):
        engine.tell(LendClosed(loan_id))
        engine.run()
        order.append([message.loan_id for message in engine.hear(LendStarting)])
    assert order == [["urgent"], ["first", "small"], []]
    engine.tell(LendClosed("small"))
    assert engine.held() == NOTHING_LEFT


def test_a_loan_closed_while_it_waits_or_while_it_is_computed_holds_nothing() -> None:
    engine = Engine(num_blocks=4, budget=StepBudget(4, 4))
    engine.tell(lend("l", TWELVE), lend("waits", range(40, 52)))
    engine.step()
    engine.tell(LendClosed("waits"))
    assert engine.held() == (1, 2, 0, 0, 1)
    engine.tell(LendClosed("l"))
    assert engine.held() == NOTHING_LEFT
    assert not engine.step()


def test_loans_and_requests_take_turns_by_arrival() -> None:
    engine = Engine(num_blocks=16, budget=StepBudget(4, 4))
    engine.tell(lend("warm up", (1, 2, 3, 4)), LendClosed("warm up"))
    engine.tell(generate("a", TEN, 1), lend("l", range(40, 44)), generate("b", range(60, 64), 1))
    engine.run()
    assert [type(message).__name__ for message in engine.hear(Token, LendReady)] == ["Token", "LendReady", "Token"]


def test_a_waiting_loan_keeps_its_place_among_the_prompts() -> None:
    engine = Engine(num_blocks=8, budget=StepBudget(4, 4))
    engine.tell(generate("big", range(100, 112), 9), lend("l", range(40, 52)))
    for _ in range(5):
        engine.step()
    assert engine.hear(LendStarting) == []
    engine.tell(generate("b", range(60, 64), 1), Cancel("big"))
    engine.run()
    said = engine.hear(Token, LendReady)
    assert [type(message).__name__ for message in said] == ["LendReady"] * 3 + ["Token"]


def test_a_loan_released_head_first_is_evicted_tail_first() -> None:
    engine = Engine(num_blocks=4)
    engine.tell(lend("l", range(12)))
    engine.run()
    engine.tell(LendReleased("l", 0, 1), LendReleased("l", 1, 1), LendReleased("l", 2, 1), LendClosed("l"))
    engine.tell(generate("a", range(50, 55), 1))  # one free block, and one more
    engine.run()
    engine.hear()
    engine.tell(lend("again", range(12), compute=False))
    assert [starting(message) for message in engine.hear(LendStarting)] == [("again", 2, 2)]


def test_a_loan_and_a_request_of_the_same_id_do_not_mix() -> None:
    engine = Engine(num_blocks=16)
    engine.tell(generate("x", TEN, 2), lend("x", range(40, 52)))
    engine.run()
    said = engine.hear(Token, LendReady)
    assert tokens_of([message for message in said if isinstance(message, Token)], "x") == undisturbed(TEN, 2)
    engine.tell(Cancel("x"))
    assert engine.held() == (3, 0, 0, 0, 1)
    engine.tell(LendClosed("x"))
    assert engine.held() == NOTHING_LEFT


def test_two_loans_of_one_chain_at_once_compute_it_once() -> None:
    engine = Engine(budget=StepBudget(4, 4))
    engine.tell(lend("l", TWELVE), lend("m", [*TWELVE[:8], 90, 91, 92, 93]), lend("n", [70, 71, 72, 73]))
    heard: list[tuple[str, int, tuple[int, ...]]] = []
    for _ in range(5):
        engine.step()
        heard += [(ready.loan_id, ready.first, ready.block_ids) for ready in engine.hear(LendReady)]
    # "m" waits while "l" computes what they share, then gets both blocks and its turn, which came before that of "n".
    assert heard == [
        ("l", 0, (0,)),
        ("l", 1, (1,)),
        ("m", 0, (0, 1)),
        ("l", 2, (2,)),
        ("m", 2, (3,)),
        ("n", 0, (4,)),
    ]
    assert not engine.step()


def test_a_loan_whose_sibling_goes_away_computes_itself() -> None:
    engine = Engine(budget=StepBudget(4, 4))
    engine.tell(lend("l", TWELVE), lend("m", TWELVE))
    engine.step()
    engine.tell(LendClosed("l"))
    engine.hear(LendReady)
    engine.run()
    blocks = [block for ready in engine.hear(LendReady) for block in ready.block_ids]
    assert len(set(blocks)) == 3
    engine.tell(LendClosed("m"))
    assert engine.held() == NOTHING_LEFT


def test_a_loan_and_a_request_of_one_chain_at_once() -> None:
    """Both compute; the later one's blocks stay private, are lent all the same, and are free afterwards."""
    engine = Engine(budget=StepBudget(64, 64))
    engine.tell(generate("r", [*TWELVE, 5], max_tokens=1), lend("l", TWELVE))
    engine.step()
    (ready,) = engine.hear(LendReady)
    assert ready.block_ids == (4, 5, 6)
    engine.tell(LendClosed("l"))
    assert engine.held() == NOTHING_LEFT
    assert engine.core._books.pool.match(block_keys(root_key(engine.ready.model_fingerprint, ""), TWELVE, 4)) == [
        0,
        1,
        2,
    ]


# -------------------------------------------------------------------------------------------- borrowing


class Pair:
    """A borrower and a lender; `carry` takes messages across until neither says anything more."""

    def __init__(self, eager: bool = True, lender_budget: StepBudget = WIDE, may_compute: bool = True) -> None:
        network = LocalNetwork()
        self.borrower = Engine("borrower", network=network, eager=eager)
        self.lender = Engine("lender", network=network, budget=lender_budget)
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.may_compute = may_compute
        self.closed: list[str] = []
        self.tokens: list[Token] = []
        self.rejected: list[Rejected] = []

    def submit(self, request_id: str, prompt: tuple[int, ...], max_tokens: int = 2) -> None:
        self.prompts[request_id] = prompt
        self.borrower.tell(generate(request_id, prompt, max_tokens, borrow=True))

    def carry(self) -> bool:
        """What each said so far, to the other; False when that was nothing."""
        to_lender, to_borrower = self.from_borrower(), self.from_lender()
        self.lender.tell(*to_lender)
        self.borrower.tell(*to_borrower)
        return bool(to_lender or to_borrower)

    def from_borrower(self) -> list[ToEngine]:
        out: list[ToEngine] = []
        for message in self.borrower.hear(OpenLoan, ReleaseLoan, CloseLoan, Token, Rejected):
            match message:
                case OpenLoan(request_id, first, end):
                    tokens = self.prompts[request_id][: end * 4]
                    out.append(Lend(request_id, tokens, first, "", self.may_compute, 0))
                case ReleaseLoan(request_id, first, count):
                    out.append(LendReleased(request_id, first, count))
                case CloseLoan(request_id):
                    self.closed.append(request_id)
                    out.append(LendClosed(request_id))
                case Token():
                    self.tokens.append(message)
                case Rejected():
                    self.rejected.append(message)
        return out

    def from_lender(self) -> list[ToEngine]:
        out: list[ToEngine] = []
        for message in self.lender.hear(LendStarting, LendReady, LendRefused):
            match message:
                case LendStarting(loan_id, end, cached_end, queued_ms):
                    out.append(LoanStarted(loan_id, self.lender.ready.endpoint, end, cached_end, queued_ms))
                case LendReady(loan_id, first, block_ids, fingerprints):
                    out.append(LoanBlocks(loan_id, first, block_ids, fingerprints))
                case LendRefused(loan_id, reason):
                    out.append(LoanFailed(loan_id, reason))
        return out

    def run(self) -> None:
        while self.carry() | self.lender.step() | self.borrower.step() | self.borrower.transport.step():
            pass
        self.carry()

    def check_served(self, request_id: str, max_tokens: int = 2) -> None:
        assert tokens_of(self.tokens, request_id) == undisturbed(self.prompts[request_id], max_tokens)
        assert self.closed == [request_id]
        assert self.borrower.held() == NOTHING_LEFT
        assert self.lender.held() == NOTHING_LEFT


def moved(account: KvAccount) -> tuple[int, int, int, int, int]:
    return (
        account.reused_blocks,
        account.moved_blocks,
        account.computed_blocks,
        account.computed_tokens,
        account.mismatched_blocks,
    )


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("lender_budget", [WIDE, StepBudget(5, 5)])
def test_a_loan_brings_all_but_the_tail(eager: bool, lender_budget: StepBudget) -> None:
    pair = Pair(eager, lender_budget)
    pair.submit("r", (*TWELVE, 1, 2))
    assert pair.borrower.held() == (0, 4, 0, 1, 0)
    pair.run()
    pair.check_served("r")
    account = account_of(pair.tokens)
    assert moved(account) == (0, 3, 1, 2, 0)
    assert account.moved_bytes == 3 * LAYOUT.block_bytes
    assert (account.lender_cached_blocks, account.lender_computed_blocks) == (0, 3)
    assert (account.transport, account.lanes, account.loan_failure) == ("local", ("local/memory",), "")


def test_only_what_is_missing_is_borrowed_and_what_was_borrowed_is_lent_on() -> None:
    pair = Pair()
    pair.borrower.tell(generate("warm", TEN, 1))
    pair.borrower.run()
    pair.borrower.hear()
    pair.lender.tell(generate("warm", TWELVE, 1))
    pair.lender.run()
    pair.lender.hear()
    pair.submit("r", (*TWELVE, 1, 2, 3, 4, 5))
    assert pair.borrower.said == [OpenLoan("r", 2, 4, may_compute=True)]
    pair.run()
    pair.check_served("r")
    account = account_of(pair.tokens)
    assert moved(account) == (2, 2, 1, 1, 0)
    assert (account.lender_cached_blocks, account.lender_computed_blocks) == (1, 1)
    pair.borrower.tell(lend("on", (*TWELVE, 1, 2, 3, 4), compute=False))
    start, ready = pair.borrower.hear(LendStarting, LendReady)
    assert isinstance(start, LendStarting)
    assert starting(start) == ("on", 4, 4)
    assert isinstance(ready, LendReady)
    assert ready.fingerprints == prints(pair.borrower, ready.block_ids)


def test_nothing_is_borrowed_when_all_that_could_be_is_here() -> None:
    engine = Engine()
    engine.tell(generate("a", TEN, 1), generate("short", (1, 2, 3, 4), 1, borrow=True))
    engine.run()
    engine.tell(generate("b", TEN, 1, borrow=True))
    engine.run()
    assert engine.hear(OpenLoan) == []
    assert engine.held() == NOTHING_LEFT


def test_a_lender_that_has_a_part() -> None:
    pair = Pair(may_compute=False)
    pair.lender.tell(generate("warm", TEN, 1))
    pair.lender.run()
    pair.lender.hear()
    pair.submit("r", (*TWELVE, 1, 2))
    pair.run()
    pair.check_served("r")
    account = account_of(pair.tokens)
    assert moved(account) == (0, 2, 2, 6, 0)
    assert account.loan_failure == "the lender holds only a part"


def test_a_lender_that_has_nothing() -> None:
    pair = Pair(may_compute=False)
    pair.submit("r", TEN)
    pair.run()
    pair.check_served("r")
    account = account_of(pair.tokens)
    assert moved(account) == (0, 0, 3, 10, 0)
    assert account.loan_failure == "the lender holds none of the blocks"
    assert account.transport == ""


@pytest.mark.parametrize("wrong", range(3))
def test_a_block_that_differs_from_its_fingerprint_is_not_used(wrong: int) -> None:
    pair = Pair(eager=False)
    pair.submit("r", (*TWELVE, 1, 2))
    pair.carry()  # the loan is asked for
    pair.lender.step()
    pair.carry()  # its blocks are announced, and reads queued
    pair.lender.runner.pool.memory[wrong, 5] ^= 1
    pair.run()
    pair.check_served("r")
    account = account_of(pair.tokens)
    assert moved(account) == (0, wrong, 4 - wrong, 14 - 4 * wrong, 1)
    assert account.loan_failure == f"block {wrong} arrived corrupted"


@pytest.mark.parametrize("moves", range(7))
@pytest.mark.parametrize("end", ["cancel", "loan fails", "lender is gone"])
def test_the_end_at_any_moment(moves: int, end: str) -> None:
    """Reads wait in the queue here, so they can all be withdrawn and nothing is ever quarantined."""
    pair = Pair(eager=False, lender_budget=StepBudget(4, 4))
    pair.submit("r", (*TWELVE, 1, 2))
    for move in range(moves):
        pair.carry()
        pair.lender.step()
        pair.borrower.step()
        if move % 2:
            pair.borrower.transport.step()
    match end:
        case "cancel":
            pair.borrower.tell(Cancel("r"))
            assert pair.borrower.held() == NOTHING_LEFT
        case "loan fails":
            pair.borrower.tell(LoanFailed("r", "broken"))
        case "lender is gone":
            pair.lender.transport.close()
            pair.borrower.tell(LoanFailed("r", "gone"))
    assert pair.borrower.held()[2] == 0
    pair.run()
    if end == "cancel":
        assert len(tokens_of(pair.tokens, "r")) <= 2
        assert pair.closed == ["r"]
        assert pair.borrower.held() == pair.lender.held() == NOTHING_LEFT
    else:
        pair.check_served("r")


def test_an_endpoint_of_another_transport_fails_the_loan_only() -> None:
    pair = Pair()
    pair.submit("r", TEN)
    pair.borrower.tell(LoanStarted("r", b"elsewhere", 2, 0, 0.0))
    pair.run()
    pair.check_served("r")
    assert account_of(pair.tokens).loan_failure == "not an endpoint of the local transport"


def test_announced_blocks_outside_the_lenders_pool_fail_the_loan_only() -> None:
    pair = Pair()
    pair.submit("r", TEN)
    pair.borrower.tell(LoanStarted("r", pair.lender.ready.endpoint, 2, 0, 0.0), LoanBlocks("r", 0, (7, 8), bytes(32)))
    pair.run()
    pair.check_served("r")
    assert account_of(pair.tokens).loan_failure == "the read failed"


@pytest.mark.parametrize("fingerprints", [b"", bytes(16), bytes(31), bytes(33), bytes(48), bytes(32)])
def test_fingerprints_of_another_shape_or_value_fail_the_loan_only(fingerprints: bytes) -> None:
    pair = Pair()
    pair.submit("r", TEN)
    pair.borrower.tell(
        LoanStarted("r", pair.lender.ready.endpoint, 2, 0, 0.0), LoanBlocks("r", 0, (0, 1), fingerprints)
    )
    pair.run()
    pair.check_served("r")
    assert account_of(pair.tokens).moved_blocks == 0


def test_messages_of_a_loan_that_is_over_are_ignored() -> None:
    pair = Pair()
    pair.submit("r", TEN, 1)
    pair.run()
    pair.borrower.tell(
        LoanStarted("r", pair.lender.ready.endpoint, 2, 0, 0.0),
        LoanBlocks("r", 0, (0, 1), bytes(32)),
        LoanFailed("r", "late"),
        LoanFailed("never heard of", "late"),
    )
    assert pair.borrower.hear(Token, Rejected, CloseLoan) == []
    pair.check_served("r", 1)
