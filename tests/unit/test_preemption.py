"""Engines whose pools are too small for what they admit. Blocks of four tokens; every book checked at every step."""

from engine.core.running_set import admits, next_victim, oldest_of, restart_order
from engine.core_types import EngineSequence as Tokens
from engine.core_types import SamplingParams, StepBudget
from engine.messages.from_engine import LoadReport, Rejected
from engine.messages.to_engine import Cancel
from loans.network import Lender
from support.checked_core import Announcement, PeerCloses, Refusal, Starting
from support.core_engine import lend
from support.crowded_engine import Engine, tokens
from support.hand_network import NOBODY

# ------------------------------------------------------------------------------------------------ rules


def waiting(name: str, arrival: int, priority: int = 0) -> Tokens:
    return Tokens(name, [1], 1, b"", priority, arrival, sampling=SamplingParams(1))


def test_victims_are_of_the_lowest_priority_and_then_the_youngest_but_never_the_oldest() -> None:
    a, b, c, d = waiting("a", 1, -1), waiting("b", 2), waiting("c", 3), waiting("d", 4, 1)
    oldest = oldest_of([c, a, d, b])
    assert oldest is a
    running, victims = [d, b, a, c], []
    while (victim := next_victim(running, oldest)) is not None:
        running.remove(victim)
        victims.append(victim)
    assert victims == [c, b, d]
    assert oldest_of([]) is None


def test_restarts_go_by_priority_and_arrival_behind_the_oldest() -> None:
    a, b, c, d = waiting("a", 1, -1), waiting("b", 2), waiting("c", 3), waiting("d", 4, 1)
    assert restart_order([d, c, b, a], a) == [a, d, b, c]
    assert restart_order([d, c, b], a) == [d, b, c]


def test_only_what_is_more_urgent_than_all_that_wait_is_admitted_before_them() -> None:
    a, b = waiting("a", 1, 0), waiting("b", 2, 1)
    assert admits(0, [], a)
    assert [admits(priority, [b], a) for priority in (0, 1, 2)] == [False, False, True]
    assert not admits(9, [b, a], a), "the oldest waits for nobody new"


# ---------------------------------------------------------------------------------------------- examples


def crowded() -> Engine:
    """Six blocks, and two requests of which the younger has to wait."""
    engine = Engine(num_blocks=6)
    engine.ask("a", tokens(10, 7), 16)
    engine.ask("b", tokens(50, 7), 16)
    return engine


def test_a_request_is_promised_its_prompt_and_some_output_and_takes_the_rest_as_it_goes() -> None:
    engine = Engine(reserve=3)
    engine.ask("a", tokens(10, 10), 20)
    assert engine.block_counts() == (0, 4, 0, 1, 0)
    engine.run(7)
    assert engine.block_counts() == (4, 0, 0, 1, 0)
    engine.step()
    assert engine.block_counts() == (5, 0, 0, 1, 0)
    engine.finish()
    (account,) = engine.streams["a"].accounts
    assert (account.preemptions, account.recomputed_tokens) == (0, 0)


def test_what_could_never_fit_is_rejected_though_its_promise_would() -> None:
    engine = Engine()
    assert not engine.ask("a", tokens(0, 10), 23)
    assert engine.rejected == [Rejected("a", "prompt + max_tokens need 9 KV blocks, the pool has 8", permanent=True)]
    assert engine.ask("a", tokens(0, 10), 22)
    assert not engine.ask("b", tokens(50, 20), 2)
    assert engine.rejected[1:] == [Rejected("b", "6 KV blocks needed, 5 available now", permanent=False)]


