"""Links between the doctor and its peers: JSON messages, one answer each."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from tandem.doctor.peer import PeerSpec

LINE_BYTES = 1 << 24


class PeerGone(Exception):
    """The peer sends nothing any more; the message says why."""


class PeerLink(ABC):
    """Link to one peer."""

    @abstractmethod
    async def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises PeerGone.
        """

    @abstractmethod
    async def receive(self) -> dict[str, Any]:
        """Return the peer's next message.

        Raises PeerGone.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the peer."""


class ProcessLink(PeerLink):
    """Link to a process of this host, by its standard input and output."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @classmethod
    async def start(cls, spec: PeerSpec, command: Sequence[str]) -> "ProcessLink":
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command,
            json.dumps(asdict(spec)),
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_BYTES,
        )
        return cls(spec.name, process)

    async def send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            with suppress(ValueError):  # a library's output
                message: dict[str, Any] = json.loads(line)
                return message
        raise PeerGone(f"{self._name} ended with code {await self._process.wait()}")

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
