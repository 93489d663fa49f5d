"""Triton kernels of linear layers: products with quantised weights, and conversion of activations to float8.

A tile of the weight is read as stored, converted exactly to the activation's dtype and multiplied. Sums are in float32,
and scales are applied after them. With few rows the time is that of reading the weight, so programs share the
reduction, and a second kernel adds their results. No kernel waits for the host and every size is known from shapes, so
that all of it can be captured in CUDA graphs.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = 16
PROGRAMS_PER_PROCESSOR = 4
"""Programs of each processor (SM) that read the weight at once, where there are few rows."""
REDUCED_AT_ONCE = 1024


@triton.jit
def _weights(values, zeros, rows, block, n, k, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the weights of one block of the reduction, less zero points: int4's two halves, or other values twice."""
    valid = rows < n
    if BITS == 4:
        inner = tl.arange(0, BLOCK_K // 2)
        at = (block.to(tl.int64) * n + rows)[:, None] * (BLOCK_K // 2) + inner[None, :]
        both = tl.load(values + at, mask=valid[:, None], other=0).to(tl.int32)
        low, high = ((both & 15) - 8).to(tl.float32), ((both >> 4) - 8).to(tl.float32)
    else:
        inner = block * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = valid[:, None] & (inner < k)[None, :]
        low = tl.load(values + rows.to(tl.int64)[:, None] * k + inner[None, :], mask=inside, other=0.0).to(tl.float32)
        high = low
    if zeros is not None:
        zero = tl.load(zeros + (block * BLOCK_K // GROUP) * n + rows, mask=valid, other=0).to(tl.float32)[:, None]
        low, high = low - zero, high - zero
    return low, high


@triton.jit
def _dot(x, values, to):
    """Add x [tokens, inputs] times values [rows, inputs], exact in x's dtype, to float32 [tokens, rows]."""
    return tl.dot(x, tl.trans(values.to(x.dtype)), to, input_precision="ieee")


@triton.jit
def _linear(
    x,
    values,
    scales,
    zeros,
    bias,
    out,
    m,
    n,
    k,
    x_stride,
    blocks_each,
    GROUP: tl.constexpr,  # 0: a scale for each row
    BITS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_m = tl.cdiv(m, BLOCK_M)
    tile, split = tl.program_id(0), tl.program_id(1)
    # programs that run at the same time read the same weights
    tokens = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + tokens.to(tl.int64)[:, None] * x_stride
    present = (tokens < m)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(blocks_each):
        block = split * blocks_each + step
        low, high = _weights(values, zeros, rows, block, n, k, GROUP, BITS, BLOCK_K)
        if BITS == 4:
            first = block * BLOCK_K + tl.arange(0, BLOCK_K // 2)
            x_low = tl.load(x_rows + first[None, :], mask=present, other=0)
            x_high = tl.load(x_rows + first[None, :] + BLOCK_K // 2, mask=present, other=0)
            product = _dot(x_low, low, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
            product = _dot(x_high, high, product)
        else:
            every = block * BLOCK_K + tl.arange(0, BLOCK_K)
            x_tile = tl.load(x_rows + every[None, :], mask=present & (every < k)[None, :], other=0)
            product = _dot(x_tile, low, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        if GROUP > 0:
            scale = tl.load(scales + (block * BLOCK_K // GROUP) * n + rows, mask=rows < n, other=0).to(tl.float32)
            total += product * scale[None, :]
        else:
            total += product
    written = present & (rows < n)[None, :]
    to = tokens.to(tl.int64)[:, None] * n + rows[None, :]
    if SPLITS > 1:
        tl.store(out + split.to(tl.int64) * m * n + to, total, mask=written)
    else:
        if GROUP == 0:
            total *= tl.load(scales + rows, mask=rows < n, other=0)[None, :]
        if bias is not None:
            total += tl.load(bias + rows, mask=rows < n, other=0).to(tl.float32)[None, :]
        tl.store(out + to, total.to(out.dtype.element_ty), mask=written)


@triton.jit
def _add_up(parts, scales, bias, out, m, n, GROUP: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add `parts` [SPLITS, m, n], always in the same order, into `out` [m, n]."""
    token, rows = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * m + token) * n + rows, mask=rows < n, other=0)
    if GROUP == 0:
        total *= tl.load(scales + rows, mask=rows < n, other=0)
    if bias is not None:
        total += tl.load(bias + rows, mask=rows < n, other=0).to(tl.float32)
    tl.store(out + token * n + rows, total.to(out.dtype.element_ty), mask=rows < n)


@triton.jit
def _rows_to_float8(x, values, scales, k, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wide = tl.load(x + row * x_stride + columns, mask=columns < k, other=0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), 0), tl.full((), 448.0, tl.float32)), 1e-12)
    steps = tl.minimum(tl.maximum(tl.div_rn(wide, tl.zeros_like(wide) + scale), -448.0), 448.0)
    tl.store(values + row * k + columns, steps.to(tl.float8e4nv), mask=columns < k)
    tl.store(scales + row, scale)


def quantised_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    bits: int,
    block_k: int,
    n: int,
) -> Tensor:
    """Multiply [..., k] by quantised weights; returns [..., n] in the dtype of `x`.

    `values` of 8 bits are int8 or float8_e4m3fn [n, k]. `values` of 4 bits are uint8 [k / block_k, n, block_k / 2]: a
    byte holds the elements i (low) and i + block_k / 2 of the block, each plus 8. `scales` are float32 [n], or [groups,
    n]; `zeros` are int8 [groups, n]. `block_k` divides the inputs of a group.
    """
    k = x.shape[-1]
    flat = x.reshape(-1, k)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    m = len(flat)
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    group = k // scales.shape[0] if scales.dim() == 2 else 0
    block_m, block_n, warps = tiles_of(m, bits, x.dtype)
    block_k = block_of(block_k, bits, m)
    tiles, blocks = triton.cdiv(m, block_m) * triton.cdiv(n, block_n), triton.cdiv(k, block_k)
    splits = num_splits(tiles, blocks, _processors(x.device))
    to = out if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    _linear[(tiles, splits)](
        flat,
        values,
        scales,
        zeros,
        bias if splits == 1 else None,
        to,
        m,
        n,
        k,
        flat.stride(0),
        blocks // splits,
        GROUP=group,
        BITS=bits,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages_of(x.dtype),
    )
    if splits > 1:
        _add_up[(m, triton.cdiv(n, REDUCED_AT_ONCE))](
            to, scales, bias, out, m, n, GROUP=group, SPLITS=splits, BLOCK=REDUCED_AT_ONCE
        )
    return out


def num_splits(tiles: int, blocks: int, processors: int) -> int:
    """Return the number of programs that share each tile's reduction equally, enough to keep the GPU busy."""
    splits = 1
    while splits < MAX_SPLITS and blocks % (2 * splits) == 0 and tiles * splits < PROGRAMS_PER_PROCESSOR * processors:
        splits *= 2
    return splits


def rows_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [m, k] to float8_e4m3fn [m, k] with one scale for each row, float32 [m]."""
    m, k = x.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    values = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    if m:
        block = triton.next_power_of_2(k)
        _rows_to_float8[(m,)](x, values, scales, k, x.stride(0), BLOCK=block, num_warps=8 if block >= 4096 else 4)
    return values, scales


def tiles_of(m: int, bits: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return a tile's rows of activations, its rows of weights, and its warps.

    The sizes fit the registers and shared memory of all GPUs since Ampere, by the compiler's report.
    """
    if m <= 16:
        return 16, 32, 4
    if dtype is torch.float32:
        return 32, 32, 4
    if m <= 64:
        return 32 if m <= 32 else 64, 64, 4
    return 128, 64 if bits == 4 else 128, 8


def block_of(block_k: int, bits: int, m: int) -> int:
    """Return the inputs taken at once for a layer whose group size `block_k` divides.

    Only int4 is stored in blocks.
    """
    return min(block_k, 64) if bits == 8 and m > 16 else block_k


def stages_of(dtype: torch.dtype) -> int:
    """Return the number of tiles read ahead: as many as fit in shared memory."""
    return 2 if dtype is torch.float32 else 3


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
