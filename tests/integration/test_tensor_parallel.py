"""Engines of several ranks, each a process with its shard of the model and its part of every block."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import StartError
from engine.messages import Generate
from engine.vocabulary import BeamParams, SamplingParams
from support.long_runs import mostly_long
from support.real_engines import RealEngine, account_of, chosen, engines, gone, greedy, kill

BLOCK = 16
LENGTHS = (1, 16, 17, 33, 70, 101)


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1, 500), k=length)


def requests() -> list[Generate]:
    """Of every kind that sampling knows."""
    plain = [greedy(f"greedy {length}", prompt_of(length, length)) for length in LENGTHS]
    drawn: dict[str, Any] = {"max_tokens": 20, "temperature": 0.8, "seed": 7}
    kinds = {
        "choices": SamplingParams(**drawn, n=3, top_p=0.95),
        "penalties": SamplingParams(**drawn, repetition_penalty=1.2, presence_penalty=0.4, top_k=40),
        "beams": SamplingParams(max_tokens=6, n=2, beam=BeamParams(width=3)),
        "scores": SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=2, logprobs=3),
    }
    prompt = tuple(prompt_of(5, 41))
    others = [Generate(name, prompt, (), sampling, name, 0, borrow=False) for name, sampling in kinds.items()]
    repeating = prompt_of(6, 12) * 5
    return [*plain, *others, greedy("guessed", repeating, 30)]


@pytest.mark.parametrize("family", mostly_long(["qwen2", "llama", "qwen3", "gemma3", "mixtral", "qwen3_moe"], "qwen2"))
async def test_two_ranks_answer_as_one_does(make_model, family: str) -> None:  # type: ignore[no-untyped-def]
    """Everything at once, so that batches are mixed; float32, so that only the order of sums differs."""
    model = make_model(family)
    one = RealEngine("one", model, max_prefill_tokens=32)
    two = RealEngine("two", model, max_prefill_tokens=32, tensor_parallel=2)
    asked = requests()
    async with engines(one, two):
        assert len(two.rank_pids()) == 1
        assert one.rank_pids() == []
        assert two.ready.model_fingerprint == one.ready.model_fingerprint
        assert (two.ready.block_bytes, two.ready.num_blocks) == (one.ready.block_bytes, one.ready.num_blocks)
        for engine in (one, two):
            await asyncio.gather(*(engine.answer(request) for request in asked))
        for request in asked:
            name = request.request_id
            assert chosen(two.tokens[name]) == chosen(one.tokens[name]), name
        scores = [engine.scored("scores") for engine in (one, two)]
        assert len(scores[0]) == 40
        for mine, other in zip(*scores, strict=True):
            assert mine.top_token_ids == other.top_token_ids
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert sum(token.followed_guess for token in two.tokens["guessed"]) > 0, "guesses are verified by all ranks"
        for engine in (one, two):
            await engine.books()


async def test_ranks_of_unlike_numbers_lend_to_each_other(make_model) -> None:  # type: ignore[no-untyped-def]
    """Over NIXL: 1 to 2, 2 to 1 and 2 to 2, from whoever computed a prompt to who did not."""
    model = make_model("llama")
    sizes = {"one": 1, "two": 2, "both": 2}
    named = {name: RealEngine(name, model, tensor_parallel=size, threads=size) for name, size in sizes.items()}
    pairs = [("one", "two"), ("two", "one"), ("two", "both")]
    async with engines(*named.values()):
        for number, (lender, borrower) in enumerate(pairs):
            request = greedy(f"{lender} to {borrower}", prompt_of(number, 12 * BLOCK + 5))
            moved = await named[borrower].answer(request, named[lender])
            account = account_of(moved)
            assert account.loan_failure == ""
            assert (account.moved_blocks, account.mismatched_blocks) == (12, 0)
            assert account.moved_bytes == 12 * named[borrower].ready.block_bytes
            assert account.lanes
            alone = replace(request, request_id="alone", cache_salt="alone")
            expected = await named["one"].answer(alone)
            assert chosen(moved) == chosen(expected)
            del named["one"].tokens["alone"]
        # What came from two ranks is lent on by one: blocks are the same whoever holds them.
        request = greedy("on", named["one"].lent["two to one"][1].prompt)
        moved = await named["both"].answer(request, named["one"])
        assert account_of(moved).lender_cached_blocks == account_of(moved).moved_blocks == 12
        for engine in named.values():
            await engine.books()


@pytest.mark.parametrize("victim", ["follower", "rank 0"])
async def test_a_rank_that_dies_takes_its_engine_along(tiny_model: Path, victim: str) -> None:
    engine = RealEngine("engine", tiny_model, tensor_parallel=2)
    async with engines(engine):
        pids = [engine.pid, *engine.rank_pids()]
        engine.send(greedy("long", prompt_of(1, 40), 400))
        while len(engine.tokens.get("long", ())) < 5:
            await engine.news()
        kill(pids[1] if victim == "follower" else pids[0])
        await gone(pids)
        while not engine.end:
            await engine.news()
        assert "ended with code" in engine.end


@pytest.mark.parametrize(
    ("family", "ranks", "reason"),
    [
        ("llama", 3, "tensor_parallel 3 does not divide its 4 attention heads"),
        ("llama", 4, "tensor_parallel 4 does not divide its 2 KV heads"),
    ],
)
async def test_a_model_that_cannot_be_cut_is_refused(make_model, family: str, ranks: int, reason: str) -> None:  # type: ignore[no-untyped-def]
    engine = RealEngine("engine", make_model(family), tensor_parallel=ranks)
    with pytest.raises(StartError, match=reason):
        async with engines(engine):
            pass
    assert engine.rank_pids() == []
