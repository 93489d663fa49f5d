"""Linear layers whose weights are quantised; their `forward` is the reference for the kernels.

What is quantised at load is weight-only and symmetric. int8: row i of the matrix is `values[i] * scales[i]`, the scale
the row's largest magnitude over 127. int4: each GROUP of a row has a scale, and its element of the largest magnitude is
the lowest value, -8. So every value is exact in bfloat16, and the only rounding is that of the weight to its nearest
multiple. What was saved quantised (`packed.py`) may have groups of other sizes, zero points, and its inputs in another
order. fp8: float8 values with a scale for each row, of weights and of activations, for GPUs only.
"""

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.backends.torch.memory import forget_file_pages
from engine.errors import EngineStartError
from engine.model.quantization import Weights

log = logging.getLogger(__name__)

LARGEST = 127
LOWEST_INT4, HIGHEST_INT4 = -8, 7
GROUP = 32
"""Inputs that share a scale of int4 weights; the kernels have the same number."""
FLOAT8_MAX = 448.0
"""The largest float8_e4m3fn."""
FLOAT8_SMALLEST_SCALE = 1e-12
"""That a row of zeros has."""
ROWS_AT_ONCE = 4096
"""Of a matrix that is quantised or multiplied: what it takes in float32 is as large as these."""
MIN_SHARE = 0.5
"""Of a model's weights, without its embeddings, that must be in linear layers: else little would be gained by it."""


