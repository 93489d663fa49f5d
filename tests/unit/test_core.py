"""The engine alone: requests, admission, reports. Eight blocks of four tokens; exact values."""

import pytest

from engine.core_types import FinishReason, SamplingParams, StepBudget
from engine.messages.from_engine import Audited, CacheChanged, LoadReport, Rejected, Token
from engine.messages.to_engine import Audit, Generate, TakeSnapshot
from kvcache.block_keys import block_keys, root_key
from kvcache.pool import Removed, Stored
from loans.network import PlacementMark
from support.checked_core import NOTHING_LEFT
from support.core_engine import TEN, TWELVE, WIDE, Engine, account_of, generate, lend, tokens_of
from support.sim_model import LAYOUT, undisturbed

# ------------------------------------------------------------------------------------------- one request


@pytest.mark.parametrize("budget", [WIDE, StepBudget(4, 3), StepBudget(1, 1), StepBudget(5, 4)])
def test_the_tokens_do_not_depend_on_the_chunks(budget: StepBudget) -> None:
    engine = Engine(budget=budget)
    engine.send(generate("a", TEN, max_tokens=7))
    assert engine.held() == (0, 5, 0, 1, 0)
    heard = engine.serve()
    assert tokens_of(heard, "a") == undisturbed(TEN, 7)
    assert [message.finish for message in heard] == [None] * 6 + [FinishReason.LENGTH]
    account = account_of(heard)
    assert (account.reused_blocks, account.moved_blocks, account.computed_blocks) == (0, 0, 3)
    assert account.computed_tokens == 10
    assert engine.held() == NOTHING_LEFT


@pytest.mark.parametrize(("prompt", "reused", "computed_tokens"), [(TWELVE, 2, 4), ((*TWELVE, 1), 3, 1), (TEN, 2, 2)])
def test_a_known_prefix_is_reused_but_for_the_block_of_the_last_token(
    prompt: tuple[int, ...], reused: int, computed_tokens: int
) -> None:
    engine = Engine()
    engine.serve(generate("first", TWELVE))
    heard = engine.serve(generate("again", prompt))
    assert tokens_of(heard, "again") == undisturbed(prompt, 2)
    account = account_of(heard)
    assert (account.reused_blocks, account.computed_tokens) == (reused, computed_tokens)
    assert account.computed_blocks == LAYOUT.blocks_for(len(prompt)) - reused


def test_generated_blocks_are_cached_too() -> None:
    engine = Engine()
    engine.send(generate("a", TEN, max_tokens=8))
    engine.run()
    said = undisturbed(TEN, 8)
    engine.receive()
    engine.send(generate("b", [*TEN, *said], max_tokens=1))
    engine.run()
    assert account_of(engine.receive(Token)).reused_blocks == 4


def test_choices_resumed_where_their_blocks_are_cached_are_counted_once() -> None:
    """The account is of the first choice's chain: blocks of another one's tokens were never among those to compute."""
    engine, prompt = Engine(num_blocks=32), (*TWELVE, 1)  # whose full blocks the choices share
    sampling = SamplingParams(max_tokens=20, n=2)
    heard = engine.serve(generate("a", prompt, sampling=sampling))
    choices = [[token.token_id for token in heard if token.choice == choice] for choice in (0, 1)]
    resumed = generate("b", prompt, sampling=sampling, emitted=choices[0][:3])
    heard = engine.serve(resumed._replace(emitted_others=(tuple(choices[1][:19]),)))
    assert [[token.token_id for token in heard if token.choice == choice] for choice in (0, 1)] == [
        choices[0][3:],
        choices[1][19:],
    ]
    account = account_of(heard[:1])
    assert (account.reused_blocks, account.computed_blocks, account.computed_tokens) == (3, 1, 4)
    assert engine.held() == NOTHING_LEFT


def test_a_stop_token_ends_the_request() -> None:
    whole = undisturbed(TEN, 6)
    engine = Engine()
    stop = SamplingParams(max_tokens=6, stop_token_ids=frozenset({whole[2]}))
    heard = engine.serve(generate("a", TEN, sampling=stop))
    assert [message.token_id for message in heard] == whole[:3]
    assert [message.finish for message in heard] == [None, None, FinishReason.STOP]
    assert engine.held() == NOTHING_LEFT


def test_salts_do_not_see_each_other() -> None:
    engine = Engine()
    engine.serve(generate("a", TEN, salt="one"))
    heard = engine.serve(generate("b", TEN, salt="two"))
    assert account_of(heard).reused_blocks == 0
    assert tokens_of(heard, "b") == undisturbed(TEN, 2)


