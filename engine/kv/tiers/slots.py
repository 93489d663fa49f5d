"""Records of one tier: the block in each slot, reference counts, and eviction order.

Every slot is in exactly one of three states:

    free ──take──▶ held ──drop──▶ free     (if it has no name)
      ▲             │ ▲
      │           drop hold
    evict (in take) ▼ │
      └──────────── idle                   (if it has one)

*held* slots have a reference count: pins, and reads and writes in flight. *Idle* ones have a name, count zero, and are
evicted longest idle first. A held slot may lose its name and keep its bytes until the last reference is gone. Every
call takes constant time per slot.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.block_keys import BlockKey


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """Contents of a slot: the block `key`, which follows `parent`."""

    parent: BlockKey
    key: BlockKey
    fingerprint: bytes
    """Fingerprint, 8 bytes per KV head."""


class Slots:
    """Names, reference counts and LRU order of `num_slots` slots. Not thread-safe."""

    def __init__(self, num_slots: int, contents: Sequence[tuple[int, NamedBlock]] = ()) -> None:
        """Create the records.

        `contents` are idle from the start, first to be evicted first; slots and keys are distinct.
        """
        assert num_slots > 0
        self.num_slots = num_slots
        self._block_in = dict(contents)
        self._slot_of = {block.key: slot for slot, block in contents}
        self._idle: OrderedDict[int, None] = OrderedDict((slot, None) for slot, _ in contents)
        self._refs = [0] * num_slots
        # A stack: memory or file space that was never used is used last.
        self._free = [slot for slot in reversed(range(num_slots)) if slot not in self._block_in]

    @property
    def num_named(self) -> int:
        """Number of blocks that can be found."""
        return len(self._slot_of)

    def named(self) -> Iterator[NamedBlock]:
        """Yield every block that can be found."""
        return iter(self._block_in.values())

    def find(self, key: BlockKey) -> int | None:
        """Return the slot that holds `key`, or None."""
        return self._slot_of.get(key)

    def block_in(self, slot: int) -> NamedBlock | None:
        """Return the block in `slot`, or None where it has no name."""
        return self._block_in.get(slot)

    def take(self) -> tuple[int, NamedBlock | None] | None:
        """Return a nameless slot with one reference, and the block evicted for it.

        None when every slot is held.
        """
        evicted: NamedBlock | None = None
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            slot, _ = self._idle.popitem(last=False)
            evicted = self._block_in.pop(slot)
            del self._slot_of[evicted.key]
        else:
            return None
        self._refs[slot] = 1
        return slot, evicted

    def name(self, slot: int, block: NamedBlock) -> None:
        """Make the held `slot` findable under the block's key, which no other slot has."""
        assert self._refs[slot] > 0
        assert slot not in self._block_in
        assert block.key not in self._slot_of
        self._block_in[slot] = block
        self._slot_of[block.key] = slot

    def unname(self, slot: int) -> None:
        """Make the slot unfindable; it is free as soon as no reference is left."""
        del self._slot_of[self._block_in.pop(slot).key]
        if self._refs[slot] == 0:
            del self._idle[slot]
            self._free.append(slot)

    def hold(self, slot: int) -> None:
        """Add one reference to a slot that is idle or held."""
        if self._refs[slot] == 0:
            del self._idle[slot]
        self._refs[slot] += 1

    def drop(self, slot: int) -> None:
        """Drop one reference; without any left a named slot becomes the last to be evicted."""
        assert self._refs[slot] > 0, f"slot {slot} is not held"
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            if slot in self._block_in:
                self._idle[slot] = None
            else:
                self._free.append(slot)

    def touch(self, slot: int) -> None:
        """Make an idle slot the last to be evicted."""
        if slot in self._idle:
            self._idle.move_to_end(slot)

    def check_integrity(self) -> None:
        """Check all records.

        Raises AssertionError when they disagree.
        """
        free, idle = set(self._free), set(self._idle)
        held = {slot for slot, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a slot is free twice"
        assert len(free) + len(idle) + len(held) == self.num_slots, "a slot is in no state, or in two"
        assert free | idle | held == set(range(self.num_slots)), "a slot is lost"
        assert all(refs >= 0 for refs in self._refs)
        assert idle <= set(self._block_in), "an idle slot has no name"
        assert not free & set(self._block_in), "a free slot has a name"
        assert self._slot_of == {block.key: slot for slot, block in self._block_in.items()}, "names disagree"
        assert len(self._slot_of) == len(self._block_in), "two slots hold one block"
