"""Speculative decoding by vLLM: equal tokens with drafts and without, on one engine, lent, and after a failover."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from cluster.errors import StartError
from engine.core_types import StructuredOutput
from engine.messages.from_engine import Token
from engine.messages.to_engine import Generate
from support.draft_models import add_mtp_layer, cut_model, write_eagle
from support.engine_contract import VOCAB, EngineContract, Pair, account_of, named, numbers, prompt_of
from support.long_runs import mostly_long
from support.real_engines import RealEngine, engines
from support.vllm_engines import BLOCK, PYTHON, ROOT, V2, ids, need_vllm, vllm_engine
from support.vllm_models import write_model
from tandem.storyteller import STORYTELLER

pytestmark = [need_vllm, pytest.mark.asyncio(loop_scope="module")]
MAX_TOKENS = 24
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.7, "seed": 7},
    "top_p": {"temperature": 0.9, "top_p": 0.9, "seed": 8},
    "penalties": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "bias": {"temperature": 0.6, "seed": 4, "logit_bias": ((17, 3.0), (20, 2.0), (5, -100.0)), "min_tokens": 20},
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 5},
    "regex": {"temperature": 0.8, "seed": 3, "structured": StructuredOutput("regex", ("[a-z]{3} [0-9]{40}",))},
}


class Drafting(NamedTuple):
    """A model with a way to draft."""

    model: Callable[[Path], Path]
    config: Callable[[Path, Path], dict[str, Any]]
    """Function of the model's directory and a folder that returns vLLM's `speculative_config`."""


def glm_with_mtp(folder: Path) -> Path:
    model = write_model("glm4_moe", folder, vocab_size=VOCAB)
    prefix = "model.layers.4."
    norms = tuple(f"{prefix}{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm"))
    add_mtp_layer(model, prefix, f"{prefix}eh_proj.weight", norms, num_nextn_predict_layers=1)
    return model


def qwen_with_mtp(folder: Path) -> Path:
    model = write_model("qwen3_next", folder, vocab_size=VOCAB)
    norms = tuple(f"mtp.{name}.weight" for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"))
    add_mtp_layer(model, "mtp.layers.0.", "mtp.fc.weight", norms)
    return model


METHODS = {
    "ngram": Drafting(
        lambda _: STORYTELLER,
        lambda *_: {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    ),
    "draft model": Drafting(
        lambda _: STORYTELLER,
        lambda model, folder: {
            "method": "draft_model",
            "model": str(cut_model(model, folder, 3)),
            "num_speculative_tokens": 3,
        },
    ),
    "eagle": Drafting(
        lambda _: STORYTELLER,
        lambda model, folder: {
            "method": "eagle",
            "model": str(write_eagle(model, folder)),
            "num_speculative_tokens": 2,
        },
    ),
    "mtp": Drafting(glm_with_mtp, lambda *_: {"method": "mtp", "num_speculative_tokens": 2}),
}


class Speculating(NamedTuple):
    """Two engines that draft, and one of the same model that does not."""

    pair: Pair
    plain: RealEngine
    has_tokenizer: bool


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=mostly_long(METHODS, "eagle"))
async def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Speculating]:
    folder, drafting = tmp_path_factory.mktemp("drafts"), METHODS[request.param]
    model = drafting.model(folder)
    cores = sorted(os.sched_getaffinity(0))
    settings: dict[str, Any] = {"model": model, "vllm_python": V2}
    drafts = settings | {"vllm_options": {"speculative_config": drafting.config(model, folder)}}
    lender = vllm_engine("lender", "prefill", cores=(cores[0],), **drafts)
    borrower = vllm_engine("borrower", cores=(cores[-1],), **drafts)
    plain = vllm_engine("plain", cores=(cores[0],), **settings)
    async with engines(lender, borrower, plain):
        yield Speculating(Pair(lender, borrower), plain, model == STORYTELLER)


@pytest.fixture
def pair(site: Speculating) -> Pair:
    return site.pair


@pytest.mark.long
class TestContract(EngineContract):
    pass


def wanted(name: str) -> Generate:
    options = {"ignore_eos": "structured" not in SAMPLED[name]} | SAMPLED[name]
    return named(prompt_of(70, 50), MAX_TOKENS, **options)


def num_accepted(tokens: list[Token]) -> int:
    return sum(token.followed_draft for token in tokens)


@pytest.mark.parametrize("name", mostly_long(SAMPLED, "greedy", "seeded", "top_p", "regex"))
async def test_the_tokens_are_those_without_drafts(site: Speculating, name: str) -> None:
    request = wanted(name)
    if request.sampling.structured is not None and not site.has_tokenizer:
        return  # a made model has none, and its engine refuses
    expected = await site.plain.answer(request)
    got = await site.pair.lender.answer(request._replace(request_id=f"d{next(numbers)}"))
    assert ids(got) == ids(expected)
    assert got[-1].finish == expected[-1].finish
    assert sum(token.drafted for token in got) >= num_accepted(got)
    for cut in (1, 9, 22):
        rest = request._replace(request_id=f"c{next(numbers)}", emitted=tuple(ids(expected)[:cut]))
        assert ids(await site.pair.borrower.answer(rest)) == ids(expected)[cut:]
    await site.pair.settled()


async def test_drafts_are_accepted_and_those_after_a_loan_are_the_same(site: Speculating) -> None:
    """A lent block has the KV that the borrower's draft layers would have computed, its last token's included."""
    pair, accepted = site.pair, 0
    for seed in range(4):
        prompt = prompt_of(4 * BLOCK + 6, 60 + seed)
        got = await pair.borrowed(named(prompt, MAX_TOKENS, ignore_eos=True))
        account = account_of(got)
        assert account.moved_blocks == (len(prompt) - 1) // pair.lender.ready.block_tokens
        alone = await pair.lender.answer(named(prompt, MAX_TOKENS, ignore_eos=True))
        assert [(each.token_id, each.followed_draft) for each in got] == [
            (each.token_id, each.followed_draft) for each in alone
        ]
        accepted += num_accepted(got)
    assert accepted
    await pair.settled()


@pytest.mark.long
async def test_drafts_and_states_are_lent_together(tmp_path: Path) -> None:
    """Qwen3-Next: three groups of states, one of full attention with the draft layer; bfloat16, so one kind of engine.

    In bfloat16 the same token has other logits in a batch of drafts than alone, in vLLM as here.
    """
    model = qwen_with_mtp(tmp_path)
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    settings: dict[str, Any] = {"model": model, "vllm_python": V2, "dtype": "bfloat16", "vllm_options": drafts}
    cores = sorted(os.sched_getaffinity(0))
    lender = vllm_engine("lender", "prefill", cores=(cores[0],), **settings)
    borrower = vllm_engine("borrower", cores=(cores[-1],), **settings)
    async with engines(lender, borrower):
        pair = Pair(lender, borrower)
        for num_tokens in (97, 200, 700):
            prompt, width = prompt_of(num_tokens, 90), lender.ready.block_tokens
            got = await pair.borrowed(named(prompt, ignore_eos=True))
            assert account_of(got).moved_blocks == (num_tokens - 1) // width
            alone = await lender.answer(named(prompt, ignore_eos=True))
            assert [(each.token_id, each.followed_draft) for each in got] == [
                (each.token_id, each.followed_draft) for each in alone
            ]
        await pair.settled()


async def test_speculation_is_refused_on_v1() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    engine = vllm_engine("refused", vllm_python=PYTHON, vllm_options={"speculative_config": ngram})
    try:
        with pytest.raises(StartError, match="Model Runner V1") as raised:
            await engine.start()
        assert raised.value.field == "vllm_options"
    finally:
        await engine.host.stop()


async def test_a_draft_counts_if_it_is_the_token_drawn_and_other_methods_are_refused() -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [str(V2), "-m", "support.vllm_verification"]
    ran = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
    _, errors = await ran.communicate()
    assert ran.returncode == 0, errors[-3000:]


async def test_two_ranks_draft_as_one(tmp_path: Path) -> None:
    """Worker processes verify drafts as the engine process does, and lend the KV of draft layers."""
    model, cores = write_model("llama", tmp_path, vocab_size=VOCAB), tuple(sorted(os.sched_getaffinity(0)))
    drafts = {"method": "draft_model", "model": str(cut_model(model, tmp_path, 4)), "num_speculative_tokens": 2}
    settings: dict[str, Any] = {"model": model, "vllm_python": V2}
    plain = vllm_engine("plain", cores=cores[:1], **settings)
    two = vllm_engine(
        "two", "prefill", cores=cores, tensor_parallel=2, vllm_options={"speculative_config": drafts}, **settings
    )
    one = vllm_engine("one", cores=cores[-1:], vllm_options={"speculative_config": drafts}, **settings)
    async with engines(plain, two, one):
        for name in ("greedy", "seeded"):
            request = wanted(name)
            expected = ids(await plain.answer(request))
            got = await two.answer(request._replace(request_id=f"d{next(numbers)}"))
            assert ids(got) == expected
            assert num_accepted(got) or name != "greedy"
            rest = request._replace(request_id=f"c{next(numbers)}", emitted=tuple(expected[:9]))
            assert ids(await one.answer(rest)) == expected[9:]
        prompt = prompt_of(4 * BLOCK + 6, 64)
        moved = await one.answer(named(prompt, MAX_TOKENS, ignore_eos=True), two)
        assert account_of(moved).moved_blocks == 4
        assert ids(moved) == ids(await plain.answer(named(prompt, MAX_TOKENS, ignore_eos=True)))
        await Pair(two, one).settled()
