"""LoRA adapters with random weights, as PEFT saves them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK, ALPHA = 4, 10
CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "base_model_name_or_path": "somewhere/else",
    "task_type": "CAUSAL_LM",
    "lora_dropout": 0.05,
    "init_lora_weights": True,
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
}
LLAMA = {"model.layers.1.self_attn.q_proj": (128, 128), "model.layers.0.mlp.down_proj": (128, 256)}
"""Linear layers of `support.vllm_models`' llama and their sizes, outputs first."""


def adapter_weights(sizes: Mapping[str, tuple[int, int]], seed: int = 0, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """Return random matrices A and B of each layer, by PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.{name}.lora_{side}.weight": torch.randn(shape, generator=generator) * scale
        for name, (n, k) in sizes.items()
        for side, shape in (("A", (RANK, k)), ("B", (n, RANK)))
    }


def write_adapter(path: Path, weights: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    """Write an adapter; returns its directory."""
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    save_file(dict(weights), path / "adapter_model.safetensors")
    return path
