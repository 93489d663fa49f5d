"""Tasks and their owners: what ends with what, who hears a failure, and blocks that others end."""

import asyncio
import gc
from collections import Counter
from pathlib import Path

import pytest

from cluster.process.tasks import Endable, Tasks, all_of, each_of, failure_of, first_of, happens, outcomes_of
from support.virtual_loop import settle

ROOT = Path(__file__).parents[2]


class _Work:
    """Work that waits for ever, and takes some turns to end."""

    def __init__(self) -> None:
        self.began = self.ended = False

    async def wait(self) -> None:
        self.began = True
        try:
            await asyncio.Event().wait()
        finally:
            await settle()
            self.ended = True


async def _after(seconds: float, outcome: int | Exception = 0) -> int:
    await asyncio.sleep(seconds)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def test_closed_tasks_are_over_also_where_the_closing_task_is_cancelled() -> None:
    works, tasks = [_Work(), _Work()], Tasks()
    for work in works:
        tasks.spawn(work.wait())
    await settle()
    closing = asyncio.ensure_future(tasks.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert all(work.began and work.ended for work in works)
    with pytest.raises(RuntimeError, match="is closed"):
        tasks.spawn(_after(0))


async def test_a_running_task_is_kept_alive() -> None:
    tasks, came = Tasks(), list[int]()

    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    async def note() -> None:
        try:
            await wait()
        finally:
            came.append(1)

    tasks.spawn(note())
    await settle()
    gc.collect()
    assert not came
    await tasks.close()
    assert came == [1]


async def test_joined_tasks_are_not_cancelled() -> None:
    async with Tasks() as tasks:
        task = tasks.spawn(_after(2.0, 7))
        await tasks.join(1.0)
        assert not task.done()
        await tasks.join()
        assert task.result() == 7


async def test_who_hears_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    heard = list[BaseException]()
    error = ValueError("lost")
    async with Tasks(heard.append) as heeded, Tasks("the loop ended") as logged, Tasks() as mute:
        heeded.spawn(_after(0, error))
        logged.spawn(_after(0, error))
        asked = mute.spawn(_after(0, error))
        for tasks in (heeded, logged, mute):
            await tasks.join()
        assert heard == [error]
        assert [(record.message, record.exc_info and record.exc_info[1]) for record in caplog.records] == [
            ("the loop ended", error)
        ]
        with pytest.raises(ValueError, match="lost"):
            asked.result()
        caplog.clear()
        mute.spawn(_after(0, error))
        await settle()
        gc.collect()
    assert [record.message.splitlines()[0] for record in caplog.records] == ["Task exception was never retrieved"]


async def test_the_owner_of_a_loop_asks_for_its_failure() -> None:
    async with Tasks() as tasks:
        over, fails = tasks.spawn(_after(1.0)), tasks.spawn(_after(2.0, error := ValueError("lost")))
        asking = tasks.spawn(failure_of(over))
        assert await failure_of(fails) is error
        assert not asking.done()


async def test_an_event_that_happens_in_time() -> None:
    event = asyncio.Event()
    assert not await happens(event, 1.0)
    asyncio.get_running_loop().call_later(1.0, event.set)
    assert await happens(event, 2.0)
    assert await happens(event, 0.0)


async def test_a_race() -> None:
    slow = _Work()

    async def for_ever() -> int:
        await slow.wait()
        return 0

    assert await first_of(for_ever(), _after(1.0, 1), _after(2.0, 2)) == 1
    assert slow.ended
    assert await first_of(_after(0, 1), _after(0, 2)) == 1
    with pytest.raises(ValueError, match="no"):
        await first_of(_after(2.0, 1), _after(1.0, ValueError("no")))


async def test_all_or_the_first_failure() -> None:
    assert await all_of([_after(2.0, 1), _after(1.0, 2)]) == [1, 2]
    assert await all_of([]) == []
    slow = _Work()

    async def for_ever() -> int:
        await slow.wait()
        return 0

    with pytest.raises(ValueError, match="no"):
        await all_of([for_ever(), _after(1.0, ValueError("no"))])
    assert slow.ended


async def test_all_with_their_failures() -> None:
    failure = ValueError("no")
    assert await outcomes_of([_after(2.0, 1), _after(1.0, failure), _after(3.0, 2)]) == [1, failure, 2]
    ended: list[int] = []

    async def end() -> None:
        await _after(3.0, 0)
        ended.append(1)

    with pytest.raises(ValueError, match="no"):
        await each_of([_after(1.0, failure), end()])
    assert ended


def test_only_owners_make_tasks_and_nothing_takes_a_cancellation_back() -> None:
    """Methods, which ruff's rule on functions of asyncio does not see; the simulator's clock is a loop of its own."""
    allowed = {"cluster/process/tasks.py": 1, "sizing/cluster/clock.py": 2}
    found = Counter[str]()
    for path in ROOT.glob("[a-z]*/**/*.py"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(("tests/", "bench/")):
            source = path.read_text().replace("group.create_task(", "")
            found[name] += source.count("create_task(") + source.count(".uncancel(")
    assert +found == allowed


async def _sleep_in(block: Endable, *ends: tuple[float, Exception]) -> None:
    """Sleep in a block for 5 s that is ended after so many seconds; after 0 at once."""
    async with block:
        for seconds, error in ends:
            if seconds:
                asyncio.get_running_loop().call_later(seconds, block.end, error)
            else:
                block.end(error)
        await asyncio.sleep(5.0)


class TestEndable:
    async def test_a_block_that_nobody_ends(self) -> None:
        block = Endable(6.0, ValueError("late"))
        await _sleep_in(block)
        block.end(ValueError("late"))
        await asyncio.sleep(9.0)

    async def test_only_the_first_end_counts(self) -> None:
        late = Endable(2.0, ValueError("late"))
        with pytest.raises(ValueError, match="first"):
            await _sleep_in(late, (1.0, ValueError("first")), (1.0, ValueError("second")), (2.0, ValueError("third")))

    async def test_a_limit(self) -> None:
        with pytest.raises(ValueError, match="late"):
            await _sleep_in(Endable(2.0, ValueError("late")), (3.0, ValueError("later")))
        with pytest.raises(TimeoutError, match="its own"):
            async with Endable(2.0, ValueError("late")):
                raise TimeoutError("its own")

    async def test_what_others_cancel_stays_cancelled(self) -> None:
        task = asyncio.ensure_future(_sleep_in(block := Endable()))
        await settle()
        block.end(ValueError("ended"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_its_task_goes_on_as_if_never_cancelled(self) -> None:
        with pytest.raises(ValueError, match="now"):
            await _sleep_in(Endable(), (0.0, ValueError("now")))
        task = asyncio.current_task()
        assert task.cancelling() == 0
        await asyncio.sleep(1.0)
