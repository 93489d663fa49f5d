"""The engine alone, as a lender. Eight blocks of four tokens; exact values."""

import pytest

from engine.core_types import FinishReason, StepBudget
from engine.messages.from_engine import Token
from engine.messages.to_engine import Audit, Cancel
from kvcache.block_keys import block_keys, root_key
from support.checked_core import NOTHING_LEFT, Announcement, PeerCloses, PeerReleases, Refusal, Starting
from support.core_engine import TEN, TWELVE, Engine, generate, lend, prints, tokens_of
from support.sim_model import undisturbed


def test_a_loan_is_computed_and_announced_chunk_by_chunk() -> None:
    engine = Engine(budget=StepBudget(6, 6))
    engine.send(lend("l", (*TWELVE, 1)))
    (message,) = engine.receive(Starting)
    assert message == ("l", 3, 0)
    assert engine.held() == (0, 3, 0, 0, 1)
    engine.step()
    assert engine.receive(Announcement) == [Announcement("l", 0, (0,), prints(engine, [0]))]
    engine.step()
    assert engine.receive(Announcement) == [Announcement("l", 1, (1, 2), prints(engine, [1, 2]))]
    assert engine.held() == (3, 0, 0, 0, 1), "the loan alone holds them now"
    assert not engine.step()
    engine.send(PeerReleases("l", 0, 2))
    assert engine.held() == (1, 0, 0, 0, 1)
    engine.send(PeerCloses("l"), PeerCloses("l"), PeerReleases("l", 2, 1))
    assert engine.held() == NOTHING_LEFT
    assert engine.receive(Refusal) == []


def test_what_is_cached_is_lent_at_once_and_only_what_was_wanted() -> None:
    engine = Engine()
    engine.serve(generate("a", TWELVE, 1))
    engine.send(lend("l", (*TWELVE, 1, 2, 3, 4), first=1))
    start, ready = engine.receive(Starting, Announcement)
    assert isinstance(start, Starting)
    assert start == ("l", 4, 3)
    assert ready == Announcement("l", 1, (1, 2), prints(engine, [1, 2]))
    engine.step()
    (ready,) = engine.receive(Announcement)
    assert (ready.first, len(ready.block_ids)) == (3, 1)
    engine.send(PeerCloses("l"))
    assert engine.held() == NOTHING_LEFT


def test_blocks_before_the_wanted_ones_are_computed_and_not_announced() -> None:
    engine = Engine(budget=StepBudget(64, 6))
    engine.send(lend("l", range(16), first=3))
    assert engine.receive(Starting) == [("l", 4, 3)]
    for _ in range(2):
        engine.step()
        assert engine.receive(Announcement) == []
    engine.step()
    assert engine.receive(Announcement) == [Announcement("l", 3, (3,), prints(engine, [3]))]
    assert engine.held() == (1, 0, 0, 0, 1)


@pytest.mark.parametrize(("first", "end"), [(0, 3), (2, 3), (3, 3), (4, 4)])
def test_a_loan_that_may_not_compute_is_of_what_is_cached(first: int, end: int) -> None:
    engine = Engine()
    engine.serve(generate("a", TWELVE, 1))
    engine.send(lend("l", range(10, 30), first=first, compute=False))
    said = engine.receive(Starting, Announcement)
    assert isinstance(said[0], Starting)
    assert said[0] == ("l", end, end)
    assert [message.first for message in said[1:] if isinstance(message, Announcement)] == [first] * (first < 3)
    assert not engine.step()
    engine.send(PeerCloses("l"))
    assert engine.held() == NOTHING_LEFT


def test_loans_are_refused() -> None:
    engine = Engine(num_blocks=4)
    engine.send(lend("far", TWELVE, first=3), lend("large", range(20)), lend("short", (1, 2, 3)))
    refused = {message.loan_id: message.reason for message in engine.receive(Refusal)}
    assert refused == {
        "far": "first_block: must be below the 3 blocks wanted, not 3",
        "large": "5 blocks in a pool of 4",
        "short": "first_block: must be below the 0 blocks wanted, not 0",
    }
    engine.send(*(lend(f"l{i}", range(i * 20, i * 20 + 12)) for i in range(4)))
    assert engine.receive(Refusal) == [Refusal("l3", "2 loans wait already")]
    engine.send(*(PeerCloses(f"l{i}") for i in range(4)))
    assert engine.held() == NOTHING_LEFT


@pytest.mark.parametrize("started", [True, False])
def test_a_borrower_that_breaks_the_protocol_loses_its_loan(started: bool) -> None:
    engine = Engine(num_blocks=4)
    engine.send(lend("other", range(100, 112)) if not started else Audit(0), lend("l", TWELVE))
    engine.send(PeerReleases("l", 0, 1))
    (refused,) = engine.receive(Refusal)
    assert refused == Refusal("l", "release of blocks [0, 1) that this loan does not hold")
    engine.send(PeerCloses("l"), *([PeerCloses("other")] if not started else []))
    assert engine.held() == NOTHING_LEFT
    assert not engine.step()


