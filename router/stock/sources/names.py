"""Source of servers: all addresses of a host name."""

import socket
from collections.abc import AsyncIterator, Iterable
from typing import Any
from urllib.parse import urlsplit

from router.models.fleet_config import ServerEntry
from router.stock.sources.servers import Server, SourceFailed, polled, servers_at

EVERY_S = 2.0
"""Seconds between two look-ups; resolvers of a cluster answer from memory."""


def resolved(entry: ServerEntry) -> AsyncIterator[tuple[Server, ...]]:
    """Yield the servers at a name's addresses, again and again."""
    return polled(f"DNS name {entry.dns}", lambda: look_up(entry), EVERY_S)


def look_up(entry: ServerEntry) -> tuple[Server, ...]:
    """Return the servers at the addresses that the name has now. Raises SourceFailed."""
    name = urlsplit(entry.dns)
    try:
        found = socket.getaddrinfo(name.hostname, name.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SourceFailed(str(error)) from None
    return servers_at(entry, name.scheme, dict.fromkeys(of_one_family(found), False), name.port)


def of_one_family(found: Iterable[tuple[Any, ...]]) -> set[str]:
    """Return the IPv4 addresses that `getaddrinfo` found, or the IPv6 ones where it found no others.

    A server of a cluster with both families has an address of each, and is one server.
    """
    addresses = {(family, address[0]) for family, _, _, _, address in found}
    families = {family for family, _ in addresses}
    taken = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return {address for family, address in addresses if family == taken}
