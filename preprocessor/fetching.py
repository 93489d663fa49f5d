"""Media of URLs: `data:` URLs, and http and https URLs of hosts that the operator allows.

A URL is text of a client, so it must not reach what the client cannot: only public addresses are connected to, and the
address that is checked is the one that is connected to.
"""

import asyncio
import base64
import binascii
import ipaddress
import socket
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

from cluster.errors import InvalidRequest, StartError
from cluster.install import how_to_install

if TYPE_CHECKING:
    import aiohttp

MAX_REDIRECTS = 3
MAX_URL_CHARS = 8192
"""Longest http URL."""
IN_THREAD_CHARS = 1 << 20
"""Length from which a `data:` URL is decoded beside the event loop."""
CHUNK_BYTES = 64 << 10
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Addresses that stand for the IPv4 address in their last 32 bits."""


class _NotPublic(OSError):
    """An address that no URL may lead to."""


def is_public(address: str) -> bool:
    """Return whether an address is one of the public Internet, as is each IPv4 address that it stands for."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return found.ipv4_mapped is None and is_public(str(inner))
    refused = found.is_private or found.is_loopback or found.is_link_local or found.is_multicast or found.is_reserved
    return found.is_global and not refused and not found.is_unspecified


def is_allowed(host: str, allowed_hosts: Sequence[str]) -> bool:
    """Return whether a host is in a list of host names and `*.NAME`."""
    host = host.lower().rstrip(".")
    return any(
        host.endswith(allowed[1:]) and len(host) >= len(allowed) if allowed.startswith("*.") else host == allowed
        for allowed in allowed_hosts
    )


class Fetcher:
    """Reader of URLs."""

    def __init__(
        self,
        allowed_hosts: Sequence[str],
        max_bytes: int,
        limit_s: float,
        may_connect: Callable[[str], bool] = is_public,
    ) -> None:
        """Create it; `may_connect` tells of an address whether it may be connected to.

        Raises StartError where `allowed_hosts` needs a package that is not installed.
        """
        self._allowed_hosts = allowed_hosts
        self._max_bytes = max_bytes
        self._limit_s = limit_s
        self._may_connect = may_connect
        self._session: aiohttp.ClientSession | None = None
        if allowed_hosts and find_spec("aiohttp") is None:
            raise StartError("allowed_hosts", f"needs aiohttp: {how_to_install('preprocessor')}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(self, url: str, field: str) -> bytes:
        """Return the file that a URL names. Raises InvalidRequest for `field`."""
        if url[:5].lower() == "data:":
            if len(url) > self._max_bytes * 3 + MAX_URL_CHARS:  # the longest form of a byte is %XX
                raise InvalidRequest(field, f"the file has more than {self._max_bytes >> 20} MiB")
            if len(url) < IN_THREAD_CHARS:
                return self._decode(url, field)
            return await asyncio.to_thread(self._decode, url, field)
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._fetch(url, field)
        except TimeoutError:
            raise InvalidRequest(field, f"its server did not send it within {self._limit_s:g} s") from None

    def _decode(self, url: str, field: str) -> bytes:
        head, comma, text = url[5:].partition(",")
        if not comma:
            raise InvalidRequest(field, "its data: URL has no comma")
        try:
            if head.lower().endswith(";base64"):
                data = base64.b64decode(unquote_to_bytes(text), validate=True)
            else:
                data = unquote_to_bytes(text)
        except binascii.Error as error:
            raise InvalidRequest(field, f"its data: URL is no base64: {error}") from None
        if len(data) > self._max_bytes:
            raise InvalidRequest(field, f"the file has {len(data)} bytes, more than {self._max_bytes >> 20} MiB")
        return data

    async def _fetch(self, url: str, field: str) -> bytes:
        import aiohttp

        was_https = False
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url, field)
            is_https = url[:6].lower() == "https:"
            if was_https and not is_https:
                raise InvalidRequest(field, "its server redirects from https to http")
            was_https = is_https
            try:
                async with self._opened().get(url, allow_redirects=False) as response:
                    if response.status in (301, 302, 303, 307, 308):
                        url = urljoin(url, response.headers.get("Location", ""))
                        continue
                    return await self._body(response, field)
            except (aiohttp.ClientError, aiohttp.InvalidURL, OSError, ValueError) as error:
                if isinstance(error, TimeoutError):
                    raise
                raise InvalidRequest(field, f"the file cannot be fetched: {_reason(error)}") from None
        raise InvalidRequest(field, f"its server redirects more than {MAX_REDIRECTS} times")

    def _check(self, url: str, field: str) -> None:
        """Raise InvalidRequest for a URL that is not fetched."""
        if len(url) > MAX_URL_CHARS:
            raise InvalidRequest(field, f"its URL has {len(url)} characters, at most {MAX_URL_CHARS} are taken")
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname or "", parts.port
        except ValueError:
            raise InvalidRequest(field, "its URL is no URL") from None
        if parts.scheme not in ("http", "https"):
            raise InvalidRequest(field, f"its URL begins with {parts.scheme[:20]!r}, not with https, http or data")
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest(field, "its URL has a user name or a password")
        if not is_allowed(host, self._allowed_hosts):
            raise InvalidRequest(field, f"URLs of the host {host[:200]!r} are not fetched here (allowed_hosts)")

    async def _body(self, response: "aiohttp.ClientResponse", field: str) -> bytes:
        if response.status != 200:
            raise InvalidRequest(field, f"its server answers with status {response.status}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise InvalidRequest(field, "its server sends it compressed")
        too_large = InvalidRequest(field, f"the file has more than {self._max_bytes >> 20} MiB")
        if (response.content_length or 0) > self._max_bytes:
            raise too_large
        body = bytearray()
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            body += chunk
            if len(body) > self._max_bytes:
                raise too_large
        return bytes(body)

    def _opened(self) -> "aiohttp.ClientSession":
        """Return the session, whose sockets are made for checked addresses only."""
        if self._session is None:
            import aiohttp

            connector = aiohttp.TCPConnector(
                resolver=aiohttp.ThreadedResolver(),
                use_dns_cache=False,
                force_close=True,
                socket_factory=self.socket_for,
                limit=0,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity", "User-Agent": "tandem-preprocessor"},
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    def socket_for(self, address_info: Any) -> socket.socket:
        """Return a socket for an address. Raises _NotPublic where it must not be connected to."""
        family, kind, protocol, _, address = address_info
        if not self._may_connect(str(address[0])):
            raise _NotPublic("its address is not public")
        return socket.socket(family, kind, protocol)


def _reason(error: Exception) -> str:
    """Return what is said to a client: nothing of addresses and of the network here."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _NotPublic):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__
