"""The disk tier on real files, in real processes: killed, full, shared. Damaged: `test_disk_damage.py`."""

import os
import random
import resource
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import EngineStartError
from engine.kv.block_pool import Removed
from engine.kv.tiers.tiers import TierConfig, Tiers
from support.disk_tiers import (
    BLOCK_BYTES,
    DISK_SLOTS,
    FORMAT,
    HEADS,
    HOST_SLOTS,
    PATIENCE_S,
    burst,
    disk_bytes_for,
    file_of,
    fill,
    fingerprint_of,
    is_right,
    key_of,
    open_tiers,
    put,
    served,
    tell,
    until_written,
    writer_on,
)

# ------------------------------------------------------------------------------------------- restarts


def test_a_restart_serves_what_was_there(tmp_path: Path) -> None:
    made = fill(tmp_path)
    tiers = open_tiers(tmp_path)
    assert {key: data for key, (_, data) in served(tiers).items()} == made
    assert all(is_right(*block) for block in served(tiers).values())
    counters = tiers.counters
    assert (counters.disk_blocks, counters.disk_bytes) == (DISK_SLOTS, DISK_SLOTS * BLOCK_BYTES)
    assert (counters.disk_hits, counters.host_hits, counters.rejected) == (2 * DISK_SLOTS, 0, 0)
    assert counters.disk_read_s > 0.0
    put(tiers, 99, np.random.default_rng(1))
    assert tiers.take_events() == [Removed((key_of(0),))], "the oldest goes first"
    tiers.close()
    assert file_of(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.long
def test_kill_minus_nine_in_a_storm_of_writes(tmp_path: Path) -> None:
    """The file stays full of old blocks that the storm overwrites; no header may stand over the wrong bytes."""
    trials = int(os.environ.get("TANDEM_TRIALS", "20"))
    rng = random.Random(7)
    num_found = []
    for trial in range(trials):
        with writer_on(tmp_path, trial) as (process, path):
            assert path == file_of(tmp_path)
            if trial == 0:
                burst(process)
            tell(process, "storm")
            time.sleep(rng.uniform(0.005, 0.1))
        tiers = open_tiers(tmp_path)
        blocks = served(tiers)
        assert all(is_right(*block) for block in blocks.values())
        num_found.append(len(blocks))
        assert tiers.counters.rejected == 0, "no torn header either"
        tiers.close()
    # One that was being written is lost, and its slot is the first that the next storm writes.
    assert set(num_found) <= {DISK_SLOTS - 1, DISK_SLOTS}, num_found
    assert DISK_SLOTS - 1 in num_found, "nobody was killed within a write: the test shows nothing"


def test_each_process_has_its_own_file_and_a_dead_ones_is_taken_over(tmp_path: Path) -> None:
    with writer_on(tmp_path, 1) as (first, first_path), writer_on(tmp_path, 2) as (_, second_path):
        assert (first_path, second_path) == (file_of(tmp_path, 0), file_of(tmp_path, 1))
        burst(first)
        here = open_tiers(tmp_path)
        assert here._disk is not None
        assert here._disk.path == file_of(tmp_path, 2)
        assert served(here) == {}
        first.kill()
        first.wait()
        heir = open_tiers(tmp_path)
        blocks = served(heir)
        assert len(blocks) == DISK_SLOTS
        assert all(is_right(*block) for block in blocks.values())
        heir.close()
        here.close()


def test_what_another_model_left_is_removed_when_it_is_old_and_nobody_has_it(tmp_path: Path) -> None:
    config = TierConfig(BLOCK_BYTES, tmp_path, disk_bytes_for(2))

    def start(model: bytes) -> tuple[Tiers, Path]:
        tiers = Tiers(config, BLOCK_BYTES, HEADS, model)
        assert tiers._disk is not None
        return tiers, tiers._disk.path

    started = [start(bytes([number]) * 32) for number in range(4)]
    paths = [path for _, path in started]
    for tiers, _ in started[:3]:
        tiers.close()
    mine = tmp_path / "notes-1" / "kv.txt"
    mine.parent.mkdir()
    mine.touch()
    for path in (paths[0], paths[1], paths[3], mine):
        os.utime(path, (0, time.time() - 8 * 24 * 3600))
    start(bytes([1]) * 32)[0].close()
    assert [path.exists() for path in (*paths, mine)] == [False, True, True, True, True]
    started[3][0].close()


# -------------------------------------------------------------------------------------- bounds, full disks


def test_a_smaller_bound_truncates_and_a_larger_one_grows(tmp_path: Path) -> None:
    made = fill(tmp_path)
    small = open_tiers(tmp_path, disk_slots=5)
    assert file_of(tmp_path).stat().st_size == disk_bytes_for(5)
    assert {key: data for key, (_, data) in served(small).items()} == {
        key_of(number): made[key_of(number)] for number in range(5)
    }
    rng = np.random.default_rng(1)
    for number in range(50, 80):
        put(small, number, rng)
    small.close()
    assert file_of(tmp_path).stat().st_size == disk_bytes_for(5)
    large = open_tiers(tmp_path, disk_slots=DISK_SLOTS)
    assert large.counters.disk_blocks == 5
    assert all(is_right(*block) for block in served(large).values())
    large.close()


def test_a_full_disk_costs_only_what_does_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on the size of files stands for the disk's; the kernel answers a write beyond it with EFBIG."""
    tiers = open_tiers(tmp_path, host_slots=DISK_SLOTS)
    rng = np.random.default_rng(0)
    made = {}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FORMAT.payload_offset(5) + 1000, hard))
    try:
        for number in range(DISK_SLOTS):
            made[key_of(number)] = put(tiers, number, rng).tobytes()
        give_up_at = time.monotonic() + PATIENCE_S
        while tiers.counters.unwritten < DISK_SLOTS - 5:
            assert time.monotonic() < give_up_at
            time.sleep(0.001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tiers.counters.disk_blocks, tiers.counters.unwritten, tiers.counters.dropped) == (5, DISK_SLOTS - 5, 0)
    assert {key: data for key, (_, data) in served(tiers).items()} == made, "memory serves the rest"
    assert caplog.text.count("cannot be written") == 1
    put(tiers, 11, rng)  # put again: now there is room
    until_written(tiers, 6)
    tiers.close()
    again = open_tiers(tmp_path)
    assert set(served(again)) == {key_of(number) for number in [0, 1, 2, 3, 4, 11]}
    assert all(is_right(*block) for block in served(again).values())
    again.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_filesystem_that_is_full(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("no mounts here")
    try:
        tiers = open_tiers(tmp_path)
        rng = np.random.default_rng(0)
        for number in range(HOST_SLOTS):
            put(tiers, number, rng)
        tiers.close()
        assert tiers._unwritten == 1
        again = open_tiers(tmp_path)
        assert set(served(again)) == {key_of(number) for number in range(3)}, "a megabyte holds three"
        assert all(is_right(*block) for block in served(again).values())
        again.close()
        file_of(tmp_path).unlink()
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "ballast").write_bytes(bytes(2 << 20))
        with pytest.raises(EngineStartError, match=r"kv_disk_dir: .*No space left on device"):
            open_tiers(tmp_path)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


