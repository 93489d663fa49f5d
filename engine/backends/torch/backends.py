"""Attention backends: joins a model to its KV memory with the fastest kernels available."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from engine.backends.torch.attention import PagedAttention
from engine.backends.torch.native.attention import NativePagedAttention
from engine.backends.torch.native.decoder_layer import use_native_layers
from engine.backends.torch.native.kernels import TYPES, Kernels, attention_part
from engine.backends.torch.native.modules import LastRows, use_kernels
from engine.backends.torch.sampling.sampler import LIKELIEST
from engine.backends.torch.sdpa import SdpaPagedAttention
from engine.errors import KernelsUnavailable
from kvcache.layout import KvLayout

log = logging.getLogger(__name__)

Backend = Literal["auto", "native", "sdpa"]


@dataclass(frozen=True, slots=True)
class BoundModel:
    """Model joined to its KV memory, ready for a runner.

    Its modules may have been replaced.
    """

    backend: Backend
    """Attention backend in use, never auto."""
    attention: PagedAttention
    argmax: Callable[[Tensor], Tensor] = LIKELIEST
    last_rows: LastRows | None = None
    bind_threads: Callable[[Sequence[int]], None] | None = None
    """Function that pins the computing thread's team to one core each; None where pinning would not help."""


def join(model: nn.Module, pool: Tensor, layout: KvLayout, backend: Backend) -> BoundModel:
    """Join a model to its KV memory.

    auto means `native`, or `sdpa` with a warning where its kernels are missing.

    Raises KernelsUnavailable for missing kernels that were asked for by name.
    """
    if backend != "sdpa":
        try:
            return _native(model, pool, layout)
        except KernelsUnavailable as error:
            if backend == "native":
                raise
            log.warning("attention is computed by torch, expect several times slower steps: %s", error)
    return BoundModel("sdpa", SdpaPagedAttention(pool, layout))


def _native(model: nn.Module, pool: Tensor, layout: KvLayout) -> BoundModel:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    if dtype not in TYPES:
        raise KernelsUnavailable(f"the CPU kernels do not support {layout.dtype}")
    kernels = Kernels(attention_part(dtype))
    heads: int = model.config.get_text_config().num_attention_heads  # type: ignore[union-attr,operator]
    attention = NativePagedAttention(kernels, pool, layout, heads)
    last_rows = use_kernels(model, kernels).last_rows
    if last_rows is not None:
        attention.trim_last_layer()
    use_native_layers(model, kernels, attention)
    return BoundModel("native", attention, kernels.argmax, last_rows, kernels.bind_threads)
