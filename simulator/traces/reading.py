"""Reader of traces: yields requests, scaled and spread as requested."""

import csv
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, BinaryIO

from simulator.errors import BadSetup, BadTrace
from simulator.request import TraceRequest
from simulator.traces import azure, mooncake, receipts
from simulator.traces.receipts import ServedRequest
from simulator.traces.row import MAX_LINE_BYTES, BadRow, Row

_JSON_FORMATS: dict[str, tuple[str, Callable[[dict[str, Any]], Row]]] = {
    "mooncake": ("input_length", mooncake.read_row),
    "receipts": ("prompt_tokens", receipts.read_row),
}
"""Formats by name: a field that no other format has, and the reader of a line."""
_PACKED = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"PK\x03\x04", "zip"), (b"BZh", "bzip2"))


@dataclass(frozen=True, slots=True)
class Window:
    """Part of a trace that is replayed, and its speed."""

    rate: float = 1.0
    """Factor of the arrival rate."""
    start_s: float = 0.0
    """Seconds of the trace's own time, from its first line, that are skipped."""
    duration_s: float = math.inf
    """Seconds of the trace's own time after which later requests are skipped."""
    most: int | None = None
    """Largest number of requests."""
    spread_s: float = 0.0
    """Resolution of the trace's times: each request arrives up to so much later, at random."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rate", 1e-6), ("duration_s", 1e-9), ("start_s", 0.0), ("spread_s", 0.0)):
            value = getattr(self, name)
            if not (value >= least) or (value == math.inf and name != "duration_s"):
                raise BadSetup(name.removesuffix("_s"), f"{value} is not at least {least:g}")
        if self.most is not None and self.most < 1:
            raise BadSetup("requests", f"{self.most} is not at least 1")


def served_of(path: Path) -> Iterator[ServedRequest]:
    """Yield a log of receipts, receipts included.

    Raises BadTrace.
    """
    trace = Trace(path, Window())
    with trace.open() as file:
        for number, line in trace.lines(file):
            try:
                yield receipts.read_served(parse_object(line))
            except BadRow as error:
                raise BadTrace(path, number, str(error)) from None


class Trace:
    """A trace file of any size.

    Each iteration reads it again.
    """

    def __init__(self, path: Path, window: Window) -> None:
        """Open a trace.

        Raises BadTrace when there is no such file.
        """
        try:
            if not path.is_file():
                raise BadTrace(path, 0, "is not a file")
        except OSError as error:
            raise BadTrace(path, 0, error.strerror or str(error)) from None
        self.path = path
        self.window = window

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield requests in order of time, the first at 0 or, spread, soon after.

        Raises BadTrace.
        """
        window, seeds = self.window, random.Random(self.window.seed)
        later: list[tuple[float, int, Row]] = []
        number = 0
        for place, (at_s, row) in enumerate(self._windowed()):
            while later and later[0][0] <= at_s:  # nothing that is still to be read comes before it
                yield self._request(number, *heappop(later))
                number += 1
            heappush(later, (at_s + seeds.random() * window.spread_s, place, row))
        while later:
            yield self._request(number, *heappop(later))
            number += 1

    def _request(self, number: int, at_s: float, place: int, row: Row) -> TraceRequest:
        return TraceRequest(
            number=number,
            arrival_s=at_s / self.window.rate,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            hash_ids=row.hash_ids,
            hash_tokens=row.hash_tokens,
            tenant=row.tenant,
            priority=row.priority,
            session_id=row.session_id,
        )

    def _windowed(self) -> Iterator[tuple[float, Row]]:
        """Yield each row of the window with its seconds since the window's start."""
        window, first_s, count = self.window, None, 0
        end_s = window.start_s + window.duration_s
        for row in self.rows():
            first_s = row.at_s if first_s is None else first_s
            since_s = row.at_s - first_s
            if since_s < window.start_s:
                continue
            if since_s >= end_s or (window.most is not None and count == window.most):
                break
            count += 1
            yield since_s - window.start_s, row
        if not count:
            raise BadTrace(
                self.path, 0, "has no request in the window asked for" if first_s is not None else "is empty"
            )

    def open(self) -> BinaryIO:
        """Open the file for reading bytes.

        Raises BadTrace.
        """
        try:
            return self.path.open("rb")
        except OSError as error:
            raise BadTrace(self.path, 0, error.strerror or str(error)) from None

    def rows(self) -> Iterator[Row]:
        """Yield all rows in order.

        Raises BadTrace.
        """
        last_s = -math.inf
        with self.open() as file:
            for number, row in self._numbered(file):
                if row.at_s < last_s:
                    raise BadTrace(self.path, number, f"comes {last_s - row.at_s:g} s before the line above it")
                last_s = row.at_s
                yield row

    def _numbered(self, file: BinaryIO) -> Iterator[tuple[int, Row]]:
        read: Callable[[str], Row] | None = None
        for number, line in self.lines(file):
            if read is None:
                read = self._reader(number, line)
                if not line.lstrip().startswith("{"):
                    continue  # the header of a CSV
            try:
                yield number, read(line)
            except BadRow as error:
                raise BadTrace(self.path, number, str(error)) from None

    def lines(self, file: BinaryIO) -> Iterator[tuple[int, str]]:
        """Yield the lines that are not blank, with their numbers."""
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1 and (packed := next((name for magic, name in _PACKED if line.startswith(magic)), "")):
                raise BadTrace(self.path, 0, f"is compressed ({packed}): unpack it first")
            if len(line) > MAX_LINE_BYTES:
                raise BadTrace(self.path, number, f"is longer than {MAX_LINE_BYTES} bytes")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                raise BadTrace(self.path, number, "is not UTF-8 text") from None
            if text:
                yield number, text

    def _reader(self, number: int, line: str) -> Callable[[str], Row]:
        """Return the row reader for the format of the first line."""
        if not line.startswith("{"):
            try:
                header = [name.strip() for name in _cells(line)]
            except BadRow as error:
                raise BadTrace(self.path, number, str(error)) from None
            if missing := [name for name in azure.COLUMNS if name not in header]:
                columns = ", ".join(missing)
                raise BadTrace(
                    self.path, number, f"is neither JSON nor a CSV header: the columns {columns} are missing"
                )
            return lambda text: azure.read_row(header, _cells(text))
        try:
            first = parse_object(line)
        except BadRow as error:
            raise BadTrace(self.path, number, str(error)) from None
        for field, read in _JSON_FORMATS.values():
            if field in first:
                return lambda text: read(parse_object(text))
        known = " or ".join(f"{field} ({name})" for name, (field, _) in _JSON_FORMATS.items())
        raise BadTrace(self.path, number, f"has an unknown format: there is no {known}")


def _cells(line: str) -> list[str]:
    """Split a CSV line into cells.

    Raises BadRow.
    """
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise BadRow(f"is not CSV: {error}") from None


def parse_object(line: str) -> dict[str, Any]:
    """Parse a line that must be a JSON object.

    Raises BadRow.
    """
    try:
        values = json.loads(line)
    except ValueError as error:
        raise BadRow(f"is not JSON: {error}") from None
    except RecursionError:
        raise BadRow("is not JSON of this format: it is nested too deeply") from None
    if not isinstance(values, dict):
        raise BadRow("is not a JSON object")
    return values
