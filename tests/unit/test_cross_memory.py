"""Reads of another process's memory: this one's own, as far as the kernel cares, or that of a child."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import cross_memory
from kvtransfer.cross_memory import ATTACHED, MAPPED, Attached, FilePool, ProcessAddress, attach, own_address
from kvtransfer.errors import PeerGone, TransferError
from kvtransfer.fingerprint import Folding
from kvtransfer.memory_file import MemoryFile
from kvtransfer.transport import Span

CHILD = """
import json, sys
from kvtransfer.cross_memory import own_address
print(json.dumps(own_address().fields()), flush=True)
sys.stdin.read()
"""
FILE = MemoryFile(3 << 20)
MEMORY = FILE.memory
MEMORY[:] = np.random.default_rng(5).integers(0, 256, MEMORY.nbytes, np.uint8)
POOL = FilePool(FILE.address, MEMORY.ctypes.data, MEMORY.nbytes)
UNTOUCHED = 0xEE


def address() -> ProcessAddress:
    own = own_address()
    assert own is not None, "this machine can attach"
    return own


def attached(mapped: bool = False) -> Attached:
    own = attach(address(), POOL if mapped else None)
    assert own is not None
    return own


@st.composite
def reads(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Words of a part, where the own memory begins in a line of the cache, and spans as (own part, their part, parts);
    no two write the same."""
    words = draw(st.sampled_from([1, 3, 8, 37, 511, 512, 513, 1024, 1500, 40_000]))
    num_parts = MEMORY.nbytes // 8 // words
    room = min(num_parts, draw(st.integers(1, 300)))
    spans, own = [], 0
    while own < room and len(spans) < 700:
        count = draw(st.integers(1, min(room - own, 40)))
        spans.append((own, draw(st.integers(0, num_parts - count)), count))
        own += count + draw(st.integers(0, 1))
    return words, draw(st.sampled_from([0, 8, 16, 40])), draw(st.permutations(spans))


@given(reads(), st.booleans(), st.booleans())
def test_what_is_read_is_there_with_its_fingerprints_and_nothing_else_changes(
    read: tuple[int, int, list[tuple[int, int, int]]], folds: bool, mapped: bool
) -> None:
    words, shift, parts = read
    part_bytes = 8 * words
    raw = np.full(MEMORY.nbytes + 128, UNTOUCHED, np.uint8)
    first = -raw.ctypes.data % 64 + shift
    own = raw[first : first + MEMORY.nbytes]
    expected = raw.copy()
    spans, found = [], []
    folding = Folding(words)
    for to, at, count in parts:
        source = MEMORY[at * part_bytes : (at + count) * part_bytes]
        expected[first + to * part_bytes :][: source.nbytes] = source
        found += folding.of(source.view(np.uint64).reshape(count, words)).tolist()
        spans.append(Span(own.ctypes.data + to * part_bytes, MEMORY.ctypes.data + at * part_bytes, source.nbytes))
    said = attached(mapped).read(spans, folding if folds else None)
    assert np.array_equal(raw, expected)
    if folds:
        assert said.tolist() == found
    else:
        assert said is None


@pytest.mark.parametrize(("mapped", "lane"), [(False, ATTACHED), (True, MAPPED)])
def test_lanes_are_known_after_the_first_read(mapped: bool, lane: str) -> None:
    process, own = attached(mapped), np.zeros(64, np.uint8)
    assert process.lanes == ()
    process.read([Span(own.ctypes.data, MEMORY.ctypes.data, 64)])
    assert process.lanes == (lane,)


@pytest.mark.parametrize("folding", [None, Folding(8)])
def test_memory_that_is_not_there(folding: Folding | None) -> None:
    process, own = attached(), np.zeros(128, np.uint8)
    spans = [Span(own.ctypes.data, MEMORY.ctypes.data, 64), Span(own.ctypes.data + 64, 4096, 64)]
    with pytest.raises(TransferError, match="Bad address") as error:
        process.read(spans, folding)
    assert not isinstance(error.value, PeerGone)


