"""Attention backends: joins a model to its KV memory with the fastest kernels available."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from engine.backends.torch.attention import PagedAttention
from engine.backends.torch.loading.quantised import QuantisedLinear
from engine.backends.torch.native.attention import NativePagedAttention
from engine.backends.torch.native.decoder_layer import use_native_layers
from engine.backends.torch.native.kernels import QUANTISED, TYPES, Kernels, attention_part
from engine.backends.torch.native.modules import LastRows, use_kernels
from engine.backends.torch.sampling.sampler import LIKELIEST
from engine.backends.torch.sdpa import SdpaPagedAttention
from engine.errors import EngineStartError, KernelsUnavailable
from engine.kv.layout import KvLayout

log = logging.getLogger(__name__)

Backend = Literal["auto", "native", "flashinfer", "triton", "sdpa"]
ON_GPU = ("flashinfer", "triton")


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


def join(model: nn.Module, pool: Tensor, layout: KvLayout, backend: Backend, ranks: int = 1) -> BoundModel:
    """Join a model to its KV memory.

    auto means `native` on a CPU, and `flashinfer` or else `triton` on a GPU. Where those are missing, auto means
    `sdpa`, with a warning. Model and layout belong to one of `ranks` tensor-parallel ranks.

    Raises KernelsUnavailable for missing kernels that were asked for by name, EngineStartError for another device's
    kernels.
    """
    on_gpu = pool.is_cuda
    if backend not in ("auto", "sdpa") and on_gpu != (backend in ON_GPU):
        raise EngineStartError("backend", f"{backend} does not run on {pool.device.type}")
    if layout.kept == "fp8" and not on_gpu and backend != "sdpa":
        raise EngineStartError("kv_dtype", "fp8 has no CPU kernels: use int8, or set backend: sdpa, which is slow")
    if backend == "sdpa":
        return _sdpa(pool, layout)
    heads = query_heads(model) // ranks
    if backend != "auto":
        return _JOINS[backend](model, pool, layout, heads)
    of_gpu = ("triton",) if layout.quantised else ON_GPU
    for name in of_gpu if on_gpu else ("native",):
        try:
            return _JOINS[name](model, pool, layout, heads)
        except KernelsUnavailable as error:
            log.warning("the %s kernels are not used: %s", name, error)
    log.warning("attention is computed by torch, expect several times slower steps")
    return _sdpa(pool, layout)


def query_heads(model: nn.Module) -> int:
    heads: int = model.config.get_text_config().num_attention_heads  # type: ignore[union-attr,operator]
    return heads


def _sdpa(pool: Tensor, layout: KvLayout) -> BoundModel:
    return BoundModel("sdpa", SdpaPagedAttention(pool, layout))


def _native(model: nn.Module, pool: Tensor, layout: KvLayout, heads: int) -> BoundModel:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    if dtype not in TYPES:
        raise KernelsUnavailable(f"the CPU kernels do not support {layout.dtype}")
    needed = [attention_part(dtype, layout.quantised)]
    if any(isinstance(module, QuantisedLinear) for module in model.modules()):
        needed.append(QUANTISED)
    kernels = Kernels(*needed)
    attention = NativePagedAttention(kernels, pool, layout, heads)
    last_rows = use_kernels(model, kernels).last_rows
    if last_rows is not None:
        attention.trim_last_layer()
    use_native_layers(model, kernels, attention)
    return BoundModel("native", attention, kernels.argmax, last_rows, kernels.bind_threads)


def _flashinfer(model: nn.Module, pool: Tensor, layout: KvLayout, heads: int) -> BoundModel:
    from engine.backends.torch.cuda.flashinfer_attention import FlashInferPagedAttention
    from engine.backends.torch.cuda.library import load_flashinfer, prefill_kernel
    from engine.backends.torch.cuda.modules import fuse

    flashinfer = load_flashinfer(layout)
    attention = FlashInferPagedAttention(flashinfer, pool, layout, heads, prefill_kernel())
    fuse(model, flashinfer)
    return BoundModel("flashinfer", attention)


def _triton(model: nn.Module, pool: Tensor, layout: KvLayout, heads: int) -> BoundModel:
    from engine.backends.torch.cuda.library import import_flashinfer
    from engine.backends.torch.cuda.modules import fuse
    from engine.backends.torch.cuda.triton_attention import TritonPagedAttention, load_kernels

    processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
    attention = TritonPagedAttention(load_kernels(layout, pool.device), pool, layout, heads, processors)
    try:
        fuse(model, import_flashinfer())
    except KernelsUnavailable as error:
        log.warning("norms, MLPs and rotary embeddings are not fused: %s", error)
    return BoundModel("triton", attention)


_JOINS = {"native": _native, "flashinfer": _flashinfer, "triton": _triton}
