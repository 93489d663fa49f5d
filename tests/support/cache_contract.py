"""What every engine keeps to about blocks that stay, and blocks that leave its pool: pins, main memory, disk, drills.

A test module subclasses `CacheContract` and offers `opened`, which opens an engine with a pool of 20 blocks.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from engine.messages.from_engine import CacheInspected, LoadReport, Token
from engine.messages.to_engine import CacheDrop, InspectCache
from kvcache.block_keys import block_keys, root_key
from kvcache.pins import Retention
from loans.account import KvAccount
from support.engine_contract import account_of, named, numbers
from support.processes import until
from support.real_engines import RealEngine
from support.vllm_engines import BLOCK, ids
from support.vllm_models import VOCAB

SLOW = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 6, "num_key_value_heads": 1}
"""A model so slow for its blocks of 48 KiB that every engine finds restoring worth while, also on a busy machine."""
SMALL_POOL = 20
"""Blocks of a pool of 1 MiB."""
SIZE = 48 << 10
"""Bytes of a block, after which its object's head does not count."""
HOUR_S = 3600.0
Opened = Callable[..., AbstractAsyncContextManager[RealEngine]]
"""Function opened(name, **settings) that starts an engine of one prompt chunk and a small pool."""


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * num_tokens + seed).choices(range(3, VOCAB), k=num_tokens)


async def answered(engine: RealEngine, prompt: list[int], max_tokens: int = 12, pinned: str = "") -> list[Token]:
    """Tokens of a request, whose account adds up; `pinned` is the tenant for whom its prompt stays."""
    request = named(prompt, max_tokens, ignore_eos=True)
    if pinned:
        request = request._replace(retention=Retention(HOUR_S, pinned))
    await engine.audited()  # blocks of the request before are free
    tokens = await engine.answer(request)
    account = account_of(tokens)
    brought = account.reused_blocks + account.restored_blocks
    assert brought + account.computed_blocks == -(-len(prompt) // BLOCK)
    return tokens


def last_account(tokens: list[Token]) -> KvAccount:
    return [token.account for token in tokens if token.account is not None][-1]


async def settled(engine: RealEngine) -> None:
    found = await engine.audited()
    assert (found.fault, found.reserved_blocks, found.sequences) == ("", 0, 0)


async def inspected(engine: RealEngine, **query: object) -> CacheInspected:
    number = next(numbers)
    engine.send(InspectCache(number, **query))  # type: ignore[arg-type]

    def answers() -> list[CacheInspected]:
        return [m for m in engine.said if isinstance(m, CacheInspected) and m.query_id == number]

    await engine.until(lambda: bool(answers()))
    return answers()[0]


async def on_disk(engine: RealEngine, prompt: list[int], folder: Path) -> None:
    """Wait until every full block of the prompt is in the folder."""
    keys = block_keys(root_key(engine.ready.model_fingerprint, ""), prompt, BLOCK)

    def names() -> set[str]:
        return {path.name for path in folder.glob("*/*")}

    await until(lambda: {key.hex() for key in keys} <= names(), "its blocks are on disk")


def flip_a_bit(folder: Path, at: int) -> None:
    """Damage every block in a folder, at this offset."""
    for path in folder.glob("*/[0-9a-f]*"):
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)


