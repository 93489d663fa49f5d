"""The engine process of a vLLM worker: `python -m cluster.launch engine.process.vllm_process FD`.

It runs in vLLM's own environment, where Tandem is installed without its dependencies. One loop on the main thread
handles messages, schedules and sends answers, as in `engine/process/engine_process.py`; a second thread, on which vLLM
was made, executes the batches.
"""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from cluster.garbage_collection import spare_the_started
from cluster.logs import set_up
from engine.config import step_budget
from engine.core.engine_core import EngineLimits
from engine.errors import EngineStartError, RankLost
from engine.kv.rows import Allocate, private_rows
from engine.kv.store.opening import open_store
from engine.messages.from_engine import StartFailed
from engine.process.assembly import IDLE_TURN_S
from engine.process.fast_path_socket import open_fast_path_socket
from engine.process.front_link import FrontLink, receive_spec
from engine.process.message_socket import MessageSocket
from engine.process.ranks import Ranks, leave, serve, start_failure
from engine.process.spec import EngineSpec, RankSpec
from engine.process.start_up import become_child, own_transport, prepare
from engine.process.vllm_start import StartedVllm, last_cause, prepare_vllm, start_vllm
from engine.sampling.grammar_gate import GrammarGate
from engine.tensor_parallel.gathering import GatheredBlocks
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
            ranks = Ranks(spec, front.wake)
        prepare(spec.config.of_rank(0))
        prepare_vllm(spec.config.of_rank(0))
        transport = own_transport(spec.config, spec.agent_name)
        computer = _ComputeThread(spec, ranks, front.wake)
        started = computer.started()
        fast_path = open_fast_path_socket()
        core = _open_core(spec, started, transport, front, fast_path, ranks)
        gate = GrammarGate(started.grammars, front.wake)
    except (EngineStartError, TransportUnavailable, RankLost) as error:
        front.send(StartFailed(str(error) if isinstance(error, EngineStartError) else start_failure(error)))
        front.finish()
        if ranks is not None:
            ranks.close()
        os._exit(0)  # threads of a half-started vLLM may hang
    if fast_path is not None:
        front.watch(fast_path.fileno())
    front.send(core.start()._replace(gpu=started.gpu))
    front.flush()
    spare_the_started()
    serve(partial(_loop, core, computer, gate, front, ranks), ranks)
    computer.stop()
    core.close()
    leave(ranks)


class _ComputeThread:
    """Thread that makes vLLM's engine and executes its batches, one at a time."""

    def __init__(self, spec: EngineSpec, ranks: Ranks | None, wake: Callable[[], None]) -> None:
        self._spec = spec
        self._ranks = ranks
        self._wake = wake
        self._started: Future[StartedVllm] = Future()
        self._batches: SimpleQueue[Any] = SimpleQueue()
        self._result: tuple[Any, Any] | None = None
        self.running = False
        self._thread = threading.Thread(target=self._run, name="vllm-compute", daemon=True)
        self._thread.start()

    def started(self) -> StartedVllm:
        """Wait until the model is loaded on all ranks.

        Raises EngineStartError or RankLost.
        """
        if self._ranks is not None:
            self._ranks.wait_for(self._started)
            self._ranks.met()
        return self._started.result()

    def start(self, batch: Any) -> None:
        assert not self.running
        self.running = True
        self._batches.put(batch)

    def take(self) -> tuple[Any, Any] | None:
        """Return the finished batch and its result, or None while it runs.

        Raises what vLLM raised.
        """
        if self._result is None:
            return None
        (batch, computed), self._result, self.running = self._result, None, False
        if isinstance(computed, BaseException):
            raise computed
        return batch, computed

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop after the running batch, if it ends in time."""
        self._batches.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        rank = RankSpec(self._spec, 0, self._ranks.meeting) if self._ranks is not None else None
        try:
            started = start_vllm(self._spec.config, self._spec.role, rank)
        except EngineStartError as error:
            self._started.set_exception(error)
            return
        except Exception as error:
            log.exception("vLLM did not start")
            self._started.set_exception(EngineStartError("engine", f"vLLM did not start: {last_cause(error)}"))
            return
        from engine.backends.vllm.rank_executor import BatchRunner

        followers = self._ranks.followers if self._ranks is not None else ()
        runner = BatchRunner(started.engine.model_executor, started.memory, followers)
        self._started.set_result(started)
        while (batch := self._batches.get()) is not None:
            try:
                self._result = batch, runner.execute(batch)
            except BaseException as error:
                self._result = batch, error
            self._wake()


def _open_core(
    spec: EngineSpec, started: StartedVllm, transport: Any, front: FrontLink, fast_path: Any, ranks: Ranks | None
) -> Any:
    from engine.backends.vllm.core import VllmCore

    config = spec.config
    limits = EngineLimits(
        step_budget(config, spec.role, started.gpu),
        max_queued_loans=config.max_queued_loans,
        reserve_output_tokens=config.reserve_output_tokens,
        read_silence_s=config.peer_silence_s,
    )
    layout = started.memory.layout
    followers = ranks.followers if ranks is not None else ()
    allocate: Allocate = private_rows
    if ranks is not None:
        memory, allocate = started.memory, ranks.memory.take
        memory.gathered = GatheredBlocks(memory.part, memory.read_parts, followers, allocate)
    store = open_store(config, layout, layout.fingerprint(started.info.weights_fingerprint), allocate)
    return VllmCore(
        started.engine,
        started.memory,
        started.block_pool,
        started.info,
        started.lora,
        transport,
        limits,
        front.send,
        front.wake,
        fast_path,
        followers,
        store,
    )


def _loop(core: Any, computer: _ComputeThread, gate: GrammarGate, front: FrontLink, ranks: Ranks | None) -> None:
    while True:
        if ranks is not None:
            ranks.check()
        for message in front.listen(0.0 if core.busy else IDLE_TURN_S):
            if gate.passes(message):
                core.handle(message)
        for message in gate.released():
            core.handle(message)
        core.handle_posted()
        if (computed := computer.take()) is not None:
            core.end_step(*computed)  # its messages wait until the next step has begun
        else:
            front.flush()  # a caller waits for an answer
        if not computer.running and (batch := core.begin_step()) is not None:
            computer.start(batch)
        if ranks is None or not ranks.silent:
            core.report()
        front.flush()
