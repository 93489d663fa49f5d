"""The disk tier on real files, in real processes: killed, damaged, full, shared.

Run as a program, `python test_disk_tier.py DIRECTORY SEED`, this is the process that gets killed.
"""

import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import EngineStartError
from engine.keys import BlockKey, block_keys, root_key
from engine.pool import Removed, Stored
from engine.tiers.disk import DiskTier
from engine.tiers.disk_format import SUPERBLOCK_BYTES, DiskFormat, SlotHeader
from engine.tiers.slots import NamedBlock
from engine.tiers.tiers import TierConfig, Tiers
from kvtransfer.errors import TransferError
from kvtransfer.fingerprint import fingerprint_blocks

PR_SET_PDEATHSIG = 1
HEADS = 4
BLOCK_BYTES = 256 << 10
"""Large, so that a process is nearly always killed within one."""
DISK_SLOTS = 12
HOST_SLOTS = 4
MODEL = bytes(range(32))
ROOT = root_key(MODEL, "")
FORMAT = DiskFormat(BLOCK_BYTES, HEADS)
PATIENCE_S = 30.0
NAME = f"{MODEL.hex()[:16]}-{BLOCK_BYTES}"


def disk_bytes_for(num_slots: int) -> int:
    return FORMAT.payload_offset(num_slots - 1) + FORMAT.payload_stride


def key_of(number: int) -> BlockKey:
    return block_keys(ROOT, [number], 1)[0]


def fingerprint_of(block: NDArray[np.uint8]) -> bytes:
    return fingerprint_blocks(block.reshape(1, -1), [0], HEADS).tobytes()


def open_tiers(directory: Path, disk_slots: int = DISK_SLOTS, host_slots: int = HOST_SLOTS) -> Tiers:
    config = TierConfig(host_slots * BLOCK_BYTES, directory, disk_bytes_for(disk_slots))
    return Tiers(config, BLOCK_BYTES, HEADS, MODEL)


def put(tiers: Tiers, number: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Block `number`, with bytes that no other put has."""
    block = rng.integers(0, 256, BLOCK_BYTES, np.uint8)
    tiers.put(ROOT, key_of(number), block, fingerprint_of(block))
    return block


@contextmanager
def writer_on(directory: Path, seed: int) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process with a file of `directory`, killed at the end."""
    command = [sys.executable, __file__, str(directory), str(seed)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def burst(process: "subprocess.Popen[str]") -> None:
    """One block in every slot."""
    assert process.stdout is not None
    tell(process, "burst")
    assert process.stdout.readline() == "burst\n"


def until_written(tiers: Tiers, num_blocks: int) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while tiers.counters.disk_blocks < num_blocks:
        assert time.monotonic() < give_up_at, tiers.counters
        time.sleep(0.001)


def fill(directory: Path, num_blocks: int = DISK_SLOTS) -> dict[BlockKey, bytes]:
    """Blocks in slots 0, 1, ...: the bytes of each."""
    tiers, rng, made = open_tiers(directory), np.random.default_rng(0), {}
    for number in range(num_blocks):
        made[key_of(number)] = put(tiers, number, rng).tobytes()
        until_written(tiers, number + 1)
    tiers.close()
    return made


def served(tiers: Tiers) -> dict[BlockKey, tuple[bytes, bytes]]:
    """Of everything held: the fingerprint that should be and the bytes that came."""
    keys = [key for event in tiers.snapshot() if isinstance(event, Stored) for key in event.keys]
    found = {}
    for key in keys:
        held = tiers.pin([key])
        landed: list[bytes] = []
        tiers.read(held, lambda _, block, landed=landed: landed.append(block.tobytes())).result(PATIENCE_S)
        found[key] = (tiers.fingerprints(held)[0], landed[0])
        tiers.unpin(held)
    return found


def is_right(fingerprint: bytes, data: bytes) -> bool:
    return fingerprint_of(np.frombuffer(data, np.uint8)) == fingerprint


def file_of(directory: Path, number: int = 0) -> Path:
    return directory / NAME / f"kv-{number}.blocks"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


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


# -------------------------------------------------------------------------------------------- damage


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
    assert "started afresh: its superblock is damaged" in caplog.text
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


# --------------------------------------------------------------------------------------------- the process


def write_slowly() -> None:
    """A disk that takes its time, so that a process is mostly killed between two parts of a write."""
    pwrite = os.pwrite

    def slow(file: int, content: bytes, offset: int) -> int:
        time.sleep(0.002)
        return pwrite(file, content, offset)

    os.pwrite = slow


def write_until_killed() -> None:
    """Print the file that is locked. Then every line on standard input is one burst of puts, answered when it was
    written; after the line `storm` it never stops. Ends with its standard input, or with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    directory, rng = Path(sys.argv[1]), np.random.default_rng(int(sys.argv[2]))
    tiers = open_tiers(directory)
    assert tiers._disk is not None
    print(tiers._disk.path, flush=True)
    for line in sys.stdin:
        if line == "storm\n":
            write_slowly()
        while line == "storm\n":
            put(tiers, int(rng.integers(0, 1 << 30)), rng)
        for number in range(DISK_SLOTS):
            put(tiers, number, rng)
            while tiers.counters.disk_blocks <= number:
                pass
        print(line, end="", flush=True)
    tiers.close()


if __name__ == "__main__":
    write_until_killed()
