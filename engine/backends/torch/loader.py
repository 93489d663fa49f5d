"""Loader of transformers models for paged serving.

It refuses a model that cannot be served, with the reason.

Probe of a model's attention: a few tokens run through the model show whether paged attention can serve it.

Paged attention knows keys, values, a scale, a window and a softcap. So these models are refused:

- tokens affect each other by another way than attention, or sit at other positions than those given;
- layers make masks that are neither causal nor of the window that they name;
- attention takes unknown arguments.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.backends.torch.attention import refuse_unknown, use_attention
from engine.errors import EngineStartError, ModelRefused
from engine.model.embedding import is_embedding_model
from engine.model.model_dir import ModelDir
from kvcache.layout import DTYPE_BYTES, KvLayout

log = logging.getLogger(__name__)


FAR = 64
"""Positions beyond a window at which a mask is checked."""
TOLERANCE = 0.02
"""Relative difference allowed between keys of equal tokens: rows of one bfloat16 product may differ so much."""


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments that one layer gave its attention."""

    layer: int
    key: Tensor
    """Keys, [1, kv_heads, tokens, head_dim]; the values have the same shape."""
    value: Tensor
    window: int | None


class _Spy:
    """Attention that records its arguments and returns zeros."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._windows: list[tuple[Tensor, int | None]] = []
        """Masks made so far, each with its window."""

    def mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: Any,
        local_size: int | None = None,
        **others: object,
    ) -> Tensor:
        """Return the mask, bool [1, 1, q_length, kv_length].

        Raises ModelRefused for a mask that is neither causal nor of its window.
        """
        last = torch.tensor((local_size or 0) + FAR)
        positions = torch.arange(int(last) + 2)
        wanted = positions <= last
        if local_size is not None:
            wanted &= positions > last - local_size
        none = torch.tensor(0)
        if not torch.equal(mask_function(none, none, last, positions), wanted):
            raise ModelRefused("its attention is neither causal nor causal within a window")
        shape = (1, 1, q_length, kv_length)
        own, others_at = torch.arange(q_length)[:, None], torch.arange(kv_length)
        mask: Tensor = mask_function(none, none, own, others_at).expand(shape)
        self._windows.append((mask, local_size))
        return mask

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: object = None,
        sliding_window: int | None = None,
        softcap: object = None,
        is_causal: bool | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        own = attention_mask is not None and not any(attention_mask is mask for mask, _ in self._windows)
        refuse_unknown(module, attention_mask if own else None, is_causal, others)
        of_mask = [window for mask, window in self._windows if mask is attention_mask]
        if of_mask and of_mask[0] != sliding_window:
            raise ModelRefused(
                f"its attention mask has a window of {of_mask[0]}, its layer a window of {sliding_window}"
            )
        self.calls.append(Call(int(module.layer_idx), key, value, sliding_window))  # type: ignore[arg-type]
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def layers_of(model: torch.nn.Module) -> list[Call]:
    """Run two tokens and return each layer's call.

    Raises ModelRefused.
    """
    spy = _Spy()
    use_attention(model, spy.attention, spy.mask)
    _run(model, [0, 0], [0, 1])
    _refuse_windows_of_caches(model, spy.calls)
    _refuse_other_ways(model)
    return spy.calls


def _refuse_windows_of_caches(model: torch.nn.Module, calls: list[Call]) -> None:
    """Refuse windows that only the cache applies.

    Without `layer_types`, transformers' caches drop all positions beyond the window, whatever the layers ask for.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "layer_types", None) is None and any(c.window is None for c in calls):
        raise ModelRefused(f"the model has a window of {window}, which it does not pass to the attention function")


def _refuse_other_ways(model: torch.nn.Module) -> None:
    """Refuse a model in which a token depends on its place in the batch.

    The same token at the same position must give the same attention inputs, whatever its neighbours are.
    """
    spy = _Spy()
    use_attention(model, spy.attention)
    _run(model, [1, 1, 2, 1], [0, 1, 1, 1])
    for call in spy.calls:
        one, other = call.key[0, :, 1].float(), call.key[0, :, 3].float()
        if (one - other).norm() > TOLERANCE * one.norm():
            raise ModelRefused(
                f"layer {call.layer}: a token's result depends on other tokens outside attention, or on its"
                " place in the batch"
            )


def _run(model: torch.nn.Module, token_ids: list[int], positions: list[int]) -> None:
    try:
        with torch.inference_mode():
            model(
                input_ids=torch.tensor([token_ids]),
                position_ids=torch.tensor([positions]),
                use_cache=False,
            )
    # any error that the model's code may raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelRefused(f"a forward pass of {len(token_ids)} tokens failed: {error}") from error


SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rope types that choose frequencies by the longest sequence of the batch, so that one request would change another."""

OUTPUT_LAYER = "lm_head.weight"

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
