"""How long a prompt's blocks are kept, as the APIs' fields say."""

from typing import Any

import pytest

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.anthropic.messages import read_messages
from router.frontend.http.errors import Caller
from router.validation import check_retention


def marked(ttl: str | None) -> dict[str, Any]:
    control = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
    return {"type": "text", "text": "hello", "cache_control": control}


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({"system": [marked(None)]}, 300.0),
        ({"system": [marked("5m")], "messages": [{"role": "user", "content": [marked("1h")]}]}, 3600.0),
        ({"tools": [{"name": "find", "input_schema": {}, "cache_control": {"type": "ephemeral"}}]}, 300.0),
        ({}, 0.0),
    ],
)
def test_the_longest_mark_counts(body: dict[str, Any], seconds: float) -> None:
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]} | body
    (request,) = read_messages(asked, Caller("", "r")).requests
    assert request.cache_retention_s == seconds
    assert request.HasField("cache_retention_s") == bool(seconds)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 86_401.0, float("inf"), float("nan")])
def test_times_out_of_range_are_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_retention(pb.GenerateRequest(cache_retention_s=seconds))
    assert refused.value.field == "cache_retention_s"


def test_embeddings_keep_nothing() -> None:
    with pytest.raises(InvalidRequest, match="is not available for embeddings"):
        check_retention(pb.GenerateRequest(cache_retention_s=1.0, embedding=pb.EmbeddingOptions()))
    check_retention(pb.GenerateRequest(cache_retention_s=86_400.0))
