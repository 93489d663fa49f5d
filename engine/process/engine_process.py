"""The engine process: `python -m cluster.launch engine.process.engine_process FD`.

One loop on the main thread handles messages, collects results, starts the next step and sends answers. It never waits
for a slow front (see `message_socket.py`). The runner computes on a second thread, so handshakes do not wait for steps.
The process ends with its front: by the closed socket, or at once by the kernel when the front is killed. With several
tensor-parallel ranks this is rank 0; the others are its children, see `engine/process/ranks.py`.
"""

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue

from cluster.garbage_collection import spare_the_started
from cluster.logs import set_up
from engine.core.engine_core import EngineCore
from engine.core_types import Chunk, SampleResult
from engine.errors import EngineStartError, RankLost
from engine.host.core_allocation import LOOK_EVERY_S, CoreAllocation
from engine.host.memory import belongs_in_file
from engine.messages.from_engine import StartFailed
from engine.model_runner import ModelRunner
from engine.process.assembly import IDLE_TURN_S, draft_of, open_core
from engine.process.fast_path_socket import open_fast_path_socket
from engine.process.front_link import FrontLink, receive_spec
from engine.process.message_socket import MessageSocket
from engine.process.ranks import Ranks, leave, serve, start_failure
from engine.process.runners import open_core_allocation, open_sim_runner, open_torch_runner
from engine.process.spec import EngineSpec, RankSpec
from engine.process.start_up import become_child, own_transport, prepare
from engine.process.weights import open_fetch, open_lender
from engine.process.weights_lender import WeightsLender
from engine.sampling.grammar_gate import GrammarGate
from engine.tensor_parallel.runner import ParallelRunner
from engine.weights.fetch import WeightsFetch
from kvtransfer.errors import TransportUnavailable

log = logging.getLogger(__name__)


def main() -> None:
    """Serve the front at the other end of the socket whose descriptor is the argument."""
    become_child()
    link = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    spec = receive_spec(link)
    front = FrontLink(link)
    ranks: Ranks | None = None
    set_up(spec.role, f"{spec.worker_id}/engine", spec.config)
    try:
        spec.config.refuse_parallel(spec.role)
        if spec.config.tensor_parallel > 1:
            ranks = Ranks(spec, front.wake)  # started before this process lowers its priority, which they would inherit
        prepare(spec.config.of_rank(0))
        core, computer, gate, lender = _start(spec, front, ranks)
    except (EngineStartError, TransportUnavailable, RankLost) as error:
        front.send(StartFailed(str(error) if isinstance(error, EngineStartError) else start_failure(error)))
        front.finish()
        leave(ranks)
        return
    spare_the_started()
    serve(partial(_loop, core, computer, gate, lender, front, ranks), ranks)
    lender.close()
    computer.stop()
    core.close()
    leave(ranks)


