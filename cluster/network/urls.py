"""URLs of HTTP servers."""

from urllib.parse import urlsplit


def server_url(server: str) -> str:
    """Return the URL of a server that is named by `host:port` or by a URL without a path.

    Raises ValueError.
    """
    parts = urlsplit(server if "://" in server else f"http://{server}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"{server!r} is not host:port or a URL http(s)://host:port")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{server!r}: a port must be 1 to 65535") from None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or (443 if parts.scheme == 'https' else 80)}"
