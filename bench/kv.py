"""`make bench-kv`: the KV path against NIXL alone, and recomputation.

Two workers of the sim engine, told by this benchmark who lends to whom, run on a core each, as do the two processes of
the bare NIXL loop; loans and bare reads of the same spans take turns. Overlap, and the cost to the lender, are measured
with the sim engine's steps and with a real model (Qwen2 0.5 B's shape, random weights).
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.models import qwen2_half_b, sim_model
from bench.support.report import OUT, Bar, Parts, conclude
from bench.support.workers import Workers
from kvtransfer.transport import MAX_POSTED_BYTES
from protos import inference_pb2 as pb

BLOCK, BLOCK_KIB = 16, 256
SIZES_MIB = (4, 16, 64, 256)
BARS = {4: 0.6, 16: 0.8, 64: 0.9, 256: 1.0}
"""Least share of the bare reads' bandwidth, by size in MiB."""
ROUNDS = {4: 40, 16: 30, 64: 20, 256: 12}
SMALL_ROUNDS = 60
POOL_MIB = 640
CHUNKS, CHUNK_TOKENS, STEP_MS = 8, 256, 60.0
PREFIX, LONG = 4096, 2048


class Bare:
    """Two processes that only use NIXL."""

    def __init__(self, cores: Sequence[int]) -> None:
        """Take the cores of both."""
        self._cores = cores

    async def __aenter__(self) -> "Bare":
        size = str(POOL_MIB << 20)
        self._at = 0
        tag = str(os.getpid())
        self._lender, lender = await start_bare("lender", self._cores[0], f"bare-lender-{tag}", size)
        self._reader, _ = await start_bare("reader", self._cores[1], f"bare-reader-{tag}", size)
        tell(self._reader, lender)
        return self

    async def __aexit__(self, *error: object) -> None:
        for process in (self._reader, self._lender):
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()

    async def read(self, num_bytes: int) -> float:
        """Read one contiguous span that starts where the last one ended.

        So no read finds its bytes in a cache, as in a pool.
        """
        if self._at + num_bytes > POOL_MIB << 20:
            self._at = 0
        at, self._at = self._at, self._at + num_bytes
        return await self._ask({"spans": [[at, at, num_bytes]]})

    async def copy(self, num_bytes: int) -> float:
        return await self._ask({"copy": num_bytes})

    async def _ask(self, message: dict[str, Any]) -> float:
        return float((await ask(self._reader, message))["seconds"])


def tell(process: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")


async def ask(process: asyncio.subprocess.Process, message: dict[str, Any]) -> dict[str, Any]:
    tell(process, message)
    assert process.stdout is not None
    answer: dict[str, Any] = json.loads(await process.stdout.readline())
    return answer


async def start_bare(
    role: str,
    core: int,
    *arguments: str,
    env: dict[str, str] | None = None,
) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.bare.kv", role, str(core), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
        env=os.environ | (env or {}),
    )
    assert process.stdout is not None
    said: dict[str, Any] = json.loads(await process.stdout.readline())
    return process, said


def tokens(count: int, seeds: random.Random) -> list[int]:
    return [seeds.randrange(1000) for _ in range(count)]


def stages(receipt: pb.Receipt) -> dict[str, float]:
    """Return the receipt's stages, in seconds by name."""
    return {stage.name: stage.duration_ms / 1e3 for stage in receipt.stages}


def loan_s(receipt: pb.Receipt) -> float:
    """Return the seconds from asking the lender to the last block verified and bound."""
    by_name = stages(receipt)
    assert receipt.kv.loan_failure == "", receipt.kv.loan_failure
    return sum(by_name[name] for name in ("lender queue", "lender prefill", "transfer of the last blocks"))


# ---------------------------------------------------------------------------- bandwidth and fixed cost


async def measure_bandwidth(model: Path, cores: Sequence[int], progress: Progress) -> dict[str, Any]:
    """Measure loans of cached blocks and bare reads of as many bytes, in turns."""
    settings = {"model": model, "engine": "sim", "sim_block_kib": BLOCK_KIB, "kv_memory_mib": POOL_MIB}
    settings |= {"max_batch_tokens": 65536, "max_prefill_tokens": 65536}
    seeds = random.Random(1)
    figures: dict[str, Any] = {"sizes": {}}
    async with (
        Workers(prefill_0=settings | {"cores": (cores[0],)}, decode_0=settings | {"cores": (cores[1],)}) as workers,
        Bare(cores) as bare,
    ):
        for _ in range(4):  # until all pools were read and written once: the first time may cost as much again
            await one_loan(workers, tokens(BLOCK * 1024, seeds))
            await bare.read(256 << 20)
        task = progress.add_task("bandwidth", total=sum(ROUNDS.values()))
        for size in SIZES_MIB:
            ours, theirs, copies = [], [], []
            num_blocks = (size << 10) // BLOCK_KIB
            for _ in range(ROUNDS[size]):
                ours.append(loan_s(await one_loan(workers, tokens(BLOCK * num_blocks, seeds))))
                theirs.append(await bare.read(size << 20))
                copies.append(await bare.copy(size << 20))
                progress.advance(task)
            figures["sizes"][size] = summary(size, ours, theirs, copies)
        figures["fixed"] = await measure_fixed_cost(workers, bare, seeds, progress)
    return figures


