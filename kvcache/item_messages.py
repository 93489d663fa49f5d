"""Items in messages of the internal protocols."""

from collections.abc import Iterable

from kvcache.items import Item
from protos import items_pb2 as pb


def item_messages(items: Iterable[Item]) -> list[pb.Item]:
    return [pb.Item(**item._asdict()) for item in items]


def read_items(messages: Iterable[pb.Item]) -> tuple[Item, ...]:
    """Undo `item_messages`."""
    return tuple(
        Item(each.identifier, each.offset, each.length, each.details, each.address, each.encoder) for each in messages
    )
