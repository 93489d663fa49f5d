"""`make bench-gpu`: the engine on a GPU against what that GPU can do, measured in the same run.

An 8 B Llama shape in bfloat16 with random weights. A decode step is held against the time to read its bytes (weights
and KV) at the bandwidth of a plain copy; a prompt against its floating point operations at the rate of a plain matrix
product. Steps are timed around `execute`: with what Python does before the GPU starts, sampling, and tokens on the CPU.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench.models import LLAMA_8B, llama_8b
from bench.report import Bar, conclude
from engine.backends.torch.cuda.quantised import gpu_linear
from engine.backends.torch.quantised import quantise_linears
from engine.backends.torch.runner import TorchRunner
from engine.core_types import Chunk, SamplingParams, Sequence
from engine.model.quantization import QuantizationConfig, Weights

DECODES = ((1, 512), (8, 2048), (32, 2048), (16, 8192), (64, 4096))
"""Pairs of batch size and context."""
QUANTISED_DECODES = ((1, 2048), (64, 4096))
QUANTISED_WEIGHTS: dict[Weights, float] = {"int8": 0.65, "int4": 0.5, "fp8": 0.65}
"""Largest time of a one-stream step with quantised weights, as a share of the time with the saved weights."""
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


def decode_bars(
    runner: TorchRunner,
    cases: tuple[tuple[int, int], ...],
    bandwidth: float,
    figures: dict[str, Any],
    of: str,
    least: float,
) -> list[Bar]:
    """Measure decodes as shares of the time to read their bytes; `of` describes all of them."""
    bars = []
    for batch, context in cases:
        seconds = decode(runner, batch, context)
        figures["decode_ms"][f"{batch}x{context}{of}"] = 1e3 * seconds
        share = decode_bytes(runner, batch, context) / bandwidth / seconds
        bars.append(Bar(f"decode {batch} x {context}{of}: share of HBM roofline", share, least, at_least=True))
    return bars


def quantised_kv(bandwidth: float, figures: dict[str, Any]) -> list[Bar]:
    """Measure decodes over fp8 blocks, by Tandem's own kernels."""
    quantization = QuantizationConfig(kv_dtype="fp8")
    runner = TorchRunner(llama_8b("cuda"), "bfloat16", 16, kv_bytes=KV_BYTES, device="cuda", quantization=quantization)
    for block in runner.pool.owner.split(256):  # type: ignore[union-attr]
        block.random_(0, 64)  # as in `fill`; larger bytes are NaN in float8 or bfloat16
    return decode_bars(runner, QUANTISED_DECODES, bandwidth, figures, ", fp8 KV", 0.6)


def quantised_weights(figures: dict[str, Any]) -> list[Bar]:
    """Compare each kind of weights quantised at load with the saved weights: a decode and a prompt."""
    bars = []
    for kind, most in QUANTISED_WEIGHTS.items():
        built = llama_8b("cuda")
        quantise_linears(built.model, kind, partial(gpu_linear, device=torch.device("cuda")))
        runner = TorchRunner(built, "bfloat16", 16, kv_bytes=KV_BYTES, device="cuda")
        fill(runner.pool.owner)
        for batch, context in DECODES[:3]:
            figures["decode_ms"][f"{batch}x{context}, {kind}"] = 1e3 * decode(runner, batch, context)
        figures["prefill_ms"][f"2048 after 0, {kind}"] = 1e3 * prefill(runner, 2048, 0)
        alone = figures["decode_ms"][f"1x512, {kind}"] / figures["decode_ms"]["1x512"]
        bars.append(Bar(f"decode 1 x 512, {kind} weights / as saved", alone, most))
        del runner, built
        torch.cuda.empty_cache()
    return bars


def main() -> None:
    console = Console()
    if not torch.cuda.is_available():
        console.print("bench-gpu: skipped, torch sees no CUDA device here; nothing was measured")
        return
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    torch.cuda.empty_cache()
    name = torch.cuda.get_device_name()
    console.print(f"{name}: copies {bandwidth / 1e9:.0f} GB/s, multiplies bfloat16 at {rate / 1e12:.0f} TFLOP/s")
    runner = TorchRunner(llama_8b("cuda"), "bfloat16", block_tokens=16, kv_bytes=KV_BYTES, device="cuda")
    fill(runner.pool.owner)  # type: ignore[union-attr]
    graphs = runner.paged.graphs is not None
    console.print(f"backend {runner.backend}, CUDA graphs: {graphs}")
    figures: dict[str, Any] = {"gpu": name, "bandwidth": bandwidth, "rate": rate}
    figures |= {"backend": runner.backend, "graphs": graphs, "decode_ms": {}, "prefill_ms": {}}
    bars = decode_bars(runner, DECODES, bandwidth, figures, "", 0.75)
    for count, before in PREFILLS:
        seconds = prefill(runner, count, before)
        figures["prefill_ms"][f"{count} after {before}"] = 1e3 * seconds
        share = prefill_operations(count, before) / rate / seconds
        bars.append(Bar(f"prefill {count} after {before}: share of bf16 peak", share, 0.55, at_least=True))
    figures["decode_ms"]["32x2048, drawn by top-p"] = 1e3 * decode(runner, 32, 2048, DRAWN)
    if graphs:
        runner.paged.graphs = None
        figures["decode_ms"]["32x2048, no graphs"] = 1e3 * decode(runner, 32, 2048)
    del runner
    torch.cuda.empty_cache()
    bars += quantised_kv(bandwidth, figures)
    torch.cuda.empty_cache()
    bars += quantised_weights(figures)
    console.print(figures)
    conclude("gpu", bars, figures, console)


if __name__ == "__main__":
    main()
