"""CPU time of a router for a request, over gRPC and HTTP: this tree beside an earlier commit, in turns.

`python -m bench.router.cost [COMMIT]`. A request has 100 prompt tokens and 16 output tokens, over mock workers.
"""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import track

from bench.compare.http_wire import HttpClient
from bench.router.site import cpu_seconds, first_line, process
from bench.support.report import Bar, conclude
from cluster.network.rpc import channel
from protos import inference_pb2 as pb

ROOT = Path(__file__).parents[2]
BEFORE = "e37514f"
"""Commit that the router is held against."""
PROMPT_TOKENS, NUM_TOKENS = 100, 16
RATES = (100.0, 300.0)
ROUND_S, ROUNDS = 4.0, 3
MAX_RATIO = 0.6
Ask = Callable[[str], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Site:
    """A started router: how to ask it by each API, and its process."""

    asks: dict[str, Ask]
    pid: int


@contextlib.asynccontextmanager
async def site(tree: Path, *counts: int) -> AsyncIterator[Site]:
    """Start the router of `tree`; `counts` are the arguments of `cost_site.py`."""
    # Roles start as `python -m`, which looks into the working directory before PYTHONPATH.
    command = ["env", f"--chdir={tree}", f"PYTHONPATH={tree}", sys.executable, str(ROOT / "bench/router/cost_site.py")]
    command += map(str, counts)
    async with process(*command) as started:
        ready = json.loads(await first_line(started))
        host, _, port = ready["http"].rpartition(":")
        client = HttpClient(host, int(port))
        async with channel(ready["grpc"]) as link:
            call: Any = link.unary_stream("/tandem.v1.Inference/Generate")

            async def by_grpc(prompt: str) -> int:
                wanted = pb.Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
                request = pb.GenerateRequest(text=prompt, sampling=wanted).SerializeToString()
                count = 0
                async for message in call(request):
                    count += len(pb.GenerateResponse.FromString(message).token_ids)
                return count

            async def by_http(prompt: str) -> int:
                answer = await client.ask(HttpClient.request(prompt, NUM_TOKENS))
                if answer.failure:
                    raise RuntimeError(answer.failure)
                return answer.num_tokens

            yield Site({"grpc": by_grpc, "http": by_http}, ready["pid"])
            assert started.stdin is not None
            started.stdin.close()
            await started.wait()


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Check out `commit` into a folder of its own; a folder stands for itself."""
    if Path(commit).is_dir():
        yield Path(commit).absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


async def one_round(where: Site, api: str, rate: float, seed: int) -> float:
    """Return the milliseconds of CPU for each request, at `rate` requests/s arriving at random.

    Raises RuntimeError for a request that is not answered whole.
    """
    seeds = random.Random(seed)
    moments = [at for at in accumulate(seeds.expovariate(rate) for _ in range(int(2 * rate * ROUND_S))) if at < ROUND_S]
    prompts = [" ".join(f"w{seeds.randrange(2, 4000)}" for _ in range(PROMPT_TOKENS)) for _ in moments]
    before_s, loop = cpu_seconds(where.pid), asyncio.get_running_loop()
    start, running = loop.time(), []
    for moment, prompt in zip(moments, prompts, strict=True):
        await asyncio.sleep(start + moment - loop.time())
        running.append(asyncio.ensure_future(where.asks[api](prompt)))
    if short := [count for count in await asyncio.gather(*running) if count < NUM_TOKENS]:
        raise RuntimeError(f"{len(short)} requests were not answered whole")
    return 1e3 * (cpu_seconds(where.pid) - before_s) / len(moments)


async def compare(commit: str, console: Console) -> dict[str, dict[str, float]]:
    loads = [(api, rate) for api in ("grpc", "http") for rate in RATES]
    sides: dict[str, dict[str, list[float]]] = {"before": {}, "now": {}}
    with tree_of(commit) as tree:
        async with site(tree) as before, site(ROOT) as now:
            for number in track(range(1 + ROUNDS), "router's CPU", console=console):
                for api, rate in loads:
                    for name, where in (("before", before), ("now", now)):
                        used = await one_round(where, api, rate, number)
                        if number:  # round 0 warms up
                            sides[name].setdefault(f"{api}, {rate:g}/s", []).append(used)
    return {name: {load: median(used) for load, used in each.items()} for name, each in sides.items()}


def bars_of(figures: dict[str, dict[str, float]]) -> list[Bar]:
    """Return a bar for each API and rate."""
    return [
        Bar(f"router's CPU for a request, {load} / before", now_ms / figures["before"][load], MAX_RATIO)
        for load, now_ms in figures["now"].items()
    ]


def main() -> None:
    console = Console()
    figures = uvloop.run(compare(sys.argv[1] if len(sys.argv) > 1 else BEFORE, console))
    console.print(figures)
    conclude("router-cost", bars_of(figures), figures, console)


if __name__ == "__main__":
    main()
