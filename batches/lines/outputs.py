"""Output files of a batch: the same bytes whichever process makes them, and however often.

They follow from the input and from those parts of the logs that `Decided` names.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from batches.lines.input_check import lines_of
from batches.lines.line import Parse, read_line, unanswered
from batches.records import Decided, Ended, Facts, FileInfo
from batches.storage.answer_log import LoggedAnswer, read_log
from batches.storage.batch_store import BatchFolder
from batches.storage.file_store import FileStore, NewFile
from batches.storage.layout import FILE_PREFIX, derived_id

BUFFER_BYTES = 1 << 20


@dataclass(slots=True)
class _Output:
    """One output file: answers, or errors."""

    kind: str
    new: NewFile
    buffer: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    """Bytes in the buffer."""

    def add(self, line: bytes) -> None:
        self.buffer.append(line + b"\n")
        self.num_bytes += len(line) + 1
        if self.num_bytes > BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        self.new.write(b"".join(self.buffer))
        self.buffer, self.num_bytes = [], 0


def make_outputs(
    batch: BatchFolder, facts: Facts, files: FileStore, parse: Parse, max_line_bytes: int, now: float
) -> Ended:
    """Make the output files of a batch whose end is decided, and return its end."""
    made, decided = facts.made, facts.decided
    assert decided is not None
    if facts.checked is None:  # it ended before it began
        return Ended(at=now, status=decided.outcome)
    answers = _answers(batch, decided, facts.checked.num_lines)
    output = _Output("output", files.new_file(made.tenant))
    errors = _Output("error", files.new_file(made.tenant))
    completed = failed = 0
    logs: dict[str, int] = {}
    try:
        logs = {name: os.open(batch.path / name, os.O_RDONLY | os.O_CLOEXEC) for name in decided.log_bytes}
        with batch.input.open("rb") as file:
            lines = enumerate(lines_of(file, max_line_bytes), start=1)
            for number, raw in _up_to(lines, facts.checked.num_lines):
                answer = answers.get(number)
                if answer is None:
                    custom_id, _ = read_line(raw, made.endpoint, parse)
                    errors.add(unanswered(made.id, number, custom_id, decided.outcome))
                    continue
                output_line = os.pread(logs[answer.log.name], answer.length, answer.offset)
                (errors if answer.failed else output).add(output_line)
                failed += answer.failed
                completed += not answer.failed
        published = {each.kind: _publish(each, facts, decided, files) for each in (output, errors)}
    finally:
        for fd in logs.values():
            os.close(fd)
        output.new.discard()
        errors.new.discard()
    return Ended(
        at=now,
        status=decided.outcome,
        completed=completed,
        failed=failed,
        output_file_id=published["output"],
        error_file_id=published["error"],
    )


def _answers(batch: BatchFolder, decided: Decided, num_lines: int) -> dict[int, LoggedAnswer]:
    """Return the first answer to each line, in the order of the logs."""
    answers: dict[int, LoggedAnswer] = {}
    for name, num_bytes in decided.log_bytes.items():
        for answer in read_log(batch.path / name, num_lines, num_bytes):
            answers.setdefault(answer.number, answer)
    return answers


def _up_to(lines: Iterator[tuple[int, bytes]], num_lines: int) -> Iterator[tuple[int, bytes]]:
    for number, raw in lines:
        if number > num_lines:
            return  # blank lines at the end
        yield number, raw


def _publish(each: _Output, facts: Facts, decided: Decided, files: FileStore) -> str | None:
    """Publish a file and return its id; None for one without lines."""
    each.flush()
    if not each.new.num_bytes:
        return None
    made = facts.made
    lasts_s = made.output_lasts_s
    info = FileInfo(
        id=derived_id(FILE_PREFIX, decided.at, made.id, each.kind),
        tenant=made.tenant,
        num_bytes=each.new.num_bytes,
        created_at=decided.at,
        filename=f"{made.id}_{each.kind}.jsonl",
        purpose="batch_output",
        expires_at=None if lasts_s is None else decided.at + lasts_s,
    )
    files.add(each.new, info)
    return info.id
