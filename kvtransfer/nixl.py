"""The `nixl` transport: one-sided reads by NIXL over UCX (RDMA verbs, shared memory, CUDA IPC, TCP).

One thread owns all posting and polling, because posting a shared-memory read blocks until the bytes are copied,
and because NIXL serialises calls anyway. It posts one read per peer at a time, so a peer that falls silent holds
up only its own queue. NIXL cannot abort a posted read: it is quiet when it is done, failed, or the agent is gone.
"""

import contextlib
import json
import os
import queue
import threading
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

from kvtransfer.errors import EndpointMismatch, PeerGone, TransferError, TransportUnavailable
from kvtransfer.transport import AnyPool, DevicePool, Peer, Span, Transport, check_spans
from kvtransfer.ucx_lanes import LaneLog, process_lane_log

FORMAT = "tandem-nixl-1"
CLOSED = "the transport was closed"
SPIN_S = 200e-6
"""Poll without pause for so long after a post; then sleep between polls, not to take a core from the engine."""
POLL_S = 100e-6
MAX_POLL_S = 2e-3
"""The longer a read takes, the less often it is asked after; a silent peer must not keep a core busy."""
PROGRESS_DELAY_US = 100_000
PACKAGES = ("nixl_cu12", "nixl_cu13")
"""NIXL's package is named for the CUDA it was built for; without a GPU either will do."""
_construction = threading.Lock()

MemoryKind = Literal["DRAM", "VRAM"]


@dataclass(frozen=True, slots=True)
class _Memory:
    """Where a pool lies, in NIXL's words."""

    base: int
    num_bytes: int
    kind: MemoryKind = "DRAM"
    device: int = 0

    @classmethod
    def of(cls, pool: AnyPool) -> "_Memory":
        if isinstance(pool, DevicePool):
            return cls(pool.address, pool.num_bytes, "VRAM", pool.device)
        return cls(pool.memory.ctypes.data, pool.num_bytes)

    def fields(self) -> dict[str, Any]:
        """Of an endpoint; main memory goes without saying."""
        where = {"kind": self.kind, "device": self.device} if self.kind != "DRAM" else {}
        return {"base": self.base, "bytes": self.num_bytes} | where


@dataclass(slots=True)
class _Job:
    spans: tuple[Span, ...]
    """Offsets are addresses."""
    source: _Memory
    future: "Future[None]"
    handle: Any = None
    posted_at: float = 0.0


@dataclass(slots=True)
class _Lane:
    """The queue of one peer; at most its head is posted."""

    queued: deque[_Job] = field(default_factory=deque)
    posted: _Job | None = None


