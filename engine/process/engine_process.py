"""The engine process of engines under Tandem's scheduler: `python -m cluster.launch engine.process.engine_process FD`.

`engine/process/engine_loop.py` has its loop. The runner computes on a second thread, so handshakes do not wait for
steps.
"""

from functools import partial

from engine.core.engine_core import EngineCore
from engine.engine_kind import runner_kind_of
from engine.host.core_allocation import LOOK_EVERY_S, CoreAllocation
from engine.model.model_dir import ModelDir
from engine.model_runner import ModelRunner
from engine.process.assembly import open_bare_core, open_core, open_network
from engine.process.compute_thread import ComputeThread
from engine.process.engine_loop import OpenedEngine, Steps, run_engine
from engine.process.front_link import FrontLink
from engine.process.ranks.ranks import Ranks
from engine.process.spec import EngineSpec
from engine.process.start_up import own_transport
from engine.process.warm_up import WarmUp, turn_of
from engine.sampling.grammar_gate import GrammarGate
from kvtransfer.transport import Transport


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
