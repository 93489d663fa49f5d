"""Engines of several ranks, each a process with its shard of the model and its part of every block."""

import asyncio
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.errors import StartError
from cluster.roles import Role
from engine.core_types import BeamParams, SamplingParams
from engine.errors import ModelRefused
from engine.messages.from_engine import Load
from engine.messages.to_engine import Generate
from kvtransfer.ranks import split_endpoint
from support.core_engine import account_of
from support.long_runs import long, mostly_long
from support.processes import (
    LENDER_ALWAYS,
    Stream,
    alive,
    assert_equal_answers,
    engine_of,
    finished,
    gone,
    pause,
    ranks_of,
    running,
    workers_joined,
)
from support.real_engines import RealEngine, chosen, engines, greedy, kill

FAMILIES = mostly_long(["qwen2", "qwen3_moe", "llama", "qwen3", "gemma2", "gemma3", "mistral", "mixtral"], "qwen3_moe")
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
    drafted = greedy("guessed", prompt_of(6, 20), 40, logit_bias=((7, 100.0),))  # easily
    return [*plain, *others, drafted]


@pytest.mark.parametrize("family", FAMILIES)
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
        assert sum(token.followed_draft for token in two.tokens["guessed"]) > 0, "guesses are verified by all ranks"
        for engine in (one, two):
            await engine.audited()


async def test_ranks_of_unlike_numbers_lend_to_each_other(make_model) -> None:  # type: ignore[no-untyped-def]
    """1 to 2, 2 to 1 and 2 to 2, from whoever computed a prompt to who did not. One of them reads over TCP: a rank that
    is stopped holds up nobody who reads its memory without its help."""
    model = make_model("llama")
    sizes = {"one": 1, "two": 2, "both": 2}
    lanes = {"one": ["tcp"], "two": [], "both": []}
    roles: dict[str, Role] = {"one": "decode", "two": "prefill", "both": "decode"}
    named = {
        name: RealEngine(
            name, model, roles[name], tensor_parallel=size, threads=size, strict_lanes=lanes[name], peer_silence_s=4.0
        )
        for name, size in sizes.items()
    }
    pairs = [("one", "two"), ("two", "one"), ("two", "both")]
    over = {"one": "tcp", "two": "cma", "both": "posix"}
    async with engines(*named.values()):
        files = [b'"file"' in endpoint for endpoint in split_endpoint(named["two"].ready.endpoint)]
        assert files == [True, True], "each rank of a prefill worker has its part of the pool in a file"
        for number, (lender, borrower) in enumerate(pairs):
            request = greedy(f"{lender} to {borrower}", prompt_of(number, 12 * BLOCK + 5))
            moved = await named[borrower].answer(request, named[lender])
            account = account_of(moved)
            assert account.loan_failure == ""
            assert (account.moved_blocks, account.mismatched_blocks) == (12, 0)
            assert account.moved_bytes == 12 * named[borrower].ready.block_bytes
            assert [lane.partition("/")[0] for lane in account.lanes] == [over[borrower]]
            alone = request._replace(request_id="alone", cache_salt="alone")
            expected = await named["one"].answer(alone)
            assert chosen(moved) == chosen(expected)
            del named["one"].tokens["alone"]
        # What came from two ranks is lent on by one: blocks are the same whoever holds them.
        request = greedy("on", named["one"].lent["two to one"][1].prompt)
        moved = await named["both"].answer(request, named["one"])
        assert account_of(moved).lender_cached_blocks == account_of(moved).moved_blocks == 12
        for engine in named.values():
            await engine.audited()
        await _a_rank_is_stopped(named["both"], named["one"], prompt_of(2, 12 * BLOCK + 5))
        await _dies_whole(named["two"], victim=0)
        await _dies_whole(named["both"], victim=1)


