"""Draft models for tests: cut from a model, or fitted to it, so that some of their drafts are right and some wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

NUM_TEXTS, TEXT_TOKENS, PROMPT_TOKENS = 24, 96, 8
STRENGTH = 0.3
"""Share of their output that the layers of a model with random weights keep."""
ATTENTION = 0.05
"""Share of a draft layer's attention in its output: enough that wrong KV changes drafts."""


def cut_model(model: Path, folder: Path, layers: int) -> Path:
    """Write a draft model of the first layers of a model; returns its directory."""
    path = folder / "draft"
    path.mkdir()
    weights = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if _layer_of(name) < layers}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    _write_config(path, _config(model) | {"num_hidden_layers": layers})
    for extra in model.glob("tokenizer*"):
        shutil.copy(extra, path)
    return path


def write_eagle(model: Path, folder: Path) -> Path:
    """Write an EAGLE head of one layer for a Llama model; returns its directory."""
    path = folder / "eagle"
    path.mkdir()
    weights = load_file(model / "model.safetensors")
    layer = {name.removeprefix("model."): each for name, each in weights.items() if name.startswith("model.layers.0.")}
    del layer["layers.0.input_layernorm.weight"]  # an EAGLE head has none
    _quieten(layer)
    states, embeddings = _states_of(model)
    layer["fc.weight"] = _fitted(embeddings, states).to(next(iter(weights.values())).dtype)
    save_file(layer, path / "model.safetensors", {"format": "pt"})
    _write_config(path, _config(model) | {"num_hidden_layers": 1, "model_type": "llama"})
    return path


def add_mtp_layer(model: Path, prefix: str, joint: str, norms: tuple[str, ...], **config: Any) -> None:
    """Add a layer for multi-token prediction to a model of random weights, after the pattern of its last layer.

    The names of its weights begin with `prefix`; `joint` is the matrix that joins embedding and state, `norms` are the
    norms beside it. The model's own layers become weaker, since the next state of a random model cannot be foreseen.
    """
    file = model / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if name.endswith(("o_proj.weight", "out_proj.weight")) or "down_proj" in name:
            weights[name] = weights[name] * STRENGTH
    save_file(weights, file, {"format": "pt"})
    last = f"model.layers.{_config(model)['num_hidden_layers'] - 1}."
    layer = {
        prefix + name.removeprefix(last): tensor.clone() for name, tensor in weights.items() if name.startswith(last)
    }
    _quieten(layer)
    states, embeddings = _states_of(model)
    layer[joint] = _fitted(_normed(embeddings), _normed(states))
    own_norm = weights["model.norm.weight"]  # of ones, or of zeros where norms scale by 1 + weight
    layer |= {name: own_norm.clone() for name in norms}
    save_file(weights | layer, file, {"format": "pt"})
    _write_config(model, _config(model) | config)


def _states_of(model: Path) -> tuple[Tensor, Tensor]:
    """Return last hidden states and embeddings of texts that the model writes itself, each [texts, tokens, hidden]."""
    torch.manual_seed(3)
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = torch.randint(3, own.config.vocab_size, (NUM_TEXTS, PROMPT_TOKENS))
    with torch.no_grad():
        texts = own.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=TEXT_TOKENS,
            max_new_tokens=TEXT_TOKENS,
        )
        states = own.model(texts).last_hidden_state
        return states, own.get_input_embeddings()(texts)


def _fitted(embeddings: Tensor, states: Tensor) -> Tensor:
    """Return the matrix [hidden, 2 hidden] that best gives the next state from the next token and the state before."""
    inputs = torch.cat((embeddings[:, 1:], states[:, :-1]), -1).flatten(0, 1).double()
    wanted = states[:, 1:].flatten(0, 1).double()
    ridge = 1e-3 * torch.eye(inputs.shape[1], dtype=torch.float64)
    solution: Tensor = torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ wanted)
    return solution.T.float().contiguous()


def _normed(values: Tensor) -> Tensor:
    return values * values.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()


def _quieten(layer: dict[str, Tensor]) -> None:
    """Let a layer pass on what comes in, with a little of its attention."""
    for name in layer:
        if name.endswith("o_proj.weight"):
            layer[name] = layer[name] * ATTENTION
        elif "down_proj" in name:
            layer[name] = torch.zeros_like(layer[name])


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1:2] == ["layers"] else -1


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def _write_config(path: Path, config: dict[str, Any]) -> None:
    (path / "config.json").write_text(json.dumps(config))
