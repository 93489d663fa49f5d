"""Batches by OpenAI's API: lines that are answered once though the router is killed, and the delay of others beside.

Sim workers compute in real time. First 10,000 lines run while SIGKILL ends the router twice. Then interactive
requests are timed without and beside a batch, in turns. `python -m bench.batches [--quick]`: fewer lines and rounds.

The workers have KV blocks and the router has CPU time for all of it. Where blocks are scarce, a burst of interactive
requests waits until lines end; where CPU time is, requests wait for the router's loop. docs/log.md has figures.
"""

import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import uvloop
from openai.types import Batch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.models import SIM_VOCAB, sim_model
from bench.report import Bar, conclude, of_rounds
from bench.router.site import Site, free_port, sim_site
from router.config import RouterConfig
from tandem.local.local_cluster import RoleProcess, start_role, stop_process

LINES, QUICK_LINES = 10_000, 1_000
LINE_TOKENS, LINE_PROMPT_TOKENS = 8, 32
KILLS = (0.3, 0.65)
"""Shares of the lines at which the router is killed."""
ROUNDS, QUICK_ROUNDS = 8, 2
ROUND_S = 12.0
RATE = 12.0
"""Interactive requests per second."""
PROMPT_TOKENS, TOKENS = 64, 32
BESIDE_TOKENS = 64
"""Tokens of a line beside interactive requests."""
WARM_S = 3.0
"""Seconds until a batch is at its full concurrency."""
ENDPOINT = "/v1/completions"
ENDED = ("failed", "completed", "expired", "cancelled")
SIM = {
    "sim_step_ms": 40,
    "sim_prompt_token_us": 20,
    "sim_stream_us": 20,
    "sim_kv_token_ns": 20,
    "sim_reads": "last",
    "kv_memory_mib": 512,
    "max_prefill_tokens": 512,
}
"""Step times of a worker: about those of a 70 B model on a few GPUs. Faster steps would measure this machine: 64 lines
in flight cost a router half a core then."""


class Restarts:
    """Router that is killed, and started again on its ports and its folder."""

    def __init__(self, folder: Path) -> None:
        self.settings = {
            "model": sim_model(folder / "sim"),
            "port": free_port(),
            "http_port": free_port(),
            "batches_folder": folder / "batches",
        }
        self.router: RoleProcess | None = None

    @contextlib.asynccontextmanager
    async def site(self) -> AsyncIterator[Site]:
        async with sim_site(self.settings, prefill=0, decode=2, model=self.settings["model"], worker=SIM) as site:
            self.router = site.router
            try:
                yield site
            finally:
                await stop_process(self.router.process)

    async def again(self) -> None:
        """Kill the router, and start it again."""
        assert self.router is not None
        self.router.process.send_signal(signal.SIGKILL)
        await self.router.process.wait()
        self.router = await start_role("router", "router", RouterConfig.parse(self.settings))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings['http_port']}/v1"


