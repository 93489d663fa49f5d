"""What a model asks of attention, seen by running a few tokens through it: whether paged attention can honour it.

Attention sees keys and values, a scale, a window and a softcap, and nothing else of a model. So a model is refused
whose tokens reach each other in another way, or lie elsewhere than at the positions they are given; whose layers make
masks that are neither causal nor of the window that they name; and whose attention has arguments that are not known.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.backends.torch.attention import refuse_unknown, use_attention
from engine.errors import ModelRefused

FAR = 64
"""Positions beyond a window, up to which a mask is looked at."""
TOLERANCE = 0.02
"""By which keys of equal tokens may differ, of their size: what different rows of one product may in bfloat16."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one layer gave its attention."""

    layer: int
    key: Tensor
    """[1, kv_heads, tokens, head_dim], as the value."""
    value: Tensor
    window: int | None


class _Spy:
    """In the place of attention, which computes nothing but zeros."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._windows: list[tuple[Tensor, int | None]] = []
        """Masks that were made, and of which window."""

    def mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: Any,
        device: Any = None,
        local_size: int | None = None,
        **others: object,
    ) -> Tensor:
        """bool [1, 1, q_length, kv_length]. Raises ModelRefused for one that is not causal, or not of its window."""
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
        mask: Tensor = mask_function(none, none, own, others_at).expand(shape).to(device)
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
                f"its mask has a window of {of_mask[0]}, and the layer it is for one of {sliding_window}"
            )
        self.calls.append(Call(int(module.layer_idx), key, value, sliding_window))  # type: ignore[arg-type]
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def layers_of(model: torch.nn.Module) -> list[Call]:
    """What each layer gives its attention for two tokens. Raises ModelRefused."""
    spy = _Spy()
    use_attention(model, spy.attention, spy.mask)
    _run(model, [0, 0], [0, 1])
    _refuse_windows_of_caches(model, spy.calls)
    _refuse_other_ways(model)
    return spy.calls


def _refuse_windows_of_caches(model: torch.nn.Module, calls: list[Call]) -> None:
    """Without `layer_types`, transformers' own caches forget all beyond the window, whatever layers ask for."""
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "layer_types", None) is None and any(c.window is None for c in calls):
        raise ModelRefused(f"it has a window of {window}, which is not told to attention")


def _refuse_other_ways(model: torch.nn.Module) -> None:
    """The same token at the same position is the same to attention, wherever in a batch it is and after whom."""
    spy = _Spy()
    use_attention(model, spy.attention)
    _run(model, [1, 1, 2, 1], [0, 1, 1, 1])
    for call in spy.calls:
        one, other = call.key[0, :, 1].float(), call.key[0, :, 3].float()
        if (one - other).norm() > TOLERANCE * one.norm():
            raise ModelRefused(
                f"in its layer {call.layer} a token depends on others by more than attention, or on where in a batch it"
                " is instead of on its position"
            )


def _run(model: torch.nn.Module, token_ids: list[int], positions: list[int]) -> None:
    device = next(model.parameters()).device
    try:
        with torch.inference_mode():
            model(
                input_ids=torch.tensor([token_ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
            )
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:  # whatever its code raises
        raise ModelRefused(f"{len(token_ids)} tokens cannot be run through it: {error}") from error
