"""A worker in virtual time: a real engine whose steps take as long as `timing` says and compute nothing.

It behaves as the engine process (`engine/process/engine_process.py`): messages are handled at once, also during a step;
a step begins as soon as there is something to compute; load is reported at least six times a second.

**Runs.** Uniform decode steps (`engine/core/uniform_decode.py`) happen at once: the run is deferred until its last step
ends, a report is due or a message arrives, whatever is first, and only steps that have ended by then are made. The
visible result is the same, to the bit, as with single steps (`skip=False`; `tests/unit/test_simulator_runs.py`).
"""

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.errors import TandemError, Unavailable
from cluster.process.life import Drain
from cluster.roles import Role
from engine.backends.sim.settings import StepWork, Timing
from engine.core.engine_core import EngineCore
from engine.core.loan_host import EngineLimits
from engine.core_types import Chunk
from engine.core_types import EngineSequence as Chain
from engine.messages.from_engine import CacheChanged, FromEngine, LoadReport, Ready
from engine.messages.to_engine import ToEngine
from kvcache.layout import KvLayout
from kvcache.store.kv_store import KvStore
from loans.in_process import InProcessNetwork
from loans.network import Peer
from sizing.cluster.clock import ScheduledEvent, VirtualClock
from sizing.cluster.runner import UNLIMITED_CONTEXT, BytelessRunner, token_of
from sizing.cluster.transport import VirtualTransport
from worker.front.lent_loans import LentLoans

IDLE_TURN_S = 0.151
"""Longest pause of the loop, slightly late like a real one, so that its report is due by then."""
MAX_RUN = 1024
"""Largest number of steps in a run."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Specification of a worker."""

    role: Role
    layout: KvLayout
    num_blocks: int
    timing: Timing
    limits: EngineLimits
    nic_bytes_per_s: float
    read_latency_s: float = 20e-6
    """Seconds from the post of a read to its first byte."""
    max_context_tokens: int = UNLIMITED_CONTEXT
    """Context of the model."""


class Listener(ABC):
    """Listener to a worker."""

    @abstractmethod
    def receive(self, worker: "SimWorker", message: FromEngine) -> None:
        """Process a message at the time the engine sends it."""

    @abstractmethod
    def hear_run(self, worker: "SimWorker", chains: Sequence[Chain], times: Sequence[float]) -> None:
        """Process a run: at each of these times, the last perhaps in the past, one token for each sequence."""


