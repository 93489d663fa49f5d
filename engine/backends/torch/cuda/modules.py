"""Replaces a model's norms, gated MLPs, query-key-value projections and rotary embedding by fused kernels.

A decode of an 8 B model reads its weights in about 5 ms; the thousand small kernels that transformers starts for it
take half as long again. A module is replaced only where a check on random input gives the same result, as on the CPU
(`native/modules.py`). An unknown module stays as transformers made it.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

ROTARY = "apply_rotary_pos_emb"
"""Name in transformers of the rotary embedding of queries and keys, in each model's own module."""
TOLERANCE = 0.03
"""Largest difference of a replaced module, relative to its largest output: bfloat16 has 8 bits, and sums differ."""


class FusedRmsNorm(nn.Module):
    """RMS norm, weight * x / rms(x) of the last dimension."""

    def __init__(self, flashinfer: Any, norm: nn.Module) -> None:
        super().__init__()
        weight, epsilon = norm.weight, norm.variance_epsilon
        assert isinstance(weight, Tensor)
        self._flashinfer = flashinfer
        self._weight, self._epsilon = weight.data, float(epsilon)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        normed: Tensor = self._flashinfer.rmsnorm(rows, self._weight, self._epsilon)
        return normed.view(x.shape)


class FusedGatedMlp(nn.Module):
    """Gated MLP, down(silu(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, flashinfer: Any, mlp: nn.Module) -> None:
        super().__init__()
        gate, up, self._down = (getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
        joined = join_layers([gate, up])
        assert joined is not None
        self._flashinfer, self._gate_up = flashinfer, joined

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._down(self._flashinfer.silu_and_mul(self._gate_up(x)))
        return out


class SharedProduct:
    """Product of several linear layers that share an input.

    It is computed at the first layer's call and dropped after the last's: the layers are called in order, with one
    tensor.
    """

    def __init__(self, joined: nn.Module, sizes: list[int]) -> None:
        self.joined = joined
        self._sizes = sizes
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def part(self, x: Tensor, number: int) -> Tensor:
        """Return the output of layer `number`, a view with the rows of the whole product."""
        if x is not self._input:
            self._input, self._outputs = x, torch.split(self.joined(x), self._sizes, dim=-1)
        output = self._outputs[number]
        if number == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return output


class ProductPart(nn.Module):
    """Replacement of one layer of a shared product."""

    def __init__(self, product: SharedProduct, number: int) -> None:
        super().__init__()
        self._product, self._number = product, number

    def forward(self, x: Tensor) -> Tensor:
        return self._product.part(x, self._number)


@dataclass(frozen=True, slots=True)
class Fused:
    """Counts of the modules that `fuse` replaced."""

    norms: int
    mlps: int
    projections: int
    rotary: bool


@torch.inference_mode()
def fuse(model: nn.Module, flashinfer: Any) -> Fused:
    """Replace the known modules in place; the replaced weights are freed one by one."""
    fused = Fused(
        norms=_replace(model, _is_rms_norm, functools.partial(FusedRmsNorm, flashinfer), _width_of_norm),
        mlps=_replace(model, _is_gated_mlp, functools.partial(FusedGatedMlp, flashinfer), _width_of_mlp),
        projections=_share_projections(model),
        rotary=_replace_rotary(model, flashinfer),
    )
    log.info("fused %d norms, %d MLPs, %d projections; rotary: %s", *_values(fused))
    return fused


def _values(fused: Fused) -> tuple[int, int, int, bool]:
    return fused.norms, fused.mlps, fused.projections, fused.rotary


def _replace(
    model: nn.Module,
    recognised: Callable[[nn.Module], bool],
    make: Callable[[nn.Module], nn.Module],
    width: Callable[[nn.Module], tuple[int, Tensor]],
) -> int:
    """Replace the recognised modules whose replacement computes the same.

    `width` gives a module's input size and one of its weights.
    """
    agrees: dict[type[nn.Module], bool] = {}
    count = 0
    for parent, name, module in _children(model):
        kind = type(module)
        if agrees.get(kind) is False or not recognised(module):
            continue
        replacement = make(module)
        if kind not in agrees:
            agrees[kind] = _same(module, replacement, *width(module))
        if agrees[kind]:
            setattr(parent, name, replacement)
            count += 1
    return count


def _same(module: nn.Module, replacement: nn.Module, width: int, weight: Tensor) -> bool:
    """Return whether both compute the same.

    A kernel that fails to compile or refuses the shape counts as different.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, width, generator=generator).to(weight.dtype).to(weight.device)
    try:
        wanted, got = module(x).float(), replacement(x).float()
    except (RuntimeError, ValueError, TypeError) as error:
        log.warning("%s is not fused: %s", type(module).__name__, error)
        return False
    same = bool((wanted - got).abs().max() <= TOLERANCE * wanted.abs().max())
    if not same:
        log.info("%s is not fused: the kernel computes another function", type(module).__name__)
    return same


def _is_rms_norm(module: nn.Module) -> bool:
    named = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    return named and isinstance(getattr(module, "weight", None), Tensor)


def _width_of_norm(norm: nn.Module) -> tuple[int, Tensor]:
    assert isinstance(norm.weight, Tensor)
    return norm.weight.shape[-1], norm.weight


