"""The prefix index: which worker holds which block, exact, from the workers' events.

Pure.

A worker is a bit, and a block maps to the integer of its holders' bits. A million blocks cost a dictionary entry, a key
and an integer each; following a prompt costs one lookup and at most one `and` per block. Neighbours of a chain mostly
have the same holders and then share one integer object, also after events.

    slot    free ──first seen──▶ alive ──gone──▶ dead ──a sweep has passed all shards──▶ free

A worker that leaves disappears from all answers at once, since answers are masked by the living workers' bits. Its bits
are cleared later, one shard at a time, paid for by keys of other events; only then does another worker get its slot.
Shards also bound the pause while a dictionary grows.
"""

from collections.abc import Collection, Iterator, Sequence

from kvcache.block_keys import BlockKey, resume_name

NUM_SHARDS = 256
"""Number of shards, by a key's first byte."""


class PrefixIndex:
    """Block keys of all workers.

    An unknown worker holds nothing.
    """

    def __init__(self) -> None:
        self._shards: list[dict[BlockKey, int]] = [{} for _ in range(NUM_SHARDS)]
        self._slots: dict[str, int] = {}
        self._worker_ids: list[str] = []
        """Worker ids by slot; for a slot that is not alive, its last worker."""
        self._alive = 0
        self._used = 0
        """Slots whose bit may be set somewhere."""
        self._free: list[int] = []
        self._dead = 0
        """Dead slots to be swept in the next round."""
        self._sweeping = 0
        """Slots being swept; shards before `_next_shard` have none of their bits left."""
        self._next_shard = 0
        self._earned = 0

    @property
    def num_keys(self) -> int:
        """Number of blocks held by any worker, and of unswept blocks of dead workers."""
        return sum(map(len, self._shards))

    @property
    def num_slots(self) -> int:
        """Number of slots, which bounds the bits of an integer: present workers, unswept ones, and free slots."""
        return len(self._worker_ids)

    def add(self, worker_id: str, keys: Sequence[BlockKey]) -> None:
        """Record that a worker holds these blocks."""
        if not keys:
            return
        bit = 1 << self._slot(worker_id)
        self._used |= bit
        shards, before, after = self._shards, 0, bit
        for key in keys:
            shard = shards[key[0]]
            if (holders := shard.get(key, 0)) is not before:
                before, after = holders, holders | bit
            shard[key] = after
        self._earn(len(keys))

    def discard(self, worker_id: str, keys: Sequence[BlockKey]) -> None:
        """Record that a worker no longer holds these blocks."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return
        others, before, after = self._alive & ~(1 << slot), 0, 0
        for key in keys:
            shard = self._shards[key[0]]
            if not (holders := shard.get(key, 0)):
                continue
            if holders is not before:
                before, after = holders, holders & others
            if after:
                shard[key] = after
            else:
                del shard[key]
        self._earn(len(keys))

    def drop_worker(self, worker_id: str) -> None:
        """Drop a worker that left, or that will send a snapshot.

        Takes no longer than the sweep of one shard.
        """
        slot = self._slots.pop(worker_id, None)
        if slot is None:
            return
        bit = 1 << slot
        self._alive &= ~bit
        if self._used & bit:
            self._dead |= bit
            self._sweep_shard()  # bounds dead slots to 2 * NUM_SHARDS
        else:
            self._free.append(slot)

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Return the number of leading blocks of `keys` that each worker holds, without workers that hold none."""
        matched: dict[str, int] = {}
        shards, alive, before, depth = self._shards, self._alive, -1, 0
        for key in keys:
            if (holders := shards[key[0]].get(key, 0)) is not before:
                before, rest = holders, alive & holders
                if rest != alive:
                    if depth:
                        self._name(alive ^ rest, depth, matched)
                    alive = rest
                    if not alive:
                        return matched
            depth += 1
        if depth:
            self._name(alive, depth, matched)
        return matched

    def cut_to_boundaries(self, keys: Sequence[BlockKey], matched: dict[str, int], bounded: Collection[str]) -> None:
        """Lower what `bounded` workers have matched to the last block after which a request can go on there.

        Workers announce such blocks by a second name. One that has none of them is removed from `matched`.
        """
        waiting = {1 << self._slots[worker_id]: worker_id for worker_id in bounded if worker_id in matched}
        mask = sum(waiting)
        depths = {bit: matched.pop(worker_id) for bit, worker_id in waiting.items()}
        for depth in range(max(depths.values(), default=0), 0, -1):
            name = resume_name(keys[depth - 1])
            for slot in _slots_of(self._shards[name[0]].get(name, 0) & mask):
                if depths[1 << slot] >= depth:
                    matched[waiting[1 << slot]] = depth
                    mask &= ~(1 << slot)
            if not mask:
                return

    def keys_of(self, worker_id: str) -> frozenset[BlockKey]:
        """Return a worker's keys by reading the whole index: for audits and tests."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return frozenset()
        return frozenset(key for shard in self._shards for key, holders in shard.items() if holders >> slot & 1)

    def sweep(self) -> None:
        """Clear all bits of dead workers at once."""
        while self._dead or self._sweeping:
            self._sweep_shard()

    def check_integrity(self) -> None:
        """Check that every slot is alive, dead, or free and set nowhere."""
        alive = set(self._slots.values())
        dead = set(_slots_of(self._dead | self._sweeping))
        assert self._alive == sum(1 << slot for slot in alive)
        assert all(self._worker_ids[slot] == worker_id for worker_id, slot in self._slots.items())
        assert sorted([*alive, *dead, *self._free]) == list(range(len(self._worker_ids)))
        for number, shard in enumerate(self._shards):
            swept = self._sweeping if number < self._next_shard else 0
            known = self._alive | self._dead | (self._sweeping & ~swept)
            for key, holders in shard.items():
                assert key[0] == number
                assert holders
                assert holders & ~known == 0

    def _slot(self, worker_id: str) -> int:
        slot = self._slots.get(worker_id)
        if slot is None:
            if self._free:
                slot = self._free.pop()
                self._worker_ids[slot] = worker_id
            else:
                slot = len(self._worker_ids)
                self._worker_ids.append(worker_id)
            self._slots[worker_id] = slot
            self._alive |= 1 << slot
        return slot

    def _name(self, holders: int, depth: int, matched: dict[str, int]) -> None:
        for slot in _slots_of(holders):
            matched[self._worker_ids[slot]] = depth

    def _earn(self, num_keys: int) -> None:
        """Count applied keys: each pays for one swept key, so a round ends before as many events as there are keys."""
        if not (self._dead or self._sweeping):
            return
        self._earned += num_keys
        while (self._dead or self._sweeping) and self._earned >= (size := len(self._shards[self._next_shard])):
            self._earned -= size
            self._sweep_shard()

    def _sweep_shard(self) -> None:
        if not self._sweeping:
            self._sweeping, self._dead, self._next_shard = self._dead, 0, 0
        shard, gone = self._shards[self._next_shard], self._sweeping
        touched = [(key, holders) for key, holders in shard.items() if holders & gone]
        size = len(shard)
        for key, holders in touched:
            if rest := holders & ~gone:
                shard[key] = rest
            else:
                del shard[key]
        if 2 * len(shard) < size:
            self._shards[self._next_shard] = dict(shard)  # a dictionary does not shrink by itself
        self._next_shard += 1
        if self._next_shard == NUM_SHARDS:
            self._free.extend(_slots_of(gone))
            self._used &= ~gone
            self._sweeping, self._next_shard, self._earned = 0, 0, 0


def _slots_of(mask: int) -> Iterator[int]:
    """Yield the set bits, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def shared_prefix(keys: Sequence[BlockKey], others: Sequence[BlockKey]) -> int:
    """Return the number of leading blocks that two chains share.

    Keys name whole chains: where two are equal, all before them are.
    """
    shared, end = 0, min(len(keys), len(others))
    if not end or keys[0] != others[0]:
        return 0
    while shared < end:
        middle = (shared + end + 1) // 2
        if keys[middle - 1] == others[middle - 1]:
            shared = middle
        else:
            end = middle - 1
    return shared
