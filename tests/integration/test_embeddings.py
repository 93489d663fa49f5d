"""Embeddings of a whole cluster, over HTTP and gRPC, beside those that transformers makes of the same prompt."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.numpy import load_file, save_file

from protos import inference_pb2 as pb
from support.embedding_contract import EmbeddingContract, post, prompt_of
from support.embedding_models import make_embedder, reference
from support.openai_http import call, http_cluster
from support.processes import report_of, until
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.storyteller import STORYTELLER

pytestmark = pytest.mark.asyncio(loop_scope="module")


def embedder(model: Path, path: Path, pooling: str) -> Path:
    shutil.copytree(model, path)
    return make_embedder(path, pooling)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def texts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """The demo model as an embedding model of mean pooling, its prompts computed in many chunks."""
    path = embedder(STORYTELLER, tmp_path_factory.mktemp("models") / "texts", "mean_tokens")
    async with http_cluster(path, dtype="float32", max_prefill_tokens=16) as started:
        yield started


@pytest.mark.parametrize(("family", "pooling"), [("qwen3", "lasttoken"), ("llama", "mean_tokens")])
async def test_embeddings_are_those_of_transformers(make_model: Any, tmp_path: Path, family: str, pooling: str) -> None:
    path = embedder(make_model(family), tmp_path / "embedder", pooling)
    prompts = [prompt_of(seed, count) for seed, count in enumerate((1, 16, 17, 90, 90))]
    # One after the other: loads in several threads at once leave transformers' tie_weights patched for good.
    expected = [await asyncio.to_thread(reference, path, prompt, pooling) for prompt in prompts]
    async with http_cluster(path, dtype="float32", max_prefill_tokens=24) as cluster:
        body = {"input": prompts, "model": path.name}
        said = await asyncio.to_thread(post, cluster, "/v1/embeddings", body)
        async with Client(cluster.address) as client:
            twice = await client.embed(prompts, model=path.name)  # cached blocks serve the last token's
            (listed,) = await client.list_models()
            request = pb.GenerateRequest(token_ids=prompts[3], embedding=pb.EmbeddingOptions())
            (message,) = [message async for message in client.send(request, 60)]
    for number, vector in enumerate(expected):
        assert said["data"][number]["index"] == number
        assert said["data"][number]["embedding"] == pytest.approx(vector, abs=2e-5)
        assert twice[number] == pytest.approx(vector, abs=2e-5)
    assert said["usage"] == {"prompt_tokens": 214, "total_tokens": 214}
    assert listed.embedding_dimensions == len(expected[0])
    receipt = message.finish.receipt
    assert receipt.placement.decode_worker == "prefill-0"
    assert (receipt.placement.lender, message.finish.usage.completion_tokens) == ("", 0)
    cached = 5 if pooling == "lasttoken" else 0
    assert (receipt.kv.reused_blocks, receipt.kv.computed_blocks) == (cached, 6 - cached)


class TestContract(EmbeddingContract):
    pass


async def test_an_embedding_model_still_generates(texts: LocalCluster) -> None:
    said = await asyncio.to_thread(post, texts, "/v1/completions", {"prompt": "Once", "max_tokens": 4})
    assert said["usage"]["completion_tokens"] == 4


async def test_other_models_are_refused_by_name(model: Path) -> None:
    async with http_cluster(model, engine="sim") as cluster:
        body = {"input": [[1, 2, 3]], "model": model.name}
        status, _, said = await asyncio.to_thread(call, cluster.router.http_address, "/v1/embeddings", body)
    assert (status, said["error"]["param"]) == (400, "model")
    assert "'simulated' makes no embeddings: the model is not an embedding model" in said["error"]["message"]


async def test_a_model_without_an_output_layer_embeds_and_does_not_generate(make_model: Any, tmp_path: Path) -> None:
    """As Sentence Transformers saves one: without the output layer, and names without the prefix `model.`."""
    path = embedder(make_model("llama"), tmp_path / "bare", "lasttoken")
    weights = load_file(path / "model.safetensors")
    bare = {name.removeprefix("model."): each for name, each in weights.items() if name != "lm_head.weight"}
    save_file(bare, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    prompt = prompt_of(1, 30)
    async with http_cluster(path, dtype="float32") as cluster:
        said = await asyncio.to_thread(post, cluster, "/v1/embeddings", {"input": [prompt]})
        body = {"prompt": prompt, "max_tokens": 2}
        status, _, refused = await asyncio.to_thread(call, cluster.router.http_address, "/v1/completions", body)
    assert said["data"][0]["embedding"] == pytest.approx(reference(path, prompt, "lasttoken"), abs=2e-5)
    assert (status, refused["error"]["param"]) == (400, "model")
    assert "has no output layer" in refused["error"]["message"]


async def test_a_dead_prefill_worker_s_embeddings_are_computed_by_others(model: Path) -> None:
    """Killed in the middle of many; the decode worker takes over, and every vector is what it was before."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    make_embedder(model)
    prompts = [prompt_of(seed, 50) for seed in range(100)]
    async with http_cluster(model, engine="sim", sim_step_ms=50.0) as cluster, Client(cluster.address) as client:
        before = await client.embed(prompts)
        salted = asyncio.ensure_future(client.embed(prompts, cache_salt="again"))

        async def at_work() -> bool:
            return (await report_of(cluster.prefill[0].address)).requests > 0

        await until(at_work, "it computes some of them")
        assert not salted.done()
        cluster.prefill[0].process.kill()
        assert await salted == before
