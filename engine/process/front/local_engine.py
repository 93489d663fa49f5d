"""A sim engine on its front's event loop, so that one process holds many workers.

The engine core is the real one; a step's time passes on the loop's clock without computing. Pools of one process reach
each other through the `local` transport.
"""

import asyncio
from collections.abc import Sequence

from engine.backends.sim.kind import open_sim_runner
from engine.core_types import Chunk
from engine.messages.from_engine import FromEngine
from engine.messages.to_engine import ToEngine
from engine.process.assembly import IDLE_TURN_S, open_core
from engine.process.front.engine_client import EngineHost, EngineListener
from engine.process.spec import EngineSpec
from kvtransfer.local import LocalNetwork, LocalTransport
from loans.in_process import InProcessNetwork

LATE_S = 0.02
"""Lateness of the loop, in seconds, beyond which modelled step times are no longer kept."""


class LocalEngine(EngineHost):
    """One engine among others of `network`."""

    def __init__(self, spec: EngineSpec, network: LocalNetwork, engines: dict[bytes, InProcessNetwork]) -> None:
        """Create it; `engines` are those whose loans it takes, of the same process."""
        self._spec = spec
        self._network = network
        self._engines = engines
        self._outgoing: list[FromEngine] = []
        self._turn_event: asyncio.Handle | None = None
        """Handle of the next turn, when one is due before the idle turn."""
        self._stepping: asyncio.TimerHandle | None = None
        self._idling: asyncio.TimerHandle | None = None
        self._step_end = float("-inf")
        """End of the last step, if the next one follows it at once."""
        self._hung = False
        self._gone = False

    def start(self, listener: EngineListener) -> None:
        """Start the engine.

        Raises EngineStartError.
        """
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._spec.config.kind.check(self._spec.config, self._spec.role)
        self._runner = open_sim_runner(self._spec.config)
        transport = LocalTransport(self._network, self._spec.agent_name)
        silence_s = self._spec.config.peer_silence_s
        loans = InProcessNetwork(self._engines, self._spec.incarnation, self._wake, self._loop.time, silence_s)
        loans.worker_id = self._spec.worker_id
        self._core = open_core(self._spec, self._runner, transport, self._outgoing.append, self._wake, loans)
        self._outgoing.append(self._core.start())
        self._wake()

    def send(self, messages: Sequence[ToEngine]) -> None:
        if self._gone:
            return
        for message in messages:
            self._core.handle(message)
        self._wake()

    def hang(self) -> None:
        """Stop sending and computing, as if a step never ended; for tests."""
        self._hung = True

    def kill(self) -> None:
        """End as if the engine's process had died; for tests."""
        if not self._gone:
            self._gone = True
            for handle in (self._turn_event, self._stepping, self._idling):
                if handle is not None:
                    handle.cancel()
            self._core.close()
            self._loop.call_soon(self._listener.ended, "killed")

    async def stop(self) -> None:
        self.kill()

    def processes(self) -> Sequence[int]:
        return ()

    def _wake(self) -> None:
        if self._turn_event is None and not self._gone:
            self._turn_event = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_event = None
        if self._hung:
            return
        self._core.handle_posted()
        if self._stepping is None and (batch := self._core.begin_step()):
            # Time between consecutive steps is part of the modelled time, unless the loop is very late.
            now = self._loop.time()
            began_at = self._step_end if now - self._step_end < LATE_S else now
            self._step_end = began_at + self._runner.timing.seconds(batch)
            self._stepping = self._loop.call_at(self._step_end, self._end_step, batch)
        elif self._stepping is None:
            self._step_end = float("-inf")
        self._core.report()
        self._speak()
        if self._idling is not None:
            self._idling.cancel()
        self._idling = self._loop.call_later(IDLE_TURN_S, self._wake)

    def _end_step(self, batch: list[Chunk]) -> None:
        self._stepping = None
        if not self._hung:
            self._core.end_step(batch, self._runner.compute(batch))
            self._turn()

    def _speak(self) -> None:
        if self._outgoing:
            outgoing = self._outgoing[:]
            self._outgoing.clear()
            self._listener.on_messages(outgoing)
