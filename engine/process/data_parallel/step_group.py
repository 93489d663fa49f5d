"""A data-parallel group as one of its engine processes sees it: a star of TCP connections around rank 0.

Over them the ranks meet, agree on steps (`lockstep.py`), notice a lost rank, and drain together. Rank 0 listens at
`data_parallel_port`. It tells all ranks a free port of its host where vLLM's process group meets; Gloo and NCCL choose
further ports themselves, as they do for `vllm serve`.

**A group lives and dies as a whole.** It consists of the processes that one process of rank 0 has welcomed. From then
on that process takes no others, and each member ends when its connection breaks or falls silent, since its collectives
would wait for ever. Their workers start new engines, which meet at the next process of rank 0. So old and new
processes never meet in one group, also where an old one was stopped and goes on later: its connection is broken.

The connections carry JSON, one message a line, and are as open as vLLM's own collectives beside them.
"""

import contextlib
import errno
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from engine.config import WorkerConfig
from engine.errors import EngineStartError
from engine.messages.from_engine import FromEngine, GroupDrains
from engine.messages.to_engine import DrainGroup, ToEngine
from engine.process.data_parallel.lockstep import Grants, Lockstep

log = logging.getLogger(__name__)

BEAT_S = 0.2
SILENT_S = 1.0
"""Seconds without a beat after which a rank counts as hanging; its peers then send no load reports."""
START_SILENCE_S = 60.0
"""Seconds without a beat after which a rank that is still starting is lost: loading may hold Python's lock for long."""
RETRY_S = 0.2
FREED_S = 10.0
"""Seconds in which a process of rank 0 that ends leaves its port to the next one."""
TELL_EVERY_S = 30.0
"""Seconds between log lines about ranks that have not come."""
MAX_LINE = 1 << 20
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Seconds, seconds and probes until a host that is gone is noticed while nothing is sent."""
Message = dict[str, Any]


class _Peer:
    """Connection to one rank."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.rank = -1
        """Its rank; -1 until it is known."""
        self.worker_id = ""
        self.heard_at = time.monotonic()
        self.is_ready = False
        """Whether its engine serves."""
        self._sending = threading.Lock()
        self._incoming = b""
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self.link.fileno()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises OSError when the other end is gone.
        """
        with self._sending:
            self.link.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message]:
        """Wait for bytes; return the whole messages among them.

        Raises EOFError when the other end is gone, OSError when the connection broke, ValueError for anything but
        messages.
        """
        if not (chunk := self.link.recv(1 << 16)):
            raise EOFError("its process ended")
        self.heard_at = time.monotonic()
        *lines, self._incoming = (self._incoming + chunk).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if len(self._incoming) > MAX_LINE or not all(isinstance(each, dict) for each in messages):
            raise ValueError("no message of this protocol")
        return messages

    def close(self) -> None:
        self.link.close()


class StepGroup:
    """The group of one engine process.

    The engine's loop uses it; a thread of its own listens to the other ranks.
    """

    def __init__(self, config: WorkerConfig, worker_id: str, wake: Callable[[], None]) -> None:
        """Create it; `meet` makes it usable.

        `wake` is called, on any thread, when steps are granted or the group drains.
        """
        self._config, self._worker_id, self._wake = config, worker_id, wake
        self.rank, self.size = config.data_parallel_rank, config.data_parallel
        self.peers: dict[int, _Peer] = {}
        """Rank 0: all others; others: rank 0."""
        self._lockstep = Lockstep(1)
        self._grants = Grants()
        self._granting = threading.Lock()
        self._is_ready = False
        self._news: SimpleQueue[FromEngine] = SimpleQueue()
        self._draining_rank: int | None = None
        """Rank that made the group drain."""
        self._empty: set[int] = set()
        """Ranks that have no work left, in a group that drains; rank 0 counts them."""
        self._is_over = False
        """Whether all ranks are empty, so that any of them may end."""

    # ------------------------------------------------------------------ the meeting

    def meet(self, facts: Mapping[str, object], interval: int) -> int:
        """Wait for all ranks; return the port of vLLM's process group at `data_parallel_address`.

        `facts` must be equal on all ranks, by setting. A rank asks for `interval` steps at once. Waits as long as a
        rank is missing. Raises EngineStartError.
        """
        self._lockstep = Lockstep(interval)
        told = {name: str(fact) for name, fact in facts.items()}
        port = self._gather(told) if self.rank == 0 else self._join(told)
        threading.Thread(target=self._listen, name="step-group", daemon=True).start()
        log.info("rank %d of a data-parallel group of %d", self.rank, self.size)
        return port

    @property
    def _meeting(self) -> tuple[str, int]:
        return self._config.data_parallel_address, self._config.data_parallel_port

    def _gather(self, facts: dict[str, str]) -> int:
        """Welcome all other ranks, as rank 0; return the port of vLLM's process group."""
        with self._listener() as listener, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            told_at = time.monotonic()
            while len(self.peers) < self.size - 1:
                for key, _ in selector.select(RETRY_S):
                    if key.fileobj is listener:
                        selector.register(_Peer(listener.accept()[0]), selectors.EVENT_READ)
                    else:
                        assert isinstance(key.fileobj, _Peer)
                        self._hear_newcomer(key.fileobj, facts, selector)
                if time.monotonic() - told_at > TELL_EVERY_S:
                    missing = sorted({*range(1, self.size)} - {*self.peers})
                    log.warning("waiting for ranks %s of the data-parallel group", missing)
                    told_at = time.monotonic()
            for key in list(selector.get_map().values()):
                if isinstance(key.fileobj, _Peer) and key.fileobj.rank not in self.peers:
                    key.fileobj.close()
        port = _free_port(self._config.data_parallel_address)
        for peer in self.peers.values():
            peer.heard_at = time.monotonic()
            with contextlib.suppress(OSError):  # `_listen` notices
                peer.send({"kind": "welcome", "port": port})
        return port

    def _hear_newcomer(self, peer: _Peer, facts: dict[str, str], selector: selectors.BaseSelector) -> None:
        try:
            for message in peer.receive():
                if message["kind"] == "hello":
                    self._admit(peer, message, facts)
        except _Unfit as unfit:
            with contextlib.suppress(OSError):
                peer.send({"kind": "refused", "field": unfit.field, "reason": unfit.reason})
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            pass
        else:
            return
        selector.unregister(peer)
        peer.close()
        if self.peers.get(peer.rank) is peer:
            del self.peers[peer.rank]

    def _admit(self, peer: _Peer, hello: Message, facts: dict[str, str]) -> None:
        """Take a rank into the group.

        Raises _Unfit.
        """
        rank, worker_id = int(hello["rank"]), str(hello["worker_id"])
        for name, fact in facts.items():
            if (other := hello["facts"].get(name)) != fact:
                raise _Unfit(name, f"{other} here, and {fact} at rank 0 of the data-parallel group")
        if not 0 < rank < self.size:
            raise _Unfit("data_parallel_rank", f"{rank} is rank 0's, or not of a group of {self.size}")
        if (earlier := self.peers.get(rank)) is not None:
            if earlier.worker_id != worker_id:
                raise _Unfit("data_parallel_rank", f"worker {earlier.worker_id} is rank {rank} of the group already")
            with contextlib.suppress(OSError):
                earlier.link.shutdown(socket.SHUT_RDWR)  # an engine before this one
            earlier.rank = -1
        peer.rank, peer.worker_id = rank, worker_id
        self.peers[rank] = peer

    def _listener(self) -> socket.socket:
        """Return a socket that listens at the group's address, or at all of this host's where that is not its own.

        Raises EngineStartError.
        """
        host, port = self._meeting
        give_up_at = time.monotonic() + FREED_S
        while True:
            try:
                family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                return socket.create_server(address[:2], family=family)
            except socket.gaierror as error:
                raise EngineStartError("data_parallel_address", f"{host}: {error}") from None
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:  # an address of something before this host
                    return socket.create_server(("", port), family=family)
                if error.errno != errno.EADDRINUSE or time.monotonic() > give_up_at:
                    raise EngineStartError("data_parallel_port", f"cannot listen at {port}: {error}") from None
            time.sleep(RETRY_S)

    def _join(self, facts: dict[str, str]) -> int:
        """Join rank 0; return the port of vLLM's process group."""
        began_at = told_at = time.monotonic()
        hello = {"kind": "hello", "rank": self.rank, "worker_id": self._worker_id, "facts": facts}
        while True:
            with contextlib.suppress(EOFError, OSError, ValueError):
                peer = _Peer(socket.create_connection(self._meeting, timeout=TELL_EVERY_S))
                try:
                    peer.send(hello)
                    peer.link.settimeout(None)
                    if (port := self._welcomed(peer)) is not None:
                        return port
                finally:
                    if 0 not in self.peers:
                        peer.close()
            if (now := time.monotonic()) - told_at > TELL_EVERY_S:
                log.warning("rank 0 at %s:%d not met for %.0f s", *self._meeting, now - began_at)
                told_at = now
            time.sleep(RETRY_S)

    def _welcomed(self, peer: _Peer) -> int | None:
        """Wait for rank 0's answer.

        Raises EngineStartError for a refusal, and what `receive` raises.
        """
        port: int | None = None
        while port is None:
            for message in peer.receive():
                if message["kind"] == "refused":
                    raise EngineStartError(message["field"], message["reason"])
                if message["kind"] == "welcome":
                    port = int(message["port"])
                    peer.rank = 0
                    self.peers[0] = peer
                elif port is not None:
                    self._hear(peer, message)
        return port

    # ------------------------------------------------------------------ steps

    @property
    def may_launch(self) -> bool:
        """Whether a step is granted that was not launched; then it must be launched."""
        return self._lockstep.may_launch

    def launched(self) -> None:
        """Record that the next step is launched."""
        self._lockstep.launched()

    def ask(self) -> None:
        """Ask for steps, since there is work, unless enough are granted."""
        if (num_steps := self._lockstep.to_ask()) is None:
            return
        if self.rank == 0:
            self._grant(num_steps)
        else:
            self._tell(self.peers[0], {"kind": "ask", "steps": num_steps})

    def _grant(self, num_steps: int) -> None:
        with self._granting:
            granted = self._grants.asked(num_steps)
            if granted is not None:
                self._lockstep.granted(granted)
                self._tell_all({"kind": "grant", "steps": granted})
        self._wake()

    # ------------------------------------------------------------------ the engine's loop

    def serves(self) -> None:
        """Record that the engine is ready: from now on a short silence of this process is the loss of its rank."""
        self._is_ready = True

    @property
    def silent(self) -> bool:
        """Whether a rank's beat is missing, so the engine must not report load."""
        now = time.monotonic()
        return any(peer.is_ready and now - peer.heard_at > SILENT_S for peer in self.peers.values())

    def passes(self, message: ToEngine) -> bool:
        """Return whether the core must handle the message; otherwise it was for the group."""
        if not isinstance(message, DrainGroup):
            return True
        self._drain(self.rank, message.is_empty)
        return False

    def answers(self) -> list[FromEngine]:
        """Return messages to the front since the last call."""
        answers = []
        while not self._news.empty():  # only this method takes from it
            answers.append(self._news.get_nowait())
        return answers

    def leave(self) -> None:
        """End the process and so, unless all ranks are empty, the group.

        A batch in flight may wait for other ranks for ever.
        """
        os._exit(0)

    # ------------------------------------------------------------------ drain

    def _drain(self, rank: int, is_empty: bool) -> None:
        """Process that a rank drains, or that it is empty: rank 0 tells all, others tell rank 0."""
        if self.rank != 0:
            self._tell(self.peers[0], {"kind": "drain", "rank": rank, "is_empty": is_empty})
            return
        if is_empty:
            self._empty.add(rank)
        if self._draining_rank is None:
            self._draining_rank = rank
            self._tell_all({"kind": "drains", "rank": rank, "is_over": False})
            self._drains(rank, is_over=False)
        if len(self._empty) == self.size and not self._is_over:
            self._tell_all({"kind": "drains", "rank": rank, "is_over": True})
            self._drains(rank, is_over=True)

    def _drains(self, rank: int, is_over: bool) -> None:
        self._is_over |= is_over
        self._news.put(GroupDrains(rank, is_over))
        self._wake()

    # ------------------------------------------------------------------ other ranks

    def _tell_all(self, message: Message) -> None:
        for peer in self.peers.values():
            self._tell(peer, message)

    def _tell(self, peer: _Peer, message: Message) -> None:
        try:
            peer.send(message)
        except OSError as error:
            self._is_lost(peer, str(error))

    def _listen(self) -> None:
        """Listen to the other ranks, on a thread of its own."""
        with selectors.DefaultSelector() as selector:
            for peer in self.peers.values():
                selector.register(peer, selectors.EVENT_READ)
            beat_at = 0.0
            while not self._is_over:
                if (now := time.monotonic()) >= beat_at:
                    beat_at = now + BEAT_S
                    self._tell_all({"kind": "beat", "ready": self._is_ready})
                for key, _ in selector.select(max(0.0, beat_at - time.monotonic())):
                    assert isinstance(key.fileobj, _Peer)
                    self._hear_all(key.fileobj)
                self._check_silence()

    def _hear_all(self, peer: _Peer) -> None:
        try:
            for message in peer.receive():
                self._hear(peer, message)
        except (EOFError, OSError, ValueError, KeyError, TypeError) as error:
            self._is_lost(peer, str(error))

    def _hear(self, peer: _Peer, message: Message) -> None:
        match message["kind"]:
            case "beat":
                peer.is_ready = bool(message["ready"])
            case "ask":
                self._grant(int(message["steps"]))
            case "grant":
                self._lockstep.granted(int(message["steps"]))
                self._wake()
            case "drain":
                self._drain(int(message["rank"]), bool(message["is_empty"]))
            case "drains":
                self._drains(int(message["rank"]), bool(message["is_over"]))

    def _check_silence(self) -> None:
        now = time.monotonic()
        for peer in self.peers.values():
            limit_s = self._config.peer_silence_s if peer.is_ready else START_SILENCE_S
            if now - peer.heard_at > limit_s:
                self._is_lost(peer, f"silent for {now - peer.heard_at:.0f} s")

    def _is_lost(self, peer: _Peer, how: str) -> None:
        """End the process, whose collectives would wait for the lost rank for ever."""
        if self._is_over:
            return
        log.error("the engine cannot go on: rank %d of its data-parallel group is lost: %s", peer.rank, how)
        os._exit(1)


class _Unfit(Exception):
    """A rank that cannot be of the group."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field, self.reason = field, reason


def _free_port(address: str) -> int:
    """Return a free port of this host."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server(("", 0), family=family) as found:
        return int(found.getsockname()[1])
