"""Settings that processes of several roles have, beside their own."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field


class LogSettings(BaseModel):
    """Of every process."""

    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """What is logged, to standard error. The environment variable TANDEM_LOG goes before it. Libraries never log less
    than a warning."""
    log_format: Literal["text", "json"] = "text"
    """json: an object a line, with ts, level, role, process, logger, message, and where there is one request_id,
    trace_id and exception."""


class TlsSettings(BaseModel):
    """Of every process. The first three go together; PEM files."""

    tls_cert: Path | None = None
    """This process's certificate, with those between it and `tls_ca`."""
    tls_key: Path | None = None
    """Its private key, not encrypted."""
    tls_ca: Path | None = None
    """Authorities whose certificates make a process a member of this cluster, whatever names they have: an authority
    of its own. With it every internal port speaks TLS and refuses who is no member."""
    tls_server_name: str = ""
    """Name that certificates of members have in common, looked for instead of the host by which one is reached.
    Default: that host."""


class MetricsSettings(TlsSettings):
    """Of every process that has metrics."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Prometheus scrapes http://host:metrics_port/metrics; 0 lets the system choose. Without: there is none. With
    tls_ca it is https, for who has a certificate."""
    tls_metrics_ca: Path | None = None
    """Authorities of certificates that may scrape, instead of tls_ca: so that Prometheus is no member."""


class HealthSettings(BaseModel):
    """Of every process that serves."""

    health_port: int | None = Field(default=None, ge=0, le=65535)
    """gRPC's health service alone, in the clear and without a key, for supervisors that have no certificate: it says
    whether this process lives and serves, and nothing else. 0 lets the system choose. Without: health is asked for on
    the other ports only."""


class DiscoverySettings(BaseModel):
    """Of every process that finds others through Redis, or is found."""

    redis_url: str = Field(default="", repr=False)
    """redis://host:6379/0, or rediss:// for TLS. Routers announce themselves there and workers find them; tenants'
    quotas are counted there. Without: workers join `routers`. The password may be in the environment instead, as
    TANDEM_REDIS_PASSWORD."""
    cluster_name: str = Field(default="tandem", min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")
    """Clusters that share a Redis have different ones: it begins every key."""
