"""`make bench-vllm`, or `python -m bench.vllm PART ...` for some parts.

Parts: alone, aggregated, ranks, pair, beside, transfer, restores, hits; connectors and idle, of TandemConnector in
stock servers. .bench/vllm.json is written after each.
"""

import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench.models import cpu_dtype, qwen2_half_b
from bench.support.report import OUT, Bar, Parts, conclude, save
from bench.vllm.aggregated import aggregated_bars, compare_aggregated, compare_ranks
from bench.vllm.cache import measure_hits, measure_restores
from bench.vllm.compared import VLLM, compare_alone, compare_beside, compare_pairs
from bench.vllm.connectors import compare_connectors, compare_idle, connector_bars
from bench.vllm.sides import end_on_sigterm
from bench.vllm.transfer import measure_transfer

PARTS = ("alone", "aggregated", "ranks", "pair", "beside", "transfer", "restores", "hits", "connectors", "idle")


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars of the parts that ran."""
    bars: list[Bar] = []

    def add(part: str, what: str, name: str, limit: float, at_least: bool = False) -> None:
        if part in figures:
            sides = figures[part][name]
            bars.append(Bar(what, sides["tandem"] / sides["vllm"], limit, at_least))

    add("alone", "one worker, 32 x (256 in, 64 out): output tokens/s, / vllm serve", "tokens_per_s", 0.95, True)
    add("alone", "one worker, one 1,024-token prompt: TTFT, / vllm serve", "ttft_ms", 1.05)
    add("alone", "one worker, 8 streams: ITL p50, / vllm serve", "itl_ms", 1.05)
    add("pair", "pair, 512-token prompts at random: TTFT p50, / NixlConnector", "ttft_p50_ms", 1.0)
    add("pair", "the same: TTFT p99", "ttft_p99_ms", 1.0)
    add("pair", "pair, 32 x (256 in, 64 out): output tokens/s, / NixlConnector", "tokens_per_s", 1.0, True)
    add("beside", "pair, 8 streams beside long prompts: ITL p99, / NixlConnector", "itl_p99_ms", 1.0)
    for part in ("aggregated", "ranks"):
        bars += aggregated_bars(figures.get(part, {}))
    if "transfer" in figures:
        bars.append(Bar("fingerprints on both sides / TTFT of 1,024 tokens", figures["transfer"]["fingerprints"], 0.03))
        what = "4 chunks: last chunk computed to last block bound / whole transfer"
        bars.append(Bar(what, figures["transfer"]["overlap"], 0.3))
    if "restores" in figures:
        times = figures["restores"]
        what = "0.5 B shape, 4,096 tokens restored from main memory: TTFT, / computed"
        bars.append(Bar(what, times["restored_s"] / times["computed_s"], 0.2))
    if "hits" in figures:
        what = "conversation trace: hit rate with main memory below the pool, / without"
        bars.append(Bar(what, figures["hits"]["with"] / figures["hits"]["without"], 2.0, at_least=True))
    return [*bars, *connector_bars(figures)]


@cache
def make_model() -> Path:
    """Make Qwen2 0.5 B's shape; on CPUs that do not multiply bfloat16, a quarter of its layers in float32."""
    if cpu_dtype() == "bfloat16":
        return qwen2_half_b(OUT / "qwen2-0.5b")
    return qwen2_half_b(OUT / "qwen2-quarter", 6, "float32")


async def main(parts: list[str]) -> None:
    end_on_sigterm()
    console = Console(width=160)
    if not (VLLM / "bin" / "vllm").exists():
        sys.exit(f"error: {VLLM} holds no vllm; run this by `make bench-vllm`")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("error: cores: a prefill and a decode engine need two")
    scratch = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
    kept = Parts(console)
    work = {
        "alone": lambda: compare_alone(make_model(), cores, scratch, console),
        "aggregated": lambda: compare_aggregated(cores, console),
        "ranks": lambda: compare_ranks(cores, console),
        "pair": lambda: compare_pairs(make_model(), cores, scratch, console),
        "beside": lambda: compare_beside(make_model(), cores, scratch, console),
        "transfer": lambda: measure_transfer(make_model(), cores, console),
        "restores": lambda: measure_restores(cores, console),
        "hits": lambda: measure_hits(cores, console),
        "connectors": lambda: compare_connectors(cores, scratch, console),
        "idle": lambda: compare_idle(cores, scratch, console),
    }
    try:
        for part in parts:
            await kept.measure(part, work[part]())
            save("vllm", bars_of(kept.figures), kept.figures, kept.failed)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    conclude("vllm", bars_of(kept.figures), kept.figures, console, kept.failed)
    if kept.failed:
        sys.exit(f"error: these parts failed: {', '.join(kept.failed)}")


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"error: unknown part {', '.join(unknown)}; known are {', '.join(PARTS)}")
    uvloop.run(main(chosen))
