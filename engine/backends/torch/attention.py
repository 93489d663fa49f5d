"""Paged attention behind transformers' attention interface.

Every attention layer of a model calls a `PagedAttention` instead of its own kernel. It writes the new keys and values
into the pool, and attends over the blocks of each sequence. Backends: `sdpa.py` (the reference) and
`native/attention.py`.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from engine.core_types import Chunk
from engine.errors import ModelRefused

HARMLESS_ARGUMENTS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits", "layer_idx"}
)
"""Arguments that transformers passes for other attention kernels. They do not change what attention computes."""


_names = (f"tandem_paged_{number}" for number in itertools.count())


class PagedAttention(ABC):
    """Paged attention that transformers calls for each layer.

    The caller runs `prepare` before each forward.
    """

    @abstractmethod
    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Describe the chunks of the next forward, flattened one after the other."""

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float
    ) -> Tensor:
        """Write keys and values into the pool, then attend with the queries.

        `key` and `value` are [1, kv_heads, tokens, head_dim], `query` is [1, heads, tokens, head_dim]. A token sees
        itself and all tokens before it, or the last `window` of them if `window` is given.

        Scores are multiplied by `scaling`. If `softcap` is not 0, scores are bent into (-softcap, softcap). Returns [1,
        tokens, heads, head_dim], contiguous.
        """

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        """Attend as transformers' attention interface asks.

        Raises ModelRefused for an argument that paged attention cannot honour.
        """
        refuse_unknown(module, attention_mask, is_causal, others)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.attend(layer, query, key, value, scale, sliding_window, softcap or 0.0), None


def refuse_unknown(
    module: torch.nn.Module, attention_mask: object, is_causal: bool | None, others: dict[str, object]
) -> None:
    """Refuse a model that passes an unknown argument, because the argument could change the result.

    No mask is made for the model (`use_attention`), so a mask that arrives here is the model's own. Raises
    ModelRefused.
    """
    if attention_mask is not None:
        raise ModelRefused("its attention makes a mask of its own, which paged attention does not support")
    unknown = {name for name, value in others.items() if value is not None and value is not False}
    if unknown := unknown - HARMLESS_ARGUMENTS:
        raise ModelRefused(f"its attention uses {', '.join(sorted(unknown))}, which paged attention does not support")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelRefused("its attention is not causal")


def no_mask(*args: object, **options: object) -> None:
    """Return no mask: paged attention needs none."""


def use_attention(model: torch.nn.Module, attention: Any, mask: Callable[..., Tensor | None] = no_mask) -> None:
    """Have every layer of the model call `attention`, with the masks that `mask` makes for it."""
    name = next(_names)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)  # type: ignore[operator]
