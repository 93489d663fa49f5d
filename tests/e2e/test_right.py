"""The whole cluster against transformers: the same tokens, and KV that really moved."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.long_runs import mostly_long
from support.processes import LENDER_ALWAYS, until
from tandem.client import Client

pytestmark = pytest.mark.usefixtures("forked_roles")

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe")
CHUNK = 32
BLOCK = 16
LENGTHS = (1, 2, 15, 16, 17, 18, 31, 32, 33, 47, 48, 49, 64, 65, 96, 3 * CHUNK + 7)
NEW_TOKENS = 10


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 500, (length,), generator=generator).tolist() for length in LENGTHS]


def reference(path: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path)
    if model.config.model_type == "gemma2":
        model.set_attn_implementation("eager")  # transformers' sdpa knows no softcap
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("family", mostly_long(FAMILIES, "qwen3_moe"))
async def test_greedy_output_equals_transformers(make_model, cluster_of, ask, audit, family: str) -> None:  # type: ignore[no-untyped-def]
    path = make_model(family)
    expected = reference(path)
    router = LENDER_ALWAYS | {"learn_rates": False}
    async with cluster_of(path, router=router, max_prefill_tokens=CHUNK) as cluster, Client(cluster.address) as client:
        answers = await asyncio.gather(*(ask(client, prompt, max_tokens=NEW_TOKENS) for prompt in prompts()))
        assert [answer.token_ids for answer in answers] == expected
        for length, answer in zip(LENGTHS, answers, strict=True):
            usable = (length - 1) // BLOCK
            assert answer.kv.moved_blocks == usable, "every full block but the last token's comes from the lender"
            assert answer.kv.computed_tokens == length - usable * BLOCK, "decode computes the tail only"
        await audit([worker.address for worker in cluster.workers])


async def test_kv_moves_over_ucx_between_processes_and_is_found_again(make_model, cluster_of, ask, audit) -> None:  # type: ignore[no-untyped-def]
    path = make_model("llama")
    prompt = prompts()[-1]
    usable = (len(prompt) - 1) // BLOCK
    async with cluster_of(path, max_prefill_tokens=CHUNK) as cluster, Client(cluster.address) as client:
        assert len({worker.pid for worker in cluster.workers}) == 2
        first = await ask(client, prompt, max_tokens=20)
        assert first.placement.lender == "prefill-0"
        assert (first.kv.transport, first.kv.lender_computed_blocks) == ("nixl", usable)
        assert first.kv.ucx_transports == ["posix/memory"], "a prefill worker's pool is mapped"
        assert first.kv.moved_bytes == usable * 2 * 3 * 2 * BLOCK * 16 * 4
        assert first.finish.usage.cached_tokens == 0

        async def heard() -> bool:
            (model,) = (await client.cluster_status()).models
            (decode,) = (worker for worker in model.workers if worker.worker_id == "decode-0")
            return decode.cached_blocks >= usable and not decode.running

        await until(heard, "the router knows what the decode worker holds")

        # The same prompt again moves nothing, and goes where the blocks are.
        second = await ask(client, prompt)
        assert (second.kv.reused_blocks, second.kv.moved_blocks) == (usable, 0)
        assert second.placement.decode_worker == first.placement.decode_worker
        assert "nothing to borrow" in second.placement.reason
        assert second.token_ids == first.token_ids[:8]

        # The next turn of a chat reuses what decode computed in the last one.
        turn = [*prompt, *first.token_ids, 5, 6, 7]
        third = await ask(client, turn)
        held = (len(prompt) + len(first.token_ids) - 1) // BLOCK
        assert third.kv.reused_blocks == held > usable

        # Another salt shares nothing.
        salted = await ask(client, prompt, cache_salt="tenant b")
        assert salted.kv.reused_blocks == 0
        assert salted.kv.lender_cached_blocks == 0
        assert salted.token_ids == first.token_ids[:8]
        await audit([worker.address for worker in cluster.workers])
