"""Memory that others may map: this process's own, and that of a child that ends."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.block_parts.part_service import SharedMemory
from engine.errors import EngineStartError
from engine.host.memory import belongs_in_file, huge_memory, pool_memory
from kvcache.layout import private_rows
from kvtransfer.contract.worlds import wait_until
from kvtransfer.cross_memory import FilePool, ProcessAddress, attach
from kvtransfer.errors import PeerGone, TransferError
from kvtransfer.hardware import main_memory
from kvtransfer.memory_file import FileAddress, MappedFile, MemoryFile
from kvtransfer.transport import Span

NUM_BYTES = 3 << 20
CHILD = f"""
import json, sys
from kvtransfer.cross_memory import own_address
from kvtransfer.memory_file import MemoryFile
file = MemoryFile({NUM_BYTES})
file.memory[:] = 7
process, address = own_address().fields(), file.address.fields()
print(json.dumps([process, address, file.memory.ctypes.data]), flush=True)
sys.stdin.read()
"""


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("tandem-kv")


@contextmanager
def lender() -> Iterator[tuple[subprocess.Popen[str], ProcessAddress, FilePool]]:
    """A process with a file full of sevens."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        process, address, base = json.loads(child.stdout.readline())
        yield child, ProcessAddress.parse(process), FilePool(FileAddress.parse(address), base, NUM_BYTES)


def test_what_is_written_is_seen_by_who_has_mapped_it() -> None:
    file = MemoryFile(NUM_BYTES)
    assert not file.memory.any()
    assert file.memory.nbytes == NUM_BYTES
    mapped = MappedFile(os.getpid(), file.address, NUM_BYTES)
    seen = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * NUM_BYTES).from_address(mapped.base))
    file.memory[:] = np.arange(NUM_BYTES, dtype=np.uint8)
    assert np.array_equal(seen, file.memory)


def test_nobody_can_make_it_smaller_or_larger() -> None:
    file = MemoryFile(NUM_BYTES)
    for size in (0, NUM_BYTES, 2 * NUM_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(file.address.descriptor, size)


def test_it_is_gone_with_the_last_who_knows_of_it() -> None:
    before = num_files(), num_mapped()
    file = MemoryFile(NUM_BYTES)
    mapped = MappedFile(os.getpid(), file.address, NUM_BYTES)
    assert num_mapped() == before[1] + 2
    del file, mapped
    assert (num_files(), num_mapped()) == before


def test_another_file_with_its_number_is_refused(tmp_path: Path) -> None:
    def refused(descriptor: int, num_bytes: int = NUM_BYTES, secret: bytes = bytes(16)) -> None:
        before = num_files()
        with pytest.raises((OSError, TransferError)):
            MappedFile(os.getpid(), FileAddress(descriptor, secret), num_bytes)
        assert num_files() == before

    file = MemoryFile(NUM_BYTES)
    ordinary = os.open(tmp_path / "ordinary", os.O_CREAT | os.O_RDWR)
    os.ftruncate(ordinary, NUM_BYTES + 16)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, NUM_BYTES + 16)
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    closed = os.dup(0)
    os.close(closed)
    for descriptor in (ordinary, unsealed, pipe, closed):
        refused(descriptor)
    refused(file.address.descriptor)
    for num_bytes in (NUM_BYTES - 1, NUM_BYTES + 1):
        refused(file.address.descriptor, num_bytes, file.address.secret)
    MappedFile(os.getpid(), file.address, NUM_BYTES)
    for descriptor in (ordinary, unsealed, pipe):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "1 MiB do not fit: this host has 0 MiB"),
        (1, "1 MiB do not fit: its container's limit of 4 MiB leaves 0 MiB"),
        (2, "1 MiB do not fit: its container's limit of 4 MiB leaves 0 MiB"),
    ],
)
def test_one_that_is_larger_than_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int | None, reason: str
) -> None:
    """By who makes it, whatever the system promises: it kills who writes more than there is."""
    meminfo, folder = tmp_path / "meminfo", tmp_path / ("memory" if version == 1 else ".")
    meminfo.write_text(f"MemTotal: 9999999 kB\nMemAvailable: {900 if version is None else 9999999} kB\n")
    if version is not None:
        folder.mkdir(exist_ok=True)
        limit, usage = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]
        (folder / f"memory.{limit}").write_text(f"{4 << 20}\n")
        (folder / f"memory.{usage}").write_text(f"{(4 << 20) - 4096}\n")
        prefix = "total_" if version == 1 else ""
        (folder / "memory.stat").write_text(f"{prefix}inactive_file 1000\n{prefix}active_file 2000\n")
    monkeypatch.setattr(main_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(main_memory, "CGROUP", tmp_path)
    before = num_files()
    with pytest.raises(OSError, match=reason):
        MemoryFile(1 << 20)
    for allocate in (huge_memory, partial(private_rows, 1), partial(SharedMemory().take, 1)):
        with pytest.raises(MemoryError, match=reason):
            allocate(1 << 20)
    for in_file in (False, True):
        with pytest.raises(EngineStartError, match=f"kv_memory_mib: is too large: {reason}"):
            pool_memory(1, 1 << 20, in_file)
        pool_memory(1, 4096, in_file)
    assert num_files() <= before + 1, "only that of SharedMemory is left"


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 9999)
    assert pool_memory(3, 4096, in_file=True).file is not None
    assert not pool_memory(3, 4096, in_file=False).memory.any()


