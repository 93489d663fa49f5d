"""Two engines, with every message carried by hand. Eight blocks of four tokens; exact values."""

from collections.abc import Callable

import pytest

from engine.backends.sim.runner import SimRunner
from engine.core.engine_core import EngineCore
from engine.core.loan_host import EngineLimits
from engine.core_types import StepBudget
from engine.messages.from_engine import FromEngine, KvUse, LoadReport, TierUse, Token
from kvcache.kv_stats import KvStats
from kvcache.store.kv_store import ObjectFormat
from kvtransfer.local import LocalNetwork, LocalTransport
from loans.account import KvAccount
from loans.network import Blocks, Started
from support.checked_core import NOTHING_LEFT, Announcement, LandingCore, Starting, held, of_kinds, spread
from support.core_engine import TEN, TWELVE, WIDE, Engine, account_of, generate, lend, prints
from support.core_pair import Pair, moved
from support.hand_network import NOBODY
from support.memory_objects import MemoryObjects, StepStore
from support.sim_model import LAYOUT, VOCAB


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("lender_budget", [WIDE, StepBudget(5, 5)])
def test_a_loan_brings_all_but_the_tail(eager: bool, lender_budget: StepBudget) -> None:
    pair = Pair(eager, lender_budget)
    pair.submit("r", (*TWELVE, 1, 2))
    assert pair.borrower.held() == (0, 4, 0, 1, 0)
    account = pair.served("r")
    assert moved(account) == (0, 3, 1, 2, 0)
    assert account.moved_bytes == 3 * LAYOUT.block_bytes
    assert (account.lender_cached_blocks, account.lender_computed_blocks) == (0, 3)
    assert (account.transport, account.lanes, account.loan_failure) == ("local", ("local/memory",), "")


def test_only_what_is_missing_is_borrowed_and_what_was_borrowed_is_lent_on() -> None:
    pair = Pair()
    pair.borrower.serve(generate("warm", TEN, 1))
    pair.lender.serve(generate("warm", TWELVE, 1))
    pair.submit("r", (*TWELVE, 1, 2, 3, 4, 5))
    want = pair.borrower.taken("r").want
    assert (want.first_block, len(want.keys), want.may_compute) == (2, 4, True)
    account = pair.served("r")
    assert moved(account) == (2, 2, 1, 1, 0)
    assert (account.lender_cached_blocks, account.lender_computed_blocks) == (1, 1)
    pair.borrower.send(lend("on", (*TWELVE, 1, 2, 3, 4), compute=False))
    start, ready = pair.borrower.receive(Starting, Announcement)
    assert start == Starting("on", 4, 4)
    assert (type(ready), ready.fingerprints) == (Announcement, prints(pair.borrower, ready.block_ids))


def test_nothing_is_borrowed_when_all_that_could_be_is_here() -> None:
    engine = Engine()
    engine.send(generate("a", TEN, 1), generate("short", (1, 2, 3, 4), 1, lender=NOBODY))
    engine.run()
    engine.send(generate("b", TEN, 1, lender=NOBODY))
    engine.run()
    assert engine.network.taken == []
    assert engine.held() == NOTHING_LEFT


def test_a_lender_that_has_a_part() -> None:
    pair = Pair(may_compute=False)
    pair.lender.serve(generate("warm", TEN, 1))
    pair.submit("r", (*TWELVE, 1, 2))
    account = pair.served("r")
    assert moved(account) == (0, 2, 2, 6, 0)
    assert account.loan_failure == ""


def test_a_lender_that_has_nothing() -> None:
    pair = Pair(may_compute=False)
    pair.submit("r", TEN)
    account = pair.served("r")
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
    account = pair.served("r")
    assert moved(account) == (0, wrong, 4 - wrong, 14 - 4 * wrong, 1)
    assert account.loan_failure == f"block {wrong} arrived corrupted"


@pytest.mark.parametrize(
    ("endpoint", "blocks", "failure"),
    [
        pytest.param(b"elsewhere", [], "the endpoint is not one of the local transport", id="another transport"),
        pytest.param(None, [Blocks(0, (7, 8), bytes(32))], "the read failed", id="outside the lender's pool"),
        *(
            pytest.param(None, [Blocks(0, (0, 1), bytes(count))], None, id=f"{count} bytes of fingerprints")
            for count in (0, 16, 31, 33, 48, 32)
        ),
    ],
)
def test_what_a_lender_says_wrong_fails_the_loan_only(
    endpoint: bytes | None, blocks: list[Blocks], failure: str | None
) -> None:
    pair = Pair()
    pair.submit("r", TEN)
    stream = pair.borrower.taken("r")
    stream.own_endpoint = endpoint or stream.own_endpoint
    pair.borrower.lent("r", Started(2, 0, 0.0), *blocks)
    account = pair.served("r")
    assert account.moved_blocks == 0
    assert failure is None or account.loan_failure == failure


