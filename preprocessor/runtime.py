"""Assembly and life of a preprocessor's process.

Prometheus metrics of a preprocessor, read when they are scraped.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.metrics import MetricsServer, new_registry
from cluster.network.rpc import MAX_MESSAGE_BYTES, Server
from cluster.network.tls import member_of
from cluster.process.life import Addresses, Drain, SignalledRole
from cluster.process.tasks import all_of
from engine.model.hub import CONFIG_FILES, fetch_beside
from preprocessor.blobs import BlobStore
from preprocessor.children import Children
from preprocessor.config import PreprocessorConfig
from preprocessor.fetching import Fetcher
from preprocessor.service import MAX_FILES_BYTES, NAME, PreprocessService

log = logging.getLogger(__name__)


class PreprocessorCollector(Collector):
    """Collector of items, refusals, processes and memory."""

    def __init__(self, service: PreprocessService, models: Mapping[str, Children], blobs: BlobStore) -> None:
        self._service = service
        self._models = models
        self._blobs = blobs

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "tandem_media_items", "Pictures, sounds and videos made ready.", self._service.num_items
        )
        refused = CounterMetricFamily(
            "tandem_media_refused_requests", "Requests that were refused, by gRPC status.", labels=("code",)
        )
        for code, count in self._service.refusals.items():
            refused.add_metric((code,), count)
        yield refused
        restarts = CounterMetricFamily(
            "tandem_media_process_restarts",
            "Child processes that were started again.",
            labels=("model_name",),
        )
        for name, children in self._models.items():
            restarts.add_metric((name,), children.num_restarts)
        yield restarts
        yield GaugeMetricFamily("tandem_media_blob_bytes", "Tensors in memory.", self._blobs.num_bytes)
        yield GaugeMetricFamily("tandem_media_leased_bytes", "Tensors of running requests.", self._blobs.shares.total)


END_S = 5.0
"""Seconds for streams that were told to end."""
GRACE_S = 0.5
"""Seconds for calls in flight when the server stops."""


class Preprocessor(SignalledRole):
    """A started preprocessor."""

    def __init__(
        self,
        config: PreprocessorConfig,
        addresses: Addresses,
        service: PreprocessService,
        server: Server,
        requests: Drain,
        parts: AsyncExitStack,
    ) -> None:
        """Create it; `parts` holds what `stop` closes."""
        self.addresses = addresses
        self._service = service
        self._config = config
        self._server = server
        self._requests = requests
        self._parts = parts

    def set_encoders(self, addresses: Sequence[str]) -> None:
        """Name other encode workers, for items of later requests."""
        self._service.encoders = tuple(addresses)

    async def drain(self) -> None:
        """Refuse new requests, keep the blobs of running ones for `drain_s`, and end the rest."""
        self._requests.begin()
        await self._server.announce_stop()
        if not await self._requests.idle(self._config.drain_s):
            log.warning("ending %d requests after %g s", self._requests.end_all(), self._config.drain_s)
            await self._requests.idle(END_S)

    async def stop(self) -> None:
        await self._parts.aclose()


async def start_preprocessor(config: PreprocessorConfig, fetcher: Fetcher | None = None) -> Preprocessor:
    """Fetch the models' files, start the children, and serve.

    `fetcher`: reads URLs in place of one by the settings. Raises StartError.
    """
    member = member_of(config)
    async with AsyncExitStack() as parts:
        metrics, registry = MetricsServer(config.host, config), new_registry()
        parts.push_async_callback(metrics.close)
        if fetcher is None:
            fetcher = Fetcher(config.allowed_hosts, config.max_item_mib << 20, config.fetch_limit_s)
        parts.push_async_callback(fetcher.close)
        models: dict[str, Children] = {}
        for name, path in config.paths.items():
            directory = await fetch_beside(path, CONFIG_FILES)
            models[name] = Children(config, config.worker_config(directory))
            parts.push_async_callback(models[name].close)
        await all_of(children.start() for children in models.values())
        blobs, requests = BlobStore(config.blob_memory_mib << 20), Drain()
        service = PreprocessService(config, models, fetcher, blobs, requests)
        server = Server(member.credentials if member else None, max_message_bytes=MAX_FILES_BYTES + MAX_MESSAGE_BYTES)
        service.add_to(server.grpc)
        registry.register(PreprocessorCollector(service, models, blobs))
        port = await server.start(config.host, config.port, [NAME])
        parts.push_async_callback(server.stop, GRACE_S)
        service.address = f"{config.advertise_host or config.host}:{port}"
        await server.start_health(config.host, config)
        await metrics.start(registry)
        await server.mark_serving(lambda: all(children.are_there for children in models.values()))
        held = parts.pop_all()
    addresses = Addresses(f"{config.host}:{port}", metrics=metrics.address)
    return Preprocessor(config, addresses, service, server, requests, held)
