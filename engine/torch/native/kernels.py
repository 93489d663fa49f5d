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
_QUANTISED_SIGNATURES: dict[str, list[Any]] = {
    "tandem_pack_int4": [_POINTER, *_SIGNATURES["tandem_pack"]],
    "tandem_linear_int4": _SIGNATURES["tandem_linear"],
    "tandem_gated_int4": _SIGNATURES["tandem_gated"],
    "tandem_pack_int8": _SIGNATURES["tandem_pack"],
    "tandem_linear_int8": [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG],
    "tandem_gated_int8": [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG],
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
    """Weights [n, k] in the order in which they are read: bfloat16, int8 with a scale for each of the n, or int4 with
    scales among them."""

    __slots__ = ("k", "kind", "n", "pointer", "scales", "storage")

    def __init__(self, n: int, k: int, storage: Tensor, kind: str = "", scales: Tensor | None = None) -> None:
        self.n, self.k, self.storage, self.scales = n, k, storage, scales
        self.kind = kind
        """What the functions that read it end in."""
        self.pointer = storage.data_ptr()

    @property
    def arguments(self) -> tuple[int, ...]:
        """By which they are told where it is."""
        return (self.pointer,) if self.scales is None else (self.pointer, self.scales.data_ptr())


class Kernels:
    """One loaded library. Raises KernelsUnavailable when it cannot be had."""

    def __init__(self) -> None:
        try:  # it shares torch's OpenMP runtime, and with it torch's threads
            self._library = load_library(SOURCE, ("-fopenmp", "-fno-math-errno"))
        except NotCompiled as error:
            raise KernelsUnavailable(str(error)) from error
        self._arena = Arena()
        level = self._library.tandem_has_linear()
        self.multiplies_bfloat16 = level >= 1
        """The CPU has bfloat16 dot products, and with them `pack`, `linear`, `gated` and `embed`."""
        self.multiplies_int8 = level >= 2
        """It also permutes bytes, and with that there are the functions of int8 and int4 weights."""
        names = {f"{name}_{kind}": types for name, types in _TYPED_SIGNATURES.items() for kind in TYPES.values()}
        for name in ("tandem_attention", "tandem_write_kv"):
            names |= {f"{name}_{kind}_int8": _TYPED_SIGNATURES[name] for kind in TYPES.values()}
        if self.multiplies_bfloat16:
            names |= _SIGNATURES
        if self.multiplies_int8:
            names |= _QUANTISED_SIGNATURES
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

    def pack_int8(self, values: Tensor, scales: Tensor) -> PackedMatrix:
        """int8 [n, k] from -127 to 127, row i of which is to be multiplied by scales[i], float32 [n]."""
        n, k = values.shape
        packed = self._empty_matrix(n, k, "_int8", scales)
        self._library.tandem_pack_int8(values.contiguous().data_ptr(), n, k, packed.pointer, n, 0, 0)
        return packed

    def pack_gated_int8(self, gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor]) -> PackedMatrix:
        """Two such pairs of values and scales, whose products are taken together; n must be a multiple of 32."""
        n, k = gate[0].shape
        half = PANEL // 2
        scales = torch.stack([gate[1].view(-1, half), up[1].view(-1, half)], 1).reshape(-1)
        packed = self._empty_matrix(2 * n, k, "_int8", scales)
        for shift, values in ((0, gate[0].contiguous()), (half, up[0].contiguous())):
            self._library.tandem_pack_int8(values.data_ptr(), n, k, packed.pointer, half, PANEL, shift)
        return packed

    def pack_int4(self, values: Tensor, scales: Tensor) -> PackedMatrix:
        """int8 [n, k] from -8 to 7, each 32 of a row with a scale, bfloat16 [n, k / 32]; k is a multiple of 32."""
        n, k = values.shape
        packed = self._empty_matrix(n, k, "_int4")
        self._pack_int4(values, scales, packed, (n, 0, 0))
        return packed

    def pack_gated_int4(self, gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor]) -> PackedMatrix:
        """As `pack_gated_int8`."""
        n, k = gate[0].shape
        packed = self._empty_matrix(2 * n, k, "_int4")
        for shift, weights in ((0, gate), (PANEL // 2, up)):
            self._pack_int4(*weights, packed, (PANEL // 2, PANEL, shift))
        return packed

    def _pack_int4(self, values: Tensor, scales: Tensor, to: PackedMatrix, columns: tuple[int, int, int]) -> None:
        assert scales.dtype is torch.bfloat16
        values, scales = values.contiguous(), scales.contiguous()
        self._library.tandem_pack_int4(values.data_ptr(), scales.data_ptr(), *values.shape, to.pointer, *columns)

    def linear(self, x: Tensor, weights: PackedMatrix, bias: Tensor | None) -> Tensor:
        """[..., k] @ weights.T + bias: [..., n]. `x` is contiguous bfloat16."""
        rows = x.numel() // weights.k
        out = torch.empty((*x.shape[:-1], weights.n), dtype=torch.bfloat16)
        getattr(self._library, f"tandem_linear{weights.kind}")(
            x.data_ptr(),
            weights.k,
            rows,
            *weights.arguments,
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
        function = getattr(self._library, f"tandem_gated{weights.kind}")
        function(x.data_ptr(), weights.k, rows, *weights.arguments, n, weights.k, out.data_ptr(), n)
        return out

    def embed(self, token_ids: Tensor, weights: PackedMatrix) -> Tensor:
        """Rows `token_ids` (int64, contiguous) of bfloat16 weights: [..., k]."""
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
        getattr(self._library, f"tandem_write_kv_{TYPES[key.dtype]}{_kept(pool)}")(
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
        getattr(self._library, f"tandem_attention_{TYPES[query.dtype]}{_kept(pool)}")(
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

    def _empty_matrix(self, n: int, k: int, kind: str = "", scales: Tensor | None = None) -> PackedMatrix:
        size = getattr(self._library, f"tandem_packed_bytes{kind}")
        size.argtypes, size.restype = [_LONG, _LONG], _LONG
        padded: Tensor | None = None
        if scales is not None:
            padded = torch.zeros(-(-n // PANEL) * PANEL)
            padded[:n] = scales
        return PackedMatrix(n, k, self._arena.take(size(n, k)), kind, padded)


def _kept(pool: Tensor) -> str:
    """What functions over this pool are called by: quantised KV is bytes."""
    return "_int8" if pool.dtype is torch.uint8 else ""


def attention_shape(layout: KvLayout, heads: int) -> AttentionShape:
    """What does not change from call to call."""
    return AttentionShape(
        heads=heads,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        layers=layout.layers,
    )
