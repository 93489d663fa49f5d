"""LoRA adapters, as PEFT saves them, merged into a model's weights once at load: W + scale * B A.

An adapter is refused if its config has an unknown setting that would change the result.
"""

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.backends.torch.memory import forget_file_pages
from engine.errors import EngineStartError
from engine.model.quantization import ADAPTER_FILES

log = logging.getLogger(__name__)

FIELD = "lora"
CONFIG, WEIGHTS = ADAPTER_FILES
HARMLESS = frozenset(
    {"auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "inference_mode"}
    | {"init_lora_weights", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version"}
    | {"qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"}
)
"""Settings that describe training, or repeat what the names of the weights say."""
KNOWN = HARMLESS | {"peft_type", "r", "lora_alpha", "use_rslora", "bias"}
STARTS_FROM_SAVED = (None, True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that keep the saved weights. Others change the saved weights before training."""
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@torch.inference_mode()
def merge_lora(model: nn.Module, adapter: Path) -> None:
    """Merge the adapter into the linear layers of a model with its saved weights.

    Raises EngineStartError.
    """
    config = _read_config(adapter)
    scale = _scale(config)
    pairs = _read_pairs(adapter)
    _check_targets(config, pairs)
    for name, sides in pairs.items():
        layer = _layer(model, name)
        down, up = _sides(name, sides, layer, config["r"])
        saved = layer.weight.data
        layer.weight.data = (saved.float() + scale * (up.float() @ down.float())).to(saved.dtype)
        forget_file_pages(saved)
    log.info("%s is merged into %d linear layers", adapter, len(pairs))


def _read_config(adapter: Path) -> dict[str, Any]:
    try:
        config = json.loads((adapter / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise EngineStartError(FIELD, f"{adapter} is not a PEFT adapter: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise EngineStartError(FIELD, f"{adapter / CONFIG} is not of peft_type LORA")
    if unknown := sorted(key for key, value in config.items() if value and key not in KNOWN):
        raise EngineStartError(FIELD, f"the adapter has settings that are not supported: {', '.join(unknown)}")
    if config.get("bias", "none") != "none":
        raise EngineStartError(FIELD, f"the adapter's bias {config['bias']!r} is not supported, only 'none'")
    if (init := config.get("init_lora_weights")) not in STARTS_FROM_SAVED:
        raise EngineStartError(
            FIELD, f"the adapter's init_lora_weights {init!r} changes the model's own weights, which is not supported"
        )
    return config


def _scale(config: dict[str, Any]) -> float:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise EngineStartError(FIELD, f"the adapter's r is {rank!r}, not a number from 1")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise EngineStartError(FIELD, f"the adapter's lora_alpha is {alpha!r}, not a number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read_pairs(adapter: Path) -> dict[str, dict[str, Tensor]]:
    """Return, for each module's name, its `A` [r, inputs] and `B` [outputs, r]."""
    try:
        tensors = load_file(adapter / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise EngineStartError(FIELD, f"{adapter / WEIGHTS} cannot be read: {error}") from error
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if (parts := _NAME.fullmatch(name)) is None:
            raise EngineStartError(FIELD, f"the adapter's {name} is not a weight of plain LoRA")
        pairs.setdefault(parts["module"], {})[parts["side"]] = tensor
    if not pairs:
        raise EngineStartError(FIELD, f"{adapter / WEIGHTS} is empty")
    return pairs


def _check_targets(config: dict[str, Any], pairs: dict[str, dict[str, Tensor]]) -> None:
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if not any(f".{name}".endswith(f".{target}") for name in pairs):
            raise EngineStartError(FIELD, f"the adapter's target_modules name {target}, but it has no weights for that")


def _layer(model: nn.Module, name: str) -> nn.Linear:
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        raise EngineStartError(FIELD, f"the adapter changes a module {name}, which the model does not have") from None
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        raise EngineStartError(
            FIELD, f"the adapter changes {name}, a {type(layer).__name__}: only plain linear layers can be merged"
        )
    if layer.weight is model.get_input_embeddings().weight:  # type: ignore[operator]
        raise EngineStartError(FIELD, f"the adapter changes {name}, which shares its matrix with the embedding")
    return layer


def _sides(name: str, sides: dict[str, Tensor], layer: nn.Linear, rank: int) -> tuple[Tensor, Tensor]:
    shapes = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
    for side, shape in shapes.items():
        if side not in sides:
            raise EngineStartError(FIELD, f"the adapter's {name} has no lora_{side}")
        if tuple(sides[side].shape) != shape:
            raise EngineStartError(
                FIELD, f"the adapter's {name}.lora_{side} is {list(sides[side].shape)}, not {list(shape)}"
            )
        if not sides[side].is_floating_point():
            raise EngineStartError(
                FIELD, f"the adapter's {name}.lora_{side} has dtype {sides[side].dtype}, not floating-point"
            )
    return sides["A"], sides["B"]