def test_the_younger_gives_its_blocks_back_and_goes_on_where_it_was() -> None:
    engine = Engine(num_blocks=6)
    engine.ask("a", tokens(10, 7), 12)
    engine.ask("b", tokens(50, 7), 16)
    engine.run(6)
    assert engine.block_counts() == (6, 0, 0, 2, 0)
    engine.run(4)
    assert engine.preempted() == ["b"]
    engine.finish()
    assert len(engine.streams["a"].accounts) == 1
    first, again = engine.streams["b"].accounts
    assert again is first
    assert again.preemptions == 1
    assert again.recomputed_tokens == 12 - 4, "the head of its chain was still cached when it came back"
    assert again.computed_tokens == 7, "the prompt; what was computed again is counted by itself"
    times = again.times
    assert times["admitted"] <= times["compute_started"] <= times["first_token"]


def test_load_tells_of_preemptions_and_that_nothing_is_available() -> None:
    engine = crowded()
    engine.run(10)
    engine.core.report()
    engine.check()
    load = engine.receive(LoadReport)[-1]
    assert (load.running, load.preempted, load.preemptions, load.available_blocks) == (2, 1, 1, 0)
    assert load.queued_prefill_tokens == len(engine.streams["b"].tokens) + 7
    engine.run()
    engine.core.report()
    engine.check()
    load = engine.receive(LoadReport)[-1]
    assert (load.running, load.preempted, load.preemptions, load.available_blocks) == (0, 0, 1, 6)


def test_while_one_waits_only_what_is_more_urgent_is_admitted() -> None:
    engine = Engine(num_blocks=7)
    engine.ask("a", tokens(10, 7), 20)
    engine.ask("b", tokens(50, 15), 12)
    engine.run(8)
    assert engine.preempted() == ["b"]
    assert not engine.ask("c", tokens(90, 3), 1)
    assert not engine.ask("d", tokens(90, 3), 1, priority=-1)
    assert [(r.request_id, r.permanent) for r in engine.rejected] == [("c", False), ("d", False)]
    assert engine.rejected[0].reason == "1 KV blocks needed, 3 available now, 1 preempted requests wait for some"
    assert engine.ask("e", tokens(90, 3), 1, priority=1)
    engine.finish()


def test_when_it_is_the_oldest_it_comes_back_at_the_cost_of_others() -> None:
    engine = Engine(num_blocks=7)
    engine.ask("old", tokens(10, 7), 9)
    engine.ask("low", tokens(50, 11), 16, priority=-1)
    engine.run(7)
    assert engine.preempted() == ["low"]
    assert engine.ask("high", tokens(90, 11), 16, priority=1)
    engine.run(2)
    assert engine.streams["old"].over
    engine.run(1)
    assert engine.preempted() == ["high"]
    assert not engine.ask("same", tokens(130, 3), 1, priority=1)
    engine.finish()


def test_running_sequences_beyond_the_budget_take_turns_whatever_their_priorities() -> None:
    engine = Engine(num_blocks=20, budget=StepBudget(2, 2))
    for priority in (1, 2, 0):
        engine.ask(f"p{priority}", (priority,), 30, priority)
    engine.run(6)
    counts = []
    for _ in range(3):
        before = {name: len(stream.tokens) for name, stream in engine.streams.items()}
        engine.run(6)
        counts.append({name: len(stream.tokens) - before[name] for name, stream in engine.streams.items()})
    assert counts == [{"p0": 3, "p1": 3, "p2": 6}] * 3
    engine.finish()


def test_who_comes_later_waits_behind_who_waits_already() -> None:
    engine = Engine(num_blocks=20, budget=StepBudget(1, 1))
    engine.ask("low", (1,), 10, priority=-1)
    engine.step()
    for number in range(9):
        engine.ask(str(number), (2,), 1, priority=1)
        engine.step()
    assert engine.served == ["low", "low", "0", "low", "1", "2", "low", "3", "4", "5"]
    engine.finish()


def test_the_step_that_gives_blocks_back_restarts_who_waits_for_them() -> None:
    """Else the loop would sleep."""
    engine = crowded()
    engine.run(15)
    assert engine.preempted() == ["b"]
    engine.step()
    assert engine.streams["a"].over
    assert engine.core.busy
    engine.finish()


# ------------------------------------------------------------------------------------------------- loans


