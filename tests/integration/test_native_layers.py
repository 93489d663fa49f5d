"""Decoder layers that the kernels compute as a whole: which they are, and that nobody can tell by what they return."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from engine.backends.torch import runner as torch_runner
from engine.backends.torch.native.decoder_layer import NativeDecoderLayer
from engine.backends.torch.runner import TorchRunner
from engine.core_types import Chunk
from support.torch_models import in_blocks, random_prompts, runner_of

LAYERS = 3


def num_native(runner: TorchRunner) -> int:
    return sum(isinstance(module, NativeDecoderLayer) for module in runner.paged.model.modules())


def bfloat16_runner(path: Path) -> TorchRunner:
    return runner_of(path, "bfloat16", backend="native")


def as_transformers_calls_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchRunner:
    """One whose layers are transformers', of the same kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(torch_runner, "use_native_layers", lambda *arguments: 0)
        runner = bfloat16_runner(path)
    assert not num_native(runner)
    return runner


def mixed_steps(runner: TorchRunner) -> list[Tensor]:
    """Logits of prompts in chunks, of several in one step, and of one token each."""
    prompts, sequences, block = random_prompts(40, 7, 90, seed=3), [], 0
    for prompt in prompts:
        sequences.append(in_blocks(runner, prompt, block))
        block += len(sequences[-1].blocks)
    done, steps = [0, 0, 0], []
    for ends in ([33, 6, 30], [39, 6, 60], [39, 6, 89], [40, 7, 90]):
        chunks = zip(sequences, done, ends, strict=True)
        steps.append(
            runner.logits([Chunk(sequence, start, end - start) for sequence, start, end in chunks if end > start])
        )
        done = ends
    return steps


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_are_the_same_to_the_bit(make_model: Any, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    path = make_model(family, dtype="bfloat16")
    native = bfloat16_runner(path)
    assert num_native(native) == LAYERS - 1, "the last one computes only what is read, and stays"
    expected = mixed_steps(as_transformers_calls_them(path, monkeypatch))
    assert all(map(torch.equal, mixed_steps(native), expected))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mixtral", "qwen3_moe"])
def test_layers_with_other_parts_stay_as_they_are(make_model: Any, family: str) -> None:
    assert num_native(bfloat16_runner(make_model(family, dtype="bfloat16"))) == 0


def test_layers_of_the_same_parts_that_compute_something_else_stay(
    make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Granite's, say, which scale what they add."""
    forward = LlamaDecoderLayer.forward

    def scaled(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        return hidden_states + 0.5 * (forward(self, hidden_states, **options) - hidden_states)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    assert num_native(bfloat16_runner(make_model("llama", dtype="bfloat16"))) == 0


def test_one_layer_of_many_may_stay(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaDecoderLayer.forward

    def scaled(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        return forward(self, hidden_states, **options) * (1 + (self.self_attn.layer_idx == 0))

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    path = make_model("llama", dtype="bfloat16")
    native = bfloat16_runner(path)
    assert num_native(native) == LAYERS - 2
    assert all(map(torch.equal, mixed_steps(native), mixed_steps(as_transformers_calls_them(path, monkeypatch))))


def test_rotary_embedding_of_a_part_of_each_head_is_not_even_tried(
    make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would read beyond cos and sin."""
    rotary, forward = LlamaRotaryEmbedding.forward, LlamaDecoderLayer.forward

    def half(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(part[..., : part.shape[-1] // 2] for part in rotary(self, x, position_ids))

    def doubled(self: Any, hidden_states: Tensor, position_embeddings: Any = None, **options: Any) -> Tensor:
        whole = tuple(torch.cat([part, part], -1) for part in position_embeddings)
        return forward(self, hidden_states, position_embeddings=whole, **options)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", half)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", doubled)
    assert num_native(bfloat16_runner(make_model("llama", dtype="bfloat16"))) == 0
