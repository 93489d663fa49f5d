"""The engine on a GPU: against itself on the CPU, against transformers, and graphs against the plain path."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.torch.backends import Backend
from engine.backends.torch.device import Device
from engine.backends.torch.runner import TorchRunner
from engine.backends.torch.sampling.sampler import sample
from engine.core.engine_core import EngineCore
from engine.core.loan_host import EngineLimits
from engine.core_types import Chunk, SamplingParams, Sequence, StepBudget
from engine.kv.layout import KvDtype
from engine.messages.from_engine import FromEngine, Token
from engine.messages.to_engine import Generate
from engine.model.quantization import QuantizationConfig
from kvtransfer.fingerprint import fingerprint_blocks
from kvtransfer.local import LocalNetwork, LocalTransport

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "mixtral")
DENSE = FAMILIES[:-1]
"""A mixture's router may send a token elsewhere for a rounding error."""
LENGTHS = (1, 15, 16, 17, 33, 70, 101, 300)
KV_BYTES = 32 << 20
NEW_TOKENS = 12

Models = Callable[..., Path]


def sequences(layout_block_tokens: int, lengths: tuple[int, ...] = LENGTHS) -> list[Sequence]:
    """Of random tokens, each in blocks of its own, with room for one token more."""
    generator = torch.Generator().manual_seed(0)
    made, block = [], 0
    for length in lengths:
        tokens = torch.randint(1, 900, (length,), generator=generator).tolist()
        count = length // layout_block_tokens + 1
        blocks = list(range(block, block + count))[::-1]
        made.append(Sequence("a", tokens, length, b"", SamplingParams(1), 0, 0, blocks=blocks))
        block += count
    return made


def prompts(some: list[Sequence], chunk: int = 60) -> list[list[Chunk]]:
    """Steps that compute everything but the last token of each, in chunks, several sequences a step."""
    steps: dict[int, list[Chunk]] = {}
    for sequence in some:
        for step, start in enumerate(range(0, sequence.num_tokens - 1, chunk)):
            steps.setdefault(step, []).append(Chunk(sequence, start, min(chunk, sequence.num_tokens - 1 - start)))
    return [steps[step] for step in sorted(steps)]


def last(some: list[Sequence]) -> list[Chunk]:
    return [Chunk(sequence, sequence.num_tokens - 1, 1) for sequence in some]


def logits_of(runner: TorchRunner) -> Tensor:
    """Of the token after each sequence: prompts in chunks, then one step of single tokens. float64, on the CPU."""
    some = sequences(runner.layout.block_tokens)
    for step in prompts(some):
        runner.execute(step)
    return runner.logits(last(some)).double().cpu()


def runner_of(path: Path, dtype: str, backend: Backend, device: Device = "cuda", kept: KvDtype = "auto") -> TorchRunner:
    quantization = QuantizationConfig(kv_dtype=kept)
    return TorchRunner(path, dtype, 16, kv_bytes=KV_BYTES, backend=backend, device=device, quantization=quantization)


@pytest.mark.parametrize("family", FAMILIES)
def test_sdpa_on_the_gpu_equals_sdpa_on_the_cpu(wide_model: Models, family: str) -> None:
    path = wide_model(family)
    devices: tuple[Device, ...] = ("cpu", "cuda")
    on_cpu, on_gpu = (logits_of(runner_of(path, "float32", "sdpa", device)) for device in devices)
    assert torch.allclose(on_gpu, on_cpu, atol=1e-3 * float(on_cpu.abs().max()))


@pytest.mark.parametrize("family", DENSE)
def test_flashinfer_is_as_near_to_float32_as_sdpa(wide_model: Models, family: str) -> None:
    path = wide_model(family, "bfloat16")
    truth = logits_of(runner_of(path, "float32", "sdpa"))
    noise = (logits_of(runner_of(path, "bfloat16", "sdpa")) - truth).abs().mean()
    assert 0 < noise < truth.abs().mean()
    assert (logits_of(runner_of(path, "bfloat16", "flashinfer")) - truth).abs().mean() <= 1.3 * noise