def test_the_memory_of_a_process_that_has_ended_is_given_back() -> None:
    """It would be there for as long as somebody has it mapped, though nobody reads it any more."""
    before = num_mapped()
    with lender() as (child, process, pool):
        attached, own = attach(process, pool), np.zeros(64, np.uint8)
        attached.read([Span(own.ctypes.data, pool.base + NUM_BYTES - 64, 64)])
        assert own.tolist() == [7] * 64
        assert num_mapped() == before + 1
        child.kill()
    wait_until(lambda: num_mapped() == before, "nothing is mapped")
    with pytest.raises(PeerGone):
        attached.read([Span(own.ctypes.data, pool.base, 64)])
    assert attach(process, pool) is None


def test_an_error_keeps_nothing_mapped() -> None:
    """A process ends in the middle of a read, and somebody has the error for as long as he likes."""
    before = num_mapped()
    with lender() as (child, process, pool):
        attached, own = attach(process, pool), np.zeros(64, np.uint8)
        native = attached.native

        def dies(*what: Any) -> int:
            error = native(*what)
            child.kill()
            child.wait()
            return error

        attached.native = dies
        gc.disable()
        try:
            with pytest.raises(PeerGone) as kept:
                attached.read([Span(own.ctypes.data, pool.base, 64)])
            attached.native = native
            wait_until(lambda: num_mapped() == before, "nothing is mapped")
        finally:
            gc.enable()
        assert kept.value.__traceback__ is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("descriptor", value) for value in (-1, "1", 1.0, True, 1 << 31, None)],
        *[("secret", value) for value in ("", "00", "zz" * 16, 1, None)],
    ],
)
def test_an_address_with_a_bad_field(field: str, value: object) -> None:
    address = FileAddress(5, bytes(range(16)))
    assert FileAddress.parse(address.fields()) == address
    with pytest.raises((ValueError, KeyError, TypeError)):
        FileAddress.parse(address.fields() | {field: value})


def test_a_pool_is_in_a_file_where_there_can_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_memory(3, 4096, in_file=True)
    assert pool.memory.shape == (3, 4096)
    assert pool.memory.ctypes.data == pool.file.memory.ctypes.data
    assert pool_memory(3, 4096, in_file=False).file is None

    def refuse(*_: object) -> int:
        raise OSError("not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    pool = pool_memory(3, 4096, in_file=True)
    assert pool.file is None
    assert not pool.memory.any()


@pytest.mark.parametrize(
    ("setting", "huge"), [("always within_size advise [never] deny force", False), ("always [advise] never", True)]
)
def test_a_decode_workers_pool_is_in_a_file_only_with_huge_pages(
    setting: str, huge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: setting)
    assert belongs_in_file("decode") is huge
    assert belongs_in_file("prefill")
