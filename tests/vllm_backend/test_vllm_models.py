"""Models of every kind of KV cache: prefill and decode on two vLLM engines give the tokens of one alone."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from bench.models import word_tokenizer
from cluster.errors import StartError
from engine.core_types import StructuredOutput
from engine.messages.from_engine import Failed
from engine.sampling.structured_output import FIELD
from support.adapters import LLAMA, adapter_weights, write_adapter
from support.long_runs import mostly_long
from support.real_engines import RealEngine, engines, greedy
from support.refusals import refusal_of
from support.vllm_engines import BLOCK, V2, ids, need_vllm, vllm_engine
from support.vllm_models import KINDS, VOCAB, write_model

pytestmark = [need_vllm]
ELSEWHERE = ("deepseek", "qwen3_next", "qwen3_5")
"""Kinds that this machine's vLLM refuses, or that `test_vllm_groups.py` tests in bfloat16."""
LENGTHS = (33, 64, 100, 300)


def has_amx() -> bool:
    return "amx_tile" in Path("/proc/cpuinfo").read_text()


@pytest.mark.parametrize("kind", mostly_long([kind for kind in KINDS if kind not in ELSEWHERE]))
async def test_prefill_and_decode_give_the_tokens_of_one_engine(kind: str, tmp_path: Path) -> None:
    model = write_model(kind, tmp_path)
    cores = sorted(os.sched_getaffinity(0))
    lender = vllm_engine("lender", "prefill", model, cores=(cores[0],))
    borrower = vllm_engine("borrower", model=model, cores=(cores[-1],))
    generator = random.Random(5)
    async with engines(lender, borrower):
        for number, length in enumerate(LENGTHS):
            prompt = [generator.randrange(3, VOCAB) for _ in range(length)]
            borrowed = await borrower.answer(greedy(f"b{number}", prompt, ignore_eos=True), lender)
            alone = await lender.answer(greedy(f"a{number}", prompt, ignore_eos=True))
            assert ids(borrowed) == ids(alone)
            account = borrowed[0].account
            assert account.moved_blocks == (length - 1) // BLOCK
            assert account.mismatched_blocks == 0
        for engine in (lender, borrower):
            assert (await engine.audited()).reserved_blocks == 0


async def test_two_adapters_and_their_base_model_at_once(tmp_path: Path) -> None:
    """Each gives its own tokens, and those of prefill and decode are those of one engine."""
    model = write_model("llama", tmp_path)
    paths = {
        name: write_adapter(tmp_path / name, adapter_weights(LLAMA, seed, 0.3)) for seed, name in enumerate(("a", "b"))
    }
    cores = sorted(os.sched_getaffinity(0))
    lender = vllm_engine("lender", "prefill", model, cores=(cores[0],), adapters=paths)
    borrower = vllm_engine("borrower", model=model, cores=(cores[-1],), adapters=paths)
    prompt = [random.Random(5).randrange(3, VOCAB) for _ in range(100)]
    async with engines(lender, borrower):
        fingerprints = {"": b""} | dict(borrower.ready.adapters)
        assert sorted(fingerprints) == ["", "a", "b"]

        async def answers(prefix: str, engine: RealEngine, *others: RealEngine) -> dict[str, list[int]]:
            requests = {
                name: greedy(f"{prefix}-{name}", prompt, ignore_eos=True)._replace(adapter=fingerprint)
                for name, fingerprint in fingerprints.items()
            }
            streams = await asyncio.gather(*(engine.answer(request, *others) for request in requests.values()))
            for stream in streams:
                account = stream[0].account
                assert (account.moved_blocks, account.mismatched_blocks) == (3 if others else 0, 0)
            return {name: ids(stream) for name, stream in zip(requests, streams, strict=True)}

        borrowed = await answers("pair", borrower, lender)
        alone = await answers("alone", lender)
        assert borrowed == alone
        assert len({tuple(tokens) for tokens in alone.values()}) == 3
        unknown = greedy("unknown", prompt)._replace(adapter=bytes(16))
        with pytest.raises(Exception, match="no adapter 0000"):
            await borrower.answer(unknown)
        for engine in (lender, borrower):
            assert (await engine.audited()).reserved_blocks == 0


async def test_what_an_engine_cannot_do_is_refused_at_start_by_name() -> None:
    refused = [
        ("tensor_parallel", {"tensor_parallel": 3}),
        ("kv_store", {"kv_store": "/proc/none/store"}),
        ("backend", {"backend": "native"}),
    ]
    for field, settings in refused:
        engine = vllm_engine("refused", **settings)  # type: ignore[arg-type]
        try:
            with refusal_of(field, StartError):
                await engine.start()
        finally:
            await engine.host.stop()


async def test_a_model_without_a_prefix_cache_is_refused_at_start(tmp_path: Path) -> None:
    """MLA on a CPU without AMX."""
    if has_amx():
        pytest.skip("vLLM has a prefix cache for MLA on this CPU")
    engine = vllm_engine("mla", model=write_model("deepseek", tmp_path), block_tokens=16)
    try:
        with refusal_of("model", StartError, match="prefix cache"):
            await engine.start()
    finally:
        await engine.host.stop()


async def test_a_tokenizer_that_grammars_cannot_read_fails_their_requests_alone(tmp_path: Path) -> None:
    """vLLM's grammars read the tokenizer first: one without a decoder makes them fail, and nothing else."""
    model = write_model("llama", tmp_path)
    word_tokenizer(model, VOCAB, "w1")
    engine = vllm_engine("worker", model=model, vllm_python=V2)
    async with engines(engine):
        asked = greedy("grammar", [5] * 40, structured=StructuredOutput("regex", ("[a-z]+",)))
        engine.send(asked)
        await engine.until(lambda: engine.has_said(Failed))
        (failed,) = [message.failure for message in engine.said if isinstance(message, Failed)]
        assert failed.field.startswith(FIELD)
        assert "cannot read this model's tokenizer" in failed.reason
        engine.said.clear()
        assert len(ids(await engine.answer(greedy("plain", [5] * 40, 8, ignore_eos=True)))) == 8
        assert (await engine.audited()).reserved_blocks == 0
