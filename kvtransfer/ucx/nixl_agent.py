"""NIXL's objects: its Python package, a configured agent, and endpoints."""

import json
import threading
from base64 import b64decode, b64encode
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

from kvtransfer.cross_memory import ProcessAddress
from kvtransfer.errors import EndpointMismatch
from kvtransfer.memory_file import FileAddress
from kvtransfer.transport import AnyPool, DevicePool

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
