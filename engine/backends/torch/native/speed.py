"""Speed of the kernels on this machine, beside torch's: `python -m engine.backends.torch.native.speed`.

Prints JSON. Its process ends soon, so it may load torch and use all cores.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.backends.torch.native.kernels import Kernels
from engine.errors import KernelsUnavailable

OUTPUTS, INPUTS = 4864, 896
"""Shape of the measured layer, that of an MLP of Qwen2 0.5 B."""
ROWS = (1, 256)
"""Batches: one token of one stream, and a chunk of a prompt."""
ROUNDS = 7
COPIES = 8
"""Number of layers used in turn, so that their weights are not all in a cache."""
INSTRUCTIONS = (
    ("avx512_bf16", "AVX-512 with bfloat16 products"),
    ("avx512f", "AVX-512, bfloat16 widened to float32"),
    ("avx2", "AVX2, bfloat16 widened to float32"),
    ("asimd", "NEON, bfloat16 widened to float32"),
)
"""Instructions that the kernels use, by the flag in /proc/cpuinfo, the best first."""


def instructions(cpuinfo: str) -> str:
    """Return what the kernels compute with on the CPU that /proc/cpuinfo describes."""
    words = set(cpuinfo.split())
    return next((name for flag, name in INSTRUCTIONS if flag in words), "no vector instructions that the kernels use")


@torch.inference_mode()
def measure(kernels: Kernels, rows: int) -> dict[str, float]:
    """Return GFLOP/s by who computes: the kernels, and torch in both dtypes. The fastest of several rounds counts."""
    weights = [torch.randn(OUTPUTS, INPUTS) / 30 for _ in range(COPIES)]
    half = [each.bfloat16() for each in weights]
    packed = [kernels.pack(each) for each in half]
    x = torch.randn(rows, INPUTS)
    narrow = x.bfloat16()
    calls: dict[str, Callable[[int], object]] = {
        "kernels": lambda number: kernels.linear(narrow, packed[number], None),
        "torch bfloat16": lambda number: torch.nn.functional.linear(narrow, half[number]),
        "torch float32": lambda number: torch.nn.functional.linear(x, weights[number]),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            started_at = time.perf_counter()
            for number in range(COPIES):
                call(number)
            taken[name].append(time.perf_counter() - started_at)
    work = 2e-9 * rows * OUTPUTS * INPUTS * COPIES
    return {name: work / min(times[1:]) for name, times in taken.items()}


def main() -> None:
    try:
        kernels = Kernels()
    except KernelsUnavailable as error:
        print(json.dumps({"unavailable": str(error)}))
        return
    print(
        json.dumps(
            {
                "instructions": instructions(Path("/proc/cpuinfo").read_text()),
                "threads": torch.get_num_threads(),
                "gflops": {rows: measure(kernels, rows) for rows in ROWS},
            }
        )
    )


if __name__ == "__main__":
    main()
