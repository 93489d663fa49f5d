"""Pooling models in clusters of vLLM workers: embeddings, labels and scores, beside those that vLLM alone makes."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from cluster.errors import InvalidRequest, StartError
from engine.core_types import SamplingParams
from engine.messages.from_engine import Embedded
from engine.messages.to_engine import CorruptReads, Generate
from protos import inference_pb2 as pb
from support.embedding_contract import EmbeddingContract, post, prompt_of
from support.embedding_models import make_embedder, write_classifier
from support.openai_http import call, http_cluster
from support.processes import report_of, until
from support.real_engines import RealEngine, engines, lent_by
from support.vllm_engines import BLOCK, OPTIONS, PYTHON, ROOT, V2, need_vllm, vllm_engine
from support.vllm_models import write_model
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.storyteller import STORYTELLER

pytestmark = [need_vllm, pytest.mark.asyncio(loop_scope="module")]
RUNNERS = {"V1": PYTHON, "V2": V2}
QUERY, DOCUMENTS = "The fox ran", ["A king sat on his throne", "The fox ran away", "Rain fell"]


def cluster_of(model: Path, python: Path = PYTHON, **settings: Any) -> LocalCluster:
    common = {"engine": "vllm", "vllm_python": python, "vllm_options": OPTIONS, "dtype": "float32"}
    return http_cluster(model, **(common | {"kv_memory_mib": 64, "max_prefill_tokens": 64} | settings))


def alone(model: Path, method: str, cases: list[Any], folder: Path) -> list[Any]:
    """What vLLM alone answers."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    command = [PYTHON, "-m", "support.vllm_alone_pooled", model, method, file]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def embedder(folder: Path, pooling: str) -> Path:
    path = folder / "texts"
    shutil.copytree(STORYTELLER, path)
    return make_embedder(path, pooling)


class Site:
    def __init__(self, cluster: LocalCluster, model: Path, pooling: str) -> None:
        self.cluster, self.model, self.pooling = cluster, model, pooling


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[("V1", "mean_tokens"), ("V2", "lasttoken"), pytest.param(("V1", "lasttoken"), marks=pytest.mark.long)],
)
async def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    runner, pooling = request.param
    model = embedder(tmp_path_factory.mktemp("models"), pooling)
    async with cluster_of(model, RUNNERS[runner]) as cluster:
        yield Site(cluster, model, pooling)


@pytest.fixture(scope="module")
def texts(site: Site) -> LocalCluster:
    return site.cluster


class TestContract(EmbeddingContract):
    pass


async def test_embeddings_are_those_of_vllm_alone(site: Site, tmp_path: Path) -> None:
    """Also of prompts that are cached, and of one that is longer than a step of prompts may be."""
    prompts = [prompt_of(seed, count) for seed, count in enumerate((1, BLOCK, BLOCK + 1, 200, 900))]
    expected = await asyncio.to_thread(alone, site.model, "embed", prompts, tmp_path)
    async with Client(site.cluster.address) as client:
        for _ in range(2):
            for number, vector in enumerate(await client.embed(prompts)):
                assert vector == pytest.approx(expected[number], abs=1e-5)
        (listed,) = await client.list_models()
        request = pb.GenerateRequest(token_ids=prompts[3], embedding=pb.EmbeddingOptions())
        (message,) = [message async for message in client.send(request, 60)]
    assert listed.embedding_dimensions == len(expected[0])
    receipt = message.finish.receipt
    assert (receipt.placement.decode_worker, receipt.placement.lender) == ("prefill-0", "")
    assert (message.finish.usage.prompt_tokens, message.finish.usage.completion_tokens) == (200, 0)
    cached = 6 if site.pooling == "lasttoken" else 0
    assert (receipt.kv.reused_blocks, receipt.kv.computed_blocks) == (cached, 7 - cached)


async def test_a_model_on_the_pooling_runner_does_not_generate(site: Site) -> None:
    body = {"prompt": "Once", "max_tokens": 4}
    status, _, said = await asyncio.to_thread(call, site.cluster.router.http_address, "/v1/completions", body)
    assert (status, said["error"]["param"]) == (400, "model")
    assert "vLLM's pooling runner" in said["error"]["message"]


async def test_a_prompt_beyond_vllm_s_longest_is_refused(site: Site) -> None:
    """The model reads 2,048 tokens, and vLLM was told 1,024."""
    for count, told in ((1024, 200), (1025, 400)):
        body = {"input": [prompt_of(1, count)]}
        status, _, said = await asyncio.to_thread(call, site.cluster.router.http_address, "/v1/embeddings", body)
        assert status == told, said
    assert said["error"]["param"] == "input"
    assert "vLLM reads at most 1024" in said["error"]["message"]


