"""Files of the disk tier that were damaged: what of them is never served, and what still is."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import EngineStartError
from engine.kv.block_pool import Removed
from engine.kv.tiers.disk import DiskTier
from engine.kv.tiers.disk_format import SUPERBLOCK_BYTES, SlotHeader
from engine.kv.tiers.slots import NamedBlock
from engine.kv.tiers.tiers import TierConfig, Tiers
from kvtransfer.errors import TransferError
from support.disk_tiers import (
    BLOCK_BYTES,
    DISK_SLOTS,
    FORMAT,
    HEADS,
    MODEL,
    PATIENCE_S,
    ROOT,
    disk_bytes_for,
    file_of,
    fill,
    fingerprint_of,
    flip,
    is_right,
    key_of,
    open_tiers,
    put,
    served,
)


def test_a_flipped_bit_in_a_header_refuses_that_slot_for_good(tmp_path: Path) -> None:
    made = fill(tmp_path)
    flip(file_of(tmp_path), FORMAT.header_offset(3) + 20)
    for num_refused in (1, 0):
        tiers = open_tiers(tmp_path)
        assert {key: data for key, (_, data) in served(tiers).items()} == {
            key: data for key, data in made.items() if key != key_of(3)
        }
        assert tiers.counters.rejected == num_refused
        tiers.close()


def test_a_flipped_bit_in_a_payload_shows_in_its_fingerprint(tmp_path: Path) -> None:
    fill(tmp_path)
    flip(file_of(tmp_path), FORMAT.payload_offset(3) + BLOCK_BYTES // 2)
    tiers = open_tiers(tmp_path)
    wrong = [key for key, block in served(tiers).items() if not is_right(*block)]
    assert wrong == [key_of(3)]
    tiers.forget(wrong)
    assert tiers.match(wrong) == 0
    tiers.close()
    again = open_tiers(tmp_path)
    assert len(served(again)) == DISK_SLOTS - 1
    assert again.match(wrong) == 0
    again.close()


def test_a_damaged_superblock_starts_the_file_afresh(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path)
    flip(file_of(tmp_path), 9)
    tiers = open_tiers(tmp_path)
    assert served(tiers) == {}
    assert "started empty: its superblock is damaged" in caplog.text
    assert file_of(tmp_path).stat().st_size == SUPERBLOCK_BYTES
    put(tiers, 1, np.random.default_rng(1))
    tiers.close()
    again = open_tiers(tmp_path)
    assert all(is_right(*block) for block in served(again).values())
    assert again.match([key_of(1)]) == 1
    again.close()


def test_another_model_starts_the_file_afresh(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fingerprints that begin alike lead to one directory."""
    fill(tmp_path)
    config = TierConfig(BLOCK_BYTES, tmp_path, disk_bytes_for(DISK_SLOTS))
    other = Tiers(config, BLOCK_BYTES, HEADS, MODEL[:-1] + b"x")
    assert other.snapshot() == []
    assert "another version, model or KV layout" in caplog.text
    other.close()
    elsewhere = Tiers(config, BLOCK_BYTES, HEADS, MODEL[::-1])
    assert elsewhere._disk is not None
    assert elsewhere._disk.path.parent != file_of(tmp_path).parent
    elsewhere.close()


@pytest.mark.parametrize("cut", ["in a payload", "in the headers", "in the superblock"])
def test_a_truncated_file_loses_what_was_cut_off_and_no_more(tmp_path: Path, cut: str) -> None:
    made = fill(tmp_path)
    size = {
        "in a payload": FORMAT.payload_offset(5) + BLOCK_BYTES - 1,
        "in the headers": FORMAT.header_offset(5) + 3,
        "in the superblock": 17,
    }[cut]
    os.truncate(file_of(tmp_path), size)
    tiers = open_tiers(tmp_path)
    kept = {key_of(number) for number in range(5)} if cut == "in a payload" else set()
    assert {key: data for key, (_, data) in served(tiers).items()} == {key: made[key] for key in kept}
    for number in range(20, 20 + DISK_SLOTS):  # the file grows again over what was cut off
        put(tiers, number, np.random.default_rng(number))
        give_up_at = time.monotonic() + PATIENCE_S
        while tiers._writing:
            assert time.monotonic() < give_up_at
            assert tiers.counters.unwritten == 0
    tiers.close()
    again = open_tiers(tmp_path)
    blocks = served(again)
    assert set(blocks) == {key_of(number) for number in range(20, 20 + DISK_SLOTS)}
    assert all(is_right(*block) for block in blocks.values())
    again.close()


