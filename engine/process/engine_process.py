"""The engine process of engines under Tandem's scheduler: `python -m cluster.launch engine.process.engine_process FD`.

`engine/process/engine_loop.py` has its loop. The runner computes on a second thread, so handshakes do not wait for
steps.

Thread on which an engine's model is made and its batches are computed, beside the loop that handles messages.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from engine.core.engine_core import EngineCore
from engine.engine_kind import runner_kind_of
from engine.host.cores import LOOK_EVERY_S, CoreAllocation
from engine.model.model_dir import ModelDir
from engine.model_runner import ModelRunner
from engine.process.assembly import open_bare_core, open_core, open_network
from engine.process.engine_loop import OpenedEngine, Steps, WarmUp, run_engine, turn_of
from engine.process.front_link import FrontLink
from engine.process.ranks.ranks import Ranks
from engine.process.spec import EngineSpec
from engine.process.start_up import own_transport
from engine.sampling.grammar_gate import GrammarGate
from kvtransfer.transport import Transport

Result = TypeVar("Result")
STOP_S = 5.0
"""Seconds for the running call to end when the thread is stopped: an interpreter that exits under it would crash."""


@dataclass(frozen=True, slots=True)
class _Call:
    tag: Any
    compute: Callable[[], Any]


class ComputeThread(Generic[Result]):
    """Thread that makes something and then performs calls, in the order in which they are given.

    One thread does all of it, because OpenMP keeps a team of threads for each thread that ever computed. With more of
    them than cores they stop waiting actively, and steps take nearly twice as long.
    """

    def __init__(
        self,
        make: Callable[[], Result],
        wake: Callable[[], None],
        idle: Callable[[], None] | None = None,
        look_every_s: float = 1.0,
    ) -> None:
        """Start the thread, which calls `make` first.

        `wake` is called on it after each call. `idle` is called on it before each call, and every `look_every_s`
        seconds while it waits for one.
        """
        self._make, self._wake, self._idle, self._look_every_s = make, wake, idle, look_every_s
        self._made: Future[Result] = Future()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self.num_pending = 0
        """Number of calls whose results were not taken."""
        self._thread = threading.Thread(target=self._run, name="engine-compute", daemon=True)
        self._thread.start()

    def made(self) -> Result:
        """Wait until it is made, and return it.

        Raises what `make` raised.
        """
        return self._made.result()

    def submit(self, tag: Any, compute: Callable[[], Any]) -> None:
        """Perform `compute` after all earlier calls; `take` returns its result with `tag`."""
        self.num_pending += 1
        self._calls.put(_Call(tag, compute))

    def take(self) -> tuple[Any, Any] | None:
        """Return the tag and the result of the next finished call; None while it runs.

        Raises what the call raised.
        """
        if self._results.empty():  # only this method takes from it
            return None
        tag, result = self._results.get_nowait()
        self.num_pending -= 1
        if isinstance(result, BaseException):
            raise result
        return tag, result

    def stop(self) -> None:
        """Stop after the calls given so far, if these end in time."""
        self._calls.put(None)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            made = self._make()
        except BaseException as error:
            self._made.set_exception(error)
            return
        self._made.set_result(made)
        del made
        while (call := self._next()) is not None:
            try:
                result = call.compute()
            except BaseException as error:
                result = error
            self._results.put((call.tag, result))
            del call, result  # nothing is kept alive while the thread waits
            self._wake()

    def _next(self) -> _Call | None:
        while self._idle is not None:
            self._idle()
            with contextlib.suppress(Empty):
                return self._calls.get(timeout=self._look_every_s)
        return self._calls.get()


def main() -> None:
    """Serve the front at the other end of the socket whose descriptor is the argument."""
    run_engine(_open)


class _Maker:
    """Maker of the runner, bound to its cores; used on the compute thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._kind = spec, runner_kind_of(spec.config.engine)
        self._allocation: CoreAllocation | None = None
        self._runner: ModelRunner | None = None

    def make(self) -> ModelRunner:
        self._allocation = self._kind.open_core_allocation(self._spec.config, self._spec.role)
        self._runner = self._kind.open_runner(self._spec.config, self._spec.role, self._allocation)
        return self._runner

    def settle(self) -> None:
        """Move to the cores that other engines leave."""
        if self._allocation is not None and (share := self._allocation.settle()) is not None:
            assert self._runner is not None
            self._runner.bind(share.own, share.shared)


class _Steps(Steps):
    """Steps of Tandem's own scheduler, one at a time."""

    def __init__(self, core: EngineCore, runner: ModelRunner, thread: ComputeThread[ModelRunner]) -> None:
        self._core, self._runner, self._thread = core, runner, thread

    @property
    def ready(self) -> bool:
        return self._core.busy

    def begin(self) -> None:
        if not self._thread.num_pending and (batch := self._core.begin_step()):
            self._thread.submit(batch, partial(self._runner.execute, batch))

    def end(self) -> bool:
        if (computed := self._thread.take()) is None:
            return False
        self._core.end_step(*computed)
        return True

    def stop(self) -> None:
        self._thread.stop()


def _open(spec: EngineSpec, front: FrontLink, ranks: Ranks | None) -> OpenedEngine:
    transport = own_transport(spec.config, spec.agent_name)
    maker = _Maker(spec)
    thread = ComputeThread(maker.make, front.wake, maker.settle, LOOK_EVERY_S)
    runner = thread.made()
    warm_up_s = _warm_up(spec, front, runner, thread, transport)
    core = open_core(spec, runner, transport, front.send, front.wake, open_network(spec, front))
    return OpenedEngine(
        core,
        _Steps(core, runner, thread),
        core.start()._replace(gpu=runner.gpu, warm_up_s=warm_up_s),
        GrammarGate(runner.grammars, front.wake),
    )


def _warm_up(
    spec: EngineSpec,
    front: FrontLink,
    runner: ModelRunner,
    thread: ComputeThread[ModelRunner],
    transport: Transport,
) -> float:
    """Warm up the runner and its thread; return the seconds that it took.

    Raises EngineStartError.
    """
    if not runner_kind_of(spec.config.engine).warms_up:
        return 0.0
    has_tokenizer = ModelDir.open(spec.config.model).has_tokenizer
    warming = WarmUp(runner.info, runner.layout.block_tokens, runner.pool.num_blocks, has_tokenizer)
    core = open_bare_core(spec, runner, transport, warming.emit, front.wake)
    return warming.run(core, _Steps(core, runner, thread), turn_of(front, None))
