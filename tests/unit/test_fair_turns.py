"""Turns at long work: bounds, fairness between tenants, and tasks that leave while they wait."""

import asyncio
import contextlib
import random

import pytest

from cluster.fair_turns import FairTurns


class Work:
    """Tasks that take a turn and hold it until they are told to end."""

    def __init__(self, turns: FairTurns) -> None:
        self._turns = turns
        self.begun: list[str] = []
        self.working: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def add(self, name: str) -> None:
        self.tasks[name] = asyncio.ensure_future(self._run(name))

    async def _run(self, name: str) -> None:
        async with self._turns.turn(name[0]):
            self.begun.append(name)
            self.working[name] = over = asyncio.Event()
            try:
                await over.wait()
            finally:
                del self.working[name]

    async def end(self, name: str) -> None:
        self.working[name].set()
        await self.tasks[name]
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_tenant_with_many_waiting_tasks_lets_another_one_go_next() -> None:
    turns = FairTurns(slots=2, slots_per_tenant=1)
    work = Work(turns)
    for number in range(4):
        work.add(f"m{number}")
    await settle()
    assert work.begun == ["m0"], "one of a tenant at a time, though a slot is free"
    work.add("a0")
    await settle()
    assert work.begun == ["m0", "a0"]
    work.add("b0")
    work.add("a1")
    await settle()
    await work.end("m0")
    assert work.begun[2:] == ["m1"], "it came first; a0 still works"
    await work.end("m1")
    assert work.begun[3:] == ["b0"], "the tenant that was served longest ago"
    await work.end("a0")
    assert work.begun[4:] == ["a1"]
    await work.end("b0")
    assert work.begun[5:] == ["m2"]
    for task in work.tasks.values():
        task.cancel()
    await asyncio.gather(*work.tasks.values(), return_exceptions=True)
    assert (turns.num_working, turns.num_waiting) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_bounds_hold_whatever_ends_or_leaves(seed: int) -> None:
    chance = random.Random(seed)
    turns = FairTurns(slots=3, slots_per_tenant=2)
    work = Work(turns)
    for number in range(200):
        if chance.random() < 0.5:
            work.add(f"{chance.choice('abc')}{number}")
        elif work.working and chance.random() < 0.7:
            work.working[chance.choice(sorted(work.working))].set()
        elif work.tasks:
            work.tasks[chance.choice(sorted(work.tasks))].cancel()
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        busy = [name[0] for name in work.working]
        assert len(busy) <= turns.num_working <= 3
        assert all(busy.count(tenant) <= 2 for tenant in "abc")
    while any(not task.done() for task in work.tasks.values()):
        for over in work.working.values():
            over.set()
        await settle()
    for task in work.tasks.values():
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert (turns.num_working, turns.num_waiting) == (0, 0)
