"""Loader of transformers models for paged serving.

It refuses a model that cannot be served, with the reason.
"""

import logging
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.backends.torch.loading.probe import layers_of
from engine.errors import EngineStartError, ModelRefused
from engine.model.embedding import is_embedding_model
from engine.model.model_dir import ModelDir
from kvcache.layout import DTYPE_BYTES, KvLayout

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rope types that choose frequencies by the longest sequence of the batch, so that one request would change another."""

OUTPUT_LAYER = "lm_head.weight"

log = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()


def load_model(model_dir: ModelDir, dtype: str) -> torch.nn.Module:
    """Load a model in evaluation mode, in `dtype` ("auto": as saved).

    Raises ModelRefused for a model that cannot be served.
    """
    config = _read_config(model_dir)
    _refuse_by_config(config)
    wanted = "auto" if dtype == "auto" else getattr(torch, dtype)
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            model_dir.path, dtype=wanted, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelRefused(f"transformers cannot load it: {error}") from error
    missing = sorted(loading_info["missing_keys"])
    if missing == [OUTPUT_LAYER] and is_embedding_model(model_dir):
        log.info("the model has no output layer and serves embeddings only")
    elif missing:
        raise ModelRefused(f"its files lack {len(missing)} of its weights, {missing[0]} among them")
    loaded: torch.nn.Module = model.eval()
    return loaded


def kv_layout(model: torch.nn.Module, block_tokens: int) -> KvLayout:
    """Return the shape of this model's KV.

    Raises ModelRefused for a model whose attention cannot be paged.
    """
    calls = layers_of(model)
    layers = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr,operator]
    if sorted(call.layer for call in calls) != list(range(layers)):
        raise ModelRefused(f"only {len(calls)} of its {layers} layers use transformers' attention interface")
    if len({(call.key.shape, call.value.shape, call.key.dtype) for call in calls}) != 1:
        raise ModelRefused("its layers differ in KV shape or dtype")
    key, value = calls[0].key, calls[0].value
    _, kv_heads, _, head_dim = key.shape
    if value.shape != key.shape:
        raise ModelRefused(f"keys have {kv_heads} x {head_dim} and values {value.shape[1]} x {value.shape[3]}")
    name = str(key.dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise EngineStartError("dtype", f"KV in {name} is not supported, only {', '.join(DTYPE_BYTES)}")
    return KvLayout(layers=layers, kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens, dtype=name)


def _read_config(model_dir: ModelDir) -> Any:
    try:
        return AutoConfig.from_pretrained(model_dir.path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if "trust_remote_code" in str(error):
            raise ModelRefused(
                "the model needs Python code from its directory, and Tandem never runs such code"
            ) from error
        raise ModelRefused(f"unsupported architecture or config: {error}") from error


def _refuse_by_config(config: Any) -> None:
    """Refuse a model by its config alone, before gigabytes are loaded."""
    names = ", ".join(config.architectures or [config.model_type])
    if config.is_encoder_decoder:
        raise ModelRefused(f"{names} is an encoder-decoder; Tandem serves decoder-only models")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelRefused(f"{names} is not a causal language model of transformers")
    text = config.get_text_config()
    if strange := set(getattr(text, "layer_types", None) or ()) - SERVED_LAYER_TYPES:
        raise ModelRefused(f"{names} has {', '.join(sorted(strange))} layers, whose state is not paged KV")
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    if strange_rope := kinds & BATCH_DEPENDENT_ROPE:
        raise ModelRefused(f"{names} uses {strange_rope.pop()} RoPE, whose result depends on the rest of the batch")
    if (saved := getattr(config, "quantization_config", None)) is not None:
        settings = saved if isinstance(saved, dict) else saved.to_dict()
        method = settings.get("quant_method", "a method that config.json does not name")
        raise ModelRefused(f"its weights are quantised, by {method}: set engine: vllm")