async def one_loan(workers: Workers, prompt: list[int]) -> pb.Receipt:
    await workers.lend("prefill_0", prompt)
    receipt, _ = await workers.decode("decode_0", [*prompt, 1], "prefill_0")
    assert receipt.kv.lender_cached_blocks == len(prompt) // BLOCK, receipt.kv
    return receipt


def summary(size: int, ours: list[float], theirs: list[float], copies: list[float]) -> dict[str, float]:
    gib = size / 1024
    return {
        "pairs": len(ours),
        "ours_gib_per_s": gib / statistics.median(ours),
        "bare_gib_per_s": gib / statistics.median(theirs),
        "memcpy_gib_per_s": gib / statistics.median(copies),
        "ratio": statistics.median(theirs) / statistics.median(ours),
    }


async def measure_fixed_cost(
    workers: Workers, bare: Bare, seeds: random.Random, progress: Progress
) -> dict[str, float]:
    """Measure a whole loan of one block, beside a bare read of it."""
    ours, reads = [], []
    task = progress.add_task("fixed cost", total=SMALL_ROUNDS)
    for _ in range(SMALL_ROUNDS):
        ours.append(loan_s(await one_loan(workers, tokens(BLOCK, seeds))))
        reads.append(await bare.read(BLOCK_KIB << 10))
        progress.advance(task)
    loan, read = (1e3 * statistics.median(values) for values in (ours, reads))
    return {"loan_ms": loan, "bare_read_ms": read, "beyond_its_bytes_ms": loan - read}


# ---------------------------------------------------------------------------- transports


async def measure_transports(cores: Sequence[int], progress: Progress) -> dict[str, Any]:
    """Measure 64 MiB through each transport, in turns, beside memcpy."""
    num_bytes, rounds = 64 << 20, 15
    kinds = {
        "nixl": ("nixl", {}),
        "nixl over cma": ("nixl", {"UCX_TLS": "cma,tcp"}),
        "nixl over tcp": ("nixl", {"UCX_TLS": "tcp"}),
        "ucxx": ("ucxx", {}),
    }
    if find_spec("ucxx") is None:
        del kinds["ucxx"]
    task = progress.add_task("transports", total=rounds)
    seconds: dict[str, list[float]] = {kind: [] for kind in [*kinds, "memcpy"]}
    lanes: dict[str, list[str]] = {}
    async with AsyncExitStack() as stack:
        readers = {
            kind: await stack.enter_async_context(reader_of(transport, env, cores, num_bytes))
            for kind, (transport, env) in kinds.items()
        }
        bare = await stack.enter_async_context(Bare(cores))
        for _ in range(rounds):
            for kind, reader in readers.items():
                answer = await ask(reader, {"bytes": num_bytes})
                seconds[kind].append(answer["seconds"])
                lanes[kind] = answer["lanes"]
            seconds["memcpy"].append(await bare.copy(num_bytes))
            progress.advance(task)
    rates = {kind: num_bytes / 2**30 / statistics.median(values) for kind, values in seconds.items()}
    shares = {kind: rate / rates["memcpy"] for kind, rate in rates.items()}
    return {"gib_per_s": rates, "share_of_memcpy": shares, "lanes": lanes}


