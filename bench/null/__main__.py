"""`make bench-null`: what a token costs on its way through Tandem and through `vllm serve`, without a GPU.

`python -m bench.null [STEP_MS...]` measures other times of a step than 2.5 ms. TANDEM_NULL_ROUNDS sets the rounds.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench.fleet.servers import BLOCK, CONTEXT, TINY, VLLM, StockServer, tiny_model
from bench.router.site import cpu_seconds
from bench.support.report import Bar, conclude, percentile
from bench.vllm.sides import ROOT, Clients, end_on_sigterm
from bench.vllm.streams import StreamLoad
from cluster.process.tree import descendants
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

ROUNDS = int(os.environ.get("TANDEM_NULL_ROUNDS", "5"))
STEP_MS = 2.5
TOKENS = {1: 1024, 8: 512, 64: 192, 256: 96}
"""Output tokens of a stream by the number of streams: enough of them for the clock of CPU time, 10 ms."""
PROMPT_TOKENS, NUM_BLOCKS, KV_MIB = 64, 6000, 256
STEP_TOKENS = 2048
"""Largest number of tokens in a step on both sides, prompts included, as on a GPU; on a CPU workers take less."""
LIMITS: Mapping[int, tuple[float, float]] = {1: (1.0, 1.0), 8: (1.0, 1.0), 64: (0.85, 1.05), 256: (0.6, 1.5)}
"""Bars by the number of streams: CPU a token, and tokens/s, Tandem / `vllm serve`."""


@dataclass(frozen=True, slots=True)
class Side:
    """A server that is measured."""

    name: str
    clients: Mapping[str, Clients]
    """Client processes by API."""
    roots: Mapping[str, int]
    """Process ids by name; each counts with its children, but for the engines among these."""

    def cpu_s(self) -> dict[str, float]:
        """Return the seconds of CPU so far by process."""
        found: dict[str, float] = {}
        for name, root in self.roots.items():
            children = descendants(root)
            engines = [pid for pid in children if _is_engine(pid)]
            of_engines = {pid for engine in engines for pid in (engine, *descendants(engine))}
            found[name] = cpu_seconds(root, *(pid for pid in children if pid not in of_engines))
            if of_engines:
                found["engine" if name != "prefill" else "prefill engine"] = cpu_seconds(*of_engines)
        return found


def _is_engine(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
    return b"EngineCore" in command or b"engine.process" in command or b"spawn_main" in command


async def turn(side: Side, api: str, load: StreamLoad) -> dict[str, float]:
    """Offer a load once; return its figures."""
    before = side.cpu_s()
    offered = await side.clients[api].offer(load)
    used = {name: seconds - before[name] for name, seconds in side.cpu_s().items()}
    figures = {
        "tokens_per_s": offered.tokens / (offered.ended_at - offered.began_at),
        "cpu_us": 1e6 * sum(used.values()) / offered.tokens,
        "ttft_p50_ms": percentile(offered.ttft_ms, 0.5),
        "itl_p50_ms": percentile(offered.gaps_ms, 0.5),
        "itl_p99_ms": percentile(offered.gaps_ms, 0.99),
    }
    return figures | {f"{name}_us": 1e6 * seconds / offered.tokens for name, seconds in used.items()}


async def measure(step_ms: float, scratch: Path, console: Console) -> dict[str, Any]:
    """Measure all sides in turns; return medians by API, number of streams and side."""
    timing = {"NULL_STEP_MS": str(step_ms), "NULL_EXECUTOR": "1"}
    paths = f"{ROOT}{os.pathsep}{ROOT / 'bench/null/site'}"
    os.environ |= timing | {"PYTHONPATH": paths, "VLLM_CPU_KVCACHE_SPACE": "1"}
    async with AsyncExitStack() as stack:
        sides = [await _stock(stack, scratch, timing)]
        for name, num_prefill in (("Tandem", 0), ("Tandem 1 + 1", 1)):
            sides.append(await _tandem(stack, name, num_prefill))
        rounds: dict[str, list[dict[str, float]]] = {}
        for number in range(ROUNDS + 1):
            for streams, num_tokens in TOKENS.items():
                load = StreamLoad(streams, PROMPT_TOKENS, num_tokens, TINY["vocab_size"], seed=1000 * number + streams)
                for api in ("completions", "chat", "grpc"):
                    for side in sides:
                        if api in side.clients and (side.name != "Tandem 1 + 1" or api == "completions"):
                            figures = await turn(side, api, load)
                            if number:  # the first round warms up
                                rounds.setdefault(f"{api}, {streams}, {side.name}", []).append(figures)
        medians = {
            name: {figure: statistics.median(each[figure] for each in found) for figure in found[0]}
            for name, found in rounds.items()
        }
    for name, figures in medians.items():
        console.print(name, {figure: round(value, 1) for figure, value in figures.items()})
    return medians


async def _stock(stack: AsyncExitStack, scratch: Path, timing: Mapping[str, str]) -> Side:
    server = StockServer(
        tiny_model(), scratch, NUM_BLOCKS, timing, "--max-num-seqs", "256", "--max-num-batched-tokens", str(STEP_TOKENS)
    )
    stack.push_async_callback(server.kill)
    await server.start()
    return Side("vllm serve", await _http_clients(stack, server.port), {"front": server.pid})


async def _tandem(stack: AsyncExitStack, name: str, num_prefill: int) -> Side:
    model = tiny_model()
    worker = {
        "model": model,
        "engine": "vllm",
        "vllm_python": (VLLM / "bin" / "python").absolute(),
        "dtype": "float32",
        "block_tokens": BLOCK,
        "kv_memory_mib": KV_MIB,
        "max_batch_tokens": STEP_TOKENS,
        "max_prefill_tokens": STEP_TOKENS,
        "vllm_options": {"max_model_len": CONTEXT, "max_num_seqs": 256, "enforce_eager": True},
    }
    router = {"model": model, "port": 0, "http_port": 0}
    cores = sorted(os.sched_getaffinity(0))
    topology = plan_topology(num_prefill, 1, router, worker, cores, finds_cores=lambda _: True)
    cluster = await stack.enter_async_context(LocalCluster(topology))
    assert cluster.router.http_address is not None
    clients = await _http_clients(stack, int(cluster.router.http_address.rpartition(":")[2]))
    command = [sys.executable, "-m", "bench.vllm.client", cluster.address]
    clients["grpc"] = await stack.enter_async_context(Clients(command))
    roots = {"router": cluster.router.pid, "front": cluster.decode[0].pid}
    if num_prefill:
        roots["prefill"] = cluster.prefill[0].pid
    return Side(name, clients, roots)


async def _http_clients(stack: AsyncExitStack, port: int) -> dict[str, Clients]:
    found = {}
    for api in ("completions", "chat"):
        command = [sys.executable, "-m", "bench.null.client", str(port), api]
        found[api] = await stack.enter_async_context(Clients(command))
    return found


def bars_of(step_ms: float, medians: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    """Return the bars of a time of a step; those of numbers of streams only for STEP_MS."""
    bars, name = list[Bar](), f"{step_ms:g} ms"

    def ratio(figure: str, api: str, streams: int, ours: str = "Tandem", base: str = "vllm serve") -> float:
        return medians[f"{api}, {streams}, {ours}"][figure] / medians[f"{api}, {streams}, {base}"][figure]

    for streams, (cpu, speed) in LIMITS.items():
        what = f"{name}, {streams} streams"
        bars.append(Bar(f"{what}: CPU a token", ratio("cpu_us", "completions", streams), cpu))
        bars.append(Bar(f"{what}: tokens/s", ratio("tokens_per_s", "completions", streams), speed, at_least=True))
        bars.append(Bar(f"{what}, chat: CPU a token", ratio("cpu_us", "chat", streams), cpu))
    bars.append(Bar(f"{name}, 64 streams: engine's CPU a token", ratio("engine_us", "completions", 64), 1.0))
    bars.append(Bar(f"{name}, 64 streams: ITL p99", ratio("itl_p99_ms", "completions", 64), 1.0))
    bars.append(Bar(f"{name}, 256 at once: TTFT p50", ratio("ttft_p50_ms", "completions", 256), 1.0))
    grpc = medians["grpc, 256, Tandem"]["cpu_us"] / medians["completions, 256, Tandem"]["cpu_us"]
    bars.append(Bar(f"{name}, 256 streams: CPU a token, gRPC / HTTP", grpc, 1.1))
    apart, alone = (medians[f"completions, 64, {side}"] for side in ("Tandem 1 + 1", "Tandem"))
    decode = (apart["front_us"] + apart["engine_us"]) / (alone["front_us"] + alone["engine_us"])
    bars.append(Bar(f"{name}, 64 streams: CPU of the decode worker, 1 + 1 / aggregated", decode, 1.05))
    return bars


async def main(arguments: Sequence[str]) -> None:
    end_on_sigterm()
    console, figures, bars = Console(width=160), dict[str, Any](), list[Bar]()
    for step_ms in [float(each) for each in arguments] or [STEP_MS]:
        with tempfile.TemporaryDirectory() as scratch:
            figures[f"{step_ms:g} ms"] = await measure(step_ms, Path(scratch), console)
        bars += bars_of(step_ms, figures[f"{step_ms:g} ms"])
    conclude("null", bars, figures, console)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
