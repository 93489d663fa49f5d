"""The format of stored blocks, and the folder that keeps them."""

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block_keys import KEY_BYTES, block_keys
from kvcache.store.folder import FolderObjects
from kvcache.store.kv_store import ObjectFormat, ObjectMissing, ObjectRefused, StoredBlock, StoreError
from support.small_blocks import BLOCK_BYTES, HEADS, MODEL, ROOT, block_of, fingerprint_of
from support.store_damage import damaged

FORMAT = ObjectFormat(BLOCK_BYTES, HEADS, MODEL)
SIGNED = ObjectFormat(BLOCK_BYTES, HEADS, MODEL, b"a secret of sixteen bytes")
KEYS = block_keys(ROOT, range(400), 4)


def stored(index: int, object_format: ObjectFormat = FORMAT) -> np.ndarray:
    """The object of block `index`."""
    row = np.zeros(object_format.object_bytes, np.uint8)
    payload = block_of(index)
    row[object_format.payload_offset :] = payload
    object_format.pack(named(index), row)
    return row


def named(index: int) -> StoredBlock:
    return StoredBlock(KEYS[index - 1] if index else ROOT, KEYS[index], fingerprint_of(block_of(index)))


@pytest.mark.parametrize("object_format", [FORMAT, SIGNED])
def test_an_object_brings_its_block_back(object_format: ObjectFormat) -> None:
    row = stored(3, object_format)
    assert object_format.check(KEYS[3], row) == named(3)
    assert np.array_equal(row[object_format.payload_offset :], block_of(3))


@pytest.mark.parametrize(
    ("reader", "index", "reason"),
    [
        (FORMAT, 4, "another block"),
        (ObjectFormat(BLOCK_BYTES, HEADS, bytes(32)), 3, "another model"),
        (SIGNED, 3, "checksum"),
        (ObjectFormat(BLOCK_BYTES, HEADS, MODEL, b"another secret, as long"), 3, "checksum"),
    ],
)
def test_another_block_model_or_secret_is_refused(reader: ObjectFormat, index: int, reason: str) -> None:
    with pytest.raises(ObjectRefused, match=reason):
        reader.check(KEYS[index], stored(3))


def test_a_payload_that_was_changed_is_refused_where_objects_are_signed() -> None:
    row = stored(3, SIGNED)
    row[-1] ^= 1
    with pytest.raises(ObjectRefused, match="checksum"):
        SIGNED.check(KEYS[3], row)


@given(seed=st.integers(0, 1 << 32), index=st.integers(0, 5))
def test_no_damage_is_taken_for_another_block(seed: int, index: int) -> None:
    """Either an object is refused, or header and fingerprint are the block's own, so a changed payload is noticed."""
    rng = random.Random(seed)
    others = [stored(other).tobytes() for other in range(6) if other != index] + [rng.randbytes(FORMAT.object_bytes)]
    found = damaged(stored(index).tobytes(), others, rng)
    row = np.zeros(FORMAT.object_bytes, np.uint8)
    row[: len(found)] = np.frombuffer(found, np.uint8)[: len(row)]
    try:
        block = FORMAT.check(KEYS[index], row)
    except ObjectRefused:
        return
    assert block == named(index)
    payload = row[FORMAT.payload_offset :]
    assert np.array_equal(payload, block_of(index)) or fingerprint_of(payload) != block.fingerprint


def test_models_layouts_and_sizes_have_folders_of_their_own() -> None:
    formats = [FORMAT, ObjectFormat(BLOCK_BYTES, HEADS, bytes(32)), ObjectFormat(2 * BLOCK_BYTES, HEADS, MODEL)]
    assert len({each.name(KEYS[0]).split("/")[0] for each in formats}) == 3


# ------------------------------------------------------------------------------------------------ the folder


def folder(root: Path, max_files: int = 1000, max_age_s: float = 1e9) -> FolderObjects:
    """One of at most `max_files` in each of its 256 parts."""
    return FolderObjects(root, FORMAT.object_bytes, max_files * 256 * FORMAT.object_bytes, max_age_s)


def read(objects: FolderObjects, *names: str) -> list[object]:
    rows = list(np.zeros((len(names), FORMAT.object_bytes), np.uint8))
    return [failure or row.tobytes() for failure, row in zip(objects.read(names, rows), rows, strict=True)]


def test_files_are_written_whole_and_found_by_all(tmp_path: Path) -> None:
    one, two = folder(tmp_path), folder(tmp_path)
    name = FORMAT.name(KEYS[0])
    assert one.held([name]) == [False]
    one.write(name, stored(0))
    assert two.held([name, FORMAT.name(KEYS[1])]) == [True, False]
    assert read(two, name) == [stored(0).tobytes()]
    assert one.identity == two.identity
    assert one.identity != folder(tmp_path / "other").identity
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.rglob(".part-*"))
    two.remove(name)
    two.remove(name)
    assert one.held([name]) == [False]