@long
async def test_four_ranks(tmp_path: Path) -> None:
    """They answer as one does, borrow from one and two ranks, and lend to two; with KV in int8, too."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.1)
    model.save_pretrained(tmp_path)
    for kept in ("auto", "int8"):
        of = {size: RealEngine(f"{size} {kept}", tmp_path, tensor_parallel=size, kv_dtype=kept) for size in (1, 2, 4)}
        async with engines(*of.values()):
            assert len(of[4].rank_pids()) == 3
            for number, (lender, borrower) in enumerate([(1, 4), (2, 4), (4, 2)]):
                request = greedy(f"{lender} to {borrower}", prompt_of(number, 12 * BLOCK + 5))
                moved = await of[borrower].answer(request, of[lender])
                account = account_of(moved)
                assert (account.moved_blocks, account.mismatched_blocks, account.loan_failure) == (12, 0, "")
                alone = request._replace(request_id=f"alone {number}", cache_salt="alone")
                for size in (1, 4):
                    assert chosen(await of[size].answer(alone)) == chosen(moved)
            for engine in of.values():
                await engine.audited()


async def _a_rank_is_stopped(lender: RealEngine, borrower: RealEngine, held: list[int]) -> None:
    """Rank 0 turns on, and lends what is `held`: nobody waits for the other rank's part of it, and the engine does not
    say that all is well."""
    (rank,) = lender.rank_pids()
    await pause(rank)
    request = greedy("stuck", held)
    stuck = await borrower.answer(request, lender)
    assert account_of(stuck).loan_failure == "no read has ended for 4 s"
    alone = await borrower.answer(request._replace(request_id="not stuck", cache_salt="alone"))
    assert chosen(stuck) == chosen(alone)
    lender.said.clear()
    await asyncio.sleep(0.6)
    assert not lender._said(Load)
    os.kill(rank, signal.SIGCONT)
    await lender.until(lambda: lender._said(Load))
    for engine in (borrower, lender):
        await engine.audited()


async def _dies_whole(engine: RealEngine, victim: int) -> None:
    """One of its processes is killed in the middle of something: the others follow, and its front hears of it."""
    pids = [engine.pid, *engine.rank_pids()]
    engine.send(greedy("long", prompt_of(1, 40), 400))
    await engine.until(lambda: len(engine.tokens.get("long", ())) >= 5)
    kill(pids[victim])
    await gone(pids)
    assert "ended with code" in await engine.has_ended()


@long
async def test_bfloat16_is_as_near_to_float32_as_on_one_rank(make_model) -> None:  # type: ignore[no-untyped-def]
    """The packed weights of the CPU kernels are a rank's own. By log probabilities of a prompt."""
    exact, rough = make_model("qwen2"), make_model("qwen2", dtype="bfloat16")
    of = {"truth": RealEngine("truth", exact), "one": RealEngine("one", rough)}
    of["two"] = RealEngine("two", rough, tensor_parallel=2)
    asked = Generate("r", tuple(prompt_of(1, 90)), (), SamplingParams(1, prompt_logprobs=0), "", 0, borrow=False)
    async with engines(*of.values()):
        await asyncio.gather(*(engine.answer(asked) for engine in of.values()))
    truth, one, two = (np.array([each.logprob for each in engine.scored("r")]) for engine in of.values())
    assert len(truth) == 89
    noise = np.abs(one - truth).mean()
    assert 0 < np.abs(two - truth).mean() <= 1.5 * noise


@long
async def test_a_stream_survives_a_rank_of_its_decode_worker(tiny_model: Path, cluster_of: Any, audit: Any) -> None:
    """A prefill worker of one rank lends to a decode worker of two. A follower of that dies: its worker leaves, what
    ran there goes on elsewhere token by token, and no process is left."""
    router = LENDER_ALWAYS | {"no_worker_grace_s": 60.0}
    cluster = cluster_of(tiny_model, prefill=1, decode=1, router=router, device="cpu")
    (alone,) = cluster._topology.decode
    parallel = alone.model_copy(update={"worker_id": "parallel", "tensor_parallel": 2})
    cluster._topology = replace(cluster._topology, decode=(parallel,))
    prompt = prompt_of(3, 6 * BLOCK + 3)
    async with running(cluster) as (cluster, client):
        (worker,) = cluster.decode
        pids = [engine_of(worker), *ranks_of(engine_of(worker))]
        assert len(pids) == 2
        undisturbed = await Stream(client, prompt, 100).task
        kv = undisturbed.receipt.kv
        assert (kv.moved_blocks, kv.verified_blocks, kv.loan_failure) == (6, 6, "")
        stream = Stream(client, prompt, 100, cache_salt="again")
        await stream.reached(5)
        kill(pids[1])
        await worker.process.wait()
        await gone(pids)
        assert not stream.task.done()
        refuge = await cluster.add_worker("decode_worker", alone)
        cluster.engines.append(engine_of(refuge))  # type: ignore[attr-defined]
        assert_equal_answers(await finished([stream]), [undisturbed])
        assert undisturbed.receipt.placement.decode_worker == "parallel"
        assert stream.receipt.placement.decode_worker == alone.worker_id
        assert stream.receipt.placement.attempt == 2
        await workers_joined(client, 1, 1)
        await audit(alive(cluster))


@long
async def test_a_model_that_cannot_be_cut_is_refused_by_the_engine(tiny_model: Path) -> None:
    engine = RealEngine("engine", tiny_model, tensor_parallel=3)
    with pytest.raises(StartError, match="model: tensor_parallel 3 does not divide its 4 attention heads"):
        async with engines(engine):
            pass
    await gone([engine.pid])


def _config(kind: str, **changed: Any) -> Any:
    import transformers

    small: dict[str, Any] = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama_like: dict[str, Any] = small | {"intermediate_size": 128, "num_key_value_heads": 2, "pad_token_id": 0}
    if kind == "GPT2Config":
        return transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4)
    return getattr(transformers, kind)(**llama_like | changed)


@pytest.mark.parametrize(
    ("config", "ranks", "reason"),
    [
        (("LlamaConfig", {}), 4, "tensor_parallel 4 does not divide its 2 KV heads"),
        (("GPT2Config", {}), 2, "transformers has no tensor-parallel plan for gpt2: tensor_parallel must be 1"),
        (("Phi3Config", {}), 2, "its tensor-parallel plan uses rowwise_split_input, which Tandem does not support"),
        (("LlamaConfig", {"intermediate_size": 129}), 2, "tensor_parallel 2 does not divide the 129 features of "),
    ],
)
def test_models_that_cannot_be_cut(config: tuple[str, dict[str, Any]], ranks: int, reason: str) -> None:
    from engine.backends.torch.loading.sharding import refuse_by_plan

    kind, changed = config
    with pytest.raises(ModelRefused, match=reason):
        refuse_by_plan(_config(kind, **changed), ranks)


def test_models_that_can() -> None:
    from engine.backends.torch.loading.sharding import refuse_by_plan

    refuse_by_plan(_config("LlamaConfig", vocab_size=101), 2)
    refuse_by_plan(_config("MixtralConfig"), 2)
