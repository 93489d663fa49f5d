"""Engines of several ranks with stores below their pools; eight blocks of four tokens, two KV heads.

A token is a hash of all heads of the KV, so it is right only if every rank has its part of every block.
"""

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages.from_engine import Rejected, Token
from engine.messages.to_engine import Cancel, Generate
from kvtransfer.local import LocalNetwork, LocalTransport
from loans.account import KvAccount
from support.checked_core import NOTHING_LEFT
from support.core_engine import account_of, generate, tokens_of
from support.memory_objects import MemoryObjects
from support.sharded_sim import Below, ShardedEngine
from support.sim_model import LAYOUT, undisturbed

PROMPT = tuple(range(10, 27))
"""Four full blocks and a token."""
OTHERS = tuple(range(40, 69))
"""A prompt that needs the whole pool."""


class Site:
    """One engine and what it does below its pool, on demand."""

    def __init__(self, ranks: int, below: Below, name: str = "engine") -> None:
        network = LocalNetwork()
        self.engine = ShardedEngine(name, ranks, lambda rank: LocalTransport(network, rank), below=below)

    def moves(self) -> Iterator[bool]:
        """Do one thing after the other; yield whether there was anything to do."""
        engine = self.engine
        for store in engine.stores:
            yield store.step()
        for rank in engine.others:
            yield rank.executor.step()
        yield engine.step()
        for store in engine.stores:
            yield store.is_busy

    def run(self) -> None:
        while any(list(self.moves())):
            pass

    def serve(self, prompt: tuple[int, ...] = PROMPT, name: str = "r") -> KvAccount:
        """Serve a request whose tokens are right; return its account."""
        self.engine.send(asking(name, prompt))
        self.run()
        tokens = self.engine.receive(Token)
        assert tokens_of(tokens, name) == undisturbed(prompt, 2)
        assert self.engine.held() == NOTHING_LEFT
        return account_of(tokens)


def asking(name: str, prompt: tuple[int, ...]) -> Generate:
    request = generate(name, prompt)
    return Generate(name, request.prompt, (), request.sampling, "", 0, lender=None, reads_store=True)


@pytest.fixture(params=["local", "shared"])
def below(request: pytest.FixtureRequest) -> Below:
    return Below(MemoryObjects()) if request.param == "local" else Below(objects=MemoryObjects())


def came_back(account: KvAccount) -> int:
    return account.restored_blocks + account.store_blocks


def evicted(ranks: int, below: Below) -> Site:
    """A site whose blocks of PROMPT are below its pool."""
    site = Site(ranks, below)
    assert came_back(site.serve()) == 0
    site.serve(OTHERS, "others")
    return site


def flip(below: Below, offset: int) -> None:
    """Flip a bit of every block below the pool, at this offset within it."""
    objects = below.local or below.objects
    for name, stored in list(objects.stored.items()):
        damaged = bytearray(stored)
        damaged[len(stored) - LAYOUT.block_bytes + offset] ^= 1
        objects.stored[name] = bytes(damaged)


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_that_left_the_pool_come_back_on_every_rank(ranks: int, below: Below) -> None:
    site = evicted(ranks, below)
    account = site.serve()
    assert (came_back(account), account.computed_blocks) == (4, 1)
    assert account.restore_failure == account.store_failure == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_comes_back_wrong_on_one_rank_is_dropped_on_all(rank: int, below: Below) -> None:
    site = evicted(2, below)
    flip(below, rank * LAYOUT.block_bytes // 2 + 3)
    account = site.serve()
    assert came_back(account) == 0
    assert account.mismatched_blocks > 0
    assert "block 0 arrived corrupted" in (account.restore_failure, account.store_failure)
    (store,) = site.engine.stores
    assert store.counts.refused == 1


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1)])
def test_engines_of_unlike_sizes_share_a_store(writers: int, readers: int) -> None:
    objects = MemoryObjects()
    writer = Site(writers, Below(objects=objects, writes_at_once=True), "writer")
    writer.serve()
    assert len(objects.stored) == 4
    reader = Site(readers, Below(objects=objects), "reader")
    assert reader.serve().store_blocks == 4


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_a_restart_with_another_number_of_ranks_finds_the_local_store(first: int, then: int) -> None:
    below = Below(MemoryObjects())
    site = evicted(first, below)
    site.run()
    again = Site(then, below)
    again.run()
    assert again.serve().restored_blocks == 4


def test_a_block_is_bound_with_the_last_rank_that_copied_it() -> None:
    site = evicted(2, Below(MemoryObjects()))
    engine = site.engine
    engine.send(asking("r", PROMPT))
    while any(store.step() or store.is_busy for store in engine.stores) or engine.step():
        pass
    assert engine.receive(Token) == [], "rank 0 has its parts, the other has not"
    site.run()
    assert tokens_of(engine.receive(Token), "r") == undisturbed(PROMPT, 2)