# ----------------------------------------------------------------------------------------------- the thread


def test_loop_and_thread_at_once(tmp_path: Path) -> None:
    """Puts, reads, forgets as fast as they go; every block that arrives is what was put last under its name."""
    tiers = open_tiers(tmp_path, disk_slots=8, host_slots=5)
    rng, choose = np.random.default_rng(0), random.Random(0)
    reads = []
    wrong: list[int] = []
    for step in range(1500):
        number = choose.randrange(16)
        match choose.randrange(6):
            case 0 | 1 | 2:
                put(tiers, number, rng)
            case 3 | 4:
                keys = [key_of(other) for other in choose.sample(range(16), 3)]
                held = tiers.pin(keys[: tiers.match(keys)])
                expected = tiers.fingerprints(held)

                def write(index: int, block: NDArray[np.uint8], expected: tuple[bytes, ...] = expected) -> None:
                    if fingerprint_of(block) != expected[index]:
                        wrong.append(index)

                reads.append((held, tiers.read(held, write)))
                if choose.random() < 0.3:
                    reads[-1][1].cancel()
            case _:
                tiers.forget([key_of(number)])
        while len(reads) > 2:
            held, future = reads.pop(0)
            if not future.cancelled():
                assert future.result(PATIENCE_S) is None
            tiers.unpin(held)
        if step % 50 == 0:
            tiers.check_integrity()
    assert wrong == []
    counters = tiers.counters
    assert counters.host_hits > 20
    assert counters.disk_hits > 20
    tiers.close()
    tiers.check_integrity()
