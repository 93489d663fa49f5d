"""Lines of a batch: their check before any of them runs, their retries, their answers, and the output files.

A line is tried again as long as its batch lasts, where another try may succeed. The output files have the same bytes
whichever process makes them, and however often: they follow from the input and from those parts of the logs that
`Decided` names.
"""

import hashlib
import json
import math
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from batches.state import Decided, Ended, Facts, Fault, FileInfo
from batches.storage.answer_log import LoggedAnswer, read_log
from batches.storage.disk import FILE_PREFIX, derived_id
from batches.storage.file_store import BatchFolder, FileStore, NewFile
from cluster.errors import InvalidRequest, Overloaded, ServiceError

MAX_CUSTOM_ID_CHARS = 512
FRAME_BYTES = 8 << 10
"""Bytes of a line besides its request's body."""

Parse = Callable[[bytes], dict[str, Any]]
"""Parser of a JSON object. Raises InvalidRequest."""


class LineFault(Exception):
    """A line that is no request of its batch."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The request of a line."""

    endpoint: str
    """Path at the router."""
    body: bytes
    """JSON bytes, as they are in the input."""
    request_id: str
    tenant: str
    key: str
    """Name of the API key with which the batch was made; empty where none is needed."""
    deadline_s: float
    """Seconds for the request, unless its body sets others."""


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """Answer to a line, as the HTTP endpoint would give it."""

    status: int
    body: bytes
    """JSON bytes."""

    @property
    def failed(self) -> bool:
        return self.status != 200


Handle = Callable[[LineRequest], Awaitable[LineAnswer]]
"""Answer a line. Raises Overloaded or Unavailable where the line should be tried again (`batches/lines.py`)."""


