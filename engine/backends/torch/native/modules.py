"""Replaces a model's linear layers, MLPs and norms by the CPU kernels.

A module is replaced only if it does what the kernel does. Its type decides, and for a module known by its shape alone,
a comparison on random input. An unknown module stays as transformers made it.
"""

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from engine.backends.torch.memory import forget_file_pages
from engine.backends.torch.native.kernels import TYPES, Kernels, PackedMatrix

log = logging.getLogger(__name__)

ROTARY = "apply_rotary_pos_emb"
"""Name in transformers of the rotary embedding of queries and keys, in each model's own module."""
TOLERANCE = 0.02
"""Largest difference of a replaced module, relative to its largest output: bfloat16 has 8 bits."""


class LastRows:
    """Rows of the flattened batch, in order, that are read after the last layer's attention; None: all.

    The last layer computes only these rows after attention. It still computes the keys and values of all rows.
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None

    def only(self, x: Tensor, compute: Callable[[Tensor], Tensor], width: int) -> Tensor:
        """Run `compute` on the needed rows of x [1, tokens, k].

        Returns [1, tokens, width] with zeros in the other rows.
        """
        if self.rows is None or self.rows.numel() == x.shape[1]:
            return compute(x)
        out = x.new_zeros(1, x.shape[1], width)
        if self.rows.numel():
            out[:, self.rows] = compute(x[:, self.rows])
        return out


class PackedLinear(nn.Module):
    """Linear layer over packed weights: bfloat16 [..., k] to [..., n]."""

    def __init__(self, kernels: Kernels, packed: PackedMatrix, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = packed
        self.bias = bias
        self.last_rows: LastRows | None = None
        self._kernels = kernels

    @classmethod
    def of(cls, kernels: Kernels, linear: nn.Linear) -> "PackedLinear":
        """Pack the weights of a layer, which must not be used after this."""
        return cls(kernels, kernels.pack(linear.weight.data), None if linear.bias is None else linear.bias.data)

    def forward(self, x: Tensor) -> Tensor:
        if self.last_rows is not None:
            return self.last_rows.only(x, self._compute, self.packed.n)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x.contiguous(), self.packed, self.bias)


class PackedEmbedding(nn.Module):
    """Token embedding read from the packed output layer, where the two share one matrix."""

    def __init__(self, kernels: Kernels, packed: PackedMatrix) -> None:
        super().__init__()
        self._kernels = kernels
        self._packed = packed

    def forward(self, token_ids: Tensor) -> Tensor:
        return self._kernels.embed(token_ids.contiguous(), self._packed)


class PackedGatedMlp(nn.Module):
    """Gated MLP, down(silu(gate(x)) * up(x))."""

    def __init__(self, kernels: Kernels, mlp: nn.Module) -> None:
        super().__init__()
        gate, up, down = (_linear(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
        self.gated = kernels.pack_gated(gate.weight.data, up.weight.data)
        self.down = kernels.pack(down.weight.data)
        self.last_rows: LastRows | None = None
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        if self.last_rows is not None:
            return self.last_rows.only(x, self._compute, self.down.n)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        return self._kernels.linear(self._kernels.gated(x.contiguous(), self.gated), self.down, None)


class NativeRmsNorm(nn.Module):
    """RMS norm, weight * x / rms(x) of the last dimension."""

    def __init__(self, kernels: Kernels, norm: nn.Module) -> None:
        super().__init__()
        weight, epsilon = norm.weight, norm.variance_epsilon
        assert isinstance(weight, Tensor)
        self._weight, self._epsilon = weight.data, float(epsilon)  # type: ignore[arg-type]
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x.contiguous(), self._weight, self._epsilon)


@dataclass(frozen=True, slots=True)
class Replaced:
    """Counts of the modules that `use_kernels` replaced."""

    linears: int
    mlps: int
    norms: int
    rotary: bool
    last_rows: LastRows | None
    """Rows to compute, set when the last layer computes only the rows that are read."""


@torch.inference_mode()
def use_kernels(model: nn.Module, kernels: Kernels) -> Replaced:
    """Replace the known modules in place; the replaced weights are freed one by one."""
    norms = _replace_norms(model, kernels)
    mlps = _replace_mlps(model, kernels)
    linears = _replace_linears(model, kernels)
    rotary = _replace_rotary(model, kernels)
    if linears:
        _leave_file(model)
    log.info("CPU kernels serve %d linear layers, %d MLPs and %d norms", linears, mlps, norms)
    return Replaced(linears, mlps, norms, rotary, _trim_last_layer(model) if linears else None)


def _leave_file(model: nn.Module) -> None:
    """Copy the remaining weights to memory of their own, otherwise they keep the whole file of weights mapped."""
    for tensor in [*model.parameters(), *model.buffers()]:
        mapped = tensor.data
        tensor.data = mapped.clone()
        forget_file_pages(mapped)


def _replace_norms(model: nn.Module, kernels: Kernels) -> int:
    agrees: dict[type[nn.Module], bool] = {}
    count = 0
    for parent, name, module in _children(model):
        weight = getattr(module, "weight", None)
        if not (type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")):
            continue
        if not isinstance(weight, Tensor) or weight.dtype not in (torch.float32, torch.bfloat16):
            continue
        native = NativeRmsNorm(kernels, module)
        if _same(agrees, module, native, weight.shape[-1], weight.dtype):
            setattr(parent, name, native)
            count += 1
    return count


def _replace_mlps(model: nn.Module, kernels: Kernels) -> int:
    agrees: dict[type[nn.Module], bool] = {}
    count = 0
    for parent, name, module in _children(model):
        if not _is_gated_mlp(module) or agrees.get(type(module)) is False:
            continue
        gate = _linear(module, "gate_proj")
        native = PackedGatedMlp(kernels, module)
        if _same(agrees, module, native, gate.in_features, torch.bfloat16):
            setattr(parent, name, native)
            count += 1
    return count


def _is_gated_mlp(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_children()}
    if not {"gate_proj", "up_proj", "down_proj"} <= names or names - {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    parts = [getattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(_can_pack(part) and part.bias is None for part in parts) and parts[0].out_features % 32 == 0


def _can_pack(module: object) -> TypeGuard[nn.Linear]:
    """Return whether the module is exactly a linear layer of bfloat16: subclasses may compute something else."""
    return type(module) is nn.Linear and module.weight.dtype is torch.bfloat16 and module.in_features % 2 == 0


def _replace_linears(model: nn.Module, kernels: Kernels) -> int:
    """Replace the linear layers, the output layer last, since the embedding may be the same matrix."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    count = 0
    for parent, name, module in _children(model):
        if not _can_pack(module):
            continue
        native = PackedLinear.of(kernels, module)
        shares = module.weight is getattr(embedding, "weight", None)
        if shares and type(embedding) is nn.Embedding and embedding.padding_idx is None:
            model.set_input_embeddings(PackedEmbedding(kernels, native.packed))  # type: ignore[operator]
        setattr(parent, name, native)
        count += 1
    return count


