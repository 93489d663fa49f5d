"""Loader of flashinfer, which checks whether it is installed and can serve a model."""

import os
from typing import Any

import torch

from engine.errors import KernelsUnavailable
from engine.kv.layout import KvLayout

HEAD_DIMS = (64, 128, 256)
DTYPES = ("float16", "bfloat16")


def load_flashinfer(layout: KvLayout) -> Any:
    """Return flashinfer's module.

    Raises KernelsUnavailable, with the reason, when it is missing or does not support KV of this layout.
    """
    if layout.dtype not in DTYPES:
        raise KernelsUnavailable(f"flashinfer computes in {' and '.join(DTYPES)}, not {layout.dtype}")
    if layout.head_dim not in HEAD_DIMS:
        raise KernelsUnavailable(f"flashinfer needs heads of {HEAD_DIMS} elements, not {layout.head_dim}")
    if layout.quantised:
        raise KernelsUnavailable("flashinfer cannot read KV blocks that contain scales")
    return import_flashinfer()


def import_flashinfer() -> Any:
    """Import flashinfer.

    Raises KernelsUnavailable.
    """
    # Otherwise its norms come from a second compiler (CuTe DSL), which takes seconds for each shape.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    try:
        import flashinfer
    except Exception as error:  # importing it loads CUDA libraries, whose errors are of any type
        raise KernelsUnavailable(f"flashinfer cannot be imported: {error}") from error
    return flashinfer


def prefill_kernel() -> str:
    """Return flashinfer's prompt kernel for this GPU: the one with Hopper's instructions, or the one for any GPU."""
    return "fa3" if torch.cuda.get_device_capability() == (9, 0) else "fa2"
