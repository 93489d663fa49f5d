"""Models with several KV groups: sliding windows keep to the contract of engines, recurrent states are lent."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.messages.from_engine import CacheChanged, CacheInspected
from engine.messages.to_engine import CacheDrop, InspectCache, TakeSnapshot
from kvcache.block_keys import block_keys, resume_name, root_key
from kvcache.chain import name_of
from kvcache.pool import Removed, Stored
from support.engine_contract import VOCAB, EngineContract, Pair, account_of, named, prompt_of
from support.long_runs import mostly_long
from support.processes import LENDER_ALWAYS, running
from support.real_engines import RealEngine, cached_blocks, engines
from support.vllm_engines import BLOCK, OPTIONS, PYTHON, V2, flip_a_byte, ids, need_vllm, vllm_engine
from support.vllm_models import write_model
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

pytestmark = [need_vllm, pytest.mark.asyncio(loop_scope="module")]
WINDOW_BLOCKS = 2
"""Blocks of the models' window of 64 tokens."""
STATE_GROUPS = 3
STATES = {"V1": PYTHON, "V2 asynchronous": V2}
KINDS: dict[str, tuple[str, Path]] = {
    "gemma3, V1": ("gemma3", PYTHON),
    "gpt_oss, V2 asynchronous": ("gpt_oss", V2),
    "gemma3, V2 asynchronous": ("gemma3", V2),
    "gpt_oss, V1": ("gpt_oss", PYTHON),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=mostly_long(KINDS, "gpt_oss, V2 asynchronous"))
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    kind, python = KINDS[request.param]
    model = write_model(kind, tmp_path_factory.mktemp("model"), vocab_size=VOCAB)
    cores = sorted(os.sched_getaffinity(0))
    settings: dict[str, Any] = {"model": model, "vllm_python": python}
    lender = vllm_engine("lender", "prefill", cores=(cores[0],), **settings)
    borrower = vllm_engine("borrower", cores=(cores[-1],), **settings)
    async with engines(lender, borrower):
        yield Pair(lender, borrower)


