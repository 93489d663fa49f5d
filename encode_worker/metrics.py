"""Prometheus metrics of an encode worker, read when they are scraped."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from encode_worker.service import EncodeService


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
