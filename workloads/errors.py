"""Errors in the input of the simulator."""

import math
from pathlib import Path

from cluster.errors import StartError, TandemError


class BadTrace(TandemError):
    """A malformed trace at `line`, counted from 1; 0: the file as a whole."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}" if line else f"{path}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class BadSetup(StartError):
    """An invalid option, or one that does not go with the others."""


SHOWN = 60
"""Characters of a bad value that an error repeats."""


def shown(value: object) -> str:
    """Return a value as Python writes it, shortened."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**SHOWN:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[: SHOWN + 1] if isinstance(value, str | bytes | list | tuple) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def check_above_0(field: str, value: float | None, or_0: bool = False) -> None:
    """Check for a finite number above 0, or None.

    Raises BadSetup.
    """
    if value is not None and not (0 < value < math.inf or (or_0 and value == 0)):
        raise BadSetup(field, f"{value:g} is not {'at least' if or_0 else 'above'} 0")
