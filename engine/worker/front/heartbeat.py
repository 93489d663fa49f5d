"""Heartbeats by which both ends of a loan stream show that their engines' loops run."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from cluster.process.loop_watch import loop_time
from engine.process.front.engine_client import EngineClient

HEARTBEAT_S = 0.12
QUIET_AFTER_S = 0.3
"""Seconds without a heartbeat after which `on_quiet` is called; engines report every 0.15 s even in long steps."""
QUIET_EVERY_S = 0.05
"""Time between further calls, in seconds."""
MIN_DELAY_S = 0.001
"""Shortest delay of a timer, in seconds: a shorter one may end before its time by the clock."""
BEATS_PER_SILENCE = 5
"""Heartbeats per tolerated silence, where HEARTBEAT_S would be too rare."""


class Heartbeat:
    """Heartbeat of one end of a stream, active only while there are loans: an idle stream sends nothing."""

    def __init__(
        self,
        engine: EngineClient,
        silence_s: float,
        on_due: Callable[[], object],
        on_silent: Callable[[], object],
        on_quiet: Callable[[float], object] | None = None,
    ) -> None:
        """Create it.

        `on_due` is called when a frame should be sent, if only as a heartbeat.

        `on_silent` is called once, when the other end sent no heartbeat for `silence_s`. Before that, `on_quiet` is
        called repeatedly with the seconds since the last heartbeat, while they are many.
        """
        self._engine = engine
        self._silence_s = silence_s
        self._heartbeat_s = min(HEARTBEAT_S, silence_s / BEATS_PER_SILENCE)
        self._on_due = on_due
        self._on_silent = on_silent
        self._on_quiet = on_quiet
        self._look_after_s = silence_s if on_quiet is None else min(QUIET_AFTER_S, silence_s)
        self._loop = asyncio.get_running_loop()
        self._running = ExitStack()
        self._timer: asyncio.TimerHandle | None = None
        self._stepped = False
        self._sent_at = self._loop.time()
        self._received_at = loop_time()

    def start(self) -> None:
        """Start: the stream has loans now."""
        self._received_at = loop_time()
        self._running.enter_context(self._engine.watching(self._watch))
        self._timer = self._loop.call_later(self._look_after_s, self._check)

    def stop(self) -> None:
        """Stop: the stream has no loans any more."""
        self._running.close()
        if self._timer is not None:
            self._timer.cancel()

    def record_received(self) -> None:
        """Record a heartbeat of the other end's engine."""
        self._received_at = loop_time()

    def take(self) -> bool:
        """Return whether this end's engine loop ran since the last frame; called when a frame leaves."""
        stepped, self._stepped = self._stepped, False
        self._sent_at = self._loop.time()
        return stepped

    def _watch(self, _: object) -> None:
        self._stepped = True
        if self._loop.time() - self._sent_at >= self._heartbeat_s:
            self._on_due()

    def _check(self) -> None:
        silent_s = loop_time() - self._received_at  # while this loop stood still, nobody was silent
        if silent_s >= self._silence_s:
            self.stop()
            self._on_silent()
            return
        delay_s = self._look_after_s - silent_s
        if delay_s <= 0 and self._on_quiet is not None:
            self._on_quiet(silent_s)
            delay_s = min(QUIET_EVERY_S, self._silence_s - silent_s)
        self._timer = self._loop.call_later(max(delay_s, MIN_DELAY_S), self._check)
