"""Placement decisions with a shared store: 64 + 64 workers and a million blocks, all of them in the store too."""

from typing import Any

from rich.progress import Progress

from bench.report import Bar
from bench.router.decisions import measure_index, measure_placement


def measure(progress: Progress) -> dict[str, Any]:
    _, *fleet = measure_index(progress, store="bench")
    figures: dict[str, Any] = measure_placement(progress, *fleet)
    return figures


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    return [Bar("decision with a shared store, 64 x 64 workers, 1 M blocks: ms p50", figures["all"]["p50_ms"], 0.6)]
