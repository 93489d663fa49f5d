"""Checkpoints in float8: by blocks, as DeepSeek and Qwen save them, or by outputs, as llm-compressor does."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 32
BY_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
BY_OUTPUTS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": FLOAT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": FLOAT8 | {"strategy": "token", "dynamic": True},
        }
    },
}


def save_float8(path: Path, to: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The model at `path` at `to`, all but its output layer quantised. Its tensors as they are then, in float32."""
    to.mkdir()
    by_blocks = settings["quant_method"] == "fp8"
    saved: dict[str, Tensor] = {}
    dequantised: dict[str, Tensor] = {}
    for name, weight in load_file(path / "model.safetensors").items():
        saved[name], dequantised[name] = weight, weight.float()
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = (BLOCK, BLOCK) if by_blocks else (1, weight.shape[1])
        n, k = weight.shape
        blocks = weight.float().reshape(n // rows, rows, k // columns, columns)
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        values = (blocks / scales).to(torch.float8_e4m3fn)
        saved[name] = values.reshape(n, k)
        saved[name + ("_scale_inv" if by_blocks else "_scale")] = scales[:, 0, :, 0].contiguous()
        dequantised[name] = (values.float() * scales).reshape(n, k)
    save_file(saved, to / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": settings}
    (to / "config.json").write_text(json.dumps(config))
    return dequantised
