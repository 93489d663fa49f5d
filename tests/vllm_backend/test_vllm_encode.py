"""Encode workers: embeddings are computed once, and a request goes on without the one that dies."""

import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.network.rpc import channel
from engine.core_types import SamplingParams
from engine.media import encoder_fingerprint
from engine.model.model_dir import ModelDir
from kvcache.item_messages import item_messages
from kvcache.items import Item
from protos import encode_pb2, encode_pb2_grpc
from support.long_runs import mostly_long
from support.media_files import picture
from support.ports import free_port
from support.preprocessors import preprocessor
from support.processes import children_running, until
from support.real_engines import engines
from support.tiny_media_models import KINDS, write_media_model
from support.torchvision_shim import PYTHON, V2
from support.vllm_engines import ids, need_vllm, vllm_engine
from support.vllm_pictures import MEDIA, Prompts, alone, encode_worker, write_model

pytestmark = need_vllm
ROUNDS = int(os.environ.get("TANDEM_ROUNDS", "1"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    found = [folder / f"{seed}.png" for seed in range(1 + ROUNDS)]
    for seed, file in enumerate(found):
        file.write_bytes(picture(seed, 112, 84))
    return found


@pytest.mark.parametrize("python", mostly_long([PYTHON, V2], V2), ids=lambda python: python.name)
@pytest.mark.parametrize("kind", mostly_long(KINDS, "qwen25vl"))
async def test_embeddings_of_an_encode_worker_give_the_tokens_of_vllm_alone(
    kind: str, python: Path, tmp_path: Path, files: list[Path]
) -> None:
    """The workers have either model runner; vLLM's encoder alone runs on V1 here, since V2 has none for CPUs."""
    model = write_model(kind, tmp_path)
    engine = vllm_engine("worker", model=model, vllm_python=python)
    async with (
        encode_worker(model) as encoder,
        preprocessor(**MEDIA, model=model, processes=1, encoders=[encoder.address]) as (caller, _),
        engines(engine),
        channel(encoder.address) as link,
    ):
        prompts = Prompts(kind, model, caller)
        tokens = prompts.tokens(40, "picture", 30)
        expected = alone(model, [(tokens, [file]) for file in files[:2]])
        for number, file in enumerate(files[:2]):
            async with prompts.request(f"first-{number}", tokens, file) as request:
                assert request.items[0].encoder == encoder.address
                assert ids(await engine.answer(request)) == expected[number]
            nowhere = tuple(item._replace(address="127.0.0.1:1") for item in request.items)
            again = request._replace(request_id=f"again-{number}", cache_salt="other", items=nowhere)
            assert ids(await engine.answer(again)) == expected[number], "its embeddings are known, its blob is nowhere"
        stub = encode_pb2_grpc.EncodeStub(link)
        other = encode_pb2.EncodeRequest(items=item_messages(request.items), model_fingerprint=b"another model")
        with pytest.raises(grpc.aio.AioRpcError, match="weights or data type differ"):
            await stub.Encode(other).read()
        assert (await engine.audited()).reserved_blocks == 0


async def answers(stub: Any, items: Sequence[Item], fingerprint: bytes) -> None:
    """Wait until the encode worker has the items' embeddings."""

    async def has_answered() -> bool:
        request = encode_pb2.EncodeRequest(items=item_messages(items), model_fingerprint=fingerprint)
        try:
            chunks = [chunk async for chunk in stub.Encode(request)]
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return bool(chunks[-1].shape)

    await until(has_answered, "the encode worker answers")


async def test_requests_go_on_without_an_encode_worker_that_dies(tmp_path: Path, files: list[Path]) -> None:
    """Its child, or all of it, is killed while it encodes; the worker that computes the prompt encodes then."""
    model = write_model("qwen25vl", tmp_path)
    engine = vllm_engine("worker", model=model, vllm_python=PYTHON)
    port = free_port()
    async with (
        preprocessor(**MEDIA, model=model, processes=1, encoders=[f"127.0.0.1:{port}"]) as (caller, _),
        engines(engine),
    ):
        prompts = Prompts("qwen25vl", model, caller)
        tokens = prompts.tokens(40, "picture", 30)
        expected = alone(model, [(tokens, [file]) for file in files])
        fingerprint = encoder_fingerprint(ModelDir.open(model).weights_fingerprint(), "torch.float32")
        async with encode_worker(model, port) as encoder, channel(encoder.address) as link:
            stub = encode_pb2_grpc.EncodeStub(link)
            (child,) = children_running(encoder.pid, "encode_worker.child")
            for number, file in enumerate(files):
                async with prompts.request(f"r-{number}", tokens, file) as request:
                    os.kill(child, signal.SIGSTOP)  # so that it dies while it has the item
                    answer = asyncio.ensure_future(engine.answer(request))
                    await asyncio.sleep(0.3)
                    assert not answer.done()
                    os.kill(child, signal.SIGKILL)
                    assert ids(await answer) == expected[number]
                    await answers(stub, request.items, fingerprint)
                    engine.fetches.avoided.clear()
                    (child,) = children_running(encoder.pid, "encode_worker.child")
            async with prompts.request("last", tokens, files[0]) as request:
                os.kill(encoder.pid, signal.SIGKILL)
                again = request._replace(cache_salt="other")
                assert ids(await engine.answer(again)) == expected[0]
        assert (await engine.audited()).reserved_blocks == 0


@pytest.mark.long
async def test_time_to_first_token_with_known_embeddings(tmp_path: Path) -> None:
    """Prints it as a share of the time with a picture that is encoded first; nothing else is cached."""
    path = write_media_model("qwen25vl", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["vision_config"] |= {"depth": 8, "hidden_size": 512, "intermediate_size": 2048, "num_heads": 8}
    (path / "config.json").write_text(json.dumps(config))
    sizes = json.loads((path / "preprocessor_config.json").read_text()) | {"max_pixels": 1 << 20}
    (path / "preprocessor_config.json").write_text(json.dumps(sizes))
    model = write_model("qwen25vl", tmp_path)
    file = tmp_path / "large.png"
    file.write_bytes(picture(1, 448, 448))
    engine = vllm_engine("worker", model=model, vllm_python=PYTHON)
    seconds: dict[str, list[float]] = {"known": [], "encoded": []}
    async with (
        encode_worker(model) as encoder,
        preprocessor(**MEDIA, model=model, processes=1, encoders=[encoder.address]) as (caller, _),
        engines(engine),
    ):
        prompts = Prompts("qwen25vl", model, caller)
        tokens = prompts.tokens(40, "picture", 10)
        for number in range(1 + ROUNDS):
            for name, salt in (("encoded", f"{number}"), ("known", "")):
                async with prompts.request(f"{name}-{number}", tokens, file, cache_salt=salt) as request:
                    began = time.monotonic()
                    plain = request._replace(cache_salt=f"{name}-{number}", sampling=SamplingParams(1, temperature=0))
                    await engine.answer(plain)
                    if number:  # the first of each is the first of its kind
                        seconds[name].append(time.monotonic() - began)
    ratio = statistics.median(seconds["known"]) / statistics.median(seconds["encoded"])
    print(f"TTFT with known embeddings / encoding them: {ratio:.2f}, of {request.items[0].length} tokens")
