"""Reader of traces: yields requests, scaled and spread as requested.

Trace whose rate varies as over a day: the same requests in the same order, at other times.
"""

import csv
import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, BinaryIO

from workloads.request import BadSetup, BadTrace, TraceRequest, shown
from workloads.traces import mooncake, receipts
from workloads.traces.columns import KNOWN, MAX_LINE_BYTES, OTLP, BadRow, Columns, Row, spans_of
from workloads.traces.receipts import ServedRequest

Reader = Callable[[dict[str, Any]], Iterable[Row]]
_JSON_FORMATS: Mapping[str, tuple[str, Callable[[dict[str, Any]], Row]]] = {
    "Mooncake's": ("input_length", mooncake.read_row),
    "receipts": ("arrived_s", receipts.read_row),
}
"""Formats by name: a field that no other format has, and the reader of a line."""
csv.field_size_limit(MAX_LINE_BYTES)
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
    model: str = ""
    """Model whose requests are taken; empty: those of all models."""

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
        first, names, records = trace.records(file)
        if first and _JSON_FORMATS["receipts"][0] not in names:
            raise BadTrace(
                path,
                first,
                "is not of a log of `tandem bench --log`, whose receipts have the times of stages; traces without "
                "these are for `tandem replay`",
            )
        for number, values in records:
            try:
                yield receipts.read_served(values)
            except BadRow as error:
                raise BadTrace(path, number, str(error)) from None


