"""Loader of transformers models for paged serving.

It refuses a model that cannot be served, with the reason.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from engine.backends.torch.loading.lora import merge_lora
from engine.backends.torch.loading.packed import PackedScheme, load_packed, packed_scheme
from engine.backends.torch.loading.probe import Call, layers_of
from engine.backends.torch.loading.quantised import quantise_linears
from engine.backends.torch.loading.sharding import load_shard
from engine.backends.torch.ranks import RankGroup
from engine.errors import EngineStartError, ModelRefused
from engine.kv.layout import DTYPE_BYTES, KvDtype, KvLayout
from engine.model.embedding import is_embedding_model
from engine.model.model_dir import ModelDir
from engine.model.quantization import AS_SAVED, ONLY_ON_CPUS, QuantizationConfig
from kvtransfer.fingerprint import WORD_BYTES

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rope types that choose frequencies by the longest sequence of the batch, so that one request would change another."""

OUTPUT_LAYER = "lm_head.weight"

log = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()


def load_model(
    model_dir: ModelDir,
    dtype: str,
    device: torch.device,
    quantization: QuantizationConfig = AS_SAVED,
    group: RankGroup | None = None,
) -> torch.nn.Module:
    """Load a model in evaluation mode, in `dtype` ("auto": as saved), on a device.

    With a `group`, load this rank's shard, with weights as saved. Raises ModelRefused for a model that cannot be
    served, EngineStartError for options that the model does not allow.
    """
    if quantization.weights != "auto" and device.type != "cpu":
        raise EngineStartError("weights", f"{quantization.weights} {ONLY_ON_CPUS}")
    config = _read_config(model_dir)
    _refuse_by_config(config)
    scheme = _refuse_by_quantisation(config, quantization, device)
    wanted = "auto" if dtype == "auto" else getattr(torch, dtype)
    try:
        if group is not None:
            assert (quantization.weights, quantization.lora) == ("auto", None)
            return load_shard(model_dir.path, config, wanted, group).to(device)
        model: torch.nn.Module
        if scheme is not None:
            model, loading_info = load_packed(model_dir.path, config, wanted, scheme)
        else:
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                model_dir.path, dtype=wanted, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
    except torch.cuda.OutOfMemoryError as error:
        raise _no_room(error) from error
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelRefused(f"transformers cannot load it: {error}") from error
    missing = sorted(loading_info["missing_keys"])
    if missing == [OUTPUT_LAYER] and is_embedding_model(model_dir):
        log.info("the model has no output layer and serves embeddings only")
    elif missing:
        raise ModelRefused(f"its files lack {len(missing)} of its weights, {missing[0]} among them")
    if quantization.lora is not None:
        merge_lora(model, quantization.lora)
    quantise_linears(model, quantization.weights)
    try:
        return model.eval().to(device)
    except torch.cuda.OutOfMemoryError as error:
        raise _no_room(error) from error


def _no_room(error: torch.cuda.OutOfMemoryError) -> EngineStartError:
    return EngineStartError("model", f"the GPU has no room for its weights: {error}")


def kv_layout(model: torch.nn.Module, block_tokens: int, kv_dtype: KvDtype = "auto") -> KvLayout:
    """Return the shape of this model's KV.

    Raises ModelRefused for a model whose attention cannot be paged, EngineStartError where its KV cannot be kept in
    `kv_dtype`.
    """
    layout = _layout_of(model, layers_of(model), block_tokens)
    return layout if kv_dtype == "auto" else _quantised(layout, kv_dtype)


def _quantised(layout: KvLayout, kv_dtype: KvDtype) -> KvLayout:
    quantised = replace(layout, kept=kv_dtype)
    if layout.head_dim % 2 or quantised.head_bytes % WORD_BYTES:
        shape = f"{layout.layers} layers of {layout.block_tokens} tokens x {layout.head_dim}"
        raise EngineStartError(
            "kv_dtype", f"{kv_dtype} blocks of {shape} are not a multiple of {WORD_BYTES} bytes: increase block_tokens"
        )
    return quantised


def whole_layout(model: torch.nn.Module, part: KvLayout, ranks: int) -> KvLayout:
    """Return the layout of the whole block, of which each of `ranks` ranks has `part`.

    Raises ModelRefused when the model's plan leaves more than its share on each rank.
    """
    text = model.config.get_text_config()  # type: ignore[union-attr,operator]
    kv_heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if part.kv_heads * ranks != kv_heads:
        left = f"{part.kv_heads} of its {kv_heads} KV heads on each of {ranks} ranks"
        raise ModelRefused(f"its tensor-parallel plan leaves {left}: tensor_parallel must be 1")
    return replace(part, kv_heads=kv_heads)


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


def _refuse_by_quantisation(config: Any, quantization: QuantizationConfig, device: torch.device) -> PackedScheme | None:
    """Return the packing of the model's layers where this package unpacks it, otherwise None.

    transformers ignores a quantisation method that it does not know, and computes with the packed numbers; so unknown
    methods are refused here.
    """
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return None
    settings = saved if isinstance(saved, dict) else saved.to_dict()
    method = settings.get("quant_method", "a method that config.json does not name")
    if quantization.weights != "auto":
        raise EngineStartError(
            "weights", f"only auto is possible: the model's files are already quantised, by {method}"
        )
    if device.type != "cpu":
        raise EngineStartError(
            "model",
            f"its files are quantised, by {method}, which the torch engine serves on CPUs only: set engine: vllm",
        )
    if quantization.lora is not None:
        raise EngineStartError(
            "lora", f"the model's files are already quantised, by {method}: no adapter can be merged"
        )
    if "quant_method" not in settings or not AutoHfQuantizer.supports_quant_method(settings):
        raise ModelRefused(f"the model was quantised by {method}, which transformers does not support")
    return packed_scheme(settings)


def _layout_of(model: torch.nn.Module, calls: list[Call], block_tokens: int) -> KvLayout:
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
