"""Objects that a serving process leaves out of its garbage collections."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from cluster.process.memory import ALLOCATED, spare_the_started


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


class Knot:
    """Only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_there_is_looked_at_no_more_and_what_comes_later_is() -> None:
    garbage = weakref.ref(Knot())
    spare_the_started()
    assert garbage() is None, "what nobody needs is not kept for good"
    assert gc.get_freeze_count() > 1000
    assert not gc.get_objects()[ALLOCATED:]

    later = weakref.ref(Knot())
    made = [[] for _ in range(ALLOCATED + 1)]
    assert later() is None
    assert len(made) > ALLOCATED


def test_all_of_it_is_freed_at_the_end() -> None:
    """Of a process: what has a finaliser in another language says otherwise that it leaks."""
    code = (
        "import os; from cluster.process.memory import spare_the_started\n"
        "class Knot:\n"
        "    def __init__(self): self.itself = self\n"
        "    def __del__(self, write=os.write): write(1, b'freed')\n"
        "knot = Knot(); spare_the_started(); del knot"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "freed"
