"""KV events of stock vLLM servers become exactly what the servers hold, by the router's names."""

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block_keys import BlockKey, block_keys, root_key, split_keys
from protos import membership_pb2 as pb
from router.stock.kv_events import AssumedBlocks, BatchOrder, KvEventBatch, NamedBlocks, read_batch

WIDTH = 4
FINGERPRINT = b"f" * 32


def root_of(salt: str, adapter: str) -> BlockKey | None:
    return None if adapter == "unknown" else root_key(FINGERPRINT, salt, adapter.encode().ljust(16) if adapter else b"")


def applied(held: set[BlockKey], changes: Sequence[pb.CacheEvent]) -> set[BlockKey]:
    for change in changes:
        held |= set(split_keys(change.stored))
        held -= set(split_keys(change.removed))
    return held


Chain = tuple[str, tuple[int, ...]]
"""Salt and tokens up to the end of a block."""


class VllmPool:
    """Pool that names blocks and tells of them as vLLM does."""

    def __init__(self) -> None:
        self.held: set[Chain] = set()
        self.events: list[dict[str, object]] = []

    @staticmethod
    def name(chain: Chain) -> bytes:
        return repr(chain).encode()

    def store(self, salt: str, tokens: tuple[int, ...]) -> None:
        ends = [end for end in range(WIDTH, len(tokens) + 1, WIDTH) if (salt, tokens[:end]) not in self.held]
        if not ends:
            return
        first = ends[0] - WIDTH
        chains = [(salt, tokens[:end]) for end in ends]
        self.events.append(
            {
                "type": "BlockStored",
                "block_hashes": [self.name(chain) for chain in chains],
                "parent_block_hash": self.name((salt, tokens[:first])) if first else None,
                "token_ids": list(tokens[first : ends[-1]]),
                "block_size": WIDTH,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [(salt,) if salt and end == WIDTH else None for end in ends],
            }
        )
        self.held.update(chains)

    def remove(self, draw: random.Random) -> None:
        """Evict a block that no other held block continues."""
        parents = {(salt, tokens[:-WIDTH]) for salt, tokens in self.held}
        if leaves := sorted(self.held - parents):
            gone = draw.choice(leaves)
            self.held.remove(gone)
            self.events.append({"type": "BlockRemoved", "block_hashes": [self.name(gone)], "medium": "GPU"})

    def clear(self) -> None:
        self.held.clear()
        self.events.append({"type": "AllBlocksCleared"})

    def keys(self) -> set[BlockKey]:
        return {block_keys(root_key(FINGERPRINT, salt), tokens, WIDTH)[-1] for salt, tokens in self.held}

    def batch(self) -> KvEventBatch:
        """Return what happened since the last batch, by way of the bytes on the wire."""
        packed = msgspec.msgpack.encode([0.0, self.events, 0])
        self.events = []
        return read_batch(packed)


STEPS = ["store"] * 6 + ["remove"] * 3 + ["send"] * 3 + ["end"] * 3 + ["clear", "lose"]


@given(st.randoms(use_true_random=False), st.lists(st.sampled_from(STEPS), max_size=60))
def test_the_index_is_what_the_server_holds_and_what_requests_leave_there(
    draw: random.Random, steps: list[str]
) -> None:
    pool, blocks, index = VllmPool(), NamedBlocks(root_of, WIDTH, max_names=10_000), set[BlockKey]()
    running: list[list[BlockKey]] = []
    is_exact = True

    def some_tokens() -> tuple[int, ...]:
        return tuple(draw.randrange(2) for _ in range(draw.randrange(1, 6 * WIDTH)))

    for step in steps:
        if step == "store":
            pool.store(draw.choice(["", "salt"]), some_tokens())
        elif step == "remove":
            pool.remove(draw)
        elif step == "clear":
            pool.clear()
            is_exact = True
        elif step == "send":
            running.append(block_keys(root_key(FINGERPRINT, ""), some_tokens(), WIDTH))
            index = applied(index, blocks.sent(running[-1]))
        elif step == "end" and running:
            index = applied(index, blocks.ended(running.pop(draw.randrange(len(running)))))
        batch = pool.batch()
        if step == "lose":  # a batch is lost, and cannot be had again
            blocks.forget_held()
            index, is_exact = applied(set(), blocks.snapshot()), False
            continue
        changes = blocks.apply(batch)
        index = applied(set(), blocks.snapshot()) if changes is None else applied(index, changes)
        expected = {key for keys in running for key in keys}
        assert expected <= index
        assert index <= pool.keys() | expected  # nothing else is believed to be there
        assert index == pool.keys() | expected or not is_exact


def test_a_block_that_follows_a_forgotten_one_is_named() -> None:
    pool, blocks = VllmPool(), NamedBlocks(root_of, WIDTH, max_names=100)
    pool.store("", (1,) * WIDTH)
    blocks.apply(pool.batch())
    blocks.forget_held()
    pool.store("", (1,) * 2 * WIDTH)
    changes = blocks.apply(pool.batch())
    assert changes is not None
    assert applied(set(), changes) == {block_keys(root_key(FINGERPRINT, ""), (1,) * 2 * WIDTH, WIDTH)[1]}


@pytest.mark.parametrize(
    "change",
    [
        {"parent_block_hash": b"never seen"},
        {"medium": "CPU"},
        {"kv_cache_spec_kind": "sliding_window"},
        {"lora_name": "unknown"},
        {"block_size": 2 * WIDTH, "token_ids": [1] * 2 * WIDTH},
        {"extra_keys": [(("picture", 0),)]},
    ],
)
def test_blocks_without_a_name_here_are_left_out(change: dict[str, object]) -> None:
    pool, blocks = VllmPool(), NamedBlocks(root_of, WIDTH, max_names=100)
    pool.store("", (1,) * WIDTH)
    pool.events[0] |= change
    assert blocks.apply(pool.batch()) == []


def test_names_are_bounded_and_held_ones_stay() -> None:
    pool, blocks, draw = VllmPool(), NamedBlocks(root_of, WIDTH, max_names=8), random.Random(1)
    for number in range(100):
        pool.store("", (number,) * WIDTH)
        if number >= 4:
            pool.remove(draw)
        blocks.apply(pool.batch())
        assert blocks.num_held <= 5
        assert len(blocks.key_of) <= 8 + 1
    assert applied(set(), blocks.snapshot()) == pool.keys()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=30), st.integers(1, 12))
def test_assumed_blocks_are_the_last_used(uses: list[tuple[int, int]], room: int) -> None:
    assumed, held = AssumedBlocks(room), set[BlockKey]()
    for first, length in uses:
        keys = block_keys(root_key(FINGERPRINT, str(first)), range(length * WIDTH), WIDTH)
        held = applied(held, assumed.sent(keys))
        assert len(held) <= room
        assert set(keys[: min(len(keys), room)]) <= held  # the beginning of a prompt outlives its end


def test_the_order_of_batches() -> None:
    order = BatchOrder()
    assert order.judge(3) == "gap"  # it was there before this subscriber
    for number in range(4):
        order.applied(number)
    assert order.judge(4) == "next"
    order.applied(4)
    assert order.judge(7) == "gap"
    for number in (5, 6, 7, 8):  # the replay has one more
        order.applied(number)
    assert order.judge(8) == "known"
    assert order.judge(9) == "next"
    order.applied(9)
    assert order.judge(2) == "restart"
