"""`python -m encode_worker --config FILE --set key=value`: one encode worker until SIGTERM.

Prometheus metrics of an encode worker, read when they are scraped.
"""

import logging
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.errors import StartError
from cluster.logs import set_up
from cluster.metrics import MetricsServer, new_registry
from cluster.network.rpc import Channels, Server
from cluster.network.tls import member_of
from cluster.process.life import Addresses, Drain, SignalledRole, run_role
from encode_worker.child_encoder import ChildEncoder
from encode_worker.config import EncoderConfig
from encode_worker.service import NAME, EncodeService
from engine.engine_kind import kind_of
from engine.model.hub import fetch_beside
from protos import encode_pb2_grpc

log = logging.getLogger(__name__)


class EncodeCollector(Collector):
    """Collector of items and memory."""

    def __init__(self, service: EncodeService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        items = CounterMetricFamily(
            "tandem_encoded_items", "Items that workers asked for, computed or found.", labels=("origin",)
        )
        items.add_metric(("computed",), self._service.num_computed)
        items.add_metric(("found",), self._service.num_found)
        yield items
        yield GaugeMetricFamily("tandem_embedding_bytes", "Embeddings in memory.", self._service.num_bytes)


GRACE_S = 0.5
"""Seconds for calls in flight when the server stops."""


class EncodeWorker(SignalledRole):
    """A started encode worker."""

    def __init__(
        self, config: EncoderConfig, addresses: Addresses, server: Server, calls: Drain, parts: AsyncExitStack
    ) -> None:
        """Create it; `parts` holds what `stop` closes."""
        self.addresses = addresses
        self._config = config
        self._server = server
        self._calls = calls
        self._parts = parts

    async def drain(self) -> None:
        """Refuse new calls, and end those in flight for `drain_s`; the workers encode themselves."""
        self._calls.begin()
        await self._server.announce_stop()
        await self._calls.idle(self._config.drain_s)

    async def stop(self) -> None:
        await self._parts.aclose()


async def start_encode_worker(config: EncoderConfig) -> EncodeWorker:
    """Fetch the model's files, load its encoder, and serve.

    Raises StartError.
    """
    member = member_of(config)
    async with AsyncExitStack() as parts:
        metrics, registry = MetricsServer(config.host, config), new_registry()
        parts.push_async_callback(metrics.close)
        directory = await fetch_beside(config.model, kind_of(config.engine).model_files)
        encoder = ChildEncoder(config.worker_config(directory))
        await encoder.start()
        parts.push_async_callback(encoder.close)
        calls = Drain()
        service = EncodeService(encoder, Channels(member), config.embeddings_memory_mib << 20, calls)
        parts.push_async_callback(service.tasks.close)
        server = Server(member.credentials if member else None)
        encode_pb2_grpc.add_EncodeServicer_to_server(service, server.grpc)
        port = await server.start(config.host, config.port, [NAME])
        parts.push_async_callback(server.stop, GRACE_S)
        await server.start_health(config.host, config)
        registry.register(EncodeCollector(service))
        await metrics.start(registry)
        await server.mark_serving(lambda: encoder.is_there)
        held = parts.pop_all()
    addresses = Addresses(f"{config.host}:{port}", metrics=metrics.address)
    return EncodeWorker(config, addresses, server, calls, held)


def main() -> int:
    try:
        return run_encode_worker(EncoderConfig.from_command_line("encoder"))
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_encode_worker(config: EncoderConfig) -> int:
    """Run an encode worker to its end and return the exit code.

    Raises StartError for a wrong setting of logs.
    """
    set_up("encoder", config.id(), config)
    return run_role(lambda: start_encode_worker(config))
