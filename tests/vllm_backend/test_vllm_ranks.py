"""Tensor-parallel vLLM engines: two ranks give the tokens of one, and exchange KV with engines of one rank."""

import asyncio
import os
import random
from pathlib import Path

from engine.core_types import SamplingParams
from engine.messages.to_engine import Generate
from kvtransfer.ranks import split_endpoint, without_planes
from support.processes import gone
from support.real_engines import RealEngine, engines, greedy, kill
from support.vllm_engines import BLOCK, ids, need_vllm, stored, vllm_engine
from support.vllm_models import VOCAB, write_model

pytestmark = [need_vllm]


def prompt_of(num_tokens: int) -> list[int]:
    return random.Random(num_tokens).choices(range(3, VOCAB), k=num_tokens)


def requests(prefix: str) -> list[Generate]:
    """Requests of unlike lengths and options; rank 0 alone draws the tokens of some."""
    plain = [greedy(f"{prefix} greedy {n}", prompt_of(n), 24, ignore_eos=True) for n in (33, 100, 300)]
    drawn = SamplingParams(max_tokens=24, temperature=0.8, seed=7, top_k=40, repetition_penalty=1.2, ignore_eos=True)
    sampled = [Generate(f"{prefix} drawn {n}", prompt_of(n), (), drawn, "d", 0, lender=None) for n in (40, 70)]
    return [*plain, *sampled]


async def test_two_ranks_answer_as_one_does_and_lend_both_ways(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    one = vllm_engine("one", model=model, cores=cores[:1])
    two = vllm_engine("two", "prefill", model, tensor_parallel=2, cores=cores)
    async with engines(one, two):
        assert len(two.rank_pids()) == 2
        assert two.ready.model_fingerprint == one.ready.model_fingerprint
        assert (two.ready.block_bytes, two.ready.num_blocks) == (one.ready.block_bytes, one.ready.num_blocks)
        assert len(split_endpoint(without_planes(two.ready.endpoint)[2])) == 2
        answers: dict[str, list[list[int]]] = {}
        for name, engine in (("one", one), ("two", two)):
            streams = await asyncio.gather(*(engine.answer(each) for each in requests(name)))
            answers[name] = [ids(stream) for stream in streams]
        assert answers["one"] == answers["two"]
        for number, (lender, borrower) in enumerate([(two, one), (one, two)]):
            request = greedy(f"loan {number}", prompt_of(10 * BLOCK + 5 + number), 16, ignore_eos=True)
            moved = await borrower.answer(request, lender)
            account = moved[0].account
            assert (account.moved_blocks, account.mismatched_blocks, account.loan_failure) == (10, 0, "")
            expected = await lender.answer(request._replace(request_id=f"alone {number}"))
            assert ids(moved) == ids(expected)
            for cut in (1, 8, 15):  # a failover: the other engine goes on with what was emitted
                rest = request._replace(request_id=f"cut {number} {cut}", emitted=tuple(ids(expected)[:cut]))
                assert ids(await borrower.answer(rest)) == ids(expected)[cut:]
        for engine in (one, two):
            assert (await engine.audited()).reserved_blocks == 0
        await _dies_whole(two, victim=1)


async def _dies_whole(engine: RealEngine, victim: int) -> None:
    """Kill one rank in the middle of a stream: the others end, and the front hears of it."""
    pids = [engine.pid, *engine.rank_pids()]
    engine.send(greedy("long", prompt_of(40), 400, ignore_eos=True))
    await engine.until(lambda: len(engine.tokens.get("long", ())) >= 5)
    kill(pids[victim])
    await gone(pids)
    assert "ended with code" in await engine.has_ended()


async def test_ranks_write_to_the_shared_store_and_read_from_it(tmp_path: Path) -> None:
    """Objects are whole blocks: one rank finds what two have written, and two what one has."""
    model = write_model("llama", tmp_path / "model")
    cores = tuple(sorted(os.sched_getaffinity(0)))
    store = {"kv_store": str(tmp_path / "store"), "kv_store_writes": "computed"}
    two = vllm_engine("two", model=model, tensor_parallel=2, cores=cores, **store)
    one = vllm_engine("one", model=model, cores=cores[:1], **store)
    async with engines(one, two):
        for number, (writer, reader) in enumerate([(two, one), (one, two)]):
            prompt = prompt_of(10 * BLOCK + 5 + number)
            request = greedy(f"written {number}", prompt, 16, ignore_eos=True)._replace(reads_store=True)
            written = await writer.answer(request)
            await stored(tmp_path / "store", 10 * (number + 1))
            read = await reader.answer(request._replace(request_id=f"read {number}"))
            assert ids(read) == ids(written)
            account = read[0].account
            assert (account.store_blocks, account.mismatched_blocks, account.store_failure) == (10, 0, "")
        for engine in (one, two):
            assert (await engine.audited()).reserved_blocks == 0
