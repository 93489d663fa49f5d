"""Engines that share a store of KV blocks: eight or nine blocks of four tokens; what a store does happens on demand."""

import pytest

from engine.core_types import SamplingParams, StepBudget
from engine.messages.from_engine import CacheChanged, Token
from engine.messages.to_engine import Generate
from kvcache.pool import Removed, Stored
from loans.account import KvAccount
from support.checked_core import Announcement, PeerLoans, Starting, ToPeer
from support.core_engine import generate, lend
from support.hand_network import NOBODY
from support.memory_objects import MemoryObjects
from support.sim_model import undisturbed
from support.trial_node import Node

WIDE = StepBudget(64, 64)
PROMPT = tuple(range(10, 27))
"""Four full blocks and a token."""


class Site:
    """One writes blocks at once, the other when it evicts them; both read a place that a test may damage."""

    def __init__(self, reads_at_once: int = 2) -> None:
        self.now = 100.0
        self.objects = MemoryObjects(reads_at_once)
        self.network: dict = {}
        self.at_once, self.lazy = (
            Node(self.network, f"node-{blocks}", blocks, WIDE, clock=lambda: self.now, objects=self.objects)
            for blocks in (8, 9)
        )

    def run(self, node: Node) -> None:
        """Everything that the node and its store can do now."""
        (store,) = node.stores
        moved = True
        while moved:
            moved = store.step()
            node.receive()
            moved |= node.core.step() or store.is_busy
            node.check()

    def serve(self, node: Node, prompt: tuple[int, ...] = PROMPT, name: str = "r") -> KvAccount:
        """Serve a request whose tokens are right; return its account."""
        node.said.clear()
        node.send(Generate(name, prompt, (), SamplingParams(2), "", 0, lender=None))
        self.run(node)
        tokens = [message for message in node.said if isinstance(message, Token)]
        assert [token.token_id for token in tokens] == undisturbed(prompt, 2)
        node.check_at_rest()
        assert tokens[0].account is not None
        return tokens[0].account


def events(node: Node) -> list[object]:
    return [event for message in node.said if isinstance(message, CacheChanged) for event in message.events]


def test_blocks_written_at_once_are_fetched_by_another_engine() -> None:
    site = Site()
    assert site.serve(site.at_once).store_blocks == 0
    assert len(site.objects.stored) == 4
    shared = [event for event in events(site.at_once) if event.shared]
    assert [len(event.keys) for event in shared] == [1, 1, 1, 1]
    assert isinstance(shared[0], Stored)
    account = site.serve(site.lazy)
    assert (account.store_blocks, account.computed_blocks, account.computed_tokens) == (4, 1, 1)
    assert account.store_failure == ""
    assert len([event for event in events(site.lazy) if not event.shared]) >= 1, "its own cache has them too"


def test_blocks_are_written_when_they_are_evicted() -> None:
    site = Site()
    site.serve(site.lazy)
    assert not site.objects.stored
    site.serve(site.lazy, tuple(range(40, 69)))
    assert site.objects.stored
    account = site.serve(site.at_once)
    assert (account.store_blocks, account.computed_blocks) == (4, 1), "evicted tails are stored with their heads"


def test_a_prompt_that_the_store_lacks_is_a_miss_and_no_failure() -> None:
    site = Site()
    account = site.serve(site.lazy)
    assert (account.store_blocks, account.store_failure) == (0, "")


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("how", ["missing", "header", "payload"])
def test_a_spoiled_block_ends_the_loan_there_and_is_computed(place: int, how: str) -> None:
    site = Site()
    site.serve(site.at_once)
    name, stored = list(site.objects.stored.items())[place]
    at = 0 if how == "header" else len(stored) - 1
    site.objects.stored[name] = stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]
    if how == "missing":
        site.objects.stored[name] = stored[:10]  # found, and not read
    account = site.serve(site.lazy)
    assert account.store_blocks == place
    assert account.store_failure
    assert account.mismatched_blocks == (how == "payload")
    if how == "payload":
        assert name not in site.objects.stored
    assert [event for event in events(site.lazy) if isinstance(event, Removed) and event.shared]
    assert site.serve(site.lazy, name="again").reused_blocks == 4


def test_a_store_that_hangs_is_given_up_and_avoided() -> None:
    site = Site()
    site.serve(site.at_once)
    node = site.lazy
    node.said.clear()
    node.send(Generate("r", PROMPT, (), SamplingParams(2), "", 0, lender=None))
    assert not node.core.step(), "it waits for the store"
    site.now += 1.5
    node.core.report()
    assert node.core.step()
    site.run(node)
    token = next(message for message in node.said if isinstance(message, Token))
    assert "silent for 1.5 s" in token.account.store_failure
    assert not node.stores[0].answers
    assert site.serve(node, (*range(40, 50),)).store_failure == ""
    node.check_at_rest()


def test_a_lender_fetches_before_it_computes() -> None:
    site = Site()
    site.serve(site.at_once)
    node = site.lazy
    node.said.clear()
    said: list[ToPeer] = []
    PeerLoans(said).send(node.core, lend("loan", (*PROMPT[:16], 1, 2, 3, 4)))
    site.run(node)
    assert said[0] == Starting("loan", 5, 0)
    announced = [message for message in said if isinstance(message, Announcement)]
    assert [(message.first, len(message.block_ids), message.fetched) for message in announced] == [
        (0, 2, True),
        (2, 2, True),
        (4, 1, False),
    ]


def test_a_request_with_a_lender_leaves_the_store_to_it() -> None:
    site = Site()
    site.serve(site.at_once)
    site.lazy.send(generate("r", PROMPT, lender=NOBODY))
    assert not site.lazy.stores[0].is_busy


def test_blocks_without_memory_are_dropped_and_written_later() -> None:
    site = Site()
    site.at_once.stores[0].max_rows = 3
    site.serve(site.at_once)
    assert site.at_once.stores[0].counts.dropped == 1
    site.now += 1.0
    site.at_once.core.report()
    site.run(site.at_once)
    assert len(site.objects.stored) == 4, "the oldest blocks are written before they are evicted"