@pytest.mark.parametrize(
    "change",
    [
        {"host": "another"},
        {"pid": 1 << 22},
        {"secret": bytes(16)},
        {"secret_at": 4096},
        {"secret_at": 4096, "secret": bytes(16)},
    ],
)
def test_who_is_not_here_or_not_the_one_is_not_attached_to(change: dict[str, object]) -> None:
    assert attach(dataclasses.replace(address(), **change)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ucx_tls", "lane"),
    [
        ("all", MAPPED),
        ("tcp,cma", ATTACHED),
        ("tcp,posix", MAPPED),
        ("mm", MAPPED),
        ("shm", MAPPED),
        ("sm,self", MAPPED),
        ("tcp", None),
        ("rc,cuda_copy", None),
        ("^tcp", MAPPED),
        ("^cma", MAPPED),
        ("^posix", ATTACHED),
        ("^cma,mm", None),
        ("^sm", None),
        ("\\cma,tcp", ATTACHED),
        ("^\\cma,\\posix", None),
        ("", None),
    ],
)
def test_it_is_done_where_ucx_would(ucx_tls: str, lane: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> str | None:
        if (process := attach(address(), POOL)) is None:
            return None
        own = np.zeros(8, np.uint8)
        process.read([Span(own.ctypes.data, MEMORY.ctypes.data, 8)])
        return process.lanes[0]

    monkeypatch.setenv("UCX_TLS", ucx_tls)
    assert found() == lane
    monkeypatch.setenv("UCX_SHM_DEVICES", "")
    assert found() is None
    monkeypatch.setenv("UCX_SHM_DEVICES", "memory,other")
    assert found() == lane


@pytest.mark.parametrize("allowed", [{MAPPED, ATTACHED}, {ATTACHED}, {MAPPED}, set()])
def test_only_lanes_that_are_allowed(allowed: set[str]) -> None:
    assert (attach(address(), None, allowed.__contains__) is not None) is (ATTACHED in allowed)
    assert (attach(address(), POOL, allowed.__contains__) is not None) is bool(allowed)


def test_without_a_compiler_it_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def load(source: object) -> None:
        tried.append(source)
        raise cross_memory.NotCompiled("no C++ compiler")

    monkeypatch.setattr(cross_memory, "load_library", load)
    cross_memory.compiled.cache_clear()
    try:
        assert attach(address()) is None
        assert attach(address()) is None
        assert len(tried) == 1, "whoever connects next does not wait for it again"
    finally:
        cross_memory.compiled.cache_clear()


def test_spans_that_are_no_whole_parts_are_refused() -> None:
    own = np.zeros(128, np.uint8)
    spans = [Span(own.ctypes.data, MEMORY.ctypes.data, 64), Span(own.ctypes.data + 64, MEMORY.ctypes.data, 60)]
    with pytest.raises(ValueError, match="whole parts of 64 bytes"):
        attached().read(spans, Folding(8))
    assert not own.any()


def test_a_process_that_has_ended() -> None:
    """Its descriptor is closed with the last who knows of it."""
    before = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        said = ProcessAddress.parse(json.loads(child.stdout.readline()))
        process, own = attach(said), np.zeros(16, np.uint8)
        process.read([Span(own.ctypes.data, said.secret_at, 16)])
        assert own.tobytes() == said.secret
        child.kill()
    with pytest.raises(PeerGone):
        process.read([Span(own.ctypes.data, said.secret_at, 16)])
    assert attach(said) is None
    del process
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("pid", value) for value in (0, -1, "1", 1.0, True, 1 << 31, None)],
        *[("host", value) for value in (1, None)],
        *[("secret_at", value) for value in (0, "1", 1 << 63, None)],
        *[("secret", value) for value in ("", "00", "zz" * 16, 1, None)],
    ],
)
def test_an_address_with_a_bad_field(field: str, value: object) -> None:
    fields = address().fields()
    assert ProcessAddress.parse(fields) == address()
    with pytest.raises((ValueError, KeyError, TypeError)):
        ProcessAddress.parse(fields | {field: value})
    del fields[field]
    with pytest.raises(KeyError):
        ProcessAddress.parse(fields)
