"""The watch of an event loop, with a clock of its own."""

from cluster.loop_watch import TICK_S, LoopWatch


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
