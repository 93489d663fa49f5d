"""Encode workers: embeddings are computed once, and a request goes on without the one that dies."""

import asyncio
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from cluster.rpc import channel
from encode_worker.config import EncoderConfig
from engine.encoder import encoder_fingerprint
from engine.item_messages import item_messages
from engine.items import Item
from engine.model.model_dir import ModelDir
from protos import encode_pb2, encode_pb2_grpc, inference_pb2
from support.long_runs import mostly_long
from support.media_files import picture
from support.preprocessors import preprocessor
from support.processes import children_running, until
from support.real_engines import engines
from support.redis_server import free_port
from support.tiny_media_models import KINDS
from support.torchvision_shim import PYTHON
from support.vllm_engines import OPTIONS, ids, need_vllm, vllm_engine
from support.vllm_pictures import Prompts, alone, write_model
from tandem.client import Client
from tandem.cluster_file import read_cluster
from tandem.local.local_cluster import LocalCluster, RoleProcess, start_role, stop_process

pytestmark = need_vllm
ROUNDS = int(os.environ.get("TANDEM_ROUNDS", "2"))
MEDIA = {"engine": "vllm", "vllm_python": PYTHON, "dtype": "float32"}


@asynccontextmanager
async def encode_worker(model: Path, port: int = 0) -> AsyncIterator[RoleProcess]:
    options = {"vllm_options": {"max_model_len": OPTIONS["max_model_len"]}}
    config = EncoderConfig.parse({"model": model, "port": port, "drain_s": 0.0} | MEDIA | options)
    role = await start_role("encode_worker", "encoder", config)
    try:
        yield role
    finally:
        await stop_process(role.process)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    found = [folder / f"{seed}.png" for seed in range(2 + ROUNDS)]
    for seed, file in enumerate(found):
        file.write_bytes(picture(seed, 112, 84))
    return found


@pytest.mark.parametrize("kind", mostly_long(KINDS, "qwen25vl"))
async def test_embeddings_of_an_encode_worker_give_the_tokens_of_vllm_alone(
    kind: str, tmp_path: Path, files: list[Path]
) -> None:
    model = write_model(kind, tmp_path)
    engine = vllm_engine("worker", model=model, vllm_python=PYTHON)
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

    await until(has_answered, "the encode worker answers", 60.0)


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
                    engine._fetches._avoided.clear()
                    (child,) = children_running(encoder.pid, "encode_worker.child")
            async with prompts.request("last", tokens, files[0]) as request:
                os.kill(encoder.pid, signal.SIGKILL)
                again = request._replace(cache_salt="other")
                assert ids(await engine.answer(again)) == expected[0]
        assert (await engine.audited()).reserved_blocks == 0


def metrics_of(role: RoleProcess) -> str:
    with urllib.request.urlopen(f"http://{role.metrics_address}/metrics", timeout=10) as said:
        return str(said.read().decode())


async def test_a_cluster_of_a_file_encodes_a_picture_once(tmp_path: Path, files: list[Path]) -> None:
    """With two empty keys beside the workers' settings, one of which is a flag that only vLLM's parser reads."""
    model = write_model("qwen25vl", tmp_path)
    options = {name: value for name, value in OPTIONS.items() if name != "max_model_len"}
    worker = MEDIA | {"vllm_python": str(PYTHON), "vllm_options": options, "kv_memory_mib": 64}
    worker["vllm_args"] = f"--max-model-len {OPTIONS['max_model_len']}"
    values = {"models": [{"path": str(model), "prefill": 0}], "worker": worker, "preprocessor": {"processes": 1}}
    cluster_file = tmp_path / "cluster.yaml"
    cluster_file.write_text(yaml.safe_dump(values | {"encoder": {"metrics_port": 0}}))
    topology = read_cluster(cluster_file, None, 1, 1).plan({"port": 0}, {}, [0, 1], 1)
    message = ("user", ["w30 w31", {"type": "image", "path": files[0]}])
    async with LocalCluster(topology) as cluster, Client(cluster.address) as client:
        answers = []
        for salt in ("first", "second"):
            sampling = inference_pb2.Sampling(max_tokens=8, temperature=0, ignore_eos=True)
            pieces = client.generate(messages=[message], sampling=sampling, cache_salt=salt, timeout_s=60)
            answers.append([token async for piece in pieces for token in piece.token_ids])
        (encoder,) = cluster.encoders
        metrics = await asyncio.to_thread(metrics_of, encoder)
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]
    counts = [line.split() for line in metrics.splitlines() if line.startswith("tandem_encoded_items_total")]
    assert sorted(counts) == [
        ['tandem_encoded_items_total{origin="computed"}', "1.0"],
        ['tandem_encoded_items_total{origin="found"}', "1.0"],
    ]
