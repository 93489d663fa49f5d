"""Models that read pictures: prefill and decode on two vLLM engines give the tokens of vLLM alone."""

import asyncio
import base64
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest

from engine.core_types import SamplingParams
from engine.messages.to_engine import Generate
from kvcache.items import Item
from support.long_runs import mostly_long
from support.media_files import picture
from support.preprocessors import preprocessor
from support.processes import LENDER_ALWAYS, kill_engine, report_of, running
from support.real_engines import RealEngine, engines, greedy, lent_by
from support.tiny_media_models import KINDS
from support.torchvision_shim import PYTHON, V2
from support.vllm_engines import BLOCK, OPTIONS, ids, need_vllm, vllm_engine
from support.vllm_pictures import MAX_TOKENS, MEDIA, Prompts, alone, encode_worker, write_model
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

pytestmark = need_vllm


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    files = [folder / f"{seed}.png" for seed in range(3)]
    for seed, file in enumerate(files):
        file.write_bytes(picture(seed, 112, 84))
    return files


@pytest.mark.parametrize("python", mostly_long([PYTHON, V2], V2), ids=lambda python: python.name)
@pytest.mark.parametrize("kind", mostly_long(KINDS, "qwen25vl"))
async def test_lent_pictures_give_the_tokens_of_vllm_alone(
    kind: str, python: Path, tmp_path: Path, pictures: list[Path]
) -> None:
    """Also where the last lent block ends within a picture, and of another picture of that size at that place."""
    model = write_model(kind, tmp_path)
    cores = sorted(os.sched_getaffinity(0))
    lender = vllm_engine("lender", "prefill", model, cores=(cores[0],), vllm_python=python)
    borrower = vllm_engine("borrower", model=model, cores=(cores[-1],), vllm_python=python)
    async with (
        preprocessor(engine="vllm", vllm_python=PYTHON, model=model, processes=1) as (caller, _),
        engines(lender, borrower),
    ):
        prompts = Prompts(kind, model, caller)
        shapes = [(40, "picture", 30), (3, "picture", 50), (40, "picture", 2), (20, "picture", 9, "picture", 30)]
        cases = [
            (prompts.tokens(*shape), [pictures[(first + number) % 3] for number in range(shape.count("picture"))])
            for shape in shapes
            for first in (0, 1)
        ]
        expected = await asyncio.to_thread(alone, model, cases)
        different = [expected[at] != expected[at + 1] for at in range(0, len(cases), 2)]
        assert any(different), "the pictures decide the tokens"
        for number, ((tokens, files), answer) in enumerate(zip(cases, expected, strict=True)):
            async with prompts.request(f"r{number}", tokens, *files) as request:
                assert request.items
                borrowed = await borrower.answer(request, lender)
                assert ids(borrowed) == answer, (number, tokens)
                account = borrowed[0].account
                num_blocks = (len(request.prompt) - 1) // BLOCK
                assert account.moved_blocks + account.reused_blocks == num_blocks
                assert account.mismatched_blocks == 0
                assert await cut(borrower, lender, request, answer) == [answer] * 3
        for engine in (lender, borrower):
            assert (await engine.audited()).reserved_blocks == 0


