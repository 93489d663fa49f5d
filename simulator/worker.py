"""A worker in virtual time: a real engine, whose steps take as long as `timing` says and compute nothing.

It turns as the engine process does (`engine/process/engine_process.py`): what has arrived is handled at once, also while
a step runs; a step begins as soon as there is something to compute; load is reported four times a second at least.

**Runs.** Where steps are all alike (`engine/core/uniform_decode.py`), many happen at once: the run is put off until its last step
ends, a report is due or a message comes, whatever is first, and only what has ended by then is done. What the world
sees is the same to the bit as with every step by itself (`skip=False`; `tests/unit/test_simulator_runs.py`).
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.roles import Role
from engine.backends.sim.timing import StepWork, Timing
from engine.core.core_types import Chunk
from engine.core.core_types import Sequence as Chain
from engine.core.engine_core import EngineCore, EngineLimits, Input
from engine.kv.layout import KvLayout
from engine.messages import FromEngine, Ready
from simulator.clock import ScheduledEvent, VirtualClock
from simulator.runner import UNLIMITED_CONTEXT, BytelessRunner, token_of
from simulator.transport import VirtualTransport

IDLE_TURN_S = 0.251
"""A real loop is a little late too: its report is due by then."""
MAX_RUN = 1024
"""Steps."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is."""

    role: Role
    layout: KvLayout
    num_blocks: int
    timing: Timing
    limits: EngineLimits
    nic_bytes_per_s: float
    read_latency_s: float = 20e-6
    """From the post of a read to its first byte."""
    max_context_tokens: int = UNLIMITED_CONTEXT
    """Of the model."""


class Listener(ABC):
    """Who hears of a worker."""

    @abstractmethod
    def hear(self, worker: "SimWorker", message: FromEngine) -> None:
        """Its engine says it now."""

    @abstractmethod
    def hear_run(self, worker: "SimWorker", chains: Sequence[Chain], times: Sequence[float]) -> None:
        """At each of these times, the last of which may be before now, it said a token of each of these."""


class SimWorker:
    """One engine."""

    def __init__(
        self,
        worker_id: str,
        number: int,
        spec: WorkerSpec,
        clock: VirtualClock,
        transport: VirtualTransport,
        listener: Listener,
        skip: bool = True,
    ) -> None:
        """`number`: no other worker's, above 0; of those whose steps end in one moment the lowest is first."""
        self.worker_id = worker_id
        self.spec = spec
        self.role = spec.role
        """As its routers know it: it may switch."""
        self.transport = transport
        self.alive = True
        self.draining = False
        """It takes nothing new."""
        self.busy_s = 0.0
        """Spent in steps, of those that have begun and were not skipped or are over."""
        self.num_steps = 0
        self._number = number
        self._clock = clock
        self._listener = listener
        self._skip = skip
        self._runner = BytelessRunner(spec.layout, spec.num_blocks, spec.max_context_tokens)
        self._said: list[FromEngine] = []
        self.core = EngineCore(self._runner, transport, spec.limits, self._said.append, self._wake, clock=clock.time)
        self._turning: ScheduledEvent | None = None
        self._stepping: ScheduledEvent | None = None
        self._idling: ScheduledEvent | None = None
        self._turned_at = 0.0
        self._run: list[float] = []
        """When each step of the run under way ends."""

    def start(self) -> Ready:
        """Turn from now on."""
        self.ready = self.core.start()
        self._wake()
        return self.ready

    def tell(self, *messages: Input) -> None:
        """They have arrived together. Said to one that is gone, they are lost."""
        if self.alive:
            self._interrupt()
            for message in messages:
                self.core.handle(message)
            self._wake()

    def kill(self) -> None:
        """As if its machine had lost power, now."""
        self._interrupt()
        self.alive = False
        for event in (self._turning, self._stepping, self._idling):
            if event is not None:
                event.cancel()
        self.core.close()

    def _wake(self) -> None:
        if self._turning is None and self.alive:
            self._turning = self._clock.after(0.0, self._turn)

    def _turn(self) -> None:
        if self._turning is not None:
            self._turning.cancel()
            self._turning = None
        self._interrupt()
        self.core.handle_posted()
        if self._stepping is None and not (self._skip and self._begin_run()):
            self._begin_step()
        self.core.report()
        self._speak()
        self._turned_at = self._clock.now
        if self._idling is None and not self._run:
            self._idling = self._clock.after(IDLE_TURN_S, self._idle)

    def _idle(self) -> None:
        """It turns if it has not for so long; a run turns when it ends, and then this is asked for again."""
        self._idling = None
        if self._run:
            return
        due = self._turned_at + IDLE_TURN_S
        if due > self._clock.now:
            self._idling = self._clock.at(due, self._idle)
        else:
            self._turn()

    def _speak(self) -> None:
        if self._said:
            said = self._said[:]
            self._said.clear()
            for message in said:
                self._listener.hear(self, message)

    # ------------------------------------------------------------------ one step

    def _begin_step(self) -> None:
        if batch := self.core.begin_step():
            seconds = self.spec.timing.seconds_of(StepWork.of(batch))
            self._end_at(self._clock.now + seconds, seconds, batch)

    def _end_at(self, when: float, seconds: float, batch: list[Chunk]) -> None:
        self.busy_s += seconds
        self._stepping = self._clock.late(when, self._number, self._end_step, batch)

    def _end_step(self, batch: list[Chunk]) -> None:
        self._stepping = None
        self.num_steps += 1
        self.core.end_step(batch, self._runner.execute(batch))
        self._turn()

    # ------------------------------------------------------------------ runs

    def _begin_run(self) -> bool:
        """False when the next step is to be made by itself."""
        uniform_decode, timing = self.core.uniform_decode, self.spec.timing
        if not (steps := uniform_decode.begin()):
            return False
        chains = uniform_decode.sequences
        work = StepWork(streams=len(chains), context_tokens=sum(chain.num_computed + 1 for chain in chains))
        seconds, now = timing.seconds_of(work), self._clock.now
        times = self._run
        while seconds < IDLE_TURN_S:  # else it turns in the middle of the step
            now += seconds
            times.append(now)
            if len(times) == min(steps, MAX_RUN) or not uniform_decode.quiet_until(now):
                break
            work.context_tokens += len(chains)
            seconds = timing.seconds_of(work)
        if not times:
            return False
        self._stepping = self._clock.late(now, self._number, self._end_run)
        return True

    def _end_run(self) -> None:
        self._stepping = None
        self._advance(len(self._run))
        self._turn()

    def _interrupt(self) -> None:
        """Do what of the run has ended before now, and begin the step that is under way."""
        if not self._run:
            return
        assert self._stepping is not None
        self._stepping.cancel()
        done = bisect_left(self._run, self._clock.now)
        ends_at = self._run[done]
        self._advance(done)
        batch = self.core.begin_step()
        assert batch
        self._end_at(ends_at, self.spec.timing.seconds_of(StepWork.of(batch)), batch)

    def _advance(self, steps: int) -> None:
        times, self._run = self._run[:steps], []
        if steps:
            chains = self.core.uniform_decode.sequences
            self.core.uniform_decode.advance(steps, token_of)
            self.num_steps += steps
            self._listener.hear_run(self, chains, times)
