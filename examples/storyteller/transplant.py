"""Weights of an earlier storyteller for a model with other tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

LIKE = {"<|tool|>": "<|user|>"}
"""New tokens that begin as an old one."""
NOISE = 0.01


@torch.no_grad()
def transplant(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Copy the weights of the model in ``path``; a token that it does not have begins as the mean of its parts."""
    earlier = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    reader = PreTrainedTokenizerFast.from_pretrained(path)
    known, old = reader.get_vocab(), earlier.get_input_embeddings().weight
    embedding = old.mean(0).repeat(len(tokenizer), 1)
    for token, number in tokenizer.get_vocab().items():
        if (same := token if token in known else LIKE.get(token, token)) in known:
            embedding[number] = old[known[same]]
            continue
        text = tokenizer.backend_tokenizer.decoder.decode([token])
        if parts := reader.encode(text, add_special_tokens=False):
            embedding[number] = old[parts].mean(0) + NOISE * torch.randn(old.shape[1])
    model.load_state_dict(earlier.state_dict())
    model.get_input_embeddings().weight.copy_(embedding)
