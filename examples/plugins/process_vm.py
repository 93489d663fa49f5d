"""A transport for workers of one host: the kernel copies from the lender's memory (`process_vm_readv`)."""

import ctypes
import json
import os
import threading
from collections.abc import Hashable, Sequence

from kvtransfer.errors import EndpointMismatch, PeerGone, TransferError, TransportUnavailable
from kvtransfer.fair_queue import FairQueue
from kvtransfer.fingerprint import Folding
from kvtransfer.registry import TransportOptions
from kvtransfer.transport import AnyPool, Peer, Pool, Read, Span, Transport, check_spans

FORMAT = "process-vm-1"
PR_SET_PTRACER, ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)
LIBC = ctypes.CDLL(None, use_errno=True)


class IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessPeer(Peer):
    lanes = ("process_vm/memory",)
    dropped = False

    def __init__(self, pid: int, started: str, address: int, num_bytes: int) -> None:
        self.name, self.pid, self.started, self.address, self.num_bytes = f"pid {pid}", pid, started, address, num_bytes


class ProcessVmTransport(Transport):
    name = "process_vm"

    def __init__(self, options: TransportOptions) -> None:
        if options.strict:
            raise TransportUnavailable("process_vm has no UCX lanes")
        self._peers: dict[bytes, ProcessPeer] = {}
        self._queue: FairQueue[tuple[ProcessPeer, Sequence[Span], Read]] = FairQueue()
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def register(self, pool: AnyPool) -> bytes:
        if not isinstance(pool, Pool):
            raise TransportUnavailable("process_vm reads main memory only")
        LIBC.prctl(PR_SET_PTRACER, ANY_PROCESS, 0, 0, 0)  # processes of the same user may read this one
        self._pool, self._address = pool, pool.memory.ctypes.data
        self._thread.start()
        place = {"pid": os.getpid(), "started": start_of(os.getpid()), "address": self._address}
        return json.dumps({"format": FORMAT, "bytes": pool.num_bytes} | place).encode()

    def connect(self, endpoint: bytes) -> ProcessPeer:
        try:
            fields = json.loads(endpoint)
            if fields["format"] != FORMAT:
                raise ValueError(f"format {fields['format']!r}")
            peer = ProcessPeer(int(fields["pid"]), fields["started"], int(fields["address"]), int(fields["bytes"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EndpointMismatch(f"the endpoint is not one of process_vm: {error!r}") from None
        with self._changed:
            if self._closed:
                raise TransferError("the transport was closed")
            return self._peers.setdefault(bytes(endpoint), peer)

    def read(self, peer: Peer, spans: Sequence[Span], flow: Hashable = None, folding: Folding | None = None) -> Read:
        assert isinstance(peer, ProcessPeer)
        check_spans(spans, self._pool.num_bytes, peer.num_bytes, self.max_posted_bytes)
        read = Read()
        with self._changed:
            if self._closed or peer.dropped:
                read.set_exception(PeerGone("dropped") if peer.dropped else TransferError("the transport was closed"))
            else:
                self._queue.put((peer, flow), (peer, tuple(spans), read))
                self._changed.notify()
        return read

    def drop(self, peer: Peer) -> None:
        assert isinstance(peer, ProcessPeer)
        with self._changed:
            peer.dropped = True
            self._peers = {endpoint: other for endpoint, other in self._peers.items() if other is not peer}
            withdrawn = self._queue.remove(lambda item: item[0] is peer)
        for _, _, read in withdrawn:
            read.cancel()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            withdrawn = self._queue.remove(lambda _: True)
            self._changed.notify()
        for _, _, read in withdrawn:
            read.cancel()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                peer, spans, read = self._queue.pop()
            if not read.set_running_or_notify_cancel():
                continue
            try:
                for span in spans:
                    self._copy(peer, span)
            except TransferError as error:
                read.set_exception(error)
            else:
                read.set_result(None)

    def _copy(self, peer: ProcessPeer, span: Span) -> None:
        own = IoVec(self._address + span.local_offset, span.length)
        theirs = IoVec(peer.address + span.remote_offset, span.length)
        if start_of(peer.pid) != peer.started:
            raise PeerGone(f"{peer.name} has ended")
        copied = LIBC.process_vm_readv(peer.pid, ctypes.byref(own), 1, ctypes.byref(theirs), 1, 0)
        if copied != span.length:
            raise TransferError(f"cannot read {peer.name}: {os.strerror(ctypes.get_errno())}")


def start_of(pid: int) -> str:
    """Return the time at which a process started, so that a later one of the same pid is told apart; empty if gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            state, *fields = stat.read().rpartition(")")[2].split()
            return "" if state == "Z" else fields[18]
    except OSError:
        return ""
