"""Which encode workers are asked again after a failure."""

import asyncio
from typing import Any

import pytest

from cluster.errors import InvalidRequest, ServiceError, Unavailable
from engine.messages.from_engine import ItemsWanted
from engine.messages.to_engine import ItemsFetched, ToEngine
from kvcache.items import Item
from worker.front import item_fetches
from worker.front.item_fetches import ItemFetches

ENCODER = "encoder:1"
ITEM = Item(bytes(16), 0, 4, b"", "preprocessor:1", encoder=ENCODER)


class Asked(ItemFetches):
    """Fetches whose encode worker fails in one way."""

    def __init__(self, engine: Any, failure: ServiceError) -> None:
        super().__init__(engine)
        self.num_asked = 0
        self._failure = failure

    async def _encoded(self, address: str, items: list[Item], wanted: ItemsWanted) -> Any:
        self.num_asked += 1
        raise self._failure


class Engine:
    def __init__(self) -> None:
        self.received: list[ToEngine] = []
        self.has_received = asyncio.Event()

    def send(self, *messages: ToEngine) -> None:
        self.received += messages
        self.has_received.set()


@pytest.mark.parametrize(
    ("failure", "num_asked"), [(Unavailable("it is gone"), 1), (InvalidRequest("items", "cannot be read"), 2)]
)
async def test_only_an_encode_worker_that_fails_by_itself_is_avoided(
    failure: ServiceError, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def blobs(*_: Any) -> dict[bytes, bytes]:
        return {ITEM.identifier: b"blob"}

    monkeypatch.setattr(item_fetches, "fetch_blobs", blobs)
    engine = Engine()
    fetches = Asked(engine, failure)
    for number in range(2):
        fetches.start(ItemsWanted(f"r{number}", 0, (ITEM,), b"fingerprint"))
        await engine.has_received.wait()
        engine.has_received.clear()
    assert fetches.num_asked == num_asked
    assert engine.received == [ItemsFetched(f"r{number}", 0, ((ITEM.identifier, b"blob"),), ()) for number in range(2)]
