"""How the two ends of a stream of loans tell each other that their engines' loops turn."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from engine.process.engine_client import EngineClient

HEARTBEAT_S = 0.2
BEATS_PER_SILENCE = 5
"""Beats come every HEARTBEAT_S or, where less silence is borne, so many times within it."""


class Heartbeat:
    """Of one end. It beats and listens only while there are loans: an idle stream says nothing."""

    def __init__(
        self,
        engine: EngineClient,
        silence_s: float,
        on_due: Callable[[], object],
        on_silent: Callable[[], object],
    ) -> None:
        """`on_due`: something should be said, if only that the engine's loop turns. `on_silent`, once: for `silence_s`
        the other end has not said so."""
        self._engine = engine
        self._silence_s = silence_s
        self._heartbeat_s = min(HEARTBEAT_S, silence_s / BEATS_PER_SILENCE)
        self._on_due = on_due
        self._on_silent = on_silent
        self._loop = asyncio.get_running_loop()
        self._running = ExitStack()
        self._timer: asyncio.TimerHandle | None = None
        self._turned = False
        self._said_at = self._heard_at = self._loop.time()

    def start(self) -> None:
        """There are loans now."""
        self._heard_at = self._loop.time()
        self._running.enter_context(self._engine.watching(self._watch))
        self._timer = self._loop.call_later(self._silence_s, self._check)

    def stop(self) -> None:
        """There are none any more."""
        self._running.close()
        if self._timer is not None:
            self._timer.cancel()

    def heard(self) -> None:
        """The other end's engine turns."""
        self._heard_at = self._loop.time()

    def take(self) -> bool:
        """A frame leaves now: whether this end's engine has turned since the last one."""
        turned, self._turned = self._turned, False
        self._said_at = self._loop.time()
        return turned

    def _watch(self, _: object) -> None:
        self._turned = True
        if self._loop.time() - self._said_at >= self._heartbeat_s:
            self._on_due()

    def _check(self) -> None:
        silent_s = self._loop.time() - self._heard_at
        if silent_s >= self._silence_s:
            self.stop()
            self._on_silent()
        else:
            self._timer = self._loop.call_later(self._silence_s - silent_s, self._check)