def test_a_truncated_file_a_link_and_a_pipe_are_no_objects(tmp_path: Path) -> None:
    objects = folder(tmp_path)
    names = [FORMAT.name(key) for key in KEYS[:5]]
    for index, name in enumerate(names):
        objects.write(name, stored(index))
    os.truncate(tmp_path / names[1], 10)
    (tmp_path / names[2]).rename(tmp_path / "elsewhere")
    (tmp_path / names[2]).symlink_to(tmp_path / "elsewhere")
    (tmp_path / names[3]).unlink()
    os.mkfifo(tmp_path / names[3])
    assert objects.held(names) == [True, False, False, False, True]
    found = read(objects, *names)
    assert found[0] == stored(0).tobytes()
    assert isinstance(found[1], ObjectMissing)
    assert isinstance(found[2], StoreError)
    assert isinstance(found[3], ObjectMissing)
    assert found[4] == stored(4).tobytes()


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Not a directory"):
        FolderObjects(tmp_path / "file" / "store", FORMAT.object_bytes, 1 << 20, 1e9)
    objects = folder(tmp_path)
    (tmp_path / FORMAT.folder).write_text("in the way")
    with pytest.raises(StoreError, match=r"Not a directory|File exists"):
        objects.write(FORMAT.name(KEYS[0]), stored(0))
    assert not list(tmp_path.glob(".part-*"))


def name_in_one_part(number: int) -> str:
    return f"{FORMAT.folder}/00/{number.to_bytes(KEY_BYTES, 'big').hex()}"


def test_a_full_part_loses_the_files_used_longest_ago(tmp_path: Path) -> None:
    objects = folder(tmp_path, max_files=32)
    now = time.time()
    evicted: list[str] = []
    for number in range(32):
        name = name_in_one_part(number)
        objects.write(name, stored(0))
        os.utime(tmp_path / name, (now - 1000 + number, now - 1000 + number))
        evicted += objects.trim(name)
    assert evicted == []
    objects.used(name_in_one_part(0))
    last = name_in_one_part(32)
    objects.write(last, stored(0))
    assert sorted(objects.trim(last)) == [name_in_one_part(number) for number in (1, 2, 3)]
    assert len(list((tmp_path / FORMAT.folder / "00").iterdir())) == 30


def test_files_unused_for_too_long_and_those_of_dead_writers_are_removed(tmp_path: Path) -> None:
    objects = folder(tmp_path, max_age_s=500)
    name, old = name_in_one_part(0), name_in_one_part(1)
    for each in (old, name):
        objects.write(each, stored(0))
    unfinished = (tmp_path / name).parent / ".part-of-a-dead-writer"
    unfinished.write_bytes(b"half")
    os.utime(tmp_path / old, (1e9, 1e9))
    os.utime(unfinished, (1e9, 1e9))
    assert objects.trim(name) == [old]
    assert not unfinished.exists()
    assert objects.held([name]) == [True]


@given(numbers=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=120))
def test_writers_that_know_nothing_of_each_other_keep_the_bound(
    numbers: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """When everybody has counted, the folder is within its bound, and no writer fails over what another removed."""
    root = tmp_path_factory.mktemp("store")
    writers = [folder(root, max_files=16) for _ in range(3)]
    for writer, number in numbers:
        name = name_in_one_part(number)
        if not writers[writer].held([name])[0]:
            writers[writer].write(name, stored(0))
            for gone in writers[writer].trim(name):
                assert not writers[0].held([gone])[0]
    last = name_in_one_part(99)
    fresh = folder(root, max_files=16)
    fresh.write(last, stored(0))
    fresh.trim(last)
    assert len(list((root / FORMAT.folder / "00").iterdir())) <= 16


def test_others_files_are_counted_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that writes little still notices that others have filled the folder."""
    one, two = folder(tmp_path, max_files=8), folder(tmp_path, max_files=1000)
    first = name_in_one_part(0)
    one.write(first, stored(0))
    assert one.trim(first) == []
    for number in range(1, 20):
        two.write(name_in_one_part(number), stored(0))
    counted_again_at = time.monotonic() + 1e6  # the first count may have been slow, and so defer the next one
    monkeypatch.setattr(time, "monotonic", lambda: counted_again_at)
    last = name_in_one_part(20)
    one.write(last, stored(0))
    assert len(one.trim(last)) == 21 - 8
