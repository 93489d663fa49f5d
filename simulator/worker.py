"""A worker in virtual time: a real engine, whose steps take as long as `timing` says and compute nothing.

It turns as the engine process does (`engine/worker/engine_process.py`): what has arrived is handled at once, also while
a step runs; a step begins as soon as there is something to compute; load is reported four times a second at least.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.core import CoreLimits, EngineCore, Input
from engine.layout import KvLayout
from engine.messages import FromEngine, Ready
from engine.sim.timing import StepWork, Timing
from engine.vocabulary import Chunk
from engine.worker.config import Role
from simulator.clock import Appointment, VirtualClock
from simulator.runner import BytelessRunner
from simulator.transport import VirtualTransport

IDLE_TURN_S = 0.251
"""A real loop is a little late too: its report is due by then."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is."""

    role: Role
    layout: KvLayout
    num_blocks: int
    timing: Timing
    limits: CoreLimits
    nic_bytes_per_s: float
    read_latency_s: float = 20e-6
    """From the post of a read to its first byte."""


class SimWorker:
    """One engine. `heard` gets what it says, in order, at the moment in which it says it."""

    def __init__(
        self,
        worker_id: str,
        spec: WorkerSpec,
        clock: VirtualClock,
        transport: VirtualTransport,
        heard: Callable[["SimWorker", FromEngine], None],
    ) -> None:
        self.worker_id = worker_id
        self.spec = spec
        self.transport = transport
        self.alive = True
        self.busy_s = 0.0
        """Spent in steps."""
        self.num_steps = 0
        self._clock = clock
        self._heard = heard
        self._runner = BytelessRunner(spec.layout, spec.num_blocks)
        self._said: list[FromEngine] = []
        self.core = EngineCore(
            self._runner, transport, spec.limits, self._said.append, self._wake, clock=clock.time
        )
        self._turning: Appointment | None = None
        self._stepping: Appointment | None = None
        self._idling: Appointment | None = None

    def start(self) -> Ready:
        """Turn from now on."""
        ready = self.core.start()
        self._wake()
        return ready

    def tell(self, *messages: Input) -> None:
        """They have arrived together. Said to one that is gone, they are lost."""
        if self.alive:
            for message in messages:
                self.core.handle(message)
            self._wake()

    def kill(self) -> None:
        """As if its machine had lost power, now."""
        self.alive = False
        for appointment in (self._turning, self._stepping, self._idling):
            if appointment is not None:
                appointment.cancel()
        self.core.close()

    def _wake(self) -> None:
        if self._turning is None and self.alive:
            self._turning = self._clock.after(0.0, self._turn)

    def _turn(self) -> None:
        self._turning = None
        self.core.handle_posted()
        if self._stepping is None and (batch := self.core.begin_step()):
            seconds = self.spec.timing.seconds_of(StepWork.of(batch))
            self.busy_s += seconds
            self._stepping = self._clock.after(seconds, self._end_step, batch)
        self.core.report()
        self._speak()
        if self._idling is not None:
            self._idling.cancel()
        self._idling = self._clock.after(IDLE_TURN_S, self._wake)

    def _end_step(self, batch: list[Chunk]) -> None:
        self._stepping = None
        self.num_steps += 1
        self.core.end_step(batch, self._runner.execute(batch))
        self._turn_now()

    def _turn_now(self) -> None:
        if self._turning is not None:
            self._turning.cancel()
        self._turn()

    def _speak(self) -> None:
        said, self._said[:] = self._said[:], []
        for message in said:
            self._heard(self, message)
