"""vLLM engines on each model runner: the contract of engines, continued streams, preemption, and a lost lender.

docs/vllm.md tells clients what the tests of continued streams show.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from engine.core_types import StructuredOutput
from engine.messages.from_engine import LoadReport, Token
from engine.messages.to_engine import Generate
from engine.model.detokenizer import load_tokenizer
from engine.model.model_dir import ModelDir
from engine.sampling.json_schemas import prepared_schema
from support.engine_contract import EngineContract, Pair, account_of, named, numbers, prompt_of
from support.long_runs import mostly_long
from support.real_engines import engines, kill, lent_by
from support.vllm_engines import PYTHON, V2, ids, need_vllm, vllm_engine
from tandem.storyteller import STORYTELLER

pytestmark = [need_vllm, pytest.mark.asyncio(loop_scope="module")]
MAX_TOKENS = 24
TOKENIZER = load_tokenizer(ModelDir.open(STORYTELLER))
assert TOKENIZER is not None
CUTS = (1, 9, 22)
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 8}}, '
SCHEMA += '"required": ["n", "s"], "additionalProperties": false}'
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7},
    "largest seed": {"temperature": 0.9, "seed": (1 << 64) - 1},
    "top_p": {"temperature": 1.2, "top_p": 0.9, "seed": 8},
    "top_k": {"temperature": 1.2, "top_k": 40, "seed": 8},
    "min_p": {"temperature": 1.2, "min_p": 0.05, "seed": 8},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "penalties, seeded": {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "bias": {"temperature": 1.0, "seed": 4, "logit_bias": ((17, 6.0), (20, 5.0), (5, -100.0))},
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 5},
    "logprob of the token alone": {"logprobs": 0},
    "regex": {"temperature": 0.8, "seed": 3, "structured": StructuredOutput("regex", ("[a-z]{3} [0-9]{40}",))},
    "regex, greedy": {"structured": StructuredOutput("regex", ("[a-z]{3} [0-9]{40}",))},
    "json_schema": {"temperature": 0.8, "seed": 3, "structured": StructuredOutput("json_schema", (SCHEMA,))},
    "json_object": {"temperature": 0.8, "seed": 3, "structured": StructuredOutput("json_object", ())},
    "choice": {"structured": StructuredOutput("choice", ("once upon a time there was", "a long time ago, far away"))},
    "grammar": {
        "seed": 3,
        "structured": StructuredOutput("grammar", ('start: ("ab" | "cd")+ "."',)),
        "temperature": 0.9,
    },
}
SOME = ("greedy", "seeded", "top_p", "penalties, seeded", "bias", "logprobs", "regex", "json_schema", "choice")
KINDS = {
    "V2 asynchronous": {"vllm_python": V2},
    "V2 synchronous": {"vllm_python": V2, "vllm_options": {"async_scheduling": False}},
    "V1": {"vllm_python": PYTHON},
}


@pytest.fixture(scope="module", params=mostly_long(KINDS, "V2 asynchronous"))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of an engine of one kind."""
    return KINDS[request.param]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(kind: dict[str, Any]) -> AsyncIterator[Pair]:
    cores = sorted(os.sched_getaffinity(0))
    lender = vllm_engine("lender", "prefill", cores=(cores[0],), **kind)
    borrower = vllm_engine("borrower", cores=(cores[-1],), **kind)
    async with engines(lender, borrower):
        yield Pair(lender, borrower)


class TestContract(EngineContract):
    pass


def wanted(name: str, seed: int) -> Generate:
    options = {"ignore_eos": "structured" not in SAMPLED[name]} | SAMPLED[name]
    return named(prompt_of(70, seed), MAX_TOKENS, **options)


def resumed(whole: Generate, emitted: list[int]) -> Generate:
    return whole._replace(request_id=f"c{next(numbers)}", emitted=tuple(emitted))


@pytest.mark.parametrize("name", mostly_long(SAMPLED, *SOME))
async def test_a_stream_continues_on_another_engine_with_the_same_tokens(pair: Pair, name: str) -> None:
    whole = wanted(name, 30)
    expected = await pair.lender.answer(whole)
    assert len(ids(expected)) == MAX_TOKENS or "structured" in SAMPLED[name]
    cuts = [cut for cut in CUTS if cut < len(expected)]
    assert cuts
    for cut in cuts:
        got = await pair.borrower.answer(resumed(whole, ids(expected)[:cut]))
        assert ids(got) == ids(expected)[cut:]
        assert got[-1].finish == expected[-1].finish
        if (count := SAMPLED[name].get("logprobs")) is not None:
            assert_equal_logprobs(got, expected[cut:], count)
    if name == "bias":
        assert {17, 20} & set(ids(expected))
    await pair.settled()


def assert_equal_logprobs(got: list[Token], expected: list[Token], count: int) -> None:
    for token, other in zip(got, expected, strict=True):
        assert len(token.logprobs.top_token_ids) == len(token.logprobs.top_logprobs) == count
        assert token.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-3)
        assert token.logprobs.top_token_ids == other.logprobs.top_token_ids


