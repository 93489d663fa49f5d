"""Counters and histograms of one event loop show what prometheus_client's own would show."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import LATENCY_S, LoopCounter, LoopHistogram

LABELS = st.sampled_from(["a", 'b"\n'])


def shown(registry: CollectorRegistry) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.tuples(LABELS, st.sampled_from(LATENCY_S) | st.floats(0, 1e4))))
def test_histograms_are_equal(values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = LoopHistogram(ours, "test_seconds", "About.", LATENCY_S, "model", "kind")
    expected = Histogram("test_seconds", "About.", ("model", "kind"), buckets=LATENCY_S, registry=theirs)
    for label, value in values:
        histogram.observe(value, label, "k")
        expected.labels(label, "k").observe(value)
    assert shown(ours) == shown(theirs)


@given(st.lists(st.tuples(LABELS, st.floats(0, 1e9))))
def test_counters_are_equal(values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = LoopCounter(ours, "test", "About.", "model")
    expected = Counter("test", "About.", ("model",), registry=theirs)
    for label, value in values:
        counter.add(value, label)
        expected.labels(label).inc(value)
    assert shown(ours) == shown(theirs)
