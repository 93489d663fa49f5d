"""One claimed batch, taken from step to step until it has ended, the claim is lost, or no line may start."""

import asyncio
import logging
import os
import random
import secrets
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from batches.claims import Claim
from batches.lines import (
    Handle,
    InputLimits,
    LineRequest,
    Parse,
    answered,
    check_input,
    lines_of,
    make_outputs,
    taken_apart,
    wait_s,
)
from batches.state import Checked, Decided, Ended, Facts, Fault, Made, Outcome, Step, next_step
from batches.storage.answer_log import AnswerLog, Tally, encoded, tally_of
from batches.storage.disk import Disk
from batches.storage.file_store import BatchFolder, FileStore
from cluster import logs
from cluster.errors import ServiceError
from cluster.fair_turns import FairTurns
from cluster.process.life import Drain
from cluster.process.tasks import Tasks, all_of, happens

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between looks for a cancellation by another process, and between records of the progress."""
SPARE_S = 60.0
"""Seconds after the batch's end for the deadline of a line: the batch ends first, and reports the line as expired."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Parts of the process that all its runs share."""

    files: FileStore
    disk: Disk
    handle: Handle
    endpoints: Collection[str]
    """Paths that lines may name."""
    parse: Parse
    limits: InputLimits
    drain: Drain
    """Whether no line may start, and, when it is over, whether those in flight are given up."""
    turns: FairTurns
    """Turns of lines, so that tenants share the concurrency."""
    concurrency: int
    """Lines of one batch that may be in flight."""
    clock: Callable[[], float]
    """Seconds since 1970."""
    look_s: float = LOOK_S


@dataclass(slots=True)
class _Lines:
    """Lines of a batch while they are answered."""

    made: Made
    input: int
    """Descriptor of the input."""
    offsets: "array[int]"
    """Offset of each line in the input, from number 1, and the end of the last line."""
    tally: Tally
    answers: AnswerLog

    def left(self) -> Iterator[int]:
        return (number for number in range(1, len(self.tally.done)) if not self.tally.done[number])


