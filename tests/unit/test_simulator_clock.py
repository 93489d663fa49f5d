"""Virtual time as a loop: tasks run between events, in an order that is always the same."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.fair_turns import Waker
from sizing.cluster.clock import VirtualClock
from support.virtual_cluster import run_out


@given(delays=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.5]), max_size=12))
def test_tasks_wake_at_their_time_and_in_the_order_in_which_they_slept(delays: list[float]) -> None:
    clock, woken = VirtualClock(), list[tuple[float, int]]()

    async def sleep(number: int, delay: float) -> None:
        await asyncio.sleep(delay)
        woken.append((asyncio.get_running_loop().time(), number))

    for number, delay in enumerate(delays):
        clock.spawn(sleep(number, delay))
    run_out(clock)
    assert woken == sorted((delay, number) for number, delay in enumerate(delays))


def test_what_an_event_woke_runs_before_the_next_event_of_the_moment() -> None:
    clock, seen, waker = VirtualClock(), list[str](), Waker()

    async def wait() -> None:
        await waker.sleep()
        seen.append("task")
        await asyncio.sleep(0)
        seen.append("task again")

    def note(name: str) -> Callable[[], None]:
        return lambda: seen.append(name)

    clock.spawn(wait())
    clock.at(1.0, lambda: (waker.wake(), note("first event")()))
    clock.at(1.0, note("second event"))
    run_out(clock)
    assert seen == ["first event", "task", "task again", "second event"]
    assert clock.now == 1.0


def test_timeouts_are_those_of_virtual_time() -> None:
    clock, ended_at = VirtualClock(), list[float]()

    async def wait(limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.sleep(10.0)
        except TimeoutError:
            ended_at.append(clock.now)

    clock.spawn(wait(3.0))
    clock.spawn(wait(0.0))
    run_out(clock)
    assert ended_at == [0.0, 3.0]


def test_an_error_of_a_task_ends_the_run_and_leaves_no_loop_behind() -> None:
    clock = VirtualClock()

    async def fail() -> None:
        await asyncio.sleep(1.0)
        raise ValueError("as told")

    clock.spawn(fail())
    with pytest.raises(ValueError, match="as told"):
        run_out(clock)
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    assert clock.now == 1.0


def test_a_run_ends_when_nothing_is_needed_or_nothing_is_left() -> None:
    clock, seen = VirtualClock(), list[float]()
    for when in (1.0, 2.0, 3.0):
        clock.at(when, lambda: seen.append(clock.now))
    assert clock.run(lambda: len(seen) < 2)
    assert seen == [1.0, 2.0]
    assert not clock.run(lambda: True)
    assert seen == [1.0, 2.0, 3.0]