def _is_gated_mlp(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_children()}
    if not {"gate_proj", "up_proj", "down_proj"} <= names or names - {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    gate, up, down = (getattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    return all(is_linear(part) and part.bias is None for part in (gate, up, down)) and can_join([gate, up])


def _width_of_mlp(mlp: nn.Module) -> tuple[int, Tensor]:
    """Return the MLP's input size and a tensor with the layer's dtype and device."""
    gate: Any = mlp.gate_proj
    return gate.in_features, gate.weight


def _share_projections(model: nn.Module) -> int:
    """Share the product of q, k and v in each attention; the result is exact, so it is not compared."""
    count = 0
    for module in list(model.modules()):
        names = ("q_proj", "k_proj", "v_proj")
        layers = [layer for name in names if is_linear(layer := getattr(module, name, None))]
        if len(layers) < len(names) or (joined := join_layers(layers)) is None:
            continue
        product = SharedProduct(joined, [layer.out_features for layer in layers])
        for number, name in enumerate(names):
            setattr(module, name, ProductPart(product, number))
        count += 1
    return count


def is_linear(layer: object) -> TypeGuard[nn.Linear]:
    """Return whether the layer is a plain linear layer.

    A layer whose weight is a tensor of another class (torchao's, say) only looks like a plain one. Replacements by
    transformers or others may compute something else.
    """
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and layer.weight.is_floating_point()


def can_join(layers: Sequence[nn.Linear]) -> bool:
    """Return whether one product can give all outputs: the layers agree in input size, bias and dtype."""
    return len({(each.in_features, each.bias is None, each.weight.dtype) for each in layers}) == 1


def join_layers(layers: Sequence[nn.Linear]) -> nn.Linear | None:
    """Return one layer with the outputs of all; None where the layers cannot be joined."""
    if not can_join(layers):
        return None
    plain = nn.Linear(1, 1, device="meta")
    plain.in_features, plain.out_features = layers[0].in_features, sum(each.out_features for each in layers)
    plain.weight = nn.Parameter(torch.cat([each.weight.data for each in layers]), requires_grad=False)
    biases = [each.bias.data for each in layers if each.bias is not None]
    plain.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None  # type: ignore[assignment]
    return plain


class FusedRotary:
    """Replacement of a model's `apply_rotary_pos_emb`, which rotates queries and keys in place in one kernel."""

    handles_cuda = True

    def __init__(self, flashinfer: Any, function: Callable[..., Any]) -> None:
        self.original = function
        self._flashinfer = flashinfer
        self._cos: Tensor | None = None
        self._table = self._rows = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: object, **others: object) -> Any:
        if args or others or not _rotatable(q, cos) or not _rotatable(k, cos):
            return self.original(q, k, cos, sin, *args, **others)
        self.rotate(q, k, cos, sin)
        return q, k

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate `q` and `k` [1, heads, tokens, head_dim] in place.

        `cos` and `sin` are [1, tokens, head_dim], with equal halves.
        """
        if cos is not self._cos:  # the same for all layers of a forward
            half = cos.shape[-1] // 2
            self._cos = cos
            self._table = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).float()
            self._rows = torch.arange(cos.shape[1], device=cos.device)
        flat = [heads[0].transpose(0, 1).flatten(1) for heads in (q, k)]  # views, as `_rotatable` ensured
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            self._rows, *flat, q.shape[-1], self._table, is_neox=True
        )


def _rotatable(heads: Tensor, cos: Tensor) -> bool:
    """Return whether the fused kernel can rotate the heads.

    The heads are [1, heads, tokens, head_dim] on a GPU, all dimensions are rotated, and each token's heads are
    adjacent.
    """
    if not heads.is_cuda or heads.dtype not in (torch.float16, torch.bfloat16) or heads.dim() != 4:
        return False
    head_dim = heads.shape[-1]
    side_by_side = heads.stride(-1) == 1 and heads.stride(1) == head_dim
    return heads.shape[0] == cos.shape[0] == 1 and cos.dim() == 3 and cos.shape[-1] == head_dim and side_by_side


def _replace_rotary(model: nn.Module, flashinfer: Any) -> bool:
    homes = {type(module).__module__ for module in model.modules() if hasattr(module, "layer_idx")}
    if len(homes) != 1 or not callable(function := getattr(sys.modules[home := homes.pop()], ROTARY, None)):
        return False
    if getattr(function, "handles_cuda", False):
        return True
    fused = FusedRotary(flashinfer, function)
    if not _same_rotary(model, fused):
        return False
    setattr(sys.modules[home], ROTARY, fused)
    return True


def _same_rotary(model: nn.Module, fused: FusedRotary) -> bool:
    """Check with float16 heads of 64, whatever the model's heads are: the rule is the same for all."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)

    def heads(count: int) -> Tensor:
        tokens_first = torch.randn(1, 3, count, 64, generator=generator).to(torch.float16).to(device)
        return tokens_first.transpose(1, 2)

    q, k = heads(4), heads(2)
    angles = torch.randn(1, 3, 32, generator=generator).repeat(1, 1, 2).to(device)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    try:
        wanted = fused.original(q.clone(), k.clone(), cos, sin)
        fused.rotate(q, k, cos, sin)
    except (RuntimeError, ValueError, TypeError) as error:
        log.warning("the rotary embedding is not fused: %s", error)
        return False
    return all(torch.allclose(a, b, atol=1e-2) for a, b in zip(wanted, (q, k), strict=True))


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield (parent, name, child) of every module but the model itself."""
    yield from [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