class _Line(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


def taken_apart(raw: bytes) -> tuple[str, bytes]:
    """Return the custom_id and the body of a line that was checked, the body as it stands there."""
    line = msgspec.json.decode(raw, type=_Line)
    return line.custom_id, bytes(line.body)


def read_line(raw: bytes, endpoint: str, parse: Parse) -> tuple[str, dict[str, Any]]:
    """Return a line's custom_id and body.

    Raises LineFault.
    """
    try:
        values = parse(raw)
    except (InvalidRequest, RecursionError) as error:
        raise LineFault("invalid_json_line", f"The line is not a valid JSON object: {error}") from None
    for name, kind, called in (("custom_id", str, "a string"), ("url", str, "a string"), ("body", dict, "an object")):
        if values.get(name) is None:
            raise LineFault("missing_required_parameter", f"The line has no {name!r}.", name)
        if not isinstance(values[name], kind):
            raise LineFault("invalid_type", f"{name!r} must be {called}.", name)
    if not 0 < len(values["custom_id"]) <= MAX_CUSTOM_ID_CHARS:
        raise LineFault("invalid_value", f"'custom_id' must have 1 to {MAX_CUSTOM_ID_CHARS} characters.", "custom_id")
    if values.get("method") != "POST":
        raise LineFault("invalid_method", "'method' must be 'POST'.", "method")
    if values["url"] != endpoint:
        raise LineFault("mismatched_url", f"'url' must be the batch's endpoint, {endpoint!r}.", "url")
    return values["custom_id"], values["body"]


def answered(batch_id: str, number: int, custom_id: str, request_id: str, answer: LineAnswer) -> bytes:
    """Return the output line of an answered line."""
    # The body is JSON already. Its strings have no line breaks, so one is a space between values.
    body = answer.body.replace(b"\n", b" ").replace(b"\r", b" ")
    head = _head(batch_id, number, custom_id)
    status = f'"status_code": {answer.status}, "request_id": {json.dumps(request_id)}, "body": '
    return head.encode() + b'"response": {' + status.encode() + body + b'}, "error": null}'


def unanswered(batch_id: str, number: int, custom_id: str, outcome: str) -> bytes:
    """Return the output line of a line that was not answered before its batch ended."""
    why = {
        "expired": "This request could not be executed before the completion window expired.",
        "cancelled": "This request was not executed, because the batch was cancelled.",
    }[outcome]
    error = json.dumps({"code": f"batch_{outcome}", "message": why})
    return f'{_head(batch_id, number, custom_id)}"response": null, "error": {error}}}'.encode()


def _head(batch_id: str, number: int, custom_id: str) -> str:
    drawn = hashlib.sha256(f"{batch_id} {number}".encode()).hexdigest()[:24]
    return f'{{"id": "batch_req_{drawn}", "custom_id": {json.dumps(custom_id)}, '


MAX_LINES = 50_000
MAX_FAULTS = 100
"""Faults after which the rest of an input is not looked at."""


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Limits of an input and of its lines."""

    max_line_bytes: int
    max_lines: int = MAX_LINES


def lines_of(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Yield lines without their ends; of one that is too long, its first `max_bytes + 1` bytes."""
    while raw := file.readline(max_bytes + 2):
        rest = raw
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(1 << 20)
        yield raw.rstrip(b"\r\n")[: max_bytes + 1]


def check_input(lines: Iterator[bytes], endpoint: str, parse: Parse, limits: InputLimits) -> tuple[int, list[Fault]]:
    """Return the number of lines, and the faults."""
    faults: list[Fault] = []
    seen: dict[str, int] = {}
    number, num_blank = 0, 0
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            num_blank += 1
            if num_blank > MAX_FAULTS:
                break
            continue
        if num_blank:
            faults.append(Fault(code="invalid_json_line", message="The line is empty.", line=number - 1))
            num_blank = 0
        if number > limits.max_lines:
            message = f"The file may have {limits.max_lines} lines at most."
            faults.append(Fault(code="too_many_requests", message=message, line=number))
            break
        try:
            _check_line(raw, number, endpoint, parse, limits, seen)
        except LineFault as fault:
            faults.append(Fault(code=fault.code, message=fault.message, line=number, param=fault.param))
        if len(faults) >= MAX_FAULTS:
            break
    if number == num_blank:
        faults.append(Fault(code="empty_file", message="The file has no lines."))
    elif num_blank > MAX_FAULTS:
        faults.append(Fault(code="invalid_json_line", message="The line is empty.", line=number))
    return number - num_blank, faults


def _check_line(
    raw: bytes, number: int, endpoint: str, parse: Parse, limits: InputLimits, seen: dict[str, int]
) -> None:
    if len(raw) > limits.max_line_bytes:
        message = f"The line may have {limits.max_line_bytes} bytes at most (max_body_mib and its frame)."
        raise LineFault("line_too_long", message)
    custom_id, _ = read_line(raw, endpoint, parse)
    first = seen.setdefault(custom_id, number)
    if first != number:
        shown = (
            custom_id if len(custom_id) <= MAX_CUSTOM_ID_CHARS // 8 else f"{custom_id[: MAX_CUSTOM_ID_CHARS // 8]}..."
        )
        raise LineFault("duplicate_custom_id", f"Line {first} has the custom_id {shown!r} already.", "custom_id")


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


FIRST_WAIT_S = 0.25
MAX_WAIT_S = 30.0
"""Longest wait without advice, in seconds."""
MAX_ADVISED_S = 600.0
"""Longest wait with advice, in seconds: a quota's window may last a day, but a limit may be raised before."""


def wait_s(error: ServiceError, num_tries: int, luck: float) -> float:
    """Return the seconds until the next try after so many; `luck` in [0, 1] spreads lines that failed together."""
    own = min(MAX_WAIT_S, FIRST_WAIT_S * math.ldexp(1.0, min(num_tries - 1, 20)))
    advised = error.retry_after_s if isinstance(error, Overloaded) else None
    return max(own, min(MAX_ADVISED_S, advised or 0.0)) * (1.0 + luck / 2)
