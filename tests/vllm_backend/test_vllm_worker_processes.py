"""Worker processes of vLLM's own executor: Model Runner V2 over two ranks, and the ends of such engines."""

import asyncio
import os
import random
import shutil
from pathlib import Path

import pytest

from cluster.errors import StartError
from cluster.process.tree import descendants
from engine.core_types import SamplingParams
from engine.messages.to_engine import CorruptReads, Generate
from support.processes import gone, ranks_of
from support.real_engines import RealEngine, cached_blocks, engines, greedy, kill
from support.vllm_engines import BLOCK, V2, flip_a_byte, ids, need_vllm, vllm_engine
from support.vllm_models import VOCAB, write_model

pytestmark = [need_vllm]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("model"))


def prompt_of(num_tokens: int) -> list[int]:
    return random.Random(num_tokens).choices(range(3, VOCAB), k=num_tokens)


def two_ranks(name: str, model: Path, **settings: object) -> RealEngine:
    """An engine that lends from memory files."""
    return vllm_engine(name, "prefill", model, tensor_parallel=2, cores=cores(), **settings)


def cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


async def test_v2_overlaps_steps_of_two_ranks_and_lends_both_ways(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_LOG", "info")
    one = vllm_engine("one", "decode", model, cores=cores()[:1], vllm_python=V2)
    two = two_ranks("two", model, vllm_python=V2)
    drawn = SamplingParams(max_tokens=6, temperature=0.8, seed=7, top_k=40, repetition_penalty=1.2, ignore_eos=True)
    async with engines(one, two):
        assert two.ready.model_fingerprint == one.ready.model_fingerprint
        wanted = [
            greedy("greedy", prompt_of(70), 6, ignore_eos=True),
            Generate("drawn", prompt_of(40), (), drawn, "d", 0, lender=None),
        ]
        answers = [await asyncio.gather(*(engine.answer(each) for each in wanted)) for engine in (one, two)]
        assert [ids(tokens) for tokens in answers[0]] == [ids(tokens) for tokens in answers[1]]
        for number, (lender, borrower) in enumerate([(two, one), (one, two)]):
            request = greedy(f"loan {number}", prompt_of(4 * BLOCK + 5 + number), 4, ignore_eos=True)
            moved = await borrower.answer(request, lender)
            account = moved[0].account
            assert (account.moved_blocks, account.mismatched_blocks, account.loan_failure) == (4, 0, "")
            assert account.lanes
            assert ids(moved) == ids(await lender.answer(request._replace(request_id=f"alone {number}")))
        for engine in (one, two):
            assert (await engine.audited()).reserved_blocks == 0
    assert capfd.readouterr().err.count("model runner V2, 2 batches in flight") == 2


async def test_a_byte_that_changed_on_the_second_rank_is_found(model: Path) -> None:
    one, two = vllm_engine("one", "decode", model, cores=cores()[:1]), two_ranks("two", model)
    async with engines(one, two):
        request = greedy("damaged", prompt_of(6 * BLOCK + 5), 8, ignore_eos=True)
        expected = ids(await two.answer(request._replace(request_id="whole")))
        damaged = (await cached_blocks(two, request.prompt))[2]
        flip_a_byte(two, damaged, rank=1)
        got = await one.answer(request, two)
        account = got[0].account
        assert (account.moved_blocks, account.mismatched_blocks) == (2, 1)
        assert "corrupted" in account.loan_failure
        assert ids(got) == expected


async def test_a_drill_corrupts_what_the_first_rank_reads(model: Path) -> None:
    one, two = vllm_engine("one", "decode", model, cores=cores()[:1]), two_ranks("two", model)
    async with engines(one, two):
        for number, (corrupt, moved) in enumerate(((1, 0), (0, 6))):
            request = greedy(f"drilled {number}", prompt_of(6 * BLOCK + 5 + number), 8, ignore_eos=True)
            expected = ids(await one.answer(request._replace(request_id=f"whole {number}")))
            two.send(CorruptReads(corrupt))
            got = await two.answer(request, one)
            account = got[0].account
            assert (account.moved_blocks, account.mismatched_blocks) == (moved, corrupt)
            assert ids(got) == expected


@pytest.mark.parametrize(("kind", "options"), [("llama", {"num_key_value_heads": 1}), ("gemma3", {})])
async def test_ranks_lend_copied_heads_and_several_groups(kind: str, options: dict[str, int], tmp_path: Path) -> None:
    model = write_model(kind, tmp_path, **options)
    one, two = vllm_engine("one", "decode", model, cores=cores()[:1]), two_ranks("two", model)
    async with engines(one, two):
        assert two.ready.model_fingerprint == one.ready.model_fingerprint
        assert two.ready.block_bytes == one.ready.block_bytes
        for number, (lender, borrower) in enumerate([(two, one), (one, two)]):
            request = greedy(f"loan {number}", prompt_of(6 * BLOCK + 5 + number), 8, ignore_eos=True)
            moved = await borrower.answer(request, lender)
            account = moved[0].account
            assert (account.moved_blocks, account.mismatched_blocks, account.loan_failure) == (6, 0, "")
            assert ids(moved) == ids(await lender.answer(request._replace(request_id=f"alone {number}")))
        for engine in (one, two):
            assert (await engine.audited()).reserved_blocks == 0


@pytest.mark.parametrize("victim", ["engine", "worker"])
async def test_nothing_is_left_of_a_killed_engine(model: Path, victim: str) -> None:
    engine = await two_ranks("two", model).start()
    everything = [engine.pid, *descendants(engine.pid)]
    assert len(everything) > 3  # and multiprocessing's tracker
    engine.send(greedy("long", prompt_of(40), 400, ignore_eos=True))
    await engine.until(lambda: len(engine.tokens.get("long", ())) >= 5)
    kill(engine.pid if victim == "engine" else ranks_of(engine.pid)[1])
    assert "ended with code" in await engine.has_ended()
    await gone(everything)


async def test_the_reason_of_a_worker_that_cannot_start_is_reported(model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    (weights,) = broken.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    engine = two_ranks("broken", broken)
    with pytest.raises(StartError, match=r"did not start.*(?i:safetensor)"):
        await engine.start()
    await gone([engine.pid, *descendants(engine.pid)])
