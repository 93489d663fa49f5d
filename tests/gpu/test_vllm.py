"""vLLM's engines on a GPU: KV of every kind of model moves between two of them, and the tokens stay those of one.

They run in bfloat16, with the attention that vLLM takes on this GPU. The reference is what the lender answers from its
own cache: in bfloat16 vLLM's tokens of a cached and of an uncached prompt differ.
"""

import random
from pathlib import Path

import pytest

from support.media_files import picture
from support.preprocessors import preprocessor
from support.real_engines import RealEngine, engines, greedy
from support.tiny_media_models import KINDS as PICTURE_KINDS
from support.torchvision_shim import PYTHON as MEDIA_PYTHON
from support.vllm_engines import BLOCK, ids, need_vllm, vllm_engine
from support.vllm_models import KINDS, VOCAB, write_model
from support.vllm_pictures import MEDIA, Prompts, encode_worker
from support.vllm_pictures import write_model as write_picture_model

pytestmark = need_vllm
RUNNERS = {"V2": "1", "V1": "0"}
STATES, STATES_FROM = ("qwen3_next", "qwen3_5"), 300
"""Kinds with recurrent states, which vLLM keeps at few boundaries, and prompts that have one for sure."""
LENGTHS = (33, 64, 100, 300, 900)
BFLOAT16 = {"dtype": "bfloat16", "kv_memory_mib": 256, "max_prefill_tokens": 256}


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let engines start with this model runner."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", RUNNERS[request.param])
    return str(request.param)


async def settled(*pair: RealEngine) -> None:
    for engine in pair:
        assert (await engine.audited()).reserved_blocks == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_lent_blocks_give_the_tokens_of_the_lenders_own_cache(kind: str, runner: str, tmp_path: Path) -> None:
    model = write_model(kind, tmp_path)
    lender = vllm_engine("lender", "prefill", model, **BFLOAT16)
    borrower = vllm_engine("borrower", model=model, **BFLOAT16)
    generator = random.Random(5)
    async with engines(lender, borrower):
        for number, length in enumerate(LENGTHS):
            prompt = [generator.randrange(3, VOCAB) for _ in range(length)]
            borrowed = await borrower.answer(greedy(f"b{number}", prompt, ignore_eos=True), lender)
            cached = await lender.answer(greedy(f"c{number}", prompt, ignore_eos=True))
            account = borrowed[0].account
            assert account.mismatched_blocks == 0
            if kind not in STATES or length >= STATES_FROM:
                assert account.moved_blocks > 0
                assert "cuda_ipc" in " ".join(account.lanes)
            assert ids(borrowed) == ids(cached), (length, account)
        await settled(lender, borrower)


@pytest.mark.parametrize("kind", PICTURE_KINDS)
async def test_lent_pictures_give_the_tokens_of_the_lenders_own_cache(kind: str, runner: str, tmp_path: Path) -> None:
    """Another picture of that size gives other tokens in at least one of the prompts."""
    model = write_picture_model(kind, tmp_path)
    files = [tmp_path / f"{seed}.png" for seed in range(2)]
    for seed, file in enumerate(files):
        file.write_bytes(picture(seed, 112, 84))
    lender = vllm_engine("lender", "prefill", model, vllm_python=MEDIA_PYTHON, **BFLOAT16)
    borrower = vllm_engine("borrower", model=model, vllm_python=MEDIA_PYTHON, **BFLOAT16)
    async with (
        preprocessor(engine="vllm", vllm_python=MEDIA_PYTHON, model=model, processes=1) as (caller, _),
        engines(lender, borrower),
    ):
        prompts = Prompts(kind, model, caller)
        answers: list[list[int]] = []
        for number, shape in enumerate([(40, "picture", 30), (3, "picture", 50), (40, "picture", 2)]):
            tokens = prompts.tokens(*shape)
            for file in files:
                async with prompts.request(f"b{number}-{file.stem}", tokens, file) as request:
                    borrowed = await borrower.answer(request, lender)
                    cached = await lender.answer(request._replace(request_id=f"c{number}-{file.stem}"))
                    account = borrowed[0].account
                    assert account.mismatched_blocks == 0
                    assert account.moved_blocks + account.reused_blocks == (len(request.prompt) - 1) // BLOCK
                    assert ids(borrowed) == ids(cached), (shape, account)
                    answers.append(ids(borrowed))
        assert any(answers[at] != answers[at + 1] for at in range(0, len(answers), 2))
        await settled(lender, borrower)


@pytest.mark.parametrize("kind", PICTURE_KINDS)
async def test_embeddings_of_an_encode_worker_give_the_tokens_of_a_worker_that_encodes(
    kind: str, tmp_path: Path
) -> None:
    """The second request's blob is nowhere, so that only known embeddings can answer it."""
    model = write_picture_model(kind, tmp_path)
    file = tmp_path / "picture.png"
    file.write_bytes(picture(1, 112, 84))
    bfloat16 = {"dtype": "bfloat16"}
    engine = vllm_engine("worker", model=model, vllm_python=MEDIA_PYTHON, **BFLOAT16)
    async with (
        encode_worker(model, **bfloat16) as encoder,
        preprocessor(**MEDIA | bfloat16, model=model, processes=1, encoders=[encoder.address]) as (caller, _),
        engines(engine),
    ):
        prompts = Prompts(kind, model, caller)
        async with prompts.request("encoded", prompts.tokens(40, "picture", 30), file) as request:
            assert request.items[0].encoder == encoder.address
            encoded = ids(await engine.answer(request))
            here = tuple(item._replace(encoder="") for item in request.items)
            own = request._replace(request_id="own", cache_salt="own", items=here)
            assert ids(await engine.answer(own)) == encoded
        nowhere = tuple(item._replace(address="127.0.0.1:1") for item in request.items)
        known = request._replace(request_id="known", cache_salt="other", items=nowhere)
        assert ids(await engine.answer(known)) == encoded
        await settled(engine)
