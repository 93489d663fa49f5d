"""`make bench-gpu`: the engine on a GPU against what that GPU can do, measured in the same run.

An 8 B Llama shape in bfloat16 with random weights. A decode step is held against the time to read its bytes (weights
and KV) at the bandwidth of a plain copy; a prompt against its floating point operations at the rate of a plain matrix
product. Steps are timed around `execute`: with what Python does before the GPU starts, sampling, and tokens on the CPU.
Then two workers share the GPU (`gpu_pair.py`).
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench import gpu_pair
from bench.models import LLAMA_8B, llama_8b
from bench.support.report import Bar, Parts, conclude
from engine.backends.torch.runner import TorchRunner
from engine.core_types import Chunk, SamplingParams, Sequence
from engine.model.quantization import QuantizationConfig

DECODES = ((1, 512), (8, 2048), (32, 2048), (16, 8192), (64, 4096))
"""Pairs of batch size and context."""
QUANTISED_DECODES = ((1, 2048), (64, 4096))
PREFILLS = ((2048, 0), (8192, 0), (2048, 8192))
"""Pairs of a chunk's tokens and the tokens before it."""
KV_BYTES = 36 << 30
COPY_BYTES = 2 << 30
MATRIX = 8192
WARM_UP, ROUNDS = 5, 30
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=1 << 20, temperature=0.8, top_p=0.95, ignore_eos=True)