async def begin(client: openai.AsyncOpenAI, num_lines: int, max_tokens: int) -> Batch:
    """Begin a batch of random prompts."""
    drawn = random.Random(num_lines)
    lines = []
    for number in range(num_lines):
        prompt = [drawn.randrange(SIM_VOCAB) for _ in range(LINE_PROMPT_TOKENS)]
        body = {"model": "sim", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        lines.append(json.dumps({"custom_id": f"{number}", "method": "POST", "url": ENDPOINT, "body": body}))
    file = await client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")


async def reached(client: openai.AsyncOpenAI, batch: Batch, num_lines: int) -> Batch:
    """Return the batch when so many lines are answered, or it has ended."""
    while True:
        batch = await client.batches.retrieve(batch.id)
        counts = batch.request_counts
        if batch.status in ENDED or (counts is not None and counts.completed + counts.failed >= num_lines):
            return batch
        await asyncio.sleep(0.1)


async def custom_ids(client: openai.AsyncOpenAI, file_id: str | None) -> list[str]:
    if file_id is None:
        return []
    return [json.loads(line)["custom_id"] for line in (await client.files.content(file_id)).text.splitlines()]


# ---------------------------------------------------------------------------- the router is killed


async def measure_kills(progress: Progress, num_lines: int) -> dict[str, Any]:
    task = progress.add_task("lines, the router killed twice", total=num_lines)
    with tempfile.TemporaryDirectory() as folder:
        restarts = Restarts(Path(folder))
        async with restarts.site(), openai.AsyncOpenAI(base_url=restarts.url, api_key="none") as client:
            began_at, down_s = time.monotonic(), 0.0
            batch = await begin(client, num_lines, LINE_TOKENS)
            num_kills = 0
            for share in (*KILLS, 1.0):
                batch = await reached(client, batch, int(share * num_lines))
                counts = batch.request_counts
                progress.update(task, completed=counts.completed if counts is not None else 0)
                if batch.status not in ENDED and share < 1:
                    killed_at, num_kills = time.monotonic(), num_kills + 1
                    await restarts.again()
                    down_s += time.monotonic() - killed_at
            while batch.status not in ENDED:
                batch = await reached(client, batch, num_lines + 1)
            took_s = time.monotonic() - began_at
            found = Counter(await custom_ids(client, batch.output_file_id))
            failed = Counter(await custom_ids(client, batch.error_file_id))
    answered = found + failed
    return {
        "status": batch.status,
        "lines": num_lines,
        "kills": num_kills,
        "seconds": took_s,
        "seconds_without_router": down_s,
        "lines_per_s": num_lines / (took_s - down_s),
        "failed": failed.total(),
        "missing": num_lines - len(answered),
        "doubled": answered.total() - len(answered),
    }


# ---------------------------------------------------------------------------- interactive requests beside


async def ttft(session: aiohttp.ClientSession, url: str) -> float:
    """Return the seconds to the first token of a request."""
    prompt = [random.randrange(SIM_VOCAB) for _ in range(PROMPT_TOKENS)]
    body = {"model": "sim", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    began_at, first_s = time.monotonic(), 0.0
    async with session.post(f"{url}/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for _ in answer.content:
            first_s = first_s or time.monotonic() - began_at
    return first_s


async def offer(session: aiohttp.ClientSession, url: str, seconds: float) -> list[float]:
    """Return the TTFTs of requests that come at random."""
    loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[float]]()
    at, ends_at = loop.time(), loop.time() + seconds
    while (at := at + random.expovariate(RATE)) < ends_at:
        await asyncio.sleep(max(0.0, at - loop.time()))
        tasks.append(asyncio.ensure_future(ttft(session, url)))
    return list(await asyncio.gather(*tasks))


async def measure_beside(progress: Progress, rounds: int) -> dict[str, Any]:
    task = progress.add_task("interactive requests, without and beside a batch", total=2 * rounds)
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    num_answered, answering_s = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        restarts = Restarts(Path(folder))
        async with (
            restarts.site(),
            openai.AsyncOpenAI(base_url=restarts.url, api_key="none") as client,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            await offer(session, restarts.url, WARM_S)
            for _ in range(rounds):
                alone.append(await offer(session, restarts.url, ROUND_S))
                progress.advance(task)
                batch = await begin(client, LINES, BESIDE_TOKENS)
                await reached(client, batch, 1)
                await asyncio.sleep(WARM_S)
                before, began_at = await client.batches.retrieve(batch.id), time.monotonic()
                beside.append(await offer(session, restarts.url, ROUND_S))
                after = await client.batches.retrieve(batch.id)
                assert after.status == "in_progress", "the batch lasts longer than the round"
                num_answered += _num_answered(after) - _num_answered(before)
                answering_s += time.monotonic() - began_at
                await client.batches.cancel(batch.id)
                while batch.status not in ENDED:
                    batch = await reached(client, batch, LINES)
                progress.advance(task)
    sides = {"alone": alone, "beside": beside}
    figures: dict[str, Any] = {
        f"{name}_{called}_ms": 1e3 * of_rounds(values, share)
        for name, values in sides.items()
        for called, share in (("p50", 0.5), ("p99", 0.99))
    }
    figures |= {f"{name}_requests": sum(map(len, values)) for name, values in sides.items()}
    return figures | {
        "batch_lines_per_s": num_answered / answering_s,
        "p99_ratio": figures["beside_p99_ms"] / figures["alone_p99_ms"],
        "p50_ratio": figures["beside_p50_ms"] / figures["alone_p50_ms"],
    }


def _num_answered(batch: Batch) -> int:
    return 0 if batch.request_counts is None else batch.request_counts.completed + batch.request_counts.failed


async def measure(progress: Progress, quick: bool) -> dict[str, Any]:
    return {
        "killed": await measure_kills(progress, QUICK_LINES if quick else LINES),
        "beside": await measure_beside(progress, QUICK_ROUNDS if quick else ROUNDS),
    }


def main() -> None:
    console = Console()
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        figures = uvloop.run(measure(progress, "--quick" in sys.argv))
    console.print_json(data=figures)
    killed = figures["killed"]
    bars = [
        Bar("kills of the router in the middle of the batch", killed["kills"], len(KILLS), True),
        Bar("every line answered once: missing or doubled lines", killed["missing"] + killed["doubled"], 0),
        Bar("lines that failed", killed["failed"], 0),
        Bar("interactive p99 TTFT beside the batch / without it", figures["beside"]["p99_ratio"], 1.2),
    ]
    conclude("batches", bars, figures, console)


if __name__ == "__main__":
    main()
