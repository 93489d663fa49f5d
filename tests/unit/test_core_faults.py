"""Whole engines in one thread, under every fault we could think of, in an order drawn from a seed.

TANDEM_TRIALS=n runs n seeds instead of a few hundred.
"""

import os
import random

import pytest

from engine.core_types import StepBudget
from engine.messages.from_engine import FromEngine, Rejected, Token
from engine.messages.to_engine import Cancel
from kvtransfer.transport import Pool
from support.core_engine import generate
from support.hand_network import HandNetwork
from support.sim_model import LAYOUT, WIDTH, undisturbed
from support.trial_cells import empty_cells, table
from support.trial_cluster import Cluster
from support.trial_node import Node
from support.trials import run_many_trials, run_trials

TRIALS = int(os.environ.get("TANDEM_TRIALS", "300"))
MANY = 5000
"""So many trials run on all cores, and every fault meets every state that it can."""

# ----------------------------------------------------------------------------------- one silent lender

PROMPT = tuple(range(14))
"""Three whole blocks and a tail."""


class Silence:
    """A borrower that wants three blocks of PROMPT, the first of them posted, when its lender falls silent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_blocks: int = 8) -> None:
        self.now = 100.0
        monkeypatch.setattr("kvtransfer.transport.MAX_POSTED_BYTES", LAYOUT.block_bytes)
        network, engines = dict[bytes, Pool](), dict[bytes, HandNetwork]()
        self._network = network
        budget = StepBudget(64, 64)
        self.node = Node(
            network, "borrower", num_blocks, budget, read_silence_s=5.0, clock=lambda: self.now, engines=engines
        )
        self.node.send(generate("warm", range(100, 100 + num_blocks * WIDTH - 1), 1))  # fills the pool
        self.node.core.step()
        self.node.said.clear()
        self._lender = Node(network, "lender", 8, budget, engines=engines)
        self.transport = self.node.transport
        self.borrow("r")
        self.transport.post("lender")

    def borrow(self, request_id: str) -> None:
        """Its lender has announced all that it wants."""
        self.node.send(generate(request_id, PROMPT, 2, lender=self._lender.network.peer))
        self.stream = self.node.network.taken[-1]
        self.stream.carry()
        self._lender.receive()
        self._lender.core.step()
        self.stream.carry()
        self.node.receive()

    def loan_fails(self) -> None:
        """Before anything else is handled that has arrived."""
        self.stream.takes.ended("silent")

    def closed(self) -> list[str]:
        """For whom loans were closed."""
        return [stream.borrower_id for stream in self.node.network.taken if stream.closed]

    def lender_dies(self) -> None:
        del self._network[self._lender.endpoint]

    def look_at(self, now: float) -> None:
        """The loop turns at that time."""
        self.now = now
        self.node.core.report()

    def block_counts(self) -> tuple[int, int, int]:
        """Blocks held, reserved and quarantined."""
        self.node.check()
        audited = self.node.core.audit()
        return audited.held_blocks, audited.reserved_blocks, audited.quarantined_blocks

    def finish_the_read(self) -> None:
        self.transport.land("lender")
        self.node.core.handle_posted()

    def said(self, kind: type) -> list[FromEngine]:
        return [message for message in self.node.said if isinstance(message, kind)]


def test_a_silent_lender_keeps_one_window_and_the_request_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = Silence(monkeypatch)
    assert silence.block_counts() == (3, 1, 0)
    silence.loan_fails()
    assert silence.block_counts() == (3, 1, 1), "one block for another; the reads behind it were withdrawn"
    rng = random.Random(1)
    while silence.node.core.step():
        silence.transport.scribble("lender", rng)
        silence.node.check()
        silence.node.check_contents()
    assert [message.token_id for message in silence.node.said if isinstance(message, Token)] == undisturbed(PROMPT, 2)
    assert silence.block_counts() == (0, 0, 1)
    silence.finish_the_read()
    assert silence.block_counts() == (0, 0, 0)
    assert silence.transport.busy() == ["lender"]
    silence.transport.post("lender")
    assert silence.transport.posted == {}, "nothing is read any more"


def test_a_lender_that_turns_while_its_bytes_do_not_come_is_given_up_as_a_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silence = Silence(monkeypatch, num_blocks=12)
    silence.look_at(104.9)
    assert silence.closed() == []
    silence.look_at(105.2)
    assert silence.closed() == ["r"]
    assert silence.block_counts() == (3, 1, 1)
    silence.node.send(Cancel("r"))
    silence.borrow("s")  # its reads wait behind the one that hangs
    silence.look_at(105.5)
    assert silence.closed() == ["r", "s"]
    silence.node.send(Cancel("s"))
    assert silence.block_counts() == (0, 0, 1)
    silence.finish_the_read()
    assert silence.block_counts() == (0, 0, 0)
    silence.borrow("t")
    silence.transport.post("lender")
    for now in range(106, 120, 4):
        silence.look_at(now)
        silence.finish_the_read()
        if silence.transport.busy():
            silence.transport.post("lender")
        else:
            break
    while silence.node.core.step():
        pass
    account = next(message.account for message in silence.node.said if isinstance(message, Token))
    assert (account.moved_blocks, account.loan_failure) == (3, "")


def test_when_the_lender_has_gone_the_receipt_still_says_over_what_the_blocks_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loans.borrower_manager.BLOCK_READ_BYTES", LAYOUT.block_bytes)
    silence = Silence(monkeypatch)
    silence.finish_the_read()
    silence.transport.post("lender")
    silence.lender_dies()
    silence.finish_the_read()
    while silence.node.core.step():
        silence.node.check()
    account = next(message.account for message in silence.node.said if isinstance(message, Token))
    assert (account.moved_blocks, account.lanes, account.loan_failure) == (1, ("slow/memory",), "the read failed")


def test_a_cancel_leaves_one_window_behind_and_evicts_nothing_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = Silence(monkeypatch, num_blocks=5)
    named = dict(silence.node.core.kv_cache.pool.name_of)
    assert len(named) == 2
    silence.node.send(Cancel("r"))
    assert silence.block_counts() == (0, 0, 1)
    assert silence.node.core.kv_cache.pool.name_of == named
    silence.finish_the_read()
    assert silence.block_counts() == (0, 0, 0)


def test_a_request_that_lost_blocks_and_finds_no_others_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = Silence(monkeypatch, num_blocks=4)
    silence.loan_fails()
    (rejected,) = silence.said(Rejected)
    assert (type(rejected), rejected.request_id, rejected.permanent) == (Rejected, "r", False)
    assert silence.closed() == ["r"]
    assert silence.block_counts() == (0, 0, 1)
    assert not silence.node.core.step()
    silence.finish_the_read()
    assert silence.block_counts() == (0, 0, 0)


@pytest.mark.parametrize("how", ["land", "fail"])
def test_a_read_that_ends_before_the_loan_fails_leaves_nothing_behind(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = Silence(monkeypatch, num_blocks=4)
    silence.transport.land("lender") if how == "land" else silence.transport.fail("lender")
    silence.loan_fails()
    while silence.node.core.step():
        silence.node.check()
    assert [message.token_id for message in silence.node.said if isinstance(message, Token)] == undisturbed(PROMPT, 2)
    assert silence.block_counts() == (0, 0, 0)


def test_a_loan_that_fails_before_its_landed_read_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is handled first though the read is quiet already: no quarantine, and its notice is ignored."""
    silence = Silence(monkeypatch, num_blocks=4)
    silence.transport.land("lender")
    silence.loan_fails()
    silence.node.core.handle_posted()
    assert silence.block_counts() == (3, 1, 0)
    assert silence.said(Rejected) == []


