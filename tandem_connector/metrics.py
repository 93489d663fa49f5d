"""Counters of the connector, in vLLM's own `/metrics` and log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTED = {
    "loans_taken": "Loans that requests of this server took.",
    "loans_failed": "Loans of these that ended early, or could not be taken; the rest was computed here.",
    "blocks_borrowed": "KV blocks that were borrowed and verified.",
    "bytes_borrowed": "Bytes of these blocks.",
    "blocks_mismatched": "KV blocks whose fingerprint differed on arrival; they were computed here.",
    "loans_given": "Loans that this server gave.",
    "blocks_lent": "KV blocks that this server announced to borrowers.",
}
"""Counters, and what they count."""
SECONDS = "loan_seconds"
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(slots=True)
class Counters:
    """Counts since the last `take`."""

    loans_taken: int = 0
    loans_failed: int = 0
    blocks_borrowed: int = 0
    bytes_borrowed: int = 0
    blocks_mismatched: int = 0
    loans_given: int = 0
    blocks_lent: int = 0
    seconds: list[float] = field(default_factory=list)
    """Seconds of each loan taken that is over."""

    def take(self) -> "TandemStats | None":
        """Return what was counted and start again; None where there is nothing."""
        counts = {name: count for name in COUNTED if (count := getattr(self, name))}
        if not counts and not self.seconds:
            return None
        stats = TandemStats({**counts, SECONDS: self.seconds})
        for each in fields(self):
            setattr(self, each.name, [] if each.name == "seconds" else 0)
        return stats


@dataclass
class TandemStats(KVConnectorStats):
    """Counts of an interval, as vLLM carries them to its API server."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "TandemStats":
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, type(value)()) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's log line."""
        seconds: Sequence[float] = self.data.get(SECONDS, ())
        counts = {name.replace("_", " "): self.data[name] for name in COUNTED if name in self.data}
        return counts | ({"mean loan ms": round(1e3 * sum(seconds) / len(seconds), 1)} if seconds else {})

    def is_empty(self) -> bool:
        return not any(self.data.values())


class TandemPromMetrics(KVConnectorPromMetrics):
    """Counters of every engine of an API server."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:tandem_{name}", documentation=text, labelnames=labelnames), labelvalues
            )
            for name, text in COUNTED.items()
        }
        seconds = self._histogram_cls(
            name=f"vllm:tandem_{SECONDS}",
            documentation="Seconds from a request's first look for a lender to the end of its loan.",
            buckets=list(BUCKETS),
            labelnames=labelnames,
        )
        self._seconds = create_metric_per_engine(seconds, labelvalues)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an interval."""
        for name, counter in self._counters.items():
            if count := transfer_stats_data.get(name):
                counter[engine_idx].inc(count)
        for seconds in transfer_stats_data.get(SECONDS, ()):
            self._seconds[engine_idx].observe(seconds)
