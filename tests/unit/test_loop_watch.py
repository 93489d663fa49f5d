"""The watch of an event loop, with a clock of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.process.loop_watch import TICK_S, LoopWatch, excuse_standstill, watch_loop


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_clock_stands_still_while_the_loop_does() -> None:
    clock = Clock()
    watch = LoopWatch(clock)
    began_at = watch.time()
    for _ in range(20):
        clock.now += TICK_S
        watch.tick()
    assert abs(watch.time() - began_at - 1.0) < 1e-9
    clock.now += 15.0
    assert watch.time() - began_at < 1.0 + 2 * TICK_S + 1e-9, "before the tick that comes late"
    assert abs(watch.tick() - (15.0 - TICK_S)) < 1e-9
    assert watch.time() - began_at < 1.0 + 2 * TICK_S + 1e-9, "and after it"
    clock.now += TICK_S
    watch.tick()
    assert abs(watch.time() - began_at - 1.0 - 2 * TICK_S) < 1e-9


def test_small_delays_are_not_taken_for_a_standstill() -> None:
    clock = Clock()
    watch = LoopWatch(clock)
    began_at = watch.time()
    for _ in range(10):
        clock.now += TICK_S + 0.02
        watch.tick()
    assert abs(watch.time() - began_at - 10 * (TICK_S + 0.02)) < 1e-9


def test_each_lag_is_told() -> None:
    clock, told = Clock(), list[float]()
    watch = LoopWatch(clock)
    watch.on_lag = told.append
    for lag_s in (0.0, 3.0, 1.0, 0.0):
        clock.now += TICK_S + lag_s
        watch.tick()
    assert [round(lag_s, 6) for lag_s in told] == [0.0, 3.0, 1.0, 0.0]


async def test_an_excused_standstill_is_not_late_and_the_clock_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, clock = watch_loop(), Clock()
    monkeypatch.setattr(watch, "clock", clock)
    watch.tick()
    began_at = watch.time()
    clock.now += 3.0
    excuse_standstill()
    assert watch.late_s() <= 0
    assert watch.time() - began_at < TICK_S + 1e-9


def test_a_router_imports_its_http_frontend_before_the_loop_is_watched(tmp_path: Path) -> None:
    """The import takes most of a second, in which the loop stands still."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 512}')
    program = f"""
import asyncio, sys
from router import runtime
from router.config import RouterConfig

class Watched(Exception):
    pass

def watch_loop():
    assert "router.frontend.http_app" in sys.modules
    raise Watched

assert "router.frontend.http_app" not in sys.modules
runtime.watch_loop = watch_loop
try:
    asyncio.run(runtime.start_router(RouterConfig.parse({{"model": {str(tmp_path)!r}, "http_port": 0, "port": 0}})))
except Watched:
    print("imported first")
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert answer.stdout == "imported first\n", answer.stderr