# ---------------------------------------------------------------------------------------------- trials


@pytest.mark.timeout(0 if "TANDEM_TRIALS" in os.environ else 900)
def test_any_schedule_of_faults(capsys: pytest.CaptureFixture[str]) -> None:
    seen, cells = run_trials(range(TRIALS)) if TRIALS < MANY else run_many_trials(TRIALS)
    if TRIALS >= 100:  # the trials reach what they are for
        for what, at_least in REACHED.items():
            assert seen[what] >= at_least * TRIALS // 100, f"{what}: {seen[what]}"
    if TRIALS >= MANY:
        with capsys.disabled():
            print(f"\n{TRIALS} trials\n{table(cells)}\n{dict(sorted(seen.items()))}")
        assert empty_cells(cells) == []


REACHED = {
    "done": 500,
    "cancelled": 50,
    "rejected": 50,
    "killed": 80,
    "broken": 100,
    "refused": 1,
    "moved": 200,
    "reused": 200,
    "mismatched": 8,
    "stuck": 3,
    "quarantined": 300,
    "lost blocks": 3,
    "preempted": 30,
    "parted": 50,
    "double": 5,
    "reorder": 5,
    "lent on": 5,
    "released": 100,
    "restored": 1,
    "local store damaged": 30,
    "from the store": 10,
    "pinned": 100,
    "store failed": 2,
    "store damaged": 30,
    "stopped": 50,
    "woken": 50,
    "given away": 3,
    "exhausted": 30,
    "hedged": 30,
    "hedged and reading": 5,
    "expired": 30,
    "withdrawn before verified": 3,
}
"""How often each must happen in 100 trials, at the least, for the trials to mean anything."""


def test_engines_never_wait_for_each_other_for_good() -> None:
    """Without faults no deadline is needed, however full the pools are."""
    refused, preempted = 0, 0
    for seed in range(60):
        cluster = Cluster(seed, num_nodes=2, faults=False, crowded=True, reserve=(256, 1)[seed % 2])
        cluster.run(num_requests=6, num_moves=60)
        assert cluster.seen["relieved"] == 0, f"seed {seed}"
        refused += cluster.seen["refused"]
        preempted += cluster.seen["preempted"]
    assert refused > 0
    assert preempted > 0


def test_without_faults_every_request_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transport.MAX_POSTED_BYTES", 2 * LAYOUT.block_bytes)
    for seed in range(20):
        cluster = Cluster(seed, faults=False, reserve=(256, 1)[seed % 2])
        cluster.run(num_requests=10, num_moves=150)
        assert cluster.seen["mismatched"] == cluster.seen["relieved"] == 0
        assert cluster.seen["done"] + cluster.seen["rejected"] == 10
