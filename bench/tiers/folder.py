"""The shared store on a local disk, with a real model: a prompt of 4,096 tokens fetched, beside the same computed.

The model has Qwen2 0.5 B's shape. A first worker computes prompts, and writes them. A second one fetches them, in turns
with prompts that it computes. Before each turn the system's page cache forgets the files, and the folder's bandwidth
is measured with other files of equal size, read from first to last byte by one thread.
"""

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.models import qwen2_half_b
from bench.report import OUT, Bar
from protos import inference_pb2 as pb
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

PROMPT_TOKENS = 4096
ROUNDS = 3
WRITTEN_S = 60.0
"""Longest wait until a prompt's blocks are files."""


def tokens(seeds: random.Random) -> list[int]:
    """Return a prompt whose full blocks may all be fetched, and a tail."""
    return [seeds.randrange(1000, 100_000) for _ in range(PROMPT_TOKENS + 8)]


async def ask(client: Client, prompt: Sequence[int], retention_s: float | None = None) -> tuple[pb.Receipt, float]:
    """Return the receipt and the TTFT of one token."""
    began = time.perf_counter()
    sampling = pb.Sampling(max_tokens=1, temperature=0, ignore_eos=True)
    ttft, receipt = 0.0, None
    asked = client.generate(token_ids=prompt, sampling=sampling, timeout_s=600, cache_retention_s=retention_s)
    async for message in asked:
        ttft = ttft or time.perf_counter() - began
        if message.HasField("finish") and message.finish.HasField("receipt"):
            receipt = message.finish.receipt
    assert receipt is not None
    return receipt, ttft


def forget(files: Sequence[Path]) -> None:
    """Drop files from the page cache; they are written to the disk first, since dirty pages stay."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_all(files: Sequence[Path]) -> float:
    """Return bytes per second of reading files one after the other."""
    buffer, num_bytes, began = bytearray(8 << 20), 0, time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(buffer):
                num_bytes += count
    return num_bytes / (time.perf_counter() - began)


def files_of(store: Path) -> set[Path]:
    return {path for path in store.rglob("*") if path.is_file() and len(path.name) == 32}


async def written(store: Path, before: set[Path], count: int) -> list[Path]:
    """Wait until `count` files were added; return them."""
    give_up_at = time.monotonic() + WRITTEN_S
    while len(new := files_of(store) - before) < count:
        assert time.monotonic() < give_up_at, f"{len(new)} of {count} blocks were written"
        await asyncio.sleep(0.05)
    return sorted(new)


async def measure(progress: Progress) -> dict[str, Any]:
    model, seeds = qwen2_half_b(OUT / "qwen2-0.5b"), random.Random(5)
    task = progress.add_task("store on a local disk", total=3 * ROUNDS + 1)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        store = Path(folder) / "store"
        settings = {"model": model, "kv_memory_mib": 512, "kv_store": str(store), "kv_store_writes": "computed"}
        prompts = [tokens(seeds) for _ in range(ROUNDS + 1)]
        files: list[list[Path]] = []
        cores = sorted(os.sched_getaffinity(0))
        topology = plan_topology(0, 1, {"model": model, "port": 0}, settings, cores)
        async with LocalCluster(topology) as first, Client(first.address) as client:
            for prompt in prompts:
                before = files_of(store)
                await ask(client, prompt)
                files.append(await written(store, before, PROMPT_TOKENS // 16))
                progress.advance(task)
        rounds: list[dict[str, float]] = []
        topology = plan_topology(0, 1, {"model": model, "port": 0}, settings, cores)
        async with LocalCluster(topology) as second, Client(second.address) as client:
            await ask(client, tokens(seeds))  # it measures its own speed
            for number in range(ROUNDS):
                _, computed_s = await ask(client, tokens(seeds))
                progress.advance(task)
                forget([*files[number], *files[-1]])
                disk_bytes_per_s = read_all(files[-1])
                receipt, fetched_s = await ask(client, prompts[number])
                progress.advance(task)
                assert receipt.kv.store_blocks == PROMPT_TOKENS // 16, receipt.kv
                (stage,) = (stage for stage in receipt.stages if stage.name == "fetch from the store")
                num_bytes = sum(file.stat().st_size for file in files[number])
                fetched_bytes_per_s = num_bytes / (stage.duration_ms / 1e3)
                rounds.append(
                    {
                        "fetched / computed": fetched_s / computed_s,
                        "bandwidth / the folder's": fetched_bytes_per_s / disk_bytes_per_s,
                        "fetched_s": fetched_s,
                        "computed_s": computed_s,
                        "disk_mb_per_s": disk_bytes_per_s / 1e6,
                        "fetched_mb_per_s": fetched_bytes_per_s / 1e6,
                    }
                )
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    return [
        Bar("4,096 tokens, 0.5 B shape: TTFT fetched / computed", figures["fetched / computed"], 0.15),
        Bar("of these, bandwidth / the folder's own", figures["bandwidth / the folder's"], 0.6, at_least=True),
    ]
