"""Peers of the `nixl` transport, their jobs, and the order of those.

No NIXL here.

NIXL's objects: its Python package, a configured agent, and endpoints.
"""

import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Hashable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

from kvtransfer.cross_memory import Attached, ProcessAddress
from kvtransfer.errors import EndpointMismatch
from kvtransfer.fair_queue import FairQueue
from kvtransfer.fingerprint import Folding
from kvtransfer.memory_file import FileAddress
from kvtransfer.transport import AnyPool, DevicePool, Found, Peer, Read, Span
from kvtransfer.ucx.lanes import LaneLog

FORMAT = "tandem-nixl-1"
PROGRESS_DELAY_US = 100_000
PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Packages of NIXL, named for the CUDA that they were built for; the first that is installed is used. Without a GPU
either works."""
_construction = threading.Lock()

MemoryKind = Literal["DRAM", "VRAM"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Location of a pool in NIXL's terms."""

    base: int
    num_bytes: int
    kind: MemoryKind = "DRAM"
    device: int = 0

    @classmethod
    def of(cls, pool: AnyPool) -> "Memory":
        if isinstance(pool, DevicePool):
            return cls(pool.address, pool.num_bytes, "VRAM", pool.device)
        return cls(pool.memory.ctypes.data, pool.num_bytes)

    def fields(self) -> dict[str, Any]:
        """Return the fields of an endpoint; main memory is the default."""
        where = {"kind": self.kind, "device": self.device} if self.kind != "DRAM" else {}
        return {"base": self.base, "bytes": self.num_bytes} | where


def make_agent(name: str) -> Any:
    """Create an agent whose progress thread sleeps until UCX has an event.

    NIXL's Python class fixes that thread's delay at 0, which polls without a pause and takes a whole core from the
    engine pinned to it (a read over TCP then takes ten times as long). The delay only bounds how long an event without
    a wake-up may wait.
    """
    _api: Any = module("_api")
    _bindings: Any = module("_bindings")

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


def module(name: str) -> ModuleType:
    """Import a module of NIXL's package.

    Raises ImportError when none is installed.
    """
    package = next((package for package in PACKAGES if find_spec(package) is not None), PACKAGES[0])
    return import_module(f"{package}.{name}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A peer's description of its pool."""

    memory: Memory
    metadata: bytes
    """NIXL's agent metadata."""
    process: ProcessAddress | None = None
    """Process of a pool in main memory, for peers on the same host."""
    file: FileAddress | None = None
    """Memory file of that pool, if peers may map it."""

    def to_bytes(self) -> bytes:
        where = {"process": self.process.fields()} if self.process is not None else {}
        if self.file is not None:
            where["file"] = self.file.fields()
        metadata = b64encode(self.metadata).decode()
        return json.dumps({"format": FORMAT, **self.memory.fields(), **where, "metadata": metadata}).encode()


def parse_endpoint(endpoint: bytes) -> Endpoint:
    """Parse an endpoint.

    Raises EndpointMismatch.
    """
    try:
        fields = json.loads(endpoint)
        if fields["format"] != FORMAT:
            raise EndpointMismatch(f"endpoint format {fields['format']!r}, this side speaks {FORMAT!r}")
        base, num_bytes = fields["base"], fields["bytes"]
        kind, device = fields.get("kind", "DRAM"), fields.get("device", 0)
        metadata = b64decode(fields["metadata"], validate=True)
        process = ProcessAddress.parse(fields["process"]) if "process" in fields else None
        file = FileAddress.parse(fields["file"]) if "file" in fields else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EndpointMismatch("the endpoint is not one of the nixl transport") from error
    for name, value in (("base", base), ("bytes", num_bytes)):
        if type(value) is not int or not 0 < value < 1 << 63:
            raise EndpointMismatch(f"the endpoint's {name!r} is {value!r}, not a positive number")
    if base + num_bytes > 1 << 63:
        raise EndpointMismatch(f"the endpoint's {num_bytes} bytes at {base} exceed the address space")
    if kind not in ("DRAM", "VRAM") or type(device) is not int or not 0 <= device < 1 << 16:
        raise EndpointMismatch(f"the endpoint's memory is {kind!r} of device {device!r}")
    return Endpoint(Memory(base, num_bytes, kind, device), metadata, process, file)


class NixlPeer(Peer):
    def __init__(
        self, name: str, endpoint: bytes, memory: Memory, log: LaneLog, attached: Attached | None = None
    ) -> None:
        """Create a peer.

        With `attached`, reads need no NIXL.
        """
        self.name = name
        self.endpoint = endpoint
        self.memory = memory
        self.dropped = False
        self.attached = attached
        self._log = log

    @property
    def lanes(self) -> tuple[str, ...]:
        return self._log.lanes() if self.attached is None else self.attached.lanes


@dataclass(slots=True)
class Job:
    peer: NixlPeer
    spans: tuple[Span, ...]
    """Spans, whose offsets are addresses where the peer is attached."""
    num_bytes: int
    flow: Hashable
    folding: Folding | None
    future: Read
    found: Found = None
    handle: Any = None
    posted_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Drop:
    peer: NixlPeer


@dataclass(frozen=True, slots=True)
class Posted:
    """A read posted by its caller, which the thread must finish."""

    job: Job

    @property
    def peer(self) -> NixlPeer:
        return self.job.peer


@dataclass(slots=True)
class Lane:
    """Queue of one peer, and its posted reads."""

    max_posted_bytes: int
    queued: FairQueue[Job] = field(default_factory=FairQueue)
    posted: list[Job] = field(default_factory=list)
    posted_bytes: int = 0
    seen: bool = False
    """Whether its first read arrived over permitted lanes."""
    dropped: bool = False
    """Whether to forget the peer once it is idle."""

    @property
    def idle(self) -> bool:
        return not self.posted and not self.queued

    @property
    def has_room(self) -> bool:
        """Whether the next queued read fits beside the posted ones."""
        if not self.queued:
            return False
        return self.posted_bytes + self.queued.peek().num_bytes <= self.max_posted_bytes

    def add(self, job: Job) -> None:
        """Count a job as posted."""
        self.posted.append(job)
        self.posted_bytes += job.num_bytes

    def remove(self, job: Job) -> None:
        """Count a posted job as over."""
        self.posted.remove(job)
        self.posted_bytes -= job.num_bytes

    def withdraw(self, peer: NixlPeer | None = None) -> None:
        """Cancel queued jobs of one peer, or of all peers that share the agent."""
        for job in self.queued.remove(lambda job: peer is None or job.peer is peer):
            job.future.cancel()