def test_refused_slots_stay_refused_when_the_file_grows_over_them(tmp_path: Path) -> None:
    fill(tmp_path)
    os.truncate(file_of(tmp_path), FORMAT.payload_offset(5))
    open_tiers(tmp_path).close()
    os.truncate(file_of(tmp_path), disk_bytes_for(DISK_SLOTS))  # zeros where payloads were
    tiers = open_tiers(tmp_path)
    assert set(served(tiers)) == {key_of(number) for number in range(5)}
    tiers.close()


def test_a_file_cut_off_under_a_running_process(tmp_path: Path) -> None:
    made = fill(tmp_path)
    tiers = open_tiers(tmp_path)
    os.truncate(file_of(tmp_path), FORMAT.payload_offset(5) + 100)
    keys = [key_of(number) for number in range(4, 7)]
    held = tiers.pin(keys)
    landed: dict[int, bytes] = {}

    def write(index: int, block: NDArray[np.uint8]) -> None:
        landed[index] = block.tobytes()

    with pytest.raises(TransferError, match="ends within slot 5"):
        tiers.read(held, write).result(PATIENCE_S)
    assert landed == {0: made[keys[0]]}
    tiers.unpin(held)
    assert tiers.match(keys) == 1, "what cannot be read is held no more"
    assert tiers.take_events() == [Removed((keys[1],))]
    assert tiers.counters.rejected == 1
    tiers.close()


def test_of_a_block_in_two_slots_the_newer_is_kept(tmp_path: Path) -> None:
    """As left by a process that evicted it, put it again, and died before the first slot was used."""
    rng = np.random.default_rng(3)
    generations = {0: 5, 1: 9, 2: 7}
    disk = DiskTier(tmp_path, disk_bytes_for(DISK_SLOTS), BLOCK_BYTES, HEADS, MODEL)
    for slot, generation in generations.items():
        data = rng.integers(0, 256, BLOCK_BYTES, np.uint8)
        disk.write(slot, SlotHeader(NamedBlock(ROOT, key_of(1), fingerprint_of(data)), generation), data)
    disk.close()
    again = DiskTier(tmp_path, disk_bytes_for(DISK_SLOTS), BLOCK_BYTES, HEADS, MODEL)
    assert (again.slots.find(key_of(1)), again.slots.num_named, again.next_generation) == (1, 1, 10)
    again.erase(1)
    again.close()
    third = DiskTier(tmp_path, disk_bytes_for(DISK_SLOTS), BLOCK_BYTES, HEADS, MODEL)
    assert third.slots.num_named == 0, "the older ones do not come back"
    third.close()


def test_a_link_or_another_kind_of_file_is_never_written(tmp_path: Path) -> None:
    """In a folder that others may write to: what a link leads to stays, and a file that was there becomes private."""
    open_tiers(tmp_path).close()
    ours = file_of(tmp_path)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 1000)
    ours.unlink()
    ours.symlink_to(victim)
    with pytest.raises(EngineStartError, match="kv_disk_dir"):
        open_tiers(tmp_path)
    assert victim.read_bytes() == b"precious" * 1000
    ours.unlink()
    os.mkfifo(ours)
    with pytest.raises(EngineStartError, match="not a regular file"):
        open_tiers(tmp_path)
    ours.unlink()
    ours.touch(mode=0o666)
    ours.chmod(0o666)
    open_tiers(tmp_path).close()
    assert ours.stat().st_mode & 0o777 == 0o600