async def cut(borrower: RealEngine, lender: RealEngine, request: Generate, answer: list[int]) -> list[list[int]]:
    """What comes of the request where another worker has emitted some tokens already."""
    answers = []
    for number in (1, MAX_TOKENS // 2, MAX_TOKENS - 1):
        emitted = tuple(answer[:number])
        again = request._replace(request_id=f"{request.request_id}-{number}", emitted=emitted)
        answers.append([*emitted, *ids(await lender.answer(again))])
    return answers


async def test_a_picture_that_is_gone_fails_its_request_only(tmp_path: Path, pictures: list[Path]) -> None:
    """Where its tokens are cached nobody asks for it; elsewhere the request is given back to the router."""
    model = write_model("qwen25vl", tmp_path)
    engine = vllm_engine("worker", model=model, vllm_python=V2)
    async with engines(engine):
        async with preprocessor(engine="vllm", vllm_python=PYTHON, model=model, processes=1) as (caller, _):
            prompts = Prompts("qwen25vl", model, caller)
            async with prompts.request("first", prompts.tokens(40, "picture", 40), pictures[0]) as first:
                answer = ids(await engine.answer(first))
        gone = first._replace(request_id="cached")
        assert ids(await engine.answer(gone)) == answer, "the preprocessor is gone, its tokens are cached"
        other = first.items[0]._replace(identifier=bytes(16))
        lost = first._replace(request_id="lost", items=(Item(*other),))
        engine.send(lost)
        reason = await engine.rejected()
        assert "media" in reason
        assert ids(await engine.answer(first._replace(request_id="again"))) == answer
        assert (await engine.audited()).reserved_blocks == 0


@pytest.mark.parametrize("cuts", [(20,), pytest.param((2, 20, 45), marks=pytest.mark.long)])
async def test_a_chat_about_a_picture_survives_its_decode_worker(
    cuts: tuple[int, ...], tmp_path: Path, pictures: list[Path], audit
) -> None:  # type: ignore[no-untyped-def]
    """A whole cluster: the second turn finds the first one's blocks, and no stream loses or changes a token."""
    model = write_model("qwen25vl", tmp_path)
    worker = {"engine": "vllm", "vllm_python": PYTHON, "vllm_options": OPTIONS, "model": model}
    worker |= {"dtype": "float32", "kv_memory_mib": 64, "max_prefill_tokens": 64}
    url = "data:image/png;base64," + base64.b64encode(pictures[0].read_bytes()).decode()
    question = " ".join(f"w{number}" for number in range(30, 90))
    parts: list[Any] = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
    first: list[Any] = [{"role": "user", "content": [*parts, {"type": "text", "text": "w40 w41"}]}]
    async with AsyncExitStack() as opened:
        encoder = await opened.enter_async_context(encode_worker(model))
        making = preprocessor(**MEDIA, model=model, processes=1, encoders=[encoder.address])
        _, role = await opened.enter_async_context(making)
        entry = {"path": model, "preprocessor": role.address}
        router = {"models": [entry], "port": 0, "http_port": 0} | LENDER_ALWAYS
        topology = plan_topology(1, 1 + len(cuts), router, worker, [0, 1], 1)
        cluster, _ = await opened.enter_async_context(running(LocalCluster(topology)))
        base_url = f"http://{cluster.router.http_address}/v1"
        client = await opened.enter_async_context(openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0))

        def ask(messages: list[Any], max_tokens: int, salt: str = "", **options: Any) -> Any:
            extra = {"ignore_eos": True, "cache_salt": salt} if salt else {"ignore_eos": True}
            sampling = {"temperature": 0, "max_tokens": max_tokens, "extra_body": extra}
            return client.chat.completions.create(model="qwen25vl", messages=messages, **sampling, **options)

        text = (await ask(first, 60)).choices[0].message.content
        answer = await ask(first, 4)
        await asyncio.sleep(0.5)  # the router learns what the decode worker holds
        turn = {"role": "assistant", "content": answer.choices[0].message.content}
        again = await ask([*first, turn, {"role": "user", "content": "w50"}], 4)
        cached = again.usage.prompt_tokens_details.cached_tokens
        could = answer.usage.prompt_tokens // BLOCK * BLOCK
        print(f"second turn: {cached} of the {could} tokens that could be cached")
        assert cached >= 0.9 * could
        page = await asyncio.to_thread(urlopen, f"http://{encoder.metrics_address}/metrics")
        assert b'tandem_encoded_items_total{origin="computed"} 1.0' in page.read()
        living = list(cluster.decode)
        for number, cut_at in enumerate(cuts):
            stream = await ask(first, 60, str(number), stream=True)
            texts: list[str] = []
            killed: set[str] = set()
            async for chunk in stream:
                texts += [choice.delta.content or "" for choice in chunk.choices]
                if len(texts) >= cut_at and not killed:
                    loads = [(await report_of(each.address)).requests for each in living]
                    serving = living.pop(loads.index(max(loads)))
                    killed.add(serving.name)
                    kill_engine(serving)
            assert killed
            assert "".join(texts) == text, f"cut after {cut_at} of {len(texts)} parts"
        await audit([each.address for each in [*cluster.prefill, *living]])


async def test_a_preempted_picture_without_its_tensors_goes_back_to_the_router(
    tmp_path: Path, pictures: list[Path]
) -> None:
    """Its blocks were lent when it began, so nobody fetched its tensors; then others took its blocks."""
    model = write_model("qwen25vl", tmp_path)
    settings: dict[str, Any] = {"kv_memory_mib": 1, "reserve_output_tokens": 1, "vllm_python": PYTHON}
    lender = vllm_engine("lender", "prefill", model, vllm_python=PYTHON)
    engine = vllm_engine("worker", model=model, vllm_options={"max_model_len": 512}, **settings)
    async with (
        engines(lender, engine),
        preprocessor(**MEDIA, model=model, processes=1) as (caller, _),
    ):
        prompts = Prompts("qwen25vl", model, caller)
        async with prompts.request("victim", prompts.tokens(40, "picture", 40), pictures[0]) as request:
            longer = SamplingParams(380, temperature=0, ignore_eos=True)
            engine.send(lent_by(lender, request._replace(sampling=longer, priority=-1)))
            await engine.until(lambda: len(engine.tokens.get("victim", ())) > 3)
            others = [
                greedy(f"other-{step}", [20 + step * number % 250 for number in range(200)], 300, ignore_eos=True)
                for step in (3, 7)
            ]
            engine.send(*others)
            assert "tensors of an item" in await engine.rejected()
            await engine.until(lambda: all(map(engine.over, others)))
            emitted = tuple(ids(engine.tokens["victim"]))
            rest = request._replace(request_id="again", emitted=emitted, sampling=longer)
            whole = request._replace(request_id="whole", sampling=longer)
            assert [*emitted, *ids(await engine.answer(rest))] == ids(await lender.answer(whole))
        for each in (lender, engine):
            assert (await each.audited()).reserved_blocks == 0