@pytest.mark.parametrize("family", DENSE)
def test_triton_is_as_near_to_float32_as_sdpa(wide_model: Models, family: str) -> None:
    path = wide_model(family, "bfloat16")
    truth = logits_of(runner_of(path, "float32", "sdpa"))
    noise = (logits_of(runner_of(path, "bfloat16", "sdpa")) - truth).abs().mean()
    assert (logits_of(runner_of(path, "bfloat16", "triton")) - truth).abs().mean() <= 1.3 * noise


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_quantised_blocks_are_written_and_read_as_by_the_reference(
    wide_model: Models, family: str, kept: KvDtype
) -> None:
    """Of the first layer, whose input is the same, to the bit."""
    runners = [
        runner_of(wide_model(family, "bfloat16"), "bfloat16", backend, kept=kept) for backend in ("sdpa", "triton")
    ]
    logits = [logits_of(runner) for runner in runners]
    layout = runners[0].layout
    heads = [
        runner._blocks.view(-1, layout.kv_heads, layout.layers, layout.head_bytes // layout.layers)
        for runner in runners
    ]
    written = {block for sequence in sequences(16) for block in sequence.blocks}
    same = (heads[0] == heads[1])[sorted(written), :, 0].float().mean()
    assert same >= 0.99, "fused norms and rotations round a few otherwise"
    assert torch.allclose(*logits, atol=0.05 * float(logits[0].abs().max()))
    graphs = runners[1].paged.graphs
    assert graphs is not None
    some = sequences(16)
    graphed = runners[1].logits(last(some)).float().cpu()
    runners[1].paged.graphs = None
    assert torch.allclose(runners[1].logits(last(some)).float().cpu(), graphed, atol=0.02 * float(graphed.abs().max()))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_graphs_compute_what_the_plain_path_computes(wide_model: Models, family: str) -> None:
    """Contexts may be split in other places, so not to the bit. Every number of decodes up to a bucket and beyond."""
    runner = runner_of(wide_model(family), "bfloat16", "flashinfer")
    some = sequences(16)
    for step in prompts(some):
        runner.execute(step)
    graphs = runner.paged.graphs
    assert graphs is not None
    for count in (1, 2, 3, 5, len(some)):
        graphed = runner.logits(last(some[:count])).float().cpu()
        runner.paged.graphs = None
        plain = runner.logits(last(some[:count])).float().cpu()
        runner.paged.graphs = graphs
        assert torch.allclose(graphed, plain, atol=0.02 * float(plain.abs().max()))


def test_a_graph_sees_new_blocks_and_tokens_each_time(wide_model: Models) -> None:
    """The same bucket for other sequences, alone and in company, gives the same as it did for them before."""
    runner = runner_of(wide_model("llama"), "bfloat16", "flashinfer")
    some = sequences(16)
    for step in prompts(some):
        runner.execute(step)
    together = runner.logits(last(some)).float().cpu()
    for row, sequence in enumerate(some):
        alone = runner.logits(last([sequence])).float().cpu()[0]
        assert torch.allclose(alone, together[row], atol=0.02 * float(together.abs().max()))
    assert torch.equal(runner.logits(last(some)).float().cpu(), together)


def test_padding_writes_into_nobodys_blocks(wide_model: Models) -> None:
    runner = runner_of(wide_model("llama"), "bfloat16", "flashinfer")
    some = sequences(16)[:3]
    runner.execute(last(some[:1]))
    held = {block for sequence in some for block in sequence.blocks}
    others = [block for block in range(runner.pool.num_blocks) if block not in held]
    before = runner.fingerprints(others)
    runner.logits(last(some))
    assert np.array_equal(runner.fingerprints(others), before)


def test_fingerprints_on_the_gpu_are_those_on_the_cpu(wide_model: Models) -> None:
    runner = runner_of(wide_model("qwen3"), "bfloat16", "sdpa")
    for step in prompts(sequences(16)):
        runner.execute(step)
    blocks = list(range(runner.pool.num_blocks))
    on_cpu = fingerprint_blocks(runner._blocks.cpu().numpy(), blocks, runner.layout.kv_heads)
    assert np.array_equal(runner.fingerprints(blocks), on_cpu)


def test_a_decode_step_waits_for_nothing(wide_model: Models) -> None:
    """Until its tokens are read back."""
    runner = runner_of(wide_model("llama"), "bfloat16", "flashinfer")
    some = sequences(16)
    for step in prompts(some):
        runner.execute(step)
    runner.logits(last(some))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.logits(last(some))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9, "top_k": 50}, {"min_p": 0.05, "repetition_penalty": 1.2}, {"temperature": 0.0}]
)
def test_the_sampler_draws_on_the_gpu_what_it_draws_on_the_cpu(options: dict[str, float]) -> None:
    logits = torch.randn(16, 5000, generator=torch.Generator().manual_seed(0)) * 3
    some = [
        Sequence("a", [1, 2, 3], 3, b"", SamplingParams(9, seed=seed, **options), 0, 0)  # type: ignore[arg-type]
        for seed in range(16)
    ]
    on_cpu, on_gpu = sample(logits, some, frozenset()), sample(logits.cuda(), some, frozenset())
    assert [sampled.token_id for sampled in on_gpu] == [sampled.token_id for sampled in on_cpu]


