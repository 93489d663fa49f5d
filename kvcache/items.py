"""Items of a prompt: pictures, sounds and videos, as everything but an engine's backend sees them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

IDENTIFIER_BYTES = 16


class Item(NamedTuple):
    """One item; `protos/items.proto` documents the fields."""

    identifier: bytes
    offset: int
    length: int
    details: bytes = b""
    address: str = ""
    encoder: str = ""

    @property
    def end(self) -> int:
        """Number of the token after its last one."""
        return self.offset + self.length


def items_fault(items: Sequence[Item], num_tokens: int) -> str:
    """Return what is wrong with a prompt's items; empty where nothing is."""
    end = 0
    for place, item in enumerate(items):
        if len(item.identifier) != IDENTIFIER_BYTES:
            return f"items[{place}]: an identifier has {IDENTIFIER_BYTES} bytes, not {len(item.identifier)}"
        if not item.length or item.offset < end:
            return f"items[{place}]: it has {item.length} tokens from {item.offset} on, the one before ends at {end}"
        end = item.end
    return f"the last item ends at token {end}, the prompt has {num_tokens}" if end > num_tokens else ""


def begun_items(items: Iterable[Item], num_tokens: int) -> tuple[Item, ...]:
    """Return the items of which the first `num_tokens` tokens have a part."""
    return tuple(item for item in items if item.offset < num_tokens)
