"""What a transport's thread tells, and who says it."""

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from kvtransfer.teller import Teller

Told = list[tuple[int, str]]


@pytest.fixture
def teller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Teller]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    made = Teller("tells")
    yield made
    made.finish()


def say(told: Told, number: int) -> Callable[[], None]:
    return lambda: told.append((number, threading.current_thread().name))


def test_what_is_done_is_told_in_order_on_another_thread(teller: Teller) -> None:
    told: Told = []
    for number in range(20):
        teller.tell(say(told, number), idle=False)
    teller.finish()
    assert told == [(number, "tells") for number in range(20)]


def test_who_is_idle_says_it_unless_something_else_comes_first(teller: Teller) -> None:
    told: Told = []
    teller.tell(say(told, 0), idle=True)
    assert told == [(0, threading.current_thread().name)]

    busy, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        busy.wait()

    teller.tell(hold, idle=False)
    begun.wait()
    teller.tell(say(told, 1), idle=True)
    assert len(told) == 1
    busy.set()
    teller.finish()
    assert told[1:] == [(1, "tells")]


def test_with_one_core_there_is_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    told: Told = []
    alone = Teller("tells")
    alone.tell(say(told, 0), idle=False)
    alone.finish()
    assert told == [(0, threading.current_thread().name)]