def greedy_tokens(runner: TorchRunner) -> dict[str, list[int]]:
    """Of every sequence, through the whole engine, all in one batch."""
    out: list[FromEngine] = []
    transport = LocalTransport(LocalNetwork(), "one")  # nothing is moved, so nothing is registered
    core = EngineCore(runner, transport, EngineLimits(StepBudget(128, 64)), out.append)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    for number, sequence in enumerate(sequences(16)):
        core.handle(Generate(str(number), tuple(sequence.token_ids), (), sampling, "", 0, borrow=False))
    while core.step():
        pass
    assert core.audit().fault == ""
    tokens: dict[str, list[int]] = {}
    for message in out:
        if isinstance(message, Token):
            tokens.setdefault(message.request_id, []).append(message.token_id)
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(wide_model: Models, family: str) -> None:
    """In float32 with sdpa."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(wide_model(family), attn_implementation="eager").cuda()
    expected = {}
    for number, sequence in enumerate(sequences(16)):
        ids = torch.tensor([sequence.token_ids], device="cuda")
        whole = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
        expected[str(number)] = whole[0, ids.shape[1] :].tolist()
    assert greedy_tokens(runner_of(wide_model(family), "float32", "sdpa")) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_runs_on_flashinfer(wide_model: Models, family: str) -> None:
    """Prompts in chunks, mixed steps, graphs where the model allows them; the same tokens when asked again."""
    runner = runner_of(wide_model(family, "bfloat16"), "bfloat16", "flashinfer")
    tokens = greedy_tokens(runner)
    assert {len(some) for some in tokens.values()} == {NEW_TOKENS}
    again = greedy_tokens(runner)
    assert again == tokens


def test_blocks_go_to_main_memory_and_come_back(wide_model: Models) -> None:
    """To and from the tiers below the pool."""
    runner = runner_of(wide_model("llama"), "bfloat16", "flashinfer")
    some = sequences(16)
    for step in prompts(some):
        runner.execute(step)
    blocks = some[0].blocks
    before = runner.fingerprints(blocks)
    contents = [content.copy() for content in runner.read_blocks(blocks)]
    free = runner.pool.num_blocks - 1
    for block, content in zip(blocks, contents, strict=True):
        runner.write_block(free, content)
        assert np.array_equal(runner.fingerprints([free])[0], runner.fingerprints([block])[0])
    assert np.array_equal(runner.fingerprints(blocks), before)
