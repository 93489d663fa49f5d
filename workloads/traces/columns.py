"""Requests as rows of a CSV or as JSON objects: which columns have their times and lengths.

Azure's and BurstGPT's traces, LiteLLM's spend log and spans of OpenTelemetry are known; `--columns` names any others.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from workloads.request import BadSetup, shown
from workloads.traces.row import MAX_TOKENS, BadRow, Row

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
FIELDS = ("time", "prompt", "output", "session", "model")
ABSENT = object()
"""Value of a path that a row does not have; null and an empty cell are values."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of columns, or paths of keys joined by dots."""

    time: str
    prompt: str
    output: str
    session: str = ""
    model: str = ""
    unit: str = ""
    """Unit of times that are numbers; empty: seconds, or what their size says of times since 1970."""
    is_log: bool = True
    """Whether lines may be out of order, as those of a log written at a request's end."""
    need_all: bool = True
    """Whether a row must have `session` and `model`."""

    @property
    def lengths(self) -> tuple[str, str, str]:
        return self.time, self.prompt, self.output

    def named(self) -> list[str]:
        """Return the columns that a row must have."""
        return [name for name in (*self.lengths, *((self.session, self.model) if self.need_all else ())) if name]

    def read_row(self, values: Mapping[str, Any]) -> Row:
        """Read a row; one of a failed request has no tokens.

        Raises BadRow.
        """
        return Row(
            at_s=self._seconds(values),
            input_tokens=_tokens(self.prompt, value_at(values, self.prompt)),
            output_tokens=_tokens(self.output, value_at(values, self.output)),
            session_id=self._text(values, self.session),
            model=self._text(values, self.model),
        )

    def _seconds(self, values: Mapping[str, Any]) -> float:
        value = value_at(values, self.time)
        number = _number(value)
        if number is not None and 0 <= number < 1e20:
            return number * UNITS[self.unit or _likely_unit(number)]
        try:
            if not isinstance(value, str):
                raise ValueError
            at = datetime.fromisoformat(value.strip().removesuffix(" UTC"))
            return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            what = f"{self.time} is {'missing' if value is ABSENT else shown(value)}"
            raise BadRow(f"{what}, not a time such as 12.5 or 2023-11-16 18:15:46.6805900") from None

    def _text(self, values: Mapping[str, Any], name: str) -> str:
        value = value_at(values, name) if name else None
        if value is ABSENT and self.need_all:
            raise BadRow(f"{name} is missing")
        if value is None or value is ABSENT:
            return ""
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise BadRow(f"{name} is {shown(value)}, not a text")
        return str(value)


KNOWN = {
    "Azure's": Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", is_log=False, need_all=False),
    "BurstGPT's": Columns(
        "Timestamp", "Request tokens", "Response tokens", "Session ID", "Model", is_log=False, need_all=False
    ),
    "LiteLLM's": Columns("startTime", "prompt_tokens", "completion_tokens", "session_id", "model", need_all=False),
}
"""Formats that a header or a first object tells by its columns."""
_USAGE = "attributes.gen_ai.usage"
_SPANS = [
    Columns(
        "startTimeUnixNano",
        f"{_USAGE}.{prompt}_tokens",
        f"{_USAGE}.{output}_tokens",
        "attributes.gen_ai.conversation.id",
        f"attributes.gen_ai.{side}.model",
        need_all=False,
    )
    for prompt, output, side in (("input", "output", "request"), ("prompt", "completion", "response"))
]
"""Columns of a span by GenAI's conventions, and by their older names, which vLLM has."""
_AROUND_CALLS = ("invoke_agent", "create_agent", "execute_tool")
"""Operations whose spans sum up calls of models, which have spans of their own."""
OTLP = "resourceSpans"
"""Key that a line of OpenTelemetry's file exporter has."""


def parse_columns(text: str) -> Columns:
    """Parse `time=NAME,prompt=NAME,output=NAME[,session=NAME][,model=NAME]`; `time=NAME:ms` has a unit, too.

    Raises BadSetup.
    """
    named: dict[str, str] = {}
    for part in text.split(","):
        field, equals, name = part.partition("=")
        if field not in FIELDS or not equals or not name.strip():
            raise BadSetup("columns", f"{shown(part)} is not FIELD=COLUMN; fields are {', '.join(FIELDS)}")
        if field in named:
            raise BadSetup("columns", f"{field} is given twice")
        named[field] = name.strip()
    if missing := [field for field in FIELDS[:3] if field not in named]:
        raise BadSetup("columns", f"{', '.join(missing)} must be named: time=COLUMN,prompt=COLUMN,output=COLUMN")
    time, colon, unit = named.pop("time").rpartition(":")
    if not (time and unit in UNITS):
        time, unit = time + colon + unit, ""
    return Columns(time, named["prompt"], named["output"], named.get("session", ""), named.get("model", ""), unit)


def spans_of(values: Mapping[str, Any]) -> Iterable[Row]:
    """Yield the requests among a line's spans, which are in OTLP's JSON form; other spans are passed over.

    Raises BadRow.
    """
    try:
        spans = [span for of in values[OTLP] for scope in of.get("scopeSpans", ()) for span in scope.get("spans", ())]
    except (TypeError, AttributeError):
        raise BadRow(f"{OTLP} does not have scopeSpans with spans") from None
    for span in spans:
        if not isinstance(span, dict):
            raise BadRow(f"{OTLP} has {shown(span)}, not a span")
        if value_at(span, "attributes.gen_ai.operation.name") in _AROUND_CALLS:
            continue
        for columns in _SPANS:
            if value_at(span, columns.prompt) is not ABSENT:
                failed = value_at(span, columns.output) is ABSENT
                yield columns.read_row(span | {columns.output: 0} if failed else span)
                break


def value_at(values: Any, path: str) -> Any:
    """Return the value at a path, or ABSENT; keys may have dots, and lists of key and value are read as objects."""
    if isinstance(values, list):
        values = {
            each["key"]: next(iter(each["value"].values()), None)
            for each in values
            if isinstance(each, dict) and isinstance(each.get("key"), str) and isinstance(each.get("value"), dict)
        }
    if not isinstance(values, dict):
        return ABSENT
    if path in values:
        return values[path]
    for place, char in enumerate(path):
        if char == "." and (found := value_at(values.get(path[:place]), path[place + 1 :])) is not ABSENT:
            return found
    return ABSENT


def _tokens(name: str, value: Any) -> int:
    """Return a number of tokens; 0 for null and an empty cell, as of a failed request."""
    if value is ABSENT:
        raise BadRow(f"{name} is missing")
    number = 0.0 if value is None or value == "" else _number(value)
    if number is None or number != int(number):
        raise BadRow(f"{name} is {shown(value)}, not a whole number")
    if not 0 <= number <= MAX_TOKENS:
        raise BadRow(f"{name} is {number:g}, not 0 to {MAX_TOKENS}")
    return int(number)


def _number(value: Any) -> float | None:
    """Return a finite number, also one that is written as a text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _likely_unit(number: float) -> str:
    """Return the unit in which a number is a time of these decades; small ones are seconds of a clock of its own."""
    return next((unit for unit, least in (("ns", 1e17), ("us", 1e14), ("ms", 1e11)) if number >= least), "s")
