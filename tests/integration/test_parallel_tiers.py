"""Engines of two ranks whose blocks leave the pool and come back: from host memory, from disk, and from a shared store.

Each rank has only its part of a block in its own process, so tokens are right only if every part came back.
"""

import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import StartError
from engine.kv.store.object_format import ObjectFormat
from engine.kv.tiers.disk_format import DiskFormat
from engine.messages.from_engine import KvAccount, Ready, Token
from engine.messages.to_engine import Generate
from engine.tensor_parallel.gathering import GATHER_BYTES
from support.core_engine import account_of
from support.long_runs import long
from support.processes import gone, pause
from support.real_engines import RealEngine, chosen, engines, greedy, kill

BLOCK = 16
NUM_BLOCKS = 12
KV_HEADS = 2


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 500), k=NUM_BLOCKS * BLOCK + 5)


ASKED = greedy("asked", prompt_of(1))
PROMPTS = [greedy(f"asked {seed}", prompt_of(seed)) for seed in range(2, 6)]


def engine(name: str, model: Path, ranks: int = 2, **settings: Any) -> RealEngine:
    """With the smallest pool there is."""
    return RealEngine(name, model, tensor_parallel=ranks, kv_memory_mib=1, **settings)


async def ask(of: RealEngine, request: Generate, reads_store: bool = False) -> tuple[dict[int, list[int]], KvAccount]:
    of.tokens.pop(request.request_id, None)
    of.send(request._replace(reads_store=reads_store))
    await of.until(lambda: of.over(request))
    tokens: list[Token] = of.tokens[request.request_id]
    return chosen(tokens), account_of(tokens)


async def fill(of: RealEngine) -> None:
    """Ask so much else that nothing earlier is left in the pool."""
    for number in range(of.ready.num_blocks // NUM_BLOCKS + 2):
        await ask(of, greedy(f"filler {number}", prompt_of(1000 + number)))


RIGHT: dict[str, dict[int, list[int]]] = {}


async def expected(model: Path) -> dict[str, dict[int, list[int]]]:
    """Tokens of each request by an engine of two ranks without tiers."""
    if not RIGHT:
        plain = engine("plain", model)
        async with engines(plain):
            RIGHT.update({request.request_id: (await ask(plain, request))[0] for request in (ASKED, *PROMPTS)})
    return RIGHT


def damage_parts(path: Path, offsets: list[int]) -> None:
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))


def of_second_rank(ready: Ready) -> int:
    """An offset within a block, in the part of the second of two ranks."""
    return ready.block_bytes // 2 + 40


