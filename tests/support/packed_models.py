"""Checkpoints of GPTQ and AWQ, packed number by number in numpy: what AutoGPTQ and AutoAWQ write, said once more."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    method: str = "gptq"
    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    act_order: bool = False
    v2: bool = False
    skip: tuple[str, ...] = ("lm_head",)
    """Layers whose names hold one of these stay as they are."""

    @property
    def config(self) -> dict[str, Any]:
        """quantization_config."""
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            return common | {"version": "gemm", "zero_point": True, "modules_to_not_convert": list(self.skip)}
        form = "gptq_v2" if self.v2 else "gptq"
        return common | {"sym": self.symmetric, "desc_act": self.act_order, "checkpoint_format": form}


def pack_model(path: Path, to: Path, packing: Packing) -> dict[str, Tensor]:
    """The model at `path` packed at `to`. The tensors of the model as it is then, in float32."""
    to.mkdir()
    weights = load_file(path / "model.safetensors")
    packed: dict[str, Tensor] = {}
    dequantised: dict[str, Tensor] = {}
    for seed, (name, weight) in enumerate(weights.items()):
        is_linear = name.endswith("_proj.weight") or name == "lm_head.weight"
        if not is_linear or any(part in name for part in packing.skip):
            packed[name] = weight
            dequantised[name] = weight.float()
            continue
        parts, exact = _pack(weight.double().numpy(), packing, np.random.default_rng(seed))
        packed |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
        dequantised[name] = torch.from_numpy(exact).float()
    save_file(
        {name: tensor.contiguous() for name, tensor in packed.items()}, to / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": packing.config}
    (to / "config.json").write_text(json.dumps(config))
    return dequantised


def _pack(
    weight: NDArray[Any], packing: Packing, random: np.random.Generator
) -> tuple[dict[str, Tensor], NDArray[Any]]:
    """Of [n, k]: a file's parts of the layer, and the numbers that they stand for."""
    n, k = weight.shape
    group = k if packing.group_size == -1 else packing.group_size
    top = 2**packing.bits - 1
    group_of = np.arange(k) // group
    if packing.act_order:
        random.shuffle(group_of)
    scales, zeros = np.zeros((k // group, n), np.float16), np.zeros((k // group, n), np.int64)
    integers = np.zeros((n, k), np.int64)
    for number in range(k // group):
        inputs = group_of == number
        part = weight[:, inputs]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if packing.symmetric:
            high = np.maximum(high, -low)
            low = -high
        scales[number] = (high - low) / top
        step = scales[number].astype(np.float64)
        zeros[number] = (top + 1) // 2 if packing.symmetric else np.clip(np.rint(-low / step), 0, top)
        integers[:, inputs] = np.clip(np.rint(part / step[:, None]) + zeros[number][:, None], 0, top)
    exact = (integers - zeros[group_of].T) * scales[group_of].T.astype(np.float64)
    if packing.method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {
            "qweight": _words(integers.T, packing.bits, order),
            "qzeros": _words(zeros, packing.bits, order),
            "scales": torch.from_numpy(scales),
        }
        return parts, exact
    straight = tuple(range(32 // packing.bits))
    stored = _words(zeros, packing.bits, straight).numpy().view(np.uint32)
    if not packing.v2:
        stored = stored - np.uint32(sum(1 << shift for shift in range(0, 32, packing.bits)))
    parts = {
        "qweight": _words(integers, packing.bits, straight).t(),
        "qzeros": torch.from_numpy(stored.view(np.int32)),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return parts, exact


def _words(values: NDArray[np.int64], bits: int, order: tuple[int, ...]) -> Tensor:
    """int32 [a, b / per word] of [a, b]; a word's places hold those of `order`."""
    per = 32 // bits
    rows, columns = values.shape
    words = np.zeros((rows, columns // per), np.uint32)
    for word in range(columns // per):
        for place in range(per):
            words[:, word] |= (values[:, word * per + order[place]] << bits * place).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))
