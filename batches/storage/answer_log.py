"""Logs of a batch's answers: one line each, synced before it counts.

A line is `NUMBER ok|failed CHECKSUM OUTPUT_LINE`. A reader stops at the first line that is torn or damaged: what was
synced lies before it.
"""

import asyncio
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from batches.state import Progress
from batches.storage.disk import Disk
from cluster.process.tasks import Tasks


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """Place of an output line in a log."""

    number: int
    """Number of the line in the input, from 1."""
    failed: bool
    log: Path
    offset: int
    length: int
    ends_at: int
    """Bytes of the log up to the end of this answer."""


@dataclass(slots=True)
class Tally:
    """Lines of a batch that are answered."""

    done: bytearray
    """One flag for each line, from number 1; the first byte is unused."""
    log_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of each log that were read."""
    completed: int = 0
    failed: int = 0

    @property
    def num_left(self) -> int:
        return len(self.done) - 1 - self.completed - self.failed

    @property
    def progress(self) -> Progress:
        return Progress(completed=self.completed, failed=self.failed)

    def count(self, number: int, failed: bool) -> None:
        """Count an answer; of two for one line, the first counts."""
        if not self.done[number]:
            self.done[number] = 1
            self.failed += failed
            self.completed += not failed


def encoded(number: int, failed: bool, output_line: bytes) -> bytes:
    """Return the line of the log for an answer."""
    assert b"\n" not in output_line
    return b"%d %s %08x %s\n" % (number, b"failed" if failed else b"ok", zlib.crc32(output_line), output_line)


def read_log(log: Path, num_lines: int, max_bytes: int | None = None) -> Iterator[LoggedAnswer]:
    """Yield the answers of a log, up to the first that is damaged, or to `max_bytes`."""
    with log.open("rb") as file:
        at = 0
        for raw in file:
            if max_bytes is not None and at + len(raw) > max_bytes:
                return
            parts = raw.split(b" ", 3)
            if not raw.endswith(b"\n") or len(parts) != 4 or not parts[0].isdigit():
                return
            number, output_line = int(parts[0]), parts[3][:-1]
            if not 1 <= number <= num_lines or b"%08x" % zlib.crc32(output_line) != parts[2]:
                return
            offset = at + len(raw) - len(parts[3])
            at += len(raw)
            yield LoggedAnswer(number, parts[1] == b"failed", log, offset, len(output_line), at)


def tally_of(logs: Iterable[Path], num_lines: int) -> Tally:
    """Read all logs of a batch."""
    tally = Tally(bytearray(1 + num_lines))
    for log in logs:
        tally.log_bytes[log.name] = 0
        for answer in read_log(log, num_lines):
            tally.count(answer.number, answer.failed)
            tally.log_bytes[log.name] = answer.ends_at
    return tally


class AnswerLog:
    """Log that this process writes; answers that come together are synced together."""

    def __init__(self, disk: Disk, fd: int) -> None:
        self._disk = disk
        self._fd = fd
        self._unwritten: list[tuple[bytes, asyncio.Future[None]]] = []
        self._tasks = Tasks("answers could not be written")
        self._is_writing = False
        self._failure: Exception | None = None

    async def append(self, line: bytes) -> None:
        """Return when the line is on disk.

        Raises OSError; from then on nothing can be appended, since the file may end in a torn line.
        """
        if self._failure is not None:
            raise self._failure
        written = asyncio.get_running_loop().create_future()
        self._unwritten.append((line, written))
        if not self._is_writing:
            self._is_writing = True
            self._tasks.spawn(self._write())
        await asyncio.shield(written)

    async def close(self) -> None:
        """Write what was appended, and close the file."""
        await self._tasks.join()
        os.close(self._fd)

    async def _write(self) -> None:
        while self._unwritten:
            batch, self._unwritten = self._unwritten, []
            try:
                if self._failure is None:
                    await asyncio.to_thread(self._append, b"".join(line for line, _ in batch))
            except Exception as error:  # any error: each waiting task gets it
                self._failure = error
            for _, written in batch:
                if written.cancelled():
                    continue
                if self._failure is None:
                    written.set_result(None)
                else:
                    written.set_exception(self._failure)
                    written.exception()  # a task that was cancelled meanwhile does not ask for it
        self._is_writing = False

    def _append(self, content: bytes) -> None:
        self._disk.write(self._fd, content)
        self._disk.sync(self._fd)
