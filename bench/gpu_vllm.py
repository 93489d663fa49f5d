"""vLLM under Tandem beside plain vLLM on one GPU: `python -m bench.gpu_vllm`, part of `make bench-gpu`.

Parts, each for every model of `--models`:

- alone: one aggregated worker of Tandem (router, front and gRPC clients included) beside vLLM's AsyncLLM, and the same
  worker by HTTP beside `vllm serve`, in turns;
- pair: 1 prefill + 1 decode beside 2 aggregated workers on this GPU, and what is left of a loan after its last chunk.

Both sides get the same arguments. Models have random weights and are made in .bench/. Each part has a time limit, and
.bench/gpu-vllm.json is written after each. torch.compile takes minutes at vLLM's first start: where there is little
time, give both sides CUDA graphs without it, by --options.

`--rehearse` runs everything with a small model on the CPU, to try the program itself: its bars mean nothing.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench import gpu_pair
from bench.models import LLAMAS, kv_bytes_per_token, weight_bytes
from bench.support.report import OUT, Bar, Parts, conclude, save
from bench.vllm.sides import Setting, end_on_sigterm
from bench.vllm.streams import StreamLoad
from bench.vllm.transfer import timed_loans
from bench.vllm.turns import Limits, Loads, bars_of, compare
from engine.backends.vllm.arguments import vllm_python
from engine.config import WorkerConfig
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster

PARTS = ("alone", "pair")
NO_COMPILE = '{"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}'
MAX_CONTEXT, MAX_STREAMS = 8192, 256
KV_TOKENS = 104 * 1024
"""Tokens of each side's KV pool: 256 streams of 384 tokens, and room for one long prompt."""
STEP_TOKENS = 8192
OVERHEAD_BYTES = 5 << 30
"""GPU memory of a vLLM process beyond weights and KV: activations, graphs, CUDA's context."""
LIMITS = Limits(tokens_per_s=0.95, itl_p50_ms=1.05, ttft_p50_ms=1.10)
LEFT_LIMIT = 0.15
LOAN_TOKENS, LOANS = 4000, 6
BORROW_ALWAYS = {"decode_prefill_tokens_per_s": 100.0}
"""Router settings of the pair: it shall borrow from the first prompt on, when no speed is learned yet."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the loads."""

    alone: Loads
    loan_tokens: int
    requests: int
    request_tokens: int


ON_GPU = Sizes(Loads((1, 8, 64, 256), 256, 128, 4096), LOAN_TOKENS, gpu_pair.REQUESTS, gpu_pair.PROMPT_TOKENS)
REHEARSED = Sizes(Loads((1, 4), 64, 16, 512), 500, 6, 512)


@dataclass(frozen=True, slots=True)
class Run:
    """Arguments of the command line."""

    parts: Sequence[str]
    models: Sequence[str]
    python: Path
    rounds: int
    limit_s: float
    options: dict[str, Any]
    rehearses: bool

    @property
    def sizes(self) -> Sizes:
        return REHEARSED if self.rehearses else ON_GPU

    @property
    def name(self) -> str:
        return "gpu-vllm-rehearsed" if self.rehearses else "gpu-vllm"


def setting_of(run: Run, name: str) -> Setting:
    """Make the model unless it is there, by vLLM's torch, and return what both sides get."""
    shape, dtype = LLAMAS[name], "float32" if run.rehearses else "bfloat16"
    model = (OUT / f"llama-{name}-{dtype}").absolute()
    command = [str(run.python), "-m", "bench.models", name, str(model), dtype]
    made = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    if made.returncode:
        raise RuntimeError(f"{model.name} could not be built: {made.stderr[-600:]}")
    options = {"max_model_len": min(MAX_CONTEXT, shape["max_position_embeddings"]), "max_num_seqs": MAX_STREAMS}
    kv_mib = KV_TOKENS * kv_bytes_per_token(shape) >> 20
    setting = Setting(
        model, shape["vocab_size"], dtype, kv_mib, STEP_TOKENS, options | run.options, run.python, clients=4
    )
    if not run.rehearses:
        return setting
    cores = sorted(os.sched_getaffinity(0))
    small = {"max_num_seqs": 16, "enforce_eager": True}
    return replace(
        setting, kv_mib=256, step_tokens=2048, options=options | small | run.options, cores=cores, other_cores=cores
    )


async def measure_alone(
    run: Run, setting: Setting, gpu: dict[str, Any], console: Console, kept: dict[str, Any]
) -> None:
    needed = 3 * (weight_bytes(setting.model) + (setting.kv_mib << 20) + OVERHEAD_BYTES)
    together = run.rehearses or needed <= gpu["bytes"]
    kept["both resident"] = together
    with tempfile.TemporaryDirectory() as scratch:
        await compare(setting, run.sizes.alone, run.rounds, together, Path(scratch), console, kept, over_http=True)