def test_lent_blocks_are_never_taken_and_the_oldest_waits_for_them() -> None:
    engine = Engine(num_blocks=6, bounded=False)
    engine.send(lend("l", tokens(100, 12)))
    engine.ask("a", tokens(10, 7), 16)
    engine.run()
    assert engine.block_counts() == (6, 0, 0, 1, 1)
    assert len(engine.streams["a"].tokens) == 6, "twelve computed, and one that has no slot"
    assert not engine.core.busy, "nothing to do until somebody gives back"
    assert not engine.ask("b", tokens(50, 1), 1, priority=9)
    engine.send(lend("m", tokens(200, 4), priority=9))
    assert [refused.loan_id for refused in engine.receive(Refusal)] == ["m"]
    engine.send(PeerCloses("l"))
    engine.finish()
    assert engine.streams["a"].accounts[0].preemptions == 0


def test_a_loan_that_would_have_to_wait_behind_a_preempted_request_is_refused() -> None:
    engine = crowded()
    engine.run(6)
    engine.send(lend("waits", tokens(100, 8)))
    assert engine.receive(Refusal, Starting) == []
    engine.run(4)
    assert engine.preempted() == ["b"]
    assert [refused.loan_id for refused in engine.receive(Refusal, Starting)] == ["waits"]
    engine.send(lend("now", tokens(100, 4)))
    assert [refused.loan_id for refused in engine.receive(Refusal)] == ["now"]
    engine.finish()


def test_who_is_borrowing_is_never_a_victim() -> None:
    engine = Engine(num_blocks=6, bounded=False)
    engine.ask("a", tokens(10, 7), 16)
    engine.ask("b", tokens(50, 9), 4, priority=-1, lender=Lender(NOBODY))
    want = engine.network.taken[-1].want
    assert (want.first_block, len(want.keys)) == (0, 2)
    engine.run()
    assert engine.preempted() == []
    assert engine.block_counts() == (3, 3, 0, 2, 0)
    engine.network.taken[-1].takes.ended("refused")
    engine.check()
    assert engine.step()
    assert engine.preempted() == ["b"], "now it runs, and a is the oldest"
    engine.finish()


def test_a_cancel_of_the_one_that_waits_for_lent_blocks_lets_others_in() -> None:
    engine = Engine(num_blocks=6, bounded=False)
    engine.send(lend("l", tokens(100, 12)))
    engine.ask("a", tokens(10, 7), 16)
    engine.run()
    assert not engine.ask("b", tokens(50, 1), 1)
    engine.send(Cancel("a"))
    assert engine.ask("c", tokens(50, 1), 1)
    engine.run()
    engine.send(PeerCloses("l"))
    engine.check_finished()


def test_nobody_is_preempted_in_vain_for_the_oldest() -> None:
    """It needs five of seven blocks, and three are of one that is borrowing."""
    engine = Engine(num_blocks=7, bounded=False)
    engine.ask("old", tokens(10, 7), 9)
    engine.ask("low", tokens(50, 11), 16, priority=-1)
    engine.run(7)
    assert engine.preempted() == ["low"]
    assert engine.ask("high", tokens(90, 11), 16, priority=1, lender=Lender(NOBODY))
    engine.run()
    assert engine.streams["old"].over
    assert engine.preempted() == ["low"]
    assert not engine.core.busy
    engine.network.taken[-1].takes.ended("refused")
    engine.check()
    engine.step()
    assert engine.preempted() == ["high"]
    engine.finish()


def test_what_a_preempted_request_computed_is_lent_from_the_cache() -> None:
    engine = Engine(num_blocks=8)
    engine.ask("a", tokens(10, 7), 24)
    engine.ask("b", tokens(50, 12), 8)
    engine.run(11)
    assert engine.preempted() == ["b"]
    engine.finish()
    engine.send(lend("l", tokens(50, 12)))
    engine.run()
    assert sum(len(ready.block_ids) for ready in engine.receive(Announcement)) == 3
    engine.send(PeerCloses("l"))
