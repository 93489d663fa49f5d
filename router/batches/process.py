"""The process of files and batches as its router has it: started, restarted, and called."""

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
from yarl import URL

from cluster.errors import StartError, Unavailable
from cluster.process.tasks import Tasks
from router.batches.link import BATCHES_SOCKET, CALLER, Link, OnBehalf

log = logging.getLogger(__name__)

START_S = 120.0
"""Longest start of the process in seconds."""
RESTART_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds between the end of the process and its next start; they double while it does not start."""
MAX_PATH_BYTES = 107
"""Longest path of a Unix socket."""
SILENCE_S = 60.0
"""Seconds without a byte of an answer after which the process counts as not up."""
END_S = 5.0
"""Seconds for the process to end once the router has no more use for it."""


class BatchesProcess:
    """The process beside one router."""

    def __init__(self, link: Link) -> None:
        """Prepare the link's folder.

        Raises StartError where it cannot be used.
        """
        self.link = link
        self._is_own = link.batches_link is None
        try:
            self.folder = link.batches_link or Path(tempfile.mkdtemp(prefix="tandem-batches-"))
            self.folder.mkdir(mode=0o700, exist_ok=True)
            mode = self.folder.stat().st_mode
        except OSError as error:
            raise StartError("batches_link", f"cannot be used: {error}") from None
        if mode & 0o077:
            raise StartError("batches_link", f"{self.folder} must be for its user alone, not of mode {mode & 0o777:o}")
        if len(os.fsencode(self.folder / BATCHES_SOCKET)) > MAX_PATH_BYTES:
            limit = f"with /{BATCHES_SOCKET} it may have {MAX_PATH_BYTES} bytes at most"
            raise StartError("batches_link", f"{self.folder} is too long: {limit}")
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks = Tasks("the process of files and batches is not started again")
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Tell the link, and start the process unless somebody else does.

        Raises StartError with the process's reason.
        """
        connector = aiohttp.UnixConnector(str(self.folder / BATCHES_SOCKET), limit=0)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        self.link.write(self.folder)
        if self._is_own:
            await self._start()
            self._tasks.spawn(self._keep())

    async def call(
        self,
        method: str,
        path: str,
        caller: OnBehalf,
        headers: Mapping[str, str],
        body: AsyncIterator[bytes] | None = None,
    ) -> aiohttp.ClientResponse:
        """Return the beginning of an answer; `path` is as a client wrote it, with its query.

        Raises Unavailable.
        """
        assert self._session is not None, "it was started"
        named = {**headers, CALLER: caller.header(), "authorization": f"Bearer {self.link.key}"}
        url = URL(f"http://batches{path}", encoded=True)
        # An upload ends when its client is silent; all else is quick, and a process that hangs keeps nobody for long.
        limits = aiohttp.ClientTimeout(sock_read=SILENCE_S if body is None else None)
        try:
            return await self._session.request(method, url, headers=named, data=body, timeout=limits)
        except (aiohttp.ClientError, OSError) as error:
            log.info("%s %s got no answer: %r", method, path[:200], error)
            raise Unavailable("the process of files and batches is not up: try again") from None

    async def read(self, answer: aiohttp.ClientResponse) -> bytes:
        """Return the rest of an answer.

        Raises Unavailable.
        """
        try:
            return await answer.read()
        except (aiohttp.ClientError, OSError):
            raise Unavailable("the process of files and batches has ended: try again") from None

    async def close(self) -> None:
        """End the process, and remove a folder that is this router's own."""
        await self._tasks.close()
        if self._process is not None:
            self._process.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await _end_of(self._process)
            except TimeoutError:
                self._process.kill()
                self._process.wait()
        if self._session is not None:
            await self._session.close()
        if self._is_own:
            shutil.rmtree(self.folder)

    async def _start(self) -> None:
        command = [sys.executable, "-m", "batches", str(self.folder), "--child-of", str(os.getpid())]
        # Without asyncio, since uvloop forks where subprocess uses vfork; on this thread, whose end ends the process.
        self._process = process = subprocess.Popen(  # noqa: ASYNC220
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        with process.stdout:
            try:
                async with asyncio.timeout(START_S):
                    line = await asyncio.to_thread(process.stdout.readline)
            except TimeoutError:
                process.kill()
                raise StartError("batches_folder", f"its process was not ready within {START_S:g} s") from None
        if not line:
            raise StartError("batches_folder", f"its process ended at its start with code {process.wait()}")
        if (reply := json.loads(line))["event"] == "refused":
            process.wait()
            raise StartError(reply["field"], reply["reason"])

    async def _keep(self) -> None:
        """Start the process again whenever it ends."""
        while True:
            assert self._process is not None
            code, pause_s = await _end_of(self._process), RESTART_S
            log.error("the process of files and batches ended with code %d and starts again", code)
            while pause_s:
                await asyncio.sleep(pause_s)
                try:
                    await self._start()
                    pause_s = 0.0
                except StartError as error:
                    log.error("the process of files and batches did not start: %s", error)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _end_of(process: "subprocess.Popen[bytes]") -> int:
    """Return a process's code once it has ended."""
    if (code := process.poll()) is not None:
        return code
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()
