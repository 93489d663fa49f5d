"""Row of a trace before it is placed in time, and the checks common to every format."""

from dataclasses import dataclass
from typing import Any

from workloads.request import MAX_HASH_ID, shown

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