def seconds_on_gpu(compute: Callable[[], object], rounds: int = 10) -> float:
    """Return the median duration of single calls, after warming up."""
    times = []
    for number in range(3 + rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        compute()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return bytes read and written per second."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_on_gpu(lambda: target.copy_(source))


def matrix_rate() -> float:
    """Return floating point operations per second of a bfloat16 product, on random data (zeros draw less power)."""
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * MATRIX**3 / seconds_on_gpu(lambda: a @ b)


def sequences(runner: TorchRunner, batch: int, length: int, sampling: SamplingParams) -> list[Sequence]:
    """Return sequences in blocks of their own, with the pool's content as KV."""
    count = runner.layout.blocks_for(length)
    assert batch * count <= runner.pool.num_blocks, "the pool is too small for this case"
    tokens = torch.randint(0, LLAMA_8B["vocab_size"], (length,)).tolist()
    return [
        Sequence(str(n), tokens, length, b"", sampling, 0, 0, blocks=list(range(n * count, (n + 1) * count)))
        for n in range(batch)
    ]


def step_seconds(runner: TorchRunner, chunks: list[Chunk], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(WARM_UP + rounds):
        started_at = time.perf_counter()
        runner.execute(chunks)
        times.append(time.perf_counter() - started_at)
    return statistics.median(times[WARM_UP:])


def decode(runner: TorchRunner, batch: int, context: int, sampling: SamplingParams = GREEDY) -> float:
    """Return the seconds of one decode step."""
    return step_seconds(runner, [Chunk(s, context - 1, 1) for s in sequences(runner, batch, context, sampling)])


def prefill(runner: TorchRunner, count: int, before: int) -> float:
    """Return the seconds of one chunk."""
    [sequence] = sequences(runner, 1, before + count, GREEDY)
    return step_seconds(runner, [Chunk(sequence, before, count)], rounds=10)


def linear_elements() -> int:
    """Return the number of weights in all layers' linear parts."""
    hidden, inner, layers = (LLAMA_8B[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    kv = hidden // LLAMA_8B["num_attention_heads"] * LLAMA_8B["num_key_value_heads"]
    return int(layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner))


def output_elements() -> int:
    return int(LLAMA_8B["vocab_size"] * LLAMA_8B["hidden_size"])


def decode_bytes(runner: TorchRunner, batch: int, context: int) -> int:
    """Return the bytes read in one step: every weight but the embedding's, and the KV of every context."""
    kv = batch * context * runner.layout.block_bytes // runner.layout.block_tokens
    return 2 * (linear_elements() + output_elements()) + kv


def prefill_operations(count: int, before: int) -> int:
    """Return the operations of one chunk whose last token is sampled: products with weights, and causal attention."""
    seen = count * before + count * (count + 1) // 2
    attention = 4 * LLAMA_8B["num_hidden_layers"] * LLAMA_8B["hidden_size"] * seen
    return int(2 * linear_elements() * count + 2 * output_elements() + attention)


def fill(pool: Tensor) -> None:
    """Fill the pool with random KV: zeros would be read faster than data."""
    for block in pool.split(256):
        block.normal_()


class Measurement:
    """Figures and bars so far, and the two rates that they are held against."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bandwidth, self.rate = copy_bandwidth(), matrix_rate()
        self.bars: list[Bar] = []
        self.decode_ms: dict[str, float] = {}
        self.prefill_ms: dict[str, float] = {}

    def add(self, what: str, measured: float, limit: float, at_least: bool = False) -> None:
        self.bars.append(Bar(what, measured, limit, at_least))
        self.console.print(f"{what}: {measured:.2f}", markup=False)

    def decodes(self, runner: TorchRunner, cases: tuple[tuple[int, int], ...], of: str, least: float) -> None:
        """Measure decodes as shares of the time to read their bytes; `of` describes all of them."""
        for batch, context in cases:
            seconds = decode(runner, batch, context)
            self.decode_ms[f"{batch}x{context}{of}"] = 1e3 * seconds
            share = decode_bytes(runner, batch, context) / self.bandwidth / seconds
            self.add(f"decode {batch} x {context}{of}: share of HBM roofline", share, least, at_least=True)

    def as_saved(self) -> None:
        """Measure decodes and prompts with weights and KV in bfloat16."""
        runner = TorchRunner(llama_8b("cuda"), "bfloat16", block_tokens=16, kv_bytes=KV_BYTES, device="cuda")
        fill(runner.pool.owner)  # type: ignore[union-attr]
        self.console.print(f"backend {runner.backend}, CUDA graphs: {runner.paged.graphs is not None}")
        self.decodes(runner, DECODES, "", 0.75)
        for count, before in PREFILLS:
            seconds = prefill(runner, count, before)
            self.prefill_ms[f"{count} after {before}"] = 1e3 * seconds
            share = prefill_operations(count, before) / self.rate / seconds
            self.add(f"prefill {count} after {before}: share of bf16 peak", share, 0.55, at_least=True)
        self.decode_ms["32x2048, drawn by top-p"] = 1e3 * decode(runner, 32, 2048, DRAWN)
        if runner.paged.graphs is not None:
            runner.paged.graphs = None
            self.decode_ms["32x2048, no graphs"] = 1e3 * decode(runner, 32, 2048)

    def quantised_kv(self) -> None:
        """Measure decodes over fp8 blocks, by Tandem's own kernels."""
        built, kept = llama_8b("cuda"), QuantizationConfig(kv_dtype="fp8")
        runner = TorchRunner(built, "bfloat16", 16, kv_bytes=KV_BYTES, device="cuda", quantization=kept)
        for block in runner.pool.owner.split(256):  # type: ignore[union-attr]
            block.random_(0, 64)  # as in `fill`; larger bytes are NaN in float8 or bfloat16
        self.decodes(runner, QUANTISED_DECODES, ", fp8 KV", 0.6)


def main() -> None:
    console = Console()
    if not torch.cuda.is_available():
        console.print("bench-gpu: skipped, torch sees no CUDA device here; nothing was measured")
        return
    measured, parts = Measurement(console), Parts(console)
    name = torch.cuda.get_device_name()
    rates = f"copies {measured.bandwidth / 1e9:.0f} GB/s, multiplies bfloat16 at {measured.rate / 1e12:.0f} TFLOP/s"
    console.print(f"{name}: {rates}")
    measurements: dict[str, Callable[[], None]] = {"as saved": measured.as_saved, "fp8 KV": measured.quantised_kv}
    for part, measure in measurements.items():
        with parts.guard(part):
            measure()
        gc.collect()  # a runner's graphs and layers refer to each other
        torch.cuda.empty_cache()
    pair: dict[str, Any] = {}
    with parts.guard("two workers"):
        bars, pair = gpu_pair.measure()
        measured.bars += bars
    figures = {"gpu": name, "bandwidth": measured.bandwidth, "rate": measured.rate, "two workers": pair}
    figures |= {"decode_ms": measured.decode_ms, "prefill_ms": measured.prefill_ms}
    console.print(figures)
    conclude("gpu", measured.bars, figures, console, parts.failed)


if __name__ == "__main__":
    main()
