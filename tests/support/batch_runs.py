"""Runs of batches in virtual time, without threads, on a disk that crashes; and what came of them."""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batches.claims import Claim
from batches.lines import Handle, InputLimits, LineAnswer, LineRequest
from batches.run import Run, Surroundings
from batches.state import FileInfo, Made
from batches.storage.disk import BATCH_PREFIX, FILE_PREFIX, Disk, new_id
from batches.storage.file_store import BatchFolder, BatchStore, FileStore
from cluster.errors import Overloaded, Unavailable
from cluster.fair_turns import FairTurns
from cluster.process.life import Drain
from router.batches.link import Link
from router.frontend.http.body.fields import parse_object
from support.virtual_loop import VirtualLoop

ENDPOINT = "/v1/completions"
TENANT = "somebody"


class Crash(OSError):
    """The process is gone: nothing that it would do after this happens."""


class _Written:
    """A file that may lose what was not synced; the descriptor is its own, since the code closes others."""

    def __init__(self, fd: int) -> None:
        self.fd, self.synced, self.written = fd, 0, 0

    def __del__(self) -> None:
        os.close(self.fd)


class CrashingDisk(Disk):
    """Disk that crashes at one of its calls, and from then on does nothing. What was not synced may be lost."""

    def __init__(self, crash_at: int | None = None, seed: int = 0) -> None:
        self._left = crash_at
        self._random = random.Random(seed)
        self._files: dict[int, _Written] = {}
        """Files that were opened last by each descriptor."""
        self.has_crashed = False

    def _call(self) -> None:
        if self.has_crashed:
            raise Crash("crashed before")
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self.crash()
                raise Crash("now")

    def crash(self) -> None:
        self.has_crashed = True
        for file in self._files.values():
            os.ftruncate(file.fd, self._random.randint(file.synced, file.written))

    def open_new(self, path: Path) -> int:
        self._call()
        fd = super().open_new(path)
        self._files[fd] = _Written(os.dup(fd))
        return fd

    def write(self, fd: int, content: bytes) -> None:
        file = self._files[fd]
        if self._left == 0 and not self.has_crashed:  # torn
            super().write(fd, content[: self._random.randint(0, len(content))])
            file.written = os.fstat(fd).st_size
        self._call()
        super().write(fd, content)
        file.written = os.fstat(fd).st_size

    def sync(self, fd: int) -> None:
        self._call()
        if fd in self._files:  # others are folders
            self._files[fd].synced = self._files[fd].written

    def link(self, source: Path, target: Path) -> None:
        self._call()
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._call()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._call()
        super().remove(path)

    def make_folder(self, path: Path) -> None:
        self._call()
        super().make_folder(path)


class InlineLoop(VirtualLoop):
    """Calls for threads are made on the loop, so that the same seed gives the same order."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        return asyncio.ensure_future(self._called(func, *args), loop=self)

    async def _called(self, func: Any, *args: Any) -> Any:
        return func(*args)


class HeldClaim(Claim):
    async def release(self) -> None:
        """Do nothing: tests decide who runs."""


class World:
    """A folder with one batch, and processes that run it one after the other, or at once."""

    def __init__(self, root: Path, lines: Sequence[Any] | bytes, window_s: float = 1e6, seed: int = 0) -> None:
        self.root, self._random = root, random.Random(seed)
        self.lines = lines
        self.started: Counter[str] = Counter()
        """Answers that were begun, by custom_id."""
        self.drain = Drain()
        self.handle: Handle = self.answer
        files, batches = self._stores(Disk())
        content = lines if isinstance(lines, bytes) else b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        new = files.new_file(TENANT)
        new.write(content)
        info = FileInfo(
            id=new_id(FILE_PREFIX, 0), tenant=TENANT, num_bytes=len(content), created_at=0, filename="", purpose="batch"
        )
        made = Made(
            id=new_id(BATCH_PREFIX, 0), tenant=TENANT, key="", endpoint=ENDPOINT, input_file_id=info.id,
            completion_window="24h", created_at=0, expires_at=window_s,
        )  # fmt: skip
        self.batch = batches.make(made, files.add(new, info).content)
        self.files = files

    def run(self, disk: Disk | None = None, claim: Claim | None = None) -> Run:
        """A process's run of the batch, by default by a claim that it never loses."""
        disk = disk or CrashingDisk()
        return Run(self.folder(disk), claim or HeldClaim(), self.around(disk))

    def folder(self, disk: Disk) -> BatchFolder:
        return BatchFolder(self.batch.path, disk)

    def around(self, disk: Disk, concurrency: int = 4) -> Surroundings:
        files, _ = self._stores(disk)
        return Surroundings(
            files=files,
            disk=disk,
            handle=self.handle,
            endpoints=[ENDPOINT],
            parse=lambda raw: parse_object(raw, 1000),
            limits=InputLimits(10_000),
            drain=self.drain,
            turns=FairTurns(concurrency, concurrency),
            concurrency=concurrency,
            clock=self.now,
        )

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def answer(self, line: LineRequest) -> LineAnswer:
        """Answer after a while, or fail in a way that another try may mend."""
        body = json.loads(line.body)
        custom_id = body["prompt"]
        self.started[custom_id] += 1
        await asyncio.sleep(self._random.choice((0, 0, 0.5, 3)))
        match self._random.randrange(8):
            case 0:
                raise Overloaded("full", retry_after_s=2.0)
            case 1:
                raise Unavailable("no worker")
        if body.get("bad"):
            return LineAnswer(400, b'{"error": {"message": "no"}}')
        return LineAnswer(200, json.dumps({"text": custom_id}).encode())

    def outputs(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Lines of the output file and of the error file of the ended batch."""
        facts = self.batch.facts()
        assert facts is not None
        assert facts.ended is not None
        found = []
        for file_id in (facts.ended.output_file_id, facts.ended.error_file_id):
            file = None if file_id is None else self.files.find(file_id, TENANT)
            assert (file is None) == (file_id is None)
            found.append([] if file is None else [json.loads(line) for line in file.content.read_text().splitlines()])
        outputs, errors = found
        return outputs, errors

    def logged(self) -> set[str]:
        """The custom_ids in whole lines of the logs, read by other means than the code's."""
        found = set()
        for log in self.batch.path.glob("answers-*.jsonl"):
            for raw in log.read_bytes().split(b"\n")[:-1]:
                found.add(json.loads(raw.split(b" ", 3)[3])["custom_id"])
        return found

    def _stores(self, disk: Disk) -> tuple[FileStore, BatchStore]:
        clock = lambda: 0.0  # noqa: E731 # records' times matter in other tests
        return FileStore(self.root, disk, clock), BatchStore(self.root, disk, clock)


def link(**settings: Any) -> Link:
    """What a router with these settings tells."""
    told: dict[str, Any] = {"key": "secret", "router_id": "r", "drain_s": 1.0, "endpoints": (ENDPOINT,)}
    return Link(**told, max_body_bytes=1000, max_values=1000, **settings)


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"prompt": custom_id} | body}
