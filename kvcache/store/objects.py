"""Contract of a place that keeps objects: a folder or a bucket."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.store.kv_store import PlaceUse


class StoreError(Exception):
    """A failure of the place itself, such as a full disk or a server that does not answer."""


class ObjectMissing(Exception):
    """No object has this name, or not all of it could be read."""


ReadFailure = ObjectMissing | StoreError
"""Failure of one object's read; a damaged object counts as missing where its length tells."""


class Objects(ABC):
    """Objects of one length, by name.

    All methods may be called on several threads at once, and block.
    """

    identity: str
    """Name that is equal for processes that use the same place."""
    reads_at_once: int
    """Largest number of objects that one `read` should get."""
    keeps_objects: str = ""
    """Why objects cannot be removed; empty where these can."""

    @abstractmethod
    def held(self, names: Sequence[str]) -> list[bool]:
        """Return which objects exist, perhaps with damaged contents.

        Raises StoreError.
        """

    @abstractmethod
    def read(self, names: Sequence[str], into: Sequence[NDArray[np.uint8]]) -> list[ReadFailure | None]:
        """Fill `into`, uint8 [object bytes] each, and return each object's failure, or None."""

    @abstractmethod
    def write(self, name: str, stored: NDArray[np.uint8]) -> None:
        """Create or replace an object, whole or not at all.

        Raises StoreError.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object if it exists and if the place allows it.

        Raises StoreError.
        """

    @abstractmethod
    def used(self, name: str) -> None:
        """Record a use of an object, so that it is evicted later; a place that cannot does nothing."""

    def trim(self, name: str) -> list[str]:
        """Evict objects beyond the bounds after `name` was written; return the names of evicted ones.

        Raises StoreError.
        """
        return []

    def close(self) -> None:  # noqa: B027 - a folder has nothing to close
        """Release what the place holds; no call follows."""


class LocalObjects(Objects):
    """Objects in a place of this host, which can be listed."""

    @abstractmethod
    def heads(self, folder: str, num_bytes: int) -> Iterator[tuple[str, bytes]]:
        """Yield the names of all objects of a folder, with the first `num_bytes` of each.

        Raises StoreError.
        """

    @abstractmethod
    def places(self) -> list[PlaceUse]:
        """Return the use of each part of the place."""
