"""Bodies that a client compressed. Pure."""

import zlib
from collections.abc import Mapping

from router.frontend.http.errors import HttpRefusal

HEADER = "content-encoding"
KNOWN: Mapping[str, str] = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
"""Encodings that are read, by their names in the header."""


def encoding_of(headers: Mapping[str, str]) -> str:
    """Return a body's encoding: gzip, deflate, or empty for none.

    Raises HttpRefusal, status 415, for any other one.
    """
    encoding = headers.get(HEADER, "").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in KNOWN:
        message = f"{encoding[:80]!r} is not supported: send gzip, deflate, or no encoding"
        raise HttpRefusal(415, "unsupported_content_encoding", message, HEADER)
    return KNOWN[encoding]


def refuse_encoding(headers: Mapping[str, str]) -> None:
    """Raise HttpRefusal, status 415, for a body in any encoding."""
    if (encoding := encoding_of(headers)) != "":
        message = f"{encoding!r} is not supported for uploads: send the file without an encoding"
        raise HttpRefusal(415, "unsupported_content_encoding", message, HEADER)


def inflated(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the content of a compressed body.

    No more than `max_bytes` and one byte of it is ever made, so the caller finds out that it is too large. Raises
    InvalidRequest for a body that is not in this encoding, or not whole.
    """
    inflater = zlib.decompressobj(_window_bits(body, encoding))
    try:
        content = inflater.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise _bad(encoding, str(error)) from None
    if len(content) > max_bytes:
        return content
    if not inflater.eof:
        raise _bad(encoding, "the compressed body is incomplete")
    if inflater.unused_data:
        raise _bad(encoding, "the request has bytes after the end of the compressed body")
    return content


def _window_bits(body: bytes, encoding: str) -> int:
    """Return zlib's parameter: gzip's header, zlib's, or none, which some clients take `deflate` to mean."""
    if encoding == "gzip":
        return 16 + zlib.MAX_WBITS
    has_header = len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS


def _bad(encoding: str, reason: str) -> HttpRefusal:
    return HttpRefusal(400, "invalid_value", f"the body is not in {encoding}: {reason}", HEADER)
