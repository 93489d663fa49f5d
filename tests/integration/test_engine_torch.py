"""The torch engine against transformers itself, in one process."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.core import CoreLimits, EngineCore
from engine.messages import FromEngine, Generate, Token
from engine.scheduler import StepBudget
from engine.torch.native.kernels import Kernels
from engine.torch.runner import TorchRunner
from engine.vocabulary import Chunk, SamplingParams, Sequence
from kvtransfer.local import LocalNetwork, LocalTransport
from support.long_runs import mostly_long

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe")
LENGTHS = (1, 15, 16, 17, 31, 33, 70, 101)
NEW_TOKENS = 12
CHUNK = 32


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 500, (length,), generator=generator).tolist() for length in LENGTHS]


def reference(path: Path, prompt: list[int], new_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path)
    if model.config.model_type == "gemma2":
        model.set_attn_implementation("eager")  # transformers' sdpa knows no softcap
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, attention_mask=torch.ones_like(ids))
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def run(core: EngineCore, out: list[FromEngine], requests: list[Generate]) -> dict[str, list[int]]:
    for request in requests:
        core.handle(request)
    while core.step():
        pass
    tokens: dict[str, list[int]] = {}
    for message in out:
        if isinstance(message, Token):
            tokens.setdefault(message.request_id, []).append(message.token_id)
    out.clear()
    return tokens


def make_core(path: Path, dtype: str = "float32", chunk: int = CHUNK) -> tuple[EngineCore, list[FromEngine]]:
    out: list[FromEngine] = []
    runner = TorchRunner(path, dtype, block_tokens=16, kv_bytes=8 << 20)
    transport = LocalTransport(LocalNetwork(), "one")
    core = EngineCore(runner, transport, CoreLimits(StepBudget(2 * chunk, chunk)), out.append)
    core.start()
    return core, out


def greedy(request_id: str, prompt: list[int], new_tokens: int = NEW_TOKENS) -> Generate:
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0)
    return Generate(request_id, tuple(prompt), (), sampling, "", 0, borrow=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_all_at_once(make_model, family: str) -> None:  # type: ignore[no-untyped-def]
    path = make_model(family)
    core, out = make_core(path)
    got = run(core, out, [greedy(str(i), prompt) for i, prompt in enumerate(prompts())])
    assert got == {str(i): reference(path, prompt, NEW_TOKENS) for i, prompt in enumerate(prompts())}
    assert core.audit().fault == ""


@pytest.mark.parametrize("chunk", mostly_long([1, 7, 16, 200], 7))
def test_output_does_not_depend_on_chunk_size_or_company(tiny_model: Path, chunk: int) -> None:
    alone, out = make_core(tiny_model)
    expected = {str(i): run(alone, out, [greedy("x", prompt)])["x"] for i, prompt in enumerate(prompts())}
    core, out = make_core(tiny_model, chunk=chunk)
    assert run(core, out, [greedy(str(i), prompt) for i, prompt in enumerate(prompts())]) == expected


def test_prefix_hits_change_nothing(tiny_model: Path) -> None:
    core, out = make_core(tiny_model)
    prompt = prompts()[-1]
    first = run(core, out, [greedy("a", prompt)])["a"]
    assert run(core, out, [greedy("b", prompt)])["b"] == first
    # The next turn goes on from what was decoded.
    longer = prompt + first
    fresh, fresh_out = make_core(tiny_model)
    assert run(core, out, [greedy("c", longer)])["c"] == run(fresh, fresh_out, [greedy("c", longer)])["c"]


def test_resuming_with_emitted_tokens_continues_the_same_text(tiny_model: Path) -> None:
    """A failover: the second attempt is given what the first one emitted. Sampled, since that is the harder case."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.9, top_p=0.9, top_k=50, seed=7)
    prompt = tuple(prompts()[3])
    core, out = make_core(tiny_model)
    whole = run(core, out, [Generate("a", prompt, (), sampling, "", 0, borrow=False)])["a"]
    for cut in (1, 5, 11):
        other, out = make_core(tiny_model)
        rest = run(other, out, [Generate("b", prompt, tuple(whole[:cut]), sampling, "", 0, borrow=False)])["b"]
        assert rest == whole[cut:]


@pytest.mark.parametrize("backend", ["sdpa", "native"])
@pytest.mark.parametrize("family", mostly_long(["llama", "qwen2", "gemma2", "qwen3_moe"], "gemma2"))
def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(make_model, family: str, backend: str) -> None:  # type: ignore[no-untyped-def]
    """Two batch shapes of transformers differ, so equality says nothing: distance from the truth does."""
    path = make_model(family, dtype="bfloat16")
    prompt = prompts()[-1]
    ids = torch.tensor([prompt])

    def by_transformers(dtype: torch.dtype) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        with torch.inference_mode():
            logits: torch.Tensor = model(ids).logits[0].double()
        return logits

    truth = by_transformers(torch.float32)
    noise = (by_transformers(torch.bfloat16) - truth).abs().mean()
    runner = TorchRunner(path, "bfloat16", block_tokens=16, kv_bytes=8 << 20, backend=backend)
    ours = torch.stack([logits_after(runner, prompt[: end + 1]) for end in range(len(prompt))])
    assert noise > 0
    assert (ours.double() - truth).abs().mean() <= 1.2 * noise


def logits_after(runner: TorchRunner, tokens: list[int], chunk: int = 30, first_block: int = 0) -> torch.Tensor:
    """[vocab], the prompt computed in chunks."""
    blocks = list(range(first_block, first_block + runner.layout.blocks_for(len(tokens))))
    sequence = Sequence("a", tokens, len(tokens), b"", SamplingParams(1), 0, 0, blocks=blocks)
    for start in range(0, len(tokens), chunk):
        logits = runner.logits([Chunk(sequence, start, min(chunk, len(tokens) - start))])
    return logits[0]


def test_bfloat16_logits_are_the_same_to_the_bit_in_any_company(make_model) -> None:  # type: ignore[no-untyped-def]
    """The kernels compute every row in an order of its own. Only where the CPU multiplies bfloat16 itself."""
    runner = TorchRunner(make_model("qwen2", dtype="bfloat16"), "bfloat16", 16, 8 << 20, backend="native")
    if not Kernels().multiplies_bfloat16:
        pytest.skip("no bfloat16 dot products on this CPU: linear layers are torch's")
    whole = [logits_after(runner, prompt, chunk=1000) for prompt in prompts()]
    for chunk in (1, 7, 32):
        for prompt, expected in zip(prompts(), whole, strict=True):
            assert torch.equal(logits_after(runner, prompt, chunk), expected)
    batch, first_block = [], 0
    for prompt in prompts():
        blocks = list(range(first_block, first_block + runner.layout.blocks_for(len(prompt))))
        first_block += len(blocks)
        sequence = Sequence("a", prompt, len(prompt), b"", SamplingParams(1), 0, 0, blocks=blocks)
        batch.append(Chunk(sequence, 0, len(prompt)))
    assert torch.equal(runner.logits(batch), torch.stack(whole))
