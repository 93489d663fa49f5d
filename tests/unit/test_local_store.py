"""The local store of a worker: folders in main memory and on a disk, and what happens to them with their processes."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import StartError
from engine.config import WorkerConfig
from kvcache.block_keys import block_keys
from kvcache.kv_stats import DISK, HOST
from kvcache.layout import KvLayout
from kvcache.pool import CacheEvent, MergedEvents, Removed, Stored
from kvcache.store import local
from kvcache.store.folder import FolderObjects
from kvcache.store.kv_store import LocalObjects, ObjectFormat, StoreError
from kvcache.store.local import LayeredObjects, MemoryFolder, open_local_store
from support.memory_objects import StepStore
from support.small_blocks import BLOCK_BYTES, HEADS, MODEL, ROOT, block_of, fingerprint_of

FORMAT = ObjectFormat(BLOCK_BYTES, HEADS, MODEL, num_folders=1)
KEYS = block_keys(ROOT, range(400), 4)
LAYOUT = KvLayout(2, HEADS, 4, 4, "float32")
WEEK_S = 7 * 24 * 3600.0


def folder(root: Path, place: str, num_blocks: int) -> FolderObjects:
    """A local folder, in which an object's age is the number of its last use."""
    num_bytes = num_blocks * FORMAT.object_bytes
    return FolderObjects(root, FORMAT.object_bytes, num_bytes, 1e9, num_folders=1, place=place)


def store_over(*places: LocalObjects) -> StepStore:
    store = StepStore(LayeredObjects(places), FORMAT, lambda: 100.0, is_local=True)
    store.settle()
    return store


def put(store: StepStore, *indices: int) -> None:
    for index in indices:
        block = block_of(index)
        store.put(KEYS[index - 1] if index else ROOT, KEYS[index], block, fingerprint_of(block))
        store.settle()


def fetched(store: StepStore, *indices: int) -> list[int]:
    """Fetch blocks one by one; return those that came, with the right bytes."""
    found = []
    for index in indices:
        brought = []
        store.fetch([KEYS[index]], brought.append)
        store.settle()
        if brought[0].contents:
            assert np.array_equal(brought[0].contents[0], block_of(index))
            found.append(index)
        store.give_back(brought[0])
    return found


def test_a_restart_finds_what_the_disk_has(tmp_path: Path) -> None:
    put(store_over(folder(tmp_path, DISK, 8)), 0, 1, 2)
    again = store_over(folder(tmp_path, DISK, 8))
    assert again.num_known(KEYS[:5]) == 3
    assert sorted(again.take_events()) == sorted(again.snapshot())
    assert Stored(KEYS[0], (KEYS[1],)) in again.snapshot(), "with its parent, as the worker's own"
    assert fetched(again, 0, 1, 2, 3) == [0, 1, 2]
    (use,) = again.places()
    assert use == (DISK, 8, 3, 3)


def test_a_damaged_head_is_refused_at_the_restart_and_removed(tmp_path: Path) -> None:
    put(store_over(folder(tmp_path, DISK, 8)), 0, 1, 2)
    path = tmp_path / FORMAT.name(KEYS[1])
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    again = store_over(folder(tmp_path, DISK, 8))
    assert again.num_known(KEYS[:5]) == 1
    again.settle()
    assert not path.exists()
    assert again.counts.refused == 1


def test_the_blocks_used_longest_ago_are_evicted_first(tmp_path: Path) -> None:
    objects = folder(tmp_path, DISK, 4)
    store = store_over(objects)
    put(store, 0, 1, 2, 3)
    assert fetched(store, 0) == [0]
    store.take_events()
    put(store, 4)
    assert Removed((KEYS[1],)) in store.take_events()
    assert fetched(store, 0, 1, 2, 3, 4) == [0, 2, 3, 4]
    assert len(list((tmp_path / FORMAT.folder).iterdir())) == 4


def test_memory_is_asked_before_the_disk_and_an_eviction_from_one_keeps_the_other(tmp_path: Path) -> None:
    memory, disk = folder(tmp_path / "memory", HOST, 2), folder(tmp_path / "disk", DISK, 8)
    store = store_over(memory, disk)
    put(store, 0, 1, 2)
    assert not [event for event in store.take_events() if isinstance(event, Removed)]
    assert fetched(store, 0, 1, 2) == [0, 1, 2]
    assert store.places() == [(HOST, 2, 2, 2), (DISK, 8, 3, 1)]
    store.remove(KEYS[:3], lambda count, failure: None)
    store.settle()
    assert fetched(store, 0, 1, 2) == []


def test_a_block_that_is_removed_while_it_is_written_does_not_come_back(tmp_path: Path) -> None:
    store = store_over(folder(tmp_path, DISK, 8))
    block = block_of(0)
    store.put(ROOT, KEYS[0], block, fingerprint_of(block))
    store.remove(KEYS[:1], lambda count, failure: None)
    store.writers.waiting.reverse()  # two threads write: the removal may come first
    store.settle()
    store.take_events()
    store.settle()
    assert store.lacks(KEYS[0])
    assert fetched(store, 0) == []
    put(store, 0)
    assert fetched(store, 0) == [0]


def test_a_full_disk_is_told_once_and_costs_only_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = folder(tmp_path, DISK, 8)
    write = disk.write

    def full(name: str, stored: np.ndarray) -> None:  # type: ignore[type-arg]
        if name in (FORMAT.name(KEYS[1]), FORMAT.name(KEYS[2])):
            raise StoreError("No space left on device")
        write(name, stored)

    monkeypatch.setattr(disk, "write", full)
    store = store_over(disk)
    put(store, 0, 1, 2, 3)
    store.take_events()
    assert store.counts.failed == 2
    assert caplog.text.count("the local store cannot be written: No space left on device") == 1
    assert fetched(store, 0, 1, 2, 3) == [0, 3]


