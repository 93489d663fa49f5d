"""Servers that all sources of a fleet list at present."""

from dataclasses import dataclass

from router.stock.config import ServerEntry


@dataclass(frozen=True, slots=True)
class Server:
    """One listed server."""

    url: str
    """scheme://host:port."""
    entry: ServerEntry
    """Entry of the settings that brought it; its role may be another one in `role`."""
    role: str
    draining: bool = False
    """Whether it is about to leave: nothing new may start there."""
