"""Engines of vLLM: loans between them, failures at every point, and sampling that continues on another engine."""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count

import pytest
import pytest_asyncio

from engine.block_keys import block_keys, root_key
from engine.core_types import StructuredOutput
from engine.kv.block_pool import Stored
from engine.messages import (
    CacheChanged,
    Cancel,
    Generate,
    KvAccount,
    LendClosed,
    LoanBlocks,
    LoanFailed,
    Rejected,
    TakeSnapshot,
    Token,
)
from support.real_engines import RealEngine, chosen, engines, greedy, kill
from support.vllm_engines import BLOCK, flip_a_byte, ids, need_vllm, vllm_engine

pytestmark = [need_vllm, pytest.mark.asyncio(loop_scope="module")]
VOCAB = 2048
numbers = count()


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    generator = random.Random(num_tokens * 1000 + seed)
    return [generator.randrange(3, VOCAB) for _ in range(num_tokens)]


def account_of(tokens: list[Token]) -> KvAccount:
    return next(token.account for token in tokens if token.account is not None)


class Pair:
    """A lender and a borrower."""

    def __init__(self, lender: RealEngine, borrower: RealEngine) -> None:
        self.lender, self.borrower = lender, borrower

    async def borrowed(self, request: Generate) -> list[Token]:
        return await self.borrower.answer(request, self.lender)

    async def settled(self) -> None:
        """Both hold nothing, and their block pools' records agree."""
        for engine in (self.lender, self.borrower):
            found = await engine.audited()
            assert (found.reserved_blocks, found.sequences) == (0, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    cores = sorted(os.sched_getaffinity(0))
    lender = vllm_engine("lender", "prefill", cores=(cores[0],))
    borrower = vllm_engine("borrower", cores=(cores[-1],))
    async with engines(lender, borrower):
        yield Pair(lender, borrower)


def named(prompt: list[int], max_tokens: int = 12, **options: object) -> Generate:
    return greedy(f"r{next(numbers)}", prompt, max_tokens, **options)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 200, 500])