class Run:
    """Run of one batch by this process."""

    def __init__(self, batch: BatchFolder, claim: Claim, around: Surroundings) -> None:
        self._batch = batch
        self._claim = claim
        self._around = around
        self._looking = asyncio.Event()
        self._stopping = asyncio.Event()
        """Set when no further line starts."""

    def look(self) -> None:
        """Look at once whether the batch was cancelled."""
        self._looking.set()

    async def to_end(self) -> None:
        """Take the batch as far as this process can.

        Raises OSError.
        """
        around = self._around
        while not self._claim.lost.is_set() and not around.drain.draining:
            facts = await asyncio.to_thread(self._batch.facts)
            if facts is None:
                return
            match next_step(facts, around.clock()):
                case Step.NOTHING:
                    await asyncio.to_thread(self._batch.clean)
                    return
                case Step.CHECK:
                    await asyncio.to_thread(self._check, facts.made)
                case Step.ANSWER:
                    await self._answer_lines(facts)
                case Step.END_CANCELLED:
                    await asyncio.to_thread(self._decide, facts, "cancelled")
                case Step.END_EXPIRED:
                    await asyncio.to_thread(self._decide, facts, "expired")
                case Step.MAKE_OUTPUTS:
                    await asyncio.to_thread(self._end, facts)

    # ------------------------------------------------------------------ steps on a thread

    def _check(self, made: Made) -> None:
        """Check the input, and record the result."""
        around = self._around
        if made.endpoint not in around.endpoints:  # another version of the router made the batch
            message = f"This router does not serve {made.endpoint!r}."
            num_lines, faults = 0, [Fault(code="invalid_endpoint", message=message, param="endpoint")]
        else:
            with self._batch.input.open("rb") as file:
                lines = lines_of(file, around.limits.max_line_bytes)
                num_lines, faults = check_input(lines, made.endpoint, around.parse, around.limits)
        now = around.clock()
        if faults:
            self._batch.record(Ended(at=now, status="failed", faults=tuple(faults)))
        else:
            self._batch.record(Checked(at=now, num_lines=num_lines))

    def _decide(self, facts: Facts, outcome: Outcome) -> None:
        """Record how the running ends, and which answers count."""
        log_bytes: dict[str, int] = {}
        if facts.checked is not None:
            tally = self._tally(facts.checked.num_lines)
            log_bytes = tally.log_bytes
        self._batch.record(Decided(at=self._around.clock(), outcome=outcome, log_bytes=log_bytes))

    def _end(self, facts: Facts) -> None:
        """Make the outputs and record the end."""
        around = self._around
        limits = around.limits
        self._batch.record(
            make_outputs(self._batch, facts, around.files, around.parse, limits.max_line_bytes, around.clock())
        )

    def _tally(self, num_lines: int) -> Tally:
        return tally_of(self._batch.logs(), num_lines)

    def _open(self, made: Made, num_lines: int) -> _Lines | None:
        """Return the lines to answer, or None where all are answered."""
        tally = self._tally(num_lines)
        if not tally.num_left:
            return None
        offsets = array("Q", [0])
        with self._batch.input.open("rb") as file:
            at = 0
            for raw in file:
                offsets.append(at)
                at += len(raw)
            offsets.append(at)
        fd = os.open(self._batch.input, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, log_fd = self._batch.new_log()
        except OSError:
            os.close(fd)
            raise
        return _Lines(made, fd, offsets, tally, AnswerLog(self._around.disk, log_fd))

    # ------------------------------------------------------------------ answers

    async def _answer_lines(self, facts: Facts) -> None:
        """Answer lines until none is left, or the batch may not go on; record that none is left."""
        made, checked = facts.made, facts.checked
        assert checked is not None
        lines = await asyncio.to_thread(self._open, made, checked.num_lines)
        if lines is not None:
            try:
                await self._work_on(lines)
            finally:
                await lines.answers.close()
                os.close(lines.input)
            await asyncio.to_thread(self._batch.show_progress, lines.tally.progress)
        if lines is None or not lines.tally.num_left:
            await asyncio.to_thread(self._decide, facts, "completed")

    async def _work_on(self, lines: _Lines) -> None:
        numbers = lines.left()
        num_workers = min(self._around.concurrency, lines.tally.num_left)
        async with Tasks() as tasks:
            working = tasks.spawn(all_of(self._work(lines, numbers) for _ in range(num_workers)))
            watching = tasks.spawn(self._watch(lines))
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await watching
                if self._stopping.is_set():
                    await working  # lines in flight finish while the router waits for them
            else:
                await working

    async def _watch(self, lines: _Lines) -> None:
        """Return when the batch may not go on, for whatever reason."""
        around, shown = self._around, lines.tally.progress
        expires_at = lines.made.expires_at
        while True:
            left_s = expires_at - around.clock()
            if left_s <= 0 or self._claim.lost.is_set() or around.drain.over:
                return
            if around.drain.draining:
                self._stopping.set()
                return
            if await asyncio.to_thread(self._batch.is_cancelled):
                return
            if (progress := lines.tally.progress) != shown:
                await asyncio.to_thread(self._batch.show_progress, progress)
                shown = progress
            self._looking.clear()
            await happens(self._looking, min(around.look_s, left_s))

    async def _work(self, lines: _Lines, numbers: Iterator[int]) -> None:
        for number in numbers:  # one iterator for all workers
            if self._stopping.is_set():
                return
            await self._answer(lines, number)

    async def _answer(self, lines: _Lines, number: int) -> None:
        """Answer a line and log it; where the process stops before, it stays unanswered."""
        around, made = self._around, lines.made
        request_id = secrets.token_hex(16)
        logs.request_id.set(request_id)
        num_tries = 0
        while True:
            async with around.turns.turn(made.tenant):
                if self._stopping.is_set():
                    return
                num_tries += 1
                custom_id, body = await asyncio.to_thread(_read, lines, number)
                left_s = made.expires_at - around.clock()
                request = LineRequest(
                    made.endpoint, body, request_id, made.tenant, made.key, max(0.0, left_s) + SPARE_S
                )
                try:
                    answer = await around.handle(request)
                    break
                except ServiceError as error:
                    pause_s = wait_s(error, num_tries, random.random())
                    log.info("%s, line %d: next attempt in %.3g s: %s", made.id, number, pause_s, error)
            if await happens(self._stopping, pause_s):
                return
        output_line = answered(made.id, number, custom_id, request_id, answer)
        await lines.answers.append(encoded(number, answer.failed, output_line))
        lines.tally.count(number, answer.failed)


def _read(lines: _Lines, number: int) -> tuple[str, bytes]:
    begin, end = lines.offsets[number], lines.offsets[number + 1]
    return taken_apart(os.pread(lines.input, end - begin, begin))
