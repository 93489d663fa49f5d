"""Pipeline-parallel vLLM engines: tokens of one process, and loans from and to engines of other shapes."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from cluster.errors import StartError
from cluster.process.tree import descendants
from engine.core_types import SamplingParams
from engine.messages.to_engine import Generate
from kvtransfer.ranks import split_endpoint, without_planes, without_stages
from support.processes import gone, ranks_of
from support.real_engines import RealEngine, cached_blocks, engines, greedy, kill
from support.vllm_engines import BLOCK, PYTHON, V2, flip_a_byte, ids, need_vllm, stored, vllm_engine
from support.vllm_models import VOCAB, write_model

pytestmark = [need_vllm, pytest.mark.timeout(900)]  # the interpreter of V2's kernels starts slowly


def prompt_of(num_tokens: int) -> list[int]:
    return random.Random(num_tokens).choices(range(3, VOCAB), k=num_tokens)


def engine_of(name: str, model: Path, stages: int = 1, ranks: int = 1, **settings: object) -> RealEngine:
    """An engine on Model Runner V2, which lends from memory files."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    common = {"pipeline_parallel": stages, "tensor_parallel": ranks, "vllm_python": V2}
    return vllm_engine(name, "prefill", model, cores=cores, **(common | settings))


async def lends(lender: RealEngine, borrower: RealEngine, number: int, num_blocks: int = 4) -> None:
    """Each loan brings verified blocks, and the tokens are those of the lender alone."""
    request = greedy(f"loan {number}", prompt_of(num_blocks * BLOCK + 5 + number), 4, ignore_eos=True)
    moved = await borrower.answer(request, lender)
    account = moved[0].account
    assert (account.moved_blocks, account.mismatched_blocks, account.loan_failure) == (num_blocks, 0, "")
    assert account.lanes
    alone = ids(await lender.answer(request._replace(request_id=f"alone {number}")))
    assert ids(moved) == alone
    for cut in range(1, len(alone)):  # a failover: the other engine goes on with what was emitted
        rest = request._replace(request_id=f"cut {number} {cut}", emitted=tuple(alone[:cut]))
        assert ids(await (borrower if cut % 2 else lender).answer(rest)) == alone[cut:]


async def test_two_stages_answer_as_one_process_does_and_lend_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_LOG", "info")
    model = write_model("llama", tmp_path)
    one, two = engine_of("one", model), engine_of("two", model, 2)
    drawn = SamplingParams(max_tokens=6, temperature=0.8, seed=7, top_k=40, repetition_penalty=1.2, ignore_eos=True)
    async with engines(one, two):
        assert two.ready.model_fingerprint == one.ready.model_fingerprint
        assert (two.ready.block_bytes, two.ready.num_blocks) == (one.ready.block_bytes, one.ready.num_blocks)
        shares, rest = without_stages(two.ready.endpoint)
        assert [tuple(share) for share in shares] == [(0, 2, 4), (2, 4, 4)]
        assert len(split_endpoint(without_planes(rest)[2])) == 2
        wanted = [
            greedy("greedy", prompt_of(70), 6, ignore_eos=True),
            Generate("drawn", prompt_of(40), (), drawn, "d", 0, lender=None),
        ]
        answers = [await asyncio.gather(*(engine.answer(each) for each in wanted)) for engine in (one, two)]
        assert [ids(tokens) for tokens in answers[0]] == [ids(tokens) for tokens in answers[1]]
        await lends(two, one, 0)
        await lends(one, two, 1)
        for engine in (one, two):
            assert (await engine.audited()).reserved_blocks == 0
    assert "model runner V2, 3 batches in flight" in capfd.readouterr().err


