"""Structured output through the whole cluster: the storyteller writes what it was asked for, even across a failover."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from protos import inference_pb2 as pb
from support.processes import busiest_decoder
from tandem.client import Client
from tandem.storyteller import STORYTELLER

pytestmark = pytest.mark.usefixtures("forked_roles")

HERO = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "deeds": {"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 2, "maxItems": 4},
        "brave": {"type": "boolean"},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "deeds", "brave", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SCHEMA = pb.StructuredOutput(json_schema=json.dumps(HERO))


@dataclass
class Told:
    """One stream so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: pb.Finish | None = None
    under_way: asyncio.Event = field(default_factory=asyncio.Event)


async def tell(client: Client, told: Told, **sampling: object) -> Told:
    options = pb.Sampling(**{"max_tokens": 400, "structured": SCHEMA} | sampling)  # type: ignore[arg-type]
    messages = [("user", "Tell me a story about a brave girl.")]
    async for piece in client.generate(messages=messages, sampling=options, timeout_s=120):
        told.text += piece.text
        told.token_ids += piece.token_ids
        told.finish = piece.finish if piece.HasField("finish") else told.finish
        if len(told.token_ids) >= 5:
            told.under_way.set()
    return told


async def heroes(client: Client, seeds: Sequence[int]) -> list[Told]:
    return list(await asyncio.gather(*(tell(client, Told(), seed=seed) for seed in seeds)))


def check_hero(told: Told) -> None:
    assert told.finish.reason == pb.FINISH_REASON_STOP
    hero = json.loads(told.text)
    assert list(hero) == ["name", "deeds", "brave", "age"]
    assert hero["name"].isalpha()
    assert 2 <= len(hero["deeds"]) <= 4
    assert isinstance(hero["brave"], bool)
    assert 1 <= hero["age"] <= 99


async def test_the_storyteller_keeps_to_a_schema_across_a_failover(cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    seeds = range(5)
    async with cluster_of(STORYTELLER, decode=2, dtype="float32") as cluster, Client(cluster.address) as client:
        undisturbed = await heroes(client, seeds)
        for told in undisturbed:
            check_hero(told)
        streams = [Told() for _ in seeds]
        telling = [asyncio.ensure_future(tell(client, told, seed=seed)) for seed, told in enumerate(streams)]
        await asyncio.gather(*(told.under_way.wait() for told in streams))
        killed, _ = await busiest_decoder(cluster)
        (other,) = [worker for worker in cluster.decode if worker is not killed]
        killed.process.kill()
        await asyncio.gather(*telling)
        for told, before in zip(streams, undisturbed, strict=True):
            assert (told.token_ids, told.text) == (before.token_ids, before.text)
        assert any(told.finish is not None and told.finish.receipt.placement.attempt > 1 for told in streams)
        await audit([other.address])
