"""Typed calls into the compiled kernels.

Callers check shapes; strides are in elements.

Each row is computed in an order that depends on the row alone. So a token's result has the same bits whatever else is
in the batch and however its prompt was cut into chunks.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.torch.memory import Arena, forget_file_pages
from engine.errors import KernelsUnavailable
from kvcache.layout import KvLayout
from kvtransfer.native.compiler import NotCompiled, Source, load_libraries

FOLDER = Path(__file__).parent
PANEL = 64
"""Columns of a packed matrix that are stored together."""
FLAGS = ("-fopenmp", "-fno-math-errno")
"""Compiler flags. The libraries share torch's OpenMP runtime, and with it torch's threads."""
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_CPP_TYPES = {"float32": "float", "bfloat16": "bfloat16"}

_POINTER, _LONG, _FLOAT, _BOOL = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_bool
_Signatures = dict[str, list[Any]]
_LINEAR: _Signatures = {
    "tandem_packed_bytes": [_LONG, _LONG],
    "tandem_pack": [_POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _LONG],
    "tandem_linear": [_POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _BOOL],
    "tandem_gated": [_POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _POINTER, _LONG],
    "tandem_embed": [_POINTER, _LONG, _POINTER, _LONG, _POINTER],
}
_ATTENTION: _Signatures = {
    "tandem_attention": [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER],
    "tandem_write_kv": [_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG],
}
_LAYERS: _Signatures = {
    "tandem_rms_norm": [_POINTER, _LONG, _LONG, _POINTER, _FLOAT, _POINTER],
    "tandem_rotate": [_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG],
    "tandem_argmax": [_POINTER, _LONG, _LONG, _POINTER],
}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Library of kernels: a source file and its compile-time parameters.

    There is one shared object for each.
    """

    source: str
    computed: str = ""
    """Dtype of the computation and of KV, where the source has one."""

    def compiled(self) -> Source:
        defined = (f"-DCOMPUTED={_CPP_TYPES[self.computed]}",) if self.computed else ()
        return Source(FOLDER / self.source, (*FLAGS, *defined))


LAYERS, LINEAR = Part("layers.cpp"), Part("linear.cpp")
_ATTENTION_PARTS = {dtype: Part("attention.cpp", name) for dtype, name in TYPES.items()}


def attention_part(dtype: torch.dtype) -> Part:
    """Return the attention library that computes in `dtype`."""
    return _ATTENTION_PARTS[dtype]


