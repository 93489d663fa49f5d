"""Links between the hosts of one worker, whose ranks run on several nodes.

Node 0 is the worker. The others are *headless*: an engine process there runs vLLM's executor for the ranks of its host.
It is linked with node 0's engine process for as long as both live, and so is each rank that holds KV there:

    node 0: engine process ══ node link: heartbeats both ways ══ node 1: engine process
                 ╘══════ rank link: reads, fingerprints, bytes ══════ worker process of rank 2

A link that breaks, or is silent, ends both sides: vLLM's ranks cannot go on without each other. Node 0's worker then
starts again as after any crash, and the other nodes wait for it.

Messages are pickles, so both ends prove first that they know the same key.
"""

import fcntl
import logging
import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from engine.block_parts.messages import HEARTBEAT_S
from engine.config import WorkerConfig
from engine.errors import EngineStartError
from engine.process.ranks.ranks import shut_down
from kvcache.store.local import secret_of

log = logging.getLogger(__name__)

SILENCE_S = 8.0
"""Seconds of silence after which the other end of a link counts as lost. A start loads libraries, which can hold up the
other threads of a process for seconds."""
GREETING_S = 5.0
"""Seconds for a new connection to say who it is."""
RETRY_S = 0.5
CONNECT_S = 2.0
KEEP_ALIVE_S = 2
"""Seconds without traffic before the kernel probes a connection, and between the probes."""
STILL_WAITING_S = 30.0
"""Seconds between log lines of a node 0 that waits for others."""
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of another node's engine process."""

    node: int
    facts: Mapping[str, str]
    """Facts that must be the same on all nodes."""


@dataclass(frozen=True, slots=True)
class RankHello:
    """First message of a rank on another node."""

    rank: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello once all nodes are there: start the ranks."""

    agent_name: str
    """Name of node 0's incarnation, which the names of all ranks begin with."""


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """Answer to a Hello whose facts differ."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat."""


def facts_of(config: WorkerConfig, model: str, vllm_version: str) -> dict[str, str]:
    """Return the facts that must be the same on all nodes.

    `model` is a digest of the weights.
    """
    names = (
        *("tensor_parallel", "pipeline_parallel", "nodes", "dtype", "block_tokens", "kv_memory_mib"),
        *("max_batch_tokens", "vllm_options", "vllm_args", "transport"),
    )
    settings = {name: str(getattr(config, name)) for name in names}
    return settings | {"adapters": ",".join(config.adapters), "model": model, "vllm_python": vllm_version}


def address_of(config: WorkerConfig) -> tuple[str, int]:
    """Return the address of node 0's links."""
    return config.master_addr, config.master_port + 1


def key_of(config: WorkerConfig) -> bytes:
    """Return the key that nodes prove to know: made of the cluster's secret file, where one is set.

    Without one the key keeps out mistakes only. Raises EngineStartError.
    """
    return blake2b(secret_of(config.kv_store_secret_file), digest_size=32, person=b"tandem-nodes").digest()


def own_address(config: WorkerConfig) -> str:
    """Return the address of this host that the other nodes see.

    Raises EngineStartError.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address_of(config))
        except OSError as error:
            raise EngineStartError("master_addr", f"{config.master_addr}: {error.strerror or error}") from None
        return str(probe.getsockname()[0])


def wait_for_name(config: WorkerConfig) -> None:
    """Wait until node 0's name has an address: that of a pod has none before the pod is there."""
    waiting_since = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(*address_of(config))
            return
        except socket.gaierror as error:
            if time.monotonic() - waiting_since > STILL_WAITING_S:
                log.warning("waiting for the address of master_addr, %s: %s", config.master_addr, error.strerror)
                waiting_since = time.monotonic()
            time.sleep(RETRY_S)


def interface_of(address: str) -> str | None:
    """Return the network interface with an IPv4 address; None where none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def connect_to(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to node 0's engine process.

    Raises OSError, EOFError or AuthenticationError while there is none.
    """
    link = socket.create_connection(address, CONNECT_S)
    _tune(link)
    link.settimeout(None)
    connection = Connection(link.detach())
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection


def _tune(link: socket.socket) -> None:
    """Let small messages leave at once, and a cut connection end in seconds."""
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_S * 1000)),
    ]
    for level, option, value in options:
        link.setsockopt(level, option, value)


class Sender:
    """Sender of messages by a connection, from any thread; heartbeats of its own follow until the connection ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, name="node-heartbeat", daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message; raises OSError."""
        with self._lock:
            self._connection.send(message)

    def _beat(self) -> None:
        with suppress(OSError):
            while True:
                self.send(Beat())
                time.sleep(HEARTBEAT_S)


def heard(connection: Connection) -> object:
    """Return the next message that is no heartbeat.

    Raises EOFError or OSError when the other end is gone, or silent for SILENCE_S.
    """
    while True:
        if not connection.poll(SILENCE_S):
            raise TimeoutError(f"the other end was silent for {SILENCE_S:.0f} s")
        if not isinstance(message := connection.recv(), Beat):
            return message


