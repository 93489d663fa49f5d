"""Duration of a model's linear layers alone at batch 1: `python -m bench.linears MODEL THREADS`.

Prints JSON: milliseconds for all of them once, by torch's nn.Linear and by the engine's kernels.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.models import linear_shapes
from engine.backends.torch.native.kernels import Kernels

ROUNDS = 15


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    kernels = Kernels()
    plain: list[Callable[[], object]] = []
    packed: list[Callable[[], object]] = []
    for outputs, inputs, count in linear_shapes(Path(sys.argv[1])):
        x = torch.randn(1, inputs).bfloat16()
        for _ in range(count):  # each layer has its own weights, otherwise they would stay in the cache
            weights = torch.randn(outputs, inputs, dtype=torch.bfloat16)
            plain.append(lambda x=x, weights=weights: torch.nn.functional.linear(x, weights))
            matrix = kernels.pack(weights)
            packed.append(lambda x=x, matrix=matrix: kernels.linear(x, matrix, None))
    times: dict[str, list[float]] = {"torch": [], "kernels": []}
    for _ in range(ROUNDS):
        times["torch"].append(timed(plain))
        times["kernels"].append(timed(packed))
    print(json.dumps({kind: statistics.median(taken) for kind, taken in times.items()}))


def timed(calls: list[Callable[[], object]]) -> float:
    started_at = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - started_at) * 1e3


if __name__ == "__main__":
    main()