class SimWorker:
    """One engine."""

    def __init__(
        self,
        worker_id: str,
        number: int,
        spec: WorkerSpec,
        clock: VirtualClock,
        transport: VirtualTransport,
        engines: dict[bytes, InProcessNetwork],
        message_s: float,
        listener: Listener,
        skip: bool = True,
        store: KvStore | None = None,
    ) -> None:
        """Create the worker.

        `number` is unique and above 0; of steps that end at one moment, the lowest is first. `engines` are those of the
        cluster; a message to one arrives `message_s` later.
        """
        self.worker_id = worker_id
        self.spec = spec
        self.role = spec.role
        """Role as its routers know it; it may switch."""
        self.transport = transport
        self.alive = True
        self.requests = Drain()
        """Requests in flight."""
        self.loans = LentLoans(self)
        self.died: asyncio.Future[TandemError] = clock.create_future()
        self.load: LoadReport | None = None
        """Last report of its load."""
        self._watchers: set[Callable[[CacheChanged | LoadReport], None]] = set()
        self.busy_s = 0.0
        """Seconds spent in steps."""
        self.num_steps = 0
        self._number = number
        self._clock = clock
        self._listener = listener
        self._skip = skip
        self._runner = BytelessRunner(spec.layout, spec.num_blocks, spec.max_context_tokens)
        self._outgoing: list[FromEngine] = []
        self.network = VirtualNetwork(engines, worker_id.encode(), self._receive, clock, message_s)
        self.core = EngineCore(
            self._runner,
            transport,
            spec.limits,
            self._outgoing.append,
            self._wake,
            [] if store is None else [store],
            clock=clock.time,
            network=self.network,
        )
        self._turn_event: ScheduledEvent | None = None
        self._stepping: ScheduledEvent | None = None
        self._idling: ScheduledEvent | None = None
        self._last_turn_at = 0.0
        self._run: list[float] = []
        """End of each step of the present run."""

    @property
    def num_loans(self) -> int:
        """Number of loans that it gives, by its last report."""
        return self.load.loans if self.load is not None else 0

    @contextmanager
    def watching(self, watcher: Callable[[CacheChanged | LoadReport], None]) -> Iterator[None]:
        """Call `watcher` with every report within the block."""
        self._watchers.add(watcher)
        try:
            yield
        finally:
            self._watchers.discard(watcher)

    def start(self) -> Ready:
        """Start the loop."""
        self.ready = self.core.start()
        self.peer = Peer(self.worker_id, self.ready.loan_address, self.network.incarnation)
        self._wake()
        return self.ready

    def send(self, *messages: ToEngine) -> None:
        """Deliver messages that arrive together; lost when the worker is gone."""
        if self.alive:
            self._interrupt()
            for message in messages:
                self.core.handle(message)
            self._wake()

    def _receive(self) -> None:
        """Process what another engine sent."""
        if self.alive:
            self._interrupt()
            self.core.handle_posted()
            self._wake()

    def kill(self) -> None:
        """Kill the worker, as by a loss of power."""
        self._interrupt()
        self.alive = False
        self.died.set_result(Unavailable("its machine has lost power"))
        for event in (self._turn_event, self._stepping, self._idling):
            if event is not None:
                event.cancel()
        self.core.close()

    def _wake(self) -> None:
        if self._turn_event is None and self.alive:
            self._turn_event = self._clock.after(0.0, self._turn)

    def _turn(self) -> None:
        if self._turn_event is not None:
            self._turn_event.cancel()
            self._turn_event = None
        self._interrupt()
        self.core.handle_posted()
        if self._stepping is None and not (self._skip and self._begin_run()):
            self._begin_step()
        self.core.report()
        self._speak()
        self._last_turn_at = self._clock.now
        if self._idling is None and not self._run:
            self._idling = self._clock.after(IDLE_TURN_S, self._idle)

    def _idle(self) -> None:
        """Turn after a long pause; a run turns at its end and schedules this again."""
        self._idling = None
        if self._run:
            return
        due = self._last_turn_at + IDLE_TURN_S
        if due > self._clock.now:
            self._idling = self._clock.at(due, self._idle)
        else:
            self._turn()

    def _speak(self) -> None:
        if self._outgoing:
            outgoing = self._outgoing[:]
            self._outgoing.clear()
            for message in outgoing:
                if isinstance(message, LoadReport):
                    self.load = message
                self._listener.receive(self, message)
                if self._watchers and isinstance(message, CacheChanged | LoadReport):
                    for watcher in tuple(self._watchers):
                        watcher(message)

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
        """Begin a run.

        Returns False when the next step must be made by itself.
        """
        uniform_decode, timing = self.core.uniform_decode, self.spec.timing
        if not (steps := uniform_decode.begin()):
            return False
        chains = uniform_decode.sequences
        work = StepWork(streams=len(chains), context_tokens=sum(chain.num_computed + 1 for chain in chains))
        seconds, now = timing.seconds_of(work), self._clock.now
        times = self._run
        while seconds < IDLE_TURN_S:  # otherwise the loop turns in the middle of the step
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
        """Make the steps of the run that have ended, and begin the one in progress."""
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


class VirtualNetwork(InProcessNetwork):
    """The network of one worker. Its peers are never silent: a worker that ends is noticed at once."""

    def __init__(
        self,
        engines: dict[bytes, InProcessNetwork],
        incarnation: bytes,
        wake: Callable[[], object],
        clock: VirtualClock,
        message_s: float,
    ) -> None:
        super().__init__(engines, incarnation, wake, clock.time)
        self._virtual_clock = clock
        self._message_s = message_s

    def deliver(self, to: InProcessNetwork, call: Callable[..., object], *arguments: object) -> None:
        self._virtual_clock.after(self._message_s, super().deliver, to, call, *arguments)

    def beat(self, is_alive: bool) -> None:
        """Do nothing."""

    def quiet_s(self, peer: InProcessNetwork, since: float) -> float:
        return 0.0