@asynccontextmanager
async def reader_of(
    transport: str, env: dict[str, str], cores: Sequence[int], num_bytes: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    lender, said = await start_bare("pool", cores[0], transport, str(num_bytes), env=env)
    reader, _ = await start_bare("reads", cores[1], transport, str(num_bytes), env=env)
    tell(reader, said)
    yield reader
    for process in (reader, lender):
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


# ---------------------------------------------------------------------------- overlap


async def measure_overlap(model: Path, cores: Sequence[int], progress: Progress) -> dict[str, Any]:
    """Measure the remaining transfer time when the lender has computed its last chunk."""
    settings = {"model": model, "engine": "sim", "sim_block_kib": BLOCK_KIB, "kv_memory_mib": POOL_MIB}
    settings |= {"sim_step_ms": STEP_MS, "max_prefill_tokens": CHUNK_TOKENS}
    seeds, rounds = random.Random(2), 10
    left, whole = [], []
    async with Workers(
        prefill_0=settings | {"cores": (cores[0],)}, decode_0=settings | {"cores": (cores[1],)}
    ) as workers:
        task = progress.add_task("overlap", total=rounds)
        for _ in range(rounds):
            prompt = tokens(CHUNKS * CHUNK_TOKENS, seeds)
            whole.append(loan_s(await one_loan(workers, prompt)))
            receipt, _ = await workers.decode("decode_0", [*tokens(len(prompt), seeds), 1], "prefill_0")
            assert receipt.kv.lender_computed_blocks == CHUNKS * CHUNK_TOKENS // BLOCK
            left.append(stages(receipt)["transfer of the last blocks"])
            progress.advance(task)
    return {
        "left_ms": 1e3 * statistics.median(left),
        "whole_ms": 1e3 * statistics.median(whole),
        "ratio": statistics.median(left) / statistics.median(whole),
    }


# ---------------------------------------------------------------------------- a real model


async def measure_model(cores: Sequence[int], progress: Progress) -> dict[str, Any]:
    """Measure the slowdown of a lender's prefill by lending, and a fetched prefix against a computed one."""
    model = qwen2_half_b(OUT / "qwen2-0.5b")
    settings = {"model": model, "kv_memory_mib": 512, "max_prefill_tokens": 512}
    seeds = random.Random(3)
    alone, lending, fetched, computed = [], [], [], []
    async with Workers(
        prefill_0=settings | {"cores": (cores[0],)}, decode_0=settings | {"cores": (cores[1],)}
    ) as workers:
        await workers.decode("decode_0", tokens(64, seeds), "prefill_0")
        rounds = 5
        task = progress.add_task("0.5 B model", total=rounds + 2)
        for _ in range(rounds):
            alone.append(await workers.lend("prefill_0", tokens(LONG, seeds)))
            receipt, _ = await workers.decode("decode_0", [*tokens(LONG, seeds), 1], "prefill_0")
            lending.append(stages(receipt)["lender prefill"])
            progress.advance(task)
        for _ in range(2):
            prompt = tokens(PREFIX, seeds)
            await workers.lend("prefill_0", prompt)
            receipt, seconds = await workers.decode("decode_0", [*prompt, 1], "prefill_0")
            assert receipt.kv.moved_blocks == PREFIX // BLOCK
            fetched.append(seconds)
            _, seconds = await workers.decode("decode_0", [*tokens(PREFIX, seeds), 1], None)
            computed.append(seconds)
            progress.advance(task)
    return {
        "prefill_alone_s": statistics.median(alone),
        "prefill_lending_s": statistics.median(lending),
        "slowdown": statistics.median(lending) / statistics.median(alone) - 1,
        "fetched_ttft_s": statistics.median(fetched),
        "computed_ttft_s": statistics.median(computed),
        "ttft_ratio": statistics.median(fetched) / statistics.median(computed),
    }


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars of the parts that have figures."""
    bars: list[Bar] = []
    if (bandwidth := figures.get("bandwidth")) is not None:
        for size in SIZES_MIB:
            ratio = bandwidth["sizes"][size]["ratio"]
            bars.append(Bar(f"{size} MB: our path's bandwidth / bare NIXL reads", ratio, BARS[size], at_least=True))
        bars.append(Bar("one block: the whole loan, ms p50", bandwidth["fixed"]["loan_ms"], 1.0))
    if (overlap := figures.get("overlap")) is not None:
        what = f"{CHUNKS} chunks: last chunk computed to last block verified / whole transfer"
        bars.append(Bar(what, overlap["ratio"], 0.15))
    if (model := figures.get("model")) is not None:
        bars.append(Bar("lender's prefill while lending: slowdown", model["slowdown"], 0.05))
        bars.append(Bar("TTFT with a fetched 4 k prefix / computing it", model["ttft_ratio"], 0.1))
    return bars


async def main() -> None:
    console = Console()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("error: cores: a lender and a borrower need two")
    parts = Parts(console)
    with (
        tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch,
        Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress,
    ):
        model = sim_model(Path(scratch))
        await parts.measure("bandwidth", measure_bandwidth(model, cores, progress))
        await parts.measure("transports", measure_transports(cores, progress))
        await parts.measure("overlap", measure_overlap(model, cores, progress))
        await parts.measure("model", measure_model(cores, progress))
    figures = {"posted_window_mib": MAX_POSTED_BYTES >> 20, **parts.figures}
    console.print(figures)
    conclude("kv", bars_of(figures), figures, console, parts.failed)


if __name__ == "__main__":
    asyncio.run(main())
