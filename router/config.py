"""Configuration of the router."""

import os
import socket
from pathlib import Path

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from cluster.settings import DiscoverySettings, HealthSettings, LogSettings, MetricsSettings
from router.admission.config import AdmissionConfig
from router.models.config import ModelsConfig
from router.placement.rates import Priors
from router.security.config import SecuritySettings


class RouterConfig(
    SecuritySettings, ModelsConfig, HealthSettings, MetricsSettings, LogSettings, DiscoverySettings, AdmissionConfig
):
    """The global router; which models it serves is set by the keys of ModelsConfig, what waits, for how long, by those
    of AdmissionConfig, and who may use it by those of SecuritySettings."""

    router_id: str = ""
    """Unique among the routers. Default: host and process id."""
    host: str = "127.0.0.1"
    port: int = Field(default=50051, ge=0, le=65535)
    """0 lets the system choose."""
    http_port: int | None = Field(default=None, ge=0, le=65535)
    """Of the OpenAI-compatible HTTP API, on `host` too; 0 lets the system choose. Without: there is none."""
    advertise_host: str = ""
    """Host that workers reach this router by when they find it in Redis, when it is not `host`."""
    drain_s: NonNegativeFloat = 30.0
    """Told to stop, the router lets its streams finish for so long, and then ends them."""
    ready_without_workers: bool = False
    """It is ready also while no decode worker is there, for pools that may be scaled to zero: an address that leads to
    ready routers only would else lead nowhere, and no request could call the pool back. Requests wait for a worker for
    `no_worker_grace_s`."""
    max_connection_s: PositiveFloat | None = None
    """A client's connection takes new requests for so long, give or take a tenth; then the client opens another one,
    and nothing under way is disturbed. For routers behind one address: one that was taken from it for longer than this
    is asked no more, and can be stopped without refusing anybody. Default: connections last."""

    default_deadline_s: PositiveFloat = 600.0
    """For requests that bring none."""
    max_attempts: PositiveInt = 4
    """Placements of one request, the first one included."""
    worker_silence_s: PositiveFloat = 10.0
    """A worker whose engine reports nothing for so long is lost; its requests are placed anew."""
    grammar_limit_s: PositiveFloat = 2.0
    """How long the grammar of a structured output may take to compile. The decode worker compiles it again, once, and
    its streams wait as long."""

    learn_rates: bool = True
    """From receipts. Without, placement goes by the figures below for good: for benchmarks and tests."""
    prefill_tokens_per_s: PositiveFloat = 4000.0
    """What placement assumes of a prefill worker, until receipts tell; as are the figures below."""
    decode_prefill_tokens_per_s: PositiveFloat = 1000.0
    """And of a decode worker, whose prompts are computed in small chunks between decode steps."""
    kv_bytes_per_s: PositiveFloat = 1e9
    """Bandwidth assumed between any two workers."""
    loan_overhead_s: PositiveFloat = 0.003
    """Fixed cost of a loan: handshake and the last read."""
    step_s: PositiveFloat = 0.001
    """What computing a prompt costs on either kind of worker, however short it is."""
    stream_delay_s: PositiveFloat = 0.001
    """What one more running stream on a decode worker costs the others."""

    decisions_memory_mib: NonNegativeFloat = 16.0
    """For the decisions of the last requests with all they were made of, which can be asked for (`tandem explain
    --request ID`): 4 KiB each with few workers, up to 300 KiB with 128. 0: none are kept."""

    decisions_file: Path | None = None
    """Each placement is appended there with all it was made of, and each request with what came of it, as JSON lines;
    nothing of what was said. `tandem explain --log FILE --request ID` shows them. To rotate it, move it away."""
    decision_share: float = Field(default=1.0, gt=0, le=1)
    """Of the requests. A line has 10 kB with ten workers and half a megabyte with a hundred; what cannot be written
    fast enough is left out."""

    samples_file: Path | None = None
    """Requests are appended there with their receipts, a share of them, and all feedback. To rotate it, move it away:
    it is opened anew for each line."""
    sample_share: float = Field(default=1.0, gt=0, le=1)
    """Of the requests that end well."""
    sample_texts: bool = False
    """With the prompt and the output; else with their lengths only."""

    otlp_endpoint: str = ""
    """Where traces go, by OpenTelemetry's protocol over gRPC: http://collector:4317. Without: there are none."""
    trace_share: float = Field(default=1.0, gt=0, le=1)
    """Of the requests."""

    def priors(self) -> Priors:
        return Priors(
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_prefill_tokens_per_s=self.decode_prefill_tokens_per_s,
            kv_bytes_per_s=self.kv_bytes_per_s,
            loan_overhead_s=self.loan_overhead_s,
            step_s=self.step_s,
            stream_delay_s=self.stream_delay_s,
        )

    def id(self) -> str:
        return self.router_id or f"router-{socket.gethostname()}-{os.getpid()}"
