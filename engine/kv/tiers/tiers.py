"""Tiers below the block pool: host memory and disk.

    pool evicts ──put──▶ host arena ──written through──▶ disk file
    pool       ◀──read────┴────────────read───────────────┘

A block is copied into the host arena at once and queued for the disk, so evicting it from the host is free once the
disk has it. A read uses the host's copy where there is one. A block read from disk is not put into the arena: it is in
the pool now, and would displace a block that main memory has nowhere else. When the pool evicts it again it is put
again, which costs a copy and no write, since the disk still has it.

Each use refreshes a block in both tiers, so a larger disk tier keeps what the host holds. A chain is refreshed tail
first, so its tail is evicted before its head.

Thread safety: names, references and LRU orders (`Slots`) are touched by the engine's loop thread only. The tiers'
thread gets jobs with all their data, and returns each through a deque; the loop thread processes it at its next call.
Until then a job has a reference on every slot it names, so no other user gets that slot: arena rows are written by
`put` only without references, and a disk slot's bytes are touched by that one thread's jobs only, in order. The
condition in `TierThread` guards its queues and is never held during I/O.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.block_keys import KEY_BYTES, BlockKey
from engine.kv.block_pool import CacheEvent, Removed, Stored
from engine.kv.rows import Allocate, Place, private_rows
from engine.kv.tiers.disk import DiskTier
from engine.kv.tiers.disk_format import SlotHeader
from engine.kv.tiers.host import HostTier
from engine.kv.tiers.slots import NamedBlock, Slots
from engine.kv.tiers.tier_jobs import EraseJob, Held, Job, ReadJob, TierName, TierThread, WriteJob
from engine.kv.tiers.tier_stats import TierStats

STAGING_BYTES = 32 << 20
STAGING_BLOCKS = 16
"""Slots of the staging arena from which the disk is written when there is no host tier."""
FLUSH_S = 5.0
COMPLAIN_EVERY_S = 60.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Capacity of the tiers."""

    host_bytes: int
    """Bytes of the host memory tier; 0 for none."""
    disk_dir: Path | None
    """Directory of the disk tier; None for none."""
    disk_bytes: int
    """Bytes of each engine process's file."""


