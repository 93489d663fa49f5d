"""The engine's own process: `python -m engine.worker.engine_process FD`.

The step loop has the main thread. One thread receives, one sends, so that the loop never waits for the front.
It dies with its front: by the closed socket, or at once by the kernel when the front is killed.
"""

import ctypes
import os
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue

from engine.core import CoreLimits, EngineCore
from engine.errors import EngineStartError
from engine.messages import FromEngine, StartFailed
from engine.runner import Runner
from engine.scheduler import StepBudget
from engine.worker.config import Role, WorkerConfig
from kvtransfer.errors import TransportUnavailable
from kvtransfer.registry import open_transport

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """First message to the process."""

    config: WorkerConfig
    role: Role
    agent_name: str


class _Outbox:
    """Messages of one turn of the loop leave together."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pending: list[FromEngine] = []
        self._batches: SimpleQueue[list[FromEngine] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="engine-outbox", daemon=True)
        self._thread.start()

    def add(self, message: FromEngine) -> None:
        self._pending.append(message)

    def flush(self) -> None:
        if self._pending:
            self._batches.put(self._pending)
            self._pending = []

    def close(self) -> None:
        self.flush()
        self._batches.put(None)
        self._thread.join(timeout=5)

    def _send(self) -> None:
        try:
            while (batch := self._batches.get()) is not None:
                self._connection.send(batch)
        except OSError:
            return  # the front is gone; the receiving thread ends the process


def main() -> None:
    """Serve the front at the other end of the socket whose descriptor is the argument."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the front decides
    connection: Connection = Connection(int(sys.argv[1]))
    spec: EngineSpec = connection.recv()
    outbox = _Outbox(connection)
    try:
        _prepare(spec.config)
        core = _start(spec, outbox)
    except (EngineStartError, TransportUnavailable) as error:
        outbox.add(StartFailed(str(error)))
        outbox.close()
        return
    threading.Thread(target=_receive, args=(connection, core), name="engine-inbox", daemon=True).start()
    while core.receive():
        core.step()
        outbox.flush()
    core.close()
    outbox.close()


def _receive(connection: Connection, core: EngineCore) -> None:
    try:
        while True:
            for message in connection.recv():
                core.post(message)
    except (EOFError, OSError):
        core.post(None)


def _prepare(config: WorkerConfig) -> None:
    """What must be set before numerical libraries are loaded."""
    if config.cores:
        try:
            os.sched_setaffinity(0, config.cores)
        except OSError:
            raise EngineStartError("cores", f"this machine does not have all of {list(config.cores)}") from None
    threads = _threads(config)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"


def _threads(config: WorkerConfig) -> int:
    return config.threads or len(config.cores or os.sched_getaffinity(0))


def _start(spec: EngineSpec, outbox: _Outbox) -> EngineCore:
    transport = open_transport(spec.config.transport, spec.agent_name)
    runner = _make_runner(spec.config)
    budget = StepBudget(spec.config.max_batch_tokens, spec.config.prefill_chunk(spec.role))
    limits = CoreLimits(budget, max_queued_loans=spec.config.max_queued_loans)
    core = EngineCore(runner, transport, limits, outbox.add)
    outbox.add(core.start())
    outbox.flush()
    return core


def _make_runner(config: WorkerConfig) -> Runner:
    kv_bytes = config.kv_memory_mib << 20
    if config.engine == "sim":
        from engine.sim.runner import sim_runner

        return sim_runner(config.model, config.block_tokens, kv_bytes, config.sim_step_ms / 1e3)
    from engine.torch.runner import TorchRunner, set_threads

    set_threads(_threads(config))
    return TorchRunner(config.model, config.dtype, config.block_tokens, kv_bytes)


if __name__ == "__main__":
    main()