def test_a_higher_priority_prompt_is_computed_first() -> None:
    engine = Engine(budget=StepBudget(4, 4))
    engine.send(generate("low", TEN, 1), generate("high", TEN[::-1], 1, priority=1))
    engine.run()
    assert [token.request_id for token in engine.receive(Token)] == ["high", "low"]


# ------------------------------------------------------------------------------------------- admission


def test_what_can_never_fit_is_rejected_for_good() -> None:
    engine = Engine()
    engine.send(generate("a", TEN, max_tokens=23))
    assert engine.receive(Rejected) == [
        Rejected("a", "prompt + max_tokens need 9 KV blocks, the pool has 8", permanent=True)
    ]
    engine.send(generate("a", TEN, max_tokens=22))
    assert engine.receive(Rejected) == []


@pytest.mark.parametrize(
    ("second", "rejected"),
    [
        (generate("b", TEN, max_tokens=3), Rejected("b", "4 KV blocks needed, 3 available now", permanent=False)),
        (generate("a", TEN[::-1]), Rejected("a", "a request of this id is running here", permanent=True)),
    ],
)
def test_what_cannot_run_now_is_rejected_at_once_and_the_first_goes_on(second: Generate, rejected: Rejected) -> None:
    engine = Engine()
    engine.send(generate("a", TEN, max_tokens=10), second)
    assert engine.receive(Rejected) == [rejected]
    assert tokens_of(engine.serve(), "a") == undisturbed(TEN, 10)


@pytest.mark.parametrize(("prompt", "emitted"), [((), ()), (TEN, (1, 2)), (TEN, tuple(range(30)))])
def test_a_request_with_nothing_to_compute_is_rejected(prompt: tuple[int, ...], emitted: tuple[int, ...]) -> None:
    engine = Engine()
    engine.send(generate("a", prompt, max_tokens=2, emitted=emitted))
    (rejected,) = engine.receive(Rejected)
    assert rejected.permanent
    assert engine.held() == NOTHING_LEFT
    engine.run()


# --------------------------------------------------------------------------------------------- reports


def test_cache_events_are_numbered_without_gaps_and_tell_what_the_snapshot_tells() -> None:
    engine = Engine(num_blocks=4)
    for base in (0, 20, 0):
        engine.send(generate("a", range(base, base + 12)))
        engine.run()
    engine.send(TakeSnapshot())
    *changes, snapshot = engine.receive(CacheChanged)
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
    first = Generate("a", TEN, (), SamplingParams(2), "", 0, None, PlacementMark("r1", 5))
    engine.send(first, lend("l", TWELVE, mark=PlacementMark("r2", 1)))
    engine.send(Generate("b", (), (), SamplingParams(2), "", 0, None, PlacementMark("r1", 4)))
    engine.step()
    load = engine.receive(LoadReport)[-1]
    assert load.placements_seen == {"r1": 5, "r2": 1}
    assert (load.running, load.loans, load.queued_loans, load.num_blocks) == (1, 1, 0, 8)


def test_load_counts_prompts_and_waiting_loans() -> None:
    engine = Engine(budget=StepBudget(4, 4))
    engine.send(generate("a", TEN, 2), lend("l", TWELVE), lend("m", range(40, 60)))
    engine.step()
    load = engine.receive(LoadReport)[-1]
    assert load.queued_loans == 1
    assert load.queued_prefill_tokens == (10 - 4) + 12 + 20
    assert load.available_blocks == 8 - 3 - 3


def test_an_audit_is_answered() -> None:
    engine = Engine()
    engine.send(generate("a", TEN), Audit(7))
    assert engine.receive(Audited) == [Audited(7, "", 0, 3, 0, 1, 0)]
    assert engine.core.kv_cache.pool.reserve_with((), 1)
    engine.core.handle(Audit(8))
    (audited,) = engine.receive(Audited)
    assert audited.fault == "4 blocks are reserved, 3 expected"


def test_siblings_that_arrive_together_compute_once() -> None:
    """The second was admitted before anything was cached; its turn comes when the first has computed."""
    engine = Engine(num_blocks=16, budget=StepBudget(4, 4))
    engine.send(generate("a", TWELVE, 1), generate("b", (*TWELVE, 1), 1))
    assert engine.held()[1] == 8, "room for both as if nothing were shared"
    heard = engine.serve()
    assert tokens_of(heard, "b") == undisturbed((*TWELVE, 1), 1)
    account = account_of([token for token in heard if token.request_id == "b"])
    assert (account.reused_blocks, account.computed_blocks, account.computed_tokens) == (3, 1, 1)
    assert engine.held() == NOTHING_LEFT