PROMPTS = [tuple(range(start, start + length)) for start, length in [(10, 17), (40, 21), (70, 29), (100, 9), (130, 13)]]
PROMPTS += [(*PROMPTS[0][:8], *range(200, 210))]


class Storm:
    """Anything in any order: requests, cancellations, steps of every thread of every rank, damage of any part."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.places = MemoryObjects(2, max_objects=8), MemoryObjects(2, max_objects=12)
        self.site = Site(2, Below(*self.places))
        self.engine = self.site.engine
        self.asked: dict[str, tuple[int, ...]] = {}
        self.cancelled: set[str] = set()
        (self.other,) = self.engine.others
        self.other.near_pool.interrupted = self.interrupt
        self.num_quarantined = 0
        """Cancellations after which a follower still wrote."""

    def interrupt(self) -> None:
        """Sometimes all requests are cancelled while the follower writes into a block."""
        if self.rng.random() < 0.05:
            for name in self.asked:
                self.cancel(name)
            self.check()
            self.num_quarantined += self.engine.core.kv_cache.pool.num_quarantined > 0

    def run(self, num_acts: int) -> None:
        local, shared = self.engine.stores
        acts: list[tuple[float, Callable[[], object]]] = [
            (4, self.ask),
            (0.3, lambda: self.cancel(self.rng.choice([*self.asked, "nobody"]))),
            (3, self.site.run),
            (8, self.engine.step),
            (6, local.step),
            (6, shared.step),
            (6, self.other.executor.step),
            (1.5, self.damage),
        ]
        weights = [weight for weight, _ in acts]
        for _ in range(num_acts):
            self.rng.choices(acts, weights)[0][1]()
            self.check()

    def ask(self) -> None:
        name = f"r{len(self.asked)}"
        self.asked[name] = self.rng.choice(PROMPTS)
        self.engine.send(asking(name, self.asked[name]))

    def cancel(self, name: str) -> None:
        self.cancelled.add(name)
        self.engine.send(Cancel(name))

    def damage(self) -> None:
        """Flip a bit of some object."""
        stored = self.rng.choice(self.places).stored
        if stored:
            name = self.rng.choice(list(stored))
            damaged = bytearray(stored[name])
            damaged[self.rng.randrange(len(damaged))] ^= 4
            stored[name] = bytes(damaged)

    def check(self) -> None:
        """What the follower may still write has no name and one owner at most; every token is right."""
        pool = self.engine.core.kv_cache.pool
        for copying, blocks in self.other.writing:
            if not copying.is_quiet:
                assert not any(block in pool.name_of for block in blocks), "a named block is written"
                assert not any(pool.num_refs(block) > 1 for block in blocks), "a shared block is written"
        said: dict[str, list[int]] = {}
        for message in self.engine.said:
            if isinstance(message, Token):
                said.setdefault(message.request_id, []).append(message.token_id)
        for name, tokens in said.items():
            assert tokens == RIGHT[self.asked[name]][: len(tokens)]

    def end(self) -> list[KvAccount]:
        """Come to rest; return the accounts of all requests that were served."""
        self.site.run()
        self.check()
        assert self.engine.held() == NOTHING_LEFT
        answered = {message.request_id for message in self.engine.said if isinstance(message, Token | Rejected)}
        assert answered | self.cancelled >= set(self.asked), "a request was never answered"
        named = sorted(self.engine.core.kv_cache.pool.name_of)
        now = self.engine.sharded.fingerprints(named)
        assert now.tobytes() == self.engine.core.kv_cache.cached.fingerprints_of(named), "a named block has changed"
        self.engine.core.close()
        return [m.account for m in self.engine.said if isinstance(m, Token) and m.account is not None]


RIGHT = {prompt: undisturbed(prompt, 2) for prompt in PROMPTS}


def storm(seed: int, num_acts: int = 300) -> tuple[list[KvAccount], int]:
    one = Storm(seed)
    one.run(num_acts)
    return one.end(), one.num_quarantined


@given(seed=st.integers(0, 1 << 32))
def test_whatever_happens_below_the_pool_tokens_are_right(seed: int) -> None:
    storm(seed)


def test_such_storms_show_something() -> None:
    """Blocks came back from everywhere, some of them wrong, and requests ended under a follower's copy."""
    accounts, num_quarantined = [], 0
    for seed in range(20):
        found, quarantined = storm(seed)
        accounts += found
        num_quarantined += quarantined
    assert sum(account.restored_blocks for account in accounts) > 20
    assert sum(account.store_blocks for account in accounts) > 10
    assert sum(account.mismatched_blocks for account in accounts) > 0
    assert num_quarantined > 0
