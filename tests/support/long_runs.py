"""What `make test` leaves to `make test-long`: more of the same kind, where a slice is enough for every change."""

from collections.abc import Iterable
from typing import Any

import pytest

long = pytest.mark.long


def mostly_long(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Of a parameter, or of tuples of several: `make test` runs those `kept`."""
    return [
        value if value in kept else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=long)
        for value in values
    ]