def _make_agent(name: str) -> Any:
    """An agent whose progress thread sleeps until UCX has something for it.

    NIXL's Python class fixes that thread's delay at 0, which polls without pause: a whole core, taken from the engine
    that is pinned to it (a read over TCP then takes ten times as long). The delay bounds only how long an event
    without a wake-up may wait.
    """
    _api: Any = _module("_api")
    _bindings: Any = _module("_bindings")

    class SleepyConfig(_bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, key: str, value: object) -> None:
            super().__setattr__(key, PROGRESS_DELAY_US if key == "pthrDelay" else value)

    with _construction:
        original = _bindings.nixlAgentConfig
        _bindings.nixlAgentConfig = SleepyConfig
        try:
            return _api.nixl_agent(name, _api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
        finally:
            _bindings.nixlAgentConfig = original


def _module(name: str) -> ModuleType:
    """A module of NIXL's package. Raises ImportError when none is installed."""
    package = next((package for package in PACKAGES if find_spec(package) is not None), PACKAGES[0])
    return import_module(f"{package}.{name}")


class NixlPeer(Peer):
    def __init__(self, name: str, memory: _Memory, log: LaneLog) -> None:
        self.name = name
        self.memory = memory
        self._log = log

    @property
    def lanes(self) -> tuple[str, ...]:
        return self._log.lanes()


class NixlTransport(Transport):
    name = "nixl"

    def __init__(self, agent_name: str) -> None:
        """`agent_name` must be unique among all processes that will ever meet.

        Raises TransportUnavailable when NIXL or its UCX backend does not start.
        """
        self._log = process_lane_log()
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            self._agent: Any = _make_agent(agent_name)
        except Exception as error:  # NIXL raises its own types, and plain RuntimeError
            raise TransportUnavailable(f"NIXL does not start: {error}") from error
        if "UCX" not in self._agent.backends:
            raise TransportUnavailable("NIXL has no UCX backend here")
        self._lock = threading.Lock()  # NIXL's agent is not thread-safe; connect and read come from other threads
        self._peers: dict[bytes, NixlPeer] = {}
        self._pool: AnyPool | None = None
        self._memory = _Memory(0, 0)
        self._registration: Any = None
        self._inbox: queue.SimpleQueue[tuple[str, _Job] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()  # orders `read` against `close`: nothing is queued after the stop marker
        self._closed = False
        self._in_flight: list[_Job] = []  # what was posted when the thread stopped
        self._thread = threading.Thread(target=self._run, name="nixl-reads", daemon=True)

    def register(self, pool: AnyPool) -> bytes:
        """Takes pools in main memory and, where UCX has its CUDA modules, on a GPU."""
        assert self._pool is None
        self._pool = pool
        memory = self._memory = _Memory.of(pool)
        try:
            self._registration = self._agent.register_memory(
                [(memory.base, memory.num_bytes, memory.device, "")], memory.kind
            )
        except Exception as error:  # NIXL's own types
            raise TransportUnavailable(
                f"NIXL cannot register {memory.num_bytes} bytes of {memory.kind}: {error}"
            ) from error
        self._thread.start()
        metadata = b64encode(self._agent.get_agent_metadata()).decode()
        return json.dumps({"format": FORMAT, **memory.fields(), "metadata": metadata}).encode()

    def connect(self, endpoint: bytes) -> NixlPeer:
        bindings = _module("_bindings")
        unusable = (bindings.nixlInvalidParamError, bindings.nixlMismatchError, bindings.nixlNotFoundError)
        memory, metadata = _parse(endpoint)
        with self._lock:
            if (known := self._peers.get(endpoint)) is not None:
                return known
            if self._agent is None:
                raise TransferError(CLOSED)
            try:
                name = self._agent.add_remote_agent(metadata).decode()
            except unusable as error:
                raise EndpointMismatch(f"NIXL cannot use the peer's metadata: {error}") from error
            except Exception as error:
                raise PeerGone(f"cannot reach the peer: {error}") from error
            peer = self._peers[endpoint] = NixlPeer(name, memory, self._log)
        return peer

    def read(self, peer: Peer, spans: Sequence[Span]) -> "Future[None]":
        assert isinstance(peer, NixlPeer)
        assert self._pool is not None
        local, remote = self._memory, peer.memory
        check_spans(spans, local.num_bytes, remote.num_bytes)
        absolute = tuple(Span(local.base + s.local_offset, remote.base + s.remote_offset, s.length) for s in spans)
        job = _Job(absolute, remote, Future())
        with self._closing:
            if self._closed:
                job.future.set_exception(TransferError(CLOSED))
            else:
                self._inbox.put((peer.name, job))
        return job.future

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._destroy_agent()
        in_flight, self._in_flight = self._in_flight, []
        for job in in_flight:  # only now is their memory nobody's but the pool's
            job.future.set_exception(TransferError(CLOSED))

    def _destroy_agent(self) -> None:
        """What stops a read whose peer is silent. Its handles refer to the agent, so they go first."""
        for job in self._in_flight:
            job.handle = None
        if self._agent is not None and self._registration is not None:
            with contextlib.suppress(Exception):  # NIXL's own types; the agent's end deregisters as well
                self._agent.deregister_memory(self._registration)
        self._registration = self._agent = None

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        lanes: dict[str, _Lane] = {}
        while self._take(lanes):
            for name, lane in lanes.items():
                if lane.posted is not None:
                    self._poll(lane)
                if lane.posted is None and lane.queued:
                    self._post(name, lane)
        self._stop(lanes)

    def _take(self, lanes: dict[str, _Lane]) -> bool:
        """Move new jobs into their lanes; sleep when there is nothing to do. False: the transport closes."""
        posted = [lane.posted for lane in lanes.values() if lane.posted is not None]
        busy = bool(posted) or any(lane.queued for lane in lanes.values())
        newest = max((job.posted_at for job in posted), default=0.0)
        waiting = time.monotonic() - newest
        pause = 0.0 if waiting < SPIN_S else min(max(POLL_S, waiting / 20), MAX_POLL_S)
        timeout = None if not busy else pause
        while True:
            try:
                item = self._inbox.get(timeout=timeout) if timeout != 0.0 else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                return False
            lanes.setdefault(item[0], _Lane()).queued.append(item[1])
            timeout = 0.0

    def _post(self, peer: str, lane: _Lane) -> None:
        job = lane.queued.popleft()
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            with self._lock:
                local = self._descriptors(self._memory, [(span.local_offset, span.length) for span in job.spans])
                remote = self._descriptors(job.source, [(span.remote_offset, span.length) for span in job.spans])
                job.handle = self._agent.initialize_xfer("READ", local, remote, peer)
                state = self._agent.transfer(job.handle)
        except Exception as error:
            self._finish(lane, job, PeerGone(f"{peer}: {error}"))
            return
        job.posted_at = time.monotonic()
        lane.posted = job
        self._settle(lane, job, state)

    def _descriptors(self, memory: _Memory, pieces: list[tuple[int, int]]) -> Any:
        """NIXL's list of (address, length) pieces."""
        return self._agent.get_xfer_descs([(*piece, memory.device) for piece in pieces], memory.kind)

    def _poll(self, lane: _Lane) -> None:
        job = lane.posted
        assert job is not None
        try:
            with self._lock:
                state = self._agent.check_xfer_state(job.handle)
        except Exception as error:
            self._finish(lane, job, PeerGone(str(error)))
            return
        self._settle(lane, job, state)

    def _settle(self, lane: _Lane, job: _Job, state: str) -> None:
        if state == "DONE":
            self._finish(lane, job, None)
        elif state != "PROC":
            self._finish(lane, job, TransferError(f"NIXL says {state}"))

    def _finish(self, lane: _Lane, job: _Job, error: TransferError | None) -> None:
        lane.posted = None
        if job.handle is not None:
            with self._lock, contextlib.suppress(Exception):  # of a failed read; the agent keeps what it cannot free
                job.handle.release()
            job.handle = None
        if error is None:
            job.future.set_result(None)
        else:
            job.future.set_exception(error)

    def _stop(self, lanes: dict[str, _Lane]) -> None:
        """Reads in flight are still being written: `close` fails them once the agent is gone."""
        for lane in lanes.values():
            for job in lane.queued:
                job.future.cancel()
            if lane.posted is not None:
                self._in_flight.append(lane.posted)


def _parse(endpoint: bytes) -> tuple[_Memory, bytes]:
    """The peer's pool, and NIXL's metadata."""
    try:
        fields = json.loads(endpoint)
        if fields["format"] != FORMAT:
            raise EndpointMismatch(f"endpoint format {fields['format']!r}, this side speaks {FORMAT!r}")
        base, num_bytes = fields["base"], fields["bytes"]
        kind, device = fields.get("kind", "DRAM"), fields.get("device", 0)
        metadata = b64decode(fields["metadata"], validate=True)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EndpointMismatch("not an endpoint of the nixl transport") from error
    for name, value in (("base", base), ("bytes", num_bytes)):
        if type(value) is not int or not 0 < value < 1 << 63:
            raise EndpointMismatch(f"the endpoint's {name!r} is {value!r}, not a positive number")
    if kind not in ("DRAM", "VRAM") or type(device) is not int or not 0 <= device < 1 << 16:
        raise EndpointMismatch(f"the endpoint's memory is {kind!r} of device {device!r}")
    return _Memory(base, num_bytes, kind, device), metadata
