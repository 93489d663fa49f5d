"""Settings shared by processes of several roles."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, NonNegativeFloat


class LogSettings(BaseModel):
    """Logging settings of every process."""

    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Lowest level that is logged, to standard error. The environment variable TANDEM_LOG overrides it. Libraries
    always log warnings."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines. json: one object per line, with ts, level, role, process, logger, message, and where known
    request_id, trace_id and exception."""


class TlsSettings(BaseModel):
    """TLS settings of every process.

    The first three are set together; all are PEM files.
    """

    tls_cert: Path | None = None
    """Certificate of this process, with the intermediate certificates up to `tls_ca`."""
    tls_key: Path | None = None
    """Private key of the certificate, not encrypted."""
    tls_ca: Path | None = None
    """Authorities that sign members of this cluster; use an authority of the cluster's own. With it every internal port
    speaks TLS and refuses processes without such a certificate."""
    tls_server_name: str = ""
    """Name that all members' certificates share, checked instead of the host name. Default: the host name."""


class MetricsSettings(TlsSettings):
    """Metrics settings of every process that has metrics."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for Prometheus at http://host:metrics_port/metrics; 0 lets the system choose. Unset: no metrics endpoint.
    With tls_ca it is https and requires a client certificate."""
    tls_metrics_ca: Path | None = None
    """Authorities of certificates that may scrape, instead of tls_ca, so that Prometheus need not be a member."""


class HostSettings(BaseModel):
    """Address of every process that listens."""

    host: str = "127.0.0.1"
    """Address to listen on."""


class ReachedSettings(HostSettings):
    """Settings of every process whose address others get."""

    advertise_host: str = ""
    """Host at which other processes reach this one, when it is not `host`."""


class DrainSettings(BaseModel):
    """Settings of every process that ends its work before it stops."""

    drain_s: NonNegativeFloat = 30.0
    """Seconds for which a stopping process lets its streams, loans and requests finish, before it ends them. A worker
    then hands its streams over to other workers, which may read its blocks for a while longer."""


class HealthSettings(BaseModel):
    """Health settings of every process that serves."""

    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for gRPC's health service alone, in clear text and without a key, for supervisors without a certificate. It
    reports only liveness and readiness. 0 lets the system choose. Unset: health is on the other ports only."""


class DiscoverySettings(BaseModel):
    """Discovery settings of every process that finds routers through Redis, or is found there."""

    redis_url: str = Field(default="", repr=False)
    """Redis URL, redis://host:6379/0 or rediss:// for TLS. Routers announce themselves there, workers find them, and
    tenants' quotas are counted there. Unset: workers join `routers`. The password may come from the environment
    variable TANDEM_REDIS_PASSWORD."""
    cluster_name: str = Field(default="tandem", min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")
    """Prefix of every Redis key; clusters that share a Redis need different names."""