def damage_host_memory(of: RealEngine) -> None:
    """Flip a bit of every block in host memory, in the second rank's part, as broken memory would."""
    folder = Path(f"/proc/{of.pid}/fd")
    descriptor = next(each for each in folder.iterdir() if "tandem-ranks" in os.readlink(each))
    block_bytes = of.ready.block_bytes
    begin = -(-(GATHER_BYTES // block_bytes) * block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = descriptor.stat().st_size
    damage_parts(descriptor, list(range(begin + of_second_rank(of.ready), num_bytes, block_bytes)))


def damage_disk(directory: Path, ready: Ready) -> None:
    (path,) = directory.glob("*/kv-0.blocks")
    disk = DiskFormat(ready.block_bytes, KV_HEADS)
    offsets = [disk.payload_offset(slot) + of_second_rank(ready) for slot in range(disk.slots_within(64 << 20))]
    damage_parts(path, [offset for offset in offsets if offset < path.stat().st_size])


def damage_objects(folder: Path, ready: Ready) -> None:
    objects = list(folder.glob("*/*/*"))
    assert len(objects) >= NUM_BLOCKS
    header = ObjectFormat(ready.block_bytes, KV_HEADS, bytes(32)).payload_offset
    for path in objects:
        damage_parts(path, [header + of_second_rank(ready)])


async def test_blocks_come_back_from_host_memory(make_model: Callable[..., Path]) -> None:
    model = make_model("llama")
    right = await expected(model)
    tiered = engine("tiered", model, kv_host_memory_mib=16)
    damaged = engine("damaged", model, kv_host_memory_mib=16)
    async with engines(tiered, damaged):
        for each in (tiered, damaged):
            tokens, account = await ask(each, ASKED)
            assert (tokens, account.computed_blocks) == (right["asked"], NUM_BLOCKS + 1)
            await fill(each)
        tokens, account = await ask(tiered, ASKED)
        assert tokens == right["asked"]
        assert (account.restored_blocks, account.reused_blocks, account.restore_failure) == (NUM_BLOCKS, 0, "")
        damage_host_memory(damaged)
        tokens, account = await ask(damaged, ASKED)
        assert tokens == right["asked"], "a part that came back wrong was computed again"
        assert account.restore_failure == "block 0 arrived corrupted"
        assert (account.restored_blocks, account.mismatched_blocks) == (0, NUM_BLOCKS)
        for each in (tiered, damaged):
            await each.audited()


async def test_a_restart_finds_its_blocks_on_disk(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Also one of another number of ranks, since files have whole blocks."""
    model = make_model("llama")
    right = await expected(model)
    tiers = {"kv_disk_dir": tmp_path, "kv_disk_mib": 64}
    first = engine("first", model, **tiers)
    async with engines(first):
        for request in (ASKED, *PROMPTS):
            await ask(first, request)
        await fill(first)
    for ranks, request in ((2, PROMPTS[0]), (1, PROMPTS[1])):
        heir = engine(f"of {ranks}", model, ranks, **tiers)
        async with engines(heir):
            tokens, account = await ask(heir, request)
            assert tokens == right[request.request_id]
            assert (account.restored_blocks, account.mismatched_blocks) == (NUM_BLOCKS, 0)
            assert account.restore_failure == ""
            await heir.audited()
    damage_disk(tmp_path, first.ready)
    damaged = engine("damaged", model, **tiers)
    async with engines(damaged):
        tokens, account = await ask(damaged, ASKED)
        assert tokens == right["asked"]
        assert account.restore_failure == "block 0 arrived corrupted"
        assert (account.restored_blocks, account.mismatched_blocks) == (0, NUM_BLOCKS)
        await damaged.audited()


@pytest.mark.parametrize("writes", ["evicted", "computed"])
async def test_a_restart_finds_its_blocks_in_the_store(
    writes: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Also one of another number of ranks, since objects are whole blocks."""
    model = make_model("llama")
    right = await expected(model)
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes or more")
    folder = tmp_path / "store"
    store = {"kv_store": str(folder), "kv_store_writes": writes, "kv_store_secret_file": secret}
    first = engine("first", model, **store)
    async with engines(first):
        for request in (ASKED, *PROMPTS):
            await ask(first, request)
        if writes == "evicted":
            await fill(first)
    for name, ranks in (("again", 2), ("alone", 1)):
        heir = engine(name, model, ranks, **store)
        async with engines(heir):
            for request in PROMPTS:
                tokens, account = await ask(heir, request, reads_store=True)
                assert tokens == right[request.request_id]
                assert (account.store_blocks, account.mismatched_blocks) == (NUM_BLOCKS, 0), account
                assert account.store_failure == ""
            await heir.audited()
    # Without a secret the checksum covers headers only, so the ranks' fingerprints find the damage.
    unsigned = {"kv_store": str(tmp_path / "unsigned"), "kv_store_writes": "computed"}
    writer = engine("writer", model, **unsigned)
    async with engines(writer):
        await ask(writer, ASKED)
    damage_objects(tmp_path / "unsigned", writer.ready)
    damaged = engine("damaged", model, **unsigned)
    async with engines(damaged):
        tokens, account = await ask(damaged, ASKED, reads_store=True)
        assert tokens == right["asked"]
        assert account.store_failure == "block 0 arrived corrupted"
        assert account.store_blocks == 0
        assert account.mismatched_blocks > 0
        await damaged.audited()


async def test_a_follower_that_dies_ends_an_engine_that_evicts(make_model: Callable[..., Path]) -> None:
    tiered = engine("tiered", make_model("llama"), kv_host_memory_mib=4)
    async with engines(tiered):
        pids = [tiered.pid, *tiered.rank_pids()]
        await fill(tiered)
        tiered.send(greedy("evicting", prompt_of(1), 200))
        await tiered.until(lambda: len(tiered.tokens.get("evicting", ())) >= 5)
        kill(pids[1])
        await gone(pids)
        assert "ended with code" in await tiered.has_ended()


async def test_host_memory_that_cannot_be_had_is_refused(make_model: Callable[..., Path]) -> None:
    huge = engine("huge", make_model("llama"), kv_host_memory_mib=1 << 40)
    with pytest.raises(StartError, match=r"kv_host_memory_mib: cannot allocate .* bytes"):
        async with engines(huge):
            pass
    await gone([huge.pid])


@long
async def test_a_follower_that_is_stopped_ends_an_engine_that_waits_for_its_parts(
    make_model: Callable[..., Path],
) -> None:
    tiered = engine("tiered", make_model("llama"), kv_host_memory_mib=4)
    async with engines(tiered):
        pids = [tiered.pid, *tiered.rank_pids()]
        await fill(tiered)
        await pause(pids[1])
        tiered.send(greedy("evicting", prompt_of(1)))
        assert "ended with code 1" in await tiered.has_ended()
        await gone(pids)
