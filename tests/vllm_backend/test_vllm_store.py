"""vLLM engines over one shared store: what one writes another fetches, whatever happens to it on the way."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from engine.messages.from_engine import CacheChanged
from engine.messages.to_engine import Cancel, Generate
from kvcache.block_keys import block_keys, root_key
from kvcache.pool import Stored
from loans.account import KvAccount
from support.engine_contract import account_of, named
from support.processes import until
from support.real_engines import RealEngine, engines
from support.vllm_engines import BLOCK, ids, need_vllm, vllm_engine
from support.vllm_models import VOCAB, write_model

pytestmark = [need_vllm, pytest.mark.asyncio(loop_scope="module")]
SLOW = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 6, "num_key_value_heads": 1}
"""A model so slow for its blocks of 48 KiB that every engine finds fetching worth while, also on a busy machine."""
SMALL_POOL = 20
"""Blocks of a pool of 1 MiB, of which the five that are reused next are written behind."""


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * num_tokens + seed).choices(range(3, VOCAB), k=num_tokens)


def counting_on_store(prompt: list[int], max_tokens: int = 12, **options: object) -> Generate:
    """A request whose placement counts on the store, so that it is looked up however little earlier lookups found."""
    return named(prompt, max_tokens, **options)._replace(reads_store=True)


class Site:
    """An engine that writes blocks when it has computed them, and one of 20 blocks that writes what it evicts."""

    def __init__(self, folder: Path, at_once: RealEngine, small: RealEngine) -> None:
        self.folder, self.at_once, self.small = folder, at_once, small

    def object_of(self, prompt: list[int], index: int) -> Path | None:
        """The file of a block of the prompt; None while there is none."""
        keys = block_keys(root_key(self.small.ready.model_fingerprint, ""), prompt, BLOCK)
        found = list(self.folder.rglob(keys[index].hex()))
        assert len(found) <= 1
        return found[0] if found else None

    async def stored(self, prompt: list[int]) -> None:
        """Every full block of the prompt is in the folder."""

        await until(
            lambda: all(self.object_of(prompt, index) for index in range(len(prompt) // BLOCK)),
            "its blocks are in the store",
        )

    async def answered(self, engine: RealEngine, prompt: list[int]) -> tuple[list[int], KvAccount]:
        """Its tokens, and what it says of its blocks, which add up."""
        tokens = await engine.answer(counting_on_store(prompt, ignore_eos=True))
        account = account_of(tokens)
        brought = account.reused_blocks + account.store_blocks
        assert brought + account.computed_blocks == -(-len(prompt) // BLOCK)
        assert account.computed_tokens == len(prompt) - brought * BLOCK
        return ids(tokens), account

    async def settled(self) -> None:
        for engine in (self.at_once, self.small):
            found = await engine.audited()
            assert (found.reserved_blocks, found.sequences) == (0, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("store")
    model = write_model("llama", tmp_path_factory.mktemp("model"), **SLOW)
    cores = sorted(os.sched_getaffinity(0))
    whole = {"max_prefill_tokens": 1024, "max_batch_tokens": 1024, "kv_store": str(folder)}
    small = whole | {"kv_memory_mib": 1, "vllm_options": {"max_model_len": 640}}
    at_once = vllm_engine("at-once", model=model, cores=(cores[0],), kv_store_writes="computed", **whole)
    evicting = vllm_engine("small", model=model, cores=(cores[-1],), **small)
    async with engines(at_once, evicting):
        assert evicting.ready.num_blocks == SMALL_POOL
        assert at_once.ready.store == evicting.ready.store != ""
        yield Site(folder, at_once, evicting)


def shared(engine: RealEngine) -> list[bytes]:
    """The keys of blocks that the engine says the store has."""
    events = [event for message in engine.said if isinstance(message, CacheChanged) for event in message.events]
    return [key for event in events if isinstance(event, Stored) and event.shared for key in event.keys]


async def test_blocks_written_at_once_are_fetched_by_another_engine(site: Site) -> None:
    prompt = prompt_of(10 * BLOCK + 5)
    undisturbed, written = await site.answered(site.at_once, prompt)
    assert (written.store_blocks, written.store_failure) == (0, ""), "a miss"
    await site.stored(prompt)
    await site.at_once.until(lambda: len(shared(site.at_once)) == 10)
    fetched, account = await site.answered(site.small, prompt)
    assert fetched == undisturbed
    assert (account.store_blocks, account.computed_tokens, account.store_failure) == (10, 5, "")
    again, account = await site.answered(site.small, prompt)
    assert again == undisturbed
    assert (account.reused_blocks, account.store_blocks) == (10, 0), "they are in its own cache now"
    await site.settled()


async def test_several_choices_share_what_was_fetched(site: Site) -> None:
    prompt = prompt_of(6 * BLOCK + 7)
    options = {"n": 3, "temperature": 1.0, "seed": 4}
    alone = await site.at_once.answer(counting_on_store(prompt, 10, **options))
    await site.stored(prompt)
    got = await site.small.answer(counting_on_store(prompt, 10, **options))
    assert account_of(got).store_blocks == 6
    assert sorted((token.choice, token.token_id) for token in got) == sorted((t.choice, t.token_id) for t in alone)
    await site.settled()


async def test_blocks_are_written_when_vllm_reuses_them(site: Site) -> None:
    """The blocks that are reused next are unused ones until the second prompt takes nearly all in one step."""
    first, second = prompt_of(10 * BLOCK, 8), prompt_of(18 * BLOCK + 20, 9)
    for index in (0, 1):  # the pool holds nothing named of earlier tests that a look could write with its ancestors
        await site.answered(site.small, prompt_of(19 * BLOCK, index))
    undisturbed, _ = await site.answered(site.small, first)
    await site.answered(site.small, second)
    await site.stored(first)
    fetched, account = await site.answered(site.at_once, first)
    assert fetched == undisturbed
    assert account.store_blocks == 9, "the last token's block is computed"
    await site.settled()


async def test_blocks_that_are_reused_next_are_written_before(site: Site) -> None:
    prompt = prompt_of(17 * BLOCK + 1, 12)
    undisturbed, _ = await site.answered(site.small, prompt)
    await site.stored(prompt)
    fetched, account = await site.answered(site.at_once, prompt)
    assert fetched == undisturbed
    assert account.store_blocks == 17


def flip(stored: bytes, at: int) -> bytes:
    return stored[:at] + bytes([stored[at] ^ 0x40]) + stored[at + 1 :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], int, str]] = {
    "header": (lambda stored: flip(stored, 30), 0, "refused"),
    "first plane": (lambda stored: flip(stored, len(stored) // 3), 1, "corrupted"),
    "last plane": (lambda stored: flip(stored, len(stored) - 1), 1, "corrupted"),
    "torn": (lambda stored: stored[: len(stored) // 2], 0, ""),
}


@pytest.mark.parametrize("how", DAMAGES)
async def test_a_damaged_object_is_refused_and_computed_again(site: Site, how: str) -> None:
    damage, mismatched, reason = DAMAGES[how]
    prompt = prompt_of(9 * BLOCK + 3, 40 + list(DAMAGES).index(how))
    undisturbed, _ = await site.answered(site.at_once, prompt)
    await site.stored(prompt)
    spoiled = site.object_of(prompt, 4)
    wrong = damage(spoiled.read_bytes())
    spoiled.write_bytes(wrong)
    got, account = await site.answered(site.small, prompt)
    assert got == undisturbed
    assert account.mismatched_blocks == mismatched
    assert reason in account.store_failure
    if how != "torn":  # a short file is a miss, and the lookup may find blocks before it only
        assert account.store_blocks == 4

        await until(lambda: not spoiled.exists() or spoiled.read_bytes() != wrong, "nobody reads it again")
    await site.settled()


async def test_a_lender_fetches_before_it_computes(site: Site) -> None:
    prompt, tail = prompt_of(12 * BLOCK, 30), prompt_of(2 * BLOCK + 9, 31)
    await site.answered(site.small, prompt)
    await site.answered(site.small, prompt_of(18 * BLOCK + 20, 32))
    await site.stored(prompt)
    moved = await site.small.answer(counting_on_store(prompt + tail, ignore_eos=True), site.at_once)
    account = account_of(moved)
    in_cache = account.reused_blocks
    assert (account.moved_blocks, account.lender_cached_blocks, account.loan_failure) == (14 - in_cache, 0, "")
    assert (account.lender_fetched_blocks, account.lender_computed_blocks) == (12 - in_cache, 2)
    undisturbed, _ = await site.answered(site.at_once, prompt + tail)
    assert ids(moved) == undisturbed
    await site.settled()


@pytest.mark.parametrize("after_ms", [0, 1, 2, 4, 8, 16, 32])
async def test_a_cancel_at_any_moment_of_a_fetch_leaves_nothing_behind(site: Site, after_ms: int) -> None:
    prompt = prompt_of(15 * BLOCK + 1, 60 + after_ms)
    await site.answered(site.at_once, prompt)
    await site.stored(prompt)
    request = counting_on_store(prompt)
    site.small.send(request)
    await asyncio.sleep(after_ms / 1e3)
    site.small.send(Cancel(request.request_id))
    await site.settled()
