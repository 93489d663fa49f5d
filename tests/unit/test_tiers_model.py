"""The tiers below the pool: any sequence of calls against a brute-force model."""

import os
import tempfile
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from engine.block_keys import BlockKey, block_keys
from engine.kv.block_pool import Removed, Stored
from engine.kv.tiers.slots import NamedBlock
from engine.kv.tiers.tier_jobs import Held
from engine.kv.tiers.tiers import Tiers
from kvtransfer.errors import TransferError
from support.small_tiers import BLOCK_BYTES, ROOT, block_of, fingerprint_of, tiers_of


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

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2), drops=st.booleans())
    def forget(self, keys: list[BlockKey], drops: bool) -> None:
        """Forget damaged blocks, or drop sound ones."""
        self.settle()
        held = {
            key for tier in (self.host, self.disk) for copy in tier.copies if copy.named for key in [copy.block.key]
        }
        assert set(self.tiers.held_keys()) == held
        if drops:
            assert self.tiers.drop(keys) == len(held & set(keys))
        else:
            self.tiers.forget(keys)
        for key in keys:
            in_host, on_disk = self.host.find(key), self.disk.find(key)
            if in_host is None and on_disk is None:
                continue
            self.counts["rejected"] += not drops
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
