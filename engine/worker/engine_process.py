"""The engine's own process: `python -m engine.worker.engine_process FD`.

One loop on the main thread: what arrived, what was computed, what to compute next, what is to be said. It never waits
for a slow front (see `link.py`). The runner computes on a second thread, so that handshakes do not wait for steps.
It dies with its front: by the closed socket, or at once by the kernel when the front is killed.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from cluster.garbage import spare_the_started
from engine.core import EngineCore
from engine.errors import EngineStartError
from engine.messages import FromEngine, StartFailed, ToEngine
from engine.runner import Runner
from engine.vocabulary import Chunk, Sampled
from engine.worker.assembly import IDLE_TURN_S, draft_of, open_core, open_sim_runner
from engine.worker.config import WorkerConfig
from engine.worker.cores import stay_on, step_back
from engine.worker.link import LinkWaiter, MessageLink
from engine.worker.spec import EngineSpec
from kvtransfer.errors import TransportUnavailable
from kvtransfer.registry import open_transport
from kvtransfer.sysfs import use_nearest_nics

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
SWITCH_S = 0.0005
"""How long the runner's Python may hold the interpreter while a message waits."""


class _Front:
    """The front as the engine sees it: what is said in one turn of the loop leaves together."""

    def __init__(self, link: MessageLink) -> None:
        self._link = link
        self._waiter = LinkWaiter(link)
        self._said: list[FromEngine] = []
        self.wake = self._waiter.wake

    def say(self, message: FromEngine) -> None:
        self._said.append(message)

    def send(self) -> None:
        if self._said:
            said, self._said = self._said, []
            self._link.send(said)

    def listen(self, timeout_s: float) -> list[ToEngine]:
        """What has arrived after at most `timeout_s`, in order. Raises EOFError when the front is gone."""
        if timeout_s or self._link.has_unsent:
            self._waiter.wait(timeout_s)
        return [message for batch in self._link.receive() for message in batch]

    def finish(self, timeout_s: float = 5.0) -> None:
        """Send what is left, for as long as the front takes it."""
        self.send()
        give_up_at = time.monotonic() + timeout_s
        while self._link.has_unsent and time.monotonic() < give_up_at:
            self._waiter.wait(0.1)


def main() -> None:
    """Serve the front at the other end of the socket whose descriptor is the argument."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the front decides
    sys.setswitchinterval(SWITCH_S)
    link = MessageLink(socket.socket(fileno=int(sys.argv[1])))
    spec = _receive_spec(link)
    front = _Front(link)
    try:
        _prepare(spec.config)
        core, computer = _start(spec, front)
    except (EngineStartError, TransportUnavailable) as error:
        cause = str(error) if isinstance(error, EngineStartError) else f"transport: {error}"
        front.say(StartFailed(cause))
        front.finish()
        return
    spare_the_started()
    # The front is gone, by its own end or by ours: either way there is nobody left to serve.
    with contextlib.suppress(EOFError, ConnectionError):
        _loop(core, computer, front)
    computer.stop()
    core.close()


class _Computer:
    """A thread on which the runner is made, bound to its cores and used, one batch at a time.

    All of it on one thread: OpenMP keeps a team of threads for each thread that ever computed, and once there are more
    of them than cores they stop waiting actively: steps took nearly twice as long.
    """

    def __init__(self, spec: EngineSpec, wake: Callable[[], None]) -> None:
        self._spec = spec
        self._wake = wake
        self._made: Future[Runner] = Future()
        self._batches: SimpleQueue[list[Chunk] | None] = SimpleQueue()
        self._result: tuple[list[Chunk], list[Sampled] | BaseException] | None = None
        self.running = False
        self._thread = threading.Thread(target=self._run, name="engine-compute", daemon=True)
        self._thread.start()

    def runner(self) -> Runner:
        """Waits until the model is loaded. Raises EngineStartError."""
        return self._made.result()

    def start(self, batch: list[Chunk]) -> None:
        assert not self.running
        self.running = True
        self._batches.put(batch)

    def take(self) -> tuple[list[Chunk], list[Sampled]] | None:
        """The batch that was started and what it sampled; None while it runs. Raises what the runner raised."""
        if self._result is None:
            return None
        (batch, sampled), self._result, self.running = self._result, None, False
        if isinstance(sampled, BaseException):
            raise sampled
        return batch, sampled

    def stop(self, timeout_s: float = 5.0) -> None:
        """After the batch that runs, if that is over in time: an interpreter that ends under it would crash."""
        self._batches.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            runner = _make_runner(self._spec)
            config = self._spec.config
            own = config.cores or ()
            if _threads(config) == len(own):
                runner.bind(own, config.shared_cores)
        except BaseException as error:
            self._made.set_exception(error)
            return
        self._made.set_result(runner)
        while (batch := self._batches.get()) is not None:
            try:
                self._result = batch, runner.execute(batch)
            except BaseException as error:
                self._result = batch, error
            self._wake()


def _loop(core: EngineCore, computer: _Computer, front: _Front) -> None:
    while True:
        for message in front.listen(0.0 if core.busy else IDLE_TURN_S):
            core.handle(message)
        core.handle_posted()
        if (computed := computer.take()) is not None:
            core.end_step(*computed)  # what it says waits until the next step has begun
        else:
            front.send()  # somebody waits for an answer
        if not computer.running and (batch := core.begin_step()):
            computer.start(batch)
        core.report()
        front.send()


def _receive_spec(link: MessageLink) -> EngineSpec:
    waiter = LinkWaiter(link)
    while not (messages := link.receive()):
        waiter.wait(1.0)
    spec: EngineSpec = messages[0]
    return spec


def _prepare(config: WorkerConfig) -> None:
    """What must be set before numerical libraries are loaded."""
    step_back(config.niceness)
    if config.cores:
        stay_on(config.cores)
    threads = _threads(config)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"


def _threads(config: WorkerConfig) -> int:
    return config.threads or len(config.cores or os.sched_getaffinity(0))


def _start(spec: EngineSpec, front: _Front) -> tuple[EngineCore, _Computer]:
    config = spec.config
    if config.engine == "torch" and config.device != "cpu" and (chosen := use_nearest_nics(os.environ)) is not None:
        log.info(chosen)
    host = config.advertise_host or config.host
    transport = open_transport(config.transport, spec.agent_name, host, config.strict_lanes)
    computer = _Computer(spec, front.wake)
    runner = computer.runner()
    core = open_core(spec, runner, transport, front.say, front.wake)
    front.say(core.start())
    front.send()
    return core, computer


def _make_runner(spec: EngineSpec) -> Runner:
    config, draft, variant = spec.config, draft_of(spec), spec.config.variant()
    if config.engine == "sim":
        return open_sim_runner(config)
    try:
        from engine.torch.runner import TorchRunner, set_threads
    except ModuleNotFoundError as error:
        raise EngineStartError("engine", f"{error}; install tandem-serving[worker]") from None

    set_threads(_threads(config))
    return TorchRunner(
        config.model, config.dtype, config.block_tokens, config.kv_bytes, config.backend, config.device, draft, variant
    )


if __name__ == "__main__":
    main()
