"""Faults that operators inject into a worker, for drills on a live cluster; docs/drills.md says what each one does."""

import asyncio
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

from google.protobuf.text_format import MessageToString

from cluster.errors import Forbidden, InvalidRequest, Unavailable
from engine.config import WorkerConfig
from engine.messages.to_engine import CorruptReads, CutOffPeer, DelayLoans
from engine.process.front.engine_client import EngineClient
from protos import membership_pb2 as pb

log = logging.getLogger(__name__)

MAX_SECONDS = 600.0
MAX_DELAY_MS = 60_000.0
MAX_BLOCKS = 1_000_000
ANSWER_S = 0.05
"""Seconds for the answer to leave before a fault that ends or stops the front."""
REAP_S = 1.0
"""Seconds for a stopper to end after it woke the worker."""
STOPPER = """
import os, select, signal, sys, time
seconds, answer_s, front, *engine = sys.argv[1:]
stopped = [os.pidfd_open(int(pid)) for pid in engine]
for process in stopped:
    signal.pidfd_send_signal(process, signal.SIGSTOP)
print("stopped", flush=True)
if front != "0":
    time.sleep(float(answer_s))
    stopped.append(os.pidfd_open(int(front)))
    signal.pidfd_send_signal(stopped[-1], signal.SIGSTOP)
poll = select.poll()
poll.register(stopped[0], select.POLLIN)
poll.poll(float(seconds) * 1000)  # or until the engine has ended
for process in reversed(stopped):
    try:
        signal.pidfd_send_signal(process, signal.SIGCONT)
    except ProcessLookupError:
        continue  # killed meanwhile
"""
"""Program of the process that stops a worker and wakes it; a stopped worker cannot wake itself."""


class Faults:
    """Faults of one worker.

    Each ends by itself, except a kill.
    """

    def __init__(self, config: WorkerConfig, worker_id: str, engine: EngineClient) -> None:
        self._config = config
        self._worker_id = worker_id
        self._engine = engine
        self._delay_s = 0.0
        self._delayed_until = -math.inf
        self._end_of_corruption: asyncio.TimerHandle | None = None
        if config.faults:
            log.warning("faults is true: whoever reaches this worker's port may kill or stop it")

    async def inject(self, request: pb.InjectRequest) -> None:
        """Begin the fault; a kill begins after the answer has left.

        Raises Forbidden unless the setting `faults` is true, and InvalidRequest.
        """
        if not self._config.faults:
            raise Forbidden(f"is false in the settings of {self._worker_id}: it accepts no faults", "faults")
        log.warning("an operator injects %s", MessageToString(request, as_one_line=True))
        match request.WhichOneof("fault"):
            case "kill":
                self._check_own_processes("kill")
                asyncio.get_running_loop().call_later(ANSWER_S, self._kill)
            case "stop":
                await self._stop(_seconds(request.stop.seconds), request.stop.front)
            case "delay":
                delay_s = _within("delay_ms", request.delay.delay_ms, MAX_DELAY_MS) / 1e3
                seconds = _seconds(request.delay.seconds)
                self._delayed_until, self._delay_s = time.monotonic() + seconds, delay_s
                self._engine.send(DelayLoans(delay_s, seconds))
            case "corrupt":
                self._corrupt(request.corrupt.blocks, _seconds(request.corrupt.seconds))
            case "partition":
                self._cut_off(request.partition.peer, _seconds(request.partition.seconds))
            case _:
                raise InvalidRequest("fault", "must be one of kill, stop, delay, corrupt, partition")

    def frame_delay_s(self) -> float:
        """Return the seconds by which a frame to a router is delayed now."""
        return self._delay_s if time.monotonic() < self._delayed_until else 0.0

    def _check_own_processes(self, fault: str) -> None:
        if not self._engine.processes():
            raise InvalidRequest(fault, "this worker has no engine process of its own, or that process has ended")

    def _kill(self) -> None:
        _send(signal.SIGKILL, self._engine.processes())
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(128 + signal.SIGKILL)  # the first process of a container gets no such signal from inside

    async def _stop(self, seconds: float, front: bool) -> None:
        self._check_own_processes("stop")
        if front and os.getpid() == 1:
            raise InvalidRequest("front", "is the first process of its container, which nothing inside can stop")
        pids = [os.getpid() if front else 0, *self._engine.processes()]
        command = [sys.executable, "-I", "-S", "-c", STOPPER, str(seconds), str(ANSWER_S), *map(str, pids)]
        stopper, begun = await asyncio.to_thread(_start_stopper, command)
        asyncio.get_running_loop().call_later(seconds + REAP_S, stopper.poll)  # it leaves no zombie
        if not begun:
            raise Unavailable("the engine could not be stopped; the worker's log has the reason")

    def _corrupt(self, num_blocks: int, seconds: float) -> None:
        if not 1 <= num_blocks <= MAX_BLOCKS:
            raise InvalidRequest("blocks", f"must be in [1, {MAX_BLOCKS}], not {num_blocks}")
        if self._end_of_corruption is not None:
            self._end_of_corruption.cancel()
        self._engine.send(CorruptReads(num_blocks))
        loop = asyncio.get_running_loop()
        self._end_of_corruption = loop.call_later(seconds, self._engine.send, CorruptReads(0))

    def _cut_off(self, peer: str, seconds: float) -> None:
        if peer in ("", self._worker_id):
            raise InvalidRequest("peer", f"must be the id of another worker, not {peer!r}")
        self._engine.send(CutOffPeer(peer, seconds))


def _start_stopper(command: list[str]) -> tuple["subprocess.Popen[str]", bool]:
    """Start it and return it, with whether it has stopped the engine."""
    stopper = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a signal for the worker's group must not end it: nothing else wakes the worker
    )
    assert stopper.stdout is not None
    with stopper.stdout as output:
        return stopper, bool(output.readline())


def _send(signum: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue  # ended meanwhile


def _seconds(value: float) -> float:
    return _within("seconds", value, MAX_SECONDS)


def _within(field: str, value: float, limit: float) -> float:
    if not 0 < value <= limit:  # also refuses what is no number
        raise InvalidRequest(field, f"must be above 0 and at most {limit:g}, not {value:g}")
    return value