def _uses(engine: LandingCore) -> list[KvUse | None]:
    return [load.kv for load in engine.receive(LoadReport)]


def test_what_was_found_where_is_counted_and_said_once() -> None:
    pair = Pair()
    engine = pair.borrower
    engine.send(generate("warm", TEN, 1))
    engine.run()
    pair.submit("r", (*TWELVE, 1, 2))
    pair.run()
    pair.check_served("r")
    engine.send(generate("again", TEN, 1))
    engine.run()
    *_, last = filter(None, _uses(engine))
    # Of 2 + 3 + 2 blocks that may come from elsewhere 0 + 2 + 2 were here, and one came; of the pool's, 3 are named.
    pool, remote = TierUse("pool", 8, 3, 7, 4), TierUse("remote", 0, 0, 1, 1)
    assert (last.tiers, last.read_bytes, last.mismatched) == ((pool, remote), LAYOUT.block_bytes, 0)
    engine.core.report()
    assert _uses(engine) == [None], "it is no news"


def test_time_in_which_several_reads_are_under_way_counts_once() -> None:
    counts = KvStats()
    counts.reads_begin(2, 10.0)
    counts.reads_begin(1, 11.0)
    assert counts.read_s(11.5) == 1.5
    for now in (12.0, 12.0, 13.0):
        counts.read_ends(now)
    assert counts.read_s(20.0) == 3.0
    counts.reads_begin(1, 30.0)
    counts.read_ends(30.5)
    assert counts.read_s(31.0) == 3.5


def local_store_of(runner: SimRunner, clock: Callable[[], float]) -> StepStore:
    fingerprint = LAYOUT.fingerprint(runner.info.weights_fingerprint)
    object_format = ObjectFormat(LAYOUT.block_bytes, LAYOUT.kv_heads, fingerprint)
    return StepStore(MemoryObjects(max_objects=8), object_format, clock, is_local=True)


def test_what_the_local_store_had_is_counted() -> None:
    runner = SimRunner(LAYOUT, 4, VOCAB)
    store = local_store_of(runner, lambda: 100.0)
    said: list[FromEngine] = []
    limits = EngineLimits(WIDE, report_interval_s=0.0, min_report_interval_s=0.0)
    core = EngineCore(runner, LocalTransport(LocalNetwork(), "one"), limits, said.append, stores=[store])
    core.start()
    others = range(500, 514)
    for name, prompt in (("first", (*TWELVE, 1, 2)), ("evicts", others), ("again", (*TWELVE, 1, 2))):
        core.handle(generate(name, tuple(prompt), 1))
        while core.step() or store.step() or store.is_busy:
            core.handle_posted()
    *_, last = (message.kv for message in said if isinstance(message, LoadReport) and message.kv is not None)
    found = {each.tier: each[1:] for each in last.tiers}
    assert found["pool"] == (4, 3, 9, 0)
    assert found["host"] == (8, 6, 9, 3), "the last request's chain came back; the pool and the first two had nothing"
    assert (found["remote"], last.read_bytes) == ((0, 0, 0, 0), 0)


def test_a_local_store_that_does_not_answer_is_given_up() -> None:
    """A disk that hangs: what it holds is computed instead, now and while it hangs, and is brought back when it does
    not any more."""
    runner = SimRunner(LAYOUT, 4, VOCAB)
    said: list[FromEngine] = []
    now = 100.0
    store = local_store_of(runner, lambda: now)
    limits = EngineLimits(WIDE, report_interval_s=0.0, min_report_interval_s=0.0, read_silence_s=5.0)
    transport = LocalTransport(LocalNetwork(), "one")
    core = EngineCore(runner, transport, limits, said.append, stores=[store], clock=lambda: now)
    core.start()
    prompt, others = (*TWELVE, 1, 2), tuple(range(500, 514))

    def ask(name: str, prompt: tuple[int, ...], *, answers: bool = True) -> KvAccount:
        """Where its KV came from. Unless the store answers, time passes."""
        nonlocal now
        core.handle(generate(name, prompt, 1))
        for _ in range(8):
            while core.step() or (answers and (store.step() or store.is_busy)):
                core.handle_posted()
            now += 0 if answers else 1
            core.report()
            core.handle_posted()
            assert core.audit().fault == ""
        tokens = of_kinds((each for message in said for each in spread(message)), Token)
        return account_of([token for token in tokens if token.request_id == name])

    ask("first", prompt)
    ask("evicts", others)
    account = ask("hangs", prompt, answers=False)
    assert (account.restored_blocks, account.computed_blocks) == (0, 4)
    assert account.restore_failure.startswith("the local store was silent for")
    assert account.loan_failure == ""
    assert held(core) == NOTHING_LEFT
    ask("evicts again", others)
    assert ask("answers", prompt).restored_blocks > 0