async def test_borrowed_blocks_give_the_tokens_of_the_lender_alone(pair: Pair, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    got = await pair.borrowed(named(prompt))
    account = account_of(got)
    blocks = (num_tokens - 1) // BLOCK
    assert (account.moved_blocks, account.computed_tokens) == (blocks, num_tokens - blocks * BLOCK)
    assert ids(got) == ids(await pair.lender.answer(named(prompt)))
    again = await pair.borrowed(named(prompt))
    assert ids(again) == ids(got)
    assert account_of(again).reused_blocks == blocks
    await pair.settled()


async def test_blocks_are_announced_chunk_by_chunk(pair: Pair) -> None:
    request = named(prompt_of(400, 1))
    account = account_of(await pair.borrowed(request))
    times = account.times
    assert times["last_blocks_ready"] > times["first_blocks_ready"]
    assert account.lender_computed_blocks == account.moved_blocks == 12


async def test_many_at_once_share_what_they_share(pair: Pair) -> None:
    shared = prompt_of(128, 2)
    requests = [named(shared + prompt_of(40 + i, 3)) for i in range(8)]
    alone = [ids(await pair.lender.answer(named(list(request.prompt)))) for request in requests]
    got = await asyncio.gather(*(pair.borrowed(request) for request in requests))
    assert [ids(tokens) for tokens in got] == alone
    await pair.settled()


async def test_a_flipped_byte_is_found_named_and_computed_again(pair: Pair) -> None:
    prompt = prompt_of(300, 4)
    expected = ids(await pair.lender.answer(named(prompt)))
    lent: list[int] = []
    probe = named(prompt)
    await pair.borrowed(replace(probe, prompt=tuple(prompt_of(10, 5))))
    events = [event for message in pair.lender.said if isinstance(message, CacheChanged) for event in message.events]
    assert events
    # Which block holds the fifth part of the prompt: the lender says so when it lends.
    request = named(prompt)
    original = pair.borrower.send

    def spoil(*messages: object) -> None:
        for message in messages:
            if isinstance(message, LoanBlocks) and not lent:
                lent.append(message.block_ids[4])
                flip_a_byte(pair.lender, lent[0])
        original(*messages)  # type: ignore[arg-type]

    pair.borrower.send = spoil  # type: ignore[method-assign]
    try:
        got = await pair.borrowed(request)
    finally:
        pair.borrower.send = original  # type: ignore[method-assign]
        flip_a_byte(pair.lender, lent[0])
    account = account_of(got)
    assert ids(got) == expected
    assert account.mismatched_blocks >= 1
    assert "corrupted" in account.loan_failure
    assert account.moved_blocks == 4
    await pair.settled()


async def test_a_lender_that_refuses_costs_nothing_but_time(pair: Pair) -> None:
    prompt = prompt_of(200, 6)
    request = named(prompt)
    pair.borrower.lent[request.request_id] = pair.lender, request
    original = pair.lender.send
    pair.lender.send = lambda *messages: pair.borrower.send(  # type: ignore[method-assign]
        LoanFailed(request.request_id, "no capacity")
    )
    try:
        pair.borrower.send(replace(request, borrow=True))
        await pair.borrower.until(lambda: pair.borrower.over(request))
    finally:
        pair.lender.send = original  # type: ignore[method-assign]
    got = pair.borrower.tokens[request.request_id]
    assert account_of(got).loan_failure == "no capacity"
    assert ids(got) == ids(await pair.lender.answer(named(prompt)))
    await pair.settled()


@pytest.mark.parametrize("after_ms", [0, 2, 5, 10, 20, 40, 80, 160])
async def test_a_cancel_at_any_moment_leaves_nothing_behind(pair: Pair, after_ms: int) -> None:
    requests = [named(prompt_of(300 + i, 7 + after_ms), 40) for i in range(3)]
    for request in requests:
        pair.borrower.lent[request.request_id] = pair.lender, request
        pair.borrower.send(replace(request, borrow=True))
    await asyncio.sleep(after_ms / 1e3)
    for request in requests:
        pair.borrower.send(Cancel(request.request_id))
    await pair.settled()


async def test_a_borrower_that_vanishes_leaves_nothing_at_the_lender(pair: Pair) -> None:
    for after_ms in (0, 5, 30):
        request = named(prompt_of(350, 20 + after_ms))
        pair.borrower.lent[request.request_id] = pair.lender, request
        pair.borrower.send(replace(request, borrow=True))
        await asyncio.sleep(after_ms / 1e3)
        pair.lender.send(LendClosed(request.request_id))
        pair.borrower.send(LoanFailed(request.request_id, "the lender is gone"))
        await pair.borrower.until(lambda request=request: pair.borrower.over(request))  # type: ignore[misc]
        await pair.settled()


SAMPLED = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7},
    "narrow": {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 8},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "bias": {"logit_bias": ((17, 100.0),)},
    "grammar": {
        "temperature": 0.8,
        "seed": 3,
        "structured": StructuredOutput("regex", ("[a-z]{3} [0-9]{40}",)),
    },
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 5},
}


@pytest.mark.parametrize("name", SAMPLED)
async def test_a_stream_continues_on_another_engine_with_the_same_tokens(pair: Pair, name: str) -> None:
    prompt = prompt_of(70, 30)
    whole = named(prompt, 20, **({"ignore_eos": name != "grammar"} | SAMPLED[name]))
    expected = await pair.lender.answer(whole)
    assert len(ids(expected)) == 20
    for cut in (1, 9):
        rest = replace(whole, request_id=f"c{next(numbers)}", emitted=tuple(ids(expected)[:cut]))
        got = await pair.borrower.answer(rest)
        assert ids(got) == ids(expected)[cut:]
    if name == "bias":
        assert set(ids(expected)) == {17}
    if name == "logprobs":
        assert all(token.logprobs is not None and len(token.logprobs.top_token_ids) == 3 for token in expected)
    await pair.settled()


async def test_several_choices_are_as_if_each_were_asked_alone(pair: Pair) -> None:
    prompt = prompt_of(100, 31)
    request = named(prompt, 10, n=3, temperature=1.0, seed=4)
    got = chosen(await pair.borrowed(request))
    assert sorted(got) == [0, 1, 2]
    assert got == chosen(await pair.lender.answer(named(prompt, 10, n=3, temperature=1.0, seed=4)))
    assert len({tuple(tokens) for tokens in got.values()}) > 1
    await pair.settled()


