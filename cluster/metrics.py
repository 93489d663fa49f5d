"""Prometheus metrics that all processes have, and the endpoint where they are scraped.

Names end in their units. A metric with the meaning of a vLLM metric has its name, with `tandem_` for `vllm:`.
docs/metrics.md lists all.
"""

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, make_asgi_app
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cluster.errors import StartError
from cluster.network.http_server import HttpServer
from cluster.network.tls import Credentials, File
from cluster.settings import MetricsSettings

LATENCY_S = (
    *(
        0.001,
        0.002,
        0.003,
        0.005,
        0.0075,
        0.01,
        0.015,
        0.02,
        0.03,
        0.04,
        0.06,
        0.08,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        0.6,
        0.8,
    ),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
"""Histogram bounds in seconds, from one engine step to a long request."""
TOKENS = tuple(float(1 << power) for power in range(21))
"""Histogram bounds in tokens."""


def new_registry() -> CollectorRegistry:
    """Create a registry with the metrics of every process: CPU, memory, files, garbage collections, Python version."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


class LoopCounter(Collector):
    """Counter of one event loop, which is scraped there, too.

    prometheus_client's own takes a lock for each increment, which a router would pay for each token.
    """

    def __init__(self, registry: CollectorRegistry, name: str, about: str, *labels: str) -> None:
        self._family = name, about, labels
        self._values: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def add(self, amount: float, *labels: str) -> None:
        """Add to the value of these labels, which is shown from then on, also with an amount of 0."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(*self._family[:2], labels=self._family[2])
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class LoopHistogram(Collector):
    """Histogram of one event loop, which is scraped there, too; see `LoopCounter`."""

    def __init__(
        self, registry: CollectorRegistry, name: str, about: str, bounds: tuple[float, ...], *labels: str
    ) -> None:
        """Create it; `bounds` ascend and are finite."""
        self._family = name, about, labels
        self._bounds = bounds
        self._names = [floatToGoString(bound) for bound in (*bounds, float("inf"))]  # type: ignore[no-untyped-call]
        self._counts: dict[tuple[str, ...], list[int]] = {}
        """Values by bucket, not cumulated: [bounds + 1]."""
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def observe(self, value: float, *labels: str) -> None:
        if (counts := self._counts.get(labels)) is None:
            counts = self._counts[labels] = [0] * len(self._names)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, value)] += 1  # a bound belongs to the bucket below it
        self._sums[labels] += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(*self._family[:2], labels=self._family[2])
        for labels, counts in self._counts.items():
            total, buckets = 0, []
            for name, count in zip(self._names, counts, strict=True):
                total += count
                buckets.append((name, float(total)))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family


class MetricsServer:
    """HTTP endpoint where a registry is scraped.

    Values are collected on the event loop.
    """

    def __init__(self, host: str, settings: MetricsSettings) -> None:
        """Bind the port where `metrics_port` is set.

        Raises StartError.
        """
        port, credentials = settings.metrics_port, _credentials(settings)
        self._http = None if port is None else HttpServer(host, port, "metrics_port", credentials)

    @property
    def address(self) -> str:
        """Address as host:port, or empty without a metrics port."""
        return self._http.address if self._http else ""

    async def start(self, registry: CollectorRegistry) -> None:
        if self._http is not None:
            await self._http.start(make_asgi_app(registry))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


def _credentials(settings: MetricsSettings) -> Credentials | None:
    """Return the credentials of the endpoint: metrics show tenants' usage, so TLS restricts who may scrape."""
    if settings.tls_cert is None or settings.tls_key is None or settings.tls_ca is None:
        if settings.tls_metrics_ca is not None:
            raise StartError("tls_metrics_ca", "needs tls_cert, tls_key and tls_ca")
        return None
    scrapers = File("tls_ca", settings.tls_ca)
    if settings.tls_metrics_ca is not None:
        scrapers = File("tls_metrics_ca", settings.tls_metrics_ca)
    return Credentials(File("tls_cert", settings.tls_cert), File("tls_key", settings.tls_key), [scrapers])