UNEVEN = {"num_hidden_layers": 5, "num_key_value_heads": 1}
"""Stages of two and three layers, whose two ranks hold copies of one head."""
SHAPES = [
    pytest.param("llama", UNEVEN, (2, 2), (1, 1), marks=pytest.mark.long, id="llama"),
    pytest.param("qwen3_moe", {}, (2, 1), (1, 2), marks=pytest.mark.long, id="qwen3_moe"),
    pytest.param("gpt_oss", {}, (2, 1), (1, 1), id="gpt_oss"),
]


@pytest.mark.parametrize(("kind", "options", "shape", "other"), SHAPES)
async def test_stages_and_ranks_lend_to_engines_of_other_shapes(
    kind: str, options: dict[str, int], shape: tuple[int, int], other: tuple[int, int], tmp_path: Path
) -> None:
    model = write_model(kind, tmp_path, **options)
    first, second = engine_of("first", model, *shape), engine_of("second", model, *other)
    async with engines(first, second):
        assert len(first.rank_pids()) == shape[0] * shape[1]
        assert second.ready.model_fingerprint == first.ready.model_fingerprint
        assert second.ready.block_bytes == first.ready.block_bytes
        await lends(first, second, 0)
        await lends(second, first, 1)
        for engine in (first, second):
            assert (await engine.audited()).reserved_blocks == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("model"))


@pytest.mark.long
async def test_a_store_is_read_by_engines_of_other_shapes(model: Path, tmp_path: Path) -> None:
    store = {"kv_store": str(tmp_path / "store"), "kv_store_writes": "computed"}
    one, two = engine_of("one", model, **store), engine_of("two", model, 2, **store)
    async with engines(one, two):
        for number, (writer, reader) in enumerate([(two, one), (one, two)]):
            prompt = prompt_of(4 * BLOCK + 5 + number)
            request = greedy(f"written {number}", prompt, 4, ignore_eos=True)._replace(reads_store=True)
            written = await writer.answer(request)
            await stored(tmp_path / "store", 4 * (number + 1))
            read = await reader.answer(request._replace(request_id=f"read {number}"))
            assert ids(read) == ids(written)
            account = read[0].account
            assert (account.store_blocks, account.mismatched_blocks, account.store_failure) == (4, 0, "")


async def test_a_byte_that_changed_in_the_second_stage_is_found(model: Path) -> None:
    one, two = engine_of("one", model), engine_of("two", model, 2)
    async with engines(one, two):
        request = greedy("damaged", prompt_of(6 * BLOCK + 5), 4, ignore_eos=True)
        expected = ids(await two.answer(request._replace(request_id="whole")))
        damaged = (await cached_blocks(two, request.prompt))[2]
        flip_a_byte(two, damaged, rank=1)
        got = await one.answer(request, two)
        account = got[0].account
        assert (account.moved_blocks, account.mismatched_blocks) == (2, 1)
        assert "corrupted" in account.loan_failure
        assert ids(got) == expected


async def test_nothing_is_left_of_an_engine_whose_second_stage_is_killed(model: Path) -> None:
    engine = await engine_of("two", model, 2).start()
    everything = [engine.pid, *descendants(engine.pid)]
    engine.send(greedy("long", prompt_of(40), 200, ignore_eos=True))
    await engine.until(lambda: len(engine.tokens.get("long", ())) >= 2)
    kill(ranks_of(engine.pid)[1])
    assert "ended with code" in await engine.has_ended()
    await gone(everything)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("llama", {"vllm_python": PYTHON}, "pipeline_parallel: 2 needs Model Runner V2"),
        ("llama", {"tensor_parallel": 33}, "pipeline_parallel: 2 stages of 33 ranks are more than 64"),
        ("deepseek", {}, "model: vLLM turns its prefix cache off"),
    ],
)
async def test_what_stages_cannot_do_is_refused_at_start(
    kind: str, settings: dict[str, object], reason: str, tmp_path: Path
) -> None:
    engine = engine_of("refused", write_model(kind, tmp_path), 2, **settings)
    with pytest.raises(StartError, match=reason):
        await engine.start()
    await gone([engine.pid, *descendants(engine.pid)])
