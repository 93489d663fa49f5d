"""The `nixl` transport: one-sided reads by NIXL over UCX (RDMA verbs, shared memory, CUDA IPC, TCP).

One thread posts and polls, because posting a shared-memory read blocks until the bytes are copied, and because NIXL
serialises calls anyway. While that thread is idle, the caller posts a small read itself, which takes no longer than
waking the thread. At most `max_posted_bytes` are posted per peer, so a silent peer delays only its own queue. NIXL
cannot abort a posted read: it is quiet when it is done, failed, or the agent is destroyed.

Between main memories of one host `cross_memory.py` reads without NIXL; such a read is over when it is posted, and NIXL
never hears of the peer.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any

from kvtransfer.cross_memory import Attached, FilePool, attach, own_address, prepare
from kvtransfer.errors import EndpointMismatch, PeerGone, TransferError, TransportUnavailable
from kvtransfer.fingerprint import Folding
from kvtransfer.transport import (
    AnyPool,
    DevicePool,
    Peer,
    Pool,
    Read,
    Span,
    Transport,
    check_spans,
    max_blocks_per_read,
)
from kvtransfer.ucx.lanes import StrictLanes, process_lane_log
from kvtransfer.ucx.nixl_lane import (
    Drop,
    Endpoint,
    Job,
    Lane,
    Memory,
    NixlPeer,
    Posted,
    make_agent,
    module,
    parse_endpoint,
)

CLOSED = "the transport was closed"
SPIN_S = 200e-6
"""Seconds of polling without a pause after a post; afterwards the thread sleeps between polls, to leave cores to
engines."""
SMALL_BYTES = 512 << 10
"""Largest read that a caller may post itself: some 50 us of copying over shared memory."""
POLL_S = 100e-6
MAX_POLL_S = 2e-3
"""Longest pause between polls. Pauses grow with a read's age, so a silent peer does not keep a core busy."""