def uses(engine: RealEngine) -> dict[str, tuple[int, int, int]]:
    """Capacity, used blocks and hits of each place, in the last report."""
    reports = [m.kv for m in engine.said if isinstance(m, LoadReport) and m.kv is not None]
    return {each.tier: (each.blocks, each.used, each.hits) for each in reports[-1].tiers} if reports else {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(opened: Opened) -> AsyncIterator[RealEngine]:
    async with opened("small", reserve_output_tokens=BLOCK) as engine:
        assert engine.ready.num_blocks in (SMALL_POOL, SMALL_POOL + 1), "vLLM keeps one for itself"
        yield engine


class CacheContract:
    """Tests of one engine in a process of its own."""

    # -------------------------------------------------------------------------------------------- pins

    async def test_pinned_prompts_survive_a_flood(self, small: RealEngine) -> None:
        """Eight prompts, of a tenant each, beside twenty pools of other prompts."""
        pinned = [prompt_of(BLOCK + 5, seed) for seed in range(8)]
        first = []
        for number, prompt in enumerate(pinned):
            tokens = await answered(small, prompt, pinned=f"tenant {number}")
            assert last_account(tokens).pinned_blocks == 1
            first.append(ids(tokens))
        for seed in range(40):
            await answered(small, prompt_of(10 * BLOCK, 100 + seed), 1)
        for prompt, expected in zip(pinned, first, strict=True):
            tokens = await answered(small, prompt)
            assert account_of(tokens).reused_blocks == 1
            assert ids(tokens) == expected
        found = await inspected(small)
        assert sum(blocks for _, blocks, _ in found.pins) == 8
        assert (await inspected(small, drop_pins=True)).dropped == 8
        await settled(small)

    async def test_of_a_prompt_beyond_the_share_leading_blocks_stay(self, small: RealEngine) -> None:
        tokens = await answered(small, prompt_of(9 * BLOCK + 3, 7), pinned="tenant")
        assert last_account(tokens).pinned_blocks == SMALL_POOL // 4
        assert (await inspected(small, drop_pins=True, tenant="tenant")).dropped == SMALL_POOL // 4
        await settled(small)

    async def test_running_requests_come_before_pins_and_the_next_request_is_told(self, small: RealEngine) -> None:
        """Two long outputs need nearly the whole pool: neither is preempted, and pins that end first give way."""
        pinned = [prompt_of(3 * BLOCK + 1, 20 + number) for number in range(3)]
        for number, prompt in enumerate(pinned):
            tokens = await answered(small, prompt, pinned=f"tenant {number}")
            assert last_account(tokens).pinned_blocks == 3
        long = [named(prompt_of(2 * BLOCK, 30 + number), 7 * BLOCK, ignore_eos=True) for number in range(2)]
        found = await asyncio.gather(*(small.answer(request) for request in long))
        for tokens in found:
            assert len(tokens) == 7 * BLOCK
            assert last_account(tokens).preemptions == 0
        again = [last_account(await answered(small, prompt, pinned="tenant")) for prompt in pinned]
        gave_way = sum(account.pins_gave_way for account in again)
        assert gave_way >= 6, "18 of 20 blocks were needed, and nine pinned"
        reports = [m.kv for m in small.said if isinstance(m, LoadReport) and m.kv is not None]
        assert reports[-1].pins_gave_way == gave_way
        await inspected(small, drop_pins=True)
        await settled(small)

    async def test_a_request_that_would_never_fit_beside_pins_is_served(self, small: RealEngine) -> None:
        for number in range(2):
            await answered(small, prompt_of(4 * BLOCK + 1, 40 + number), pinned=f"tenant {number}")
        tokens = await answered(small, prompt_of(18 * BLOCK, 44), 4)
        assert len(tokens) == 4
        await inspected(small, drop_pins=True)
        await settled(small)

    async def test_a_warmed_prompt_is_pinned(self, small: RealEngine) -> None:
        prompt = prompt_of(4 * BLOCK, 50)
        request = named(prompt, 0)._replace(retention=Retention(HOUR_S, "tenant"))
        account = await small.filled(request)
        assert account.pinned_blocks == 4
        for seed in range(6):
            await answered(small, prompt_of(10 * BLOCK, 150 + seed), 1)
        assert account_of(await answered(small, [*prompt, 5])).reused_blocks == 4
        await inspected(small, drop_pins=True)
        await settled(small)

    # ------------------------------------------------------------------------------- main memory and disk

    @pytest.mark.parametrize("where", ["host", "disk"])
    async def test_evicted_blocks_come_back(self, opened: Opened, where: str, tmp_path: Path) -> None:
        settings = {"kv_host_memory_mib": 16} if where == "host" else {"kv_disk_dir": str(tmp_path)}
        async with opened("below", **settings) as engine:
            prompts = [prompt_of(10 * BLOCK + 5, 60 + number) for number in range(4)]
            first = [ids(await answered(engine, prompt)) for prompt in prompts]
            await self._stored(engine, where, 30)
            restored = 0
            for prompt, expected in zip(prompts, first, strict=True):
                tokens = await answered(engine, prompt)
                assert ids(tokens) == expected
                assert account_of(tokens).restore_failure == ""
                restored += account_of(tokens).restored_blocks
            assert restored >= 30
            assert uses(engine)[where][2] >= 30
            await settled(engine)

    async def test_a_restart_finds_its_blocks_on_disk(self, opened: Opened, tmp_path: Path) -> None:
        prompt = prompt_of(10 * BLOCK + 5, 70)
        async with opened("before", kv_disk_dir=str(tmp_path)) as engine:
            expected = ids(await answered(engine, prompt))
            await answered(engine, prompt_of(18 * BLOCK, 71), 1)
            await on_disk(engine, prompt, tmp_path)
        async with opened("after", kv_disk_dir=str(tmp_path)) as engine:
            await self._stored(engine, "disk", 10)
            tokens = await answered(engine, prompt)
            assert ids(tokens) == expected
            assert account_of(tokens).restored_blocks == 10
            dropped = await inspected(engine, drop=CacheDrop(prompt))
            assert dropped.dropped_in_pool == 10
            assert account_of(await answered(engine, prompt)).restored_blocks == 0

    async def test_workers_of_a_host_share_its_memory(self, opened: Opened) -> None:
        """What one evicts another restores, which has not heard of it."""
        prompt, shared = prompt_of(10 * BLOCK + 5, 75), {"kv_host_memory_mib": 16, "kv_host_memory_shared": True}
        async with opened("one", **shared) as one, opened("two", **shared) as two:
            expected = ids(await answered(one, prompt))
            await answered(one, prompt_of(18 * BLOCK, 76), 1)
            await self._stored(one, "host", 10)
            tokens = await answered(two, prompt)
            assert ids(tokens) == expected
            assert account_of(tokens).restored_blocks == 10
            await settled(two)

    @pytest.mark.parametrize("at", ["head", "middle", "last byte"])
    async def test_a_damaged_file_is_never_used(self, opened: Opened, tmp_path: Path, at: str) -> None:
        prompt = prompt_of(10 * BLOCK + 5, 80)
        async with opened("damaged", kv_disk_dir=str(tmp_path)) as engine:
            expected = ids(await answered(engine, prompt))
            await answered(engine, prompt_of(18 * BLOCK, 81), 1)
            await on_disk(engine, prompt, tmp_path)
            flip_a_bit(tmp_path, {"head": 40, "middle": SIZE // 2, "last byte": SIZE - 1}[at])
            tokens = await answered(engine, prompt)
            account = account_of(tokens)
            assert ids(tokens) == expected
            assert account.restored_blocks == 0
            assert ("refused" if at == "head" else "corrupted") in account.restore_failure
            await settled(engine)

    async def _stored(self, engine: RealEngine, where: str, num_blocks: int) -> None:
        await until(lambda: uses(engine).get(where, (0, 0, 0))[1] >= num_blocks, "blocks are in the store")
