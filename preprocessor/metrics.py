"""Prometheus metrics of a preprocessor, read when they are scraped."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from preprocessor.blobs import BlobStore
from preprocessor.children import Children
from preprocessor.service import PreprocessService


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