class NixlTransport(Transport):
    name = "nixl"

    def __init__(self, agent_name: str, strict: StrictLanes | None = None) -> None:
        """Start an agent.

        `agent_name` must be unique among all processes that will ever meet.

        Raises TransportUnavailable when NIXL or its UCX backend does not start, TransportRefused when it does not start
        over the lanes that `strict` demands.
        """
        self._strict = strict or StrictLanes()
        self._strict.narrow_ucx()
        self._log = process_lane_log("ucp_get")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            self.agent: Any = make_agent(agent_name)
        except Exception as error:  # NIXL raises its own types and plain RuntimeError
            if self._strict:
                raise self._strict.unavailable(error) from error
            raise TransportUnavailable(f"NIXL does not start: {error}") from error
        if "UCX" not in self.agent.backends:
            raise TransportUnavailable("NIXL has no UCX backend here")
        self._lock = threading.Lock()  # NIXL's agent is not thread-safe; connect and read come from other threads
        self._peers: dict[bytes, NixlPeer] = {}
        # agents that NIXL knows, including dropped peers until their reads are quiet
        self._remotes: dict[bytes, str] = {}
        self._pool: AnyPool | None = None
        self._memory = Memory(0, 0)
        self._endpoint = b""
        """Own endpoint; empty until memory is registered."""
        self._registration: Any = None
        self._inbox: queue.SimpleQueue[Job | Posted | Drop | None] = queue.SimpleQueue()
        self._asleep = False
        """Whether the thread sleeps until a job arrives."""
        # orders `read` before or after `close`: nothing is queued after the stop marker
        self._closing = threading.Lock()
        self._closed = False
        self._in_flight: list[Job] = []  # reads still posted when the thread stopped
        self._thread = threading.Thread(target=self._run, name="nixl-reads", daemon=True)

    def blocks_per_read(self, block_bytes: int, peer: Peer | None = None) -> int:
        if isinstance(peer, NixlPeer) and peer.attached is not None:
            # these bytes are verified while they arrive and need no room in the cache
            return max_blocks_per_read(block_bytes, self.max_posted_bytes)
        return super().blocks_per_read(block_bytes)

    def register(self, pool: AnyPool) -> bytes:
        """Register a pool in main memory or, where UCX has its CUDA modules, on a GPU."""
        assert self._pool is None
        self._pool = pool
        self.on_gpu = isinstance(pool, DevicePool)
        memory = self._memory = Memory.of(pool)
        try:
            self._registration = self.agent.register_memory(
                [(memory.base, memory.num_bytes, memory.device, "")], memory.kind
            )
        except Exception as error:  # NIXL's own types
            raise TransportUnavailable(
                f"NIXL cannot register {memory.num_bytes} bytes of {memory.kind}: {error}"
            ) from error
        self._thread.start()
        process = file = None
        if isinstance(pool, Pool):
            process = own_address()
            file = pool.file.address if pool.file is not None else None
            prepare()
        self._endpoint = Endpoint(memory, self.agent.get_agent_metadata(), process, file).to_bytes()
        return self._endpoint

    def connect(self, endpoint: bytes) -> NixlPeer:
        parsed = parse_endpoint(endpoint)
        if endpoint == self._endpoint:
            raise EndpointMismatch("the endpoint is this process's own")
        with self._lock:
            if (known := self._peers.get(endpoint)) is not None:
                return known
            if self.agent is None:
                raise TransferError(CLOSED)
            if (attached := self._attach(parsed)) is not None:
                name = attached.name  # NIXL is not told: a UCX connection polls until the peer has answered it
            else:
                name = self._remotes[endpoint] = self._remotes.get(endpoint) or self._add_remote(parsed.metadata)
            peer = self._peers[endpoint] = NixlPeer(name, endpoint, parsed.memory, self._log, attached)
        return peer

    def _attach(self, endpoint: Endpoint) -> Attached | None:
        """Attach to a peer's main memory on this host, unless those lanes are refused."""
        if endpoint.process is None or endpoint.memory.kind != "DRAM" or self._memory.kind != "DRAM":
            return None
        pool = None
        if endpoint.file is not None:
            pool = FilePool(endpoint.file, endpoint.memory.base, endpoint.memory.num_bytes)
        return attach(endpoint.process, pool, self._strict.allows)

    def _add_remote(self, metadata: bytes) -> str:
        bindings = module("_bindings")
        unusable = (bindings.nixlInvalidParamError, bindings.nixlMismatchError, bindings.nixlNotFoundError)
        try:
            name: str = self.agent.add_remote_agent(metadata).decode()
        except unusable as error:
            raise EndpointMismatch(f"NIXL cannot use the peer's metadata: {error}") from error
        except Exception as error:
            raise PeerGone(f"cannot reach the peer: {error}") from error
        return name

    def read(self, peer: Peer, spans: Sequence[Span], flow: Hashable = None, folding: Folding | None = None) -> Read:
        assert isinstance(peer, NixlPeer)
        assert self._pool is not None
        local, remote = self._memory, peer.memory
        check_spans(spans, local.num_bytes, remote.num_bytes, self.max_posted_bytes)
        if peer.attached is not None:
            spans = [Span(local.base + s.local_offset, remote.base + s.remote_offset, s.length) for s in spans]
        job = Job(peer, tuple(spans), sum(span.length for span in spans), flow, folding, Read())
        with self._closing:
            if self._closed:
                job.future.set_exception(TransferError(CLOSED))
            elif peer.dropped:
                job.future.set_exception(PeerGone(f"{peer.name} was dropped"))
            elif not self.post_now(job):
                self._inbox.put(job)
        return job.future

    def post_now(self, job: Job) -> bool:
        """Post a small read on the caller's thread if no other is in flight.

        Demanded lanes need the transport's thread.
        """
        if job.num_bytes > SMALL_BYTES or not self._asleep or self._strict or not self._inbox.empty():
            return False
        job.future.set_running_or_notify_cancel()
        state = self._begin(job)
        if state == "PROC":
            self._inbox.put(Posted(job))
        else:
            self._end(job, state)
        return True

    def drop(self, peer: Peer) -> None:
        assert isinstance(peer, NixlPeer)
        with self._closing:
            if self._closed or peer.dropped:
                return
            peer.dropped = True
            with self._lock:
                del self._peers[peer.endpoint]
            self._inbox.put(Drop(peer))

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
        for job in in_flight:  # only now can no read write these destinations any more
            job.future.set_exception(TransferError(CLOSED))

    def _destroy_agent(self) -> None:
        """Destroy the agent, which stops reads whose peer is silent.

        Handles refer to the agent, so they go first.
        """
        for job in self._in_flight:
            job.handle = None
        if self.agent is not None and self._registration is not None:
            with contextlib.suppress(Exception):  # NIXL's own types; destroying the agent deregisters as well
                self.agent.deregister_memory(self._registration)
        self._registration = self.agent = None

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        lanes: dict[str, Lane] = {}
        while self._take(lanes):
            for lane in lanes.values():
                for job in tuple(lane.posted):
                    self._poll(lane, job)
                begun = 0  # a shared-memory read is done when it is posted: other peers get their turn in between
                while begun < self.max_posted_bytes and lane.has_room:
                    begun += self._post(lane)
            for name in [name for name, lane in lanes.items() if lane.dropped and lane.idle]:
                self._forget_remote(name)
                del lanes[name]
        self._stop(lanes)

    def _take(self, lanes: dict[str, Lane]) -> bool:
        """Move new jobs into their lanes, or sleep when there is nothing to do.

        Returns False when the transport closes.
        """
        posted = [job for lane in lanes.values() for job in lane.posted]
        busy = any(not lane.idle or lane.dropped for lane in lanes.values())
        newest = max((job.posted_at for job in posted), default=0.0)
        waiting = time.monotonic() - newest
        pause = 0.0 if waiting < SPIN_S else min(max(POLL_S, waiting / 20), MAX_POLL_S)
        if any(lane.has_room for lane in lanes.values()):
            pause = 0.0  # a shared-memory read is done when it is posted: the next one need not wait
        timeout = None if not busy else pause
        self._asleep = timeout is None
        while True:
            try:
                item = self._inbox.get(timeout=timeout) if timeout != 0.0 else self._inbox.get_nowait()
            except queue.Empty:
                return True
            self._asleep = False
            if item is None:
                return False
            lane = lanes.setdefault(item.peer.name, Lane(self.max_posted_bytes))
            if isinstance(item, Drop):
                lane.dropped = True
                lane.withdraw(item.peer)
            elif isinstance(item, Posted):
                lane.add(item.job)
            else:
                lane.queued.put(item.flow, item)
            timeout = 0.0

    def _post(self, lane: Lane) -> int:
        """Post a lane's next read, which may be over on return; return its bytes."""
        job = lane.queued.pop()
        if not job.future.set_running_or_notify_cancel():
            return 0
        lane.add(job)
        self._settle(lane, job, self._begin(job))
        return job.num_bytes

    def _begin(self, job: Job) -> str | TransferError:
        """Post a read from any thread; return NIXL's state, or the error."""
        if (attached := job.peer.attached) is not None:
            try:
                job.found = attached.read(job.spans, job.folding)
            except Exception as error:  # whatever the error, reads of other requests go on
                return error if isinstance(error, TransferError) else TransferError(f"{job.peer.name}: {error}")
            return "DONE"
        try:
            own, theirs = self._memory, job.peer.memory
            to = [(own.base + span.local_offset, span.length, own.device) for span in job.spans]
            at = [(theirs.base + span.remote_offset, span.length, theirs.device) for span in job.spans]
            with self._lock:
                local = self.agent.get_xfer_descs(to, own.kind)
                remote = self.agent.get_xfer_descs(at, theirs.kind)
                job.handle = self.agent.initialize_xfer("READ", local, remote, job.peer.name)
                state: str = self.agent.transfer(job.handle)
        except Exception as error:
            return PeerGone(f"{job.peer.name}: {error}")
        job.posted_at = time.monotonic()
        return state

    def _poll(self, lane: Lane, job: Job) -> None:
        try:
            with self._lock:
                state: str | TransferError = self.agent.check_xfer_state(job.handle)
        except Exception as error:
            state = PeerGone(str(error))
        self._settle(lane, job, state)

    def _settle(self, lane: Lane, job: Job, state: str | TransferError) -> None:
        if state == "PROC":
            return
        lane.remove(job)
        if state == "DONE":
            state = self._refusal(lane, job) or state
        self._end(job, state)

    def _refusal(self, lane: Lane, job: Job) -> TransferError | None:
        """Return an error if the first bytes of a peer came over lanes that were not demanded."""
        try:
            if not lane.seen:
                self._strict.check(job.peer.lanes)
        except TransferError as refusal:
            return refusal
        lane.seen = True
        return None

    def _forget_remote(self, name: str) -> None:
        """Forget a dropped peer whose reads are over, unless the same agent was connected again."""
        with self._lock:
            if name not in self._remotes.values() or any(peer.name == name for peer in self._peers.values()):
                return
            self._remotes = {endpoint: remote for endpoint, remote in self._remotes.items() if remote != name}
            with contextlib.suppress(Exception):  # NIXL's own types: it already noticed that the peer is gone
                self.agent.remove_remote_agent(name)

    def _end(self, job: Job, state: str | TransferError) -> None:
        """Finish a job with NIXL's state or an error.

        From any thread.
        """
        if job.handle is not None:
            with self._lock, contextlib.suppress(Exception):  # of a failed read; the agent keeps what it cannot free
                job.handle.release()
            job.handle = None
        if state == "DONE":
            job.future.set_result(job.found)
        else:
            error = state if isinstance(state, TransferError) else TransferError(f"NIXL says {state}")
            job.future.set_exception(error)

    def _stop(self, lanes: dict[str, Lane]) -> None:
        """Keep the reads in flight, which still write: `close` fails them once the agent is gone."""
        for lane in lanes.values():
            lane.withdraw()
            self._in_flight += lane.posted
