"""Model with hand-made weights that copies, because random weights give output that no draft can predict.

Copying is what a language model mostly does in a code edit or a summary, and two of its layers do it:

    layer 0   each position attends to the one before it, and notes that token (by rotary embedding alone)
    layer 1   each position attends to those that noted its own token, and predicts theirs (an induction head)

The other layers compute as usual, and their result is multiplied by zero. So a step costs as much as any step of that
shape, and the output is known: each token is the one that followed the last token before. Where that token occurred
more than once, each continuation is equally likely; `logit_bias` excludes tokens, and so chooses the continuation.
"""

import shutil
from pathlib import Path
from typing import Any

from bench.models import QWEN2_HALF_B

CODE = 128
"""Dimensions of a token's code, +1 or -1 each: half of it goes through each of two KV heads."""
HEAD = 64
PAIRS = HEAD // 2
FAST = 10
"""Number of leading pairs of rotary dimensions that tell positions apart; the others barely turn and tell codes apart.
"""
THETA = 1e12
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Changes of the draft model's config: the same two layers and no others."""


def copying_model(path: Path, shape: dict[str, Any] | None = None) -> Path:
    """Make the model once, in bfloat16, with the shape of Qwen2 0.5 B or `shape`, and return its directory."""
    if (path / "model.safetensors").exists():
        return path
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shutil.rmtree(path, ignore_errors=True)
    config = QWEN2_HALF_B | {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}} | (shape or {})
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Qwen2ForCausalLM(Qwen2Config(**config)).to(torch.bfloat16)
    with torch.no_grad():
        _make(model, config)
    model.save_pretrained(path)
    return path


def _make(model: Any, config: dict[str, Any]) -> None:
    import torch

    hidden, group = config["hidden_size"], config["num_attention_heads"] // config["num_key_value_heads"]
    codes = torch.randint(0, 2, (config["vocab_size"], CODE), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    model.model.embed_tokens.weight.zero_()
    model.model.embed_tokens.weight[:, :CODE] = codes
    model.model.norm.weight.fill_(0.2)  # gives logits of some tens
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.zero_()
    _note_previous(model.model.layers[0].self_attn, group, scale=(CODE / hidden) ** 0.5)
    _say_following(model.model.layers[1].self_attn, group, scale=(2 * CODE / hidden) ** 0.5)


def _note_previous(attention: Any, group: int, scale: float) -> None:
    """Note the code of the token before in dimensions [CODE, 2 * CODE) of each position.

    `scale` undoes the norm.
    """
    import torch

    _clear(attention)
    turns = THETA ** (-torch.arange(FAST) / PAIRS)
    strength = 17.0  # score difference between the position before and its neighbours: exp(20)
    for kv_head in range(2):
        key, query = kv_head * HEAD, kv_head * group * HEAD
        attention.k_proj.bias[key : key + FAST] = strength
        attention.q_proj.bias[query : query + FAST] = strength * torch.cos(turns)
        attention.q_proj.bias[query + PAIRS : query + PAIRS + FAST] = -strength * torch.sin(turns)
        for place in range(HEAD):
            attention.v_proj.weight[key + place, key + place] = scale
            attention.o_proj.weight[CODE + key + place, query + place] = 1


def _say_following(attention: Any, group: int, scale: float) -> None:
    """Add the code of the token that followed the position's token before, eight times as strong as the own code."""
    _clear(attention)
    strength = 10.0 * scale * scale
    for kv_head in range(2):
        key, query = kv_head * HEAD, kv_head * group * HEAD
        for place in range(HEAD):
            attention.v_proj.weight[key + place, key + place] = scale
            attention.o_proj.weight[key + place, query + place] = 8
            if place % PAIRS >= FAST:
                attention.q_proj.weight[query + place, key + place] = strength
                attention.k_proj.weight[key + place, CODE + key + place] = 1


def _clear(attention: Any) -> None:
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.zero_()
        projection.bias.zero_()
