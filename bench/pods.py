"""`make bench-pods`: two workers in network namespaces of their own, which have no memory in common, only TCP.

- A lender that is cut off, or stopped, in the middle of a loan: the time to the first token, beside the time to compute
  the whole prompt on the decode worker.
- Loans of cached blocks beside bare NIXL reads of as many bytes between two processes of the same namespaces.
"""

import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.kv import BLOCK, Bare, loan_s, one_loan, summary, tokens
from bench.models import sim_model
from bench.namespaces import Namespace, Namespaces, missing
from bench.report import Bar, Parts, conclude, percentile
from bench.workers import Workers
from cluster.process_tree import descendants

ROUNDS = 20
PROMPTS = {"0.3 s": 600, "1 s": 2000}
"""Prompts by the time to compute them on one worker, in tokens of half a millisecond."""
CHUNK_TOKENS = 256
HEALING_S = 0.5
"""Seconds from an answer to the end of the fault, and from there to the next round."""
SIZES_MIB = {64: 20, 256: 12}
"""Loans of cached blocks, in MiB, and how many of each."""
BLOCK_KIB, POOL_MIB = 256, 640


def cut_off(lender: Namespace, process: int) -> Callable[[], None]:
    """Unplug the lender; return what plugs it in again."""
    lender.set_up(False)
    return lambda: lender.set_up(True)


def stop(lender: Namespace, process: int) -> Callable[[], None]:
    """Stop all processes of the lender; return what continues them."""
    pids = descendants(process)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    return go_on


FAULTS: dict[str, Callable[[Namespace, int], Callable[[], None]]] = {"cut off": cut_off, "stopped": stop}


async def measure_silence(model: Path, spaces: Sequence[Namespace], progress: Progress) -> dict[str, Any]:
    """Measure requests whose lender falls silent at a random moment of the loan, in turns with undisturbed ones."""
    settings = {"model": model, "engine": "sim", "sim_prompt_token_us": 500, "max_prefill_tokens": CHUNK_TOKENS}
    seeds = random.Random(4)
    figures: dict[str, Any] = {}
    names = {"prefill_0": spaces[0], "decode_0": spaces[1]}
    task = progress.add_task("silent lenders", total=ROUNDS * len(PROMPTS) * len(FAULTS))
    async with Workers(namespaces=names, prefill_0=settings, decode_0=settings) as workers:
        await workers.decode("decode_0", tokens(PROMPTS["1 s"], seeds), None)  # it measures its own speed
        for named, count in PROMPTS.items():
            for fault, cause in FAULTS.items():
                alone, disturbed, hedged = [], [], 0
                for _ in range(ROUNDS):
                    _, seconds = await workers.decode("decode_0", tokens(count, seeds), None)
                    alone.append(seconds)
                    asking = asyncio.ensure_future(workers.decode("decode_0", tokens(count, seeds), "prefill_0"))
                    await asyncio.sleep(seeds.uniform(0.2, 0.8) * seconds)
                    heal = cause(spaces[0], workers.role("prefill_0").pid)
                    receipt, seconds = await asking
                    disturbed.append(seconds)
                    hedged += receipt.kv.hedged_blocks > 0 or receipt.kv.loan_failure != ""
                    await asyncio.sleep(HEALING_S)
                    heal()
                    await asyncio.sleep(HEALING_S)
                    await workers.decode("decode_0", tokens(BLOCK, seeds), "prefill_0")
                    progress.advance(task)
                figures[f"{fault}, {named}"] = {
                    "computed_here_s": statistics.median(alone),
                    "p50_s": statistics.median(disturbed),
                    "p99_s": percentile(disturbed, 0.99),
                    "ratio": (percentile(disturbed, 0.99) - 0.3) / statistics.median(alone),
                    "hedged": hedged,
                }
    return figures


async def measure_tcp(
    model: Path, spaces: Sequence[Namespace], cores: Sequence[int], progress: Progress
) -> dict[int, Any]:
    """Measure loans of cached blocks and bare reads of as many bytes, in turns."""
    settings = {"model": model, "engine": "sim", "sim_block_kib": BLOCK_KIB, "kv_memory_mib": POOL_MIB}
    settings |= {"max_batch_tokens": 65536, "max_prefill_tokens": 65536}
    seeds = random.Random(5)
    figures: dict[int, Any] = {}
    names = {"prefill_0": spaces[0], "decode_0": spaces[1]}
    task = progress.add_task("TCP", total=sum(SIZES_MIB.values()))
    async with (
        Workers(
            namespaces=names,
            prefill_0=settings | {"cores": (cores[0],)},
            decode_0=settings | {"cores": (cores[1],)},
        ) as workers,
        Bare(cores, spaces) as bare,
    ):
        for _ in range(4):  # until all pools were read and written once: the first time costs more
            await one_loan(workers, tokens(BLOCK * 1024, seeds))
            await bare.read(256 << 20)
        for size, rounds in SIZES_MIB.items():
            ours, theirs, copies = [], [], []
            for _ in range(rounds):
                receipt = await one_loan(workers, tokens(BLOCK * (size << 10) // BLOCK_KIB, seeds))
                assert set(receipt.kv.ucx_transports) == {"tcp/eth0"}, receipt.kv
                ours.append(loan_s(receipt))
                theirs.append(await bare.read(size << 20))
                copies.append(await bare.copy(size << 20))
                progress.advance(task)
            figures[size] = summary(size, ours, theirs, copies)
    return figures


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    silent = [
        Bar(f"lender {name} to compute: (TTFT p99 of {ROUNDS} - 0.3 s) / computing it here", each["ratio"], 2.0)
        for name, each in figures.get("silence", {}).items()
    ]
    return silent + [
        Bar(f"{size} MB by TCP: loan's bandwidth / bare NIXL reads", each["ratio"], 0.75, at_least=True)
        for size, each in figures.get("tcp", {}).items()
    ]


async def measure(wanted: Sequence[str], parts: Parts, console: Console) -> None:
    cores = sorted(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as folder,
        Namespaces() as namespaces,
        Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress,
    ):
        model = sim_model(Path(folder) / "sim")
        spaces = [namespaces.add("lender"), namespaces.add("borrower")]
        if "tcp" in wanted:
            await parts.measure("tcp", measure_tcp(model, spaces, cores, progress))
        if "silence" in wanted:
            await parts.measure("silence", measure_silence(model, spaces, progress))


def main() -> None:
    console = Console()
    if reason := missing():
        console.print(f"not run: {reason}")
        conclude("pods", [], {"not_run": reason}, console)
        return
    parts = Parts(console)
    asyncio.run(measure(sys.argv[1:] or ["tcp", "silence"], parts, console))
    console.print_json(data=parts.figures)
    conclude("pods", bars_of(parts.figures), parts.figures, console, parts.failed)


if __name__ == "__main__":
    main()