class Nodes:
    """Node 0's end of all links."""

    def __init__(
        self,
        config: WorkerConfig,
        agent_name: str,
        on_rank: Callable[[int, Connection], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Listen for the other nodes and their ranks.

        `on_rank` takes the connection of a rank. `on_lost` is called when a node is lost after `gather`. Both are
        called on any thread. Raises EngineStartError.
        """
        self._config, self._agent_name, self._key = config, agent_name, key_of(config)
        self._on_rank, self._on_lost = on_rank, on_lost
        self._facts: Mapping[str, str] | None = None
        self._known = threading.Event()
        """Whether this node's facts are known."""
        self._changed = threading.Condition()
        self._present: dict[int, Sender] = {}
        self._has_begun = False
        address = address_of(config)
        try:
            self._listener = socket.create_server(address, backlog=64)
        except OSError as error:
            reason = f"cannot listen on {address[0]}:{address[1]} ({error.strerror}): it must be node 0's own address"
            raise EngineStartError("master_addr", reason) from None
        threading.Thread(target=self._accept, name="node-listener", daemon=True).start()

    def gather(self, facts: Mapping[str, str]) -> None:
        """Wait for all other nodes with the same facts, and let them start their ranks."""
        self._facts = facts
        self._known.set()
        wanted = self._config.nodes - 1
        with self._changed:
            while len(self._present) < wanted:
                if not self._changed.wait(STILL_WAITING_S):
                    missing = sorted({*range(1, wanted + 1)} - {*self._present})
                    log.warning("waiting for nodes %s at %s:%d", missing, *address_of(self._config))
            self._has_begun = True
            for number, sender in self._present.items():
                try:
                    sender.send(Welcome(self._agent_name))
                except OSError as error:
                    self._on_lost(f"node {number} is gone: {error}")

    def _accept(self) -> None:
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._greet, args=(link,), name="node-link", daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        """Serve a new connection."""
        _tune(link)
        connection = Connection(link.detach())
        late = threading.Timer(GREETING_S, shut_down, (connection,))
        late.start()
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello = heard(connection)
        except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
            log.warning("a node did not connect: %s", error or "its key is another one")
            connection.close()
            return
        finally:
            late.cancel()
        if isinstance(hello, RankHello):
            self._on_rank(hello.rank, connection)
        elif isinstance(hello, Hello):
            self._serve(hello, connection)

    def _serve(self, hello: Hello, connection: Connection) -> None:
        """Serve a node until its link ends."""
        sender = Sender(connection)
        try:
            while not self._known.wait(HEARTBEAT_S):
                pass
            if (refused := self._refusal(hello)) is not None:
                sender.send(refused)
                time.sleep(GREETING_S)  # its end reads it, then closes
                connection.close()
                return
            with self._changed:
                again = self._has_begun
                self._present[hello.node] = sender
                self._changed.notify_all()
            if again:
                self._on_lost(f"node {hello.node} has started again")
            heard(connection)
            how = "it spoke out of turn"
        except (OSError, EOFError) as error:
            how = str(error) or "its connection has ended"
        with self._changed:
            if self._present.get(hello.node) is sender:
                del self._present[hello.node]
            has_begun = self._has_begun
        shut_down(connection)
        if has_begun:
            self._on_lost(f"node {hello.node} is gone: {how}")

    def _refusal(self, hello: Hello) -> NodeRefused | None:
        assert self._facts is not None
        if not 0 < hello.node < self._config.nodes:
            return NodeRefused("node_rank", f"{hello.node} is not one of 1 to {self._config.nodes - 1}")
        for name, value in self._facts.items():
            if (theirs := hello.facts.get(name)) != value:
                return NodeRefused(name, f"node {hello.node} has {theirs}, node 0 has {value}: they must be equal")
        return None


class NodeLink:
    """Another node's end of its link."""

    def __init__(self, config: WorkerConfig, facts: Mapping[str, str]) -> None:
        """Wait for node 0 and for all other nodes, then return; from then on the process ends with the link.

        Raises EngineStartError.
        """
        key = key_of(config)
        waiting_since = time.monotonic()
        while True:
            connection = None
            try:
                connection = connect_to(address_of(config), key)
                Sender(connection).send(Hello(config.node_rank, facts))
                answer = heard(connection)
                break
            except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
                if connection is not None:
                    shut_down(connection)
                if time.monotonic() - waiting_since > STILL_WAITING_S:
                    log.warning("waiting for node 0 at %s:%d: %s", *address_of(config), error or "it has ended")
                    waiting_since = time.monotonic()
                time.sleep(RETRY_S)
        if isinstance(answer, NodeRefused):
            raise EngineStartError(answer.field, answer.reason)
        assert isinstance(answer, Welcome)
        self.agent_name = answer.agent_name
        threading.Thread(target=self._watch, args=(connection,), name="node-link", daemon=True).start()

    def _watch(self, connection: Connection) -> None:
        try:
            heard(connection)
        except (OSError, EOFError) as error:
            log.warning("node 0 is gone: %s", error or "its connection has ended")
        os._exit(0)  # its ranks die with it
