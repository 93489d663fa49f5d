"""Requests as rows of a CSV or as JSON objects: which columns have their times and lengths.

Azure's and BurstGPT's traces, LiteLLM's spend log and spans of OpenTelemetry are known; `--columns` names any others.

Row of a trace before it is placed in time, and the checks common to every format.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from workloads.request import MAX_HASH_ID, BadSetup, shown

MAX_TOKENS = 1 << 24
"""Largest length of a prompt or an output."""
MAX_LINE_BYTES = 16 << 20


class BadRow(Exception):
    """Reason why a row cannot be read."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a trace; times are seconds of the trace's own clock."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    hash_tokens: int = 512
    tenant: str = ""
    priority: int = 0
    session_id: str = ""
    model: str = ""


def tokens_of(values: dict[str, Any], name: str) -> int:
    """Return a number of tokens, at least 1.

    Raises BadRow.
    """
    return _whole(values, name, 1, MAX_TOKENS)


def whole_of(values: dict[str, Any], name: str, least: int, most: int, default: int) -> int:
    """Return an optional whole number.

    Raises BadRow.
    """
    return default if values.get(name) is None else _whole(values, name, least, most)


def seconds_of(values: dict[str, Any], name: str, unit_s: float) -> float:
    """Return a time in seconds, at least 0.

    Raises BadRow.
    """
    value = _present(values, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise BadRow(f"{name} is {shown(value)}, not a time")
    return value * unit_s


def hash_ids_of(values: dict[str, Any], name: str, input_tokens: int, hash_tokens: int) -> tuple[int, ...]:
    """Return one id for each `hash_tokens` of the prompt; the field is optional.

    Raises BadRow.
    """
    ids = values.get(name)
    if ids is None:
        return ()
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise BadRow(f"{name} is not a list of whole numbers")
    if any(not 0 <= i < MAX_HASH_ID for i in ids):
        raise BadRow(f"{name} has a number outside [0, {MAX_HASH_ID})")
    least, most = input_tokens // hash_tokens, -(-input_tokens // hash_tokens)
    if ids and not least <= len(ids) <= most:
        raise BadRow(
            f"{name} has {len(ids)} hashes; a prompt of {input_tokens} tokens has {most}, of {hash_tokens} tokens each"
        )
    return tuple(ids)


def _whole(values: dict[str, Any], name: str, least: int, most: int) -> int:
    value = _present(values, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRow(f"{name} is {shown(value)}, not a whole number")
    if not least <= value <= most:
        raise BadRow(f"{name} is {shown(value)}, not {least} to {most}")
    return value


def _present(values: dict[str, Any], name: str) -> Any:
    if values.get(name) is None:
        raise BadRow(f"{name} is missing")
    return values[name]


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