async def test_log_probabilities_of_the_prompt_come_once(pair: Pair) -> None:
    prompt = prompt_of(50, 32)
    request = named(prompt, 2, prompt_logprobs=2)
    await pair.lender.answer(request)
    scored = pair.lender.scored(request.request_id)
    assert len(scored) == len(prompt) - 1
    assert all(each.logprob <= 0 and len(each.top_token_ids) == 2 for each in scored)
    rest = replace(named(prompt, 2, prompt_logprobs=2), num_scored=20)
    await pair.borrower.answer(rest)
    told = pair.borrower.scored(rest.request_id)
    assert [each.logprob for each in told] == pytest.approx([each.logprob for each in scored[20:]], abs=1e-4)


async def test_beam_search_is_refused_by_name(pair: Pair) -> None:
    from engine.core_types import BeamParams

    request = named(prompt_of(10), beam=BeamParams(2))
    pair.lender.send(request)
    await pair.lender.until(lambda: any(isinstance(message, Rejected) for message in pair.lender.said))
    (refused,) = [message for message in pair.lender.said if isinstance(message, Rejected)]
    pair.lender.said.clear()
    assert refused.permanent
    assert "beam_width" in refused.reason


async def test_the_index_of_cached_blocks_uses_tandems_keys(pair: Pair) -> None:
    prompt = prompt_of(160, 33)
    await pair.lender.answer(named(prompt, 40))
    root = root_key(pair.lender.ready.model_fingerprint, "")
    keys = block_keys(root, prompt, BLOCK)
    pair.lender.said.clear()
    pair.lender.send(TakeSnapshot())
    await pair.lender.until(lambda: any(isinstance(m, CacheChanged) and m.snapshot for m in pair.lender.said))
    snapshots = [m for m in pair.lender.said if isinstance(m, CacheChanged) and m.snapshot]
    stored = {key: event.parent for event in snapshots[0].events if isinstance(event, Stored) for key in event.keys}
    assert [stored[key] for key in keys] == [root, *keys[:-1]]


async def test_preemption_by_vllm_loses_nothing() -> None:
    """A pool of 20 blocks for five requests of up to 9, admitted with the blocks for 16 tokens of output."""
    settings = {"kv_memory_mib": 4, "reserve_output_tokens": 16, "vllm_options": {"max_model_len": 320}}
    small, large = vllm_engine("small", **settings), vllm_engine("large", vllm_options={"max_model_len": 320})
    async with engines(small, large):
        assert small.ready.num_blocks == 20
        prompts = [prompt_of(70 + 5 * i, 40) for i in range(5)]
        expected = [ids(await large.answer(named(prompt, 180, ignore_eos=True))) for prompt in prompts]
        requests = [named(prompt, 180, ignore_eos=True) for prompt in prompts]
        got = await asyncio.gather(*(small.answer(request) for request in requests))
        assert [ids(tokens) for tokens in got] == expected
        assert any(token.account is not None and token.account.preemptions for tokens in got for token in tokens)
        found = await small.audited()
        assert found.reserved_blocks == 0


async def test_a_lender_killed_in_the_middle_of_a_loan() -> None:
    lender, borrower = vllm_engine("dying", "prefill"), vllm_engine("heir")
    started = asyncio.gather(lender.start(), borrower.start())
    await started
    try:
        prompt = prompt_of(500, 50)
        request = named(prompt, 8)
        borrower.lent[request.request_id] = lender, request
        borrower.send(replace(request, borrow=True))
        await lender.until(lambda: request.request_id in lender.borrowers, 20)
        await asyncio.sleep(0.05)
        kill(lender.pid)
        await lender.has_ended()
        borrower.send(LoanFailed(request.request_id, "the lender died"))
        await borrower.until(lambda: borrower.over(request))
        got = borrower.tokens[request.request_id]
        assert account_of(got).loan_failure == "the lender died"
        assert ids(got) == ids(await borrower.answer(named(prompt, 8)))
        found = await borrower.audited()
        assert found.reserved_blocks == 0
    finally:
        await asyncio.gather(lender.host.stop(), borrower.host.stop())
