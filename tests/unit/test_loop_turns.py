"""Turns of an event loop: a burst leaves the loop free between its parts, in order, whoever is cancelled."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from cluster.fair_turns import LoopTurns


async def worked_in(turns: LoopTurns, count: int, cancelled: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    """Return the tasks that worked, in their order, each with the number of the loop's turn."""
    number, worked = 0, list[tuple[int, int]]()

    def turn() -> None:
        nonlocal number
        number += 1
        asyncio.get_running_loop().call_soon(turn)

    async def work(task: int) -> None:
        await turns.take()
        worked.append((task, number))

    turn()
    tasks = [asyncio.create_task(work(task)) for task in range(count)]
    await asyncio.sleep(0)
    for task in cancelled:
        tasks[task].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return worked


async def test_a_burst_works_in_parts_and_in_order() -> None:
    turns = LoopTurns(4)
    worked = await worked_in(turns, 11)
    assert [task for task, _ in worked] == list(range(11))
    at = [number for _, number in worked]
    assert [at.count(each) for each in dict.fromkeys(at)] == [4, 4, 3]
    assert sorted(at) == at
    (alone,) = await worked_in(turns, 1)
    assert alone == (0, at[0]), "nobody waits in a loop that has time"


@given(st.integers(1, 5), st.integers(1, 20), st.frozensets(st.integers(0, 19)))
def test_no_turn_is_lost_to_a_task_that_is_cancelled(at_once: int, count: int, left: frozenset[int]) -> None:
    async def main() -> None:
        turns, cancelled = LoopTurns(at_once), frozenset(each for each in left if at_once <= each < count)
        worked = await worked_in(turns, count, cancelled)
        assert [task for task, _ in worked] == [each for each in range(count) if each not in cancelled]
        assert len(await worked_in(turns, 1)) == 1

    asyncio.run(main())
