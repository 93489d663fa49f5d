"""Configuration of the router."""

import os
import re
import socket
from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from cluster.settings import (
    DiscoverySettings,
    DrainSettings,
    HealthSettings,
    LogSettings,
    MetricsSettings,
    ReachedSettings,
)
from router.admission.config import AdmissionConfig
from router.batches.config import BatchesConfig
from router.models.config import ModelsConfig
from router.placement.rates import Priors
from router.security.config import SecuritySettings
from router.usage import UsageSettings

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


class RouterConfig(
    SecuritySettings,
    ModelsConfig,
    ReachedSettings,
    DrainSettings,
    HealthSettings,
    MetricsSettings,
    LogSettings,
    DiscoverySettings,
    UsageSettings,
    AdmissionConfig,
    BatchesConfig,
):
    """Settings of the global router.

    ModelsConfig has those of models, AdmissionConfig those of queues and limits, SecuritySettings those of access.
    """

    router_id: str = ""
    """Name of the router, unique among routers. Default: host and process id."""
    port: int = Field(default=50051, ge=0, le=65535)
    """gRPC port; 0 lets the system choose."""
    http_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the OpenAI-compatible HTTP API, on `host` too; 0 lets the system choose. Unset: no HTTP API."""
    epp_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the endpoint picker for gateways (Envoy's external processing), on `host` too; 0 lets the system choose.
    Needs `fleet`. Unset: none."""
    epp_tls: bool = False
    """Whether `epp_port` speaks TLS, with the certificate for clients. Gateways of InferencePool expect clear text."""
    epp_fallbacks: int = Field(default=0, ge=0, le=8)
    """Further endpoints that the endpoint picker names after the best one, for gateways that retry at these."""
    http_port_shared: bool = False
    """Whether several routers of one host listen at this `http_port`: the system gives each connection to one of them.
    With `tandem up --routers 2` both then serve one port, else ports in a row."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages whose scripts may use the HTTP API from a browser, such as `https://chat.example.com`; `*`: all.
    Their requests need keys as others do. Set keys before `*`, since any page that a user opens could use the API."""
    metrics_on_http_port: bool = False
    """Whether `http_port` serves /metrics too, for scrapers that reach no other port. With API keys an operator's key
    is needed there: metrics name tenants."""
    ready_without_workers: bool = False
    """Whether the router is ready without any decode worker. Set it for pools that may be scaled to zero: a service
    address that leads only to ready routers would otherwise reach none, and no request could bring the pool back.
    Requests wait for a worker for `no_worker_grace_s`."""
    continue_on_other_revisions: bool = False
    """Whether a stream whose workers are gone may go on at workers with other weights of the same config and tokenizer.
    Its output is then of two models. Otherwise it ends with ABORTED."""
    max_connection_s: PositiveFloat | None = None
    """Seconds, plus or minus a tenth, for which a client's connection takes new requests; then the client opens another
    one. For routers behind one address: one that was removed from it for longer than this gets no new requests, and
    can stop without refusing any. Default: connections last."""

    max_body_mib: int = Field(default=4, ge=1, le=64)
    """Largest HTTP body and gRPC message of a client in MiB. 4 MiB of text are about a million tokens. Raise it where
    requests bring pictures, which take a third more in HTTP bodies than as files."""
    responses_store_mib: int = Field(default=64, ge=0, le=65_536)
    """Memory in MiB for responses that later requests may continue (`previous_response_id`); the least recently used
    are dropped first. With `redis_url` they are in Redis, for a day, and this is the largest size of one. 0: none are
    kept."""
    strict_fields: bool = False
    """Whether the HTTP API refuses a field that it does not know. Otherwise such a field is ignored and named in the
    header `x-tandem-ignored`, unless its loss would change the answer's meaning."""
    sse_heartbeat_s: PositiveFloat | None = None
    """Seconds between comments that an HTTP stream gets before its first event, for proxies that end a silent
    connection. The first comment sends status 200: a refusal after it, or a failure, is an event of the stream.
    Default: no comments."""
    default_deadline_s: PositiveFloat = 600.0
    """Deadline in seconds of requests that set none."""
    max_attempts: PositiveInt = 4
    """Largest number of placements of one request, the first one included."""
    worker_silence_s: PositiveFloat = 10.0
    """Seconds without a report of its engine after which a worker counts as lost and its requests are placed again."""

    learn_rates: bool = True
    """Whether placement learns speeds from receipts. Otherwise it always uses the two below."""
    prefill_tokens_per_s: PositiveFloat = 4000.0
    """Prompt tokens per second of a prefill worker, assumed until receipts arrive."""
    decode_prefill_tokens_per_s: PositiveFloat = 1000.0
    """Prompt tokens per second of a decode worker, whose prompts are computed in small chunks between decode steps."""

    records_file: Path | None = None
    """File to which each request is appended when it ends, as a line of JSON with its placements, outcome and receipt;
    and all feedback of clients. To rotate it, move it away: it is opened for each line."""
    record_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the requests written to `records_file`; those that fail are all written, if they have an id."""
    record_placements: bool = False
    """Whether `records_file` gets all inputs of each placement, which `tandem explain --log FILE --request ID` shows. A
    line has 10 kB with ten workers and half a megabyte with a hundred; those that cannot be written fast enough are
    dropped."""
    record_texts: bool = False
    """Whether `records_file` gets prompts, outputs and thumbnails of pictures; otherwise only their lengths. The
    console then shows the thumbnails."""

    otlp_endpoint: str = ""
    """OpenTelemetry collector for traces over gRPC: http://collector:4317. Unset: no traces. OTEL_TRACES_SAMPLER and
    OTEL_TRACES_SAMPLER_ARG choose the requests that are traced, as OpenTelemetry has it."""

    @field_validator("epp_port")
    @classmethod
    def _has_servers_to_pick(cls, port: int | None, info: ValidationInfo) -> int | None:
        if port is not None and info.data.get("fleet") is None:
            raise ValueError("needs `fleet`, whose servers it picks")
        if port is not None and info.data.get("isolate_tenants"):
            raise ValueError("cannot be combined with isolate_tenants: a gateway sends the client's own cache_salt")
        return port

    @field_validator("http_port_shared")
    @classmethod
    def _has_a_port_to_share(cls, shared: bool, info: ValidationInfo) -> bool:
        if shared and not info.data.get("http_port"):
            raise ValueError("needs `http_port` above 0, which the routers share")
        return shared

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin: scheme://host or scheme://host:port, without a path, or *"
                )
        return origins

    def priors(self) -> Priors:
        return Priors(self.prefill_tokens_per_s, self.decode_prefill_tokens_per_s)

    def id(self) -> str:
        return self.router_id or f"router-{socket.gethostname()}-{os.getpid()}"
