"""Errors that name the field at fault."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cluster.errors import InvalidRequest, ServiceError, StartError


@contextmanager
def refusal_of(
    field: str, kind: type[ServiceError | StartError] = InvalidRequest, match: str | None = None, says: str = ""
) -> Iterator[None]:
    """Expect an error of this kind in the block, which names this field, and whose text matches and has these words."""
    with pytest.raises(kind, match=match) as caught:
        yield
    error: Any = caught.value
    assert error.field == field, f"it names {error.field!r}, not {field!r}"
    assert says in str(error)
