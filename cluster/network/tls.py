"""TLS identities and trust.

Certificate files that change are read again.

A *member* of the cluster has a certificate signed by the cluster's own authority, `tls_ca`. Members demand one from
each other, both ways, on every internal port. A router may show clients another certificate and must use another
authority for client certificates, so a client is never taken for a member.
"""

import logging
import os
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cluster.errors import StartError
from cluster.settings import TlsSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class File:
    """A PEM file, and the setting that errors name."""

    setting: str
    path: Path


@dataclass(frozen=True, slots=True)
class _Contents:
    stamp: tuple[tuple[int, int, int], ...]
    cert: bytes
    key: bytes
    ca: bytes | None


class Credentials:
    """One certificate with its key, and the trusted authorities.

    Any thread may use it.
    """

    def __init__(self, cert: File, key: File, authorities: Sequence[File] = ()) -> None:
        """Read the files.

        Raises StartError for files that cannot be read or do not fit together.

        With `authorities`, a peer must have a certificate signed by one of them.
        """
        self._cert, self._key, self._authorities = cert, key, authorities
        self._lock = threading.Lock()
        self._complaint = ""
        self._contexts: list[ssl.SSLContext] = []
        self._calling: tuple[_Contents, ssl.SSLContext] | None = None
        """Context of connections to others, and the contents that it was made of."""
        self._contents = self._read(self._stamp())

    def current(self) -> _Contents:
        """Return the current contents of the files, or the previous ones while the files do not fit together."""
        with self._lock:
            stamp = self._stamp()
            if stamp != self._contents.stamp:
                self._read_again(stamp)
            return self._contents

    def for_http(self) -> ssl.SSLContext:
        """Return a server context for HTTP.

        Changed files take effect with the next connection.

        An authority removed from its file stays trusted until the process ends, because OpenSSL cannot forget one.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED if self._authorities else ssl.CERT_NONE
        self._load(context)

        def look(*_: object) -> None:
            self.current()

        context.sni_callback = look  # called also for clients that send no server name
        self._contexts.append(context)
        return context

    def for_caller(self) -> ssl.SSLContext:
        """Return a client context with the current files."""
        contents = self.current()
        if self._calling is None or self._calling[0] is not contents:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            self._load(context)
            self._calling = contents, context
        return self._calling[1]

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that differs when contents differ; a file replaced by renaming has another inode."""
        stamps = []
        for file in (self._cert, self._key, *self._authorities):
            try:
                at = os.stat(file.path)
                stamps.append((at.st_ino, at.st_mtime_ns, at.st_size))
            except OSError:
                stamps.append((0, 0, 0))  # the reader reports the reason
        return tuple(stamps)

    def _read_again(self, stamp: tuple[tuple[int, int, int], ...]) -> None:
        try:
            self._contents = self._read(stamp)
            for context in self._contexts:
                self._load(context)
        except StartError as error:
            if str(error) != self._complaint:  # log once, not at each connection
                log.error("the changed certificates cannot be used, the old ones stay in use: %s", error)
            self._complaint = str(error)
        else:
            self._complaint = ""
            log.info("read the certificate %s again", self._cert.path)

    def _read(self, stamp: tuple[tuple[int, int, int], ...]) -> _Contents:
        cert, key, *authorities = (_contents(file) for file in (self._cert, self._key, *self._authorities))
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # gRPC would report a fault only at the first connection
        return _Contents(stamp, cert, key, b"\n".join(authorities) or None)

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._cert.path, self._key.path, password=_no_password)
        except (OSError, ValueError) as error:
            reason = f"{self._cert.path} and {self._key.path} are not a certificate and its unencrypted key: "
            raise StartError(self._cert.setting, reason + _reason(error)) from None
        for file in self._authorities:
            try:
                context.load_verify_locations(file.path)
            except OSError as error:
                raise StartError(file.setting, f"{file.path} has no certificate: {_reason(error)}") from None


class TlsIdentity(Protocol):
    """Interface of a process's identity and trust when it connects."""

    @property
    def server_name(self) -> str:
        """Name that a server's certificate must have; empty: the host's."""

    def pem(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the trusted authorities, the key and the certificate of a channel opened now. Raises StartError."""

    def stamp(self) -> object:
        """Return a value that changes when certificates change; open channels keep the old ones."""


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """Identity of a process among other members of its cluster."""

    credentials: Credentials
    server_name: str = ""

    def pem(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        now = self.credentials.current()
        return now.ca, now.key, now.cert

    def for_stream(self, host: str) -> tuple[ssl.SSLContext, str]:
        """Return the context of a connection to a member at `host`, and the name that its certificate must have."""
        return self.credentials.for_caller(), self.server_name or host

    def stamp(self) -> object:
        return self.credentials.current().stamp


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Identity of a client.

    Without `ca` it trusts gRPC's default authorities. `cert` and `key` are for clusters that demand client
    certificates.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def server_name(self) -> str:
        return ""

    def pem(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the trusted authorities, the key and the certificate. Raises StartError."""
        if (self.cert is None) != (self.key is None):
            raise StartError(
                "tls_key" if self.key is None else "tls_cert",
                "is missing: a certificate and its key must be set together",
            )
        ca, cert, key = (
            None if path is None else _contents(File(setting, path))
            for setting, path in (("tls_ca", self.ca), ("tls_cert", self.cert), ("tls_key", self.key))
        )
        return ca, key, cert

    def stamp(self) -> object:
        return self

    def for_http(self) -> ssl.SSLContext:
        """Return an SSL context for HTTP.

        Raises StartError.
        """
        context = ssl.create_default_context(cafile=self.ca)
        if self.cert is not None and self.key is not None:
            context.load_cert_chain(self.cert, self.key)
        return context


def member_of(settings: TlsSettings) -> MemberIdentity | None:
    """Return the member identity of the settings, or None where TLS is not set.

    Raises StartError.
    """
    cert, key, ca = settings.tls_cert, settings.tls_key, settings.tls_ca
    if cert is None and key is None and ca is None:
        if settings.tls_server_name:
            raise StartError("tls_server_name", "needs tls_cert, tls_key and tls_ca")
        return None
    if cert is None or key is None or ca is None:
        missing = "tls_cert" if cert is None else "tls_key" if key is None else "tls_ca"
        raise StartError(missing, "is missing: tls_cert, tls_key and tls_ca must be set together")
    credentials = Credentials(File("tls_cert", cert), File("tls_key", key), [File("tls_ca", ca)])
    return MemberIdentity(credentials, settings.tls_server_name)


def _contents(file: File) -> bytes:
    try:
        return file.path.read_bytes()
    except OSError as error:
        raise StartError(file.setting, f"cannot read {file.path}: {error.strerror}") from None


def _no_password() -> str:
    """Return an empty password; otherwise OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