class Tiers:
    """Blocks that the pool evicted.

    Driven from the engine's loop thread; I/O happens on a thread of its own.

    Each key of a call takes constant time, and no call waits for I/O but `close`.
    """

    def __init__(
        self,
        config: TierConfig,
        block_bytes: int,
        kv_heads: int,
        model_fingerprint: bytes,
        *,
        threaded: bool = True,
        allocate: Allocate = private_rows,
    ) -> None:
        """Open the tiers.

        Raises EngineStartError naming kv_host_memory_mib, kv_disk_dir or kv_disk_mib.

        Without `threaded`, jobs run one by one in `step`, so a test decides when. `allocate` returns the host tier's
        memory.
        """
        self._block_bytes = block_bytes
        self._fingerprint_bytes = 8 * kv_heads
        host_bytes = config.host_bytes
        if host_bytes == 0 and config.disk_dir is not None:
            host_bytes = max(STAGING_BYTES, STAGING_BLOCKS * block_bytes)
        self._host = HostTier(host_bytes, block_bytes, allocate)
        self._disk: DiskTier | None = None
        if config.disk_dir is not None:
            self._disk = DiskTier(config.disk_dir, config.disk_bytes, block_bytes, kv_heads, model_fingerprint)
        self._slots: dict[TierName, Slots] = {"host": self._host.slots}  # in lookup order
        if self._disk is not None:
            self._slots["disk"] = self._disk.slots
        self._thread = TierThread(self._host.memory, self._disk, threaded)
        self._writing: dict[int, int] = {}  # host slot -> disk slot, of writes queued or in progress
        self._generation = self._disk.next_generation if self._disk else 0
        self._gone: dict[BlockKey, None] = {}  # keys that no tier holds any more, in order, not yet reported
        self._put = self._dropped = self._unwritten = 0
        self._rejected = self._disk.num_refused if self._disk else 0
        self._hits: dict[TierName, int] = {"host": 0, "disk": 0}
        self._read_s: dict[TierName, float] = {"host": 0.0, "disk": 0.0}
        self._complained_at = -COMPLAIN_EVERY_S

    def put(self, parent: BlockKey, key: BlockKey, block: NDArray[np.uint8], fingerprint: bytes) -> None:
        """Keep a copy of `block`, uint8 [block_bytes].

        A key that is held keeps its present bytes.

        `parent` and `key` have KEY_BYTES, `fingerprint` 8 bytes per KV head. Without an available host slot the block
        is dropped.
        """
        assert len(parent) == len(key) == KEY_BYTES
        assert len(fingerprint) == self._fingerprint_bytes
        self._settle()
        self._gone.pop(key, None)
        slot = self._host.slots.find(key)
        if slot is None:
            self._put_new(NamedBlock(parent, key, fingerprint), block)
        elif slot not in self._writing:
            self._host.slots.hold(slot)
            self._write_through(slot)

    def match(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading keys some tier can read now.

        They may be evicted by the next `put`: pin them.
        """
        self._settle()
        for count, key in enumerate(keys):
            if not self._holds(key):
                return count
        return len(keys)

    def pin(self, keys: Sequence[BlockKey]) -> list[Held]:
        """Pin and return the leading keys that are held: after `match`, all that it counted.

        They stay until `unpin`, whatever is put or forgotten; each pin needs its own unpin.
        """
        pinned: list[Held] = []
        for key in keys:
            held = self._find(key)
            if held is None:
                break
            self._slots[held.tier].hold(held.slot)
            pinned.append(held)
        return pinned

    def unpin(self, held: Sequence[Held]) -> None:
        """Unpin blocks of a chain given from its head.

        Reads in flight continue.
        """
        for item in reversed(held):
            self._slots[item.tier].drop(item.slot)
            if item.tier == "host":
                self._refresh_on_disk(item.block.key)

    def fingerprints(self, held: Sequence[Held]) -> tuple[bytes, ...]:
        """Return the stored fingerprints."""
        return tuple(item.block.fingerprint for item in held)

    def place(self, held: Held) -> Place:
        """Return where other ranks of this engine read a pinned block."""
        if held.tier == "host":
            row: NDArray[np.uint8] = self._host.memory[held.slot]
            return row
        assert self._disk is not None
        return self._disk.payload_offset(held.slot)

    @property
    def disk_path(self) -> Path | None:
        """File of the disk tier; None without one."""
        return self._disk.path if self._disk is not None else None

    def read(self, held: Sequence[Held], write: Callable[[int, NDArray[np.uint8]], None]) -> "Future[None]":
        """Call `write(i, bytes of held[i])` for each block on the tiers' thread.

        `held` must be pinned.

        `write` must copy or finish with the bytes before it returns; the future raises its exceptions. The future fails
        with TransferError where a tier cannot be read; such a block is held no more. `cancel()` returns True only
        before the first `write`. Callbacks run on the tiers' thread and must not block. The caller verifies the bytes
        against the fingerprint.
        """
        job = ReadJob(tuple(held), write)
        for item in held:
            self._slots[item.tier].hold(item.slot)
        self._thread.submit(job)
        return job.future

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Never serve these keys again, nor after a restart: the bytes did not match the fingerprint."""
        self._settle()
        for key in keys:
            if not self._holds(key):
                continue
            self._rejected += 1
            self._unname_in_host(key)
            self._unname_on_disk(key)
            self._gone[key] = None

    def held_keys(self) -> Iterator[BlockKey]:
        """Yield the key of each held block; a block that both tiers hold comes twice."""
        self._settle()
        return (block.key for slots in self._slots.values() for block in slots.named())

    def drop(self, keys: Iterable[BlockKey], is_reported: bool = False) -> int:
        """Forget blocks, also after a restart; return how many were held. Reads in flight continue.

        `is_reported`: another event says already that they are gone.
        """
        self._settle()
        count = 0
        for key in keys:
            if not self._holds(key):
                continue
            self._unname_in_host(key)
            self._unname_on_disk(key)
            count += 1
            if not is_reported:
                self._gone[key] = None
        return count

    def take_events(self) -> list[CacheEvent]:
        """Return blocks evicted since the last call that no tier holds: at most one Removed."""
        self._settle()
        gone, self._gone = tuple(self._gone), {}
        return [Removed(gone)] if gone else []

    def snapshot(self) -> list[CacheEvent]:
        """Return all held blocks as events, each once."""
        self._settle()
        held = {block.key: block for slots in self._slots.values() for block in slots.named()}
        return [Stored(block.parent, (block.key,)) for block in held.values()]

    @property
    def occupancy(self) -> dict[str, tuple[int, int]]:
        """Return, per tier, the number of slots and of slots with a findable block.

        The host's slots may be only the disk's staging arena.
        """
        self._settle()
        return {name: (slots.num_slots, slots.num_named) for name, slots in self._slots.items()}

    @property
    def counters(self) -> TierStats:
        self._settle()
        host_blocks = self._host.slots.num_named
        disk_blocks = self._disk.slots.num_named if self._disk else 0
        return TierStats(
            host_blocks=host_blocks,
            host_bytes=host_blocks * self._block_bytes,
            disk_blocks=disk_blocks,
            disk_bytes=disk_blocks * self._block_bytes,
            put=self._put,
            dropped=self._dropped,
            unwritten=self._unwritten,
            rejected=self._rejected,
            host_hits=self._hits["host"],
            disk_hits=self._hits["disk"],
            host_read_bytes=self._hits["host"] * self._block_bytes,
            host_read_s=self._read_s["host"],
            disk_read_bytes=self._hits["disk"] * self._block_bytes,
            disk_read_s=self._read_s["disk"],
        )

    def step(self) -> bool:
        """Perform the next job without a thread; return False when there is none."""
        return self._thread.step()

    def close(self) -> None:
        """Cancel reads that have not begun, write queued blocks for at most FLUSH_S, and unlock the file.

        No call may follow but `read`, which fails.
        """
        if not self._thread.close(FLUSH_S):
            log.warning("a disk of the KV tiers does not answer; its file stays locked until this process ends")
            return
        self._settle()
        if self._disk is not None:
            self._disk.close()

    def check_integrity(self) -> None:
        """Check all records.

        Raises AssertionError when they disagree.
        """
        for slots in self._slots.values():
            slots.check_integrity()
        assert not any(self._holds(key) for key in self._gone), "a key is said to be gone and is held"

    # ------------------------------------------------------------------------------------------- put

    def _put_new(self, block: NamedBlock, data: NDArray[np.uint8]) -> None:
        taken = self._host.slots.take()
        if taken is None:
            if not self._refresh_on_disk(block.key):
                self._dropped += 1
                self._fell_out(block.key)
            return
        slot, evicted = taken
        if evicted is not None:
            self._fell_out(evicted.key)
        self._host.memory[slot] = data
        self._host.slots.name(slot, block)
        self._put += 1
        self._write_through(slot)

    def _write_through(self, slot: int) -> None:
        """Write a host slot to disk unless the disk has it.

        The caller's reference passes to the write, or is dropped.
        """
        block = self._host.slots.block_in(slot)
        assert block is not None
        if self._disk is None or self._refresh_on_disk(block.key):
            self._host.slots.drop(slot)
            return
        taken = self._disk.slots.take()
        if taken is None:
            self._unwritten += 1
            self._host.slots.drop(slot)
            return
        disk_slot, evicted = taken
        if evicted is not None:
            self._fell_out(evicted.key)
        self._writing[slot] = disk_slot
        self._thread.submit(WriteJob(SlotHeader(block, self._generation), slot, disk_slot))
        self._generation += 1

    def _refresh_on_disk(self, key: BlockKey) -> bool:
        """Refresh a block on disk; return whether the disk has it."""
        if self._disk is None or (slot := self._disk.slots.find(key)) is None:
            return False
        self._disk.slots.touch(slot)
        return True

    # ------------------------------------------------------------------------------------- jobs that are over

    def _settle(self) -> None:
        for job in self._thread.take_done():
            self._settle_one(job)

    def _settle_one(self, job: Job) -> None:
        match job:
            case ReadJob():
                self._settle_read(job)
            case WriteJob():
                self._settle_write(job)
            case EraseJob(error=OSError() as error):
                self._complain(error)

    def _settle_read(self, job: ReadJob) -> None:
        for item in reversed(job.held):
            self._slots[item.tier].drop(item.slot)
        for tier in self._hits:
            self._hits[tier] += job.num_done[tier]
            self._read_s[tier] += job.seconds[tier]
        lost = job.unreadable
        if lost is not None and self._slots[lost.tier].find(lost.block.key) == lost.slot:
            self._rejected += 1
            self._unname_on_disk(lost.block.key)
            self._fell_out(lost.block.key)

    def _settle_write(self, job: WriteJob) -> None:
        assert self._disk is not None
        del self._writing[job.host_slot]
        if job.error is not None:
            self._unwritten += 1
            self._complain(job.error)
        elif self._host.slots.block_in(job.host_slot) is job.header.block:  # otherwise it was forgotten meanwhile
            self._disk.slots.name(job.disk_slot, job.header.block)
        self._host.slots.drop(job.host_slot)
        self._disk.slots.drop(job.disk_slot)

    def _complain(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._complained_at >= COMPLAIN_EVERY_S:
            self._complained_at = now
            log.warning("the disk tier cannot be written, blocks stay in memory only: %s", error)

    # ----------------------------------------------------------------------------------------- names

    def _find(self, key: BlockKey) -> Held | None:
        """Return where to read a block, or None."""
        for tier, slots in self._slots.items():
            slot = slots.find(key)
            if slot is not None:
                block = slots.block_in(slot)
                assert block is not None
                return Held(block, tier, slot)
        return None

    def _holds(self, key: BlockKey) -> bool:
        return any(slots.find(key) is not None for slots in self._slots.values())

    def _unname_in_host(self, key: BlockKey) -> None:
        slot = self._host.slots.find(key)
        if slot is None:
            return
        self._host.slots.unname(slot)
        if slot in self._writing:  # erased after it was written
            self._thread.submit(EraseJob(self._writing[slot]))

    def _unname_on_disk(self, key: BlockKey) -> None:
        slot = self._disk.slots.find(key) if self._disk else None
        if slot is None:
            return
        assert self._disk is not None
        self._disk.slots.unname(slot)  # the next owner of the slot writes it after this job
        self._thread.submit(EraseJob(slot))

    def _fell_out(self, key: BlockKey) -> None:
        """Process an eviction from one tier: the key is gone unless the other tier has it."""
        if not self._holds(key):
            self._gone[key] = None