class QuantisedLinear(nn.Module):
    """[..., in_features] to [..., out_features], computed in float32 and rounded to the input's dtype."""

    values: Tensor
    """int8 [out_features, in_features], from -127 to 127, or from -8 to 7, two of which the kernels pack in a byte; or
    float8_e4m3fn, as it was saved."""
    scales: Tensor
    """float32 [out_features], or a floating-point [out_features, groups]: in bfloat16, with GROUP inputs in a group,
    where it was quantised here."""
    zeros: Tensor | None
    """int8 [out_features, groups], what is taken off the values of each group first; None: nothing."""
    order: Tensor | None
    """int64 [in_features]: which input each column is of; None: that of its number."""

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        bits: int = 8,
        zeros: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.dtype = dtype
        """Of the layer that this was, and so of what it is given."""
        self.bits = bits
        self.bias = bias
        for name, buffer in (("values", values), ("scales", scales), ("zeros", zeros), ("order", order)):
            self.register_buffer(name, buffer, persistent=False)

    @classmethod
    def of(cls, layer: nn.Linear, kind: Weights = "int8", device: torch.device | None = None) -> "QuantisedLinear":
        """int4 only where the inputs can be divided into groups. On `device`, to which the weights are moved first."""
        grouped = kind == "int4" and layer.in_features % GROUP == 0
        weight = layer.weight.data if device is None else layer.weight.data.to(device)
        values, scales = (quantise_groups if grouped else quantise)(weight)
        bias = None if layer.bias is None else layer.bias.data.clone().to(weight.device)
        return cls(values, scales, bias, layer.weight.dtype, bits=4 if grouped else 8)

    @property
    def grouped(self) -> bool:
        """A scale for each group of inputs, and not for all."""
        return self.scales.dim() == 2

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.in_features // self.scales.shape[1] if self.grouped else self.in_features

    @property
    def made_here(self) -> bool:
        """int8 or int4 as `quantise` and `quantise_groups` make them, which is what the CPU's kernels know."""
        if self.zeros is not None or self.order is not None or self.values.dtype is not torch.int8:
            return False
        return not self.grouped or (self.bits, self.group, self.scales.dtype) == (4, GROUP, torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide if self.order is None else wide[..., self.order]
        parts = [
            linear(wide, self._rows(slice(first, first + ROWS_AT_ONCE)))
            for first in range(0, self.out_features, ROWS_AT_ONCE)
        ]
        out = torch.cat(parts, -1)
        out = out if self.grouped else out * self.scales
        return (out if self.bias is None else out + self.bias.float()).to(x.dtype)

    def dequantised(self) -> nn.Linear:
        """Its weights rounded to its dtype."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=self.values.device)
        for first in range(0, self.out_features, ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            wide = self._rows(rows) if self.grouped else self._rows(rows) * self.scales[rows, None]
            if self.order is None:
                weight[rows] = wide.to(self.dtype)
            else:
                weight[rows, self.order] = wide.to(self.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.bias = None if self.bias is None else nn.Parameter(self.bias, requires_grad=False)  # type: ignore[assignment]
        return layer

    def _rows(self, rows: slice) -> Tensor:
        """float32 [rows, in_features], without the scale where there is one for the whole row."""
        values = self.values[rows].float()
        if not self.grouped:
            return values
        groups = values.view(len(values), -1, self.group)
        if self.zeros is not None:
            groups = groups - self.zeros[rows].float()[..., None]
        return (groups * self.scales[rows].float()[..., None]).flatten(-2)


def quantise(weights: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] of any float dtype to values int8 [n, k] and scales float32 [n]."""
    values = torch.empty(weights.shape, dtype=torch.int8, device=weights.device)
    scales = torch.empty(weights.shape[0], device=weights.device)
    largest = torch.tensor(float(LARGEST), device=weights.device)  # by a number GPUs do not divide, but multiply
    for first in range(0, len(weights), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        wide = weights[rows].float()
        scale = wide.abs().amax(-1) / largest
        scales[rows] = scale = torch.where(scale > 0, scale, 1.0)
        values[rows] = (wide / scale[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return values, scales


def quantise_groups(weights: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] of any float dtype to values int8 [n, k] and scales bfloat16 [n, k / GROUP]."""
    n, k = weights.shape
    values = torch.empty(n, k, dtype=torch.int8, device=weights.device)
    scales = torch.empty(n, k // GROUP, dtype=torch.bfloat16, device=weights.device)
    for first in range(0, n, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        groups = weights[rows].float().reshape(-1, k // GROUP, GROUP)
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
        scale = (extreme / LOWEST_INT4).bfloat16()
        scales[rows] = scale = torch.where(scale == 0, 1.0, scale)
        nearest = (groups / scale.float()[..., None]).round_().clamp_(LOWEST_INT4, HIGHEST_INT4)
        values[rows] = nearest.flatten(-2).to(torch.int8)
    return values, scales


def float8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] of any float dtype to float8_e4m3fn [n, k] and scales float32 [n]: row i is `values[i] * scales[i]`, its
    largest magnitude the largest float8. Weights are made so, and it is the reference of what activations become."""
    values = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(rows.shape[0], device=rows.device)
    largest = torch.tensor(FLOAT8_MAX, device=rows.device)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        wide = rows[part].float()
        scales[part] = scale = (wide.abs().amax(-1) / largest).clamp_(min=FLOAT8_SMALLEST_SCALE)
        values[part] = (wide / scale[:, None]).clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    return values, scales


def float8_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """In float32, of x [m, k] and float8 weights [n, k] with the scales [n]: the reference of `Float8Linear`."""
    rows, row_scales = float8_rows(x)
    return linear(rows.float(), values.float()) * row_scales[:, None] * scales


@torch.inference_mode()
def quantise_linears(
    model: nn.Module, kind: Weights, make: Callable[[nn.Linear, Weights], nn.Module] = QuantisedLinear.of
) -> None:
    """Replace the linear layers of a model on the CPU, one after the other, by what `make` makes of each and a kind, so
    that both kinds of weights are never there at once. Embeddings stay, also one that shared its matrix with the output
    layer. Where others get int4 or fp8, the output layer gets int8: it says what comes next with no layer after it to
    mend an error. Raises EngineStartError."""
    if kind == "auto":
        return
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and type(child.weight) is nn.Parameter
    ]
    _refuse_little_gain(model, kind, [layer for *_, layer in layers])
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    kinds = Counter[str]()
    for parent, name, layer in layers:
        own_kind: Weights = "int8" if layer is output else kind
        made = make(layer, own_kind)
        setattr(parent, name, made)
        kinds[f"{type(made).__name__} for {own_kind}"] += 1
        if made is not layer and layer.weight is not embedding.weight:
            forget_file_pages(layer.weight.data)
    log.info("linear layers: %s", ", ".join(f"{count} {kind}" for kind, count in kinds.items()))


def _refuse_little_gain(model: nn.Module, kind: Weights, layers: list[nn.Linear]) -> None:
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    total = sum(weight.numel() for weight in model.parameters() if id(weight) not in embeddings)
    gained = sum(layer.weight.numel() for layer in layers if id(layer.weight) not in embeddings)
    if gained < MIN_SHARE * total:
        share = f"{100 * gained / total:.0f} % of this model's weights"
        raise EngineStartError("weights", f"{kind} is of linear layers, which hold only {share}")