async def test_whitespace_of_structured_output_is_bounded(pair: Pair) -> None:
    """A model that prefers spaces writes no two of them; an output that another engine laid out in lines goes on."""
    form = StructuredOutput("json_schema", (prepared_schema(SCHEMA, lambda *_: False),))
    vocabulary = range(TOKENIZER.get_vocab_size())
    spaces = tuple((token_id, 50.0) for token_id in vocabulary if TOKENIZER.decode([token_id]).isspace())
    answer = await pair.lender.answer(named(prompt_of(70, 35), 12, structured=form, logit_bias=spaces))
    assert re.match(r'\{"n": -?[0-9]', TOKENIZER.decode(ids(answer)))
    begun = TOKENIZER.encode('{\n  "n": 1,\n  "s"', add_special_tokens=False).ids
    rest = resumed(named(prompt_of(70, 35), 64, structured=form), begun)
    whole = TOKENIZER.decode(begun + ids(await pair.borrower.answer(rest)))
    assert re.match(r'\{\n  "n": 1,\n  "s"\s*:', whole)
    await pair.settled()


async def test_min_tokens_counts_those_of_an_earlier_attempt(pair: Pair) -> None:
    """Nearly every token would end it, and none of the first 20 does."""
    ends = frozenset(range(3, 100))
    options = {"temperature": 1.0, "seed": 11, "min_tokens": 20, "stop_token_ids": ends}
    whole = named(prompt_of(70, 31), MAX_TOKENS, **options)
    expected = await pair.lender.answer(whole)
    assert len(expected) >= 20
    assert not set(ids(expected)[:20]) & ends
    for cut in (1, 9, 19):
        got = await pair.borrower.answer(resumed(whole, ids(expected)[:cut]))
        assert ids(got) == ids(expected)[cut:]
    await pair.settled()


async def test_choices_continue_each_by_itself(pair: Pair) -> None:
    whole = named(prompt_of(70, 32), MAX_TOKENS, n=3, temperature=0.9, seed=6, ignore_eos=True)
    expected: dict[int, list[int]] = {}
    for token in await pair.lender.answer(whole):
        expected.setdefault(token.choice, []).append(token.token_id)
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    others = (tuple(expected[1][:4]), tuple(expected[2][:9]))
    rest = resumed(whole, expected[0][:1])._replace(emitted_others=others)
    got: dict[int, list[int]] = {}
    for token in await pair.borrower.answer(rest):
        got.setdefault(token.choice, []).append(token.token_id)
    assert got == {0: expected[0][1:], 1: expected[1][4:], 2: expected[2][9:]}
    await pair.settled()


async def test_one_stream_moves_every_four_tokens(pair: Pair) -> None:
    whole = wanted("penalties, seeded", 33)
    expected = ids(await pair.lender.answer(whole))
    done: list[int] = []
    for number in range(MAX_TOKENS // 4):
        engine = (pair.borrower, pair.lender)[number % 2]
        part = resumed(whole, done)
        some = part._replace(sampling=part.sampling._replace(max_tokens=len(done) + 4))
        done += ids(await engine.answer(some))
    assert done == expected
    await pair.settled()


async def test_a_stream_without_a_seed_goes_on(pair: Pair) -> None:
    """With other tokens on V2, where only a client's seed is passed to vLLM."""
    whole = named(prompt_of(70, 34), MAX_TOKENS, temperature=1.0, seed=3, seed_is_drawn=True, ignore_eos=True)
    expected = ids(await pair.lender.answer(whole))
    got = ids(await pair.borrower.answer(resumed(whole, expected[:9])))
    assert len(got) == MAX_TOKENS - 9
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


async def test_preemption_by_vllm_loses_nothing(pair: Pair, kind: dict[str, Any]) -> None:
    """A pool of 20 blocks for five requests of 5, admitted with the blocks for 16 tokens of output."""
    options = {"max_model_len": 320} | kind.get("vllm_options", {})
    settings = kind | {"kv_memory_mib": 4, "reserve_output_tokens": 16, "vllm_options": options}
    small, large = vllm_engine("small", **settings), pair.lender
    async with engines(small):
        assert small.ready.num_blocks == 20
        prompts = [prompt_of(70 + 5 * i, 40) for i in range(5)]
        expected = [ids(await large.answer(named(prompt, 64, ignore_eos=True))) for prompt in prompts]
        requests = [named(prompt, 64, ignore_eos=True) for prompt in prompts]
        got = await asyncio.gather(*(small.answer(request) for request in requests))
        assert [ids(tokens) for tokens in got] == expected
        assert any(token.account is not None and token.account.preemptions for tokens in got for token in tokens)
        found = await small.audited()
        assert found.reserved_blocks == 0


async def test_a_lender_killed_in_the_middle_of_a_loan(pair: Pair, kind: dict[str, Any]) -> None:
    lender, borrower = vllm_engine("dying", "prefill", **kind), pair.borrower
    await lender.start()
    try:
        prompt = prompt_of(500, 50)
        request = named(prompt, 8)
        borrower.send(lent_by(lender, request))
        await lender.until(lambda: any(isinstance(m, LoadReport) and m.loans for m in lender.said))
        kill(lender.pid)
        await lender.has_ended()
        await borrower.until(lambda: borrower.over(request))
        got = borrower.tokens[request.request_id]
        assert account_of(got).loan_failure.startswith("the connection ")
        assert ids(got) == ids(await borrower.answer(named(prompt, 8)))
        found = await borrower.audited()
        assert found.reserved_blocks == 0
    finally:
        await lender.host.stop()
