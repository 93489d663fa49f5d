"""Streams over stock servers that are killed, stopped and drained: every token is checked."""

import asyncio
import json
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from rich.console import Console

from bench.compare.http_wire import MODEL_NAME
from bench.fleet.servers import StockServer, stock_servers, tiny_model
from bench.fleet.tokens import FIRST, NUM, mixed
from bench.router.site import free_port
from bench.support.report import Bar
from router.config import RouterConfig
from tandem.local.local_cluster import start_role, stop_process

SERVERS, STREAMS, NUM_TOKENS, ROUNDS = 4, 20, 150, 20
TIMING = {"NULL_STEP_MS": "10", "NULL_PREFILL_US": "20"}
SILENCE_S, STOPPED_S, FILE_S = 2.0, 4.0, 2.0
OPTIONS: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0.7},
    {"top_p": 0.5, "top_k": 20},
    {"min_tokens": 60, "stop": ["never said"]},
    {"repetition_penalty": 1.2, "logit_bias": {"5": -1}},
)
"""Options that the table of docs/fleet.md calls exact; the executor's tokens are the same under all."""


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that the executor of the servers samples after a prompt."""
    state = 0
    for token_id in prompt:
        state = mixed(state, token_id)
    tokens = []
    for _ in range(count):
        tokens.append(FIRST + state % NUM)
        state = mixed(state, tokens[-1])
    return tokens


async def stream(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], options: dict[str, Any]) -> str:
    """Return what is wrong with a stream; empty for nothing."""
    body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": NUM_TOKENS, "stream": True, "temperature": 0}
    found: list[int] = []
    text = ""
    async with session.post(url, json=body | {"ignore_eos": True, "return_token_ids": True} | options) as answer:
        if answer.status != 200:
            return f"status {answer.status}: {await answer.text()}"
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return f"after {len(found)} tokens: {chunk['error']}"
            for choice in chunk["choices"]:
                found += choice.get("token_ids") or []
                text += choice["text"]
    wanted = expected(prompt, NUM_TOKENS)
    if found != wanted:
        same = next((at for at, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(found))
        return f"WRONG after {same} of {len(found)} tokens"
    words = " ".join(f"w{token}" for token in wanted)
    return "" if text.split() == words.split() else "WRONG text"


class Fleet:
    """Servers, and the file that lists them."""

    def __init__(self, servers: Sequence[StockServer], file: Path) -> None:
        self.servers = list(servers)
        self.file = file
        self.drained: set[int] = set()
        self.write()

    def write(self) -> None:
        listed = [server.url for number, server in enumerate(self.servers) if number not in self.drained]
        self.file.write_text(yaml.safe_dump([{"url": url} for url in listed]))


async def killed(fleet: Fleet, number: int) -> Callable[[], Awaitable[None]]:
    await fleet.servers[number].kill()
    return fleet.servers[number].start


async def stopped(fleet: Fleet, number: int) -> Callable[[], Awaitable[None]]:
    fleet.servers[number].signal(signal.SIGSTOP)

    async def go_on() -> None:
        await asyncio.sleep(STOPPED_S)
        fleet.servers[number].signal(signal.SIGCONT)

    return go_on


async def drained(fleet: Fleet, number: int) -> Callable[[], Awaitable[None]]:
    """Take the server from the file, as an operator does, and end it a moment later, as Kubernetes does."""
    fleet.drained.add(number)
    fleet.write()
    await asyncio.sleep(0.3)
    await fleet.servers[number].terminate()

    async def again() -> None:
        await fleet.servers[number].start()
        fleet.drained.discard(number)
        fleet.write()

    return again


FAULTS = {"kill -9": killed, "stop": stopped, "drain": drained}


async def measure_faults(scratch: Path, console: Console, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the streams lost and wrong by kind of fault."""
    draw, failures = random.Random(1), dict[str, list[str]]()
    async with (
        stock_servers(SERVERS, scratch, 4000, TIMING) as servers,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
        ) as session,
    ):
        fleet = Fleet(servers, scratch / "servers.yaml")
        port = free_port()
        settings = {
            "servers": [{"file": fleet.file, "kv_events_port": None}],
            "model": tiny_model(),
            "name": MODEL_NAME,
        }
        config = {"fleet": settings, "port": 0, "http_port": port, "worker_silence_s": SILENCE_S}
        router = await start_role("router", "router", RouterConfig.parse(config))
        url = f"http://127.0.0.1:{port}/v1/completions"
        try:
            await asyncio.sleep(FILE_S)
            for name, fault in FAULTS.items():
                failures[name] = []
                for number in range(rounds):
                    prompts = [[draw.randrange(100, 4000) for _ in range(200)] for _ in range(STREAMS)]
                    streams = [
                        asyncio.ensure_future(stream(session, url, prompt, OPTIONS[at % len(OPTIONS)]))
                        for at, prompt in enumerate(prompts)
                    ]
                    await asyncio.sleep(draw.uniform(0.0, 2.0))
                    restore = await fault(fleet, number % SERVERS)
                    restoring = asyncio.ensure_future(restore())
                    found = [each for each in await asyncio.gather(*streams) if each]
                    failures[name] += found
                    if found:
                        console.print(f"{name} {number}: {found[:2]}", markup=False)
                    await restoring
                    await asyncio.sleep(FILE_S if name == "drain" else 1.0)
                console.print(f"{name}: {rounds} rounds of {STREAMS} streams, {len(failures[name])} failed")
        finally:
            await stop_process(router.process)
    return {
        name: {
            "streams": rounds * STREAMS,
            "lost": sum(not each.startswith("WRONG") for each in found),
            "wrong": sum(each.startswith("WRONG") for each in found),
        }
        for name, found in failures.items()
    }


def fault_bars(figures: dict[str, Any]) -> list[Bar]:
    return [
        Bar(f"{name} of a server, {counts['streams']} streams: {what}", counts[what], 0)
        for name, counts in figures.items()
        for what in ("lost", "wrong")
    ]
