"""Memory for rows of whole blocks."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtransfer.hardware.main_memory import check_fits

Allocate = Callable[[int, int], NDArray[np.uint8]]
"""Callable allocate(count, row_bytes) that returns uint8 [count, row_bytes].

Raises MemoryError. An engine of several ranks allocates memory that all of them map."""


def private_rows(count: int, row_bytes: int) -> NDArray[np.uint8]:
    """Allocate rows for this process alone. The system allocates pages at their first write.

    Raises MemoryError.
    """
    try:
        check_fits(count * row_bytes)
        return np.empty((count, row_bytes), np.uint8)
    except (OSError, ValueError) as error:  # the latter: more than an address can express
        raise MemoryError(str(error)) from None
