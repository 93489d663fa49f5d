"""The torch engine against transformers itself, in one process."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.core_types import Chunk, SamplingParams, StepBudget
from support.long_runs import mostly_long
from support.torch_engine import TorchEngine, all_ids, ids, request, requests
from support.torch_models import copy_with, in_blocks, logits_after, random_prompts, runner_of

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe")
PROMPTS = random_prompts(1, 15, 16, 17, 31, 33, 70, 101, seed=0)
NEW_TOKENS = 12
CHUNK = 32


def reference(path: Path, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path)
    if model.config.model_type == "gemma2":
        model.set_attn_implementation("eager")  # transformers' sdpa knows no softcap
    prompt_ids = torch.tensor([prompt])
    mask = torch.ones_like(prompt_ids)
    out = model.generate(prompt_ids, max_new_tokens=new_tokens, do_sample=False, attention_mask=mask)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)


def engine_of(path: Path, chunk: int = CHUNK) -> TorchEngine:
    return TorchEngine(runner_of(path), StepBudget(2 * chunk, chunk))


def greedy(engine: TorchEngine, prompt: tuple[int, ...]) -> list[int]:
    return ids(engine.ask(request("r", prompt, GREEDY))["r", 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_all_at_once(make_model, family: str) -> None:  # type: ignore[no-untyped-def]
    path = make_model(family)
    got = all_ids(engine_of(path).ask(*requests(PROMPTS, GREEDY)))
    assert got == {(str(i), 0): reference(path, prompt, NEW_TOKENS) for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("chunk", mostly_long([1, 7, 16, 200], 7))
def test_output_does_not_depend_on_chunk_size_or_company(tiny_model: Path, chunk: int) -> None:
    alone = engine_of(tiny_model)
    expected = {(str(i), 0): greedy(alone, prompt) for i, prompt in enumerate(PROMPTS)}
    assert all_ids(engine_of(tiny_model, chunk).ask(*requests(PROMPTS, GREEDY))) == expected


def test_prefix_hits_change_nothing(tiny_model: Path) -> None:
    engine = engine_of(tiny_model)
    first = greedy(engine, PROMPTS[-1])
    assert greedy(engine, PROMPTS[-1]) == first
    # The next turn goes on from what was decoded.
    longer = (*PROMPTS[-1], *first)
    assert greedy(engine, longer) == greedy(engine_of(tiny_model), longer)


def test_resuming_with_emitted_tokens_continues_the_same_text(tiny_model: Path) -> None:
    """A failover: the second attempt is given what the first one emitted. Sampled, since that is the harder case."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.9, top_p=0.9, top_k=50, seed=7)
    whole = ids(engine_of(tiny_model).ask(request("a", PROMPTS[3], sampling))["a", 0])
    for cut in (1, 5, 11):
        rest = engine_of(tiny_model).ask(request("b", PROMPTS[3], sampling, whole[:cut]))
        assert ids(rest["b", 0]) == whole[cut:]


@pytest.mark.parametrize("backend", ["sdpa", "native"])
@pytest.mark.parametrize("family", mostly_long(["llama", "qwen2", "gemma2", "qwen3_moe"], "gemma2"))
def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(  # type: ignore[no-untyped-def]
    make_model, tmp_path: Path, family: str, backend: str
) -> None:
    """Two batch shapes of transformers differ, so equality says nothing: distance from the truth does."""
    path = make_model(family, dtype="bfloat16")
    if family == "qwen3_moe":  # all experts are asked: of a few, the last bit decides which, and one other is far away
        path = copy_with(path, tmp_path / "all experts", num_experts_per_tok=4)
    prompt = PROMPTS[-1]
    token_ids = torch.tensor([prompt])

    def by_transformers(dtype: torch.dtype) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        with torch.inference_mode():
            logits: torch.Tensor = model(token_ids).logits[0].double()
        return logits

    truth = by_transformers(torch.float32)
    noise = (by_transformers(torch.bfloat16) - truth).abs().mean()
    runner = runner_of(path, "bfloat16", backend=backend)
    ours = torch.stack([logits_after(runner, prompt[: end + 1]) for end in range(len(prompt))])
    assert noise > 0
    assert (ours.double() - truth).abs().mean() <= 1.2 * noise


def test_bfloat16_logits_are_the_same_to_the_bit_in_any_company(make_model) -> None:  # type: ignore[no-untyped-def]
    """The kernels compute every row in an order of its own."""
    runner = runner_of(make_model("qwen2", dtype="bfloat16"), "bfloat16", backend="native")
    whole = [logits_after(runner, prompt, chunk=1000) for prompt in PROMPTS]
    for chunk in (1, 7, 32):
        for prompt, expected in zip(PROMPTS, whole, strict=True):
            assert torch.equal(logits_after(runner, prompt, chunk), expected)
    batch, first_block = [], 0
    for prompt in PROMPTS:
        sequence = in_blocks(runner, prompt, first_block)
        first_block += len(sequence.blocks)
        batch.append(Chunk(sequence, 0, len(prompt)))
    assert torch.equal(runner.logits(batch), torch.stack(whole))
