"""How units of work are dealt out to threads (deal.h), by real threads that are quick, slow, or never come."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.backends.torch.native import kernels
from kvtransfer.native.compiler import Source, load_libraries

HEADER = Path(kernels.__file__).with_name("deal.h")
DRIVER = """
#include <omp.h>
#include "deal.h"

// Who took each unit, and as which of his. `rests[t]`: turns of a loop between two units of thread t; below 0 it never
// asks.
extern "C" void deal_out(long units, int threads, const int* rests, int* taken, int* owner, int* place) {
    Deal deal(units, threads);
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num();
        int count = 0;
        for (long unit; rests[thread] >= 0 && (unit = deal.take(thread)) >= 0;) {
            __atomic_fetch_add(&taken[unit], 1, __ATOMIC_RELAXED);
            owner[unit] = thread;
            place[unit] = count++;
            for (volatile int i = 0; i < rests[thread]; i = i + 1) {
            }
        }
    }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("deal")
    (folder / "driver.cpp").write_text(DRIVER)
    (folder / HEADER.name).write_bytes(HEADER.read_bytes())  # beside it: what is remembered is told by it
    (library,) = load_libraries([Source(folder / "driver.cpp", kernels.FLAGS)])
    return library


def deal_out(
    library: ctypes.CDLL, units: int, rests: list[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    taken, owner, place = (np.full(max(units, 1), fill, np.int32) for fill in (0, -1, -1))
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (np.array(rests, np.int32), taken, owner, place)]
    library.deal_out(ctypes.c_long(units), len(rests), *pointers)
    return taken[:units], owner[:units], place[:units]


@pytest.mark.parametrize("units", [0, 1, 2, 7, 100, 10_000])
@pytest.mark.parametrize("rests", [[0], [0, 0], [0, 100_000], [0, -1], [-1, 0, -1, 0], [0] * 8, [0, 3, 50, 700, 0]])
def test_each_unit_is_taken_once(library: ctypes.CDLL, units: int, rests: list[int]) -> None:
    if 100_000 in rests and units > 100:
        rests = [rest // 1000 for rest in rests]
    for _ in range(20):
        taken, owner, place = deal_out(library, units, rests)
        assert (taken == 1).all()
        for thread, rest in enumerate(rests):
            own = place[owner == thread]
            assert sorted(own.tolist()) == list(range(len(own)))
            assert rest >= 0 or not len(own)


def test_a_run_is_taken_in_its_order(library: ctypes.CDLL) -> None:
    """What a thread fetches ahead is the unit after: nearly always the one that it takes next."""
    _, owner, place = deal_out(library, 10_000, [0, 50])
    followed = 0
    for thread in (0, 1):
        mine = np.flatnonzero(owner == thread)
        in_turn = mine[np.argsort(place[mine])]
        followed += int((np.diff(in_turn) == 1).sum())
    assert followed > 9_900


def test_who_has_finished_takes_what_a_slow_thread_has_left(library: ctypes.CDLL) -> None:
    _, owner, _ = deal_out(library, 64, [0, 30_000_000])
    assert (owner == 1).sum() < 16, "dealt out in halves it would have 32"