def _replace_rotary(model: nn.Module, kernels: Kernels) -> bool:
    """Replace the rotary embedding, a function of the module that defines the model's attention."""
    homes = {type(module).__module__ for module in model.modules() if hasattr(module, "layer_idx")}
    original = {home: getattr(sys.modules[home], ROTARY, None) for home in homes}
    if len(homes) != 1 or not callable(function := original[home := homes.pop()]):
        return False
    function = getattr(function, "original", function)

    @functools.wraps(function)
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: object, **others: object) -> Any:
        plain = (
            q.is_cpu and not args and not others and q.dim() == 4 and q.shape[0] == 1 and cos.shape[-1] == q.shape[-1]
        )
        if not plain or q.dtype not in TYPES or cos.dtype != q.dtype or q.stride(-1) != 1 or k.stride(-1) != 1:
            return function(q, k, cos, sin, *args, **others)
        cos, sin = cos.contiguous(), sin.contiguous()
        kernels.rotate(q, cos, sin)
        kernels.rotate(k, cos, sin)
        return q, k

    rotary.original = function  # type: ignore[attr-defined]
    if not _same_rotary(function, rotary):
        return False
    setattr(sys.modules[home], ROTARY, rotary)
    return True


def _same_rotary(function: Callable[..., Any], native: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(1, heads, 3, 32, generator=generator) for heads in (4, 2, 1, 1))
    try:
        wanted = function(q, k, cos[0], sin[0])
        got = native(q.clone(), k.clone(), cos[0], sin[0])
    except (TypeError, ValueError, RuntimeError):
        return False
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(wanted, got, strict=True))


def _trim_last_layer(model: nn.Module) -> LastRows | None:
    """Let the last layer skip rows, if that changes nothing for the other rows."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return None
    last_rows = LastRows()
    trimmed = [
        module
        for name, module in layers[-1].named_modules()
        if isinstance(module, PackedLinear | PackedGatedMlp) and name.rsplit(".")[-1] not in ("k_proj", "v_proj")
    ]
    if {type(module) for module in trimmed} != {PackedLinear, PackedGatedMlp}:
        return None  # for example a mixture of experts, which sorts its rows by expert
    for module in trimmed:
        module.last_rows = last_rows
    return last_rows


def _same(
    agrees: dict[type[nn.Module], bool], module: nn.Module, native: nn.Module, width: int, dtype: torch.dtype
) -> bool:
    """Return whether both compute the same; compared once for each type."""
    if type(module) not in agrees:
        x = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        wanted, got = module(x).float(), native(x).float()
        agrees[type(module)] = bool((wanted - got).abs().max() <= TOLERANCE * wanted.abs().max())
        if not agrees[type(module)]:
            log.info("%s is not replaced: the kernel computes another function", type(module).__name__)
    return agrees[type(module)]


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return (parent, name, child) of every module but the model itself."""
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]


def _linear(module: nn.Module, name: str) -> nn.Linear:
    linear = getattr(module, name)
    assert isinstance(linear, nn.Linear)
    return linear
