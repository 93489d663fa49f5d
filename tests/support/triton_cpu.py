"""Triton's interpreter, which runs kernels on the CPU, with the roundings of a GPU.

As it comes, it multiplies the bits of bfloat16 as if they were integers, and cuts off what a conversion has to round
to nearest even. Both are done by torch here; the rest of it is left as it is.
"""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def as_tensor(data: Any, dtype: Any) -> torch.Tensor:
    """What the interpreter keeps as bits, as the numbers that they are."""
    ours = TYPES[dtype]
    bits = np.ascontiguousarray(data).view(getattr(np, str(BITS[ours.itemsize]).removeprefix("torch.")))
    return torch.from_numpy(bits).view(ours)


def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Bits of `source` to bits of `target`, to nearest even."""
    made = as_tensor(data, source).to(TYPES[target])
    return made.view(BITS[made.element_size()]).numpy().view(getattr(np, f"uint{8 * made.element_size()}"))


def dot(builder: Any, a: Any, b: Any, total: Any, precision: Any, imprecise: Any) -> Any:
    product = torch.matmul(as_tensor(a.data, a.dtype.scalar).float(), as_tensor(b.data, b.dtype.scalar).float())
    return interpreter.TensorHandle(product.numpy() + total.data, total.dtype.scalar)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the length of a test."""
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