class AttentionShape(ctypes.Structure):
    """Mirror of the struct of the same name in attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "block_tokens", "layers", "layer")),
        ("query_head_stride", ctypes.c_int64),
        ("query_token_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class PackedMatrix:
    """Weights [n, k], bfloat16, in the order in which the kernels read them."""

    __slots__ = ("k", "n", "pointer", "storage")

    def __init__(self, n: int, k: int, storage: Tensor) -> None:
        self.n, self.k, self.storage = n, k, storage
        self.pointer = storage.data_ptr()


class Kernels:
    """Loaded libraries.

    Methods raise KernelsUnavailable when their library cannot be compiled or loaded.
    """

    def __init__(self, *parts: Part) -> None:
        """Compile `parts` and the libraries that are always needed at the same time; others compile at first use."""
        self._arena = Arena()
        self._loaded: dict[Part, dict[str, Callable[..., Any]]] = {}
        self._load([LAYERS, LINEAR, *parts])

    def _load(self, parts: Sequence[Part]) -> None:
        try:
            libraries = load_libraries([part.compiled() for part in parts])
        except NotCompiled as error:
            raise KernelsUnavailable(str(error)) from error
        for part, library in zip(parts, libraries, strict=True):
            self._loaded[part] = functions = {}
            for name, types in self._signatures(part).items():
                function = functions[name] = getattr(library, name)
                function.argtypes, function.restype = types, _LONG if "_bytes" in name else None

    def _signatures(self, part: Part) -> _Signatures:
        """Return the signatures of the library's functions."""
        if part == LAYERS:
            typed = {f"{name}_{kind}": types for name, types in _LAYERS.items() for kind in TYPES.values()}
            return typed | {"tandem_bind": [_POINTER, ctypes.c_int]}
        if part == LINEAR:
            return _LINEAR
        return _ATTENTION

    def function(self, part: Part, name: str) -> Callable[..., Any]:
        """Return a native function by its name."""
        if part not in self._loaded:
            self._load([part])
        return self._loaded[part][name]

    def bind_threads(self, cores: Sequence[int]) -> None:
        """Bind the calling thread to the first core, and each thread of its later teams to one of the others.

        Without binding the system puts two threads on one core as soon as another process is busy on the other.
        """
        self.function(LAYERS, "tandem_bind")((ctypes.c_int * len(cores))(*cores), len(cores))

    def pack(self, weights: Tensor) -> PackedMatrix:
        """Pack bfloat16 [n, k].

        The original must not be used after this.
        """
        weights = weights.contiguous()
        n, k = weights.shape
        packed = self._empty_matrix(n, k)
        self.function(LINEAR, "tandem_pack")(weights.data_ptr(), n, k, packed.pointer, n, 0, 0)
        forget_file_pages(weights)
        return packed

    def pack_gated(self, gate: Tensor, up: Tensor) -> PackedMatrix:
        """Pack two bfloat16 [n, k] whose products are taken together; n must be a multiple of 32."""
        n, k = gate.shape
        half = PANEL // 2
        packed = self._empty_matrix(2 * n, k)
        for shift, weights in ((0, gate.contiguous()), (half, up.contiguous())):
            self.function(LINEAR, "tandem_pack")(weights.data_ptr(), n, k, packed.pointer, half, PANEL, shift)
            forget_file_pages(weights)
        return packed

    def linear(self, x: Tensor, weights: PackedMatrix, bias: Tensor | None) -> Tensor:
        """Return [..., k] @ weights.T + bias: [..., n].

        `x` is contiguous bfloat16.
        """
        out = torch.empty((*x.shape[:-1], weights.n), dtype=torch.bfloat16)
        self._linear(x, weights, bias, out, False)
        return out

    def add_linear(self, to: Tensor, x: Tensor, weights: PackedMatrix, bias: Tensor | None) -> None:
        """Add the result of `linear` to `to`.

        Both are contiguous bfloat16.
        """
        self._linear(x, weights, bias, to, True)

    def _linear(self, x: Tensor, weights: PackedMatrix, bias: Tensor | None, out: Tensor, adds: bool) -> None:
        self.function(LINEAR, "tandem_linear")(
            x.data_ptr(),
            weights.k,
            x.numel() // weights.k,
            weights.pointer,
            weights.n,
            weights.k,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            weights.n,
            adds,
        )

    def gated(self, x: Tensor, weights: PackedMatrix) -> Tensor:
        """Return silu(x @ gate.T) * (x @ up.T): [..., n].

        `x` is contiguous bfloat16.
        """
        n = weights.n // 2
        out = torch.empty((*x.shape[:-1], n), dtype=torch.bfloat16)
        rows = x.numel() // weights.k
        function = self.function(LINEAR, "tandem_gated")
        function(x.data_ptr(), weights.k, rows, weights.pointer, n, weights.k, out.data_ptr(), n)
        return out

    def embed(self, token_ids: Tensor, weights: PackedMatrix) -> Tensor:
        """Return rows `token_ids` (int64, contiguous) of bfloat16 weights: [..., k]."""
        out = torch.empty((*token_ids.shape, weights.k), dtype=torch.bfloat16)
        embed = self.function(LINEAR, "tandem_embed")
        embed(token_ids.data_ptr(), token_ids.numel(), weights.pointer, weights.k, out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return weight * x / rms(x) over the last dimension.

        `x` is contiguous.
        """
        out = torch.empty_like(x)
        n = x.shape[-1]
        function = self.function(LAYERS, f"tandem_rms_norm_{TYPES[x.dtype]}")
        function(x.data_ptr(), x.numel() // n, n, weight.data_ptr(), epsilon, out.data_ptr())
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply the rotary embedding in place.

        `heads` is [1, heads, tokens, head_dim] with a contiguous last dimension; `cos` and `sin` are contiguous [1,
        tokens, head_dim].
        """
        _, count, tokens, head_dim = heads.shape
        function = self.function(LAYERS, f"tandem_rotate_{TYPES[heads.dtype]}")
        strides = heads.stride(1), heads.stride(2)
        function(heads.data_ptr(), count, *strides, cos.data_ptr(), sin.data_ptr(), tokens, head_dim)

    def argmax(self, rows: Tensor) -> Tensor:
        """Return the first largest element of each contiguous row, int64 [rows]."""
        out = torch.empty(rows.shape[0], dtype=torch.long)
        function = self.function(LAYERS, f"tandem_argmax_{TYPES[rows.dtype]}")
        function(rows.data_ptr(), rows.shape[0], rows.shape[1], out.data_ptr())
        return out

    def write_kv(self, shape: AttentionShape, pool: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write `key` and `value` [1, kv_heads, tokens, head_dim] into the pool.

        `slots` is int64 [tokens]: block * block_tokens + offset.
        """
        self.function(attention_part(key.dtype), "tandem_write_kv")(
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
        """Attend with `query` [1, heads, tokens, head_dim] over the pool: returns [1, tokens, heads, head_dim].

        `tables` is int32, `items` int64 [n, 4]: see AttentionItem in attention.cpp. `max_rows` is the largest number of
        query rows of an item: tokens times query heads per KV head. Tokens in no item are left undefined.
        """
        out = torch.empty((1, query.shape[2], query.shape[1], query.shape[3]), dtype=query.dtype)
        self.function(attention_part(query.dtype), "tandem_attention")(
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
        return PackedMatrix(n, k, self._arena.take(self.function(LINEAR, "tandem_packed_bytes")(n, k)))


def attention_shape(layout: KvLayout, heads: int) -> AttentionShape:
    """Return the parameters of attention that stay the same from call to call."""
    return AttentionShape(
        heads=heads,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        layers=layout.layers,
    )
