"""The tiers below the pool: exact examples, then any sequence of calls against a brute-force model.

Jobs run only when a test says so; the disk tier's file is a real one.
"""

import os
import tempfile
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from engine.errors import EngineStartError
from engine.keys import BlockKey, block_keys, root_key
from engine.pool import Removed, Stored
from engine.tiers.disk_format import PAGE_BYTES, SUPERBLOCK_BYTES, DiskFormat, SlotHeader
from engine.tiers.slots import NamedBlock, Slots
from engine.tiers.tiers import STAGING_BYTES, TierConfig, Tiers
from engine.tiers.work import Held
from kvtransfer.errors import TransferError
from kvtransfer.fingerprint import fingerprint_blocks

HEADS = 2
BLOCK_BYTES = 64
MODEL = bytes(range(32))
ROOT = root_key(MODEL, "")
FORMAT = DiskFormat(BLOCK_BYTES, HEADS)


def chain(*tokens: int) -> list[BlockKey]:
    """Keys of one block per token."""
    return block_keys(ROOT, tokens, 1)


def block_of(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def fingerprint_of(block: NDArray[np.uint8]) -> bytes:
    return fingerprint_blocks(block.reshape(1, -1), [0], HEADS).tobytes()


def disk_bytes_for(num_slots: int) -> int:
    return FORMAT.payload_offset(num_slots - 1) + FORMAT.payload_stride


def tiers_of(host_slots: int, disk_slots: int = 0, directory: Path | None = None) -> Tiers:
    config = TierConfig(host_slots * BLOCK_BYTES, directory, disk_bytes_for(disk_slots) if directory else 0)
    return Tiers(config, BLOCK_BYTES, HEADS, MODEL, threaded=False)


def put_chain(tiers: Tiers, keys: list[BlockKey], first_seed: int = 0) -> None:
    """As the pool evicts a chain: tail first. Block i has the bytes of `first_seed + i`."""
    for index, key in reversed(list(enumerate(keys))):
        block = block_of(first_seed + index)
        tiers.put(keys[index - 1] if index else ROOT, key, block, fingerprint_of(block))
        block[:] = 0  # the caller reuses the memory at once


def work(tiers: Tiers) -> int:
    """Carry out every job; how many there were."""
    count = 0
    while tiers.step():
        count += 1
    return count


def collect(tiers: Tiers, held: list[Held]) -> tuple[list[bytes], "Future[None]"]:
    """Start a read; the list fills as it goes."""
    landed: list[bytes] = []

    def write(index: int, data: NDArray[np.uint8]) -> None:
        assert index == len(landed)
        landed.append(data.tobytes())

    return landed, tiers.read(held, write)


def read_all(tiers: Tiers, keys: list[BlockKey]) -> list[bytes]:
    held = tiers.pin(keys)
    landed, future = collect(tiers, held)
    work(tiers)
    future.result(0)
    tiers.unpin(held)
    return landed


# ------------------------------------------------------------------------------------------- examples


def test_what_was_put_is_read_from_the_host() -> None:
    tiers = tiers_of(4)
    keys = chain(1, 2, 3)
    put_chain(tiers, keys)
    assert tiers.match([*keys, *chain(9)]) == 3
    assert tiers.match(chain(9)) == 0
    assert tiers.fingerprints(tiers.pin(keys)) == tuple(fingerprint_of(block_of(seed)) for seed in range(3))
    assert read_all(tiers, keys) == [block_of(seed).tobytes() for seed in range(3)]
    counters = tiers.counters
    assert (counters.host_blocks, counters.host_bytes, counters.put, counters.host_hits) == (3, 192, 3, 3)
    assert (counters.host_read_bytes, counters.disk_blocks, counters.disk_hits) == (192, 0, 0)
    assert counters.host_read_s > 0.0


def test_the_tail_of_a_chain_falls_out_first_and_what_was_used_last() -> None:
    tiers = tiers_of(4)
    old, new = chain(1, 2), chain(7, 8)
    put_chain(tiers, old)
    put_chain(tiers, new)
    read_all(tiers, old)
    put_chain(tiers, chain(5, 6))
    assert tiers.take_events() == [Removed((new[1], new[0]))]
    put_chain(tiers, chain(4))
    assert tiers.take_events() == [Removed((old[1],))]
    assert tiers.match(old) == 1
    assert tiers.take_events() == []


def test_a_block_put_again_before_anyone_asked_is_not_said_to_be_gone() -> None:
    tiers = tiers_of(1)
    first, second = chain(1), chain(2)
    put_chain(tiers, first)
    put_chain(tiers, second)
    put_chain(tiers, first)
    assert tiers.take_events() == [Removed(tuple(second))]


def test_pinned_blocks_stay_and_what_cannot_be_put_is_dropped() -> None:
    tiers = tiers_of(2)
    keys, other = chain(1, 2), chain(9)
    put_chain(tiers, keys)
    held = tiers.pin(keys)
    put_chain(tiers, other)
    assert tiers.match(other) == 0
    assert tiers.take_events() == [Removed(tuple(other))]
    assert tiers.counters.dropped == 1
    tiers.unpin(held)
    put_chain(tiers, other)
    assert (tiers.match(other), tiers.match(keys)) == (1, 1)


def test_pin_takes_the_leading_keys_that_are_still_there() -> None:
    tiers = tiers_of(2)
    keys = chain(1, 2)
    put_chain(tiers, keys)
    assert tiers.match(keys) == 2
    put_chain(tiers, chain(9))
    assert [held.block.key for held in tiers.pin(keys)] == keys[:1]


def test_a_host_slot_is_not_reused_while_the_disk_lacks_it(tmp_path: Path) -> None:
    tiers = tiers_of(2, 8, tmp_path)
    put_chain(tiers, chain(1, 2))
    put_chain(tiers, chain(3))
    assert tiers.counters.dropped == 1
    assert tiers.step()
    put_chain(tiers, chain(3), 2)
    assert tiers.match(chain(1, 2)) == 2
    work(tiers)
    assert read_all(tiers, chain(1, 2)) == [block_of(0).tobytes(), block_of(1).tobytes()]
    tiers.close()


def test_the_disk_keeps_what_falls_out_of_the_host(tmp_path: Path) -> None:
    tiers = tiers_of(2, 8, tmp_path)
    for token in range(8):
        put_chain(tiers, chain(token), token)
        work(tiers)
    assert tiers.take_events() == []
    assert read_all(tiers, chain(3)) == [block_of(3).tobytes()]
    assert (tiers.counters.disk_hits, tiers.counters.disk_read_bytes, tiers.counters.host_hits) == (1, 64, 0)
    assert tiers.match(chain(6)) == tiers.match(chain(7)) == 1, "a read from disk takes no place in the host"
    assert tiers.counters.host_blocks == 2
    put_chain(tiers, chain(3), 3)
    assert work(tiers) == 0, "the disk has it: nothing to write"
    read_all(tiers, chain(0))
    put_chain(tiers, chain(8), 8)
    work(tiers)
    assert tiers.take_events() == [Removed(tuple(chain(1)))], "0 was read meanwhile, so 1 is the oldest"
    tiers.close()


def test_what_the_host_uses_the_disk_keeps(tmp_path: Path) -> None:
    tiers = tiers_of(2, 3, tmp_path)
    put_chain(tiers, chain(0))
    for token in range(1, 5):
        put_chain(tiers, chain(token), token)
        work(tiers)
        read_all(tiers, chain(0))
    assert tiers.counters.host_hits == 4
    held = {event.keys[0] for event in tiers.snapshot() if isinstance(event, Stored)}
    assert held == {chain(token)[0] for token in (0, 3, 4)}
    tiers.close()


def test_reads_come_before_writes(tmp_path: Path) -> None:
    tiers = tiers_of(4, 8, tmp_path)
    put_chain(tiers, chain(1, 2))
    landed, future = collect(tiers, tiers.pin(chain(1)))
    assert tiers.step()
    assert future.done()
    assert len(landed) == 1
    assert tiers.counters.disk_blocks == 0
    tiers.close()


def test_a_read_can_be_cancelled_before_it_began() -> None:
    tiers = tiers_of(2)
    put_chain(tiers, chain(1))
    held = tiers.pin(chain(1))
    landed, future = collect(tiers, held)
    assert future.cancel()
    assert tiers.step()
    assert landed == []
    begun: list[bool] = []
    running = tiers.read(held, lambda index, data: begun.append(running.cancel()))
    tiers.step()
    assert begun == [False]
    assert running.result(0) is None
    tiers.unpin(held)
    put_chain(tiers, chain(2, 3))
    assert tiers.match(chain(1)) == 0


def test_a_read_outlives_its_pin() -> None:
    tiers = tiers_of(1)
    put_chain(tiers, chain(1))
    held = tiers.pin(chain(1))
    landed, future = collect(tiers, held)
    tiers.unpin(held)
    put_chain(tiers, chain(2), 5)
    assert tiers.counters.dropped == 1
    work(tiers)
    assert (landed, future.result(0)) == ([block_of(0).tobytes()], None)
    put_chain(tiers, chain(2), 5)
    assert tiers.match(chain(2)) == 1


def test_what_the_reader_raises_is_the_readers() -> None:
    tiers = tiers_of(2)
    put_chain(tiers, chain(1))

    def refuse(index: int, data: NDArray[np.uint8]) -> None:
        raise KeyError(index)

    failed = tiers.read(tiers.pin(chain(1)), refuse)
    work(tiers)
    with pytest.raises(KeyError):
        failed.result(0)
    assert tiers.match(chain(1)) == 1
    assert read_all(tiers, chain(1)) == [block_of(0).tobytes()]


def test_a_forgotten_block_is_gone_for_good(tmp_path: Path) -> None:
    tiers = tiers_of(4, 8, tmp_path)
    keys = chain(1, 2, 3)
    put_chain(tiers, keys[:2])
    work(tiers)
    put_chain(tiers, [keys[2]])
    held = tiers.pin(keys)
    tiers.forget([keys[0], keys[2], *chain(9)])  # the third is being written
    assert tiers.take_events() == [Removed((keys[0], keys[2]))]
    assert [tiers.match([key]) for key in keys] == [0, 1, 0]
    assert tiers.counters.rejected == 2
    tiers.unpin(held)
    tiers.close()
    again = tiers_of(4, 8, tmp_path)
    assert [again.match([key]) for key in keys] == [0, 1, 0]
    again.close()


def test_a_restart_finds_the_disk_and_its_order(tmp_path: Path) -> None:
    tiers = tiers_of(2, 4, tmp_path)
    keys = chain(1, 2)
    put_chain(tiers, keys)
    work(tiers)
    put_chain(tiers, chain(7, 8), 7)
    tiers.close()  # writes what is queued
    again = tiers_of(2, 4, tmp_path)
    assert again.counters.disk_blocks == 4
    assert Stored(keys[0], (keys[1],)) in again.snapshot()
    assert Stored(ROOT, (keys[0],)) in again.snapshot()
    assert again.fingerprints(again.pin(keys)) == (fingerprint_of(block_of(0)), fingerprint_of(block_of(1)))
    assert read_all(again, chain(7, 8)) == [block_of(7).tobytes(), block_of(8).tobytes()]
    again.close()
    third = tiers_of(2, 4, tmp_path)
    put_chain(third, chain(5))
    assert third.take_events() == [Removed((keys[1],))], "the oldest, and a tail before its head"
    third.close()


def test_a_restart_finds_the_order_of_writing_not_of_slots(tmp_path: Path) -> None:
    tiers = tiers_of(2, 4, tmp_path)
    for token in range(4):
        put_chain(tiers, chain(token))
        work(tiers)
    read_all(tiers, chain(0))
    for token in range(4, 8):  # into slots 1, 2, 3, 0
        put_chain(tiers, chain(token))
        work(tiers)
    tiers.close()
    again = tiers_of(2, 4, tmp_path)
    put_chain(again, chain(8))
    assert again.take_events() == [Removed(tuple(chain(4)))]
    again.close()


def test_after_close_a_read_fails() -> None:
    tiers = tiers_of(2)
    put_chain(tiers, chain(1))
    held = tiers.pin(chain(1))
    queued = tiers.read(held, lambda index, data: None)
    tiers.close()
    assert queued.cancelled()
    with pytest.raises(TransferError, match="closed"):
        tiers.read(held, lambda index, data: None).result(0)


def test_a_disk_alone_has_an_arena_to_write_from(tmp_path: Path) -> None:
    tiers = tiers_of(0, 2, tmp_path)
    assert tiers._host.memory.shape == (STAGING_BYTES // BLOCK_BYTES, BLOCK_BYTES)
    put_chain(tiers, chain(1))
    tiers.close()
    large = Tiers(TierConfig(0, tmp_path, 8 << 20), 4 << 20, HEADS, MODEL, threaded=False)
    assert large._host.memory.shape == (16, 4 << 20)
    large.close()


@pytest.mark.parametrize(
    ("host_bytes", "directory", "disk_bytes", "field", "reason"),
    [
        (0, None, 0, "kv_host_memory_mib", "less than one KV block of 64 bytes"),
        (63, "fresh", 1 << 20, "kv_host_memory_mib", "less than one KV block"),
        (1 << 62, None, 0, "kv_host_memory_mib", "cannot be had"),
        (64, "fresh", 3 * PAGE_BYTES - 1, "kv_disk_mib", "less than one KV block of 64 bytes and its header"),
        (64, "a file", 1 << 20, "kv_disk_dir", "Not a directory"),
        (64, "/proc", 1 << 20, "kv_disk_dir", "No such file or directory"),
    ],
)
def test_settings_that_cannot_be_honoured(
    tmp_path: Path, host_bytes: int, directory: str | None, disk_bytes: int, field: str, reason: str
) -> None:
    (tmp_path / "a file").touch()
    disk_dir = tmp_path / directory if directory else None
    with pytest.raises(EngineStartError, match=reason) as caught:
        Tiers(TierConfig(host_bytes, disk_dir, disk_bytes), BLOCK_BYTES, HEADS, MODEL, threaded=False)
    assert caught.value.field == field


@pytest.mark.parametrize("fault", ["lost", "twice", "nameless", "stale name", "named and free"])
def test_the_integrity_check_sees(fault: str) -> None:
    slots = Slots(4, [(2, NamedBlock(ROOT, b"a", b""))])
    slots.check_integrity()
    match fault:
        case "lost":
            slots._free.pop()
        case "twice":
            slots._free.append(slots._free[0])
        case "nameless":
            del slots._slot_of[slots._block_in.pop(2).key]
        case "stale name":
            slots._slot_of[b"ghost"] = 2
        case "named and free":
            del slots._idle[2]
            slots._free.append(2)
    with pytest.raises(AssertionError):
        slots.check_integrity()


# ------------------------------------------------------------------------------------------- the format


@given(st.integers(1, 3 * PAGE_BYTES), st.integers(1, 600), st.integers(0, 4 << 20))
def test_slots_do_not_overlap_and_end_within_the_bound(block_bytes: int, heads: int, num_bytes: int) -> None:
    layout = DiskFormat(block_bytes, heads)
    num_slots = layout.slots_within(num_bytes)
    spans = [(0, SUPERBLOCK_BYTES)]
    for slot in range(num_slots + 1):
        spans.append((layout.header_offset(slot), layout.header_bytes))
        spans.append((layout.payload_offset(slot), layout.payload_stride))
        assert layout.payload_offset(slot) % PAGE_BYTES == 0
    last = spans.pop()
    assert sum(last) > num_bytes, "one more would not fit"
    spans.pop()
    spans.sort()
    assert all(offset + length <= then for (offset, length), (then, _) in pairwise(spans))
    assert sum(spans[-1]) <= num_bytes or not num_slots


@given(st.integers(0, 1 << 40), st.integers(0, 2**64 - 1), st.integers(0, FORMAT.header_bytes * 8 - 1))
def test_a_header_is_what_was_written_or_is_refused(slot: int, generation: int, bit: int) -> None:
    block = NamedBlock(ROOT, *chain(1), fingerprint_of(block_of(1)))
    packed = FORMAT.pack_header(slot, SlotHeader(block, generation))
    assert len(packed) == FORMAT.header_bytes
    assert FORMAT.unpack_header(slot, packed) == SlotHeader(block, generation)
    assert FORMAT.unpack_header(slot + 1, packed) is None
    assert FORMAT.unpack_header(slot, packed[:-1]) is None
    flipped = bytearray(packed)
    flipped[bit // 8] ^= 1 << bit % 8
    assert FORMAT.unpack_header(slot, bytes(flipped)) is None


@given(st.integers(0, PAGE_BYTES * 8 - 1))
def test_a_superblock_is_what_was_written_or_is_refused(bit: int) -> None:
    page = FORMAT.pack_superblock(7, MODEL)
    assert FORMAT.superblock_fault(page, MODEL) == ""
    assert FORMAT.superblock_fault(page, MODEL[::-1])
    assert DiskFormat(BLOCK_BYTES + 1, HEADS).superblock_fault(page, MODEL)
    assert DiskFormat(BLOCK_BYTES, HEADS + 1).superblock_fault(page, MODEL)
    assert FORMAT.superblock_fault(page[:-1], MODEL)
    flipped = bytearray(page)
    flipped[bit // 8] ^= 1 << bit % 8
    assert FORMAT.superblock_fault(bytes(flipped), MODEL)


# ---------------------------------------------------------------------------------- against a model


@dataclass(eq=False)
class Copy:
    """A slot in use. `since`: when it was last used."""

    block: NamedBlock
    data: bytes
    named: bool
    refs: int = 1
    since: int = 0
    generation: int = 0


class ModelTier:
    """A list, searched from end to end."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.copies: list[Copy] = []
        self.now = 0

    def find(self, key: BlockKey) -> Copy | None:
        return next((copy for copy in self.copies if copy.named and copy.block.key == key), None)

    def idle(self) -> list[Copy]:
        return sorted((copy for copy in self.copies if not copy.refs), key=lambda copy: copy.since)

    def take(self, block: NamedBlock, data: bytes, named: bool) -> tuple[Copy, Copy | None] | None:
        evicted = None
        if len(self.copies) == self.capacity:
            if not self.idle():
                return None
            evicted = self.idle()[0]
            self.copies.remove(evicted)
        self.copies.append(Copy(block, data, named))
        return self.copies[-1], evicted

    def touch(self, copy: Copy) -> None:
        self.now += 1
        copy.since = self.now

    def drop(self, copy: Copy) -> None:
        copy.refs -= 1
        if not copy.refs:
            self.touch(copy)
            if not copy.named:
                self.copies.remove(copy)

    def unname(self, copy: Copy) -> None:
        copy.named = False
        if not copy.refs:
            self.copies.remove(copy)


@dataclass(eq=False)
class ModelRead:
    copies: list[tuple[ModelTier, Copy]]
    future: "Future[None]"
    landed: list[bytes]
    cancelled: bool = False
    lost: Copy | None = None


@dataclass(eq=False)
class ModelWrite:
    host: Copy
    disk: Copy
    failed: bool = False


class TiersModel(RuleBasedStateMachine):
    """Which copy is where, kept with no regard to speed, and every job that has not been concluded."""

    HOST_SLOTS = 2
    DISK_SLOTS = 5
    KEYS = block_keys(ROOT, range(8), 1)

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.tiers = self.open()
        self.host, self.disk = ModelTier(self.HOST_SLOTS), ModelTier(self.DISK_SLOTS)
        self.writes: list[ModelWrite | None] = []  # None: an erasure
        self.reads: list[ModelRead] = []
        self.done: list[ModelWrite | ModelRead] = []
        self.pins: list[tuple[list[Held], list[tuple[ModelTier, Copy]]]] = []
        self.gone: list[BlockKey] = []
        self.counts = {"put": 0, "dropped": 0, "unwritten": 0, "rejected": 0, "host_hits": 0, "disk_hits": 0}
        self.generation = self.num_blocks_made = 0
        self.mode = os.O_RDWR

    def open(self) -> Tiers:
        return tiers_of(self.HOST_SLOTS, self.DISK_SLOTS, Path(self.directory.name))

    def teardown(self) -> None:
        self.tiers.close()
        self.directory.cleanup()

    # -------------------------------------------------------------- what the model thinks

    def find(self, key: BlockKey) -> tuple[ModelTier, Copy] | None:
        for tier in (self.host, self.disk):
            if (copy := tier.find(key)) is not None:
                return tier, copy
        return None

    def fell_out(self, key: BlockKey) -> None:
        if self.find(key) is None:
            self.gone.append(key)

    def settle(self) -> None:
        for job in self.done:
            if isinstance(job, ModelRead):
                self.settle_read(job)
            else:
                self.settle_write(job)
        self.done = []

    def settle_read(self, job: ModelRead) -> None:
        for tier, copy in reversed(job.copies):
            tier.drop(copy)
        for tier, _ in job.copies[: len(job.landed)]:
            self.counts["host_hits" if tier is self.host else "disk_hits"] += 1
        if job.lost is not None and job.lost.named and job.lost in self.disk.copies:
            self.counts["rejected"] += 1
            self.disk.unname(job.lost)
            self.writes.append(None)
            self.fell_out(job.lost.block.key)

    def settle_write(self, job: ModelWrite) -> None:
        self.counts["unwritten"] += job.failed
        job.disk.named = job.host.named and not job.failed
        self.host.drop(job.host)
        self.disk.drop(job.disk)

    def write_through(self, copy: Copy) -> None:
        on_disk = self.disk.find(copy.block.key)
        if on_disk is not None:
            if not on_disk.refs:
                self.disk.touch(on_disk)
            self.host.drop(copy)
            return
        taken = self.disk.take(copy.block, copy.data, named=False)
        if taken is None:
            self.counts["unwritten"] += 1
            self.host.drop(copy)
            return
        disk_copy, evicted = taken
        if evicted is not None:
            self.fell_out(evicted.block.key)
        disk_copy.generation = self.generation
        self.generation += 1
        self.writes.append(ModelWrite(copy, disk_copy))

    def is_written(self, copy: Copy) -> bool:
        return any(isinstance(job, ModelWrite) and job.host is copy for job in self.writes)

    def put_in_model(self, block: NamedBlock, data: bytes) -> None:
        self.settle()
        if block.key in self.gone:
            self.gone.remove(block.key)
        known = self.host.find(block.key)
        if known is not None:
            if not self.is_written(known):
                known.refs += 1
                self.write_through(known)
            return
        taken = self.host.take(block, data, named=True)
        if taken is not None:
            copy, evicted = taken
            if evicted is not None:
                self.fell_out(evicted.block.key)
            self.counts["put"] += 1
            self.write_through(copy)
        elif (on_disk := self.disk.find(block.key)) is not None:
            if not on_disk.refs:
                self.disk.touch(on_disk)
        else:
            self.counts["dropped"] += 1
            self.gone.append(block.key)

    # -------------------------------------------------------------- rules

    @rule(indices=st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=6), drained=st.booleans())
    def put_some(self, indices: list[int], drained: bool) -> None:
        for index in indices:
            self.put(index)
            if drained:
                self.drain()

    def put(self, index: int) -> None:
        self.num_blocks_made += 1
        data = block_of(self.num_blocks_made)
        block = NamedBlock(self.KEYS[index - 1] if index else ROOT, self.KEYS[index], fingerprint_of(data))
        self.put_in_model(block, data.tobytes())
        self.tiers.put(block.parent, block.key, data, block.fingerprint)
        data[:] = 0

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5))
    def match(self, keys: list[BlockKey]) -> None:
        self.settle()
        found = [self.find(key) is not None for key in keys]
        assert self.tiers.match(keys) == (found.index(False) if False in found else len(keys))

    @rule(data=st.data(), missing=st.sampled_from(KEYS))
    def pin(self, data: st.DataObject, missing: BlockKey) -> None:
        """Of keys that are held, for most; whatever follows one that is not is left alone."""
        self.settle()
        held_keys = [key for key in self.KEYS if self.find(key) is not None]
        keys = data.draw(st.lists(st.sampled_from([*held_keys, missing]), max_size=4))
        self.tiers.match(keys)
        copies = []
        for key in keys:
            found = self.find(key)
            if found is None:
                break
            found[1].refs += 1
            copies.append(found)
        held = self.tiers.pin(keys)
        assert [item.tier for item in held] == ["host" if tier is self.host else "disk" for tier, _ in copies]
        assert self.tiers.fingerprints(held) == tuple(copy.block.fingerprint for _, copy in copies)
        self.pins.append((held, copies))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.unpin_at(data.draw(st.integers(0, len(self.pins) - 1)))

    def unpin_at(self, index: int) -> None:
        held, copies = self.pins.pop(index)
        self.tiers.unpin(held)
        for tier, copy in reversed(copies):
            tier.drop(copy)
            on_disk = self.disk.find(copy.block.key)
            if tier is self.host and on_disk is not None and not on_disk.refs:
                self.disk.touch(on_disk)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), puts=st.integers(-1, len(KEYS) - 1))
    def read(self, data: st.DataObject, puts: int) -> None:
        """Perhaps something is put in the middle of it."""
        held, copies = self.pins[data.draw(st.integers(0, len(self.pins) - 1))]
        landed: list[bytes] = []

        def write(index: int, block: NDArray[np.uint8]) -> None:
            if puts >= 0:
                self.put(puts)
            landed.append(block.tobytes())

        for _, copy in copies:
            copy.refs += 1
        self.reads.append(ModelRead(copies, self.tiers.read(held, write), landed))

    @rule(index=st.integers(0, len(KEYS) - 1))
    def use(self, index: int) -> None:
        """Pinned, read and unpinned before anything else happens: mostly from disk, which holds more."""
        found = self.find(self.KEYS[index])
        held = self.tiers.pin([self.KEYS[index]])
        assert len(held) == (found is not None)
        if found is None:
            return
        found[1].refs += 2
        landed: list[bytes] = []
        future = self.tiers.read(held, lambda _, block: landed.append(block.tobytes()))
        self.reads.append(ModelRead([found], future, landed))
        while self.reads:
            self.step()
        self.pins.append((held, [found]))
        self.unpin_at(len(self.pins) - 1)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = self.reads[data.draw(st.integers(0, len(self.reads) - 1))]
        assert job.future.cancel()
        job.cancelled = True

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2))
    def forget(self, keys: list[BlockKey]) -> None:
        self.settle()
        self.tiers.forget(keys)
        for key in keys:
            in_host, on_disk = self.host.find(key), self.disk.find(key)
            if in_host is None and on_disk is None:
                continue
            self.counts["rejected"] += 1
            self.gone.append(key)
            if in_host is not None:
                if self.is_written(in_host):
                    self.writes.append(None)
                self.host.unname(in_host)
            if on_disk is not None:
                self.disk.unname(on_disk)
                self.writes.append(None)

    @rule()
    def step(self) -> None:
        if self.reads:
            self.step_read(self.reads.pop(0))
        elif self.writes:
            job = self.writes[0]
            assert self.tiers.step()
            self.writes.pop(0)
            if job is not None:
                job.failed = self.mode == os.O_RDONLY
                self.done.append(job)
        else:
            assert not self.tiers.step()

    def step_read(self, job: ModelRead) -> None:
        unreadable = [self.mode == os.O_WRONLY and tier is self.disk for tier, _ in job.copies]
        num_read = unreadable.index(True) if True in unreadable else len(unreadable)
        assert self.tiers.step()
        self.done.append(job)
        if job.cancelled:
            assert job.landed == []
            return
        assert job.landed == [copy.data for _, copy in job.copies[:num_read]]
        if True in unreadable:
            job.lost = job.copies[num_read][1]
            assert isinstance(job.future.exception(0), TransferError)
        else:
            assert job.future.result(0) is None

    @rule()
    def drain(self) -> None:
        while self.reads or self.writes:
            self.step()

    # -------------------------------------------------------------- what must hold

    @invariant()
    def books_balance(self) -> None:
        self.settle()
        events = self.tiers.take_events()
        assert events == ([Removed(tuple(self.gone))] if self.gone else [])
        self.gone = []
        self.tiers.check_integrity()
        assert self.tiers._disk is not None
        for tier, slots in ((self.host, self.tiers._host.slots), (self.disk, self.tiers._disk.slots)):
            assert [slots._block_in[slot] for slot in slots._idle] == [copy.block for copy in tier.idle()]
            assert sorted(refs for refs in slots._refs if refs) == sorted(c.refs for c in tier.copies if c.refs)
            assert len(slots._free) == tier.capacity - len(tier.copies)
        counters = self.tiers.counters
        assert {name: getattr(counters, name) for name in self.counts} == self.counts

    @invariant()
    def a_snapshot_tells_all(self) -> None:
        self.settle()
        told = [(event.parent, event.keys) for event in self.tiers.snapshot() if isinstance(event, Stored)]
        copies = {copy.block.key: copy for tier in (self.disk, self.host) for copy in tier.copies if copy.named}
        assert sorted(told) == sorted((copy.block.parent, (key,)) for key, copy in copies.items())

    @invariant()
    def the_bytes_are_those_that_were_put(self) -> None:
        assert self.tiers._disk is not None
        for slot, block in self.tiers._host.slots._block_in.items():
            copy = self.host.find(block.key)
            assert copy is not None
            assert self.tiers._host.memory[slot].tobytes() == copy.data
        if self.mode == os.O_WRONLY:
            return
        scratch = np.empty(BLOCK_BYTES, np.uint8)
        for slot, block in self.tiers._disk.slots._block_in.items():
            copy = self.disk.find(block.key)
            assert copy is not None
            self.tiers._disk.read(slot, scratch)
            assert scratch.tobytes() == copy.data
            assert fingerprint_of(scratch) == block.fingerprint


class RestartedTiers(TiersModel):
    """What was written is there again, and nothing that was forgotten."""

    @rule()
    def restart(self) -> None:
        self.tiers.close()
        assert all(job.future.cancelled() for job in self.reads)
        for job in self.writes:
            if job is not None:
                self.done.append(job)
        self.settle()
        named = sorted((copy for copy in self.disk.copies if copy.named), key=lambda copy: copy.generation)
        self.host, self.disk = ModelTier(self.HOST_SLOTS), ModelTier(self.DISK_SLOTS)
        for copy in named:
            copy.refs = 0
            self.disk.touch(copy)
        self.disk.copies = named
        self.reads, self.writes, self.pins, self.gone = [], [], [], []
        self.counts = dict.fromkeys(self.counts, 0)
        self.tiers = self.open()


class FailingDisk(TiersModel):
    """Now and then the file cannot be written, or not be read."""

    @rule(mode=st.sampled_from([os.O_RDWR, os.O_RDONLY, os.O_WRONLY]))
    def change_disk(self, mode: int) -> None:
        """A disk that cannot be written, or not be read, or both again."""
        assert self.tiers._disk is not None
        fd = os.open(self.tiers._disk.path, mode)
        os.dup2(fd, self.tiers._disk._fd)
        os.close(fd)
        self.mode = mode


TestRestartedTiers: Any = RestartedTiers.TestCase
TestFailingDisk: Any = FailingDisk.TestCase