class Trace:
    """A trace file of any size.

    Each iteration reads it again.
    """

    def __init__(self, path: Path, window: Window, columns: Columns | None = None) -> None:
        """Open a trace; `columns` None: its format is detected.

        Raises BadTrace when there is no such file.
        """
        try:
            if not path.is_file():
                raise BadTrace(path, 0, "is not a file")
        except OSError as error:
            raise BadTrace(path, 0, error.strerror or str(error)) from None
        self.path = path
        self.window = window
        self.columns = columns
        self.num_failed = 0
        """Requests without a prompt or an output in what was read last, which are left out."""

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
        last_s, self.num_failed = -math.inf, 0
        models: set[str] = set()
        with self.open() as file:
            for number, row in self._numbered(file):
                if row.at_s < last_s:
                    raise BadTrace(self.path, number, f"comes {last_s - row.at_s:g} s before the line above it")
                last_s = row.at_s
                models.add(row.model)
                if self.window.model not in ("", row.model):
                    continue
                if row.input_tokens and row.output_tokens:
                    yield row
                else:
                    self.num_failed += 1
        if models and self.window.model not in ("", *models):
            known = ", ".join(sorted(models)[:20]) or "no column that names them"
            raise BadTrace(self.path, 0, f"has no request of model {self.window.model!r}; models: {known}")

    def _numbered(self, file: BinaryIO) -> Iterator[tuple[int, Row]]:
        number, names, records = self.records(file)
        if number:
            read, is_log = self._reader(number, names)
            rows = self._read(records, read)
            yield from sorted(rows, key=lambda numbered: numbered[1].at_s) if is_log else rows

    def _read(self, records: Iterable[tuple[int, dict[str, Any]]], read: Reader) -> Iterator[tuple[int, Row]]:
        for number, values in records:
            try:
                for row in read(values):
                    yield number, row
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

    def records(self, file: BinaryIO) -> tuple[int, Collection[str], Iterator[tuple[int, dict[str, Any]]]]:
        """Return the number and the names of the first line, and all records with theirs; 0 for an empty file.

        Raises BadTrace.
        """
        lines = self.lines(file)
        number, line = next(lines, (0, ""))
        if line.startswith("{"):
            objects = self._objects(itertools.chain([(number, line)], lines))
            first = next(objects)
            return number, first[1], itertools.chain([first], objects)
        if line.startswith("["):
            raise BadTrace(self.path, number, "is a JSON array: write one object a line, as `jq -c '.[]'` does")
        rows = self._cells(itertools.chain([(number, line)], lines) if number else lines)
        number, header = next(rows, (0, []))
        names = [name.strip() for name in header]
        return number, names, self._named(rows, names)

    def _objects(self, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in lines:
            try:
                yield number, parse_object(line)
            except BadRow as error:
                raise BadTrace(self.path, number, str(error)) from None

    def _cells(self, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
        """Yield the cells of each row of a CSV, whose quoted cells may have several lines."""
        last = 0

        def texts() -> Iterator[str]:
            nonlocal last
            for number, text in lines:
                last = number
                yield text

        rows = csv.reader(texts())
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise BadTrace(self.path, last, f"is not CSV: {error}") from None
            yield last, cells

    def _named(
        self, rows: Iterable[tuple[int, list[str]]], names: Sequence[str]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, cells in rows:
            if len(cells) != len(names):
                raise BadTrace(self.path, number, f"has {len(cells)} columns, the first line {len(names)}")
            yield number, dict(zip(names, cells, strict=True))

    def _reader(self, number: int, names: Collection[str]) -> tuple[Reader, bool]:
        """Return the reader of this format's records, and whether they may be out of order."""
        is_csv = not isinstance(names, dict)
        if (columns := self.columns) is not None:
            missing = [name for name in columns.named() if name not in names]
            if is_csv and missing:
                raise BadTrace(
                    self.path,
                    number,
                    f"has no column {shown(missing[0])} of --columns; it has {shown(', '.join(names))}",
                )
            return _alone(columns.read_row), columns.is_log
        if OTLP in names and not is_csv:
            return spans_of, True
        for field, read in () if is_csv else _JSON_FORMATS.values():
            if field in names:
                return _alone(read), False
        for known in KNOWN.values():
            if all(name in names for name in known.lengths):
                return _alone(known.read_row), known.is_log
        formats = "; ".join(f"{name} has {', '.join(known.lengths)}" for name, known in KNOWN.items())
        if is_csv:
            raise BadTrace(
                self.path,
                number,
                f"is neither JSON nor a CSV header that is known ({formats}): name columns by --columns",
            )
        fields = ", ".join(f"{field} ({name})" for name, (field, _) in _JSON_FORMATS.items())
        raise BadTrace(
            self.path, number, f"has an unknown format: there is no {fields}, {OTLP} (spans): name columns by --columns"
        )


def _alone(read: Callable[[dict[str, Any]], Row]) -> Reader:
    return lambda values: (read(values),)


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


class RateSwing:
    """Trace whose request due at u is moved to t.

        u = t - c P / 2π sin(2π t / P),    c = (factor - 1) / (factor + 1).

    A trace of an even rate r gets the rate r (1 - c cos(2π t / P)): it begins at its lowest rate, r (1 - c), reaches
    its highest, `factor` times as much, half a period later, and averages r over every whole period. Bursts of the
    trace stay.
    """

    def __init__(self, trace: Iterable[TraceRequest], factor: float, period_s: float) -> None:
        """Wrap `trace`.

        Raises BadSetup.
        """
        if not 1 <= factor < math.inf:
            raise BadSetup("swing", f"{factor} is not at least 1")
        if not 0 < period_s < math.inf:
            raise BadSetup("period", f"{period_s} s is not above 0")
        self._trace = trace
        self._part = (factor - 1) / (factor + 1)
        self._period_s = period_s

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in self._trace:
            yield dataclasses.replace(request, arrival_s=self.at(request.arrival_s))

    def at(self, even_s: float) -> float:
        """Return the time t of a request due at `even_s`; t is within c P / 2π of it."""
        reach = self._part * self._period_s / (2 * math.pi)
        low, high = max(0.0, even_s - reach), even_s + reach
        for _ in range(60):
            middle = (low + high) / 2
            if middle - reach * math.sin(2 * math.pi * middle / self._period_s) < even_s:
                low = middle
            else:
                high = middle
        return high
