"""vLLM engines: the contract of engines, sampling that continues elsewhere, preemption, and a lender that dies."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.core_types import BeamParams, StructuredOutput
from engine.messages.from_engine import Rejected
from engine.messages.to_engine import LoanFailed
from support.engine_contract import EngineContract, Pair, account_of, named, numbers, prompt_of
from support.real_engines import engines, kill
from support.vllm_engines import ids, need_vllm, vllm_engine

pytestmark = [need_vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    cores = sorted(os.sched_getaffinity(0))
    lender = vllm_engine("lender", "prefill", cores=(cores[0],))
    borrower = vllm_engine("borrower", cores=(cores[-1],))
    async with engines(lender, borrower):
        yield Pair(lender, borrower)


class TestContract(EngineContract):
    pass


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
        rest = whole._replace(request_id=f"c{next(numbers)}", emitted=tuple(ids(expected)[:cut]))
        got = await pair.borrower.answer(rest)
        assert ids(got) == ids(expected)[cut:]
    if name == "bias":
        assert set(ids(expected)) == {17}
    if name == "logprobs":
        assert all(token.logprobs is not None and len(token.logprobs.top_token_ids) == 3 for token in expected)
    await pair.settled()


async def test_log_probabilities_of_the_prompt_come_once(pair: Pair) -> None:
    prompt = prompt_of(50, 32)
    request = named(prompt, 2, prompt_logprobs=2)
    await pair.lender.answer(request)
    scored = pair.lender.scored(request.request_id)
    assert len(scored) == len(prompt) - 1
    assert all(each.logprob <= 0 and len(each.top_token_ids) == 2 for each in scored)
    rest = named(prompt, 2, prompt_logprobs=2)._replace(num_scored=20)
    await pair.borrower.answer(rest)
    told = pair.borrower.scored(rest.request_id)
    assert [each.logprob for each in told] == pytest.approx([each.logprob for each in scored[20:]], abs=1e-4)


async def test_beam_search_is_refused_by_name(pair: Pair) -> None:

    request = named(prompt_of(10), beam=BeamParams(2))
    pair.lender.send(request)
    await pair.lender.until(lambda: any(isinstance(message, Rejected) for message in pair.lender.said))
    (refused,) = [message for message in pair.lender.said if isinstance(message, Rejected)]
    pair.lender.said.clear()
    assert refused.permanent
    assert "beam_width" in refused.reason


async def test_preemption_by_vllm_loses_nothing(pair: Pair) -> None:
    """A pool of 20 blocks for five requests of up to 9, admitted with the blocks for 16 tokens of output."""
    settings = {"kv_memory_mib": 4, "reserve_output_tokens": 16, "vllm_options": {"max_model_len": 320}}
    small, large = vllm_engine("small", **settings), pair.lender
    async with engines(small):
        assert small.ready.num_blocks == 20
        prompts = [prompt_of(70 + 5 * i, 40) for i in range(5)]
        expected = [ids(await large.answer(named(prompt, 180, ignore_eos=True))) for prompt in prompts]
        requests = [named(prompt, 180, ignore_eos=True) for prompt in prompts]
        got = await asyncio.gather(*(small.answer(request) for request in requests))
        assert [ids(tokens) for tokens in got] == expected
        assert any(token.account is not None and token.account.preemptions for tokens in got for token in tokens)
        found = await small.audited()
        assert found.reserved_blocks == 0


async def test_a_lender_killed_in_the_middle_of_a_loan(pair: Pair) -> None:
    lender, borrower = vllm_engine("dying", "prefill"), pair.borrower
    await lender.start()
    try:
        prompt = prompt_of(500, 50)
        request = named(prompt, 8)
        borrower.lent[request.request_id] = lender, request
        borrower.send(request._replace(borrow=True))
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
        await lender.host.stop()