class TestContract(EngineContract):
    async def test_dropped_blocks_are_told_and_computed_again_and_others_stay(self, pair: Pair) -> None:
        """A prompt's blocks of all groups are dropped, with the boundary that they made."""
        prompt, other, engine = prompt_of(160, 41), prompt_of(160, 42), pair.lender
        expected = ids(await engine.answer(named(prompt)))
        await engine.answer(named(other))
        engine.said.clear()
        engine.send(InspectCache(1, drop=CacheDrop(prompt)))
        await engine.until(lambda: any(isinstance(message, CacheInspected) for message in engine.said))
        (inspected,) = [message for message in engine.said if isinstance(message, CacheInspected)]
        keys = block_keys(root_key(engine.ready.model_fingerprint, ""), prompt, BLOCK)
        assert (inspected.dropped_in_pool, inspected.in_use) == (len(keys) + WINDOW_BLOCKS, 0)
        again = await engine.answer(named(prompt))
        assert ids(again) == expected
        assert account_of(again).reused_blocks == 0
        assert account_of(await engine.answer(named(other))).reused_blocks == (len(other) - 1) // BLOCK
        events = [event for m in engine.said if isinstance(m, CacheChanged) for event in m.events]
        gone = [key for event in events if isinstance(event, Removed) for key in event.keys]
        last = keys[(len(prompt) - 1) // BLOCK - 1]
        assert set(gone) == {*keys, resume_name(last)}
        await pair.settled()


async def test_the_cache_names_the_boundaries_at_which_a_request_can_go_on(pair: Pair) -> None:
    """vLLM keeps the windows before a prompt's last token, and no earlier ones."""
    engine, prompt = pair.lender, prompt_of(300, 70)
    await engine.answer(named(prompt))
    engine.said.clear()
    engine.send(TakeSnapshot())
    await engine.until(lambda: any(isinstance(m, CacheChanged) and m.snapshot for m in engine.said))
    (snapshot,) = [m for m in engine.said if isinstance(m, CacheChanged) and m.snapshot]
    held = {key for event in snapshot.events if isinstance(event, Stored) for key in event.keys}
    keys = block_keys(root_key(engine.ready.model_fingerprint, ""), prompt, BLOCK)
    assert set(keys) <= held
    assert resume_name(keys[300 // BLOCK - 1]) in held
    shorter = account_of(await engine.answer(named([*prompt[: 5 * BLOCK], 7])))
    assert (shorter.reused_blocks == 5) is (resume_name(keys[4]) in held)
    await pair.settled()


@pytest.mark.parametrize("cut", [1, 9, 22])
async def test_a_stream_continues_on_the_other_engine(pair: Pair, cut: int) -> None:
    whole = named(prompt_of(170, 80 + cut), 24, ignore_eos=True)
    expected = ids(await pair.lender.answer(whole))
    rest = named(list(whole.prompt), 24, ignore_eos=True)._replace(emitted=tuple(expected[:cut]))
    assert ids(await pair.borrowed(rest)) == expected[cut:]
    await pair.settled()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=mostly_long(STATES, "V1"))
async def stateful(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Two engines of a model with recurrent states, which vLLM computes in bfloat16 only."""
    model = write_model("qwen3_next", tmp_path_factory.mktemp("model"), vocab_size=VOCAB)
    cores = sorted(os.sched_getaffinity(0))
    settings: dict[str, Any] = {"model": model, "vllm_python": STATES[request.param], "dtype": "bfloat16"}
    lender = vllm_engine("lender", "prefill", cores=(cores[0],), **settings)
    borrower = vllm_engine("borrower", cores=(cores[-1],), **settings)
    async with engines(lender, borrower):
        yield Pair(lender, borrower)


@pytest.mark.parametrize("num_tokens", [50, 97, 200, 700])
async def test_a_state_is_lent_with_the_blocks_before_it(stateful: Pair, num_tokens: int) -> None:
    """vLLM chooses the tokens of a block so that a block's bytes hold a state."""
    prompt, width = prompt_of(num_tokens, 90), stateful.lender.ready.block_tokens
    got = await stateful.borrowed(named(prompt, ignore_eos=True))
    account, blocks = account_of(got), (num_tokens - 1) // width
    assert (account.moved_blocks, account.computed_tokens) == (blocks, num_tokens - blocks * width)
    assert account.moved_bytes == (blocks + (STATE_GROUPS if blocks else 0)) * stateful.lender.ready.block_bytes
    assert ids(got) == ids(await stateful.lender.answer(named(prompt, ignore_eos=True)))
    again = await stateful.borrowed(named(prompt, ignore_eos=True))
    assert account_of(again).reused_blocks == blocks
    assert ids(again) == ids(got)
    await stateful.settled()


async def test_a_damaged_state_is_found_and_computed_again(stateful: Pair) -> None:
    prompt = prompt_of(300, 91)
    state = (await cached_blocks(stateful.lender, prompt[:-1], compute=True))[-1]
    flip_a_byte(stateful.lender, state)
    got = await stateful.borrowed(named(prompt, ignore_eos=True))
    account = account_of(got)
    assert account.mismatched_blocks >= 1
    assert "corrupted" in account.loan_failure
    fresh = named(prompt, ignore_eos=True)._replace(cache_salt="another")
    assert ids(got) == ids(await stateful.borrower.answer(fresh))
    await stateful.settled()


@pytest.mark.parametrize("kind", mostly_long(["gpt_oss", "qwen3_next"], "qwen3_next"))
async def test_a_boundary_in_the_shared_store_is_fetched_whole(kind: str, tmp_path: Path) -> None:
    """Blocks of the chain, of windows and of states are written; another engine goes on from the last boundary."""
    model = write_model(kind, tmp_path, vocab_size=VOCAB)
    dtype = "bfloat16" if kind == "qwen3_next" else "float32"
    store = {"kv_store": str(tmp_path / "store"), "kv_store_writes": "computed", "max_prefill_tokens": 1024}
    cores = sorted(os.sched_getaffinity(0))
    writer = vllm_engine("writer", model=model, dtype=dtype, cores=(cores[0],), **store)
    reader = vllm_engine("reader", model=model, dtype=dtype, cores=(cores[-1],), **store)
    async with engines(writer, reader):
        prompt, root = prompt_of(430, 95), root_key(writer.ready.model_fingerprint, "")
        width = writer.ready.block_tokens
        keys = block_keys(root, prompt, width)
        last = keys[(len(prompt) - 1) // width - 1]
        expected = ids(await writer.answer(named(prompt, ignore_eos=True)))
        await writer.until(lambda: {last, resume_name(last)} <= shared(writer))
        got = await reader.answer(named(prompt, ignore_eos=True)._replace(reads_store=True))
        account = account_of(got)
        assert ids(got) == expected
        assert (account.store_blocks, account.store_failure) == ((len(prompt) - 1) // width, "")
        assert account.computed_tokens == len(prompt) - account.store_blocks * width
        (state,) = (tmp_path / "store").rglob(name_of_tail(last).hex())
        with state.open("r+b") as file:  # its last bytes are of the block
            file.seek(-5, os.SEEK_END)
            byte = file.read(1)
            file.seek(-5, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        third = vllm_engine("third", model=model, dtype=dtype, cores=(cores[-1],), **store)
        async with engines(third):
            again = await third.answer(named(prompt, ignore_eos=True)._replace(reads_store=True))
            assert account_of(again).mismatched_blocks >= 1
            assert ids(again) == expected or kind == "qwen3_next"  # a recompute in bfloat16 may differ
            assert (await third.audited()).reserved_blocks == 0
        for engine in (writer, reader):
            assert (await engine.audited()).reserved_blocks == 0


def shared(engine: RealEngine) -> set[bytes]:
    """The names of blocks and boundaries that the engine says the store has."""
    events = [event for message in engine.said if isinstance(message, CacheChanged) for event in message.events]
    return {key for event in events if isinstance(event, Stored) and event.shared for key in event.keys}


def name_of_tail(key: bytes) -> bytes:
    """The name of a block of a window or a state; group 0 of both models."""
    return name_of(key, 0)


@pytest.mark.parametrize("kind", mostly_long(["gpt_oss", "qwen3_next"], "gpt_oss"))
async def test_a_router_knows_at_which_boundaries_a_worker_can_go_on(kind: str, tmp_path: Path, ask, audit) -> None:  # type: ignore[no-untyped-def]
    """Conversations of three turns, and prompts that share a beginning: what is predicted to be cached is."""
    model = write_model(kind, tmp_path, vocab_size=VOCAB)
    dtype = "bfloat16" if kind == "qwen3_next" else "float32"
    options = {"engine": "vllm", "vllm_python": PYTHON, "vllm_options": OPTIONS, "kv_memory_mib": 64}
    worker = {"model": model, "dtype": dtype, "max_prefill_tokens": 1024} | options
    topology = plan_topology(1, 1, {"model": model, "port": 0} | LENDER_ALWAYS, worker, [0, 1], 1)
    predicted, found, reused = [], [], 0
    async with running(LocalCluster(topology)) as (cluster, client):
        beginning = prompt_of(330, 96)
        for number in range(3):
            history = [*beginning[: 330 - 130 * (number == 2)], *prompt_of(40, 97 + number)]
            for turn in range(3):
                answer = await ask(client, history, max_tokens=20, ignore_eos=True)
                kv = answer.finish.receipt.kv
                predicted.append(answer.finish.receipt.placement.predicted_hit_blocks)
                found.append(kv.reused_blocks + kv.lender_cached_blocks)
                reused += kv.reused_blocks
                history += [*answer.token_ids, *prompt_of(100, 10 * number + turn)]
                await asyncio.sleep(2.0)  # the router learns what the workers hold
        await audit([each.address for each in cluster.workers])
    assert reused
    right = sum(min(ours, theirs) for ours, theirs in zip(predicted, found, strict=True))
    assert right >= 0.95 * max(sum(predicted), sum(found)), (predicted, found)
