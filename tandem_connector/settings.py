"""Settings of the connector: the keys of `kv_connector_extra_config`."""

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from cluster.config import Config
from cluster.errors import StartError
from cluster.network.kubernetes import server_url
from cluster.network.tls import MemberIdentity, member_of
from cluster.settings import TlsSettings

EXTRA = "kv_connector_extra_config"
LOOPBACK = "127.0.0.1"
ALL_ADDRESSES = ("0.0.0.0", "::")
MIN_SECRET_BYTES = 16


class ConnectorSettings(Config, TlsSettings):
    """Keys of `kv_connector_extra_config`."""

    lenders: tuple[str, ...] = ()
    """Servers from which requests borrow that name no lender of their own: `host:port`, or URLs. A host name may stand
    for several servers, as that of a headless Kubernetes service does."""
    trusted_lenders: tuple[str, ...] = ()
    """Further servers that a request may name in `kv_transfer_params`. `*` trusts all: then whoever may send requests
    decides where this server sends their prompts."""
    lender_api_key_file: Path | None = None
    """File with the API key of the lenders' servers."""
    lender_ca_file: Path | None = None
    """Authorities of the certificates of lenders at https:// URLs; unset: those of the system."""
    min_tokens: int = Field(default=0, ge=0)
    """Number of missing prompt tokens below which a request borrows nothing."""
    patience_s: float = Field(default=5.0, gt=0)
    """Seconds without a new block after which a request computes what is missing."""
    loan_host: str = ""
    """Address at which other servers reach this one's loans. Default: loopback, or with tls_ca or secret_file all."""
    loan_port: int = Field(default=0, ge=0, le=65535)
    """Port of loans; data-parallel rank N takes the N-th after it. 0 lets the system choose."""
    advertise_host: str = ""
    """Host name or address that other servers are told. Default: `loan_host`, or the address of this host."""
    secret_file: Path | None = None
    """File with a secret that all servers share; those that do not know it cannot borrow. It does not encrypt."""
    peer_silence_s: float = Field(default=4.0, ge=0.5)
    """Seconds without a sign of life after which a server with loans has failed."""
    transport: str = "nixl"
    """Transport that reads KV memory."""
    kv_in_file: bool = True
    """Whether KV memory in main memory is a file that other servers of this host can map, which makes reads faster."""

    @field_validator("lenders", "trusted_lenders", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return tuple(each.strip() for each in value.split(",") if each.strip()) if isinstance(value, str) else value

    @field_validator("lenders")
    @classmethod
    def _as_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(server_url(each) for each in value)

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> "ConnectorSettings":
        """Read the keys. Raises StartError with the name of the one at fault."""
        try:
            return cls.parse(dict(extra))
        except StartError as error:
            raise StartError(f"{EXTRA}.{error.field}", error.reason) from None

    @property
    def is_guarded(self) -> bool:
        """Whether a peer must prove that it may borrow."""
        return self.tls_ca is not None or self.secret_file is not None

    @property
    def host(self) -> str:
        """Address at which loans are taken."""
        return self.loan_host or (ALL_ADDRESSES[0] if self.is_guarded else LOOPBACK)

    def secret(self) -> bytes:
        """Return the shared secret; empty without one. Raises StartError."""
        secret = _read(self.secret_file, "secret_file").strip()
        if self.secret_file is not None and len(secret) < MIN_SECRET_BYTES:
            reason = f"{self.secret_file} has {len(secret)} bytes; a secret has at least {MIN_SECRET_BYTES}"
            raise StartError(f"{EXTRA}.secret_file", reason)
        return secret

    def api_key(self) -> str:
        """Return the API key of the lenders' servers; empty without one. Raises StartError."""
        return _read(self.lender_api_key_file, "lender_api_key_file").decode(errors="replace").strip()

    def trust(self) -> MemberIdentity | None:
        """Return the identity that peers demand; None without certificates. Raises StartError."""
        try:
            return member_of(self)
        except StartError as error:
            raise StartError(f"{EXTRA}.{error.field}", error.reason) from None

    def check(self) -> None:
        """Raise StartError where loans would be open to everybody."""
        if not self.is_guarded and self.loan_host and not is_loopback(f"{self.loan_host}:0"):
            reason = f"{self.loan_host} is not loopback, so anybody who reaches it could read KV: set tls_cert, tls_key"
            raise StartError(f"{EXTRA}.loan_host", f"{reason} and tls_ca, or secret_file")


def _read(path: Path | None, key: str) -> bytes:
    if path is None:
        return b""
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartError(f"{EXTRA}.{key}", f"cannot read {path}: {error.strerror}") from None


def is_loopback(address: str) -> bool:
    """Return whether `host:port` is of this host alone; a name other than localhost counts as not."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
