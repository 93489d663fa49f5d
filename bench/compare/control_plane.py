"""CPU time of router and worker fronts for a request: this tree beside an earlier commit, in turns.

`python -m bench.compare.control_plane [COMMIT]`. A request has 100 prompt tokens, which are lent, and 16 output tokens.
"""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import track

from bench.chain import NUM_TOKENS
from bench.models import SIM_VOCAB
from bench.report import Bar, conclude
from bench.router.site import cpu_seconds, first_line, process
from cluster.rpc import channel
from protos import inference_pb2 as pb

ROOT = Path(__file__).parents[2]
BEFORE = "dafc97b6"
"""Commit that the control plane is held against."""
PROMPT_TOKENS = 100
RATE, ROUND_S, ROUNDS = 100.0, 4.0, 6
MAX_RATIO = 0.5
KINDS = ("router", "fronts", "engines")


@dataclass(frozen=True, slots=True)
class Site:
    """A started cluster: how to ask it, and its processes by kind."""

    call: Any
    pids: dict[str, list[int]]


@contextlib.asynccontextmanager
async def site(tree: Path) -> AsyncIterator[Site]:
    """Start the cluster of `tree`."""
    # Roles start as `python -m`, which looks into the working directory before PYTHONPATH.
    command = ["env", f"--chdir={tree}", f"PYTHONPATH={tree}", sys.executable, str(ROOT / "bench/compare/site.py")]
    async with process(*command) as started:
        said = json.loads(await first_line(started))
        async with channel(said["address"]) as link:
            yield Site(link.unary_stream("/tandem.v1.Inference/Generate"), said["pids"])
            assert started.stdin is not None
            started.stdin.close()
            await started.wait()


@contextlib.contextmanager
def tree_of(commit: str) -> Any:
    """Check out `commit` into a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


async def one_round(where: Site, seed: int) -> dict[str, float]:
    """Return milliseconds of CPU by kind of process for each request, at RATE requests/s arriving at random."""
    seeds = random.Random(seed)
    moments = [at for at in accumulate(seeds.expovariate(RATE) for _ in range(int(2 * RATE * ROUND_S))) if at < ROUND_S]
    requests = []
    for _ in moments:
        prompt = [random.randrange(SIM_VOCAB) for _ in range(PROMPT_TOKENS)]
        wanted = pb.GenerateRequest(token_ids=prompt, sampling=pb.Sampling(max_tokens=NUM_TOKENS))
        requests.append(wanted.SerializeToString())

    async def ask(request: bytes) -> int:
        count = 0
        async for _ in where.call(request):
            count += 1
        return count

    before = {kind: cpu_seconds(*where.pids[kind]) for kind in KINDS}
    loop = asyncio.get_running_loop()
    start, running = loop.time(), []
    for moment, request in zip(moments, requests, strict=True):
        await asyncio.sleep(start + moment - loop.time())
        running.append(asyncio.ensure_future(ask(request)))
    counts = await asyncio.gather(*running)
    used = {kind: 1e3 * (cpu_seconds(*where.pids[kind]) - before[kind]) / len(moments) for kind in KINDS}
    return used | {"messages": sum(counts) / len(counts)}


async def compare(commit: str, console: Console) -> dict[str, dict[str, float]]:
    sides: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    with tree_of(commit) as tree:
        async with site(tree) as before, site(ROOT) as now:
            for number in track(range(1 + ROUNDS), "control plane", console=console):
                for name, where in (("before", before), ("now", now)):
                    used = await one_round(where, number)
                    if number:  # round 0 warms up
                        sides[name].append(used)
    return {name: {kind: median(used[kind] for used in each) for kind in each[0]} for name, each in sides.items()}


def bars_of(figures: dict[str, dict[str, float]]) -> list[Bar]:
    """Return the bar."""
    ours, theirs = (figures[name]["router"] + figures[name]["fronts"] for name in ("now", "before"))
    what = f"CPU per request of {NUM_TOKENS} tokens, router and worker fronts / before"
    return [Bar(what, ours / theirs, MAX_RATIO)]


def main() -> None:
    console = Console()
    figures = uvloop.run(compare(sys.argv[1] if len(sys.argv) > 1 else BEFORE, console))
    console.print(figures)
    conclude("control-plane", bars_of(figures), figures, console)


if __name__ == "__main__":
    main()