# ------------------------------------------------------------------------------------- folders in memory


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(local, "MEMORY", tmp_path)
    return tmp_path / f"tandem-kv-{os.geteuid()}"


@pytest.fixture
def start(memory: Path) -> Iterator[Callable[..., object]]:
    opened = []

    def start_worker(**values: object) -> object:
        config = WorkerConfig(model="m", engine="sim", **values)  # type: ignore[arg-type]
        store = open_local_store(config, LAYOUT, MODEL)
        opened.append(store)
        return store

    yield start_worker
    for store in opened:
        if store is not None and not store.is_closed:
            store.close()


def folders(memory: Path) -> list[Path]:
    return sorted(memory.iterdir()) if memory.exists() else []


def test_without_settings_there_is_no_local_store(start: Callable[..., object], memory: Path) -> None:
    assert start() is None
    assert folders(memory) == []


def test_a_workers_memory_is_its_own_and_goes_with_it(start: Callable[..., object], memory: Path) -> None:
    one, two = start(kv_host_memory_mib=1), start(kv_host_memory_mib=1)
    assert len(folders(memory)) == 2
    one.close()  # type: ignore[attr-defined]
    assert len(folders(memory)) == 1
    two.close()  # type: ignore[attr-defined]
    assert folders(memory) == []


def test_shared_memory_goes_with_the_last_worker_of_the_host(start: Callable[..., object], memory: Path) -> None:
    one, two = (start(kv_host_memory_mib=1, kv_host_memory_shared=True) for _ in range(2))
    assert [path.name for path in folders(memory)] == ["shared"]
    one.close()  # type: ignore[attr-defined]
    assert [path.name for path in folders(memory)] == ["shared"]
    two.close()  # type: ignore[attr-defined]
    assert folders(memory) == []


def test_what_a_killed_worker_left_in_memory_goes_when_another_starts(
    start: Callable[..., object], memory: Path
) -> None:
    left = MemoryFolder(memory_root(memory, "left"), FORMAT.object_bytes, 1 << 20)
    os.close(left.lock_file)  # as the system does with the process
    in_use = MemoryFolder(memory_root(memory, "used"), FORMAT.object_bytes, 1 << 20)
    start(kv_host_memory_mib=1)
    assert not (memory / "left").exists()
    assert (memory / "used").exists()
    in_use.close()


def memory_root(memory: Path, name: str) -> Path:
    memory.mkdir(exist_ok=True)
    return memory / name


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"kv_host_memory_mib": 1 << 24}, "kv_host_memory_mib: .* do not fit"),
        ({"kv_disk_dir": "/dev/null/x"}, "kv_disk_dir: .*Not a directory"),
    ],
)
def test_a_place_that_cannot_be_opened_is_named(
    start: Callable[..., object], values: dict[str, object], reason: str
) -> None:
    with pytest.raises(StartError, match=reason):
        start(**values)


@pytest.mark.parametrize("setting", ["kv_host_memory_mib", "kv_disk_mib"])
def test_a_bound_below_one_block_is_named(setting: str, memory: Path, tmp_path: Path) -> None:
    large = KvLayout(64, 64, 128, 64, "float32")
    config = WorkerConfig(model="m", engine="sim", kv_disk_dir=tmp_path / "disk", **{setting: 1})  # type: ignore[arg-type]
    with pytest.raises(StartError, match=f"{setting}: is less than one KV block"):
        open_local_store(config, large, MODEL)


def test_dev_shm_that_is_too_small_is_named(start: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 64, 64, 64, 0, 0, 0, 0, 255)))
    with pytest.raises(StartError, match=r"kv_host_memory_mib: .* has 0 MiB left: enlarge it"):
        start(kv_host_memory_mib=1)


# ------------------------------------------------------------------------------------------ a week later


def test_old_blocks_of_other_models_and_files_of_earlier_versions_go_and_nothing_else(
    start: Callable[..., object], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    other = ObjectFormat(LAYOUT.block_bytes, HEADS, b"another model", num_folders=1)
    old, young = (disk / other.name(key) for key in KEYS[:2])
    before = disk / f"{'0' * 16}-{BLOCK_BYTES}" / "kv-0.blocks"
    mine = disk / "notes" / "kv.txt"
    for path in (old, young, before, mine):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for path in (old, mine):
        os.utime(path, (0, time.time() - WEEK_S - 60))
    start(kv_disk_dir=disk)
    assert [path.exists() for path in (old, young, before, mine)] == [False, True, False, True]


# ------------------------------------------------------------------------------------------------ events


@given(st.lists(st.tuples(st.sampled_from(["pool", "local"]), st.booleans(), st.integers(0, 3)), max_size=30))
def test_a_block_is_gone_when_neither_pool_nor_store_has_it(changes: list[tuple[str, bool, int]]) -> None:
    merged, held = MergedEvents(), {"pool": set[int](), "local": set[int]()}
    told: set[bytes] = set()
    for holder, is_stored, number in changes:
        (held[holder].add if is_stored else held[holder].discard)(number)
        event: CacheEvent = Stored(ROOT, (KEYS[number],)) if is_stored else Removed((KEYS[number],))
        for each in merged.of(holder, [event]):
            (told.update if isinstance(each, Stored) else told.difference_update)(each.keys)
        assert told == {KEYS[each] for each in held["pool"] | held["local"]}
