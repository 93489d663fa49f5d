"""Typed calls into the compiled kernels. Shapes are checked by the callers; strides are in elements.

All results are computed row by row in an order that depends on the row alone, so a token's result is the same to the
bit whoever else is in the batch and however its prompt was cut into chunks.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import KernelsUnavailable
from engine.layout import KvLayout
from engine.torch.memory import Arena, forget_file_pages
from kvtransfer.native.compiler import NotCompiled, load_library

SOURCE = Path(__file__).with_name("kernels.cpp")
PANEL = 64
"""Columns of a matrix that lie together once it is packed."""

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "tandem_pack": [_POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _LONG],
    "tandem_linear": [_POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG],
    "tandem_gated": [_POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _POINTER, _LONG],
    "tandem_embed": [_POINTER, _LONG, _POINTER, _LONG, _POINTER],
}
_TYPED_SIGNATURES: dict[str, list[Any]] = {
    "tandem_attention": [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER],
    "tandem_write_kv": [_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG],
    "tandem_rms_norm": [_POINTER, _LONG, _LONG, _POINTER, _FLOAT, _POINTER],
    "tandem_rotate": [_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG],
    "tandem_argmax": [_POINTER, _LONG, _LONG, _POINTER],
}
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class AttentionShape(ctypes.Structure):
    """Mirrors the struct of the same name in kernels.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "block_tokens", "layers", "layer")),
        ("query_head_stride", ctypes.c_int64),
        ("query_token_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class PackedMatrix:
    """Weights [n, k] in the order in which they are read."""

    __slots__ = ("k", "n", "pointer", "storage")

    def __init__(self, n: int, k: int, storage: Tensor) -> None:
        self.n, self.k, self.storage = n, k, storage
        self.pointer = storage.data_ptr()


class Kernels:
    """One loaded library. Raises KernelsUnavailable when it cannot be had."""

    def __init__(self) -> None:
        try:  # it shares torch's OpenMP runtime, and with it torch's threads
            self._library = load_library(SOURCE, ("-fopenmp", "-fno-math-errno"))
        except NotCompiled as error:
            raise KernelsUnavailable(str(error)) from error
        self._arena = Arena()
        self.multiplies_bfloat16 = bool(self._library.tandem_has_linear())
        """The CPU has bfloat16 dot products, and with them `pack`, `linear`, `gated` and `embed`."""
        names = {f"{name}_{kind}": types for name, types in _TYPED_SIGNATURES.items() for kind in TYPES.values()}
        if self.multiplies_bfloat16:
            names |= _SIGNATURES
            self._library.tandem_packed_bytes.argtypes = [_LONG, _LONG]
            self._library.tandem_packed_bytes.restype = _LONG
        names["tandem_bind"] = [_POINTER, ctypes.c_int]
        for name, types in names.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, None

    def bind_threads(self, cores: Sequence[int]) -> None:
        """Bind the calling thread to the first core, and each thread of the teams it will begin to one of the others.

        Left to itself the system puts two of them on one core as soon as another process is busy on the other.
        """
        self._library.tandem_bind((ctypes.c_int * len(cores))(*cores), len(cores))

    def pack(self, weights: Tensor) -> PackedMatrix:
        """bfloat16 [n, k], which is not to be used any more."""
        weights = weights.contiguous()
        n, k = weights.shape
        packed = self._empty_matrix(n, k)
        self._library.tandem_pack(weights.data_ptr(), n, k, packed.pointer, n, 0, 0)
        forget_file_pages(weights)
        return packed

    def pack_gated(self, gate: Tensor, up: Tensor) -> PackedMatrix:
        """Two bfloat16 [n, k] whose products are taken together; n must be a multiple of 32."""
        n, k = gate.shape
        half = PANEL // 2
        packed = self._empty_matrix(2 * n, k)
        for shift, weights in ((0, gate.contiguous()), (half, up.contiguous())):
            self._library.tandem_pack(weights.data_ptr(), n, k, packed.pointer, half, PANEL, shift)
            forget_file_pages(weights)
        return packed

    def linear(self, x: Tensor, weights: PackedMatrix, bias: Tensor | None) -> Tensor:
        """[..., k] @ weights.T + bias: [..., n]. `x` is contiguous bfloat16."""
        rows = x.numel() // weights.k
        out = torch.empty((*x.shape[:-1], weights.n), dtype=torch.bfloat16)
        self._library.tandem_linear(
            x.data_ptr(),
            weights.k,
            rows,
            weights.pointer,
            weights.n,
            weights.k,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            weights.n,
        )
        return out

    def gated(self, x: Tensor, weights: PackedMatrix) -> Tensor:
        """silu(x @ gate.T) * (x @ up.T): [..., n]. `x` is contiguous bfloat16."""
        n = weights.n // 2
        out = torch.empty((*x.shape[:-1], n), dtype=torch.bfloat16)
        rows = x.numel() // weights.k
        self._library.tandem_gated(x.data_ptr(), weights.k, rows, weights.pointer, n, weights.k, out.data_ptr(), n)
        return out

    def embed(self, token_ids: Tensor, weights: PackedMatrix) -> Tensor:
        """Rows `token_ids` (int64, contiguous) of the weights: [..., k]."""
        out = torch.empty((*token_ids.shape, weights.k), dtype=torch.bfloat16)
        self._library.tandem_embed(token_ids.data_ptr(), token_ids.numel(), weights.pointer, weights.k, out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """weight * x / rms(x) over the last dimension. `x` is contiguous."""
        out = torch.empty_like(x)
        n = x.shape[-1]
        function = getattr(self._library, f"tandem_rms_norm_{TYPES[x.dtype]}")
        function(x.data_ptr(), x.numel() // n, n, weight.data_ptr(), epsilon, out.data_ptr())
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotary embedding, in place: `heads` [1, heads, tokens, head_dim] with a contiguous last dimension, `cos`
        and `sin` contiguous [1, tokens, head_dim]."""
        _, count, tokens, head_dim = heads.shape
        function = getattr(self._library, f"tandem_rotate_{TYPES[heads.dtype]}")
        strides = heads.stride(1), heads.stride(2)
        function(heads.data_ptr(), count, *strides, cos.data_ptr(), sin.data_ptr(), tokens, head_dim)

    def argmax(self, rows: Tensor) -> Tensor:
        """The first largest element of each contiguous row: int64 [rows]."""
        out = torch.empty(rows.shape[0], dtype=torch.long)
        function = getattr(self._library, f"tandem_argmax_{TYPES[rows.dtype]}")
        function(rows.data_ptr(), rows.shape[0], rows.shape[1], out.data_ptr())
        return out

    def write_kv(self, shape: AttentionShape, pool: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """`key` and `value` [1, kv_heads, tokens, head_dim] to `slots`, int64 [tokens]: block * block_tokens +
        offset."""
        getattr(self._library, f"tandem_write_kv_{TYPES[pool.dtype]}")(
            ctypes.addressof(shape),
            pool.data_ptr(),
            slots.data_ptr(),
            slots.numel(),
            key.data_ptr(),
            key.stride(1),
            key.stride(2),
            value.data_ptr(),
            value.stride(1),
            value.stride(2),
        )

    def attention(
        self, shape: AttentionShape, query: Tensor, pool: Tensor, tables: Tensor, items: Tensor, max_rows: int
    ) -> Tensor:
        """Attention of `query` [1, heads, tokens, head_dim] over the pool: [1, tokens, heads, head_dim].

        `tables` int32, `items` int64 [n, 4]: see AttentionItem in kernels.cpp. `max_rows`: the most query rows of an
        item, tokens times query heads per KV head. Tokens in no item are left undefined.
        """
        out = torch.empty((1, query.shape[2], query.shape[1], query.shape[3]), dtype=query.dtype)
        getattr(self._library, f"tandem_attention_{TYPES[pool.dtype]}")(
            ctypes.addressof(shape),
            query.data_ptr(),
            pool.data_ptr(),
            tables.data_ptr(),
            items.data_ptr(),
            items.shape[0],
            max_rows,
            out.data_ptr(),
        )
        return out

    def _empty_matrix(self, n: int, k: int) -> PackedMatrix:
        return PackedMatrix(n, k, self._arena.take(self._library.tandem_packed_bytes(n, k)))


def attention_shape(layout: KvLayout, heads: int) -> AttentionShape:
    """What does not change from call to call."""
    return AttentionShape(
        heads=heads,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        layers=layout.layers,
    )
