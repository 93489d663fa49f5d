"""Runs of batches in virtual time: crashes at any write, two routers at once, retries, and how runs end."""

import asyncio
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batches.lines import LineAnswer, LineRequest
from batches.state import Cancelled, Facts, status_of
from batches.storage.answer_log import encoded
from batches.storage.disk import Disk
from cluster.errors import Unavailable
from support.batch_runs import Crash, CrashingDisk, HeldClaim, InlineLoop, World, line

NEVER = 10_000_000


def facts_of(world: World) -> Facts:
    facts = world.batch.facts()
    assert facts is not None
    return facts


def run_virtually(main: Any) -> None:
    """As the virtual loop's own, but crashed processes leave tasks with errors that nobody reads."""
    with asyncio.Runner(loop_factory=InlineLoop) as runner:
        runner.get_loop().set_exception_handler(lambda *_: None)
        runner.run(main)


@given(
    num_lines=st.integers(1, 12),
    bad=st.sets(st.integers(0, 11)),
    crashes=st.lists(st.integers(0, 60), max_size=5),
    seed=st.integers(0, 2**32),
    cancelled_at=st.none() | st.floats(0, 12),
    window_s=st.just(NEVER) | st.floats(0.1, 12),
    at_once=st.booleans(),
)
def test_each_line_is_answered_once_whatever_crashes(
    num_lines: int, bad: set[int], crashes: list[int], seed: int, cancelled_at: float | None, window_s: float,
    at_once: bool,
) -> None:  # fmt: skip
    """Each of `crashes` ends a router at that call of its disk; with `at_once` the next one has begun already."""
    lines = [line(f"line {number}", bad=number in bad) for number in range(num_lines)]

    async def live(world: World) -> None:
        async def cancel() -> None:
            if cancelled_at is not None:
                await asyncio.sleep(cancelled_at)
                if not world.batch.has_ended():
                    world.batch.record(Cancelled(at=cancelled_at))

        cancelling = asyncio.ensure_future(cancel())
        routers = [*crashes, None]
        while routers:
            num_now = 2 if at_once and len(routers) > 1 else 1
            now, routers = routers[:num_now], routers[num_now:]
            kept = world.logged()
            before = dict(world.started)
            runs = [world.run(CrashingDisk(crash_at, seed)).to_end() for crash_at in now]
            for result in await asyncio.gather(*runs, return_exceptions=True):
                assert result is None or isinstance(result, Crash)
            if num_now == 1:
                assert all(world.started[each] == before[each] for each in kept), "what is logged is not run again"
        if not world.batch.has_ended():
            await world.run().to_end()
        await cancelling

    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), lines, window_s=window_s, seed=seed)
        run_virtually(live(world))
        outputs, errors = world.outputs()
        names = [f"line {number}" for number in range(num_lines)]
        ended = facts_of(world).ended
        if facts_of(world).checked is None:
            assert ended.status in ("cancelled", "expired")
            assert not outputs + errors
            return
        assert sorted(each["custom_id"] for each in outputs + errors) == sorted(names)
        assert [each["response"]["body"]["text"] for each in outputs] == [each["custom_id"] for each in outputs]
        failed = [each for each in errors if each["response"] is not None]
        assert {each["custom_id"] for each in failed} <= {f"line {number}" for number in bad}
        assert (ended.completed, ended.failed) == (len(outputs), len(failed))
        if ended.status == "completed":
            assert {each["custom_id"] for each in errors} == {f"line {number}" for number in bad if number < num_lines}
        else:
            codes = {each["error"]["code"] for each in errors if each["error"] is not None}
            assert codes <= {f"batch_{ended.status}"}
        assert cancelled_at is not None or window_s != NEVER or ended.status == "completed"