@pytest.mark.parametrize("runner", ["V1", pytest.param("V2", marks=pytest.mark.long)])
async def test_a_reranker_scores_pairs_as_vllm_alone(runner: str, tmp_path: Path) -> None:
    model = write_classifier(tmp_path / "reranker", STORYTELLER, "relevant")
    expected = await asyncio.to_thread(alone, model, "score", [[QUERY, each] for each in DOCUMENTS], tmp_path)
    assert len({round(score, 3) for score in expected}) == 3
    async with cluster_of(model, RUNNERS[runner]) as cluster:
        said = await asyncio.to_thread(post, cluster, "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
        assert [each["score"] for each in said["data"]] == pytest.approx(expected, abs=1e-5)
        body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
        ranked = await asyncio.to_thread(post, cluster, "/rerank", body)
        best = sorted(range(3), key=lambda index: -expected[index])[:2]
        assert [each["index"] for each in ranked["results"]] == best
        body = {"input": QUERY}
        status, _, refused = await asyncio.to_thread(call, cluster.router.http_address, "/v1/embeddings", body)
        assert (status, refused["error"]["param"]) == (400, "model")
        assert "ask /classify" in refused["error"]["message"]


async def test_a_classifier_gives_the_labels_of_vllm_alone(tmp_path: Path) -> None:
    """Also after its prefill worker died in the middle of many prompts."""
    model = write_classifier(tmp_path / "mood", STORYTELLER, "sad", "glad", "neither")
    prompts = [prompt_of(seed, 20 + 3 * seed) for seed in range(60)]
    expected = await asyncio.to_thread(alone, model, "classify", prompts, tmp_path)
    async with cluster_of(model) as cluster, Client(cluster.address) as client:
        said = await asyncio.to_thread(post, cluster, "/classify", {"input": prompts[:3]})
        for number, each in enumerate(said["data"]):
            likeliest = max(range(3), key=lambda label: expected[number][label])
            assert each["probs"] == pytest.approx(expected[number], abs=1e-5)
            assert (each["label"], each["num_classes"]) == (("sad", "glad", "neither")[likeliest], 3)
        body = {"text_1": QUERY, "text_2": DOCUMENTS}
        status, _, refused = await asyncio.to_thread(call, cluster.router.http_address, "/v1/score", body)
        assert (status, refused["error"]["param"]) == (400, "model")
        (listed,) = await client.list_models()
        assert (listed.embedding_dimensions, listed.labels) == (0, ["sad", "glad", "neither"])
        many = asyncio.ensure_future(client.embed(prompts, cache_salt="again"))

        async def at_work() -> bool:
            return (await report_of(cluster.prefill[0].address)).requests > 0

        await until(at_work, "it computes some of them")
        assert not many.done()
        cluster.prefill[0].process.kill()
        for number, vector in enumerate(await many):
            assert vector == pytest.approx(expected[number], abs=1e-5)


@pytest.mark.parametrize(("runner", "ranks"), [("V1", 1), ("V2", 1), ("V1", 2)])
async def test_pooled_prompts_borrow_what_a_lender_computes(runner: str, ranks: int, tmp_path: Path) -> None:
    """Also where the borrower has two ranks, and where a block arrives corrupted."""
    model = embedder(tmp_path, "lasttoken")
    settings: dict[str, Any] = {"vllm_python": RUNNERS[runner]}
    lender = vllm_engine("lender", "prefill", model, **settings)
    borrower = vllm_engine("borrower", "decode", model, tensor_parallel=ranks, **settings)
    async with engines(lender, borrower):

        async def embedded(engine: RealEngine, name: str, prompt: list[int], lends: RealEngine | None) -> Embedded:
            sampling = SamplingParams(1, pooling="last")
            request = Generate(name, tuple(prompt), (), sampling, "", 0, lender=None)
            engine.send(request if lends is None else lent_by(lends, request))

            def answers() -> list[Embedded]:
                return [each for each in engine.said if isinstance(each, Embedded) and each.request_id == name]

            await engine.until(lambda: bool(answers()))
            return answers()[0]

        for number, corrupt in enumerate((0, 1)):
            prompt = prompt_of(number, 4 * BLOCK + 5)
            borrower.send(CorruptReads(corrupt))
            borrowed = await embedded(borrower, f"borrowed {number}", prompt, lender)
            own = await embedded(lender, f"own {number}", prompt, None)
            account = borrowed.account
            assert (account.moved_blocks, account.mismatched_blocks) == (0 if corrupt else 4, corrupt)
            assert account.lender_computed_blocks == account.moved_blocks
            assert np.frombuffer(borrowed.vector, np.float32) == pytest.approx(
                np.frombuffer(own.vector, np.float32), abs=1e-5
            )
        for engine in (lender, borrower):
            assert (await engine.audited()).reserved_blocks == 0


async def test_a_flag_makes_a_generating_model_pool(tmp_path: Path) -> None:
    """Without it the request is refused, at the worker too."""
    model = write_model("qwen3", tmp_path)
    async with cluster_of(model, vllm_args="--runner pooling --convert embed") as cluster:
        said = await asyncio.to_thread(post, cluster, "/v1/embeddings", {"input": [prompt_of(1, 40)]})
    vector = said["data"][0]["embedding"]
    assert sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-5)
    make_embedder(model)
    async with cluster_of(model, vllm_args="--runner generate") as cluster, Client(cluster.address) as client:
        with pytest.raises(InvalidRequest, match="set vllm_args: --runner pooling") as refused:
            await client.embed([prompt_of(1, 40)])
    assert refused.value.field == "embedding"


async def test_a_model_that_attends_both_ways_is_refused_at_start(tmp_path: Path) -> None:
    model = make_embedder(write_model("qwen3", tmp_path, is_causal=False))
    engine = vllm_engine("both", "decode", model)
    with pytest.raises(StartError, match="tokens attend to later ones") as refused:
        async with engines(engine):
            raise AssertionError("it started")
    assert refused.value.field == "model"
