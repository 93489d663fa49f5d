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
from engine.kv.layout import KvLayout
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
_QUANTISED: _Signatures = {
    "tandem_packed_bytes_int4": [_LONG, _LONG],
    "tandem_pack_int4": [_POINTER, *_LINEAR["tandem_pack"]],
    "tandem_linear_int4": _LINEAR["tandem_linear"],
    "tandem_gated_int4": _LINEAR["tandem_gated"],
    "tandem_packed_bytes_int8": [_LONG, _LONG],
    "tandem_pack_int8": _LINEAR["tandem_pack"],
    "tandem_linear_int8": [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _BOOL],
    "tandem_gated_int8": [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG],
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
    """Dtype of the computation, where the source has one."""
    kept: str = ""
    """Dtype suffix of the stored input: `_int8`, or empty."""

    def compiled(self) -> Source:
        defined = []
        if self.computed:
            computed = _CPP_TYPES[self.computed]
            defined = [f"-DCOMPUTED={computed}", f"-DKEPT={'int8_t' if self.kept else computed}"]
        return Source(FOLDER / self.source, (*FLAGS, *defined))


LAYERS, LINEAR, QUANTISED = Part("layers.cpp"), Part("linear.cpp"), Part("quantised.cpp")


_ATTENTION_PARTS = {
    (dtype, quantised): Part("attention.cpp", TYPES[dtype], "_int8" if quantised else "")
    for dtype in TYPES
    for quantised in (False, True)
}


def attention_part(dtype: torch.dtype, quantised: bool) -> Part:
    """Return the attention library that computes in `dtype`, over a pool of the same dtype or of int8."""
    return _ATTENTION_PARTS[dtype, quantised]


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
    """Weights [n, k] in the order in which the kernels read them.

    They are bfloat16, int8 with a scale for each of the n, or int4 with scales between the weights.
    """

    __slots__ = ("k", "kind", "n", "pointer", "scales", "storage")

    def __init__(self, n: int, k: int, storage: Tensor, kind: str = "", scales: Tensor | None = None) -> None:
        self.n, self.k, self.storage, self.scales = n, k, storage, scales
        self.kind = kind
        """Suffix of the functions that read the matrix."""
        self.pointer = storage.data_ptr()

    @property
    def arguments(self) -> tuple[int, ...]:
        """Pointers that the kernels take for the matrix."""
        return (self.pointer,) if self.scales is None else (self.pointer, self.scales.data_ptr())


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
        if part == QUANTISED:
            return _QUANTISED
        return _ATTENTION

    def _function(self, part: Part, name: str) -> Callable[..., Any]:
        if part not in self._loaded:
            self._load([part])
        return self._loaded[part][name]

    def _of_kind(self, name: str, kind: str) -> Callable[..., Any]:
        """Return the function for bfloat16 weights, or for a quantised kind."""
        return self._function(QUANTISED if kind else LINEAR, name + kind)

    def bind_threads(self, cores: Sequence[int]) -> None:
        """Bind the calling thread to the first core, and each thread of its later teams to one of the others.

        Without binding the system puts two threads on one core as soon as another process is busy on the other.
        """
        self._function(LAYERS, "tandem_bind")((ctypes.c_int * len(cores))(*cores), len(cores))

    def pack(self, weights: Tensor) -> PackedMatrix:
        """Pack bfloat16 [n, k].

        The original must not be used after this.
        """
        weights = weights.contiguous()
        n, k = weights.shape
        packed = self._empty_matrix(n, k)
        self._function(LINEAR, "tandem_pack")(weights.data_ptr(), n, k, packed.pointer, n, 0, 0)
        forget_file_pages(weights)
        return packed

    def pack_gated(self, gate: Tensor, up: Tensor) -> PackedMatrix:
        """Pack two bfloat16 [n, k] whose products are taken together; n must be a multiple of 32."""
        n, k = gate.shape
        half = PANEL // 2
        packed = self._empty_matrix(2 * n, k)
        for shift, weights in ((0, gate.contiguous()), (half, up.contiguous())):
            self._function(LINEAR, "tandem_pack")(weights.data_ptr(), n, k, packed.pointer, half, PANEL, shift)
            forget_file_pages(weights)
        return packed

    def pack_int8(self, values: Tensor, scales: Tensor) -> PackedMatrix:
        """Pack int8 [n, k] from -127 to 127 with float32 scales [n], one for each row."""
        n, k = values.shape
        packed = self._empty_matrix(n, k, "_int8", scales)
        pack = self._function(QUANTISED, "tandem_pack_int8")
        pack(values.contiguous().data_ptr(), n, k, packed.pointer, n, 0, 0)
        return packed

    def pack_gated_int8(self, gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor]) -> PackedMatrix:
        """Pack two pairs of int8 values and scales whose products are taken together; n must be a multiple of 32."""
        n, k = gate[0].shape
        half = PANEL // 2
        scales = torch.stack([gate[1].view(-1, half), up[1].view(-1, half)], 1).reshape(-1)
        packed = self._empty_matrix(2 * n, k, "_int8", scales)
        for shift, values in ((0, gate[0].contiguous()), (half, up[0].contiguous())):
            self._function(QUANTISED, "tandem_pack_int8")(values.data_ptr(), n, k, packed.pointer, half, PANEL, shift)
        return packed

    def pack_int4(self, values: Tensor, scales: Tensor) -> PackedMatrix:
        """Pack int8 [n, k] from -8 to 7; each 32 of a row have a scale, bfloat16 [n, k / 32], so 32 divides k."""
        n, k = values.shape
        packed = self._empty_matrix(n, k, "_int4")
        self._pack_int4(values, scales, packed, (n, 0, 0))
        return packed

    def pack_gated_int4(self, gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor]) -> PackedMatrix:
        """Pack two pairs of int4 values and scales, as `pack_gated_int8` does."""
        n, k = gate[0].shape
        packed = self._empty_matrix(2 * n, k, "_int4")
        for shift, weights in ((0, gate), (PANEL // 2, up)):
            self._pack_int4(*weights, packed, (PANEL // 2, PANEL, shift))
        return packed

    def _pack_int4(self, values: Tensor, scales: Tensor, to: PackedMatrix, columns: tuple[int, int, int]) -> None:
        assert scales.dtype is torch.bfloat16
        values, scales = values.contiguous(), scales.contiguous()
        pack = self._function(QUANTISED, "tandem_pack_int4")
        pack(values.data_ptr(), scales.data_ptr(), *values.shape, to.pointer, *columns)

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
        self._of_kind("tandem_linear", weights.kind)(
            x.data_ptr(),
            weights.k,
            x.numel() // weights.k,
            *weights.arguments,
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
        function = self._of_kind("tandem_gated", weights.kind)
        function(x.data_ptr(), weights.k, rows, *weights.arguments, n, weights.k, out.data_ptr(), n)
        return out

    def embed(self, token_ids: Tensor, weights: PackedMatrix) -> Tensor:
        """Return rows `token_ids` (int64, contiguous) of bfloat16 weights: [..., k]."""
        out = torch.empty((*token_ids.shape, weights.k), dtype=torch.bfloat16)
        embed = self._function(LINEAR, "tandem_embed")
        embed(token_ids.data_ptr(), token_ids.numel(), weights.pointer, weights.k, out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return weight * x / rms(x) over the last dimension.

        `x` is contiguous.
        """
        out = torch.empty_like(x)
        n = x.shape[-1]
        function = self._function(LAYERS, f"tandem_rms_norm_{TYPES[x.dtype]}")
        function(x.data_ptr(), x.numel() // n, n, weight.data_ptr(), epsilon, out.data_ptr())
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply the rotary embedding in place.

        `heads` is [1, heads, tokens, head_dim] with a contiguous last dimension; `cos` and `sin` are contiguous [1,
        tokens, head_dim].
        """
        _, count, tokens, head_dim = heads.shape
        function = self._function(LAYERS, f"tandem_rotate_{TYPES[heads.dtype]}")
        strides = heads.stride(1), heads.stride(2)
        function(heads.data_ptr(), count, *strides, cos.data_ptr(), sin.data_ptr(), tokens, head_dim)

    def argmax(self, rows: Tensor) -> Tensor:
        """Return the first largest element of each contiguous row, int64 [rows]."""
        out = torch.empty(rows.shape[0], dtype=torch.long)
        function = self._function(LAYERS, f"tandem_argmax_{TYPES[rows.dtype]}")
        function(rows.data_ptr(), rows.shape[0], rows.shape[1], out.data_ptr())
        return out

    def write_kv(self, shape: AttentionShape, pool: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write `key` and `value` [1, kv_heads, tokens, head_dim] into the pool.

        `slots` is int64 [tokens]: block * block_tokens + offset.
        """
        self._function(_part_of(key, pool), "tandem_write_kv")(
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
        self._function(_part_of(query, pool), "tandem_attention")(
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
        size = self._of_kind("tandem_packed_bytes", kind)
        padded: Tensor | None = None
        if scales is not None:
            padded = torch.zeros(-(-n // PANEL) * PANEL)
            padded[:n] = scales
        return PackedMatrix(n, k, self._arena.take(size(n, k)), kind, padded)


def _part_of(computed: Tensor, pool: Tensor) -> Part:
    """Return the attention library for the pool: quantised KV is bytes."""
    return attention_part(computed.dtype, pool.dtype is torch.uint8)


def attention_shape(layout: KvLayout, heads: int) -> AttentionShape:
    """Return the parameters of attention that stay the same from call to call."""
    return AttentionShape(
        heads=heads,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        layers=layout.layers,
    )
