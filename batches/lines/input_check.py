"""Check of a batch's input before any line runs. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from batches.lines.line import MAX_CUSTOM_ID_CHARS, LineFault, Parse, read_line
from batches.records import Fault

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