async def measure_pair(run: Run, setting: Setting, console: Console, kept: dict[str, Any]) -> None:
    sizes = run.sizes
    load = StreamLoad(LOANS + 1, sizes.loan_tokens, 2, setting.vocabulary)
    for name, pools in gpu_pair.POOLS.items():
        plan = setting.topology(*pools, **BORROW_ALWAYS if pools[0] else {})
        async with LocalCluster(plan) as cluster, Client(cluster.address) as client:
            if pools[0]:
                prompts = map(load.prompt, range(load.streams))
                loans = (await timed_loans(client, prompts))[1:]  # the first one compiles
                left_ms = statistics.median(loan.left_ms for loan in loans)
                lender_ms = statistics.median(loan.lender_ms for loan in loans)
                kept["loans"] = {"left_ms": left_ms, "lender_ms": lender_ms, "left": left_ms / lender_ms}
                console.print("loans:", kept["loans"])
            kept[name] = await gpu_pair.serve(client, sizes.requests, sizes.request_tokens)
            console.print(f"{name}:", kept[name])


def all_bars(run: Run, figures: dict[str, Any]) -> list[Bar]:
    """Return the bars of everything that was measured so far."""
    bars: list[Bar] = []
    for part, kept in figures.items():
        model = part.split(", ")[-1]
        if "loads" in kept:
            bars += bars_of(model, kept["loads"], LIMITS)
        if "loans" in kept:
            what = f"{model}, loan of {run.sizes.loan_tokens:,} tokens: after its last chunk / computing the prompt"
            bars.append(Bar(what, kept["loans"]["left"], LEFT_LIMIT))
        pools = {name: kept[name] for name in gpu_pair.POOLS if name in kept}
        if len(pools) == len(gpu_pair.POOLS):
            lane = "memory" if run.rehearses else "cuda_ipc"
            bars += gpu_pair.bars_of(f"{model}, two workers on this GPU", pools, lane)
    return bars


async def measure(run: Run, gpu: dict[str, Any], console: Console) -> None:
    end_on_sigterm()
    parts = Parts(console)
    for name in run.models:
        with parts.guard(f"model {name}"):
            setting = await asyncio.to_thread(setting_of, run, name)
            for part in run.parts:
                kept = parts.figures[f"{part}, {name}"] = {}
                with parts.guard(f"{part}, {name}"):
                    async with asyncio.timeout(run.limit_s):
                        if part == "alone":
                            await measure_alone(run, setting, gpu, console, kept)
                        else:
                            await measure_pair(run, setting, console, kept)
                save(run.name, all_bars(run, parts.figures), gpu | parts.figures, parts.failed)
    conclude(run.name, all_bars(run, parts.figures), gpu | parts.figures, console, parts.failed)


def gpu_of(python: Path) -> dict[str, Any]:
    """Return the name and the memory of the GPU that vLLM's torch sees; nothing where it sees none."""
    look = (
        "import json, torch; g = torch.cuda.is_available() and torch.cuda.get_device_properties(0);"
        "print(json.dumps({'gpu': g.name, 'bytes': g.total_memory} if g else {}))"
    )
    found = subprocess.run([str(python), "-c", look], capture_output=True, text=True, check=True)
    gpu: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return gpu


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_vllm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts, among {', '.join(PARTS)}; all by default")
    parser.add_argument("--models", default="1b,8b", help=f"models, with commas: {', '.join(LLAMAS)}; default 1b,8b")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side; figures are their medians")
    parser.add_argument("--limit-s", type=float, default=900.0, help="longest time of a part of one model, in seconds")
    parser.add_argument("--options", type=json.loads, default={}, help=f"more EngineArgs of both sides: '{NO_COMPILE}'")
    parser.add_argument("--vllm-python", type=Path, help="vLLM's interpreter; default: as a worker finds it")
    parser.add_argument("--rehearse", action="store_true", help="try everything with a small model on the CPU")
    given = parser.parse_args()
    models = ["small"] if given.rehearse else given.models.split(",")
    for kind, asked, known in (("part", given.parts, PARTS), ("model", models, LLAMAS)):
        if unknown := set(asked) - set(known):
            parser.error(f"unknown {kind} {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    console = Console(width=160)
    python = vllm_python(WorkerConfig(model=OUT, engine="vllm", vllm_python=given.vllm_python))
    gpu = {"gpu": "none: rehearsed on a CPU"} if given.rehearse else gpu_of(python)
    if not gpu:
        console.print(f"bench-gpu: skipped, the torch of {python} sees no CUDA device here; nothing was measured")
        return
    console.print(gpu)
    rounds = 1 if given.rehearse else given.rounds
    run = Run(given.parts or PARTS, models, python, rounds, given.limit_s, given.options, given.rehearse)
    uvloop.run(measure(run, gpu, console))


if __name__ == "__main__":
    sys.exit(main())
