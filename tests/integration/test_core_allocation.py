"""Processes that allocate cores one after the other, with the kernel's list of sockets between them."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.host.cores import DECODE_NICENESS, in_machine_order

AS_STARTED = os.nice(0) + 5
CORES = in_machine_order(os.sched_getaffinity(0))
PROCESS = """
import json, os, re, sys, threading
from engine.host import cores as neighbours
from engine.config import WorkerConfig

name, role, told, refused = json.loads(sys.argv[1])
os.nice(5)
neighbours.NAME = name
neighbours._LISTED = re.compile(rb" @" + name.encode() + rb"(\\S+)$", re.MULTILINE)
neighbours.LOOK_EVERY_S = neighbours.LEAST_BETWEEN_LOOKS = 0
if refused:
    def refuse(*_):
        raise PermissionError("not here")
    os.sched_setaffinity = refuse
threading.Thread(target=threading.Event().wait, daemon=True).start()
own = neighbours.CoreAllocation(role, told)
for line in sys.stdin:
    share = own.settle()
    places = {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in os.listdir("/proc/self/task")}
    niceness = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}
    print(json.dumps([share and [share.own, share.shared], list(places), list(niceness)]), flush=True)
"""
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core is everybody's")


class Engine:
    """What an engine does about cores, without one."""

    def __init__(self, name: str, role: str = "decode", told: Any = (), refused: bool = False) -> None:
        arguments = json.dumps([name, role, list(told), refused])
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, "-c", PROCESS, arguments], **pipes)
        self.pid = self._process.pid
        self.settle()

    def settle(self) -> Any:
        """Where it moved to, [own cores, shared cores], or None. `places`: of all its threads, each once."""
        self.moved, self.places, self.niceness = self._ask()
        return self.moved

    def _ask(self) -> Any:
        self._process.stdin.write("settle\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Of a name of their own: engines of other tests are not their neighbours."""
    name = f"tandem-test-{uuid.uuid4().hex[:8]}-"
    started: list[Engine] = []

    def one(*arguments: Any, **options: Any) -> Engine:
        started.append(Engine(name, *arguments, **options))
        return started[-1]

    yield one
    for engine in started:
        engine.kill()


def half(number: int) -> list[int]:
    middle = -(-len(CORES) // 2)
    return [CORES[:middle], CORES[middle:]][number]


def test_one_alone_has_all_cores_and_two_a_half_each_until_one_is_gone(start: Start) -> None:
    first = start()
    assert first.moved == [CORES, []]
    second = start()
    assert second.moved == [half(1), []]
    assert second.places == [sorted(half(1))], "all of its threads are there"
    assert first.settle() == [half(0), []]
    assert first.settle() is None, "it is there"
    second.kill()
    assert first.settle() == [CORES, []]
    assert first.places == [sorted(CORES)]


def test_one_for_prefill_comes_first_and_computes_on_both(start: Start) -> None:
    decode, prefill = start("decode"), start("prefill")
    assert prefill.moved == [half(0), half(1)]
    assert decode.niceness == prefill.niceness == [AS_STARTED]
    assert decode.settle() == [half(1), []]
    assert decode.niceness == [AS_STARTED + DECODE_NICENESS], "it steps back from where it was"
    prefill.kill()
    assert decode.settle() == [CORES, []]
    assert decode.niceness == [AS_STARTED + DECODE_NICENESS], "coming forward is not for everybody"


def test_who_was_told_is_left_its_cores_and_stays_there(start: Start) -> None:
    told, other = start(told=CORES[:1]), start()
    assert told.moved is None
    assert other.moved == [CORES[1:], []]
    assert told.settle() is None
    assert told.places == [sorted(CORES)], "who started it sees to that"


def test_one_that_somebody_moves_says_so_and_the_others_make_room(start: Start) -> None:
    moved, other = start(), start()
    moved.settle()
    for thread in os.listdir(f"/proc/{moved.pid}/task"):
        os.sched_setaffinity(int(thread), CORES[-1:])
    assert moved.settle() == [CORES[-1:], []]
    assert other.settle() == [CORES[:-1], []]


def test_one_that_may_not_move_is_not_reckoned_with(start: Start) -> None:
    first, stays = start(), start(refused=True)
    assert stays.moved is None
    assert stays.places == [sorted(CORES)]
    assert first.settle() is None
    assert stays.settle() is None
