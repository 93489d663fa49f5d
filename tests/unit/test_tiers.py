"""The tiers below the pool: exact examples."""

from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.block_keys import BlockKey, block_keys
from engine.errors import EngineStartError
from engine.kv.block_pool import Removed, Stored
from engine.kv.tiers.disk_format import PAGE_BYTES, SUPERBLOCK_BYTES, DiskFormat, SlotHeader
from engine.kv.tiers.slots import NamedBlock, Slots
from engine.kv.tiers.tier_jobs import Held
from engine.kv.tiers.tiers import STAGING_BYTES, TierConfig, Tiers
from kvtransfer.errors import TransferError
from support.small_tiers import BLOCK_BYTES, FORMAT, HEADS, MODEL, ROOT, block_of, fingerprint_of, tiers_of


def chain(*tokens: int) -> list[BlockKey]:
    """Keys of one block per token."""
    return block_keys(ROOT, tokens, 1)


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
        (1 << 62, None, 0, "kv_host_memory_mib", "cannot allocate"),
        (64, "fresh", 3 * PAGE_BYTES - 1, "kv_disk_mib", "less than one KV block of 64 bytes with its header"),
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
