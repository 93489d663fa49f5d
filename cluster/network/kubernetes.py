"""The API server of Kubernetes, as the service account of a pod reaches it.

URLs of HTTP servers.
"""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cluster.config import Config
from cluster.errors import StartError


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


ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ApiServerSettings(Config):
    """Location of the API server, and the account there."""

    api_server: str = ""
    """API server as https://host:port. Default: that of the cluster in which this process runs."""
    account_dir: Path = ACCOUNT
    """Directory with `token`, `ca.crt` and `namespace`, as Kubernetes mounts it."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Address of an API server, and the files of an account there."""

    url: str
    """scheme://host:port."""
    tls: ssl.SSLContext | None
    """Authorities of the server's certificate; None at an http:// URL."""
    account_dir: Path

    @classmethod
    def of(cls, settings: ApiServerSettings, key: str) -> "ApiServer":
        """Return the server that the settings at `key` name. Raises StartError."""
        url = settings.api_server
        if not url:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                raise StartError(f"{key}.api_server", "is needed outside a Kubernetes cluster")
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        if "://" not in url:  # a bare host:port would get the token in clear text
            raise StartError(f"{key}.api_server", f"{url!r} is not an http:// or https:// URL")
        try:
            url = server_url(url)
        except ValueError as error:
            raise StartError(f"{key}.api_server", str(error)) from None
        if url.startswith("http:"):
            return cls(url, None, settings.account_dir)
        ca = settings.account_dir / "ca.crt"
        try:
            return cls(url, ssl.create_default_context(cafile=str(ca)), settings.account_dir)
        except (OSError, ssl.SSLError) as error:
            raise StartError(f"{key}.account_dir", f"cannot read {ca}: {error}") from None

    def token(self) -> str:
        """Return the account's token, read each time because Kubernetes renews it. Raises OSError."""
        return (self.account_dir / "token").read_text().strip()

    def namespace(self, key: str) -> str:
        """Return the account's namespace. Raises StartError naming `key`."""
        path = self.account_dir / "namespace"
        try:
            return path.read_text().strip()
        except OSError as error:
            raise StartError(key, f"cannot read {path}: {error.strerror}") from None
