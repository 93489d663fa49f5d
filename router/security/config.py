"""Settings of access to the router: TLS, ports and API keys."""

import logging
from pathlib import Path

from pydantic import AwareDatetime, Field

from cluster.config import Config
from cluster.errors import StartError
from cluster.network.tls import Credentials, File, MemberIdentity, member_of
from cluster.settings import TlsSettings


class ApiKey(Config):
    """One API key, known to the router by its hash.

    `tandem keys new` makes both.
    """

    name: str = Field(min_length=1, max_length=256)
    """Name for logs."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    """SHA-256 of the key, in hexadecimal."""
    tenant: str = Field(default="", max_length=256)
    """Tenant of the key's requests, for limits, quota and fair share, whatever tenant they name."""
    models: tuple[str, ...] = ()
    """Models that the key may use and see. Empty: all."""
    operator: bool = False
    """Whether the key may see the whole cluster: ClusterStatus and the console, which shows requests of all tenants."""
    expires: AwareDatetime | None = None
    """Time from which the key is refused."""


log = logging.getLogger(__name__)


class SecuritySettings(TlsSettings):
    """Settings of access to a router."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    internal_port: int | None = Field(default=None, ge=0, le=65535)
    """Port where workers join, on `host` too; 0 lets the system choose. Required with TLS or API keys, because workers
    that join are sent prompts. Unset: workers join on `port`."""
    tls_public_cert: Path | None = None
    """Certificate for clients of gRPC and HTTP, instead of tls_cert: with its key, from an authority that clients
    trust."""
    tls_public_key: Path | None = None
    """Private key of `tls_public_cert`."""
    tls_client_ca: Path | None = None
    """Authority of client certificates: with it clients must have one. It must differ from tls_ca, whose certificates
    admit members of the cluster."""

    api_keys_file: Path | None = None
    """File with a YAML list of API keys, read again when it changes. With it, even an empty one, every call needs a
    key."""
    isolate_tenants: bool = False
    """Whether tenants' caches are separated: no tenant can learn from the time of a first token which prompts another
    tenant used. Prompts common to several tenants are computed for each."""

    @property
    def guarded(self) -> bool:
        """Whether the router restricts who may use it or listen."""
        certificates = (self.tls_cert, self.tls_key, self.tls_ca, self.tls_public_cert, self.tls_public_key)
        return any(certificates) or self.api_keys_file is not None

    def frontends(self) -> tuple[Credentials | None, MemberIdentity | None]:
        """Return the credentials for clients and for members.

        Raises StartError.
        """
        member, public = member_of(self), self._public()
        if self.guarded and self.internal_port is None:
            raise StartError("internal_port", "is required with TLS or API keys: a public port lets any process join")
        if self.api_keys_file is not None and self.reachable:
            if public is None:
                log.warning("API keys are sent unencrypted: set tls_cert and tls_key")
            if member is None:
                log.warning("without tls_ca any process that reaches internal_port may join and be sent prompts")
        return public, member

    @property
    def reachable(self) -> bool:
        """Whether other hosts may reach this router."""
        return self.host not in ("127.0.0.1", "::1", "localhost")

    def _public(self) -> Credentials | None:
        authorities = self._client_authorities()
        if self.tls_public_cert is None and self.tls_public_key is None:
            if self.tls_cert is not None and self.tls_key is not None:
                return Credentials(File("tls_cert", self.tls_cert), File("tls_key", self.tls_key), authorities)
            if authorities:
                raise StartError("tls_client_ca", "needs tls_cert or tls_public_cert")
            return None
        if self.tls_public_cert is None or self.tls_public_key is None:
            missing = "tls_public_cert" if self.tls_public_cert is None else "tls_public_key"
            raise StartError(missing, "is missing: tls_public_cert and tls_public_key must be set together")
        cert, key = File("tls_public_cert", self.tls_public_cert), File("tls_public_key", self.tls_public_key)
        return Credentials(cert, key, authorities)

    def _client_authorities(self) -> list[File]:
        if self.tls_client_ca is None:
            return []
        if self.tls_ca is not None and self.tls_client_ca.resolve() == self.tls_ca.resolve():
            raise StartError(
                "tls_client_ca", "must differ from tls_ca, whose certificates admit members of the cluster"
            )
        return [File("tls_client_ca", self.tls_client_ca)]