class _ComputeThread:
    """Thread on which the runner is made, bound to its cores and used, one batch at a time.

    One thread does all of it, because OpenMP keeps a team of threads for each thread that ever computed. With more of
    them than cores they stop waiting actively, and steps take nearly twice as long.
    """

    def __init__(
        self, spec: EngineSpec, ranks: Ranks | None, wake: Callable[[], None], fetch: WeightsFetch | None
    ) -> None:
        self._spec = spec
        self._fetch = fetch
        self._ranks = ranks
        self._wake = wake
        self._made: Future[ModelRunner] = Future()
        self._batches: SimpleQueue[list[Chunk] | None] = SimpleQueue()
        self._result: tuple[list[Chunk], list[SampleResult] | BaseException] | None = None
        self.running = False
        self._thread = threading.Thread(target=self._run, name="engine-compute", daemon=True)
        self._thread.start()

    def runner(self) -> ModelRunner:
        """Wait until the model is loaded on all ranks; return the runner. Raises EngineStartError or RankLost."""
        if self._ranks is not None:
            self._ranks.wait_for(self._made)
        return self._made.result()

    def start(self, batch: list[Chunk]) -> None:
        assert not self.running
        self.running = True
        self._batches.put(batch)

    def take(self) -> tuple[list[Chunk], list[SampleResult]] | None:
        """Return the finished batch and its results, or None while it runs.

        Raises the runner's exceptions.
        """
        if self._result is None:
            return None
        (batch, sampled), self._result, self.running = self._result, None, False
        if isinstance(sampled, BaseException):
            raise sampled
        return batch, sampled

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop after the running batch, if it ends in time: an interpreter that exits under it would crash."""
        self._batches.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            core_allocation = open_core_allocation(self._spec.config, self._spec.role)
            runner = _make_runner(self._spec, self._ranks, core_allocation, self._fetch)
            self._fetch = None  # lets go of its memory
        except BaseException as error:
            self._made.set_exception(error)
            return
        self._made.set_result(runner)
        while (batch := self._next(runner, core_allocation)) is not None:
            try:
                self._result = batch, runner.execute(batch)
            except BaseException as error:
                self._result = batch, error
            self._wake()

    def _next(self, runner: ModelRunner, core_allocation: CoreAllocation | None) -> list[Chunk] | None:
        """Return the next batch, after moving to the cores that other engines leave; None at the end."""
        while core_allocation is not None:
            if (share := core_allocation.settle()) is not None:
                runner.bind(share.own, share.shared)
            with contextlib.suppress(Empty):
                return self._batches.get(timeout=LOOK_EVERY_S)
        return self._batches.get()


def _loop(
    core: EngineCore,
    computer: _ComputeThread,
    gate: GrammarGate,
    lender: WeightsLender,
    front: FrontLink,
    ranks: Ranks | None,
) -> None:
    while True:
        if ranks is not None:
            ranks.check()
        for message in front.listen(0.0 if core.busy else IDLE_TURN_S):
            if gate.passes(message) and lender.passes(message):
                core.handle(message)
        for offered in lender.answers():
            front.send(offered)
        for message in gate.released():
            core.handle(message)
        core.handle_posted()
        if (computed := computer.take()) is not None:
            core.end_step(*computed)  # its messages wait until the next step has begun
        else:
            front.flush()  # a caller waits for an answer
        if not computer.running and (batch := core.begin_step()):
            computer.start(batch)
        if ranks is None or not ranks.silent:
            core.report()
        front.flush()


def _start(
    spec: EngineSpec, front: FrontLink, ranks: Ranks | None
) -> tuple[EngineCore, _ComputeThread, GrammarGate, WeightsLender]:
    transport = own_transport(spec.config, spec.agent_name)
    fetch = open_fetch(spec)
    computer = _ComputeThread(spec, ranks, front.wake, fetch)
    runner = computer.runner()
    from_peer = fetch is not None and fetch.taken
    del fetch
    if (fast_path := open_fast_path_socket()) is not None:
        front.watch(fast_path.fileno())
    core = open_core(spec, runner, transport, front.send, front.wake, ranks, fast_path)
    front.send(core.start()._replace(gpu=runner.gpu, weights_from_peer=from_peer))
    front.flush()
    return core, computer, GrammarGate(runner.grammars, front.wake), open_lender(spec, runner.info, front.wake)


def _make_runner(
    spec: EngineSpec, ranks: Ranks | None, core_allocation: CoreAllocation | None, fetch: WeightsFetch | None
) -> ModelRunner:
    """Create the runner, bound to its cores."""
    if spec.config.engine == "sim":
        return open_sim_runner(spec.config, belongs_in_file(spec.role))
    if ranks is None:
        draft = draft_of(spec)
        return open_torch_runner(spec.config, spec.role, draft, core_allocation=core_allocation, fetch=fetch)
    rank = RankSpec(spec, 0, ranks.meeting)
    own = open_torch_runner(rank.config, spec.role, rank=rank)
    ranks.met()
    return ParallelRunner(own, ranks.followers, ranks.memory.take)