def test_a_torn_and_a_damaged_line_count_as_unanswered(tmp_path: Path) -> None:
    async def live(world: World) -> None:
        whole = encoded(1, False, b'{"custom_id": "a", "response": {"body": {"text": "kept"}}, "error": null}')
        second = encoded(2, False, b'{"custom_id": "b"}')
        damaged = second.replace(b'"b"', b'"x"')
        for log in (whole + second[:-1], damaged + encoded(3, False, b'{"custom_id": "c"}'), b"\0" * 40):
            path, _ = world.folder(Disk()).new_log()
            path.write_bytes(log)
        await world.run().to_end()
        assert world.started["a"] == 0
        assert min(world.started["b"], world.started["c"]) >= 1

    world = World(tmp_path, [line("a"), line("b"), line("c")])
    run_virtually(live(world))
    outputs, errors = world.outputs()
    assert not errors
    assert [each["response"]["body"]["text"] for each in outputs] == ["kept", "b", "c"]


def test_lines_are_tried_again_for_as_long_as_it_takes(tmp_path: Path) -> None:
    world = World(tmp_path, [line("a"), line("b")])

    async def handle(asked: LineRequest) -> LineAnswer:
        world.started[json.loads(asked.body)["prompt"]] += 1
        if world.now() < 3600:
            raise Unavailable("all workers are gone")
        return LineAnswer(200, b'{"text":\n "x"}')

    world.handle = handle
    run_virtually(world.run().to_end())
    outputs, errors = world.outputs()
    assert (len(outputs), errors) == (2, [])
    assert 100 < world.started["a"] < 200, "every half a minute, once it lasts"


def test_a_stopping_router_finishes_lines_in_flight_and_begins_no_others(tmp_path: Path) -> None:
    world = World(tmp_path, [line(f"{number}") for number in range(20)])

    async def handle(asked: LineRequest) -> LineAnswer:
        world.started[json.loads(asked.body)["prompt"]] += 1
        await asyncio.sleep(5)
        return LineAnswer(200, b'{"text": "x"}')

    async def live() -> None:
        running = asyncio.ensure_future(world.run().to_end())
        await asyncio.sleep(6)
        world.drain.begin()
        await running
        assert world.now() < 12

    world.handle = handle
    run_virtually(live())
    assert status_of(facts_of(world)) == "in_progress"
    assert len(world.started) == len(world.logged()) == 8, "two rounds of four"


async def never(asked: LineRequest) -> LineAnswer:
    await asyncio.sleep(NEVER)
    raise AssertionError("it was cancelled")


def test_a_router_that_lost_its_claim_stops(tmp_path: Path) -> None:
    world = World(tmp_path, [line("a")])

    async def live() -> None:
        claim = HeldClaim()
        running = asyncio.ensure_future(world.run(claim=claim).to_end())
        await asyncio.sleep(5)
        claim.lost.set()
        await running
        assert world.now() < 7

    world.handle = never
    run_virtually(live())
    assert status_of(facts_of(world)) == "in_progress"


def test_an_answer_that_cannot_be_stored_ends_the_run_with_the_error(tmp_path: Path) -> None:
    world = World(tmp_path, [line(f"{number}") for number in range(9)])

    class Full(CrashingDisk):
        def write(self, fd: int, content: bytes) -> None:
            if b"custom_id" in content:
                super().write(fd, content[:10])
                raise OSError(28, "No space left on device")
            super().write(fd, content)

    async def live() -> None:
        with pytest.raises(OSError, match="No space"):
            await world.run(Full()).to_end()
        assert status_of(facts_of(world)) == "in_progress"
        await world.run().to_end()

    run_virtually(live())
    outputs, _ = world.outputs()
    assert [each["custom_id"] for each in outputs] == [f"{number}" for number in range(9)]


def test_a_bad_input_fails_before_any_line_runs(tmp_path: Path) -> None:
    world = World(tmp_path, [line("a"), line("a")])
    run_virtually(world.run().to_end())
    facts = facts_of(world)
    assert facts.ended.status == "failed"
    assert [(fault.line, fault.code) for fault in facts.ended.faults] == [(2, "duplicate_custom_id")]
    assert not world.started


def test_a_cancellation_of_this_router_is_seen_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, [line("a")])

    async def live() -> None:
        run = world.run()
        running = asyncio.ensure_future(run.to_end())
        await asyncio.sleep(0.2)
        world.batch.record(Cancelled(at=world.now()))
        run.look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await running
        assert running.done()

    world.handle = never
    run_virtually(live())
    assert status_of(facts_of(world)) == "cancelled"