def test_a_loan_waits_for_room_and_starts_in_the_step_that_makes_it() -> None:
    """Not in the next one, before which an idle loop sleeps."""
    engine = Engine(num_blocks=4)
    engine.send(generate("a", TEN, 2), lend("l", range(40, 52)))
    assert engine.held() == (0, 3, 0, 1, 1)
    assert engine.receive(Starting) == []
    assert engine.step()
    assert engine.receive(Token, Starting)[0].__class__ is Token
    assert engine.step()
    token, start = engine.receive(Token, Starting)
    assert isinstance(token, Token)
    assert token.finish is FinishReason.LENGTH
    assert isinstance(start, Starting)


def test_waiting_loans_go_by_priority_then_arrival_and_nobody_jumps_the_queue() -> None:
    engine = Engine(num_blocks=4, max_queued_loans=8)
    engine.send(lend("holder", range(12)))
    engine.serve(lend("first", range(20, 32)), lend("small", range(40, 44)), lend("urgent", range(60, 72), priority=1))
    order = []
    for loan_id in ("holder", "urgent", "first"):
        engine.send(PeerCloses(loan_id))
        engine.run()
        order.append([message.loan_id for message in engine.receive(Starting)])
    assert order == [["urgent"], ["first", "small"], []]
    engine.send(PeerCloses("small"))
    assert engine.held() == NOTHING_LEFT


def test_loans_and_requests_take_turns_by_arrival() -> None:
    engine = Engine(num_blocks=16, budget=StepBudget(4, 4))
    engine.send(lend("warm up", (1, 2, 3, 4)), PeerCloses("warm up"))
    engine.send(generate("a", TEN, 1), lend("l", range(40, 44)), generate("b", range(60, 64), 1))
    engine.run()
    assert [type(message).__name__ for message in engine.receive(Token, Announcement)] == [
        "Token",
        "Announcement",
        "Token",
    ]


def test_a_waiting_loan_keeps_its_place_among_the_prompts() -> None:
    engine = Engine(num_blocks=8, budget=StepBudget(4, 4))
    engine.send(generate("big", range(100, 112), 9), lend("l", range(40, 52)))
    for _ in range(5):
        engine.step()
    assert engine.receive(Starting) == []
    engine.send(generate("b", range(60, 64), 1), Cancel("big"))
    engine.run()
    said = engine.receive(Token, Announcement)
    assert [type(message).__name__ for message in said] == ["Announcement"] * 3 + ["Token"]


def test_a_loan_released_head_first_is_evicted_tail_first() -> None:
    engine = Engine(num_blocks=4)
    engine.send(lend("l", range(12)))
    engine.run()
    engine.send(PeerReleases("l", 0, 1), PeerReleases("l", 1, 1), PeerReleases("l", 2, 1), PeerCloses("l"))
    engine.send(generate("a", range(50, 55), 1))  # one free block, and one more
    engine.run()
    engine.receive()
    engine.send(lend("again", range(12), compute=False))
    assert engine.receive(Starting) == [("again", 2, 2)]


def test_a_loan_and_a_request_of_the_same_id_do_not_mix() -> None:
    engine = Engine(num_blocks=16)
    engine.send(generate("x", TEN, 2), lend("x", range(40, 52)))
    engine.run()
    said = engine.receive(Token, Announcement)
    assert tokens_of([message for message in said if isinstance(message, Token)], "x") == undisturbed(TEN, 2)
    engine.send(Cancel("x"))
    assert engine.held() == (3, 0, 0, 0, 1)
    engine.send(PeerCloses("x"))
    assert engine.held() == NOTHING_LEFT


def test_two_loans_of_one_chain_at_once_compute_it_once() -> None:
    engine = Engine(budget=StepBudget(4, 4))
    engine.send(lend("l", TWELVE), lend("m", [*TWELVE[:8], 90, 91, 92, 93]), lend("n", [70, 71, 72, 73]))
    heard: list[tuple[str, int, tuple[int, ...]]] = []
    for _ in range(5):
        engine.step()
        heard += [(ready.loan_id, ready.first, ready.block_ids) for ready in engine.receive(Announcement)]
    # "m" waits while "l" computes what they share, then gets both blocks and its turn, which came before that of "n".
    assert heard == [("l", 0, (0,)), ("l", 1, (1,)), ("m", 0, (0, 1)), ("l", 2, (2,)), ("m", 2, (3,)), ("n", 0, (4,))]
    assert not engine.step()


def test_a_loan_whose_sibling_goes_away_computes_itself() -> None:
    engine = Engine(budget=StepBudget(4, 4))
    engine.send(lend("l", TWELVE), lend("m", TWELVE))
    engine.step()
    engine.send(PeerCloses("l"))
    engine.receive(Announcement)
    engine.run()
    blocks = [block for ready in engine.receive(Announcement) for block in ready.block_ids]
    assert len(set(blocks)) == 3
    engine.send(PeerCloses("m"))
    assert engine.held() == NOTHING_LEFT


def test_a_loan_and_a_request_of_one_chain_at_once() -> None:
    """Both compute; the later one's blocks stay private, are lent all the same, and are free afterwards."""
    engine = Engine(budget=StepBudget(64, 64))
    engine.send(generate("r", [*TWELVE, 5], max_tokens=1), lend("l", TWELVE))
    engine.step()
    (ready,) = engine.receive(Announcement)
    assert ready.block_ids == (4, 5, 6)
    engine.send(PeerCloses("l"))
    assert engine.held() == NOTHING_LEFT
    assert engine.core.kv_cache.pool.match(block_keys(root_key(engine.ready.model_fingerprint, ""), TWELVE, 4)) == [
        0,
        1,
        2,
    ]
