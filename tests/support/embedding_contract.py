"""What embeddings keep to over HTTP and gRPC, whatever engine makes them.

A test module subclasses `EmbeddingContract` and offers `texts`, a cluster of an embedding model with the storyteller's
tokenizer, whose name is `texts`.
"""

import asyncio
import base64
import random
import struct
from typing import Any

import pytest

from protos import inference_pb2 as pb
from support.openai_http import call
from support.refusals import refusal_of
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster


def prompt_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1, 400), k=count)


def post(cluster: LocalCluster, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    status, _, said = call(cluster.router.http_address, path, body, headers)
    assert status == 200, said
    return said


class EmbeddingContract:
    async def test_forms_of_answers(self, texts: LocalCluster) -> None:
        """Base64 and fewer dimensions are the same vector."""
        body = {"input": "Once upon a time", "model": "texts"}
        plain = (await asyncio.to_thread(post, texts, "/v1/embeddings", body))["data"][0]["embedding"]
        coded = await asyncio.to_thread(post, texts, "/v1/embeddings", body | {"encoding_format": "base64"})
        raw = base64.b64decode(coded["data"][0]["embedding"])
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(plain, abs=1e-7)
        short = (await asyncio.to_thread(post, texts, "/v1/embeddings", body | {"dimensions": 4}))["data"][0][
            "embedding"
        ]
        length = sum(value * value for value in plain[:4]) ** 0.5
        assert short == pytest.approx([value / length for value in plain[:4]], abs=1e-6)

    async def test_scores_are_cosines_and_rank_documents(self, texts: LocalCluster) -> None:
        query, documents = "The fox ran", ["A king sat on his throne", "The fox ran away", "Rain fell"]
        said = await asyncio.to_thread(post, texts, "/v1/embeddings", {"input": [query, *documents]})
        first, *others = [each["embedding"] for each in said["data"]]
        cosines = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
        for body in ({"text_1": query, "text_2": documents}, {"queries": query, "documents": documents}):
            scored = await asyncio.to_thread(post, texts, "/score", body)
            assert [each["score"] for each in scored["data"]] == pytest.approx(cosines, abs=1e-5)
        pairs = await asyncio.to_thread(post, texts, "/v1/score", {"text_1": documents, "text_2": documents})
        assert [each["score"] for each in pairs["data"]] == pytest.approx([1, 1, 1], abs=1e-5)
        ranked = await asyncio.to_thread(
            post, texts, "/v1/rerank", {"query": query, "documents": [{"text": text} for text in documents], "top_n": 2}
        )
        best = sorted(range(3), key=lambda index: -cosines[index])[:2]
        assert [each["index"] for each in ranked["results"]] == best
        assert [each["document"]["text"] for each in ranked["results"]] == [documents[index] for index in best]

    @pytest.mark.parametrize(
        ("path", "body", "field", "words"),
        [
            ("/v1/embeddings", {"input": []}, "input", "not empty"),
            ("/v1/embeddings", {}, "input", "is missing"),
            ("/v1/embeddings", {"input": [[1], "a"]}, "input", "list of either"),
            ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "at most 2048 inputs"),
            ("/v1/embeddings", {"input": "a", "dimensions": 4000}, "dimensions", "must be 1 to"),
            ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "one of base64, float"),
            ("/v1/embeddings", {"input": [[99999]]}, "input", "out of range"),
            ("/v1/embeddings", {"input": "a", "model": "auto"}, "model", "name an embedding model"),
            ("/v1/embeddings", {"input": [[1] * 4096]}, "input", "exceeds the context of"),
            ("/classify", {"input": "a"}, "model", "makes embeddings: ask /v1/embeddings"),
            ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "as many as text_2"),
            ("/v1/rerank", {"query": "a", "documents": [1]}, "documents[0]", "must be a string or an object, not 1"),
        ],
    )
    async def test_bad_requests_name_the_field(
        self, texts: LocalCluster, path: str, body: dict[str, Any], field: str, words: str
    ) -> None:
        status, _, said = await asyncio.to_thread(call, texts.router.http_address, path, body)
        assert (status, said["error"]["param"]) == (400, field), said
        assert words in said["error"]["message"]

    async def test_what_cannot_be_combined_is_refused(self, texts: LocalCluster) -> None:
        options = pb.EmbeddingOptions()
        async with Client(texts.address) as client:
            for fields, field in (
                ({"text": "a", "sampling": pb.Sampling(max_tokens=2)}, "sampling"),
                ({"messages": [pb.ChatMessage(role="user", content="a")]}, "messages"),
            ):
                request = pb.GenerateRequest(embedding=options, **fields)
                with refusal_of(field):
                    _ = [message async for message in client.send(request, 60)]
